"""Files that are whole or absent, and locks that die with their owner; shown with real processes, killed for real."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import re
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_stream import shared_files as files
from lightning_stream.cache.folder import CacheFolder, default_folder
from lightning_stream.errors import AccessError, CacheError, CacheFullError, LockTimeoutError, NotFoundError
from lightning_stream.shared_files import FileLock, publish, publish_bytes, run_once_across_processes, scratch_here

FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # it is fork that is tested


def test_publishing_replaces_at_once_and_leaves_no_draft(tmp_path: Path) -> None:
    publish_bytes(b"one", tmp_path / "x")
    (tmp_path / "draft").write_bytes(b"two")
    publish(tmp_path / "draft", tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"two"


def test_a_lock_excludes_threads_and_leaves_no_file(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "l"), FileLock(tmp_path / "l")
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_keeps_no_permissions_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: object, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    monkeypatch.setattr(os, "chmod", refused)
    open_to_all = files.Modes(0o666, 0o777)
    with FileLock(tmp_path / "folder" / "l", modes=open_to_all):
        assert not FileLock(tmp_path / "folder" / "l", modes=open_to_all).try_acquire()
    publish_bytes(b"one", tmp_path / "folder" / "x", open_to_all)
    folder = CacheFolder(tmp_path / "cache")
    folder.prepare()
    draft = folder.draft("shard", "raw")
    draft.write_bytes(b"two")
    folder.publish(draft, "shard")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["x"]
    assert (tmp_path / "cache" / "shard").read_bytes() == b"two"


def test_waiting_for_a_lock_ends_at_the_deadline_and_names_the_holder(tmp_path: Path) -> None:
    with FileLock(tmp_path / "l"), pytest.raises(LockTimeoutError, match=rf"process {os.getpid()} on"):
        FileLock(tmp_path / "l", wait_s=0.02).__enter__()


def hold(path: Path, holding: Any) -> None:
    with FileLock(path):
        holding.set()
        signal.pause()


def test_a_lock_dies_with_its_owner(tmp_path: Path) -> None:
    holding = FORK.Event()
    owner = FORK.Process(target=hold, args=(tmp_path / "l", holding))
    owner.start()
    holding.wait()
    assert not FileLock(tmp_path / "l").try_acquire()
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join()
    with FileLock(tmp_path / "l", wait_s=5):
        pass


def test_a_forked_child_that_leaves_the_block_of_a_lock_does_nothing_to_it(tmp_path: Path) -> None:
    with FileLock(tmp_path / "l") as lock:
        child = FORK.Process(target=lock.release)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert lock.is_current()


def test_a_lock_dies_with_its_owner_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    pids = FORK.SimpleQueue()

    def own() -> None:
        lock = FileLock(tmp_path / "l")
        assert lock.try_acquire()
        child = FORK.Process(target=lambda: (pids.put(os.getpid()), signal.pause()))
        child.start()
        signal.pause()

    owner = FORK.Process(target=own)
    owner.start()
    grandchild = pids.get()
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join()
    try:
        with FileLock(tmp_path / "l", wait_s=5):
            pass
    finally:
        os.kill(grandchild, signal.SIGKILL)


def count(path: Path) -> int:
    return len(path.read_bytes()) if path.exists() else 0


def contend(folder: Path, rounds: int) -> None:
    for _ in range(rounds):
        with FileLock(folder / "l", wait_s=60):
            seen = count(folder / "n")
            (folder / "n").write_bytes(bytes(seen + 1))


def test_many_processes_never_hold_one_lock_at_once(tmp_path: Path) -> None:
    workers = [FORK.Process(target=contend, args=(tmp_path, 100)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert count(tmp_path / "n") == 400


def test_work_is_done_once_and_all_get_it(tmp_path: Path) -> None:
    done, calls = tmp_path / "done", []

    def work() -> bytes:
        calls.append(1)
        publish_bytes(b"it", done)
        return b"it"

    def run(results: list[bytes]) -> None:
        here = lambda: done.read_bytes() if done.exists() else None  # noqa: E731
        results.append(run_once_across_processes(here, work, FileLock(tmp_path / "a.lock"), 10))

    results: list[bytes] = []
    threads = [threading.Thread(target=run, args=(results,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"it"] * 16
    assert len(calls) == 1


def wait_for_it(folder: Path, answers: Any, waiting: Any) -> None:
    def done() -> None:
        waiting.release()

    try:
        run_once_across_processes(done, lambda: answers.put("worked"), FileLock(folder / "a.lock"), 30)
    except NotFoundError as error:
        answers.put(str(error))


def test_a_failure_is_raised_in_every_waiter_at_once_and_a_later_call_tries_again(tmp_path: Path) -> None:
    answers, looks = FORK.Queue(), [FORK.Semaphore(0) for _ in range(4)]
    waiters = [FORK.Process(target=wait_for_it, args=(tmp_path, answers, waiting)) for waiting in looks]

    def fail() -> None:
        for waiter in waiters:
            waiter.start()
        for waiting in looks * 3:  # each has looked again and again: it waits
            waiting.acquire()
        raise NotFoundError("the shard is not there")

    with pytest.raises(NotFoundError):
        run_once_across_processes(lambda: None, fail, FileLock(tmp_path / "a.lock"), 10)
    said = [answers.get(timeout=30) for _ in waiters]
    for waiter in waiters:
        waiter.join()
    assert all(text.startswith(f"the shard is not there (raised in process {os.getpid()}") for text in said)
    assert run_once_across_processes(lambda: None, lambda: "again", FileLock(tmp_path / "a.lock"), 10) == "again"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [CacheFullError("full"), AccessError("keys"), OSError(24, "files"), MemoryError(), ValueError("validate_hash")],
)
def test_what_one_process_fails_at_by_its_own_limits_or_settings_is_tried_by_the_next_that_waits(
    tmp_path: Path, error: Exception
) -> None:
    waits, results = threading.Event(), []

    def fail() -> None:
        assert waits.wait(10)
        raise error

    def not_yet() -> None:
        waits.set()

    def wait() -> None:
        results.append(run_once_across_processes(not_yet, lambda: "done", FileLock(tmp_path / "a.lock"), 10))

    def begin() -> None:
        waiter.start()
        fail()

    waiter = threading.Thread(target=wait)
    with pytest.raises(type(error)):
        run_once_across_processes(lambda: None, begin, FileLock(tmp_path / "a.lock"), 10)
    waiter.join(10)
    assert results == ["done"]


def test_a_waiter_takes_over_from_a_killed_owner(tmp_path: Path) -> None:
    holding = FORK.Event()
    owner = FORK.Process(target=hold, args=(tmp_path / "a.lock", holding))
    owner.start()
    holding.wait()
    looks = 0

    def done() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            os.kill(owner.pid or 0, signal.SIGKILL)

    assert run_once_across_processes(done, lambda: "taken over", FileLock(tmp_path / "a.lock"), 30) == "taken over"
    owner.join()


def test_a_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with pytest.raises(CacheError, match=r"no working file locks \(\w+\).*disk of this machine"):
        FileLock(tmp_path / "l").try_acquire()
    with pytest.raises(CacheError, match="no working file locks"):
        CacheFolder(tmp_path / "c").prepare()


def test_locks_that_exclude_no_one_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.fcntl, "flock", lambda fd, how: None)
    with pytest.raises(CacheError, match="no working file locks"):
        CacheFolder(tmp_path / "c").prepare()


def test_drafts_of_killed_processes_are_cleared_those_of_living_ones_stay(tmp_path: Path) -> None:
    place = CacheFolder(tmp_path)
    place.prepare()
    dead, living = place.draft("dead", "0.raw"), place.draft("living", "0.raw")
    dead.write_bytes(b"x")
    living.write_bytes(b"x")
    with place.lock("living"):
        CacheFolder(tmp_path).prepare()
    assert not dead.exists()
    assert living.exists()


def test_the_default_folder_is_one_per_store_and_follows_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", "/fast/disk")
    one, other = default_folder("s3://bucket/x"), default_folder("s3://bucket/y")
    assert one.parent == Path("/fast/disk")
    assert one != other
    monkeypatch.delenv("LIGHTNING_STREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert default_folder("s3://bucket/x").parent == Path("/x/cache/lightning_stream")


def test_our_errors_survive_a_pickle() -> None:
    assert str(pickle.loads(pickle.dumps(NotFoundError("x")))) == "x"


def test_what_a_killed_process_left_of_a_small_file_is_cleared(tmp_path: Path) -> None:
    place = CacheFolder(tmp_path)
    place.prepare()
    writing = FORK.Event()

    def write() -> None:
        with files.locked_draft(place.control / "source") as draft:
            draft.write_bytes(b"half")
            writing.set()
            signal.pause()

    writer = FORK.Process(target=write)
    writer.start()
    writing.wait()
    CacheFolder(tmp_path).prepare()
    assert len(list(place.control.glob(".draft-*"))) == 1
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    CacheFolder(tmp_path).prepare()
    assert not list(place.control.glob(".draft-*"))


def test_the_scratch_folder_of_another_machine_is_one_that_spark_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/elsewhere")
    assert scratch_here(str(tmp_path)) == str(tmp_path)
    made = scratch_here(str(tmp_path / "of another machine"))
    assert Path(made).parent == tmp_path
    assert scratch_here(str(tmp_path / "of another machine")) == made
    with files.scratch_folder() as folder:
        assert Path(folder).parent == tmp_path


@pytest.mark.parametrize(("answer", "is_published"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_folder_that_cannot_be_flushed_is_no_error_and_any_other_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int, is_published: bool
) -> None:
    flush = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(answer, os.strerror(answer))
        flush(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with contextlib.nullcontext() if is_published else pytest.raises(OSError, match=re.escape(str(tmp_path))):
        publish_bytes(b"it", tmp_path / "final")
    assert (tmp_path / "final").read_bytes() == b"it"
