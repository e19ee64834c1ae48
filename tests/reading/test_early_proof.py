"""What is delivered before its shard is verified is compared before a state is taken, and when an iteration ends.

The server sends a part of each shard, with wrong bytes, and the rest once the test lets it; the second answer is right.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servers.holding import NUM_SAMPLES, HoldingServer, held_files, value  # noqa: E402

from lightning_stream import Stream, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.errors import StoreError  # noqa: E402
from lightning_stream.trainers.tracker import PositionTracker  # noqa: E402

WRONG = r"verified file has other bytes.*epoch 0, positions 0 to 8"
WORKERS: dict[str, dict[str, Any]] = {
    "here": {},
    "processes": {"num_workers": 2, "multiprocessing_context": "fork"},
    "threads": {"num_workers": 2, "workers": "threads"},
}
all_workers = pytest.mark.parametrize("workers", WORKERS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return held_files(tmp_path_factory.mktemp("data"))


@pytest.fixture
def server(data: dict[str, bytes]) -> Iterator[HoldingServer]:
    """All samples of the first answers are wrong, but decode."""
    with HoldingServer() as server:
        server.objects = dict(data)
        for name, content in data.items():
            damaged = bytearray(content)
            damaged[2000::7000] = bytes(byte ^ 1 for byte in content[2000::7000])
            if name.endswith("mds"):
                server.wrong[name] = bytes(damaged)
        yield server
        server.go.set()


def dataset_of(server: HoldingServer, folder: Path, **options: Any) -> StreamingDataset:
    reach = {"first_pause_s": 0.01, **options.pop("reach", {})}
    stream = Stream(remote=f"{server.url}/raw", local=folder, options=reach)
    return StreamingDataset(streams=[stream], **{"shuffle": False, "batch_size": 8, **options})


def loader_of(server: HoldingServer, folder: Path, workers: str = "here", **options: Any) -> StreamingDataLoader:
    return StreamingDataLoader(dataset_of(server, folder, **options), **WORKERS[workers])


def num_wrong(batch: Any) -> int:
    pairs = zip(batch["id"].tolist(), batch["x"].numpy(), strict=True)
    return sum(not 0 <= number < NUM_SAMPLES or bool((x != value(number)).any()) for number, x in pairs)


@all_workers
def test_no_state_counts_samples_that_were_delivered_wrong(server: HoldingServer, tmp_path: Path, workers: str) -> None:
    loader = loader_of(server, tmp_path / "cache", workers)
    start = loader.state_dict()
    batches = iter(loader)
    assert num_wrong(next(batches))
    server.go.set()
    for _ in range(2):
        with pytest.raises(StoreError, match=WRONG):
            loader.state_dict()
    with pytest.raises(StoreError, match=WRONG):
        batches.state_dict()
    loader.load_state_dict(start)
    assert not num_wrong(next(iter(loader)))
    assert loader.state_dict()["position"] == 8


@all_workers
def test_no_iteration_ends_well_after_samples_that_were_delivered_wrong(
    server: HoldingServer, tmp_path: Path, workers: str
) -> None:
    closed, limited, owner = (loader_of(server, tmp_path / name, workers) for name in ("a", "b", "c"))
    batches, few = iter(closed), iter(limited)
    few.limit = 1
    assert num_wrong(next(batches))
    server.wrong |= dict.fromkeys(server.wrong, b"")
    server.go.set()
    with pytest.raises(StoreError, match=WRONG):
        batches.close()
    with pytest.raises(StoreError, match=WRONG):
        closed.close()
    assert sum(map(num_wrong, few)) == 0  # their shards had come
    assert sum(map(num_wrong, owner)) == 0


def test_a_trainers_run_and_its_states_count_compared_samples_alone(server: HoldingServer, tmp_path: Path) -> None:
    tracker = PositionTracker(loader_of(server, tmp_path / "cache"))
    assert num_wrong(next(iter(tracker)))
    tracker.stepped()
    server.go.set()
    with pytest.raises(StoreError, match=WRONG):
        tracker.state()
    with pytest.raises(StoreError, match=WRONG):
        tracker.end_run()


def test_a_state_waits_for_a_shard_no_longer_than_its_store(server: HoldingServer, tmp_path: Path) -> None:
    reach = {"timeout_s": 2.0, "retries": 1, "deadline_s": 3}
    loader = loader_of(server, tmp_path / "cache", reach=reach)
    next(iter(loader))
    with pytest.raises(StoreError, match=r"raw/shard\.00000\.mds"):
        loader.state_dict()


@pytest.mark.parametrize("workers", ["processes", "threads"])
def test_batches_that_were_not_handed_out_yet_are_made_again(
    server: HoldingServer, tmp_path: Path, workers: str
) -> None:
    folder = tmp_path / "cache"
    loader = loader_of(server, folder, workers)
    loader.streaming.reader.snapshot  # noqa: B018 - fetches the index
    batches = iter(loader)
    assert num_wrong(next(batches))
    time.sleep(0.5)  # the next ones are made of wrong bytes
    server.go.set()
    while not list(folder.glob("shard.00000.mds")):
        time.sleep(0.01)
    loader.streaming.reader.shards.delivered.forget()  # as if the first batch had been right
    assert sum(num_wrong(next(batches)) for _ in range(6)) == 0
    batches.close()


def refuse_wrong(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if not 0 <= sample["id"] < NUM_SAMPLES or (sample["x"] != value(sample["id"])).any():
        raise ValueError("wrong bytes")
    return sample


@all_workers
def test_a_batch_whose_transform_fails_on_wrong_samples_is_made_again(
    server: HoldingServer, tmp_path: Path, workers: str
) -> None:
    loader = loader_of(server, tmp_path / "cache", workers, transform=refuse_wrong)
    timer = threading.Timer(1, server.go.set)
    timer.start()
    assert sum(map(num_wrong, loader)) == 0
    assert not any("raw" in name for name in server.wrong)  # all of them were delivered
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_transform_that_fails_on_verified_samples_too_ends_the_iteration(
    server: HoldingServer, tmp_path: Path, is_wrong: bool
) -> None:
    seen = []

    def failing(sample: dict[str, Any]) -> None:
        seen.append(num_wrong({"id": torch.tensor([sample["id"]]), "x": torch.tensor(sample["x"])[None]}))
        server.go.set()
        raise ZeroDivisionError

    if not is_wrong:
        server.wrong.clear()
    loader = loader_of(server, tmp_path / "cache", transform=failing)
    with pytest.raises(ZeroDivisionError):
        next(iter(loader))
    assert seen == ([1, 0] if is_wrong else [0])
    assert loader.state_dict()["position"] == 0


def test_damage_outside_of_what_was_delivered_is_healed(
    server: HoldingServer, tmp_path: Path, data: dict[str, bytes]
) -> None:
    """Of each beginning, twice as many samples are copied as the batch needs: those are no reason to end the run."""
    (name,) = (name for name in server.wrong if name.endswith("raw/shard.00000.mds"))
    content = bytearray(data[name])
    content[len(content) // 10] ^= 1  # in sample 12 of 128
    server.wrong = {name: bytes(content)}
    loader = loader_of(server, tmp_path / "cache")
    batches = iter(loader)
    assert not num_wrong(next(batches))
    server.go.set()
    while not list((tmp_path / "cache").glob("shard.00000.mds")):
        time.sleep(0.01)
    assert sum(map(num_wrong, batches)) == 0
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("is_wrong", "has_stdout"), [(True, True), (False, True), (True, False)])
def test_a_program_that_abandons_its_loop_fails_if_its_samples_were_wrong(
    tmp_path: Path, is_wrong: bool, has_stdout: bool
) -> None:
    tests = Path(__file__).resolve().parent.parent
    code = f"""
        import atexit, sys
        sys.path.insert(0, {str(tests)!r})
        from pathlib import Path
        from servers.holding import HoldingServer, held_files
        from lightning_stream import StreamingDataLoader, StreamingDataset
        folder, server = Path({str(tmp_path)!r}), HoldingServer()
        server.__enter__()
        server.objects = held_files(folder)
        for name, content in server.objects.items():
            if {is_wrong} and name.endswith("mds"):
                server.wrong[name] = content[:2000] + bytes(byte ^ 1 for byte in content[2000:9000]) + content[9000:]
        dataset = StreamingDataset(remote=server.url + "/raw", local=folder / "cache", shuffle=False)
        for batch in StreamingDataLoader(dataset, 8):
            break
        server.go.set()
        atexit.register(print, "the end")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    if not has_stdout:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, "cannot be shown to be right" in done.stderr) == (int(is_wrong), is_wrong), done.stderr
    assert ("the end" in done.stdout) == has_stdout
