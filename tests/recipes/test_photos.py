"""Sources of photos: equal whatever they come in, keyed by class and name, and safe to open."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_stream.errors import DigestError, FormatError, NotFoundError, UnavailableError
from lightning_stream.recipes.download import FLOWERS_SHA256, fetch_file
from lightning_stream.recipes.photos import DrawnFlowers, PhotoArchive, PhotoFolder, PhotoSource, photo_source

MakeArchive = Callable[..., Path]


def everything(source: PhotoSource) -> dict[tuple[str, str], bytes]:
    with source.open() as photos:
        return {key: read() for key, read in photos.items()}


def test_a_folder_and_its_archive_hold_the_same_photos(photo_folder: Path, photo_archive: Path) -> None:
    from_folder = everything(PhotoFolder(photo_folder))
    assert from_folder == everything(PhotoArchive(photo_archive))
    assert len(from_folder) == 60
    assert ("daisy", "3.jpg") in from_folder
    assert from_folder["daisy", "3.jpg"] != from_folder["roses", "3.jpg"]


def test_a_plain_tar_serves_too(photo_archive: Path, tmp_path: Path) -> None:
    plain = tmp_path / "photos.tar"
    plain.write_bytes(gzip.decompress(photo_archive.read_bytes()))
    assert everything(PhotoArchive(plain)) == everything(PhotoArchive(photo_archive))


def test_drawings_are_spread_over_the_classes() -> None:
    with DrawnFlowers(count=12).open() as photos:
        labels = [label for label, _ in photos]
    assert len(labels) == 12
    assert sorted(labels.count(label) for label in set(labels)) == [2, 2, 2, 3, 3]


@pytest.mark.parametrize("name", ["../evil/a.jpg", "/etc/evil/a.jpg", "flowers/../../a/b.jpg"])
def test_an_archive_that_points_out_of_itself_is_refused(name: str, archive_maker: MakeArchive, tmp_path: Path) -> None:
    archive = archive_maker(tmp_path / "x.tgz", {name: b"x"})
    with pytest.raises(FormatError, match="leads out of it"), PhotoArchive(archive).open():
        pass


def test_links_in_an_archive_are_passed_over(archive_maker: MakeArchive, tmp_path: Path) -> None:
    archive = archive_maker(tmp_path / "x.tgz", {"a/1.jpg": b"one"}, {"a/2.jpg": "/etc/passwd"})
    assert everything(PhotoArchive(archive)) == {("a", "1.jpg"): b"one"}


def test_a_damaged_archive_says_so(photo_archive: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.tgz"
    cut.write_bytes(photo_archive.read_bytes()[:-5000])
    with pytest.raises(FormatError, match="must be a whole"), PhotoArchive(cut).open():
        pass


def test_an_archive_without_class_folders_says_so(archive_maker: MakeArchive, tmp_path: Path) -> None:
    archive = archive_maker(tmp_path / "x.tgz", {"a.jpg": b"one", "LICENSE.txt": b"two"})
    with pytest.raises(FormatError, match="holds none"), PhotoArchive(archive).open():
        pass


def test_an_archive_with_another_digest_is_refused(photo_archive: Path) -> None:
    with pytest.raises(FormatError, match="must have the sha256"):
        PhotoArchive(photo_archive, FLOWERS_SHA256).fingerprint()


def test_a_path_that_is_nothing_is_refused_with_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="'drawn', 'download', a folder"):
        photo_source(str(tmp_path / "none"), count=1, seed=1, sha256=None, downloads=tmp_path)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(photo_archive: Path) -> Iterator[str]:
    handler = lambda *a: _Quiet(*a, directory=str(photo_archive.parent))  # noqa: E731
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/{photo_archive.name}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_is_fetched_checked_and_kept(served: str, photo_archive: Path, tmp_path: Path) -> None:
    import hashlib

    right = hashlib.sha256(photo_archive.read_bytes()).hexdigest()
    path = fetch_file(served, tmp_path / "kept" / "photos.tgz", right)
    assert path.read_bytes() == photo_archive.read_bytes()
    assert fetch_file("http://127.0.0.1:9/none", path, right) == path  # kept: nothing is asked for
    assert [entry.name for entry in path.parent.iterdir()] == ["photos.tgz"]


def test_a_file_that_is_not_what_was_expected_is_not_kept(served: str, tmp_path: Path) -> None:
    with pytest.raises(DigestError, match="photos_sha256"):
        fetch_file(served, tmp_path / "photos.tgz", FLOWERS_SHA256)
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"data\.photos=drawn"):
        fetch_file("http://127.0.0.1:9/photos.tgz", tmp_path / "photos.tgz", FLOWERS_SHA256)
