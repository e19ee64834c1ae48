"""What stands where a cache wants to write is said in the cache's words, and left as it is."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.shards import bytes_in, make_dataset

from lightning_stream.cache import CacheConfig, ShardCache
from lightning_stream.cache.folder import CacheFolder, default_folder
from lightning_stream.cache.space import Space
from lightning_stream.errors import CacheError, CacheFullError, NotFoundError
from lightning_stream.shared_files import FileLock
from lightning_stream.stores import LocalStore, RetryingStore
from lightning_stream.writer import merge_index

SHARD = "shard.00000.mds"


def read(remote: Path, folder: Path) -> bytes:
    cache = ShardCache(LocalStore(remote), folder)
    entry = cache.index(refresh=True).entry(0)
    return (cache.ensure(entry) / entry.raw.basename).read_bytes()


def file_at(name: str) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        (folder / name).write_text("precious") if name else folder.write_text("precious")

    return put


def folder_at(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).mkdir()


@pytest.mark.parametrize(
    ("put", "where"),
    [
        (file_at(""), "cache)"),
        (file_at(".lightning_stream"), ".lightning_stream)"),
        (folder_at(SHARD), SHARD),
        (folder_at("index.json"), "index.json"),
    ],
)
def test_what_is_in_the_way_is_named_with_the_remedy(tmp_path: Path, put: Callable[[Path], None], where: str) -> None:
    make_dataset(tmp_path / "d", num_shards=1)
    folder = tmp_path / "cache"
    if where != "cache)":
        folder.mkdir()
    put(folder)
    before = sorted(folder.iterdir()) if folder.is_dir() else folder.read_text()
    with pytest.raises(CacheError, match=rf"the cache {folder} cannot be used \(.*{re.escape(where)}.*choose another"):
        read(tmp_path / "d", folder)
    after = [path for path in sorted(folder.iterdir()) if path in before] if folder.is_dir() else folder.read_text()
    assert after == before


def test_a_file_above_the_cache_is_named_with_the_remedy(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", num_shards=1)
    (tmp_path / "file").write_text("precious")
    folder = tmp_path / "file" / "jobs" / "cache"
    with pytest.raises(CacheError, match=rf"the cache {folder} cannot be used \(File exists: {tmp_path}/file\)"):
        read(tmp_path / "d", folder)


def test_a_cache_needs_no_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refused)
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "caches"))
    make_dataset(tmp_path / "d", num_shards=1)
    shard = (tmp_path / "d" / SHARD).read_bytes()
    assert read(tmp_path / "d", tmp_path / "cache") == shard
    assert read(tmp_path / "d", default_folder("s3://bucket")) == shard


def test_an_index_that_cannot_be_read_and_is_not_of_this_cache_stays(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", num_shards=1)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "index.json").write_text('{"precious": 1}')
    with pytest.raises(CacheError, match=r"in .*cache cannot be read .*did not put it there\. Delete it, or choose"):
        read(tmp_path / "d", tmp_path / "cache")
    assert (tmp_path / "cache" / "index.json").read_text() == '{"precious": 1}'


def test_drafts_of_a_deleted_folder_are_no_error(tmp_path: Path) -> None:
    CacheFolder(tmp_path / "deleted").delete_drafts(SHARD)
    assert not (tmp_path / "deleted").exists()


def test_a_link_under_a_shards_name_is_replaced_and_what_it_names_is_not(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", num_shards=1)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / SHARD).symlink_to(tmp_path / "victim")
    assert read(tmp_path / "d", tmp_path / "cache") == (tmp_path / "d" / SHARD).read_bytes()
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize(
    "gone", ["", ".lightning_stream", ".lightning_stream/drafts", ".lightning_stream/locks", ".lightning_stream/held"]
)
def test_a_cache_that_is_deleted_during_a_run_is_made_again(tmp_path: Path, gone: str) -> None:
    index = make_dataset(tmp_path / "d", num_shards=3)
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "cache", CacheConfig(limit_bytes=100_000))
    for number in range(3):
        raw = index.entry(number).raw
        assert (cache.ensure(index.entry(number)) / raw.basename).stat().st_size == raw.num_bytes
        shutil.rmtree(tmp_path / "cache" / gone)


@pytest.mark.parametrize(
    "gone", ["", ".lightning_stream", ".lightning_stream/drafts", ".lightning_stream/locks", ".lightning_stream/held"]
)
def test_a_cache_that_is_deleted_while_a_draft_is_written_there_is_made_again(tmp_path: Path, gone: str) -> None:
    index, local = make_dataset(tmp_path / "d", num_shards=1), tmp_path / "cache"

    asked: list[str] = []

    class Deleting(RetryingStore):
        def connect(self, name: str, begin: int, end: int | None) -> Any:
            body = super().connect(name, begin, end)
            asked.append(name)
            if name == SHARD and asked.count(SHARD) <= 2:
                shutil.rmtree(local / gone)
            return body

    cache = ShardCache(Deleting(LocalStore(tmp_path / "d")), local)
    assert (cache.ensure(index.entry(0)) / SHARD).read_bytes() == (tmp_path / "d" / SHARD).read_bytes()


def test_a_lock_that_was_deleted_and_made_again_by_another_stays_that_ones(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "a.lock"), FileLock(tmp_path / "a.lock")
    assert first.try_acquire()
    (tmp_path / "a.lock").unlink()
    assert second.try_acquire()
    assert (first.is_current(), second.is_current()) == (False, True)
    first.release()
    assert second.is_current()
    assert not FileLock(tmp_path / "a.lock").try_acquire()


def test_a_failed_repair_keeps_the_marker_of_the_files_that_stay(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=1)
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "cache")
    entry = index.entry(0)
    lease = cache.lease(entry)
    damaged = tmp_path / "cache" / SHARD
    damaged.write_bytes(b"x" * entry.raw.num_bytes)
    (tmp_path / "d" / SHARD).unlink()
    with pytest.raises(NotFoundError):
        cache.fetch_again(entry, lease)
    assert damaged.exists()
    assert bytes_in(Space(CacheFolder(tmp_path / "cache"))) == entry.raw.num_bytes


def test_an_error_of_the_disk_at_the_counted_bytes_names_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_dataset(tmp_path / "d", num_shards=1)
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "cache", CacheConfig(limit_bytes=20_000))

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(CacheError, match=r"cannot be used \(Input/output error: .*lightning_stream/space\)"):
            cache.ensure(index.entry(0))
    cache.ensure(index.entry(0))


def test_a_file_that_the_system_refuses_for_its_size_is_said(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", num_shards=1)
    code = (
        "import resource, signal, sys; from pathlib import Path; from lightning_stream.cache import ShardCache\n"
        "from lightning_stream.stores import LocalStore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "cache = ShardCache(LocalStore(sys.argv[1]), sys.argv[2])\n"
        "cache.ensure(cache.index().entry(0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "d"), str(tmp_path / "cache")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "CacheError: the cache" in done.stderr
    assert "cannot be used (File too large" in done.stderr
    assert "ulimit -f" in done.stderr


@pytest.mark.parametrize("ignores_case", [True, False])
def test_shards_that_would_be_one_file_are_refused_where_case_makes_no_difference(
    tmp_path: Path, ignores_case: bool
) -> None:
    """Without hashes, 100 of 200 samples came twice."""
    for name in ("EN", "en", "de"):
        make_dataset(tmp_path / "d" / name, num_shards=1, hashes=[])
    merge_index(str(tmp_path / "d"))
    folder = tmp_path / "cache"
    if ignores_case:  # as such a file system answers
        (folder / ".lightning_stream" / "LOCKS").mkdir(parents=True)
        with pytest.raises(CacheError, match=r"EN/shard.00000.mds and en/shard.00000.mds are one file in .*`local`"):
            read(tmp_path / "d", folder)
        assert not (folder / "index.json").exists()
        shutil.rmtree(tmp_path / "d" / "en")
        (tmp_path / "d" / "index.json").unlink()
        merge_index(str(tmp_path / "d"))
    assert read(tmp_path / "d", folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount; run as root to see a disk that is read only")
def test_a_disk_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", num_shards=1)
    (tmp_path / "ro").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(tmp_path / "ro")], check=False)
    if mounted.returncode:
        pytest.skip("mount is refused here; a machine where root may mount shows it")
    try:
        with pytest.raises(CacheError, match=r"cannot be used \(Read-only file system"):
            read(tmp_path / "d", tmp_path / "ro" / "cache")
    finally:
        subprocess.run(["umount", str(tmp_path / "ro")], check=True)


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of its own, mounted with the given options."""
    if os.getuid() != 0:
        pytest.skip("only root can mount; run as root to see a small disk")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", request.param, "none", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("mount is refused here; a machine where root may mount shows it")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("small_disk", ["size=128k"], indirect=True)
def test_what_a_limit_evicts_makes_room_on_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=5, shard_bytes=40_000)
    cache = ShardCache(LocalStore(tmp_path / "d"), small_disk / "cache", CacheConfig(limit_bytes=90_000))
    for number in range(5):
        cache.ensure(index.entry(number))
    unlimited = ShardCache(LocalStore(tmp_path / "d"), small_disk / "cache")
    unlimited.ensure(index.entry(0))  # the third, and so the last that the disk holds
    for _ in range(2):  # again: what failed let go of its locks
        with pytest.raises(CacheFullError, match="40,000 bytes are needed"):
            unlimited.ensure(index.entry(1))
    cache.ensure(index.entry(1))


@pytest.mark.parametrize("small_disk", ["size=4m,nr_inodes=9"], indirect=True)
def test_a_disk_without_free_inodes_and_a_full_disk_are_different_errors(tmp_path: Path, small_disk: Path) -> None:
    make_dataset(tmp_path / "d", num_shards=1)
    with pytest.raises(CacheFullError, match=r"is full, though 4,\d+,\d+ bytes are free on it: all its inodes may be"):
        read(tmp_path / "d", small_disk / "cache")


def test_a_full_disk_with_a_few_free_bytes_and_free_inodes_is_no_matter_of_inodes(tmp_path: Path) -> None:
    class Disk:
        f_files, f_favail, f_bavail, f_frsize = 1000, 900, 2, 4096

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_stream.cache.folder.os.statvfs", lambda _: Disk)
        patch.setattr("lightning_stream.shared_files.os.fsync", _no_space)
        make_dataset(tmp_path / "d", num_shards=1)
        with pytest.raises(CacheFullError) as caught:
            read(tmp_path / "d", tmp_path / "cache")
    assert "8,192 are free" in str(caught.value)
    assert "inodes" not in str(caught.value)


def _no_space(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
