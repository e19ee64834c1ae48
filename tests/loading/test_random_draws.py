"""The functions of one dataset draw independently of each other, and the same in all ways to make batches."""

from __future__ import annotations

import queue
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.loading import randomness  # noqa: E402

NUM_SAMPLES = 24


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1, dtype=torch.float64))]


class Augmenter:
    """Draws as albumentations does: from a generator of its own, that no global seed reaches."""

    def __init__(self) -> None:
        self.random = np.random.default_rng()

    def set_random_seed(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def draws(self) -> float:
        return float(self.random.random())


class Cropped(StreamingDataset):
    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.augmenter = Augmenter()

    def __getitem__(self, index: Any) -> Any:
        return {**super().__getitem__(index), "read": draws(), "augmented": self.augmenter.draws()}


def transform(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "transformed": draws()}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {**columns, "collated": [draws()] * len(samples)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with MDSWriter(out=tmp_path / "data", columns={"x": "int"}, size_limit=100) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"x": number})
    return tmp_path / "data"


def drawn(data: Path, num_workers: int) -> dict[str, list[Any]]:
    dataset = Cropped(data, transform=transform, shuffle=True)
    loader = StreamingDataLoader(dataset, 4, num_workers=num_workers, collate_fn=collate)
    batches = list(loader)
    return {name: [value for batch in batches for value in batch[name]] for name in batches[0]}


def test_what_reads_transforms_and_collates_a_sample_draws_different_numbers(data: Path) -> None:
    columns = drawn(data, 0)
    for place in range(3):
        for first in range(0, NUM_SAMPLES, 4):  # the batch's draws are those of its first sample's position
            numbers = [columns[name][first][place] for name in ("read", "transformed", "collated")]
            assert len(set(numbers)) == 3
    flat = [value for name in ("read", "transformed") for draw in columns[name] for value in draw]
    assert len(set(flat)) == len(flat) == 2 * 3 * NUM_SAMPLES


def test_draws_are_the_same_with_workers_and_in_a_plain_loader(data: Path) -> None:
    columns = drawn(data, 0)
    assert drawn(data, 2) == columns
    dataset = Cropped(data, transform=transform, shuffle=True, batch_size=4)
    plain = list(torch.utils.data.DataLoader(dataset, 4, collate_fn=lambda samples: samples))
    for name in ("x", "read", "transformed", "augmented"):
        assert [sample[name] for batch in plain for sample in batch] == columns[name]


class Mine(StreamingDataset):
    """Uses the names of arguments for what is its own."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.shuffle_seed = self.batch_size = self.predownload = self.cache_limit = "mine"  # type: ignore[assignment]
        self.shuffle = self.replication = self.streams = self.batch_tokens = "mine"  # type: ignore[assignment]


def collate_with_rng(samples: list[Any], rng: np.random.Generator) -> tuple[list[int], float]:
    return [sample["x"] for sample in samples], rng.random()


@pytest.mark.parametrize("in_loader", [4, None])
def test_the_names_of_a_subclass_change_neither_batches_nor_draws(data: Path, in_loader: int | None) -> None:
    settings: dict[str, Any] = {"shuffle": True, "shuffle_seed": 3, "batch_size": 4}
    loaders = [
        StreamingDataLoader(kind(data, **settings), in_loader, collate_fn=collate_with_rng)  # type: ignore[arg-type]
        for kind in (StreamingDataset, Mine)
    ]
    assert list(loaders[0]) == list(loaders[1])
    assert "batch_size=4" in repr(loaders[1])
    assert loaders[1].batch_size == 4


class OwnSeed(Cropped):
    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.shuffle_seed = self.batch_size = "a name of the subclass's own"  # type: ignore[assignment]


def test_attributes_of_a_subclass_change_no_draw(data: Path) -> None:
    given = {"transform": transform, "shuffle": True, "shuffle_seed": 5, "batch_size": 4}
    first, other = (list(StreamingDataLoader(kind(data, **given), collate_fn=collate)) for kind in (Cropped, OwnSeed))
    assert first == other
    assert len(first) == NUM_SAMPLES // 4


def slow_transform(sample: dict[str, Any]) -> list[float]:
    before = draws()
    time.sleep(0.001)  # another thread has its turn
    return [*before, *draws()]


def test_loaders_that_threads_of_one_process_iterate_draw_what_each_draws_alone(data: Path) -> None:
    def all_draws(begins: threading.Barrier) -> list[Any]:
        loader = StreamingDataLoader(StreamingDataset(data, transform=slow_transform, shuffle=True), 4)
        begins.wait(30)
        return [torch.stack(batch).tolist() for batch in loader]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = all_draws(threading.Barrier(1))
    of_training = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(all_draws, [threading.Barrier(3)] * 3)) == [expected] * 3
    assert draws() == of_training


def test_loaders_of_two_threads_that_wait_for_each_other_go_on_with_a_warning(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(randomness._GENERATORS, "wait_s", 0.2)
    teacher: queue.Queue[Any] = queue.Queue(1)

    def teach() -> None:
        for _ in range(2):
            for batch in StreamingDataLoader(StreamingDataset(data, transform=transform), 4):
                teacher.put(batch)

    def with_teacher(sample: dict[str, Any]) -> int:
        teacher.get(timeout=30)
        return int(sample["x"])

    thread = threading.Thread(target=teach, daemon=True)
    thread.start()
    loader = StreamingDataLoader(StreamingDataset(data, transform=with_teacher), 2)
    taught = [number for _, batch in zip(range(NUM_SAMPLES // 4), loader, strict=False) for number in batch.tolist()]
    thread.join(30)
    assert taught == list(range(NUM_SAMPLES // 2))
    assert [record.message.split(" while ")[0] for record in caplog.records] == ["A thread makes batches"]
