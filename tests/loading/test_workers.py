"""The worker processes of a loader: who ends them, and what that means for an iteration in progress."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from support.data import write_ids

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_stream.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*")
PERSISTENT = pytest.mark.parametrize("persistent", [False, True])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_ids(str(folder), range(64))
    return folder


def loader_over(data: Path, persistent: bool) -> StreamingDataLoader:
    return StreamingDataLoader(StreamingDataset(remote=data), 8, num_workers=2, persistent_workers=persistent)


def firsts(batches: Any) -> list[int]:
    return [batch["id"][0].item() for batch in batches]


@PERSISTENT
def test_an_iteration_keeps_its_workers_where_a_trainer_lets_go_of_the_loader(data: Path, persistent: bool) -> None:
    """Lightning sets `_iterator` to None after each evaluation, also over the loader that is being trained on."""
    loader = loader_over(data, persistent)
    batches = iter(loader)
    seen = [next(batches)["id"][0].item()]
    loader._iterator = None
    assert seen + firsts(batches) == list(range(0, 64, 8))
    del batches
    assert not multiprocessing.active_children()
    assert firsts(loader) == list(range(0, 64, 8))
    loader.close()


@pytest.mark.usefixtures("workers_by_fork")
def test_an_interrupt_while_workers_start_leaves_none_of_them(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_over(data, False)
    start = multiprocessing.Process.start

    def interrupted(process: Any) -> None:
        start(process)
        if process.name.endswith(last):
            raise KeyboardInterrupt

    last = str(int(multiprocessing.Process().name.rpartition("-")[2]) + 2)  # of the second worker
    with monkeypatch.context() as patch:
        patch.setattr("multiprocessing.process.BaseProcess.start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    gc.collect()
    assert not multiprocessing.active_children()
    assert firsts(loader) == list(range(0, 64, 8))


@pytest.mark.parametrize("shortage", [errno.EAGAIN, errno.EMFILE])
@pytest.mark.usefixtures("workers_by_fork")
def test_where_the_system_starts_no_more_workers_the_error_names_its_limits_and_those_that_began_end(
    data: Path, monkeypatch: pytest.MonkeyPatch, shortage: int
) -> None:
    fork, left = os.fork, [1]

    def refuse() -> int:
        if not left[0]:
            raise OSError(shortage, os.strerror(shortage))
        left[0] -= 1
        return fork()

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(RuntimeError, match=r"starts no 2 workers .*fewer num_workers.*ulimit -u.*ulimit -n"):
        next(iter(loader_over(data, False)))
    gc.collect()
    assert not multiprocessing.active_children()


@PERSISTENT
def test_a_loader_that_is_closed_ends_its_iterations_with_an_error(data: Path, persistent: bool) -> None:
    loader = loader_over(data, persistent)
    batches = iter(loader)
    next(batches)
    loader.close()
    assert not multiprocessing.active_children()
    with pytest.raises(StateError, match=r"after close\(\)"):
        next(batches)
    assert loader.state_dict()["position"] == 8


def with_frozen_objects(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "frozen": gc.get_freeze_count()}


@pytest.mark.usefixtures("workers_by_fork")
def test_the_collections_of_a_worker_do_not_visit_what_the_trainer_made(data: Path) -> None:
    before = gc.get_freeze_count()
    made = [[] for _ in range(1000)]
    dataset = StreamingDataset(remote=data, transform=with_frozen_objects, epoch_size=16)  # each counts all objects
    with_workers = StreamingDataLoader(dataset, 8, num_workers=1)
    assert all(batch["frozen"].min() >= before + len(made) for batch in with_workers)
    with_workers.close()
    assert gc.get_freeze_count() <= before  # some may have died


def waits(sample: dict[str, Any], seconds: float = 60.0) -> dict[str, Any]:
    time.sleep(seconds if sample["id"] == 40 else 0)
    return sample


def dies(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["id"] == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def fails(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["id"] == 40:
        raise LookupError("no label for sample 40")
    return sample


@PERSISTENT
def test_a_worker_that_dies_ends_the_iteration_and_the_next_one_has_new_workers(data: Path, persistent: bool) -> None:
    loader = StreamingDataLoader(
        StreamingDataset(remote=data, transform=dies), 8, num_workers=2, persistent_workers=persistent
    )
    for _ in range(2):
        batches = iter(loader)
        assert firsts(islice(batches, 5)) == list(range(0, 40, 8))
        with pytest.raises(RuntimeError, match=r"worker 1 \(process \d+\) ended with exit code -9.*memory ran out"):
            next(batches)
        assert not multiprocessing.active_children()
        loader.set_epoch(0)


@pytest.mark.usefixtures("workers_by_fork")
@PERSISTENT
def test_an_error_comes_after_the_batches_before_it_and_ends_the_workers(data: Path, persistent: bool) -> None:
    dataset = StreamingDataset(remote=data, transform=fails)
    batches = iter(StreamingDataLoader(dataset, 8, num_workers=2, persistent_workers=persistent))
    assert firsts(islice(batches, 5)) == list(range(0, 40, 8))
    with pytest.raises(LookupError, match=r"(?s)worker process 1.*in fails.*no label for sample 40"):
        next(batches)
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("workers_by_fork")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_in_a_batch_that_nobody_took_ends_no_later_iteration(data: Path, num_workers: int) -> None:
    """An evaluation with a limit is left where its workers have gone further, and met a sample that fails."""
    dataset = StreamingDataset(remote=data, transform=fails)
    loader = StreamingDataLoader(dataset, 8, num_workers=num_workers, persistent_workers=True, evaluation=True)
    for _ in range(3):
        batches = iter(loader)
        assert firsts(islice(batches, 5)) == list(range(0, 40, 8))
        time.sleep(0.2)  # the workers fail meanwhile
        batches.close()
    loader.close()


def fails_once(index: int) -> None:
    if index and not Path(os.environ["FAILED"]).exists():
        Path(os.environ["FAILED"]).touch()
        raise LookupError("no device")
    os.environ["BEGUN"] = "1"


def begun(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"begun": int(os.environ.get("BEGUN", "0"))}


@pytest.mark.usefixtures("workers_by_fork")
def test_a_worker_whose_init_function_failed_where_nobody_saw_it_calls_it_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILED", str(tmp_path / "failed"))
    dataset = StreamingDataset(remote=data, transform=begun)
    loader = StreamingDataLoader(dataset, 8, num_workers=2, persistent_workers=True, worker_init_fn=fails_once)
    batches = iter(loader)
    next(batches)
    batches.close()
    assert [batch["begun"].sum().item() for batch in loader] == [8] * 8
    assert (tmp_path / "failed").exists()
    loader.close()


@pytest.mark.usefixtures("workers_by_fork")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_a_thread_that_waits_for_a_batch_to_pin_takes_none_of_a_later_iteration(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_stream.loading.workers._EXIT_S", 0.1)

    def waits_once(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] == 8 and not (tmp_path / "waited").exists():
            (tmp_path / "waited").touch()
            time.sleep(2)
        return sample

    dataset = StreamingDataset(remote=data, transform=waits_once)
    loader = StreamingDataLoader(dataset, 8, num_workers=1, persistent_workers=True, pin_memory=True)
    batches = iter(loader)
    next(batches)
    batches.close()
    assert firsts(loader) == list(range(0, 64, 8))
    loader.close()


@pytest.mark.usefixtures("workers_by_fork")
def test_an_iteration_is_closed_while_another_thread_asks_for_the_processes_that_live(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells one thread how a process ended: for the other one it seems to live until that has noted it."""
    waitpid = os.waitpid

    def noted_late(pid: int, options: int) -> tuple[int, int]:
        is_main = threading.current_thread() is threading.main_thread()
        time.sleep(0.2 * is_main)  # so that the other thread asks first
        answer = waitpid(pid, options)
        time.sleep(1.5 * (not is_main and bool(answer[0])))
        return answer

    batches = iter(StreamingDataLoader(StreamingDataset(remote=data), 8, num_workers=1))
    next(batches)
    monkeypatch.setattr("os.waitpid", noted_late)
    asking = threading.Thread(target=lambda: [*iter(multiprocessing.active_children, [])])
    asking.start()
    batches.close()
    asking.join()
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("workers_by_fork")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_an_error_whose_class_cannot_be_pickled_comes_with_its_text(data: Path, pin_memory: bool) -> None:
    def fails_privately(sample: dict[str, Any]) -> dict[str, Any]:
        class PrivateError(Exception):
            pass

        raise PrivateError(f"no label for sample {sample['id']}")

    dataset = StreamingDataset(remote=data, transform=fails_privately)
    with pytest.raises(RuntimeError, match=r"(?s)worker process 0.*PrivateError: no label for sample 0"):
        list(StreamingDataLoader(dataset, 8, num_workers=1, pin_memory=pin_memory))
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("workers_by_fork")
def test_a_batch_that_does_not_come_in_time_is_an_error(data: Path) -> None:
    loader = StreamingDataLoader(StreamingDataset(remote=data, transform=waits), 8, num_workers=2, timeout=1)
    with pytest.raises(RuntimeError, match="no batch came within timeout=1 s"):
        list(loader)
    assert not multiprocessing.active_children()


def test_what_a_worker_cannot_get_by_pickle_is_named(data: Path) -> None:
    dataset = StreamingDataset(remote=data, transform=lambda sample: sample)
    loader = StreamingDataLoader(dataset, 8, num_workers=2, multiprocessing_context="forkserver")
    with pytest.raises(ValueError, match=r"start by 'forkserver' .*lambda.* at the top of a module, or pass"):
        next(iter(loader))
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("workers_by_fork")
def test_a_workers_init_function_may_fail(data: Path) -> None:
    def fail(worker: int) -> None:
        raise LookupError(f"no device for worker {worker}")

    loader = StreamingDataLoader(StreamingDataset(remote=data), 8, num_workers=2, worker_init_fn=fail)
    with pytest.raises(LookupError, match="no device for worker 0"):
        next(iter(loader))
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("workers_by_fork")
@pytest.mark.parametrize("factor", [1, 3])
def test_a_worker_is_ahead_by_as_many_batches_as_prefetch_factor_says(data: Path, tmp_path: Path, factor: int) -> None:
    def note(sample: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / str(int(sample["id"]) // 8)).touch()
        return sample

    loader = StreamingDataLoader(
        StreamingDataset(remote=data, transform=note), 8, num_workers=1, prefetch_factor=factor
    )
    for number, _ in enumerate(loader):
        most = min(8, number + 1 + factor)
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < most and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # it would make more, if it did
        assert len(list(tmp_path.iterdir())) == most


@pytest.mark.usefixtures("workers_by_fork")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_batch_that_is_done_arrives_while_the_transform_of_the_next_one_waits(
    data: Path, tmp_path: Path, num_workers: int
) -> None:
    def waits_for_the_trainer(sample: Any) -> Any:
        last_of_worker = int(sample["id"]) // 8 - num_workers
        deadline = time.monotonic() + 60
        while last_of_worker >= 0 and not (tmp_path / str(last_of_worker)).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the trainer has not got batch {last_of_worker}")
            time.sleep(0.01)
        return sample

    dataset = StreamingDataset(remote=data, transform=waits_for_the_trainer)
    for number, batch in enumerate(StreamingDataLoader(dataset, 8, num_workers=num_workers)):
        assert batch["id"].tolist() == list(range(8 * number, 8 * number + 8))
        (tmp_path / str(number)).touch()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_epochs_of_persistent_workers_are_those_of_one_process_also_after_one_that_was_left(
    tmp_path: Path, num_workers: int
) -> None:
    with MDSWriter(out=tmp_path, columns={"x": "int32"}, size_limit=2000) as writer:
        writer.write_batch({"x": np.arange(3000, dtype=np.int32)})

    def loader(workers: int) -> StreamingDataLoader:
        dataset = StreamingDataset(local=str(tmp_path), shuffle=True)
        return StreamingDataLoader(dataset, 8, num_workers=workers, persistent_workers=workers > 0)

    one, many = loader(0), loader(num_workers)
    pids = set()
    for limit in (None, 50, None, 1, None):
        for number, (here, there) in enumerate(zip(one, many, strict=True), 1):
            assert here["x"].tolist() == there["x"].tolist()
            if number == limit:
                break
        pids |= {process.pid for process in multiprocessing.active_children()}
        assert one.state_dict() == many.state_dict()
    assert len(pids) == num_workers
    many.close()


@PERSISTENT
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_batches_that_are_pinned_in_a_thread_are_the_same_also_where_an_iteration_is_left(
    data: Path, persistent: bool
) -> None:
    loader = StreamingDataLoader(
        StreamingDataset(remote=data), 8, num_workers=2, persistent_workers=persistent, pin_memory=True
    )
    for _ in range(2):
        batches = iter(loader)
        seen = [next(batches)["id"][0].item(), next(batches)["id"][0].item()]
        del batches
        assert seen == [0, 8]
        assert firsts(loader) == list(range(0, 64, 8))
    loader.close()
    assert not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pin")]
