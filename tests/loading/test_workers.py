"""The worker processes of a loader: who ends them, and what that means for an iteration in progress."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support.data import write_ids

from lightning_stream import StreamingDataLoader, StreamingDataset
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


def test_the_collections_of_a_worker_do_not_visit_what_the_trainer_made(data: Path) -> None:
    before = gc.get_freeze_count()
    made = [[] for _ in range(1000)]
    dataset = StreamingDataset(remote=data, transform=with_frozen_objects)
    with_workers = StreamingDataLoader(dataset, 8, num_workers=1)
    assert all(batch["frozen"].min() >= before + len(made) for batch in with_workers)
    with_workers.close()
    assert gc.get_freeze_count() == before
