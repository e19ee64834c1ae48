"""A dataset is never read older than a reader could know: what must not be read is an error, what is absent is none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="StreamingDataset needs torch: uv sync")

from lightning_stream import StreamingDataset, version_log, versions
from lightning_stream.errors import AccessError, FormatError, LightningStreamError
from lightning_stream.stores import LocalStore, ObjectEntry, ObjectStream
from lightning_stream.version_log import older_entries, read_log, read_newest, read_version
from lightning_stream.writer import MDSWriter


class Bucket(LocalStore):
    """A folder as a bucket: some names are forbidden, and without the right to list absent names are, too."""

    def __init__(self, folder: Path, forbidden: Callable[[str], bool] = lambda _: False, can_list: bool = True) -> None:
        super().__init__(folder)
        self.forbidden, self.can_list = forbidden, can_list
        self.requests: list[str] = []

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        self.requests.append(name)
        if self.forbidden(name) or not (self.can_list or (self.folder / name).exists()):
            raise PermissionError(name)
        return super()._open(name, begin, end)

    def _list(self, prefix: str) -> Iterator[ObjectEntry]:
        self.requests.append(f"list {prefix}")
        if not self.can_list:
            raise PermissionError(prefix)
        return super()._list(prefix)


class Web(Bucket):
    """A web server that answers with a page instead of the status 404, and has no listing."""

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        if (self.folder / name).exists() and not self.forbidden(name):
            return super()._open(name, begin, end)
        return ObjectStream(iter([b"<html>log in"]), 12)


def write(out: Path, first: int, **how: Any) -> None:
    with MDSWriter(out=out, columns={"x": "int"}, **how) as writer:
        writer.write_batch({"x": list(range(first, first + 10))})


def of_changes(*numbers: int) -> Callable[[str], bool]:
    return lambda name: name.startswith("versions/") and int(name[-13:-5]) in numbers


def as_before(folder: Path) -> None:
    """Former releases did not say in the index of a large dataset that there are changes."""
    (first,) = folder.glob("index.*.json")
    first.replace(folder / "index.json")


@pytest.fixture(params=["small", "large", "large, of a former release"])
def changed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset with two appends and a deletion; the index of a large one is not published by each."""
    if request.param != "small":
        monkeypatch.setattr(version_log, "_PUBLISHED_BYTES", 0)
    write(tmp_path, 0)
    write(tmp_path, 10, append=True)
    versions.delete_rows(tmp_path, [3])
    write(tmp_path, 20, append=True)
    if request.param == "large, of a former release":
        as_before(tmp_path)
    return tmp_path


@pytest.mark.parametrize("can_list", [True, False])
@pytest.mark.parametrize("numbers", [(1, 2, 3, 4), (1,), (2,), (3,), (2, 3), (3, 4)])
def test_a_change_that_must_not_be_read_is_an_error_and_no_older_version(
    changed: Path, numbers: tuple[int, ...], can_list: bool
) -> None:
    number = json.loads((changed / "index.json").read_bytes()).get("versions", {"number": None})["number"]
    store = Bucket(changed, of_changes(*numbers), can_list)
    if can_list and number is not None and not any(number < one <= 3 for one in numbers):  # index.json has the others
        assert read_newest(store).index.num_samples == 30
    elif number is None and not can_list and 1 in numbers:  # as of a dataset that never changed; see docs/storage.md
        assert read_newest(store).number == 0
    else:
        with pytest.raises(AccessError, match="s3:ListBucket"):
            read_newest(store)


def test_without_the_right_to_list_an_end_that_nobody_can_tell_is_an_error_that_names_the_right(changed: Path) -> None:
    with pytest.raises(AccessError, match="s3:ListBucket"):
        read_newest(Bucket(changed, can_list=False))
    for number in range(4):
        for store in (Bucket(changed, can_list=False), Bucket(changed, of_changes(4))):
            assert read_version(store, number).number == number


def test_a_page_instead_of_a_change_is_no_end_of_a_changed_dataset(changed: Path) -> None:
    with pytest.raises(AccessError, match="404"):
        read_newest(Web(changed, of_changes(2), can_list=False))


@pytest.mark.parametrize("kind", [Bucket, Web])
def test_a_dataset_that_never_changed_needs_no_right_to_list_and_no_further_request(
    tmp_path: Path, kind: type[Bucket]
) -> None:
    write(tmp_path, 0)
    index = (tmp_path / "index.json").read_bytes()
    for can_list in (True, False):
        store = kind(tmp_path, can_list=can_list)
        assert read_newest(store).index.num_samples == 10
        assert not [name for name in store.requests if name.startswith("list")]
    assert b"versions" not in index


@pytest.mark.parametrize("is_large", [False, True])
def test_after_a_writer_that_was_killed_before_it_published_the_next_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(version_log, "_PUBLISHED_BYTES", 0)
    write(tmp_path, 0)

    def killed(*_: Any, **how: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lightning_stream.writer.place.publish", killed)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, 10, append=True)
    assert read_newest(Bucket(tmp_path)).index.num_samples == 20
    write(tmp_path, 20, append=True)
    assert json.loads((tmp_path / "index.json").read_bytes())["versions"]["number"] == (0 if is_large else 2)
    with pytest.raises(AccessError):
        read_newest(Bucket(tmp_path, of_changes(1, 2, 3), can_list=False))


def test_a_change_that_was_lost_is_an_error_if_there_are_later_ones(changed: Path) -> None:
    name = sorted(changed.glob("versions/*/*.json"))[1]
    name.unlink()
    with pytest.raises(FormatError, match="copy the dataset with its folder versions/"):
        read_log(LocalStore(changed))


def test_a_change_that_does_not_say_what_it_makes_is_an_error(changed: Path) -> None:
    name = min(changed.glob("versions/*/*.json"))
    name.write_text(json.dumps({**json.loads(name.read_bytes()), "digest": ""}))
    with pytest.raises(FormatError, match="versions of a dataset must be described in JSON"):
        read_log(LocalStore(changed))


def test_damaged_files_of_versions_raise_errors_of_this_package_and_never_other_samples(changed: Path) -> None:
    draws = random.Random(0)
    store = LocalStore(changed)
    expected = [read_version(store, number).index.digest for number in range(4)]
    files = [*changed.glob("versions/*/*.json"), *changed.glob("index*.json")]
    num_errors = 0
    for _ in range(150):
        path = draws.choice(files)
        text = path.read_bytes()
        damaged = bytearray(text[: draws.randrange(len(text))] if draws.random() < 0.3 else text)
        for _ in range(draws.randrange(3)):
            damaged[draws.randrange(len(damaged) or 1) : draws.randrange(len(text))] = draws.randbytes(2)
        path.write_bytes(damaged)
        for read in (read_newest, older_entries, lambda at: read_version(at, 1), lambda at: read_version(at, 0)):
            try:
                found = read(store)
            except LightningStreamError:
                num_errors += 1
            else:
                assert isinstance(found, list) or found.index.digest in expected or path.name.startswith("index")
        path.write_bytes(text)
    assert num_errors > 50
    assert len(StreamingDataset(local=changed)) == 29


@pytest.mark.parametrize("root", ["../../x", "", "0" * 15, "0123456789abcdeF"])
def test_a_log_with_a_root_that_is_no_digest_is_refused(tmp_path: Path, root: str) -> None:
    write(tmp_path, 0)
    index = json.loads((tmp_path / "index.json").read_bytes())
    (tmp_path / "index.json").write_text(json.dumps({**index, "versions": {"root": root, "number": 1}}))
    with pytest.raises(FormatError, match="versions"):
        read_newest(LocalStore(tmp_path))
