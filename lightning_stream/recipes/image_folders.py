"""A folder of ``train/<class>/`` and ``val/<class>/`` photos, or of class folders of which a share is held out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.recipes.converted_set import TRAIN, VAL
from lightning_stream.recipes.labelled_set import is_held_out, writing_order
from lightning_stream.recipes.photo_conversion import as_jpeg
from lightning_stream.recipes.photos import PhotoFolder, PhotoKey

_PIECE_PHOTOS = 2000
_READ_WHOLE_BYTES = 1 << 30


class FilePhoto(NamedTuple):
    """A photo in a file.

    Attributes:
        label: Of its class.
        name: ``class/file``.
        path: Where it lies.
    """

    label: int
    name: str
    path: str


class Piece(NamedTuple):
    """Some photos."""

    photos: tuple[FilePhoto, ...]

    def __repr__(self) -> str:
        return f"{self.photos[0].name}..{self.photos[-1].name} {len(self.photos)}"


@dataclass(frozen=True)
class ImageFolders:
    """Photos in class folders.

    Attributes:
        folder: Holds ``train`` and ``val`` with the same class folders each, or class folders.
        held_out: Share of each class that is held out where there is no ``val``.
    """

    folder: Path
    held_out: float = 0.1

    columns: Mapping[str, str] = field(default_factory=lambda: {"image": "jpeg", "label": "int", "name": "str"})

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"the photos in {self.folder}"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the train photos' folders, sorted."""
        return tuple(sorted({label for label, _ in self._files(TRAIN)}))

    def fingerprint(self) -> str:
        """Of names and contents; of a gigabyte and more, of names and sizes, since it would have to be read twice."""
        splits = {split: self._files(split) for split in (TRAIN, VAL)}
        by_size = sum(file.stat().st_size for files in splits.values() for file in files.values()) >= _READ_WHOLE_BYTES
        total = xxhash.xxh3_128()
        for split, files in splits.items():
            for (label, name), file in files.items():
                content = str(file.stat().st_size) if by_size else xxhash.xxh3_128_hexdigest(file.read_bytes())
                total.update(f"{split}/{label}/{name}\0{content}\n".encode())
        return f"folders{total.hexdigest()}"

    def pieces(self, split: str) -> list[Piece]:
        """The photos of a split, classes mixed, some thousand at a time.

        Raises:
            FormatError: There are none, or of a class that is not trained on.
        """
        files, labels = self._files(split), {name: label for label, name in enumerate(self.classes)}
        order = writing_order(files)
        unknown = {label for label, _ in order} - {*labels}
        if unknown or not order:
            found = f"found {min(unknown)}" if unknown else "there are none"
            raise FormatError(
                f"a {split} set has photos of the classes trained on; {found} in {self.folder}. Photos lie in "
                "train/<class>/ and val/<class>/, or in <class>/, of which data.held_out is the share held out."
            )
        photos = [FilePhoto(labels[key[0]], "/".join(key), str(files[key])) for key in order]
        return [Piece(tuple(photos[at : at + _PIECE_PHOTOS])) for at in range(0, len(photos), _PIECE_PHOTOS)]

    @staticmethod
    def read(piece: Piece) -> Iterator[dict[str, Any]]:
        """The samples of a piece. JPEG files stay as they are, byte for byte.

        Raises:
            FormatError: A photo cannot be decoded.
        """
        for photo in piece.photos:
            jpeg = as_jpeg(Path(photo.path).read_bytes())
            if jpeg is None:
                raise FormatError(f"{photo.path} cannot be decoded. Mend it, or move it away.")
            yield {"image": jpeg, "label": photo.label, "name": photo.name}

    def _files(self, split: str) -> dict[PhotoKey, Path]:
        if not self.folder.is_dir():
            raise NotFoundError(f"there is no folder at {self.folder}.")
        if (self.folder / TRAIN).is_dir() and (self.folder / VAL).is_dir():
            return PhotoFolder(self.folder / split).files()
        files = PhotoFolder(self.folder).files()
        return {key: file for key, file in files.items() if is_held_out(key, self.held_out) == (split == VAL)}
