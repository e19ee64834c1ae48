"""Text to blocks of tokens in MDS shards, once: each file by one of several processes, the same bytes by any number."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import xxhash

from lightning_stream.convert import ConversionResult, Inputs, convert
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.recipes.converted_set import TRAIN, VAL, Made, describe
from lightning_stream.recipes.documents import TextSource
from lightning_stream.recipes.tokens import Packer, Tokenizer, token_dtype
from lightning_stream.stores import open_store

DESCRIPTION = "text.json"
_VERSION = 2


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


class Piece(NamedTuple):
    """What one process makes blocks of at a time.

    Attributes:
        number: Which piece of the split, from 0.
        of: A piece of the source.
    """

    number: int
    of: Any


@dataclass(frozen=True)
class BlocksOfPiece:
    """Blocks of one piece of the source, of the documents that belong to a split. Picklable.

    Attributes:
        source: The documents.
        tokenizer: Makes tokens of them.
        config: How to convert.
        split: The split that is written.
        place: Folder or URL of the whole set; what each piece held is noted there.
        is_one_document: Whether the whole source is one document, which is cut in two.
    """

    source: TextSource
    tokenizer: Tokenizer
    config: TextConfig
    split: str
    place: str
    is_one_document: bool

    def __call__(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The samples of a piece. Documents are numbered within it; its last block is filled up."""
        documents = tokens = 0
        packer = Packer(self.config.block, self.tokenizer.boundary, token_dtype(self.tokenizer.vocabulary))
        for text in self._texts(piece.of):
            encoded = self.tokenizer.encode(text)
            for block in packer.add(encoded, documents):
                yield block._asdict()
            documents += 1
            tokens += len(encoded) + 1
        for block in packer.rest():
            yield block._asdict()
        # Before the blocks' own receipt: where that is, this is.
        counted = json.dumps({"documents": documents, "tokens": tokens}).encode()
        open_store(self.place).put(self.note(piece.number), counted)

    def note(self, number: int) -> str:
        """The file, at `place`, that says what a piece held."""
        return f"pieces/{self.split}-{number:05}.json"

    def _texts(self, piece: Any) -> Iterator[str]:
        texts = self.source.read(piece)
        if self.source.has_val:
            return texts
        if self.is_one_document:
            return (_cut_in_two(text, self.config.held_out)[self.split] for text in texts)
        return (text for text in texts if is_held_out(text, self.config.held_out) == (self.split == VAL))


@dataclass(frozen=True)
class TextConversion:
    """Text under a tokenizer and a config: where its shards belong, and how they come to be there.

    Attributes:
        source: The documents; None where the shards are there already.
        tokenizer: Makes tokens of them.
        config: How to convert.
        place: Folder or URL of this very set.
        num_workers: Processes that convert; None for one per processor.
    """

    source: TextSource | None
    tokenizer: Tokenizer
    config: TextConfig
    place: str
    num_workers: int | None = None

    @classmethod
    def plan(
        cls,
        source: TextSource | None,
        tokenizer: Tokenizer,
        remote: str,
        config: TextConfig,
        num_workers: int | None = None,
    ) -> TextConversion:
        """The conversion into a place of its own under `remote`; without a source, `remote` is the place."""
        if source is None:
            return cls(None, tokenizer, config, remote.rstrip("/"), num_workers)
        settings = [_VERSION, source.fingerprint(), tokenizer.fingerprint, asdict(config)]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        return cls(source, tokenizer, config, f"{remote.rstrip('/')}/{digest}", num_workers)

    def describe(self) -> TextDescription | None:
        """What the converted set holds; None where there is none yet."""
        return describe(self.place, DESCRIPTION, TextDescription.from_bytes)

    def run(self) -> Made[TextDescription]:
        """Convert, unless it was done; what was cut short is gone on with.

        Raises:
            FormatError: A split has no text; or there are no shards and no source; or the shards hold the tokens of
                another tokenizer.
        """
        found = self.describe()
        done = self._convert() if found is None else Made(found, is_new=False)
        if (made_by := done.description.tokenizer) != self.tokenizer.fingerprint:
            raise FormatError(
                f"tokens are read with the tokenizer that made them: {made_by}, says {self.place}; "
                f"found {self.tokenizer.fingerprint}. Set data.tokenizer and data.boundary to that one."
            )
        return done

    def _convert(self) -> Made[TextDescription]:
        source = self.source
        if source is None:
            raise FormatError(
                f"without data.source, data.remote holds a converted set; there is none at {self.place}. Set "
                "data.source to the text, or data.remote to the folder that an earlier run named."
            )
        is_one = not source.has_val and len(list(islice(source.documents(TRAIN), 2))) == 1
        done = {split: self._write(source, split, is_one_document=is_one) for split in (TRAIN, VAL)}
        held = TextDescription(
            source.title,
            self.tokenizer.fingerprint,
            self.tokenizer.vocabulary,
            self.config.block,
            documents={split: notes["documents"] for split, (_, notes) in done.items()},
            tokens={split: notes["tokens"] for split, (_, notes) in done.items()},
            blocks={split: converted.total for split, (converted, _) in done.items()},
        )
        open_store(self.place).put(DESCRIPTION, held.to_bytes())
        return Made(held, is_new=any(converted.is_new for converted, _ in done.values()))

    def _write(
        self, source: TextSource, split: str, *, is_one_document: bool
    ) -> tuple[ConversionResult, dict[str, int]]:
        """Write a split; what it holds, and how many documents and tokens that is."""
        config = self.config
        dtype = token_dtype(self.tokenizer.vocabulary)
        blocks = BlocksOfPiece(source, self.tokenizer, config, split, self.place, is_one_document)
        pieces = [Piece(number, of) for number, of in enumerate(source.pieces(split if source.has_val else TRAIN))]
        try:
            done = convert(
                Inputs(pieces, blocks, stamp=self.place.rpartition("/")[2]),
                f"{self.place}/{split}",
                columns={"tokens": f"ndarray:{dtype}:{config.block}", "documents": f"ndarray:int32:{config.block}"},
                compression=config.compression,
                hashes=config.hashes,
                size_limit=config.size_limit,
                num_workers=self.num_workers,
                progress_bar=sys.stderr.isatty(),
            )
        except ValueError as error:
            if self._has_none(blocks, pieces):
                raise FormatError(f"a {split} set needs text; {source.title} gives it none.") from error
            raise
        return done, self._counted(blocks, pieces)

    def _has_none(self, blocks: BlocksOfPiece, pieces: Sequence[Piece]) -> bool:
        """Whether all pieces were read, and none had a document."""
        try:
            return not self._counted(blocks, pieces)["documents"]
        except NotFoundError:
            return False

    def _counted(self, blocks: BlocksOfPiece, pieces: Sequence[Piece]) -> dict[str, int]:
        store = open_store(self.place)
        notes = [json.loads(store.read(blocks.note(piece.number))) for piece in pieces]
        return {counted: sum(note[counted] for note in notes) for counted in ("documents", "tokens")}


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the val set: by a hash of its text, so that equal ones are never in both."""
    return xxhash.xxh3_64_intdigest(text.encode()) / 2**64 < share


def _cut_in_two(text: str, share: float) -> dict[str, str]:
    """The beginning to train on, and the rest held out; cut at a line's end, if it has lines."""
    kept = int(len(text) * (1 - share))
    kept = text.rfind("\n", 0, kept) + 1 or kept
    return {TRAIN: text[:kept], VAL: text[kept:]}
