"""A large index that did not change in the store is not read again; any change of it, there or here, is seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from servers.shards import make_dataset

from lightning_stream.cache import ShardCache, fetch
from lightning_stream.formats.hashing import digest
from lightning_stream.stores import LocalStore, ObjectStream, StoreTraits


class Versioned(LocalStore):
    """A folder that looks like a remote store with versions, and counts the bytes that are read from it."""

    traits = StoreTraits(conditional_put=True)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.num_bytes = 0

    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        stream = super().open(name, begin, end)
        version = digest("xxh3_64", (Path(self.folder) / name).read_bytes())
        return replace(stream, chunks=self._counted(stream.chunks), version=version, digest=False)

    def _counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.num_bytes += len(chunk)
            yield chunk


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Versioned:
    monkeypatch.setattr(fetch, "_LARGE_INDEX_BYTES", 1)
    make_dataset(tmp_path / "remote")
    return Versioned(tmp_path / "remote")


def read(store: Versioned, folder: Path) -> tuple[bytes, int]:
    """The newest index, by a cache of a new process, and the bytes that were read for it."""
    store.num_bytes = 0
    return ShardCache(store, folder).newest_index().data, store.num_bytes


def test_an_index_that_did_not_change_is_read_once_per_folder(store: Versioned, tmp_path: Path) -> None:
    there = (tmp_path / "remote" / "index.json").read_bytes()
    assert read(store, tmp_path / "local") == (there, len(there))
    assert read(store, tmp_path / "local") == (there, 0)
    assert read(store, tmp_path / "another") == (there, len(there))


def test_an_index_that_was_replaced_is_read_again(store: Versioned, tmp_path: Path) -> None:
    read(store, tmp_path / "local")
    make_dataset(tmp_path / "remote", 3)
    there = (tmp_path / "remote" / "index.json").read_bytes()
    assert read(store, tmp_path / "local") == (there, len(there))
    assert read(store, tmp_path / "local") == (there, 0)
    assert (tmp_path / "local" / "index.json").read_bytes() == there


@pytest.mark.parametrize("keeps_size", [True, False])
def test_an_index_whose_copy_was_changed_is_read_again(store: Versioned, tmp_path: Path, keeps_size: bool) -> None:
    there, _ = read(store, tmp_path / "local")
    copy = tmp_path / "local" / "index.json"
    copy.write_bytes(there.replace(b"samples", b"s_mples") if keeps_size else there[:-1])
    assert read(store, tmp_path / "local") == (there, len(there))
    assert copy.read_bytes() == there


def test_a_small_index_is_read_each_time(store: Versioned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    there, _ = read(store, tmp_path / "local")
    assert read(store, tmp_path / "local") == (there, len(there))
