"""A folder of class folders of images: their bytes untouched, their classes as numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, Reader, Span
from lightning_stream.convert.sources.sniff import image_encoding
from lightning_stream.formats.encodings import get_encoding

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_BATCH_BYTES, _BATCH_FILES = 1 << 20, 256
_COLUMNS = {"image": "jpeg", "label": "int", "name": "str"}


@dataclass(frozen=True)
class ImageFolderReader(Reader):
    """Images named ``class/name.jpg``, at any depth: a file's folder is its class.

    Attributes:
        classes: All of them, sorted: a label is a place in here.
    """

    kind = "images"
    is_listing = True
    classes: tuple[str, ...]

    @classmethod
    def over(cls, files: Sequence[SourceFile]) -> ImageFolderReader:
        """The reader of these files: it knows all classes."""
        return cls(tuple(sorted({_class_of(file) for file in files})))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The classes decide the labels."""
        return {"kind": self.kind, "classes": self.classes}

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """``image``, ``label`` (left out where there is one folder only) and ``name``."""
        known = {name: kind for name, kind in _COLUMNS.items() if name != "label" or len(self.classes) > 1}
        with files[0].open() as file:
            known["image"] = image_encoding(file.read(16))
        wrong = sorted((asked or {}).keys() - known.keys())
        if wrong:
            raise ValueError(f"an image folder has the columns {', '.join(known)}; not {', '.join(wrong)}.")
        for encoding in (asked or {}).values():
            get_encoding(encoding)
        return Found(dict(asked or known), {"classes": {"label": list(self.classes)}} if "label" in known else {})

    def read(self, span: Span, columns: Mapping[str, str]) -> Iterator[Batch]:
        """One image."""
        return self.read_all([span], columns)

    def read_all(self, spans: Sequence[Span], columns: Mapping[str, str]) -> Iterator[Batch]:
        """About a MiB of images at a time: so the next ones come into the same memory."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        gathered: list[SourceFile] = []
        room = _BATCH_BYTES
        for span in spans:
            gathered.append(span.file)
            room -= span.num_bytes
            if room <= 0 or len(gathered) == _BATCH_FILES:
                yield _batch(gathered, numbers, columns)
                gathered, room = [], _BATCH_BYTES
        if gathered:
            yield _batch(gathered, numbers, columns)


def _batch(files: Sequence[SourceFile], numbers: Mapping[str, int], columns: Mapping[str, str]) -> Batch:
    values: dict[str, list[Any]] = {}
    for name in columns:
        if name == "label":
            values[name] = [numbers[_class_of(file)] for file in files]
        else:
            values[name] = [file.read() if name == "image" else file.name for file in files]
    return Batch(values, f"{files[0].place} and the {len(files) - 1} images after it")


def _class_of(file: SourceFile) -> str:
    return str(PurePosixPath(file.name).parent)
