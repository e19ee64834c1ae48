"""Another package's dataset around a `StreamingDataset` hides it: what divides its samples again is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
datasets = pytest.importorskip("datasets", reason="uv sync --extra torch")
by_nodes = pytest.importorskip("datasets.distributed", reason="uv sync --extra torch")

from accelerate.data_loader import DataLoaderShard, IterableDatasetShard  # noqa: E402
from torch.utils.data import IterableDataset  # noqa: E402
from torch.utils.data._utils.worker import WorkerInfo  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataset, World  # noqa: E402

TWO = World(num_ranks=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("data"))
    with MDSWriter(out=folder, columns={"id": "int"}) as writer:
        for number in range(16):
            writer.write({"id": number})
    return folder


class Around(IterableDataset[Any]):
    """A dataset of a user's own."""

    def __init__(self, inner: StreamingDataset) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


def by_datasets(inner: StreamingDataset) -> Any:
    """As TRL's trainers want a stream."""
    return datasets.IterableDataset.from_generator(lambda: iter(inner))


def ids(samples: Any) -> list[int]:
    return [sample["id"] for sample in samples]


@pytest.mark.parametrize("around", [Around, by_datasets])
def test_a_dataset_inside_another_is_not_divided_by_accelerate_too(data: str, around: Any) -> None:
    wrapped = around(StreamingDataset(data, world=TWO))
    assert len(ids(wrapped)) == 8
    with pytest.raises(ValueError, match="StreamingDataset and Accelerate would both divide them among 2"):
        ids(IterableDatasetShard(wrapped, batch_size=2, num_processes=2))
    whole = around(StreamingDataset(data, world=World(num_ranks=1)))
    assert ids(IterableDatasetShard(whole, batch_size=2, num_processes=2)) == [0, 1, 4, 5, 8, 9, 12, 13]


def test_a_dataset_inside_one_of_datasets_is_not_divided_by_nodes_or_workers_too(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = by_nodes.split_dataset_by_node(by_datasets(StreamingDataset(data, world=TWO)), rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"StreamingDataset and datasets.IterableDataset would both .* among 2 data"):
        ids(nodes)
    inner = StreamingDataset(data, batch_size=4)
    in_worker = WorkerInfo(id=0, num_workers=2, seed=0, dataset=inner)
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", in_worker)
    assert len(ids(Around(inner))) == 8
    with pytest.raises(ValueError, match="and 2 workers"):
        ids(by_datasets(inner))


def by_accelerate(inner: StreamingDataset) -> Any:
    """As a trainer of Accelerate, or of transformers, reads a dataset of a user's own."""
    return (sample for batch in DataLoaderShard(Around(inner), batch_size=4) for sample in unbatched(batch))


def unbatched(batch: Any) -> list[dict[str, int]]:
    return [{"id": number} for number in batch["id"].tolist()]


def test_a_worker_of_accelerate_knows_that_it_is_one(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    around = Around(StreamingDataset(data, batch_size=4, world=TWO))
    other = Around(StreamingDataset(data, batch_size=4, world=TWO))
    loader = DataLoaderShard(around, batch_size=4)
    loader.begin()
    infos = [WorkerInfo(id=0, num_workers=1, seed=0, dataset=dataset) for dataset in (around, other)]
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", infos[0])
    with pytest.raises(ValueError, match="StreamingDataset and Accelerate would both"):
        ids(around)
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", infos[1])
    assert len(ids(other)) == 8
    loader.end()


@pytest.mark.parametrize("around", [by_accelerate, by_datasets])
def test_an_epoch_inside_another_dataset_warns_that_a_resume_would_not_find_it(data: str, around: Any) -> None:
    inner = StreamingDataset(data)
    assert ids(around(inner)) == list(range(16))
    with pytest.warns(UserWarning, match="found the second epoch"):
        assert ids(around(inner)) == list(range(16))
    steered = StreamingDataset(data)
    kept = StreamingDataset(data, batch_size=4)
    for epoch in range(2):
        steered.set_epoch(epoch)
        assert ids(around(steered)) == list(range(16))
        assert ids(around(kept)) == list(range(16))
        kept.state_dict()
    assert ids(Around(inner)) == list(range(16))
