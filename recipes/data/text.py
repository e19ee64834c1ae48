"""Text as rows of tokens: documents are tokenized once, and packed into rows as they are streamed.

A sample is a document, ``{"tokens": uint16[n]}`` (uint32 for large vocabularies), which begins with the bos token. A
batch has rows of ``seq_len`` tokens, see `lightning_stream.Packing`.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_stream import Packing, Stream, StreamingDataset
from lightning_stream.convert import Inputs
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.stores import open_store
from recipes.data.base import PARTITION, SYNTHETIC, RecipeData
from recipes.data.synthetic_text import story

BYTES = "bytes"
_BOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "<s>", "</s>", "<eos>", "[SEP]")
_TEXT_FILES = (".txt", ".text", ".md")


class ByteTokenizer:
    """Each byte of the UTF-8 text is a token."""

    vocab_size, bos_token, fingerprint = 257, 256, BYTES

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < self.bos_token).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``; `bos_token` begins each document, None for a usual token of the file."""

    def __init__(self, path: str, bos_token: str | None = None) -> None:
        from tokenizers import Tokenizer  # byte tokens do not need it

        self._tokenizer = Tokenizer.from_file(str(Path(path).expanduser()))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = int(self._tokenizer.get_vocab_size())
        names = (bos_token,) if bos_token else _BOS_TOKENS
        found = [token for name in names if (token := self._tokenizer.token_to_id(name)) is not None]
        if not found:
            raise ValueError(
                f"each document needs a bos token; {path} has none of {', '.join(names)}. Set data.bos_token."
            )
        self.bos_token = int(found[0])
        self.fingerprint = f"{hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()[:16]}-{self.bos_token}"

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode([token for token in tokens if token != self.bos_token]))


AnyTokenizer: TypeAlias = "ByteTokenizer | FileTokenizer"


@dataclass(frozen=True)
class Tokenize:
    """Tokenizes the documents of a partition; `convert` calls it in its workers.

    With a `split`, only its documents are kept: a hash of the text puts `val_fraction` of them into ``val``. A source
    that `is_single`, one document, is cut in two at a line's end. The `fingerprint` is the tokenizer's.
    """

    tokenizer: str = BYTES
    bos_token: str | None = None
    text_key: str = "text"
    separator: str | None = None
    val_fraction: float = 0.0
    split: str | None = None
    is_single: bool = False
    fingerprint: str = ""

    def load_tokenizer(self) -> AnyTokenizer:
        return ByteTokenizer() if self.tokenizer == BYTES else FileTokenizer(self.tokenizer, self.bos_token)

    def __call__(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        """Tokenize a partition."""
        tokenizer = self.load_tokenizer()
        for text in self.texts(rows):
            tokens = np.concatenate([[tokenizer.bos_token], tokenizer.encode(text)])
            yield {"tokens": tokens.astype(token_dtype(tokenizer.vocab_size))}

    def texts(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """The documents of the split."""
        for row in rows:
            text = row.get(self.text_key)
            if not isinstance(text, str):
                found = ", ".join(sorted(row))
                raise FormatError(f"each row must have text under {self.text_key!r}; found {found}. Set data.text_key.")
            parts = [text] if self.separator is None else text.split(self.separator)
            if self.is_single:
                cut = int(len(text) * (1 - self.val_fraction))
                cut = text.rfind("\n", 0, cut) + 1 or cut
                parts = [text[:cut] if self.split == "train" else text[cut:]]
            for part in parts:
                if part.strip() and (self.is_single or self.split in (None, split_of(part, self.val_fraction))):
                    yield part


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype that holds every token."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def split_of(text: str, val_fraction: float) -> str:
    """The split of a document, by a hash of its text: equal documents are never in both."""
    return "val" if xxhash.xxh3_64_intdigest(text.encode()) / 2**64 < val_fraction else "train"


def read_story(number: int, seed: int) -> list[dict[str, str]]:
    return [{"text": story(number, seed)}]


class TextData(RecipeData):
    """Streams rows of packed documents; configs/data/text.yaml describes the settings."""

    def __init__(
        self, *, separator: str | None = None, text_key: str = "text", train_files: str | None = None,
        val_files: str | None = None, synthetic_count: int = 1000, synthetic_seed: int = 1, tokenizer: str = BYTES,
        bos_token: str | None = None, seq_len: int = 128, pack_window: int | None = None, **shared: Any,
    ) -> None:  # fmt: skip
        if (train_files is None) != (val_files is None):
            raise ValueError("set both data.train_files and data.val_files, or neither; found one of them.")
        separator = separator and separator.replace("\\n", "\n")  # as it arrives from a command line
        self.tokenize = Tokenize(tokenizer, bos_token, text_key, separator)
        self.pack = Packing(row_length=seq_len, window=pack_window)
        self.files = {"train": train_files, "val": val_files}
        self.synthetic = (synthetic_count, synthetic_seed)
        settings = {**asdict(self.tokenize), **self.files, "synthetic": self.synthetic}
        super().__init__(settings=settings, dataset={"pack": self.pack}, **shared)

    @cached_property
    def tokenizer(self) -> AnyTokenizer:
        return self.tokenize.load_tokenizer()

    @property
    def title(self) -> str:
        made = "synthetic stories" if self.source == SYNTHETIC else self.source or self.uri
        return f"rows of {self.pack.row_length} tokens from {made}"

    def prepare_data(self) -> None:
        """Convert the source once; refuse a dataset of another tokenizer."""
        super().prepare_data()
        expected = {"tokenizer": self.tokenizer.fingerprint}
        found = json.loads(open_store(self.uri).read("text.json"))
        if found != expected:
            advice = "Set data.tokenizer and data.bos_token to theirs."
            raise FormatError(f"the tokens at {self.uri} were made with {found}; found {expected}. {advice}")

    def convert_source(self) -> None:
        """Write the documents of both splits."""
        fingerprint, dtype = self.tokenizer.fingerprint, token_dtype(self.tokenizer.vocab_size)
        written: dict[str, Any] = {"columns": {"tokens": f"ndarray:{dtype}"}, "lengths": {"tokens": len}}
        is_single = self.tokenize.separator is None and Path(str(self.source)).suffix in _TEXT_FILES
        fraction = self.val_fraction or 0.0
        tokenize = replace(self.tokenize, fingerprint=fingerprint, val_fraction=fraction, is_single=is_single)
        for split, pattern in self.files.items():
            of_split = replace(tokenize, split=None if pattern else split)
            try:
                source = self._files(pattern)
                size: dict[str, Any] = {"partition_bytes": PARTITION} if isinstance(source, Inputs) else {}
                self.convert(source, split, transform_partition=of_split, **written, **size)
            except ValueError as error:
                advice = "Both splits need documents: set data.separator, data.val_fraction or the patterns."
                raise FormatError(f"the {split} split cannot be written: {error} {advice}") from error
        open_store(self.uri).put("text.json", json.dumps({"tokenizer": fingerprint}).encode())

    def _files(self, pattern: str | None) -> Any:
        """What `convert` reads."""
        if self.source == SYNTHETIC:
            count, seed = self.synthetic
            return Inputs(range(count), partial(read_story, seed=seed))
        if pattern is None or "://" in str(self.source):
            return f"{self.source}/{pattern}" if pattern else self.source
        found = sorted(map(str, Path(str(self.source)).glob(pattern)))  # `[` in the folder's own name is literal
        if not found:
            raise NotFoundError(f"no files {pattern} in {self.source}. Check data.source, or the pattern.")
        return found


class TextMixture(TextData):
    """Several texts as one stream: trained on in proportions; validation has each document of all once.

    configs/data/mix.yaml describes the settings.
    """

    def __init__(
        self, *, parts: Mapping[str, Mapping[str, Any]], batching_method: str = "stratified",
        epoch_size: int | str | None = None, remote: str, local: str, **shared: Any,
    ) -> None:  # fmt: skip
        super().__init__(remote=remote, local=local, **shared)
        proportions = {name: float(part.get("proportion", 1.0)) for name, part in parts.items()}
        if not parts or min(proportions.values()) <= 0:
            raise ValueError(f"a mixture needs parts, each with a proportion above 0; found {proportions}.")
        self.parts: dict[str, TextData] = {}
        for name, part in parts.items():
            own = {key: value for key, value in part.items() if key != "proportion"}
            paths = {"remote": f"{remote}/{name}", "local": f"{local}/{name}", "name": name}
            self.parts[name] = TextData(**{**shared, **paths, **own})
        common = {"shuffle_seed": shared.get("seed", 1), "pack": self.pack}
        common |= {name: shared.get(name) for name in ("cache_limit", "num_canonical_nodes")}
        order: dict[str, Any] = {"batching_method": batching_method, "epoch_size": epoch_size}
        order |= {"shuffle": shared.get("shuffle", True), "forget": shared.get("forget")}
        self.datasets["train"] = StreamingDataset(streams=self._streams("train", proportions), **order, **common)
        self.datasets["val"] = StreamingDataset(streams=self._streams("val", {}), **common)

    def _streams(self, split: str, proportions: Mapping[str, float]) -> list[Stream]:
        found = {name: part.split(split).streams[0] for name, part in self.parts.items()}
        return [Stream(one.remote, local=one.local, proportion=proportions.get(name)) for name, one in found.items()]

    @property
    def title(self) -> str:
        return f"a mixture of {', '.join(f'{name} ({part.title})' for name, part in self.parts.items())}"

    def prepare_data(self) -> None:
        for part in self.parts.values():
            part.prepare_data()
