"""ImageNet (ILSVRC2012) as distributed: a tar of tars to train on, a tar to validate on, and which is what in it."""

from __future__ import annotations

import csv
import hashlib
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.recipes.converted_set import TRAIN, VAL
from lightning_stream.recipes.photo_conversion import as_jpeg

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
LABELS = ("imagenet_2012_validation_synset_labels.txt", "LOC_val_solution.csv")
_PIECE_PHOTOS = 2000


class Photo(NamedTuple):
    """Where a photo lies.

    Attributes:
        label: Of its class.
        name: ``synset/file``.
        offset, size: Its bytes in the tar, in bytes.
    """

    label: int
    name: str
    offset: int
    size: int


class Piece(NamedTuple):
    """Some photos of one tar.

    Attributes:
        tar: The tar.
        photos: Which.
    """

    tar: str
    photos: tuple[Photo, ...]

    def __repr__(self) -> str:
        return f"{self.tar} {self.photos[0].name}..{self.photos[-1].name} {len(self.photos)}"


@dataclass(frozen=True)
class ImageNet:
    """1,281,167 photos to train on and 50,000 held out, of 1000 classes, named by their synsets in sorted order.

    Photos are read in place, by their offsets: nothing is unpacked. They are written in an order that mixes the
    classes, each shard some of all.

    Attributes:
        folder: Holds both tars, and one of `LABELS` (a synset per line, in the order of the val photos' names; or
            Kaggle's table), as the val tar itself does not say what its photos show.
    """

    folder: Path

    columns: Mapping[str, str] = field(default_factory=lambda: {"image": "jpeg", "label": "int", "name": "str"})

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"the ImageNet photos in {self.folder}"

    def fingerprint(self) -> str:
        """Of the photos' names, sizes and places in their tars, and of the val labels."""
        total = hashlib.sha256()
        for split in (TRAIN, VAL):
            total.update(repr(self._photos[split]).encode())
        return f"imagenet{total.hexdigest()}"

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The synsets, sorted."""
        with self._open(TRAIN_TAR) as outer:
            return tuple(sorted(member.name.removesuffix(".tar") for member in outer if member.name.endswith(".tar")))

    @cached_property
    def _photos(self) -> dict[str, list[Photo]]:
        photos = {TRAIN: list(self._train()), VAL: list(self._val())}
        return {split: sorted(found, key=lambda photo: _mixed(photo.name)) for split, found in photos.items()}

    def pieces(self, split: str) -> list[Piece]:
        """The photos of a split, classes mixed, some thousand at a time."""
        tar, photos = str(self.folder / (TRAIN_TAR if split == TRAIN else VAL_TAR)), self._photos[split]
        return [Piece(tar, tuple(photos[at : at + _PIECE_PHOTOS])) for at in range(0, len(photos), _PIECE_PHOTOS)]

    @staticmethod
    def read(piece: Piece) -> Iterator[dict[str, Any]]:
        """The samples of a piece. JPEG files stay as they are, byte for byte.

        Raises:
            FormatError: A photo is cut short, or cannot be decoded.
        """
        with Path(piece.tar).open("rb") as file:
            for photo in piece.photos:
                data = os.pread(file.fileno(), photo.size, photo.offset)
                jpeg = as_jpeg(data) if len(data) == photo.size else None
                if jpeg is None:
                    raise FormatError(f"{photo.name} in {piece.tar} cannot be decoded. Fetch the archive again.")
                yield {"image": jpeg, "label": photo.label, "name": photo.name}

    def _train(self) -> Iterator[Photo]:
        labels = {name: label for label, name in enumerate(self.classes)}
        with self._open(TRAIN_TAR) as outer:
            for member in outer:
                if member.name.endswith(".tar"):
                    yield from _of_synset(outer, member, labels[member.name.removesuffix(".tar")])

    def _val(self) -> Iterator[Photo]:
        with self._open(VAL_TAR) as tar:
            members = {PurePosixPath(member.name).name: member for member in tar if member.isreg()}
        labels = {name: label for label, name in enumerate(self.classes)}
        synsets = self._val_synsets(sorted(members))
        unknown = sorted({*members} - {*synsets}) + sorted({*synsets.values()} - {*labels})
        if unknown:
            raise FormatError(
                f"each val photo needs a synset that there are train photos of; {len(unknown)} lack one, "
                f"{unknown[0]} first."
            )
        for name, member in members.items():
            synset = synsets[name]
            yield Photo(labels[synset], f"{synset}/{name}", member.offset_data, member.size)

    def _val_synsets(self, names: list[str]) -> dict[str, str]:
        """The synset of each val photo."""
        lines, table = (self.folder / name for name in LABELS)
        if lines.exists():
            synsets = lines.read_text().split()
            if len(synsets) != len(names):
                raise FormatError(f"{lines} has a synset for each val photo; it has {len(synsets)} for {len(names)}.")
            return dict(zip(names, synsets, strict=True))
        if table.exists():
            with table.open(newline="") as file:
                rows = list(csv.DictReader(file))
            return {f"{row['ImageId']}.JPEG": row["PredictionString"].split()[0] for row in rows}
        raise NotFoundError(
            f"which val photo shows what is told by {' or by '.join(LABELS)}; {self.folder} holds neither. The first "
            "has one synset per line, in the order of the photos' names."
        )

    def _open(self, name: str) -> tarfile.TarFile:
        path = self.folder / name
        if not path.exists():
            raise NotFoundError(f"ImageNet is {TRAIN_TAR} and {VAL_TAR}, as distributed; there is no {path}.")
        try:
            return tarfile.open(path, "r:")
        except tarfile.TarError as error:
            raise FormatError(f"{path} must be a whole tar; reading it failed: {error}. Fetch it again.") from error


def _of_synset(outer: tarfile.TarFile, member: tarfile.TarInfo, label: int) -> Iterator[Photo]:
    """The photos of a tar inside the tar, by their places in the outer one."""
    synset = member.name.removesuffix(".tar")
    with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
        for photo in inner:
            if photo.isreg():
                name = f"{synset}/{PurePosixPath(photo.name).name}"
                yield Photo(label, name, member.offset_data + photo.offset_data, photo.size)


def _mixed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
