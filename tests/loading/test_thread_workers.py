"""Threads that make batches deliver what this process would, and leave its random numbers alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.data import write_ids  # noqa: E402

from lightning_stream import MDSWriter, Packing, StreamingDataLoader, StreamingDataset, World  # noqa: E402
from lightning_stream.errors import FormatError, StateError  # noqa: E402

NUM_SAMPLES = 167
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    columns = {"id": "int", "x": "ndarray:float32:4", "tokens": "ndarray:int32", "name": "str"}
    given: dict[str, Any] = {"size_limit": 2000, "compression": "zstd", "lengths": {"tokens": len}}
    with MDSWriter(out=str(folder), columns=columns, **given) as writer:
        for number in range(NUM_SAMPLES):
            tokens = np.full(1 + number % 7, number, np.int32)
            x = np.full(4, number, np.float32)
            writer.write({"id": number, "x": x, "tokens": tokens, "name": f"sample {number}"})
    return folder


@pytest.fixture
def over(shards: Path, tmp_path: Path) -> Any:
    """Makes datasets over the shards, each with a cache of its own."""
    count = iter(range(100))

    def made(**options: Any) -> StreamingDataset:
        return StreamingDataset(remote=shards, local=tmp_path / f"cache{next(count)}", shuffle=True, **options)

    return made


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"id": sample["id"], "x": sample["x"] + rng.random(4)}


def mixed_up(samples: list[dict[str, Any]], rng: np.random.Generator) -> dict[str, Any]:
    order = rng.permutation(len(samples))
    return {"id": torch.tensor([samples[k]["id"] for k in order]), "x": [samples[k]["x"] for k in order]}


def threads_over(dataset: StreamingDataset, batch_size: int = 16, **options: Any) -> StreamingDataLoader:
    return StreamingDataLoader(dataset, batch_size, num_workers=3, workers="threads", **options)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(np.array_equal(one, other))


def alive() -> list[str]:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("make-")]
    for thread in threads:
        thread.join(60)
    return [thread.name for thread in threads if thread.is_alive()]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "columns": ({}, {}),
    "transform": ({"transform": noisy}, {}),
    "collate": ({}, {"collate_fn": mixed_up}),
    "both, far ahead": ({"transform": noisy}, {"collate_fn": mixed_up, "prefetch_factor": 9}),
    "one batch ahead": ({}, {"prefetch_factor": 1}),
    "small cache": ({"cache_limit": "30kb", "window": 32, "predownload": 16}, {"prefetch_factor": 1}),
    "ranges": ({"predownload": {"by_range": True}}, {}),
    "packed": ({"pack": Packing(column="tokens", row_length=16)}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_threads_deliver_what_this_process_would(over: Any, case: str) -> None:
    of_data, of_loader = CASES[case]
    alone, many = (
        StreamingDataLoader(over(**of_data), 16, **{k: v for k, v in of_loader.items() if k == "collate_fn"}),
        threads_over(over(**of_data), **of_loader),
    )
    for _ in range(2):
        for one, other in zip(alone, many, strict=True):
            assert equal(one, other)
            assert alone.state_dict() == many.state_dict()
            assert many.last_batch is not None
            assert many.last_batch.sample_ids.tolist() == alone.last_batch.sample_ids.tolist()
    assert alive() == []


@pytest.mark.parametrize("stop", [1, 2, 5, 10, 11, 12])
def test_a_run_of_threads_resumes_exactly_on_other_workers(over: Any, stop: int) -> None:
    given = {"transform": noisy}
    alone = StreamingDataLoader(over(**given), 16)
    expected = [batch for _ in range(3) for batch in alone]
    loader = threads_over(over(**given))
    seen: list[Any] = []
    while len(seen) < stop:
        for batch in loader:
            seen.append(batch)
            if len(seen) == stop:
                break
    state = loader.state_dict()
    for options in ({}, {"workers": "threads", "num_workers": 2}):
        again = StreamingDataLoader(over(**given), 16, **options)
        again.load_state_dict(state)
        rest = list(again)
        assert all(map(equal, seen + rest, expected))


def test_ranks_of_threads_share_each_global_batch(over: Any) -> None:
    whole = [sorted(batch["id"].tolist()) for batch in StreamingDataLoader(over(), 16, tail="drop")]
    ranks = [threads_over(over(), 4, world=World(rank, 4, 2), tail="drop") for rank in range(4)]
    steps = zip(*([batch["id"].tolist() for batch in one] for one in ranks), strict=True)
    assert [sorted(number for ids in step for number in ids) for step in steps] == whole


def test_bad_samples_are_replaced_and_listed_once(shards: Path, tmp_path: Path) -> None:
    def decode(data: Any) -> int:
        found = int.from_bytes(bytes(data), "little")
        if found % 10 == 3:
            raise ValueError("damaged")
        return found

    def over(name: str) -> StreamingDataset:
        given: dict[str, Any] = {"decoders": {"id": decode}, "shuffle": True}
        policy = {"sample": "substitute", "quarantine": tmp_path / f"{name}.jsonl"}
        return StreamingDataset(remote=shards, local=tmp_path / name, on_bad=policy, **given)

    alone, many = StreamingDataLoader(over("alone"), 16), threads_over(over("many"), prefetch_factor=8)
    for one, other in zip(alone, many, strict=True):
        assert equal(one, other)
    assert alone.num_substituted == many.num_substituted == 17
    lines = [sorted((tmp_path / f"{name}.jsonl").read_text().splitlines()) for name in ("alone", "many")]
    listed = [[{**json.loads(line), "reason": "", "launch": ""} for line in found] for found in lines]
    assert listed[0] == listed[1]
    assert len(listed[1]) == 17


def test_the_random_numbers_of_the_training_stay_its_own(over: Any) -> None:
    def drawn() -> tuple[Any, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seeded() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seeded()
    expected = [drawn() for _ in range(11)]
    seeded()
    found = [drawn() for _ in threads_over(over(transform=noisy), collate_fn=mixed_up)]
    assert found == expected


def test_threads_make_batches_at_the_same_time(over: Any) -> None:
    both = threading.Barrier(3, timeout=60)

    def meet(samples: list[Any], rng: Any) -> list[Any]:
        both.wait()
        return [sample["id"] for sample in samples]

    loader = threads_over(over(), collate_fn=meet, tail="drop")
    batches = iter(loader)
    assert len([next(batches) for _ in range(9)]) == 9
    both.abort()


def test_an_error_comes_with_its_batch(over: Any) -> None:
    def failing(sample: dict[str, Any], rng: Any) -> int:
        if sample["id"] == failed:
            raise KeyError("no such thing")
        return int(sample["id"])

    ids = [batch["id"].tolist() for batch in StreamingDataLoader(over(), 16)]
    failed = ids[4][7]
    loader = threads_over(over(transform=failing))
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(4)] == ids[:4]
    with pytest.raises(KeyError, match="no such thing") as error:
        next(batches)
    assert f"[{failed}]" in error.value.__notes__[0]
    assert alive() == []
    state, failed = loader.state_dict(), -1
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == ids[4:]


def test_data_that_cannot_be_read_raises(over: Any, shards: Path) -> None:
    loader = threads_over(over(decoders={"id": lambda data: 1 // 0}))
    with pytest.raises(FormatError, match="column 'id'"):
        next(iter(loader))


def test_a_batch_that_takes_longer_than_the_timeout_raises(over: Any) -> None:
    go = threading.Event()

    def wait(sample: dict[str, Any], rng: Any) -> int:
        go.wait(60)
        return int(sample["id"])

    loader = threads_over(over(transform=wait), timeout=0.05)
    with pytest.raises(RuntimeError, match=r"timeout=0\.05 s"):
        next(iter(loader))
    go.set()
    assert alive() == []


@pytest.fixture
def default_ctrl_c() -> Iterator[None]:
    """Ctrl-C as Python has it: Composer sets another handler for the rest of its process."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("default_ctrl_c")
def test_ctrl_c_ends_the_wait_for_a_batch(over: Any) -> None:
    go, once = threading.Event(), threading.Lock()

    def interrupt(sample: dict[str, Any], rng: Any) -> int:
        while once.acquire(blocking=False) and not go.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            go.wait(5)  # Python forgets one that comes in a destructor
            once.release()
        go.wait(60)
        return int(sample["id"])

    loader = threads_over(over(transform=interrupt))
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    go.set()
    assert alive() == []
    assert len(list(loader)) == 11


@pytest.mark.parametrize("how", ["dropped", "closed", "loader closed", "exhausted"])
def test_an_iteration_that_ends_ends_its_threads(over: Any, how: str) -> None:
    loader = threads_over(over())
    batches = iter(loader)
    next(batches)
    if how == "closed":
        batches.close()
    elif how == "loader closed":
        loader.close()
        with pytest.raises(StateError, match=r"after close\(\)"):
            next(batches)
    elif how == "exhausted":
        assert len(list(batches)) == 10
    else:
        del batches
    assert alive() == []


def in_a_fork(action: Any) -> int:
    """The exit status of a forked process that does something, and has ten seconds for it."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(10)
            os._exit(0 if action() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(("kind", "method"), [("threads", None), ("processes", "fork")])
def test_a_forked_process_learns_that_the_workers_are_its_parents_and_can_iterate_again(
    over: Any, kind: Any, method: str | None
) -> None:
    loader = StreamingDataLoader(over(), 16, num_workers=1, workers=kind, multiprocessing_context=method)
    batches = iter(loader)
    ids = next(batches)["id"].tolist()

    def go_on() -> bool:
        with pytest.raises(StateError, match="forked from that"):
            list(batches)
        return len(next(iter(loader))["id"]) == 16

    assert in_a_fork(go_on) == 0
    for batch in batches:
        ids += batch["id"].tolist()
    assert sorted(set(ids)) == list(range(NUM_SAMPLES))


def test_a_forked_process_that_cannot_use_the_server_of_its_parent_learns_what_to_pass(over: Any) -> None:
    server = multiprocessing.get_context("forkserver")
    first = server.Process(target=int)
    first.start()
    first.join()
    loader = StreamingDataLoader(over(), 16, num_workers=1, multiprocessing_context=server)

    def ask() -> bool:
        with pytest.raises(RuntimeError, match="multiprocessing_context='fork' or 'spawn'"):
            next(iter(loader))
        return True

    assert in_a_fork(ask) == 0


def test_workers_that_are_processes_can_start_while_threads_are_at_work(over: Any) -> None:
    training, validation = threads_over(over()), StreamingDataLoader(over(), 16, num_workers=2, evaluation=True)
    expected = [batch["id"].tolist() for batch in StreamingDataLoader(over(), 16, evaluation=True)]
    count = 0
    for _ in training:
        count += 1
        if count in (2, 9):
            assert [batch["id"].tolist() for batch in validation] == expected
    assert count == 11


def drawing(sample: Any) -> Any:
    return sample


class Reading(StreamingDataset):
    def get_item(self, index: int, retry: int = 7) -> Any:
        return super().get_item(index, retry)


def test_what_threads_cannot_do_is_refused(over: Any, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the transform may draw otherwise\. Add a parameter rng"):
        threads_over(over(transform=drawing))
    with pytest.raises(ValueError, match="collate_fn may draw otherwise"):
        threads_over(over(), collate_fn=drawing)
    with pytest.raises(ValueError, match="get_item"):
        threads_over(Reading(remote=shards, local=tmp_path / "own"))
    for given in ({"worker_init_fn": print}, {"multiprocessing_context": "spawn"}):
        with pytest.raises(ValueError, match="workers='threads' starts none"):
            threads_over(over(), **given)
    with pytest.raises(ValueError, match="'processes' or 'threads'; found 'thread'"):
        StreamingDataLoader(over(), 16, num_workers=2, workers="thread")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many cores there are, and whether Python has a GIL."""

    def there_are(count: int, has_gil: bool = True) -> None:
        monkeypatch.setattr("lightning_stream.loading.workers.num_cores", lambda: count)
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: has_gil, raising=False)

    return there_are


@pytest.mark.parametrize(
    ("of_data", "of_loader", "num_cores", "expected"),
    [
        ({}, {}, 8, (0, "processes")),
        ({}, {"prefetch_factor": 4, "persistent_workers": True}, 8, (0, "processes")),
        ({"transform": drawing}, {}, 4, (3, "processes")),
        ({"transform": drawing}, {}, 1, (1, "processes")),
        ({"transform": noisy}, {"persistent_workers": True}, 64, (8, "processes")),
        ({"transform": noisy}, {"workers": "threads"}, 4, (3, "threads")),
        ({}, {"collate_fn": mixed_up, "world": World(1, 4, 2)}, 8, (3, "processes")),
        ({"decoders": {"name": bytes}}, {}, 3, (2, "threads")),
        ({"decoders": {"name": bytes}}, {"workers": "processes"}, 3, (2, "processes")),
        ({"decoders": {"name": bytes}, "transform": drawing}, {}, 3, (2, "processes")),
    ],
)
def test_auto_chooses_workers_by_what_is_done_with_samples(
    over: Any, cores: Any, of_data: Any, of_loader: Any, num_cores: int, expected: tuple[int, str]
) -> None:
    cores(num_cores)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # torch counts the real cores
        loader = StreamingDataLoader(over(**of_data), 16, num_workers="auto", **of_loader)
    assert (loader.num_workers, loader.workers) == expected


@pytest.mark.parametrize(
    ("of_data", "of_loader", "expected"),
    [
        ({"transform": noisy}, {}, "threads"),
        ({}, {"collate_fn": mixed_up}, "threads"),
        ({"transform": noisy}, {"workers": "processes"}, "processes"),
        ({"transform": drawing}, {}, "processes"),
        ({"decoders": {"name": bytes}, "transform": drawing}, {}, "processes"),
    ],
)
def test_without_a_gil_auto_chooses_threads_for_what_draws_from_rng_alone(
    over: Any, cores: Any, of_data: Any, of_loader: Any, expected: str
) -> None:
    cores(2, has_gil=False)
    loader = StreamingDataLoader(over(**of_data), 16, num_workers="auto", **of_loader)
    assert (loader.num_workers, loader.workers) == (1, expected)


def test_auto_counts_images_that_their_encoding_decodes(tmp_path: Path, cores: Any) -> None:
    cores(3)
    image = pytest.importorskip("PIL.Image").new("RGB", (8, 8))
    with MDSWriter(out=tmp_path / "photos", columns={"image": "jpeg", "label": "int"}) as writer:
        for number in range(32):
            writer.write({"image": image, "label": number})
    loader = StreamingDataLoader(StreamingDataset(local=tmp_path / "photos"), 16, num_workers="auto")
    assert (loader.num_workers, loader.workers) == (2, "threads")
    assert sum(len(batch["image"]) for batch in loader) == 32


def test_auto_says_once_what_it_chose_and_changes_no_batch(
    over: Any, cores: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cores(3)
    caplog.set_level("INFO", "lightning_stream.loading.workers")
    loader = StreamingDataLoader(over(transform=noisy), 16, num_workers="auto")
    assert [record.getMessage() for record in caplog.records] == [
        "num_workers='auto': 2 processes, with 3 cores per rank and the transform."
    ]
    assert all(map(equal, list(loader), list(StreamingDataLoader(over(transform=noisy), 16))))
    assert [record.name for record in caplog.records].count("lightning_stream.loading.workers") == 1
    with pytest.raises(ValueError, match="'auto'; found 'all'"):
        StreamingDataLoader(over(), 16, num_workers="all")  # type: ignore[arg-type]


ABANDONED = """
import sys, torch
from lightning_stream import StreamingDataLoader, StreamingDataset

def work(sample, rng):
    return torch.ones(300, 300) @ torch.ones(300, 300)

dataset = StreamingDataset(local=sys.argv[1], transform=work)
batches = iter(StreamingDataLoader(dataset, 16, num_workers=4, workers="threads", prefetch_factor=4))
print(len(next(batches)))
if sys.argv[2] == "dropped":
    del batches
"""


@pytest.mark.parametrize("how", ["kept", "dropped"])
def test_a_program_ends_well_while_threads_make_batches(tmp_path: Path, how: str) -> None:
    write_ids(str(tmp_path), range(1000))
    command = [sys.executable, "-c", ABANDONED, str(tmp_path), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "16\n", "")
