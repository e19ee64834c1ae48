"""A folder of class folders of images: their bytes untouched, their classes as numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, InputSplit, Reader, chosen_columns
from lightning_stream.convert.sources.lines import spread

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_LOG = logging.getLogger(__name__)
_BATCH_BYTES, _BATCH_FILES = 1 << 20, 256
_COLUMNS = {"image": "jpeg", "label": "int", "name": "str"}
_SAMPLED_REMOTE = 64
_TAIL_BYTES = 1 << 12


def image_encoding(data: bytes) -> str:
    """Return the encoding that keeps an image's bytes untouched: ``jpeg``, ``png``, else ``bytes``."""
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    return "png" if data.startswith(b"\x89PNG\r\n\x1a\n") else "bytes"


def is_truncated(data: bytes) -> bool:
    """Return whether an image lacks its end. JPEG, PNG and WebP are looked at; nothing is decoded."""
    kind, tail = image_encoding(data), data[-_TAIL_BYTES:]  # some cameras write a little behind the end
    if kind == "jpeg":
        return b"\xff\xd9" not in tail
    if kind == "png":
        return b"IEND\xaeB`\x82" not in tail
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    return not data or (is_webp and len(data) < 8 + int.from_bytes(data[4:8], "little"))


@dataclass(frozen=True)
class ImageFolderReader(Reader):
    """Images named ``class/name.jpg``, at any depth: a file's folder is its class.

    Attributes:
        classes: All of them, sorted: a label is a position in this list.
        truncated: ``"refuse"`` or ``"skip"`` images that lack their end. A skipped one is logged by name.
    """

    kind = "images"
    is_listing = True
    classes: tuple[str, ...]
    truncated: str = "refuse"

    @classmethod
    def over(cls, files: Sequence[SourceFile], truncated: str = "refuse") -> ImageFolderReader:
        """Return the reader of these files, which knows all classes."""
        if truncated not in ("refuse", "skip"):
            raise ValueError(f"truncated must be 'refuse' or 'skip'; got {truncated!r}.")
        return cls(tuple(sorted({_class_of(file) for file in files})), truncated)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The classes decide the labels."""
        return {"kind": self.kind, "classes": self.classes, "truncated": self.truncated}

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """Return ``image``, ``label`` (omitted where there is one folder only) and ``name``.

        The column of images is ``jpeg`` or ``png`` if all files are JPEG or PNG files, whatever their names are:
        readers decode both kinds there. Else it is ``bytes``. Of a source in a store, where looking at a file costs
        a request, only some are looked at.
        """
        known = {name: kind for name, kind in _COLUMNS.items() if name != "label" or len(self.classes) > 1}
        kinds = {_encoding_of(file) for file in files if file.path is not None}
        kinds |= {_encoding_of(file) for file in spread(files, _SAMPLED_REMOTE) if file.path is None}
        known["image"] = "bytes" if "bytes" in kinds else min(kinds)
        about = {"classes": {"label": list(self.classes)}} if "label" in known else {}
        columns = chosen_columns(known, asked, "an image folder")
        return Found(columns, about, identity=("image",), media=("image",))

    def read(self, split: InputSplit, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield one image."""
        return self.read_all([split], columns)

    def read_all(self, splits: Sequence[InputSplit], columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield about a MiB of images at a time: so the next ones use the same memory."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        gathered: list[SourceFile] = []
        room = _BATCH_BYTES
        for split in splits:
            gathered.append(split.file)
            room -= split.num_bytes
            if room <= 0 or len(gathered) == _BATCH_FILES:
                yield self._batch(gathered, numbers, columns)
                gathered, room = [], _BATCH_BYTES
        if gathered:
            yield self._batch(gathered, numbers, columns)

    def _batch(self, files: Sequence[SourceFile], numbers: Mapping[str, int], columns: Mapping[str, str]) -> Batch:
        rows: list[dict[str, Any]] = []
        for file in files:
            row: dict[str, Any] = {"name": file.name, "label": numbers[_class_of(file)]}
            row = {name: row[name] for name in row.keys() & columns.keys()}
            if "image" in columns:
                row["image"] = file.read()
                if not self._is_kept(file, row["image"], columns["image"]):
                    continue
            rows.append(row)
        return Batch(rows, f"{files[0].uri} and the {len(files) - 1} images after it")

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


def _encoding_of(file: SourceFile) -> str:
    with file.open(buffering=0) as plain:
        return image_encoding(plain.read(16))


def _class_of(file: SourceFile) -> str:
    return str(PurePosixPath(file.name).parent)
