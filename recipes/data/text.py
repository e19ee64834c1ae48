"""Text as rows of tokens: documents are tokenized once, and packed into rows as they are streamed.

A sample is a document, ``{"tokens": uint16[n]}`` (uint32 for large vocabularies), which begins with the bos token. A
batch has rows of ``seq_len`` tokens, see `lightning_stream.Packing`.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream import Packing, Stream
from lightning_stream.convert import Inputs
from lightning_stream.errors import FormatError
from recipes.data.base import INPUTS_AT_A_TIME, SYNTHETIC, ConvertedData
from recipes.data.synthetic import story

BYTES = "bytes"


class Tokenizer:
    """Bytes of the UTF-8 text as tokens, or a Hugging Face ``tokenizer.json``; a bos token begins each document.

    Args:
        path: ``bytes``, or the file.
        bos_token: One of the file's.
    """

    def __init__(self, path: str, bos_token: str) -> None:
        self.file: Any = None
        self.vocab_size = 257
        self.bos_token = 256
        if path == BYTES:
            return
        from tokenizers import Tokenizer as File  # byte tokens do not need it

        self.file = File.from_file(str(Path(path).expanduser()))
        self.file.no_truncation()
        self.file.no_padding()
        self.vocab_size = self.file.get_vocab_size()
        number = self.file.token_to_id(bos_token)
        if number is None:
            raise ValueError(f"each document begins with data.bos_token, but {path} has no {bos_token!r}.")
        self.bos_token = number

    def document(self, text: str) -> NDArray[Any]:
        """The tokens of a document, of the smallest dtype that holds every token."""
        tokens = self.file.encode(text, add_special_tokens=False).ids if self.file else [*text.encode()]
        return np.array([self.bos_token, *tokens], self.dtype)

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class Tokenize:
    """Tokenizes the documents of a partition; `convert` calls it in its workers. `digest` is the tokenizer file's."""

    tokenizer: str
    bos_token: str
    text_key: str
    separator: str | None
    digest: str
    columns: ClassVar[Mapping[str, str]] = {}  # further columns, with a number for each token, and their encodings
    lengths: ClassVar[Mapping[str, Any]] = {"tokens": len}
    example: ClassVar = staticmethod(story)

    def __call__(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        tokenizer = Tokenizer(self.tokenizer, self.bos_token)
        for row in rows:
            text = row.get(self.text_key)
            if not isinstance(text, str):
                columns = ", ".join(sorted(row))
                raise FormatError(
                    f"each row must have text in {self.text_key!r}; found {type(text).__name__}, and it has {columns}. "
                    "Set data.text_key."
                )
            parts = [text] if self.separator is None else text.split(self.separator)
            yield from ({"tokens": tokenizer.document(part)} for part in parts if part.strip())


class TextData(ConvertedData):
    """Streams rows of packed documents; ``configs/data/text.yaml`` describes the settings."""

    def __init__(
        self, *, separator: str | None = None, text_key: str = "text", files: Mapping[str, str] | None = None,
        synthetic_count: int = 1000, tokenizer: str = BYTES, bos_token: str = "<|endoftext|>", seq_len: int = 128,
        pack_window: int | None = None, long_documents: Any = None, packing: Mapping[str, Any] | None = None,
        dataset: Mapping[str, Any] | None = None, **shared: Any,
    ) -> None:  # fmt: skip
        separator = separator and separator.replace("\\n", "\n")  # as it arrives from a command line
        path = Path(tokenizer).expanduser()
        digest = hashlib.sha256(b"" if tokenizer == BYTES else path.read_bytes()).hexdigest()[:16]
        self.tokenize = self.rule(
            tokenizer=tokenizer, bos_token=bos_token, text_key=text_key, separator=separator, digest=digest
        )  # fmt: skip
        self.files = dict(files or {})
        self.synthetic_count = synthetic_count
        settings = {**vars(self.tokenize), "files": self.files, "synthetic_count": synthetic_count}
        packing = packing or {"columns": self.tokenize.columns}
        pack = Packing(row_length=seq_len, window=pack_window, long_documents=long_documents, **packing)
        super().__init__(settings=settings, dataset={"pack": pack, **(dataset or {})}, **shared)

    def rule(self, **of_text: Any) -> Tokenize:
        """What makes tokens of the rows of a source."""
        return Tokenize(**of_text)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        path = self.tokenize.tokenizer
        try:
            return Tokenizer(path, self.tokenize.bos_token)
        except Exception as error:  # it has no class of its own
            raise ValueError(f"data.tokenizer is 'bytes' or a tokenizer.json; found {path}: {error}") from error

    def convert_source(self) -> None:
        """Write the documents of both splits; a hash of its text puts a document into one of them."""
        columns = {"tokens": f"ndarray:{self.tokenizer.dtype}", **self.tokenize.columns}
        written: dict[str, Any] = {"columns": columns, "lengths": self.tokenize.lengths}
        written["transform_partition"] = self.tokenize
        if self.source == SYNTHETIC:
            examples = Inputs(range(self.synthetic_count), self.tokenize.example)
            self.convert(examples, partition_bytes=INPUTS_AT_A_TIME, **written)
        elif self.files:
            for split, pattern in self.files.items():
                self.convert(f"{self.source}/{pattern}", split, **written)
        else:
            self.convert(self.source, **written)


class TextMixture(TextData):
    """Several texts as one stream: trained on in proportions; validation has each document of all once.

    ``configs/data/mix.yaml`` describes the settings.
    """

    def __init__(
        self, *, parts: Mapping[str, Mapping[str, Any]], remote: str, local: str, batching_method: str = "stratified",
        epoch_size: int | str | None = None, **shared: Any,
    ) -> None:  # fmt: skip
        self.parts: dict[str, TextData] = {}
        for name, settings in parts.items():
            own = {key: value for key, value in settings.items() if key != "proportion"}
            paths = {"name": name, "remote": f"{remote}/{name}", "local": f"{local}/{name}"}
            self.parts[name] = TextData(**{**shared, **own, **paths})
        self.proportions = {name: settings.get("proportion", 1.0) for name, settings in parts.items()}
        self.order = {"batching_method": batching_method, "epoch_size": epoch_size}
        super().__init__(remote=remote, local=local, **shared)

    def place(self, split: str) -> dict[str, Any]:
        """The streams of a split, in proportions for training."""
        if split != "train":
            return {"streams": [Stream(**part.place(split)) for part in self.parts.values()]}
        parts = self.parts.items()
        streams = [Stream(**part.place(split), proportion=self.proportions[name]) for name, part in parts]
        return {"streams": streams, **self.order}

    def prepare_data(self) -> None:
        for part in self.parts.values():
            part.prepare_data()
