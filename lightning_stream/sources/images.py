"""A folder of class folders of images, or of any files: their bytes untouched, their classes as numbers."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any, ClassVar

from lightning_stream.sources.base import (
    Asked,
    Batches,
    Columns,
    Piece,
    Pieces,
    Reader,
    Row,
    SourceSchema,
    batched,
    grouped,
    marks_of,
    spread,
)
from lightning_stream.sources.files import Files, SourceFile, named_in_data
from lightning_stream.threads import DaemonPool

_LOG = logging.getLogger(__name__)
_BATCH_BYTES = 1 << 20  # so that the next images use the same memory
_SAMPLED_REMOTE = 64
_TAIL_BYTES = 1 << 12
_PIECE_BYTES = 32 << 20
_PIECE_FILES = 1024
_CONNECTIONS = 16


def image_encoding(data: bytes) -> str:
    """Return the encoding that keeps an image's bytes untouched: ``jpeg``, ``png``, else ``bytes``."""
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    return "png" if data.startswith(b"\x89PNG\r\n\x1a\n") else "bytes"


def is_truncated(data: bytes) -> bool:
    """Return whether an image lacks its end. JPEG, PNG and WebP are looked at; nothing is decoded."""
    kind = image_encoding(data)
    tail = data[-_TAIL_BYTES:]  # some cameras write a little behind the end
    if kind == "jpeg":
        return b"\xff\xd9" not in tail
    if kind == "png":
        return b"IEND\xaeB`\x82" not in tail
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    return not data or (is_webp and len(data) < 8 + int.from_bytes(data[4:8], "little"))


@dataclass
class FileFolderReader(Reader):
    """Files named ``class/name.wav``, at any depth: each is a sample, and its folder is its class.

    Attributes:
        listed: The files of a shard, where they are read in place: name, bytes, stamp and label of each.
        classes: All of them, sorted: a label is a position in this list.
    """

    kind = "files"
    is_listing = True
    column: ClassVar[str] = "data"
    listed: Sequence[tuple[str, int, str, int]] = ()
    classes: tuple[str, ...] = field(default=(), init=False)

    def begin(self, files: Files) -> None:
        """Find all classes: of all splits, so that a class has the same number in each."""
        self.classes = tuple(sorted({_class_of(file) for file in files}))

    def find_columns(self, files: Files, asked: Asked | None) -> SourceSchema:
        """Return ``data`` or ``image``, ``label`` (omitted where there is one folder only) and ``name``."""
        known = {self.column: self._encoding(files), "label": "int", "name": "str"}
        if len(self.classes) < 2:
            del known["label"]
        notes = {"classes": {"label": list(self.classes)}} if "label" in known else {}
        return SourceSchema(known, notes, identity=(self.column,), media=(self.column,))

    def _encoding(self, files: Files) -> str:
        return "bytes"

    def _label(self, file: SourceFile) -> int:
        return bisect_left(self.classes, _class_of(file))

    def _is_kept(self, file: SourceFile, data: bytes, encoding: str) -> bool:
        return True

    def scan(self, files: Files, columns: Columns, pool: DaemonPool) -> Iterator[Piece]:
        for _, below in groupby(files, attrgetter("root")):  # a source may name several folders
            for group in grouped(below, attrgetter("num_bytes"), _PIECE_BYTES, _PIECE_FILES):
                settings = {"listed": [(file.name, file.num_bytes, file.stamp, self._label(file)) for file in group]}
                num_bytes = sum(file.num_bytes for file in group)
                yield Piece(group[0], 0, len(group), num_bytes, len(group), settings, marks=marks_of(group))

    def has_rows(self, file: SourceFile) -> bool:
        return True

    def read(self, splits: Pieces, columns: Columns) -> Batches:
        if self.listed:
            first = splits[0].file
            rows = splits[0].rows
            listed = self.listed if rows is None else [self.listed[row] for row in rows]
            labelled = [
                (replace(first, name=named_in_data(name, first.root), num_bytes=size, stamp=stamp, mark=""), label)
                for name, size, stamp, label in listed
            ]
        else:
            labelled = [(split.file, self._label(split.file)) for split in splits]
        return batched(self._rows(labelled, columns), _BATCH_BYTES)

    def _rows(self, files: Sequence[tuple[SourceFile, int]], columns: Columns) -> Iterator[tuple[Row, str]]:
        with DaemonPool(_CONNECTIONS, "files") as pool:
            is_far = self.listed and files[0][0].path is None and self.column in columns
            reads = [pool.submit(file.read).result if is_far else file.read for file, _ in files]
            for (file, label), read in zip(files, reads, strict=True):
                row: dict[str, Any] = {"name": file.name, "label": label}
                if self.column in columns:
                    data = read()
                    if not self._is_kept(file, data, columns[self.column]):
                        continue
                    row[self.column] = data
                yield {name: row[name] for name in columns}, file.uri


@dataclass
class ImageFolderReader(FileFolderReader):
    """Images named ``class/name.jpg``.

    Attributes:
        truncated: ``"refuse"`` or ``"skip"`` images that lack their end. A skipped one is logged by name.
    """

    kind = "images"
    column = "image"
    truncated: str = "refuse"

    def __post_init__(self) -> None:
        if self.truncated not in ("refuse", "skip"):
            raise ValueError(f"truncated must be 'refuse' or 'skip'; got {self.truncated!r}.")

    def _encoding(self, files: Files) -> str:
        """``jpeg`` or ``png`` if all files are JPEG or PNG files, whatever their names are: readers decode both kinds
        there. Else ``bytes``. Of a source in a store, where looking at a file costs a request, only some are looked at.
        """
        local = [file for file in files if file.path is not None]
        looked_at = local or spread(files, _SAMPLED_REMOTE)
        return min(image_encoding(file.read(0, min(16, file.num_bytes))) for file in looked_at)

    def _is_kept(self, file: SourceFile, data: bytes, encoding: str) -> bool:
        if encoding in ("jpeg", "png") and data and image_encoding(data) == "bytes":
            raise ValueError(
                f"{file.uri} is not a JPEG or PNG file, unlike the images that were looked at first. Pass "
                "columns={'image': 'bytes', 'label': 'int', 'name': 'str'} to keep the bytes of every image."
            )
        if not is_truncated(data):
            return True
        if self.truncated == "refuse":
            raise ValueError(
                f"{file.uri} is truncated. Replace or remove it, or pass source_options={{'truncated': 'skip'}}."
            )
        _LOG.warning("skipped %s: the image is truncated", file.uri)
        return False


def _class_of(file: SourceFile) -> str:
    return str(PurePosixPath(file.name).parent)
