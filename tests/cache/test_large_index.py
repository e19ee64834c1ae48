"""A large index that did not change in the store is not read again; any change of it, there or here, is seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from servers.shards import make_dataset

from lightning_stream import MDSWriter
from lightning_stream.cache import ShardCache
from lightning_stream.cache import index as index_module
from lightning_stream.formats import scan
from lightning_stream.formats.hashing import digest
from lightning_stream.formats.index import Index
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
    monkeypatch.setattr(index_module, "_LARGE_INDEX_BYTES", 1)
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


def write_mixed(folder: Path) -> bytes:
    """An index of shards with different columns, compressed and not, and of converted data with deleted samples."""
    shards = []
    for number, (columns, compression) in enumerate(
        [({"a": "int"}, None), ({"b": "str", "c": "ndarray:int8:3"}, "zstd"), ({"a": "int"}, None)]
    ):
        with MDSWriter(out=folder / str(number), columns=columns, compression=compression, size_limit=400) as writer:
            for value in range(90):
                row = {"a": value, "b": "x" * value, "c": np.zeros(3, np.int8)}
                writer.write({name: row[name] for name in columns})
        index = json.loads((folder / str(number) / "index.json").read_bytes())
        for shard in index["shards"]:
            for file in filter(None, (shard["raw_data"], shard["zip_data"])):
                file["basename"] = f"{number}/{file['basename']}"
        shards += index["shards"]
    deleted = {"basename": "deleted.bin", "bytes": 16, "hashes": {"sha1": "0" * 40}, "samples": 2}
    former = {"digest": "", "source": "7" * 64}
    text = json.dumps({"shards": shards, "version": 2, "deleted": deleted, "converted_from": former})
    former["digest"] = Index.from_bytes(text.encode(), "").digest
    return json.dumps({"shards": shards, "version": 2, "deleted": deleted, "converted_from": former}).encode()


def test_what_is_kept_of_an_index_gives_the_same_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_mixed(tmp_path)
    index = Index.from_bytes(text, "here")
    kept = index.to_keep()
    monkeypatch.setattr(scan, "_scan_shards", lambda *_: pytest.fail("its shards were read again"))
    again = Index.from_bytes(text, "here", kept)
    assert index.source_digest == "7" * 64
    assert index.num_deleted == 2
    assert again.to_keep() == kept
    for name in ("schemas", "deleted", "digest", "source_digest", "num_samples", "data", "where"):
        assert getattr(again, name) == getattr(index, name)
    for name in ("shard_sizes", "raw_bytes", "stored_bytes"):
        assert getattr(again, name).tolist() == getattr(index, name).tolist()
    assert [again.entry(k) for k in range(len(again))] == [index.entry(k) for k in range(len(index))]


@pytest.mark.parametrize("damage", ["kept", "cut", "text", "schema"])
def test_what_is_kept_of_another_index_is_not_used(tmp_path: Path, damage: str) -> None:
    text = write_mixed(tmp_path)
    kept = bytearray(Index.from_bytes(text, "here").to_keep())
    if damage == "kept":
        kept[20] ^= 1
    elif damage == "cut":
        del kept[:48]
    elif damage == "text":
        text = text.replace(b'"samples": 2', b'"samples": 1').replace(b'"bytes": 16', b'"bytes":  8')
    else:
        text = text.replace(b'["a"]', b'["z"]', 1)
    fresh, found = Index.from_bytes(text, "here"), Index.from_bytes(text, "here", bytes(kept))
    assert (found.digest, found.schemas, found.num_deleted) == (fresh.digest, fresh.schemas, fresh.num_deleted)
    assert found.to_keep() == fresh.to_keep() != bytes(kept)


def test_a_large_index_that_did_not_change_is_not_scanned_again(
    store: Versioned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, _ = read(store, tmp_path / "local")
    scanned: list[bytes] = []
    scan_shards = scan._scan_shards
    monkeypatch.setattr(scan, "_scan_shards", lambda data, *rest: scanned.append(data) or scan_shards(data, *rest))
    assert read(store, tmp_path / "local") == (there, 0)
    assert scanned == []
    published = next((tmp_path / "local").glob(".*/published"))
    published.write_bytes(published.read_bytes()[:-1])  # it was written by another release, or is damaged
    assert read(store, tmp_path / "local") == (there, 0)
    assert scanned == [there]
    assert read(store, tmp_path / "local") == (there, 0)
    assert scanned == [there]
