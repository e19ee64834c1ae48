"""What other jobs, users and accidents leave in a cache folder never becomes a wrong sample, nor reaches outside it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from servers.shards import make_dataset, shard_content

pytest.importorskip("torch", reason="StreamingDataset needs torch: uv sync")

from lightning_stream import LocalDataset, MDSWriter, StreamingDataset
from lightning_stream.cache import CacheConfig, ShardCache, default_folder
from lightning_stream.cache.folder import CacheFolder
from lightning_stream.cache.space import CacheEntry, Space
from lightning_stream.errors import CacheError, DigestError, FormatError
from lightning_stream.shared_files import FileLock, run_once_across_processes
from lightning_stream.stores import LocalStore
from lightning_stream.stores.base import ObjectStream

NAME = "shard.00000.mds"


def write_tokens(folder: Path, first: int, hashes: list[str] | None = None, text: str | None = None) -> None:
    columns = {"x": "int64"} if text is None else {"x": "int64", "text": "str"}
    with MDSWriter(out=str(folder), columns=columns, hashes=hashes or [], size_limit=600) as writer:
        for k in range(100):
            writer.write({"x": np.int64(first + k)} | ({} if text is None else {"text": text}))


# -- two datasets


def test_datasets_of_equal_layout_without_hashes_never_share_a_folder(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", 0)
    write_tokens(tmp_path / "b", 1000)
    assert StreamingDataset(remote=str(tmp_path / "a"), local=str(tmp_path / "c"))[5]["x"] == 5
    with pytest.raises(CacheError, match=r"holds one dataset.*no hashes to compare.*another local="):
        StreamingDataset(remote=str(tmp_path / "b"), local=str(tmp_path / "c"))[5]


def rewrite_tokens(folder: Path, first: int, end: int, append: bool = False) -> None:
    """Without hashes, as mosaicml-streaming writes them: the shards of both have equal names and sizes."""
    if not append:
        shutil.rmtree(folder, ignore_errors=True)
    with MDSWriter(out=folder, columns={"x": "int64"}, hashes=[], size_limit=600, append=append) as writer:
        writer.write_batch({"x": np.arange(first, end)})


def test_no_shard_without_hashes_stays_of_a_dataset_that_was_written_again(tmp_path: Path) -> None:
    for first, end in ((0, 100), (1000, 1120), (2000, 2080)):
        rewrite_tokens(tmp_path / "data", first, end)
        dataset = StreamingDataset(remote=tmp_path / "data", local=tmp_path / "cache")
        assert [int(sample["x"]) for sample in dataset] == list(range(first, end))


def test_shards_without_hashes_stay_where_others_are_appended(tmp_path: Path) -> None:
    rewrite_tokens(tmp_path / "data", 0, 100)
    shard = tmp_path / "cache" / NAME
    inodes = set()
    for end in (100, 150):
        dataset = StreamingDataset(remote=tmp_path / "data", local=tmp_path / "cache")
        assert [int(sample["x"]) for sample in dataset] == list(range(end))
        inodes.add(shard.stat().st_ino)
        rewrite_tokens(tmp_path / "data", end, end + 50, append=True)
    assert len(inodes) == 1


def test_of_two_jobs_that_start_at_once_on_one_folder_one_is_refused(tmp_path: Path) -> None:
    for turn in range(5):
        made = [tmp_path / f"{turn}{name}" for name in "ab"]
        for k, folder in enumerate(made):
            write_tokens(folder, 1000 * k)
        errors: list[CacheError] = []
        start = threading.Barrier(2)

        def read(k: int, folder: Path, cache: Path, start: threading.Barrier, errors: list[CacheError]) -> None:
            dataset = StreamingDataset(remote=str(folder), local=str(cache))
            start.wait()
            try:
                assert [int(dataset[i]["x"]) for i in range(100)] == list(range(1000 * k, 1000 * k + 100))
            except CacheError as error:
                errors.append(error)

        threads = [
            threading.Thread(target=read, args=(k, folder, tmp_path / f"{turn}c", start, errors))
            for k, folder in enumerate(made)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 1


def test_an_index_of_somebody_else_without_hashes_lends_its_shards_to_nobody(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", 0)
    write_tokens(tmp_path / "b", 1000, text="longer")
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    with pytest.raises(CacheError, match=r"index\.json of another"):
        StreamingDataset(remote=str(tmp_path / "b"), local=str(tmp_path / "c"))[0]
    assert StreamingDataset(remote=str(tmp_path / "a"), local=str(tmp_path / "c"))[7]["x"] == 7


def test_shards_that_somebody_else_put_here_are_compared_with_their_hashes_once(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d")
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / NAME).write_bytes(bytes(10_000))  # as large as the right one
    (folder / "shard.00001.mds").write_bytes(shard_content(1, 10_000))
    cache = ShardCache(LocalStore(tmp_path / "d"), folder)
    for number in (0, 1):
        cache.ensure(index.entry(number))
        assert (folder / f"shard.{number:05}.mds").read_bytes() == shard_content(number, 10_000)
    space = Space(CacheFolder(folder))
    assert [entry.names for entry in space.entries()] == [(NAME,)]  # the second is not ours to evict
    assert space.knows(index.entry(1).raw)


# -- damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)


def test_a_named_hash_finds_what_changed_on_the_disk_since_the_last_run(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d", 0, ["xxh64"])
    where = {"remote": str(tmp_path / "d"), "local": str(tmp_path / "c"), "validate_hash": "xxh64"}
    assert [int(sample["x"]) for sample in StreamingDataset(**where)] == list(range(100))
    for shard in (tmp_path / "c").glob("*.mds"):
        flip(shard)
    assert [int(sample["x"]) for sample in StreamingDataset(**where)] == list(range(100))


@pytest.mark.parametrize("hashes", [[], ["sha1"]])
@pytest.mark.parametrize("limit", [None, "1mb"])
def test_a_cached_shard_that_cannot_be_read_is_fetched_again(
    tmp_path: Path, hashes: list[str], limit: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokens(tmp_path / "d", 0, hashes, text="some words")
    where = {"remote": str(tmp_path / "d"), "local": str(tmp_path / "c"), "cache_limit": limit}
    expected = [sample["x"] for sample in StreamingDataset(**where)]
    for name in (NAME, "shard.00002.mds"):
        shard = tmp_path / "c" / name
        shard.write_bytes(bytes(shard.stat().st_size))
    with caplog.at_level(logging.WARNING):
        assert [sample["x"] for sample in StreamingDataset(**where)] == expected
    assert ("is damaged, and is fetched again" in caplog.text) == bool(hashes)
    assert StreamingDataset(**where)[3]["x"] == 3


def test_a_shard_that_is_damaged_while_it_is_open_is_fetched_again(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d", 0, ["sha1"], text="some words")
    dataset = StreamingDataset(remote=str(tmp_path / "d"), local=str(tmp_path / "c"))
    assert dataset[0]["x"] == 0
    size = (tmp_path / "c" / NAME).stat().st_size
    with (tmp_path / "c" / NAME).open("r+b") as file:
        file.write(bytes(size))
    assert dataset[1]["x"] == 1


def test_damage_in_the_store_is_reported_and_fetched_again_but_once(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d", 0, text="some words")
    shard = tmp_path / "d" / NAME
    shard.write_bytes(bytes(shard.stat().st_size))
    opened: list[str] = []

    class Counting(LocalStore):
        def open(self, name: str, *args: object) -> object:
            opened.append(name)
            return super().open(name, *args)  # type: ignore[arg-type]

    dataset = StreamingDataset(remote=str(tmp_path / "d"), local=str(tmp_path / "c"))
    cache = dataset.reader.caches[0]
    cache.store = Counting(tmp_path / "d")
    for _ in range(3):
        with pytest.raises(FormatError, match=r"shard\.00000\.mds"):
            dataset[0]
    assert opened.count(NAME) == 2


def test_damage_in_the_only_copy_is_reported(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d", 0, text="some words")
    shard = tmp_path / "d" / NAME
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(FormatError, match=r"shard\.00000\.mds"):
        LocalDataset(str(tmp_path / "d"))[0]


def test_what_was_unpacked_from_the_only_copy_is_unpacked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "private"))
    with MDSWriter(out=str(tmp_path / "d"), columns={"x": "str"}, compression="zstd") as writer:
        for k in range(50):
            writer.write({"x": f"text {k}"})
    assert LocalDataset(str(tmp_path / "d"))[3]["x"] == "text 3"
    (shard,) = (tmp_path / "private").rglob("*.mds")
    shard.write_bytes(bytes(shard.stat().st_size))
    assert LocalDataset(str(tmp_path / "d"))[3]["x"] == "text 3"


@pytest.mark.parametrize("answer", [b"<html>please log in</html>", b'{"version": 2, "shards": [{"for', b""])
def test_a_wrong_answer_for_the_index_is_not_kept(tmp_path: Path, answer: bytes) -> None:
    make_dataset(tmp_path / "d")
    right = (tmp_path / "d" / "index.json").read_bytes()
    (tmp_path / "d" / "index.json").write_bytes(answer)
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c")
    with pytest.raises(FormatError, match=r"d/index\.json"):
        cache.newest_index()
    assert not (tmp_path / "c" / "index.json").exists()
    (tmp_path / "d" / "index.json").write_bytes(right)
    assert cache.newest_index().data == right


def test_an_index_of_ours_that_was_damaged_is_replaced(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d")
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c")
    right = cache.newest_index().data
    (tmp_path / "c" / "index.json").write_bytes(b"<html>")
    assert cache.newest_index().data == right


def test_a_label_of_the_store_that_was_damaged_is_written_again(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", 0, hashes=["xxh3_64"])
    for content in (b"\xb9 damaged", b""):
        dataset = StreamingDataset(remote=str(tmp_path / "a"), local=str(tmp_path / "c"))
        assert dataset[5]["x"] == 5
        label = tmp_path / "c" / ".lightning_stream" / "source"
        label.write_bytes(content)
    assert StreamingDataset(remote=str(tmp_path / "a"), local=str(tmp_path / "c"))[7]["x"] == 7
    assert label.read_bytes() != content


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_folder_that_is_deleted_while_it_is_read_is_filled_again(tmp_path: Path, workers: int) -> None:
    from lightning_stream import StreamingDataLoader

    write_tokens(tmp_path / "d", 0)
    dataset = StreamingDataset(remote=str(tmp_path / "d"), local=str(tmp_path / "c"), batch_size=4)
    seen: list[int] = []
    for number, batch in enumerate(StreamingDataLoader(dataset, batch_size=4, num_workers=workers)):
        seen += batch["x"].tolist()
        if number % 5 == 1:
            shutil.rmtree(tmp_path / "c", ignore_errors=True)
    assert seen == list(range(100))


def test_a_deletion_that_meets_one_fetch_many_times_ends_with_the_shard(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "d")
    deleted: list[str] = []

    class DeletesWhileItReads(LocalStore):
        def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
            if len(deleted) < 12:
                deleted.append(("drafts", "locks")[len(deleted) % 2])
                shutil.rmtree(tmp_path / "c" / ".lightning_stream" / deleted[-1])
            return super()._open(name, begin, end)

    cache = ShardCache(DeletesWhileItReads(tmp_path / "d"), tmp_path / "c")
    cache.ensure(index.entry(0))
    assert (tmp_path / "c" / NAME).read_bytes() == shard_content(0, 10_000)
    assert len(deleted) == 12


def test_a_shard_deleted_between_lease_and_opening_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens(tmp_path / "d", 0)
    lease = ShardCache.lease
    deleted: list[Path] = []

    def lease_then_delete(self: ShardCache, *args: object, **kwargs: object) -> object:
        held = lease(self, *args, **kwargs)  # type: ignore[arg-type]
        if not deleted:
            deleted.append(held.folder)
            shutil.rmtree(held.folder)
        return held

    monkeypatch.setattr(ShardCache, "lease", lease_then_delete)
    assert StreamingDataset(remote=str(tmp_path / "d"), local=str(tmp_path / "c"))[2]["x"] == 2
    assert deleted


def test_a_shard_replaced_between_lease_and_opening_by_one_of_another_index_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens(tmp_path / "d", 0, ["xxh3_64"])
    dataset = StreamingDataset(remote=str(tmp_path / "d"), local=str(tmp_path / "c"))
    lease = ShardCache.lease

    def lease_then_replace(self: ShardCache, *args: object, **kwargs: object) -> object:
        monkeypatch.setattr(ShardCache, "lease", lease)
        held = lease(self, *args, **kwargs)  # type: ignore[arg-type]
        shutil.rmtree(tmp_path / "d")
        write_tokens(tmp_path / "d", 7, ["xxh3_64"])
        another = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c")
        another.ensure(another.index(refresh=True).entry(0))
        return held

    monkeypatch.setattr(ShardCache, "lease", lease_then_replace)
    with pytest.raises(DigestError):
        dataset[2]


# -- other users of a shared cache


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    folder = CacheFolder(tmp_path / "c")
    folder.prepare()
    return folder


@pytest.mark.parametrize(
    "line",
    [
        ["+", 10_000, "../precious.txt"],
        ["+", 10_000, "{tmp}/precious.txt"],
        ["+", 10_000, "ok.mds", "../precious.txt"],
        ["+", 10_000, "out/precious.txt"],
        ["+", "1", "a"],
        ["+", 5],
        ["+"],
        ["+", -5, "a"],
        ["+", True, "a"],
        ["+", 10**400, "a"],
        ["+", 1.5, "a"],
        ["-"],
        ["-", None],
        ["?", 1, "a"],
        [[], {}],
        [],
        {},
        "text",
        None,
        7,
    ],
)
def test_a_line_in_the_log_of_a_former_release_can_neither_delete_a_file_elsewhere_nor_stop_a_run(
    tmp_path: Path, line: object
) -> None:
    (tmp_path / "precious.txt").write_text("precious")
    index = make_dataset(tmp_path / "d", num_shards=4)
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c", CacheConfig(limit_bytes=20_000))
    cache.ensure(index.entry(0))
    (tmp_path / "c" / "out").symlink_to(tmp_path)
    control, text = tmp_path / "c" / ".lightning_stream", json.dumps(line).replace("{tmp}", str(tmp_path))
    (control / "ledger").write_text(f"\n{text}\n")
    fresh = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c", CacheConfig(limit_bytes=20_000))
    try:
        for number in range(4):
            fresh.ensure(index.entry(number))
    except CacheError as error:
        assert "is a link" in str(error)  # noqa: PT017 - only for the entry behind a link
        assert line == ["+", 10_000, "out/precious.txt"]
    assert (tmp_path / "precious.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("..%2Fprecious.txt.10000", ""),
        ("{tmp}%2Fprecious.txt.10000", ""),
        ("%2Fprecious.txt.10000", ""),
        ("out%2Fprecious.txt.10000", ""),
        (".10000", ""),
        ("ok.mds", ""),
        ("ok.mds.", ""),
        ("ok.mds.-5", ""),
        ("ok.mds.1.5", ""),
        ("ok.mds.%31", ""),
        ("%6Fk.mds.10", ""),
        ("ok.mds.100000000000000000000", ""),
        ("ok.mds.10000+", '["ok.mds", "../precious.txt"]'),
        ("ok.mds.10000+", '["ok.mds", 7]'),
        ("ok.mds.10000+", '["another.mds"]'),
        ("ok.mds.10000+", '["ok.mds"'),
        ("ok.mds.10000+", "[]"),
        ("ok.mds.10000+", "{}"),
        ("ok.mds.10000+", "null"),
    ],
)
def test_a_marker_can_neither_delete_a_file_elsewhere_nor_stop_a_run(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "precious.txt").write_text("precious")
    index = make_dataset(tmp_path / "d", num_shards=4)
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c", CacheConfig(limit_bytes=20_000))
    cache.ensure(index.entry(0))
    (tmp_path / "c" / "out").symlink_to(tmp_path)
    marker = name.replace("{tmp}", quote(str(tmp_path), safe=""))
    (tmp_path / "c" / ".lightning_stream" / "held" / marker).write_text(content)
    fresh = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c", CacheConfig(limit_bytes=20_000))
    try:
        for number in range(4):
            fresh.ensure(index.entry(number))
    except CacheError as error:
        assert "is a link" in str(error)  # noqa: PT017 - only for the entry behind a link
        assert name == "out%2Fprecious.txt.10000"
    assert (tmp_path / "precious.txt").read_text() == "precious"


@pytest.mark.parametrize("part", ["", "locks", "drafts", "held"])
def test_a_control_folder_that_is_a_link_is_refused_and_what_it_names_stays(tmp_path: Path, part: str) -> None:
    victim = tmp_path / "victim"
    for name in ("", "locks", "drafts", "held"):
        (victim / name).mkdir(exist_ok=True)
        (victim / name / "precious").write_text("precious")
    control = tmp_path / "c" / ".lightning_stream"
    (control / part).parent.mkdir(parents=True)
    (control / part).symlink_to(victim / part)
    with pytest.raises(CacheError, match=r"must not hold links to other folders.*Remove it"):
        CacheFolder(tmp_path / "c").prepare()
    assert [(victim / name / "precious").read_text() for name in ("", "locks", "drafts", "held")] == ["precious"] * 4


def test_a_lock_or_marker_that_is_a_link_is_not_written_through(tmp_path: Path, folder: CacheFolder) -> None:
    (tmp_path / "precious").write_text("precious")
    lock = folder.lock("a")
    lock.path.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        lock.try_acquire()
    folder.draft("a", "marker").symlink_to(tmp_path / "precious")
    (folder.markers / "b.5").symlink_to(tmp_path / "precious")
    for names in (("a", "a.zstd"), ("b",)):
        with pytest.raises(OSError, match="symbolic links"):
            Space(folder).mark(CacheEntry(names, 5))
    lock.path.unlink()
    (folder.control / "space").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        Space(folder).make_space(CacheEntry(("b",), 5), 10, 1.0)
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_sub_folder_that_is_a_link_gets_no_shard(tmp_path: Path, folder: CacheFolder) -> None:
    (tmp_path / "victim").mkdir()
    (folder.path / "part").symlink_to(tmp_path / "victim")
    draft = folder.draft("a", "raw")
    draft.write_bytes(b"x")
    with pytest.raises(CacheError, match="is a link"):
        folder.publish(draft, "part/shard.mds")
    assert list((tmp_path / "victim").iterdir()) == []


@pytest.mark.parametrize("kind", ["annotations", "re", "missing_extra", "Exception", "KeyboardInterrupt", 7, None])
def test_a_failure_left_by_another_process_names_an_error_of_ours_or_none(tmp_path: Path, kind: object) -> None:
    lock, other = FileLock(tmp_path / "a.lock"), FileLock(tmp_path / "a.lock")
    assert other.try_acquire()

    calls: list[int] = []

    def done() -> None:
        calls.append(1)
        if len(calls) == 2:  # the wait has begun
            said = {"token": "t", "kind": kind, "message": "boom", "pid": 1}
            (tmp_path / "a.failed").write_text(json.dumps(said))

    with pytest.raises(CacheError, match="boom"):
        run_once_across_processes(done, lambda: 1, lock, 5.0)
    other.release()


def test_space_is_made_on_a_file_system_that_locks_only_writable_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def as_nfs_does(fd: int, how: int) -> None:
        if how & fcntl.LOCK_EX and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", as_nfs_does)
    index = make_dataset(tmp_path / "d", num_shards=5)
    cache = ShardCache(LocalStore(tmp_path / "d"), tmp_path / "c", CacheConfig(limit_bytes=20_000))
    for number in range(5):
        cache.ensure(index.entry(number))
    assert len(list((tmp_path / "c").glob("*.mds"))) == 2


def test_the_default_cache_of_a_user_without_a_home_is_made_by_that_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_dataset(tmp_path / "d")
    for name in ("LIGHTNING_STREAM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    store = LocalStore(tmp_path / "d")
    chosen = default_folder(store.identity)
    assert chosen.parent == tmp_path / "tmp" / f"lightning_stream-{os.getuid()}"
    chosen.parent.mkdir(mode=0o777)
    chosen.parent.chmod(0o777)
    with pytest.raises(CacheError, match=r"only user .* may write to; it belongs to .* \(mode 777\).*LIGHTNING_STREAM"):
        ShardCache(store, chosen).ensure(index.entry(0))
    chosen.parent.rmdir()
    ShardCache(store, chosen).ensure(index.entry(0))
    assert chosen.parent.stat().st_mode & 0o777 == 0o700
