"""The markers of a cache folder: what several processes write is one truth, whatever is left, killed or old."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers.shards import bytes_in, make_dataset, shard_content

from lightning_stream.cache import CacheConfig, ShardCache, Spaces, check_limit
from lightning_stream.cache import space as space_module
from lightning_stream.cache.folder import CacheFolder
from lightning_stream.cache.space import CacheEntry, Space
from lightning_stream.errors import CacheFullError
from lightning_stream.stores import LocalStore

KINDS = st.sampled_from(["reserve", "mark", "remove", "litter"])
ACTIONS = st.lists(st.tuples(KINDS, st.integers(0, 2), st.integers(0, 5), st.integers(1, 90)), max_size=40)
SPAWN = multiprocessing.get_context("spawn")
SHARD_BYTES, NUM_SHARDS, LIMIT_BYTES = 6_000, 30, 60_000


def prepared(path: Path) -> CacheFolder:
    folder = CacheFolder(path)
    folder.prepare()
    return folder


@settings(max_examples=40)
@given(ACTIONS)
def test_three_processes_agree_with_one_simple_book(actions: list[tuple[str, int, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = prepared(Path(path))
        spaces = [Space(folder) for _ in range(3)]
        book: dict[str, CacheEntry] = {}
        for action, who, shard, num_bytes in actions:
            name = f"shard{shard}"
            entry = CacheEntry((name, f"{name}.meta"), num_bytes)
            if action == "reserve":
                spaces[who].make_space(entry, 10_000, 1.0, former=book.get(name))
            if action == "mark":
                spaces[who].mark(entry, book.get(name))
            if action == "remove" and name in book:
                assert spaces[who].remove(book.pop(name))
            if action == "litter":
                (folder.markers / f"shard{shard}.{num_bytes + 100}+").write_text('["')
            if action in ("reserve", "mark"):
                book[name] = entry
            assert bytes_in(spaces[(who + 1) % 3]) == sum(entry.num_bytes for entry in book.values())
        assert all(set(space.entries()) == set(book.values()) for space in spaces)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=60), st.sets(st.integers(0, 9)))
def test_the_limit_is_never_passed_and_what_is_in_use_never_removed(
    wanted: list[tuple[int, int]], in_use: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        folder = prepared(Path(path))
        space, sizes = Space(folder), dict[int, int]()
        remove = Space.remove
        removed: list[str] = []

        def remove_unless_used(self: Space, entry: CacheEntry) -> bool:
            if int(entry.names[0]) in in_use:
                return False
            removed.append(entry.names[0])
            return remove(self, entry)

        patch.setattr(Space, "remove", remove_unless_used)
        for shard, size in wanted:
            num_bytes = sizes.setdefault(shard, size)
            try:
                space.make_space(CacheEntry((str(shard),), num_bytes), 100, 0.001)
            except CacheFullError as error:
                assert "in use" in str(error)  # noqa: PT017 - only where shards that are in use leave no space
            assert bytes_in(space) <= 100
        assert not in_use & set(map(int, removed))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_shard_that_somebody_deleted_or_cut_off_needs_no_more_room_than_before(
    tmp_path: Path, compression: str | None
) -> None:
    index = make_dataset(tmp_path / "d", 2, 10_000, compression)
    config = CacheConfig(16_000, room_wait_s=0.1)  # as much as one shard takes, with what it is decompressed from
    for change in (Path.unlink, lambda path: path.write_bytes(b"cut off")):
        for shard in (0, 1, 0):
            cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c", config)
            path = cache.ensure(index.entry(shard)) / index.entry(shard).raw.basename
            assert path.read_bytes() == shard_content(shard, 10_000)
        change(path)
    cache.ensure(index.entry(0))
    assert bytes_in(Space(prepared(tmp_path / "c"))) == 10_000


def test_what_processes_without_a_limit_fetch_counts_from_the_next_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Space(prepared(tmp_path)), Space(prepared(tmp_path))
    one.make_space(CacheEntry(("a",), 10), 100, 1.0)
    for name in ("b", "c"):
        other.make_space(CacheEntry((name,), 40), None, 1.0)
    one.make_space(CacheEntry(("d",), 20), 100, 1.0)  # the total of the last scan: 30 with this shard
    assert bytes_in(one) == 110
    monkeypatch.setattr(space_module, "_SCAN_EVERY_S", 0.0)
    one.make_space(CacheEntry(("e",), 20), 100, 1.0)
    assert bytes_in(one) <= 100


def test_many_small_shards_are_scanned_only_when_the_total_says_that_the_limit_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, scans = Space(prepared(tmp_path)), list[int]()
    entries = Space.entries
    monkeypatch.setattr(Space, "entries", lambda self: scans.append(1) or entries(self))
    for number in range(400):
        space.make_space(CacheEntry((f"s{number}",), 10), 3000, 1.0)
    assert bytes_in(space) <= 3000
    assert len(scans) < 40


def test_space_that_was_made_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(prepared(tmp_path))
    monkeypatch.setattr("lightning_stream.shared_files.time.sleep", None)  # no pause
    evicted = [space.make_space(CacheEntry((f"shard{number}",), 40), 100, 60.0) for number in range(6)]
    assert evicted == [0, 0, 1, 1, 1, 1]
    assert bytes_in(space) == 80


def test_shards_have_names_of_any_length_and_letters(tmp_path: Path) -> None:
    space = Space(prepared(tmp_path))
    names = [("a b/ü.mds",), ("long/" * 150 + "x",), ("ß" * 120, "ß.zip"), ("a.b", "a.c"), ("a.b.5",)]
    for names_of_one in names:
        space.mark(CacheEntry(names_of_one, 5))
    assert {entry.names for entry in Space(space.folder).entries()} == set(names)
    assert set(space.entries()) == {CacheEntry(names_of_one, 5) for names_of_one in names}
    space.forget(names[1][0])
    assert {entry.names for entry in Space(space.folder).entries()} == {*names} - {names[1]}


def test_a_shard_that_waits_for_room_is_left_to_another_process_that_has_room(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=3)
    few, more = (
        ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c", CacheConfig(limit_bytes=limit, room_wait_s=30))
        for limit in (20_000, 30_000)
    )
    with few.lease(index.entry(0)), few.lease(index.entry(1)), ThreadPoolExecutor() as threads:
        waiting = threads.submit(few.lease, index.entry(2))
        time.sleep(0.1)
        begin = time.monotonic()
        more.ensure(index.entry(2))
        waiting.result().close()
        assert time.monotonic() - begin < 15


def test_a_batch_of_shards_that_never_fit_at_once_is_refused_by_their_sizes(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=3)
    entries = [index.entry(number) for number in range(3)]
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c", CacheConfig(limit_bytes=29_999))
    check_limit(zip(repeat(cache), entries[:2]))
    with pytest.raises(CacheFullError, match="29,999 bytes; the 3 shards of a batch need 30,000 at once"):
        check_limit(zip(repeat(cache), entries))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / entries[0].raw.basename).write_bytes(shard_content(0, 10_000))  # a user's takes no room
    check_limit(zip(repeat(cache), entries))
    before = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "all", CacheConfig())
    for entry in entries:
        before.ensure(entry)
    check_limit(
        zip(repeat(ShardCache(LocalStore(tmp_path / "d"), tmp_path / "all", cache.config)), entries)
    )  # all are here


@pytest.mark.parametrize("keep_zip", [False, True])
def test_the_compressed_files_that_are_here_with_a_batch_count_too(tmp_path: Path, keep_zip: bool) -> None:
    index = make_dataset(tmp_path / "d", num_shards=3, compression="zstd")
    entries = [index.entry(number) for number in range(3)]
    packed = [entry.compressed.num_bytes for entry in entries if entry.compressed is not None]
    need = 30_000 + (sum(packed) if keep_zip else min(packed))

    def cache(limit_bytes: int) -> ShardCache:
        config = CacheConfig(limit_bytes=limit_bytes, keep_zip=keep_zip)
        return ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c", config)

    with pytest.raises(CacheFullError, match=f"the 3 shards of a batch need {need:,} at once"):
        check_limit(zip(repeat(cache(need - 1)), entries))
    enough = cache(need)
    check_limit(zip(repeat(enough), entries))
    by_size = sorted(zip(packed, entries, strict=True), key=lambda pair: -pair[0])
    leases = [enough.lease(entry, 0) for _, entry in by_size]
    check_limit(zip(repeat(cache(need - 1)), entries))  # all are here
    leases[0].close()
    assert enough.evict(by_size[0][1])
    with pytest.raises(CacheFullError, match=f"need {need:,} at once"):
        check_limit(zip(repeat(cache(need - 1)), entries))


# -- several folders under one limit


def fetch_from_both(root: str, seed: int) -> None:
    """Fetch the shards of both folders in a random order, and compare what they hold with the limit."""
    together = Spaces()
    caches = [
        ShardCache(LocalStore(f"{root}/d{i}"), f"{root}/c{i}", CacheConfig(LIMIT_BYTES), together=together)
        for i in range(2)
    ]
    caches = pickle.loads(pickle.dumps(caches))  # as those of a worker
    shards = [(cache, k) for cache in caches for k in range(NUM_SHARDS)]
    random.Random(seed).shuffle(shards)
    counted = 0
    for cache, k in shards:
        with cache.lease(cache.index().entry(k)):
            first, second, again = (Space(CacheFolder(Path(root, name))).entries() for name in ("c0", "c1", "c0"))
            if set(first) == set(again):  # nothing moved meanwhile
                assert sum(entry.num_bytes for entry in first + second) <= LIMIT_BYTES
                counted += 1
    assert counted > NUM_SHARDS


def test_one_limit_holds_for_the_folders_of_a_dataset_together_and_for_several_processes(tmp_path: Path) -> None:
    for i in range(2):
        make_dataset(tmp_path / f"d{i}", NUM_SHARDS, SHARD_BYTES)
    with ProcessPoolExecutor(3, mp_context=SPAWN) as processes:
        for done in [processes.submit(fetch_from_both, str(tmp_path), seed) for seed in range(3)]:
            done.result()


def test_what_another_stream_needs_last_is_evicted_first(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=3)
    together = Spaces()
    one, other = (
        ShardCache(LocalStore(tmp_path / "d"), tmp_path / name, CacheConfig(30_000), together=together)
        for name in ("one", "other")
    )
    names = [index.entry(k).raw.basename for k in range(3)]
    one.plan({names[0]: 5.0, names[1]: 7.0}.get)
    other.plan({names[0]: 9.0, names[1]: 6.0}.get)
    for cache, k in ((one, 0), (one, 1), (other, 0), (other, 1)):
        cache.ensure(index.entry(k))
    assert [cache.present(index.entry(k)) for cache in (one, other) for k in range(2)] == [True, True, False, True]
    with pytest.raises(CacheFullError, match="the 4 shards of a batch need 40,000 at once"):
        check_limit([(cache, index.entry(k)) for cache in (one, other) for k in range(2)])


# -- folders of former releases


def test_the_log_of_a_former_release_becomes_markers(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=6)
    names = [index.entry(k).raw.basename for k in range(6)]
    folder = prepared(tmp_path / "c")
    for number in range(4):
        (tmp_path / "c" / names[number]).write_bytes(shard_content(number, 10_000))
    lines: list[list[object]] = [["log", "0123456789abcdef"], ["+", 10_000, names[0]], ["+", 10_000, names[1]]]
    lines += [["+", 9, names[1]], ["+", 10_000, names[1]], ["+", 5, "gone"], ["-", "gone"], ["=", names[2]]]
    log = folder.control / "ledger"
    log.write_text("\n\n".join(map(json.dumps, lines)) + '\n["+", 99')
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c", CacheConfig(limit_bytes=30_000, room_wait_s=0.05))
    space = cache._space
    assert CacheEntry((names[0],), 10_000) in space.entries()
    assert not log.exists()
    assert {entry.names: entry.num_bytes for entry in space.entries()} == {(name,): 10_000 for name in names[:2]}
    assert not any(space.knows(index.entry(k).raw) for k in (2, 3))
    log.write_text(json.dumps(["+", 10_000, names[3]]))  # a process of that release still runs
    for number in (4, 5):
        cache.ensure(index.entry(number))
    assert bytes_in(space) == 30_000
    left = {path.name for path in (tmp_path / "c").glob("*.mds")}
    assert names[2] in left  # what somebody else put there is not evicted
    assert len(left) == 4


def test_a_folder_where_a_former_release_has_fetched_all_is_read(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=1)
    (entry,) = [index.entry(0)]
    folder = prepared(tmp_path / "c")
    (tmp_path / "c" / entry.raw.basename).write_bytes((tmp_path / "d" / entry.raw.basename).read_bytes())
    (folder.control / "ledger").write_text(f'\n["+", {entry.raw.num_bytes}, "{entry.raw.basename}"]\n')
    folder.markers.rmdir()  # which is of this release
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c")
    cache.lease(entry).close()
    assert cache._space.entries() == (CacheEntry((entry.raw.basename,), entry.raw.num_bytes),)
    assert cache._space.knows(entry.raw)


# -- processes that are killed


def read_forever(dataset: Path, folder: Path, limit_bytes: int | None, seed: int, said: Any) -> None:
    cache = ShardCache(LocalStore(dataset), folder, CacheConfig(limit_bytes=limit_bytes))
    index, rng = cache.index(), random.Random(seed)
    said.set()
    while True:
        number = rng.randrange(NUM_SHARDS)
        with cache.lease(index.entry(number)) as lease:
            content = (lease.folder / index.entry(number).raw.basename).read_bytes()
        if content != shard_content(number, SHARD_BYTES):
            (folder / f"wrong-{number}").touch()


@pytest.mark.parametrize("compression", [pytest.param(None, marks=pytest.mark.nightly), "zstd"])
def test_markers_cover_every_shard_whenever_processes_are_killed(tmp_path: Path, compression: str | None) -> None:
    index = make_dataset(tmp_path / "d", NUM_SHARDS, SHARD_BYTES, compression)
    folder, rng = tmp_path / "c", random.Random(3)
    most = SHARD_BYTES * 1.6 if compression else SHARD_BYTES  # with its compressed file
    processes: list[Any] = []
    try:
        for turn in range(6):
            while len(processes) < 3:
                said = SPAWN.Event()
                seed = 10 * turn + len(processes)
                process = SPAWN.Process(
                    target=read_forever, args=(tmp_path / "d", folder, LIMIT_BYTES, seed, said), daemon=True
                )
                process.start()
                processes.append(process)
                assert said.wait(60)
            time.sleep(rng.uniform(0.05, 0.4))
            victim = processes.pop(rng.randrange(3))
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    shards = {path.name: path.stat().st_size for path in folder.glob("shard.*")}
    marked: dict[str, int] = {}
    for entry in Space(CacheFolder(folder)).entries():
        for name in entry.names:
            marked[name] = marked.get(name, 0) + entry.num_bytes
    assert all(marked.get(name, 0) >= size for name, size in shards.items())
    assert sum(shards.values()) <= LIMIT_BYTES
    assert not list(folder.glob("wrong-*"))
    survivor = ShardCache(LocalStore(tmp_path / "d"), folder, CacheConfig(limit_bytes=LIMIT_BYTES, room_wait_s=5))
    for number in range(NUM_SHARDS):
        survivor.ensure(index.entry(number))
    assert most <= bytes_in(survivor._space) <= LIMIT_BYTES
    assert list((folder / ".lightning_stream" / "drafts").iterdir()) == []


def test_a_wrong_file_of_somebody_else_is_not_taken_for_the_shard_after_a_kill(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d", num_shards=1)
    raw = index.entry(0).raw
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / raw.basename).write_bytes(bytes(raw.num_bytes))  # as large as the right one

    class Killed(BaseException):
        pass

    class Dying(LocalStore):
        def get(self, *args: object, **options: object) -> int:
            raise Killed

    cache = ShardCache(Dying(tmp_path / "d"), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Space, "forget", lambda *_: None)  # a process that is killed does not
        with pytest.raises(Killed):
            cache.ensure(index.entry(0))
    cache.store = LocalStore(tmp_path / "d")
    cache.ensure(index.entry(0))
    assert (folder / raw.basename).read_bytes() == shard_content(0, raw.num_bytes)
