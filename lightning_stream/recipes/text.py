"""Text as streamed blocks of tokens: tokenised once, documents packed end to end, their numbers kept."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any, Protocol

import xxhash

from lightning_stream.errors import FormatError
from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.recipes.converted_set import TRAIN, VAL, Made, convert_once, describe, split_datasets, tell
from lightning_stream.recipes.documents import GENERATED, TextSource, text_source
from lightning_stream.recipes.task import TaskData
from lightning_stream.recipes.tokens import BYTES, Packer, Tokenizer, make_tokenizer, token_dtype
from lightning_stream.storage import open_store
from lightning_stream.writer import MDSWriter

DESCRIPTION = "text.json"
_VERSION = 1


@dataclass(frozen=True)
class TextConfig:
    """How shards are made, and how much is held out.

    Attributes:
        block: Tokens of a sample.
        held_out: Share of the documents that goes into the val set, where the source does not say which.
        compression, hashes, size_limit: As in `MDSWriter`.
    """

    block: int = 128
    held_out: float = 0.1
    compression: str | None = "zstd"
    hashes: tuple[str, ...] = ("xxh3_64",)
    size_limit: int | str = "512kb"


@dataclass(frozen=True)
class TextDescription:
    """What a converted set holds, as kept beside it.

    Attributes:
        title: Where the text is from.
        tokenizer: Fingerprint of the tokenizer.
        vocabulary: Its size.
        block: Tokens of a sample.
        documents, tokens, blocks: How many, by split; boundaries are tokens, padding is not.
    """

    title: str
    tokenizer: str
    vocabulary: int
    block: int
    documents: Mapping[str, int]
    tokens: Mapping[str, int]
    blocks: Mapping[str, int]

    @classmethod
    def from_bytes(cls, data: bytes) -> TextDescription:
        """Read it back."""
        return cls(**json.loads(data))

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), indent=1).encode()


@dataclass(frozen=True)
class TextConversion:
    """Text under a tokenizer and a config: where its shards belong, and how they come to be there.

    Attributes:
        source: The documents; None where the shards are there already.
        tokenizer: Makes tokens of them.
        config: How to convert.
        place: Folder or URL of this very set.
    """

    source: TextSource | None
    tokenizer: Tokenizer
    config: TextConfig
    place: str

    @classmethod
    def plan(cls, source: TextSource | None, tokenizer: Tokenizer, remote: str, config: TextConfig) -> TextConversion:
        """The conversion into a place of its own under `remote`; without a source, `remote` is the place."""
        if source is None:
            return cls(None, tokenizer, config, remote.rstrip("/"))
        settings = [_VERSION, source.fingerprint(), tokenizer.fingerprint, asdict(config)]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        return cls(source, tokenizer, config, f"{remote.rstrip('/')}/{digest}")

    def describe(self) -> TextDescription | None:
        """What the converted set holds; None where there is none yet."""
        return describe(self.place, DESCRIPTION, TextDescription.from_bytes)

    def run(self) -> Made[TextDescription]:
        """Convert, unless it was done.

        Raises:
            FormatError: A split has no text; or there are no shards and no source; or the shards hold the tokens of
                another tokenizer.
        """
        done = convert_once(self.place, self.describe, self._convert)
        if (made_by := done.description.tokenizer) != self.tokenizer.fingerprint:
            raise FormatError(
                f"tokens are read with the tokenizer that made them: {made_by}, says {self.place}; "
                f"found {self.tokenizer.fingerprint}. Set data.tokenizer and data.boundary to that one."
            )
        return done

    def _convert(self, place: str) -> TextDescription:
        if self.source is None:
            raise FormatError(
                f"without data.source, data.remote holds a converted set; there is none at {place}. Set data.source to "
                "the text, or data.remote to the folder that an earlier run named."
            )
        counts = {name: {TRAIN: 0, VAL: 0} for name in ("documents", "tokens", "blocks")}
        with ExitStack() as stack:
            writers = {split: stack.enter_context(self._writer(f"{place}/{split}")) for split in (TRAIN, VAL)}
            packers = {split: self._packer() for split in (TRAIN, VAL)}
            for number, (split, text) in enumerate(self._documents()):
                tokens = self.tokenizer.encode(text)
                counts["documents"][split] += 1
                counts["tokens"][split] += len(tokens) + 1
                for block in packers[split].add(tokens, number):
                    writers[split].write(block._asdict())
                    counts["blocks"][split] += 1
            for split, packer in packers.items():
                for block in packer.rest():
                    writers[split].write(block._asdict())
                    counts["blocks"][split] += 1
                if not counts["blocks"][split]:
                    raise FormatError(f"a {split} set needs text; {self.source.title} gives it none.")
        done = TextDescription(
            self.source.title, self.tokenizer.fingerprint, self.tokenizer.vocabulary, self.config.block, **counts
        )
        open_store(place).put(DESCRIPTION, done.to_bytes())
        return done

    def _documents(self) -> Iterator[tuple[str, str]]:
        """All documents with their split: as the source says, or by a hash of the text; a single one is cut in two."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        assert self.source is not None
        shown: Any = tqdm(desc="tokenising", unit=" documents", file=sys.stderr, disable=None)
        with shown:
            for split, text in self._split_documents(self.source):
                shown.update()
                yield split, text

    def _split_documents(self, source: TextSource) -> Iterator[tuple[str, str]]:
        texts = source.documents(TRAIN)
        if source.has_val:
            yield from ((TRAIN, text) for text in texts)
            yield from ((VAL, text) for text in source.documents(VAL))
            return
        first_two = list(islice(texts, 2))
        if len(first_two) == 1:
            text = first_two[0]
            kept = int(len(text) * (1 - self.config.held_out))
            kept = text.rfind("\n", 0, kept) + 1 or kept
            yield from ((TRAIN, text[:kept]), (VAL, text[kept:]))
            return
        for text in chain(first_two, texts):
            yield (VAL if is_held_out(text, self.config.held_out) else TRAIN), text

    def _packer(self) -> Packer:
        return Packer(self.config.block, self.tokenizer.boundary, token_dtype(self.tokenizer.vocabulary))

    def _writer(self, place: str) -> MDSWriter:
        config = self.config
        dtype = token_dtype(self.tokenizer.vocabulary)
        return MDSWriter(
            out=place,
            columns={"tokens": f"ndarray:{dtype}:{config.block}", "documents": f"ndarray:int32:{config.block}"},
            compression=config.compression,
            hashes=config.hashes,
            size_limit=config.size_limit,
            exist_ok=True,  # on a URL, an attempt that was cut short may have left shards, though no index
        )


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the val set: by a hash of its text, so that equal ones are never in both."""
    return xxhash.xxh3_64_intdigest(text.encode()) / 2**64 < share


class ConvertedText(Protocol):
    """Text that becomes shards: one set, or several."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Makes its tokens."""

    @property
    def place(self) -> str:
        """Where the shards are."""

    def describe(self) -> TextDescription | None:
        """What they hold; None where there are none yet."""

    def run(self) -> Made[TextDescription]:
        """Convert, unless it was done."""


class TextData(TaskData):
    """Blocks of tokens, as batches of ``{"tokens": uint16[n, block], "documents": int32[n, block]}``.

    Args:
        conversion: Makes the shards that `train` and `val` read.
        datasets: Arguments of the ``train`` and ``val`` datasets.
        **settings: As in `TaskData`.
    """

    token_column = "tokens"

    def __init__(self, conversion: ConvertedText, datasets: Mapping[str, Mapping[str, Any]], **settings: Any) -> None:
        super().__init__(datasets, self._convert, **settings)
        self.conversion = conversion

    @property
    def description(self) -> TextDescription:
        """What the converted set holds; converts it first where that was not done."""
        return self.conversion.run().description

    @property
    def tokenizer(self) -> Tokenizer:
        """Of these tokens."""
        return self.conversion.tokenizer

    @property
    def place(self) -> str:
        """Folder or URL of the shards."""
        return self.conversion.place

    def notes(self, history: Mapping[int, Mapping[str, float]]) -> tuple[str, ...]:
        """How much text it was, and how well the held-out part is foretold."""
        held = self.description
        size = f"{held.tokens[TRAIN]} tokens of {held.documents[TRAIN]} documents in blocks of {held.block}"
        told = [f"Learnt from {size}, held out {held.tokens[VAL]} tokens. It is {held.title}."]
        measured = [values for _, values in sorted(history.items()) if "val/perplexity" in values]
        if measured:
            told.append(
                f"Of the held-out tokens {measured[-1]['val/accuracy']:.1%} are foretold; perplexity "
                f"{measured[-1]['val/perplexity']:.2f} of {held.vocabulary} tokens."
            )
        return tuple(told)

    def _convert(self) -> None:
        done = self.conversion.run()
        held = done.description
        told = f"{held.tokens[TRAIN]} tokens to train on and {held.tokens[VAL]} held out, {held.title}"
        tell(told, self.place, is_new=done.is_new)


def text_data(
    *,
    source: str | None = GENERATED,
    separator: str | None = None,
    text_key: str = "text",
    train_files: str | None = None,
    val_files: str | None = None,
    generated_count: int = 1000,
    generated_seed: int = 1,
    tokenizer: str = BYTES,
    boundary: str | None = None,
    block: int = 128,
    held_out: float = 0.1,
    remote: str = "runs/shards/text",
    local: str | None = "runs/cache/text",
    compression: str | None = "zstd",
    hashes: Sequence[str] | None = None,
    size_limit: int | str = "512kb",
    cache_limit: int | str | None = None,
    num_canonical_nodes: int | None = None,
    shuffle: bool = True,
    seed: int = 1,
    global_batch_size: int = 16,
    eval_batch_size: int = 32,
    num_workers: int = 1,
    persistent_workers: bool = True,
) -> TextData:
    """Streamed text: tokenised into shards under `remote`, read back through the cache in `local`.

    Args:
        source: ``"generated"`` (stories by this package), a text file, a file of JSON lines (plain, ``.gz`` or
            ``.zst``), or a folder of such; None where `remote` itself holds a converted set.
        separator: What lies between the documents of a text file, e.g. two line ends; None where each file is one.
        text_key: Of each JSON line's text.
        train_files, val_files: Patterns of files in the folder; None trains on all, and holds out a share.
        generated_count, generated_seed: How many stories, and which.
        tokenizer: ``"bytes"``, or a Hugging Face ``tokenizer.json``.
        boundary: The token that begins each document; None for a usual one.
        block: Tokens of a sample.
        held_out: Share of the documents that is never trained on, where `val_files` says nothing.
        remote: Folder or URL for the shards.
        local: Folder for the cache; None for the default one.
        compression, hashes, size_limit: Of the shards.
        cache_limit: Bytes that the cache may hold, e.g. ``"10gb"``.
        num_canonical_nodes: See `StreamingDataset`; None derives it from the global batch.
        shuffle: Whether blocks are trained on in a shuffled order.
        seed: Of the order.
        global_batch_size: Blocks of an optimizer step over all devices.
        eval_batch_size: Blocks per device in validation.
        num_workers: Processes per device that read; 0 does so between steps.
        persistent_workers: Whether they live on from epoch to epoch.
    """
    documents = None
    if source is not None:
        documents = text_source(
            source,
            count=generated_count,
            seed=generated_seed,
            separator=separator,
            key=text_key,
            train_files=train_files,
            val_files=val_files,
        )
    config = TextConfig(block, held_out, compression, hashes_to_write(hashes), size_limit)
    conversion = TextConversion.plan(documents, make_tokenizer(tokenizer, boundary), remote, config)
    datasets = split_datasets(
        conversion.place,
        local,
        shuffle=shuffle,
        seed=seed,
        cache_limit=cache_limit,
        num_canonical_nodes=num_canonical_nodes,
    )
    return TextData(
        conversion,
        datasets,
        global_batch_size=global_batch_size,
        eval_batch_size=eval_batch_size,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        seed=seed,
    )
