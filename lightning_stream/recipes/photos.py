"""Where labelled photos come from: drawn here, a folder of class folders, or a .tgz of one (fetched, if asked)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import xxhash

from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.recipes import drawing
from lightning_stream.recipes.archive import open_archive
from lightning_stream.recipes.download import FLOWERS_SHA256, FLOWERS_URL, fetch_file
from lightning_stream.recipes.labelled_set import FileKey

PhotoKey = FileKey

SUFFIXES = (".jpg", ".jpeg", ".png")
DRAWN, DOWNLOAD = "drawn", "download"


class PhotoSource(Protocol):
    """Labelled photos, each read only when asked for."""

    @property
    def title(self) -> str:
        """What it is, for people: says so where the pictures are drawings."""

    @property
    def drawn(self) -> bool:
        """Whether the pictures are drawings rather than photos."""

    def fingerprint(self) -> str:
        """Hex digest of all that the photos depend on: equal for equal photos under equal names, on any machine."""

    def open(self) -> AbstractContextManager[Mapping[PhotoKey, Callable[[], bytes]]]:
        """All photos, by class and name, each with what reads its file's bytes."""


@dataclass(frozen=True)
class DrawnFlowers:
    """Flowers drawn by this package.

    Attributes:
        count: Pictures in all, spread evenly over the classes.
        seed: Chooses the pictures.
    """

    count: int = 1000
    seed: int = 1

    drawn = True

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"{self.count} drawings made by this package (not photos)"

    def fingerprint(self) -> str:
        """Digest of the drawing's version and arguments; nothing needs to be drawn for it."""
        return hashlib.sha256(f"drawn {drawing.VERSION} {self.count} {self.seed}".encode()).hexdigest()

    @contextmanager
    def open(self) -> Iterator[Mapping[PhotoKey, Callable[[], bytes]]]:
        """All pictures, drawn as they are read."""
        kinds = drawing.CLASSES
        yield {
            (kind, f"{number:05d}.jpg"): partial(drawing.drawn_jpeg, kind, self.seed, number)
            for place, kind in enumerate(kinds)
            for number in range(self.count // len(kinds) + (place < self.count % len(kinds)))
        }


@dataclass(frozen=True)
class PhotoFolder:
    """A folder with one folder per class; other files in it, such as a licence, are left alone."""

    folder: Path

    drawn = False

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"the photos in {self.folder}"

    def files(self) -> dict[PhotoKey, Path]:
        """All photos' files, by class and name."""
        classes = sorted(path for path in self.folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        return {
            (label.name, path.name): path
            for label in classes
            for path in sorted(label.iterdir())
            if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
        }

    def fingerprint(self) -> str:
        """Digest of names and contents."""
        total = xxhash.xxh3_128()
        for (label, name), path in self.files().items():
            total.update(f"{label}/{name}\0{xxhash.xxh3_128_hexdigest(path.read_bytes())}\n".encode())
        return f"folder{total.hexdigest()}"

    @contextmanager
    def open(self) -> Iterator[Mapping[PhotoKey, Callable[[], bytes]]]:
        """All photos, read from their files."""
        yield {key: path.read_bytes for key, path in self.files().items()}


@dataclass(frozen=True)
class PhotoArchive:
    """A .tgz (.tar.gz, .tar) of a folder of class folders. Its members are read, never extracted."""

    path: Path
    sha256: str | None = None

    drawn = False

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"the photos in {self.path}"

    def fingerprint(self) -> str:
        """Digest of the archive's bytes, which are checked against `sha256` on the way."""
        total, checked = xxhash.xxh3_128(), hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(1 << 20):
                total.update(chunk)
                if self.sha256 is not None:
                    checked.update(chunk)
        if self.sha256 is not None and checked.hexdigest() != self.sha256.lower():
            raise FormatError(
                f"{self.path} must have the sha256 {self.sha256}; it has {checked.hexdigest()}. Fetch the archive "
                "again, or set photos_sha256 to what its publisher says."
            )
        return f"archive{total.hexdigest()}"

    def open(self) -> AbstractContextManager[Mapping[PhotoKey, Callable[[], bytes]]]:
        """All photos, read from the archive by their place in it."""
        return open_archive(self.path, SUFFIXES)


@dataclass(frozen=True)
class FetchedFlowers:
    """The TensorFlow flowers archive from its public address, kept in `folder` once fetched.

    Attributes:
        folder: Where the archive is kept.
        sha256: Its digest; by default the one under which TensorFlow Datasets lists the archive.
        url: Its address.
    """

    folder: Path
    sha256: str = FLOWERS_SHA256
    url: str = FLOWERS_URL

    drawn = False

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"the photos of {self.url}"

    @property
    def _path(self) -> Path:
        return self.folder / self.url.rpartition("/")[2]

    def fingerprint(self) -> str:
        """Digest of the expected archive: nothing needs to be fetched for it."""
        return f"fetched{self.sha256}"

    @contextmanager
    def open(self) -> Iterator[Mapping[PhotoKey, Callable[[], bytes]]]:
        """All photos, after the archive was fetched and checked."""
        fetch_file(self.url, self._path, self.sha256)
        with open_archive(self._path, SUFFIXES) as photos:
            yield photos


def photo_source(photos: str, *, count: int, seed: int, sha256: str | None, downloads: str | Path) -> PhotoSource:
    """The source that a config's `photos:` names.

    Args:
        photos: ``"drawn"``, ``"download"``, a folder of class folders, or a ``.tgz`` of one.
        count: Pictures to draw.
        seed: Of the drawn pictures.
        sha256: What an archive's digest must be.
        downloads: Where a fetched archive is kept.

    Raises:
        NotFoundError: Neither a word that is known, nor a path that exists.
        ValueError: A path to a file that is no archive.
    """
    if photos == DRAWN:
        return DrawnFlowers(count, seed)
    if photos == DOWNLOAD:
        return FetchedFlowers(Path(downloads).absolute(), sha256 or FLOWERS_SHA256)
    path = Path(photos).expanduser().absolute()
    if path.is_dir():
        return PhotoFolder(path)
    if not path.exists():
        raise NotFoundError(
            f"photos must be {DRAWN!r}, {DOWNLOAD!r}, a folder of class folders or a .tgz of one; "
            f"there is nothing at {path}."
        )
    if not path.name.endswith((".tgz", ".tar.gz", ".tar")):
        raise ValueError(f"a file given as photos must be a .tgz, .tar.gz or .tar; found {path.name!r}.")
    return PhotoArchive(path, sha256)
