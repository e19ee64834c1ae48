"""All workers of an iteration start at one place, and the next iteration an epoch further."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import pickle
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # noqa: E402

from lightning_stream.loading.shared_position import SharedPosition, Start  # noqa: E402
from lightning_stream.loading.torch_private import iteration_key  # noqa: E402


def test_workers_with_one_key_share_a_start_and_another_key_begins_the_next_epoch() -> None:
    shared = SharedPosition(Start(2, 30))
    assert shared.current is None
    assert [shared.begin(5, worker) for worker in (1, 0, 1023)] == [Start(2, 30)] * 3
    assert (shared.current, shared.upcoming) == (Start(2, 30), Start(3))
    assert [shared.begin(6, worker) for worker in (0, 1)] == [Start(3)] * 2
    assert [shared.begin(6, worker) for worker in (0, 1)] == [Start(4)] * 2  # persistent workers keep their key
    shared.upcoming = Start(1, 8)
    assert (shared.current, shared.begin(6, 1)) == (None, Start(1, 8))
    with pytest.raises(ValueError, match="at most 1024 workers"):
        shared.begin(1, 1024)


def test_workers_join_their_own_iteration_whatever_began_since() -> None:
    shared = SharedPosition()
    assert [shared.begin(5, 0), shared.begin(6, 0)] == [Start(0), Start(1)]
    assert [shared.begin(5, 1), shared.begin(6, 1)] == [Start(0), Start(1)]
    shared.upcoming = Start(7, 16)
    assert shared.begin(6, 2) == Start(1)
    assert shared.current is None
    assert shared.begin(8, 1) == Start(7, 16)


class Epochs(IterableDataset[Any]):
    """The epoch that each worker begins in."""

    def __init__(self) -> None:
        self.shared = SharedPosition()

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        yield self.shared.begin(iteration_key(info), info.id).epoch


@pytest.mark.parametrize(
    ("method", "persistent"),
    [("fork", False), ("fork", True), pytest.param("spawn", False, marks=pytest.mark.nightly)],
)
def test_all_workers_of_an_iteration_read_one_epoch_under_one_seed(method: str, persistent: bool) -> None:
    """Also where iterations begin in between, or are abandoned before all of their workers began."""
    loader = DataLoader(
        Epochs(), batch_size=None, num_workers=2, multiprocessing_context=method, persistent_workers=persistent
    )
    iterations = []
    for _ in range(2):
        torch.manual_seed(0)
        iterations.append(iter(loader))
        next(iterations[-1])
    if not persistent:
        other = iter(loader)
        assert next(other) == next(other)
    torch.manual_seed(0)
    again = iter(loader)
    assert next(again) == next(again) > 1


def begin(shared: SharedPosition, queue: Any, worker: int) -> None:
    for key in (0, 7, 7, 8):
        queue.put(shared.begin(key, worker))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_worker_processes_see_it_and_move_it(method: str) -> None:
    context = multiprocessing.get_context(method)
    shared, queue = SharedPosition(), context.Queue()
    process = context.Process(target=begin, args=(shared, queue, 0))
    process.start()
    assert [queue.get(timeout=60) for _ in range(4)] == [Start(k) for k in range(4)]
    process.join()
    assert shared.begin(8, 1) == Start(3)


def test_a_copy_is_a_value_of_its_own() -> None:
    shared = SharedPosition(Start(1, 4))
    for one in (pickle.loads(pickle.dumps(shared)), copy.deepcopy(shared)):
        one.begin(1)
        assert (one.upcoming, shared.upcoming) == (Start(2), Start(1, 4))


@pytest.mark.parametrize("answer", [errno.ENOSYS, errno.EPERM])
def test_where_the_system_refuses_memory_without_a_name_a_temporary_file_is_shared(
    answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_name: str) -> int:
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(os, "memfd_create", refused, raising=False)
    shared = SharedPosition(Start(2, 4))
    assert shared.begin(1) == Start(2, 4)
    assert shared.upcoming == Start(3)


def test_it_needs_no_file_and_says_when_there_is_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    if hasattr(os, "memfd_create"):
        SharedPosition()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            SharedPosition()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
