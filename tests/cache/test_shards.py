"""The laws of one cache in one process: whole or absent, verified before it has a name, never the only copy."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from servers.shards import make_dataset, shard_content

from lightning_stream import shared_files as files_module
from lightning_stream.cache import CacheConfig, ShardCache, fetch
from lightning_stream.errors import CacheError, CacheFullError, DigestError, FormatError, NotFoundError
from lightning_stream.formats.index import Index
from lightning_stream.stores import LocalStore, ObjectStream
from lightning_stream.writer import JSONWriter


class Counting(LocalStore):
    """A folder that looks like a remote store, and counts the fetches."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.opened: list[str] = []

    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        self.opened.append(name)
        return super().open(name, begin, end)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def files(folder: Path) -> set[str]:
    """All files with final names."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in found if path.parts[0] != ".lightning_stream"}


def drafts(folder: Path) -> list[Path]:
    return list((folder / ".lightning_stream" / "drafts").iterdir())


def test_a_shard_is_fetched_once_and_equals_its_source(remote: Path, local: Path) -> None:
    index = make_dataset(remote)
    store = Counting(remote)
    cache = ShardCache(store, local)
    assert cache.index().data == cache.index().data == (remote / "index.json").read_bytes()
    for _ in range(3):
        assert cache.ensure(index.entry(2)) == local
    assert (local / "shard.00002.mds").read_bytes() == shard_content(2, 10_000)
    assert store.opened == ["index.json", f"versions/{index.digest[:16]}/00000001.json", "shard.00002.mds"]
    assert not cache.present(index.entry(1))
    assert drafts(local) == [] == list((local / ".lightning_stream" / "locks").iterdir())


def test_a_folder_that_holds_one_dataset_refuses_another(remote: Path, local: Path, tmp_path: Path) -> None:
    make_dataset(remote)
    ShardCache(LocalStore(remote), local).index()
    other = tmp_path / "other"
    make_dataset(other, 3)
    with pytest.raises(CacheError, match=r"holds one dataset: .* holds that of .*remote.* is another"):
        ShardCache(LocalStore(other), local).index()
    moved = tmp_path / "moved"
    shutil.copytree(remote, moved)
    assert ShardCache(LocalStore(moved), local).index().data == (remote / "index.json").read_bytes()


def test_threads_that_want_one_shard_cause_one_fetch(remote: Path, local: Path) -> None:
    index = make_dataset(remote)
    store = Counting(remote)
    cache = ShardCache(store, local)
    threads = [threading.Thread(target=cache.ensure, args=(index.entry(0),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.opened == ["shard.00000.mds"]


@pytest.mark.parametrize("keep_zip", [False, True])
@pytest.mark.parametrize("compression", ["zstd", "gz", "br:1"])
def test_a_compressed_file_is_dropped_after_decompression_unless_kept(
    remote: Path, local: Path, compression: str, keep_zip: bool
) -> None:
    index = make_dataset(remote, compression=compression)
    cache = ShardCache(LocalStore(remote), local, CacheConfig(keep_zip=keep_zip))
    cache.ensure(index.entry(0))
    assert (local / "shard.00000.mds").read_bytes() == shard_content(0, 10_000)
    assert len(files(local)) == 1 + keep_zip
    assert files(remote) == files(remote) | {"index.json"}
    assert len(files(remote)) == 5


def test_a_compressed_file_that_is_here_is_not_fetched_again(remote: Path, local: Path) -> None:
    index = make_dataset(remote, compression="zstd")
    cache = ShardCache(store := Counting(remote), local, CacheConfig(keep_zip=True))
    cache.ensure(index.entry(0))
    (local / "shard.00000.mds").unlink()
    cache.ensure(index.entry(0))
    assert store.opened == ["shard.00000.mds.zstd"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("compression", [None, "zstd", "gz"])
@pytest.mark.parametrize("hashes", [("sha1", "xxh3_64"), ("md5",)])
def test_wrong_bytes_are_fetched_again_then_reported_with_both_digests(
    remote: Path, local: Path, compression: str | None, hashes: tuple[str, ...]
) -> None:
    index = make_dataset(remote, compression=compression, hashes=hashes)
    (victim,) = remote.glob("shard.00001.mds*")
    flip(victim)
    cache = ShardCache(store := Counting(remote), local)
    for _ in range(2):  # a second attempt does not find the bad bytes under their final name
        with pytest.raises(DigestError, match=r"promises (xxh3_64|md5) [0-9a-f]+; the bytes have [0-9a-f]+"):
            cache.ensure(index.entry(1))
        assert files(local) == set()
        assert drafts(local) == []
    assert store.opened == [victim.name] * 4


def test_a_truncated_object_is_never_published(remote: Path, local: Path) -> None:
    index = make_dataset(remote, hashes=())
    (remote / "shard.00000.mds").write_bytes(b"short")
    with pytest.raises(DigestError, match="promises 10,000 bytes; there are 5"):
        ShardCache(LocalStore(remote), local).ensure(index.entry(0))
    assert files(local) == set()


def test_damage_that_passes_in_transit_is_healed_by_one_refetch(remote: Path, local: Path) -> None:
    index = make_dataset(remote)

    class Flaky(Counting):
        def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
            body = super().open(name, begin, end)
            if len(self.opened) > 1:
                return body
            return ObjectStream((bytes([chunk[0] ^ 1]) + chunk[1:] for chunk in body), body.num_bytes, close=body.close)

    ShardCache(Flaky(remote), local).ensure(index.entry(3))
    assert (local / "shard.00003.mds").read_bytes() == shard_content(3, 10_000)


def test_a_hash_that_the_index_lacks_is_a_wrong_setting(remote: Path, local: Path) -> None:
    index = make_dataset(remote)
    with pytest.raises(ValueError, match="it has xxh3_64"):
        ShardCache(LocalStore(remote), local, CacheConfig(validate_hash="sha256")).ensure(index.entry(1))


def test_a_named_hash_also_checks_what_was_here_before(remote: Path, local: Path) -> None:
    index = make_dataset(remote)
    local.mkdir()
    (local / "shard.00001.mds").write_bytes(bytes(10_000))
    ShardCache(LocalStore(remote), local, CacheConfig(validate_hash="xxh3_64")).ensure(index.entry(1))
    assert (local / "shard.00001.mds").read_bytes() == shard_content(1, 10_000)


def test_a_missing_shard_says_that_the_dataset_is_not_whole(remote: Path, local: Path) -> None:
    index = make_dataset(remote)
    (remote / "shard.00001.mds").unlink()
    with pytest.raises(NotFoundError, match=r"shard\.00001\.mds.*not whole"):
        ShardCache(LocalStore(remote), local).ensure(index.entry(1))


@pytest.mark.parametrize("how", ["same", "none", "storeless", "link"])
def test_a_local_dataset_is_read_in_place_and_never_changed(remote: Path, tmp_path: Path, how: str) -> None:
    index = make_dataset(remote)
    before = files(remote)
    (tmp_path / "link").symlink_to(remote)
    folder = {"same": remote, "none": None, "storeless": remote, "link": tmp_path / "link"}[how]
    cache = ShardCache(None if how == "storeless" else LocalStore(remote), folder, CacheConfig(limit_bytes=20_000))
    for shard in range(4):
        assert cache.ensure(index.entry(shard)) == remote
        assert not cache.evict(index.entry(shard))
    assert files(remote) == before
    assert not (remote / ".lightning_stream").exists()


def test_a_compressed_local_dataset_is_unpacked_into_the_private_default(
    remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "private"))
    index = make_dataset(remote, compression="zstd")
    before = files(remote)
    cache = ShardCache(None, remote)
    folder = cache.ensure(index.entry(0))
    assert folder.is_relative_to(tmp_path / "private")
    assert (folder / "shard.00000.mds").read_bytes() == shard_content(0, 10_000)
    assert files(remote) == before
    assert oct(folder.stat().st_mode & 0o777) == "0o700"


def test_damage_in_the_only_copy_is_an_error_and_nothing_is_touched(remote: Path) -> None:
    index = make_dataset(remote)
    (remote / "shard.00000.mds").write_bytes(b"short")
    with pytest.raises(DigestError, match="there are 5"):
        ShardCache(None, remote).ensure(index.entry(0))
    (remote / "shard.00000.mds").unlink()
    with pytest.raises(NotFoundError):
        ShardCache(None, remote).ensure(index.entry(0))


def test_the_limit_holds_and_the_least_recently_used_goes_first(remote: Path, local: Path) -> None:
    index = make_dataset(remote, num_shards=6)
    cache = ShardCache(LocalStore(remote), local, CacheConfig(limit_bytes=30_000))
    for shard in range(3):
        cache.ensure(index.entry(shard))
        os.utime(local / f"shard.{shard:05}.mds", (shard + 1, shard + 1))
    cache.ensure(index.entry(0))
    cache.ensure(index.entry(3))
    assert files(local) == {"shard.00000.mds", "shard.00002.mds", "shard.00003.mds"}


def test_a_plan_evicts_what_is_needed_latest(remote: Path, local: Path) -> None:
    index = make_dataset(remote, num_shards=6)
    cache = ShardCache(LocalStore(remote), local, CacheConfig(limit_bytes=30_000))
    cache.plan({"shard.00000.mds": 5.0, "shard.00001.mds": 9.0, "shard.00002.mds": 7.0}.get)
    for shard in range(3):
        cache.ensure(index.entry(shard))
    cache.ensure(index.entry(3))
    assert files(local) == {"shard.00000.mds", "shard.00002.mds", "shard.00003.mds"}


def test_a_leased_shard_is_never_evicted(remote: Path, local: Path) -> None:
    index = make_dataset(remote, num_shards=6)
    cache = ShardCache(LocalStore(remote), local, CacheConfig(limit_bytes=20_000, room_wait_s=0.05))
    with cache.lease(index.entry(0)), cache.lease(index.entry(1)) as second:
        assert not cache.evict(index.entry(0))
        with pytest.raises(CacheFullError, match=r"20,000 bytes, 20,000 of them are in use .* 10,000 more"):
            cache.ensure(index.entry(2))
        second.close()
        cache.ensure(index.entry(2))
    assert files(local) == {"shard.00000.mds", "shard.00002.mds"}


def test_a_shard_of_rows_that_is_evicted_while_it_is_looked_at_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JSONWriter(out=tmp_path / "d", columns={"x": "int"}) as writer:
        writer.write({"x": 1})
    entry = Index.from_file(tmp_path / "d" / "index.json").entry(0)
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c")
    path = next(cache.ensure(entry).glob("shard.*"))
    content = path.read_bytes()
    look = fetch.is_made_from

    def look_late(path: Path, stamp: str) -> bool:
        monkeypatch.setattr(fetch, "is_made_from", look)
        path.unlink()
        return look(path, stamp)

    monkeypatch.setattr(fetch, "is_made_from", look_late)
    cache.ensure(entry)
    assert path.read_bytes() == content


def test_a_lease_that_was_dropped_keeps_no_shard_from_being_evicted(remote: Path, local: Path) -> None:
    index = make_dataset(remote, num_shards=6)
    cache = ShardCache(LocalStore(remote), local, CacheConfig(limit_bytes=20_000, room_wait_s=0.05))
    leases = [cache.lease(index.entry(0)), cache.lease(index.entry(1))]
    assert not cache.evict(index.entry(0))
    leases.clear()
    assert cache.evict(index.entry(0))


def test_a_limit_below_one_shard_is_refused(remote: Path, local: Path) -> None:
    index = make_dataset(remote)
    with pytest.raises(CacheFullError, match="alone needs 10,000"):
        ShardCache(LocalStore(remote), local, CacheConfig(limit_bytes=9_999)).ensure(index.entry(0))


def test_files_that_the_cache_did_not_fetch_are_never_evicted(remote: Path, local: Path) -> None:
    index = make_dataset(remote, num_shards=6)
    local.mkdir()
    (local / "mine.txt").write_text("mine")
    (local / "shard.00000.mds").write_bytes(shard_content(0, 10_000))
    cache = ShardCache(LocalStore(remote), local, CacheConfig(limit_bytes=10_000))
    for shard in range(6):
        cache.ensure(index.entry(shard))
    assert not cache.evict(index.entry(0))
    assert files(local) == {"mine.txt", "shard.00000.mds", "shard.00005.mds"}


def test_the_books_survive_files_removed_by_hand_and_torn_markers(remote: Path, local: Path) -> None:
    index = make_dataset(remote, num_shards=6)
    cache = ShardCache(LocalStore(remote), local, CacheConfig(limit_bytes=30_000, room_wait_s=0.05))
    for shard in range(3):
        cache.ensure(index.entry(shard))
        (local / f"shard.{shard:05}.mds").unlink()
    (local / ".lightning_stream" / "held" / "torn.99+").write_bytes(b'["')
    fresh = pickle.loads(pickle.dumps(cache))
    for shard in range(3, 6):
        fresh.ensure(index.entry(shard))
    assert files(local) == {f"shard.{shard:05}.mds" for shard in (3, 4, 5)}


def test_a_cache_folder_of_another_user_is_an_error_that_says_what_to_do(remote: Path, local: Path) -> None:
    index = make_dataset(remote)
    ShardCache(LocalStore(remote), local).ensure(index.entry(0))
    assert local.stat().st_mode & 0o777 == 0o700
    assert (local / "shard.00000.mds").stat().st_mode & 0o777 == 0o600
    if os.getuid() != 0:
        local.chmod(0o500)
        with pytest.raises(CacheError, match="choose another `local`"):
            ShardCache(LocalStore(remote), local).ensure(index.entry(1))


def test_a_shared_cache_takes_the_folders_own_permissions(remote: Path, local: Path) -> None:
    index = make_dataset(remote)
    local.mkdir()
    local.chmod(0o2775)
    ShardCache(LocalStore(remote), local, CacheConfig(shared=True)).ensure(index.entry(0))
    assert (local / "shard.00000.mds").stat().st_mode & 0o777 == 0o664
    assert (local / ".lightning_stream").stat().st_mode & 0o7777 == 0o2775


def test_settings_that_cannot_be_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"limit_bytes .*; refetches"):
        CacheConfig(limit_bytes=0, refetches=-1)


def test_a_cache_is_pickled_by_recipe(remote: Path, local: Path) -> None:
    index = make_dataset(remote)
    cache = ShardCache(LocalStore(remote), local)
    cache.ensure(index.entry(0))
    copy: Any = pickle.loads(pickle.dumps(cache))
    assert copy.ensure(index.entry(0)) == local
    assert pickle.loads(pickle.dumps(ShardCache(None, remote))).in_place


def test_a_damaged_compressed_stream_names_its_object(remote: Path, local: Path) -> None:
    index = make_dataset(remote, compression="zstd", hashes=())
    packed = remote / "shard.00000.mds.zstd"
    packed.write_bytes(packed.read_bytes()[:-4] + b"....")
    with pytest.raises(FormatError):
        ShardCache(LocalStore(remote), local).ensure(index.entry(0))
    assert files(local) == set()


def test_a_folder_without_index_is_no_dataset(remote: Path, local: Path) -> None:
    remote.mkdir()
    for folder in (local, None):
        with pytest.raises(NotFoundError, match=r"A dataset is a folder with index\.json"):
            ShardCache(LocalStore(remote), folder).index()


def test_a_fresh_index_drops_the_shards_that_it_tells_otherwise(remote: Path, local: Path) -> None:
    old = make_dataset(remote, num_shards=3)
    cache = ShardCache(LocalStore(remote), local)
    cache.index()
    for shard in range(3):
        cache.ensure(old.entry(shard))
    new = make_dataset(remote, num_shards=4, seed=1)
    (remote / "shard.00001.mds").write_bytes(shard_content(1, 10_000))
    assert cache.index().data == old.data
    assert cache.index(refresh=True).data == (remote / "index.json").read_bytes()
    for shard in (0, 2, 3):
        folder = cache.ensure(new.entry(shard))
        assert (folder / f"shard.{shard:05}.mds").read_bytes() == shard_content(shard, 10_000, seed=1)


@pytest.mark.parametrize("named", [None, "xxh3_64"])
def test_a_shard_of_a_former_index_that_is_in_use_is_not_read_under_the_fresh_one(
    remote: Path, local: Path, named: str | None
) -> None:
    old = make_dataset(remote, num_shards=2)
    caches = [ShardCache(LocalStore(remote), local, CacheConfig(validate_hash=named)) for _ in range(2)]
    caches[0].index()
    for cache in caches * 2:
        cache.ensure(old.entry(1))
        cache.ensure(old.entry(0))
    with caches[0].lease(old.entry(0)):  # so it cannot be deleted
        new = make_dataset(remote, num_shards=2, seed=1)
        caches[1].index(refresh=True)
        for shard in (0, 1):
            caches[1].ensure(new.entry(shard))
            assert (local / f"shard.{shard:05}.mds").read_bytes() == shard_content(shard, 10_000, seed=1)
    assert caches[0].evict(new.entry(0))


@pytest.mark.parametrize("named", [None, "xxh3_64"])
@pytest.mark.parametrize("reader", ["of the former index", "of the fresh index"])
def test_a_job_reads_no_shard_that_a_job_of_another_index_fetched_or_found_right(
    remote: Path, local: Path, reader: str, named: str | None
) -> None:
    former = make_dataset(remote, num_shards=1).entry(0)
    first, second = (ShardCache(LocalStore(remote), local, CacheConfig(validate_hash=named)) for _ in range(2))
    for _ in range(2):  # the second time, the one that is here is checked
        first.index()
        lease = first.lease(former)
    fresh = make_dataset(remote, num_shards=1, seed=1).entry(0)  # the same name and size
    second.index(refresh=True)
    first.ensure(former)
    folder = second.ensure(fresh)
    assert (folder / fresh.raw.basename).read_bytes() == shard_content(0, 10_000, seed=1)
    lease.close()
    if reader == "of the former index":
        with pytest.raises(DigestError):  # as without a cache
            first.ensure(former)
        second.ensure(fresh)
        assert (folder / fresh.raw.basename).read_bytes() == shard_content(0, 10_000, seed=1)


@pytest.mark.parametrize("clock", ["is right", "is set back"])
def test_what_a_power_cut_spoiled_is_found_when_the_machine_is_up_again(
    remote: Path, local: Path, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    index = make_dataset(remote)
    cache = ShardCache(store := Counting(remote), local)
    for shard in (0, 1):
        cache.ensure(index.entry(shard))
    (local / "shard.00000.mds").write_bytes(bytes(10_000))  # the size of the right one, without its bytes
    now = time.time()
    passed_s = 1 if clock == "is right" else -3600
    monkeypatch.setattr(files_module, "boot_time", lambda: now + passed_s)
    monkeypatch.setattr(time, "time", lambda: now + passed_s)
    after = ShardCache(store, local)
    for shard in (0, 1):
        after.ensure(index.entry(shard))
        assert (local / f"shard.{shard:05}.mds").read_bytes() == shard_content(shard, 10_000)
    assert store.opened == ["shard.00000.mds", "shard.00001.mds", "shard.00000.mds"]


@pytest.mark.parametrize(("hashes", "synced"), [((), True), (("xxh64",), False)])
def test_only_what_no_hash_could_tell_waits_for_the_disk(
    remote: Path, local: Path, monkeypatch: pytest.MonkeyPatch, hashes: tuple[str, ...], synced: bool
) -> None:
    index = make_dataset(remote, hashes=hashes)
    seen: list[Path] = []
    monkeypatch.setattr("lightning_stream.shared_files.sync", seen.append)
    ShardCache(LocalStore(remote), local).ensure(index.entry(0))
    assert bool(seen) == synced


def test_what_another_job_has_just_used_goes_after_what_this_one_needs_late(remote: Path, local: Path) -> None:
    index = make_dataset(remote, num_shards=6)
    cache = ShardCache(LocalStore(remote), local, CacheConfig(limit_bytes=30_000))
    cache.plan({"shard.00000.mds": 5.0, "shard.00003.mds": 6.0, "shard.00004.mds": 7.0}.get)
    for shard in (0, 1, 2):  # 1 and 2 are no business of this job
        cache.ensure(index.entry(shard))
    os.utime(local / "shard.00001.mds", (1, 1))
    cache.ensure(index.entry(3))
    assert files(local) == {"shard.00000.mds", "shard.00002.mds", "shard.00003.mds"}
    cache.ensure(index.entry(4))
    assert files(local) == {"shard.00000.mds", "shard.00002.mds", "shard.00004.mds"}
