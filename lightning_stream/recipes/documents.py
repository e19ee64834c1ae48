"""Where documents come from: stories made here, text files, folders of them, or JSON lines, compressed or not."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import xxhash
import zstandard

from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.recipes import stories

GENERATED = "generated"
_PACKINGS = (".gz", ".zst")
_LINES = (".jsonl", ".json", ".ndjson")
_TEXTS = (".txt", ".text", ".md")
_CHUNK_CHARACTERS = 1 << 20
_READ_WHOLE_BYTES = 1 << 30
_PIECE_STORIES = 2000


class TextSource(Protocol):
    """Documents, some of which may be meant to be held out."""

    @property
    def title(self) -> str:
        """What it is, for people; says so where the text is generated."""

    @property
    def has_val(self) -> bool:
        """Whether the source itself says which documents are held out."""

    def fingerprint(self) -> str:
        """Of all that the documents depend on."""

    def pieces(self, split: str) -> Sequence[Any]:
        """What may be read by different processes: of what is trained on (``"train"``), or held out (``"val"``)."""

    def read(self, piece: Any) -> Iterator[str]:
        """The documents of a piece."""

    def documents(self, split: str) -> Iterator[str]:
        """The documents to train on (``"train"``), or those held out (``"val"``) where the source has such."""


@dataclass(frozen=True)
class GeneratedStories:
    """Stories made from a grammar.

    Attributes:
        count: How many.
        seed: Which.
    """

    count: int = 1000
    seed: int = 1

    has_val = False

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"{self.count} stories made from a grammar by this package"

    def fingerprint(self) -> str:
        """The grammar's version and the arguments."""
        return f"stories {stories.VERSION} {self.count} {self.seed}"

    def pieces(self, split: str) -> list[range]:  # noqa: ARG002
        """Some thousand stories each."""
        return [range(begin, min(begin + _PIECE_STORIES, self.count)) for begin in range(0, self.count, _PIECE_STORIES)]

    def read(self, piece: range) -> Iterator[str]:
        """The stories of these numbers."""
        return (stories.story(number, self.seed) for number in piece)

    def documents(self, split: str) -> Iterator[str]:
        """All stories."""
        return (story for piece in self.pieces(split) for story in self.read(piece))


@dataclass(frozen=True)
class TextFiles:
    """A text file or a file of JSON lines (``.jsonl``, ``.json``; ``.gz``, ``.zst``), or a folder of such.

    Attributes:
        path: The file or folder.
        separator: What lies between the documents of a text file; None where each file is one.
        key: Of each JSON line's text.
        train_files, val_files: Patterns of the files in a folder that are trained on, and held out; None for all, and
            for none.
    """

    path: Path
    separator: str | None = None
    key: str = "text"
    train_files: str | None = None
    val_files: str | None = None

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"the text in {self.path}"

    @property
    def has_val(self) -> bool:
        """Whether files are held out."""
        return self.val_files is not None

    def files(self, split: str) -> list[Path]:
        """The files of a split, by name.

        Raises:
            NotFoundError: There are none.
        """
        if not self.path.is_dir():
            found = [self.path] if self.path.exists() else []
        else:
            pattern = (self.train_files if split == "train" else self.val_files) or "**/*"
            known = (*_LINES, *_TEXTS)
            found = [file for file in sorted(self.path.glob(pattern)) if file.is_file() and _kind(file) in known]
            held_out = set(self.path.glob(self.val_files)) if self.val_files and split == "train" else set()
            found = [file for file in found if file not in held_out]
        if not found:
            raise NotFoundError(
                f"{split} documents come from text files or JSON lines ({', '.join((*_TEXTS, *_LINES))}, plain or "
                f"{' or '.join(_PACKINGS)}); found none at {self.path}. Set data.source, or the patterns of its files."
            )
        return found

    def fingerprint(self) -> str:
        """Of names and contents; of a gigabyte and more, of names and sizes, since it would have to be read twice."""
        files = sorted({*self.files("train"), *(self.files("val") if self.has_val else [])})
        by_size = sum(file.stat().st_size for file in files) >= _READ_WHOLE_BYTES
        total = xxhash.xxh3_128(json.dumps([self.separator, self.key, self.train_files, self.val_files]).encode())
        for file in files:
            content = str(file.stat().st_size) if by_size else xxhash.xxh3_128_hexdigest(file.read_bytes())
            name = file.name if file == self.path else str(file.relative_to(self.path))
            total.update(f"{name}\0{content}\n".encode())
        return f"files{total.hexdigest()}"

    def pieces(self, split: str) -> list[str]:
        """The files."""
        return [str(file) for file in self.files(split)]

    def read(self, piece: str) -> Iterator[str]:
        """The documents of a file, which is read only as far as needed."""
        file = Path(piece)
        with _opened(file) as text:
            if _kind(file) in _LINES:
                yield from _from_lines(text, self.key, file)
            else:
                yield from _from_text(text, self.separator)

    def documents(self, split: str) -> Iterator[str]:
        """Read the files one after the other."""
        for piece in self.pieces(split):
            yield from self.read(piece)


def _kind(file: Path) -> str:
    name = file.with_suffix("") if file.suffix in _PACKINGS else file
    return name.suffix.lower()


def _opened(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    if file.suffix == ".zst":
        packed = file.open("rb")
        unpacked: Any = zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(
            packed, read_across_frames=True, closefd=True
        )
        return io.TextIOWrapper(unpacked, encoding="utf-8")
    return file.open(encoding="utf-8")


def _from_lines(text: IO[str], key: str, file: Path) -> Iterator[str]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise FormatError(f"each line of {file} must be JSON; line {number} is not: {error}.") from error
        document = row.get(key) if isinstance(row, dict) else None
        if not isinstance(document, str):
            raise FormatError(
                f"each line of {file} must be an object with text under {key!r}; line {number} has "
                f"{sorted(row) if isinstance(row, dict) else type(row).__name__}. Set data.text_key."
            )
        if document:
            yield document


def _from_text(text: IO[str], separator: str | None) -> Iterator[str]:
    if separator is None:
        if document := text.read():
            yield document
        return
    begun = ""
    while chunk := text.read(_CHUNK_CHARACTERS):
        *whole, begun = (begun + chunk).split(separator)
        yield from (document for document in whole if document.strip())
    if begun.strip():
        yield begun


def text_source(
    source: str,
    *,
    count: int,
    seed: int,
    separator: str | None = None,
    key: str = "text",
    train_files: str | None = None,
    val_files: str | None = None,
) -> TextSource:
    """The source that a config's `source:` names: ``"generated"``, or a file or folder; see `TextFiles`."""
    if source == GENERATED:
        return GeneratedStories(count, seed)
    return TextFiles(Path(source).expanduser().absolute(), separator, key, train_files, val_files)
