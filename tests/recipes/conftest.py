"""A few photos on disk, in every form that a source may have."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from lightning_stream.recipes.drawing import drawn_jpeg


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes; the same file name occurs in all of them, and a licence lies beside them."""
    root = tmp_path_factory.mktemp("photos") / "flower_photos"
    for label in ("daisy", "roses", "tulips"):
        (root / label).mkdir(parents=True)
        for number in range(20):
            (root / label / f"{number}.jpg").write_bytes(drawn_jpeg(label, 5, number))
    (root / "LICENSE.txt").write_text("all rights observed\n")
    (root / "daisy" / "notes.txt").write_text("no photo\n")
    return root


@pytest.fixture(scope="session")
def photo_archive(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same photos as a .tgz, in another order."""
    path = tmp_path_factory.mktemp("archive") / "flower_photos.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted(photo_folder.rglob("*"), reverse=True):
            archive.add(file, arcname=str(file.relative_to(photo_folder.parent)), recursive=False)
    return path


def make_archive(path: Path, members: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    """A .tgz of these members, and of symbolic links."""
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    return path


@pytest.fixture(scope="session")
def archive_maker() -> object:
    """See `make_archive`."""
    return make_archive
