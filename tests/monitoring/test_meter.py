"""A loader measures where the time of its training loop goes: in this process, in workers, and at the store."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers.fault_proxy import FaultProxy, Plan
from servers.web import WebServer
from support.metered_loading import BATCH, check_parts, loader_over, served, spend, write_metered

from lightning_stream import MDSWriter, Packing, StreamingDataLoader, StreamingDataset
from lightning_stream.counters import NAMES, Counters
from lightning_stream.monitoring.meter import Made, Meter, divided

NUM_SAMPLES = 1024
LIMIT_US = 25
seconds = st.floats(0.0, 100.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_metered(tmp_path_factory.mktemp("metered") / "data", NUM_SAMPLES)


@pytest.fixture
def server(data: Path) -> Iterator[WebServer]:
    with served(data) as web:
        yield web


def bytes_of(data: Path) -> int:
    return sum(path.stat().st_size for path in data.glob("shard.*"))


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    spend(0.001)
    return sample


@given(asked=seconds, wait=seconds, began=seconds, stages=st.lists(seconds, min_size=5, max_size=5))
def test_the_parts_of_a_wait_add_up_to_it(asked: float, wait: float, began: float, stages: list[float]) -> None:
    made = Made(began, began + sum(stages), tuple(stages), 0.0, 0.0)
    parts = divided(asked, asked + wait, made)
    assert sum(parts) == pytest.approx(wait, abs=1e-9)
    assert min(parts) >= -1e-9


def test_only_what_falls_into_the_wait_counts() -> None:
    made = Made(10.0, 18.0, (0.0, 4.0, 2.0, 1.0, 1.0), 4.0, 4.0)
    assert divided(19.0, 19.5, made) == (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5)  # it was made before it was requested
    assert divided(14.0, 19.0, made) == (0.0, 0.0, 2.0, 1.0, 0.5, 0.5, 1.0)  # half of its making came after that
    assert divided(7.0, 18.0, made) == (3.0, 0.0, 4.0, 2.0, 1.0, 1.0, 0.0)  # it was begun 3 s later


@pytest.mark.parametrize("how", ["here", "workers", "persistent", "accumulated"])
def test_the_parts_add_up_to_the_time_of_the_loop(data: Path, tmp_path: Path, how: str) -> None:
    validation = StreamingDataLoader(StreamingDataset(local=data), BATCH, evaluation=True)

    def measure() -> tuple[float, float]:
        loader = loader_over(
            f"file://{data}",
            tmp_path,
            0 if how == "here" else 2,
            transform=slow,
            persistent_workers=how == "persistent",
        )
        began = perf_counter()
        for _ in range(2):
            for number, _ in enumerate(loader):
                if how != "accumulated" or number % 4 == 3:
                    spend(0.012 if how == "accumulated" else 0.003)
                if number % 16 == 7:
                    with loader.aside("checkpoint"):
                        spend(0.005)
                    with loader.aside("validation"):
                        for _ in validation:
                            pass
        whole_s, stats = perf_counter() - began, loader.stats()
        loader.close()
        assert sum(stats.waits.values()) + sum(stats.first_waits.values()) == pytest.approx(stats.wait_s)
        assert sum(stats.pauses.values()) + stats.training_s == pytest.approx(stats.compute_s)
        assert stats.training_s >= 2 * NUM_SAMPLES / BATCH * 0.003
        assert (stats.num_samples, stats.num_batches) == (2 * NUM_SAMPLES, 2 * NUM_SAMPLES // BATCH)
        assert stats.num_iterations == 2
        return stats.elapsed_s + stats.validation_s, whole_s

    check_parts(measure)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_step_before_a_break_counts(data: Path, tmp_path: Path, num_workers: int) -> None:
    def measure() -> tuple[float, float]:
        loader, whole_s = loader_over(data, tmp_path, num_workers), 0.0
        for _ in range(2):
            began = perf_counter()
            for number, _ in enumerate(loader):
                spend(0.02)
                if number == 4:
                    spend(0.1)
                    whole_s += perf_counter() - began
                    break
        return loader.stats().elapsed_s, whole_s + 1e-3  # a break takes time, too

    check_parts(measure)


def test_another_iteration_that_ends_ends_no_step(data: Path, tmp_path: Path) -> None:
    loader = loader_over(data, tmp_path)
    other, trains = iter(loader), iter(loader)
    next(other)
    next(trains)
    other.close()
    spend(0.05)
    next(trains)
    assert loader.stats().compute_s >= 0.05


def test_a_validation_that_an_error_ended_is_no_part_of_a_later_iteration(data: Path, tmp_path: Path) -> None:
    """Trainers tell where a validation begins and ends, and an error in it has no end."""
    loader = loader_over(data, tmp_path)
    assert len(list(islice(loader, 2))) == 2
    loader.meter.begin("validation")
    spend(0.1)
    for _ in islice(loader, 3):
        with loader.aside("validation"):
            spend(0.01)
    stats = loader.stats()
    assert 3 * 0.01 <= stats.validation_s < 0.1
    assert stats.compute_s >= 0.0


def test_a_checkpoint_within_a_validation_is_a_part_of_it(data: Path, tmp_path: Path) -> None:
    loader = loader_over(data, tmp_path)
    for _ in islice(loader, 3):
        with loader.aside("validation"):
            spend(0.01)
            with loader.aside("checkpoint"):
                spend(0.01)
    stats = loader.stats()
    assert stats.pauses["checkpoint"] == 0.0
    assert stats.validation_s >= 3 * 0.02
    assert stats.training_s >= 0.0


def test_a_block_has_one_of_two_names(data: Path, tmp_path: Path) -> None:
    loader = loader_over(data, tmp_path)
    message = 'aside\\(\\) measures a "validation" or a "checkpoint"; found \'evaluation\''
    with pytest.raises(ValueError, match=message), loader.aside("evaluation"):  # type: ignore[arg-type]
        pytest.fail("it is refused before the block")


def test_checkpoints_validations_and_garbage_collections_are_not_training(data: Path, tmp_path: Path) -> None:
    def measure() -> tuple[float, float]:
        loader, kept = loader_over(data, tmp_path), []
        began = perf_counter()
        for number, _ in enumerate(loader):
            spend(0.002)
            if number % 8 == 3:
                with loader.aside("checkpoint"):
                    spend(0.02)
                    gc.collect()  # a part of writing this one
            if number % 16 == 5:
                with loader.aside("validation"):
                    spend(0.03)
            kept.append([{} for _ in range(200)])  # what a full collection has to look at
            gc.collect()
        with loader.aside("checkpoint"):  # between epochs
            spend(0.1)
        whole_s, num_batches, stats = perf_counter() - began, NUM_SAMPLES // BATCH, loader.stats()
        assert stats.pauses["checkpoint"] >= num_batches / 8 * 0.02 + 0.1
        assert stats.validation_s >= num_batches / 16 * 0.03
        assert stats.pauses["garbage_collection"] > 0.01
        assert 0.002 * num_batches <= stats.training_s < stats.elapsed_s - sum(stats.pauses.values())
        lines = str(stats).splitlines()
        shown = sum(float(line.split()[-3]) for line in lines if line.startswith("  "))
        assert shown == pytest.approx(stats.elapsed_s, abs=0.06)
        assert f"Validation took {stats.validation_s:.1f} s besides." in lines[-2]
        assert "Writing checkpoints took " in lines[-1] or "garbage collection took " in lines[-1]
        return stats.elapsed_s + stats.validation_s, whole_s

    check_parts(measure)


@pytest.mark.parametrize("how", ["here", "fork", "forkserver", "persistent"])
def test_bytes_and_shards_are_counted_in_all_processes(data: Path, tmp_path: Path, server: WebServer, how: str) -> None:
    loader = loader_over(
        f"{server.url}/data", tmp_path, 0 if how == "here" else 2, persistent_workers=how == "persistent"
    )
    if how == "forkserver":
        loader.multiprocessing_context = "forkserver"
    for _ in loader:
        pass
    first, num_shards = loader.stats(), len(list(data.glob("shard.*")))
    index_bytes = len(server.objects["/data/index.json"])
    assert first.counters["shards_fetched"] == num_shards
    assert first.counters["fetched_bytes"] == bytes_of(data) + index_bytes
    assert first.counters["requests"] == server.count("GET")
    assert 0 < first.counters["first_byte_s"] <= first.counters["download_s"] + 10
    for _ in loader:
        pass
    second = loader.stats() - first
    assert second.counters["fetched_bytes"] == 0
    assert second.cache_hit == 1.0
    assert second.num_samples == NUM_SAMPLES
    loader.close()


def test_retries_are_counted(data: Path, tmp_path: Path, server: WebServer) -> None:
    options = {"first_pause_s": 0.001, "retries": 20}
    with FaultProxy(server.url, Plan(probability={"error": 0.5})) as proxy:
        loader = loader_over(f"{proxy.url}/data", tmp_path, 2, stream_config={"options": options})
        for _ in loader:
            pass
        stats = loader.stats()
    assert stats.counters["retries"] == stats.counters["throttled"] == proxy.counts["error"] > 0
    assert stats.counters["retry_s"] > 0
    assert stats.metrics()["data/retries"] == stats.counters["retries"]


def test_evictions_and_repeated_downloads_are_counted(data: Path, tmp_path: Path) -> None:
    loader = loader_over(f"file://{data}", tmp_path, cache_limit=bytes_of(data) // 2, num_canonical_nodes=1, window=2)
    for _ in range(3):
        for _ in loader:
            pass
    counted, num_shards = loader.stats().counters, len(list(data.glob("shard.*")))
    assert counted["shards_fetched"] - counted["shards_fetched_again"] == num_shards
    assert counted["shards_fetched_again"] > 0
    assert counted["evictions"] > counted["shards_fetched_again"]


def test_bad_samples_are_counted(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    with MDSWriter(out=folder, columns={"x": "json"}, hashes=[]) as writer:
        for number in range(64):
            writer.write({"x": {"n": number}})
    (shard,) = folder.glob("shard.*")
    shard.write_bytes(shard.read_bytes().replace(b'{"n":7}', b'{"n":!}').replace(b'{"n": 7}', b'{"n": !}'))
    dataset = StreamingDataset(local=folder, on_bad={"sample": "substitute", "quarantine": tmp_path / "quarantine"})
    loader = StreamingDataLoader(dataset, 8, num_workers=1)
    for _ in range(2):
        for _ in loader:
            pass
    assert loader.stats().counters["bad_samples"] >= 1
    assert loader.stats().metrics()["data/bad_samples"] >= 1


def test_a_copy_of_a_loader_begins_at_zero(data: Path, tmp_path: Path) -> None:
    loader = loader_over(data, tmp_path)
    for _ in loader:
        pass
    assert copy.deepcopy(loader).stats().num_batches == 0
    counters = Counters()
    counters.add("requests")
    assert pickle.loads(pickle.dumps(counters)).values.tolist() == [0.0] * len(NAMES)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_how_much_of_the_epoch_is_done_and_how_long_the_rest_takes(
    data: Path, tmp_path: Path, num_workers: int
) -> None:
    loader = loader_over(data, tmp_path, num_workers)
    assert loader.stats().epoch_fraction == 0.0
    batches = iter(loader)
    for _ in islice(batches, NUM_SAMPLES // BATCH // 4):
        spend(0.005)
    before = loader.stats()
    state = loader.state_dict()
    assert before.epoch_fraction == 0.25
    assert before.epoch_left_s == pytest.approx(3 * before.elapsed_s, rel=0.15)
    assert "25% of the epoch is done; the rest takes " in str(before)
    for _ in batches:
        pass
    recent = loader.stats() - before
    assert (recent.epoch_fraction, recent.epoch_left_s) == (1.0, 0.0)
    assert "of the epoch is done" not in str(recent)
    assert recent.metrics()["data/epoch_fraction"] == 1.0
    resumed = loader_over(data, tmp_path)
    resumed.load_state_dict(state)
    next(iter(resumed))
    assert resumed.stats().epoch_fraction == 0.25 + BATCH / NUM_SAMPLES


def test_packed_rows_and_accumulated_batches_count_by_the_position(data: Path, tmp_path: Path) -> None:
    loader = StreamingDataLoader(StreamingDataset(local=data), 8, accumulate=4)
    for _ in islice(loader, 16):
        pass
    assert loader.stats().epoch_fraction == 16 * 8 / NUM_SAMPLES
    with MDSWriter(out=tmp_path / "texts", columns={"tokens": "ndarray:int32"}) as writer:
        for number in range(400):
            writer.write({"tokens": np.full(10 + number % 30, number, np.int32)})
    packed = StreamingDataLoader(StreamingDataset(local=tmp_path / "texts", pack=Packing("tokens", 64)), 4)
    num_rows = 4 * len(packed)
    for _ in islice(packed, len(packed) // 2):
        pass
    stats = packed.stats()
    assert stats.epoch_positions == pytest.approx(num_rows, rel=0.4)
    assert stats.epoch_fraction == pytest.approx(0.5, abs=0.2)


def test_a_look_at_batches_is_not_measured(data: Path, tmp_path: Path) -> None:
    loader = loader_over(data, tmp_path)
    batches = iter(loader)
    next(batches)
    for _ in loader.look():
        pass
    next(batches)
    assert loader.stats().num_batches == 2
    assert (loader.stats().num_samples, loader.stats().num_iterations) == (2 * BATCH, 1)


def test_an_evaluation_is_measured(data: Path) -> None:
    loader = StreamingDataLoader(StreamingDataset(local=data), BATCH, evaluation=True)
    for _ in loader:
        pass
    assert loader.stats().num_samples == NUM_SAMPLES


def test_threads_count_together() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(5000):
            counters.add("fetched_bytes", 3)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.values.sum() == 8 * 5000 * 3


def test_a_batch_costs_a_few_microseconds() -> None:
    meter, spent, now = Meter(), [], perf_counter()
    for number in range(2000):
        begun = thread_time()
        meter.note(now, now + 0.001, Made(now, now + 0.001, (0.0002,) * 5, 0.001, 0.001), None, number == 0)
        spent.append(thread_time() - begun)
    assert median(spent) * 1e6 < LIMIT_US


def test_the_stats_are_readable(data: Path, tmp_path: Path) -> None:
    loader = loader_over(f"file://{data}", tmp_path)
    assert str(loader.stats()) == "No batch was handed out yet."
    for _ in loader:
        pass
    text = str(loader.stats())
    assert f"{NUM_SAMPLES // BATCH} batches, {NUM_SAMPLES:,} samples" in text
    assert "waiting: reading" in text
    assert "MB/s" in loader.stats().short


def test_idle_cores_are_asked_for_once_in_64_waits_that_are_shorter_than_their_clock_ticks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []
    monkeypatch.setattr("lightning_stream.monitoring.meter._idle_s", lambda: asked.append(0.0) or 2.0 * len(asked))
    meter = Meter()
    for asked_at in range(128):
        came_at = asked_at + 0.005
        meter.asked(asked_at, is_first=not asked_at)
        meter.note(asked_at, came_at, Made(asked_at, came_at, (0.0,) * 5, 0.0, 0.0), None, is_first=not asked_at)
    assert len(asked) == 4
    assert meter.stats(Counters()).idle_cores == pytest.approx(2.0 / 0.005)
