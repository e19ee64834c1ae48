"""Balanced loaders, and when and where a training run sees a sample: equal to what its loaders deliver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from support.data import write_ids

from lightning_stream import MDSWriter, Packing, StreamingDataLoader, StreamingDataset, World
from lightning_stream.errors import NotFoundError

NUM_SAMPLES = 167
LENGTHS = np.random.default_rng(3).integers(1, 4000, NUM_SAMPLES).astype(np.uint32)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    lengths = {"tokens": lambda sample: int(LENGTHS[sample["id"]])}
    write_ids(str(folder), range(NUM_SAMPLES), size_limit=200, lengths=lengths)
    return folder


def loaders_of(
    shards: Path, size: int | None, world: World, dataset: dict[str, Any] | None = None, **options: Any
) -> list[StreamingDataLoader]:
    """The loader of every rank."""
    arguments = {"local": shards, "shuffle": True, **(dataset or {})}
    worlds = [World(rank, world.num_ranks, world.ranks_per_node, world.replication) for rank in range(world.num_ranks)]
    return [StreamingDataLoader(StreamingDataset(**arguments), size, world=one, **options) for one in worlds]


def seen(loaders: list[StreamingDataLoader], accumulate: int = 1, first: int = 0) -> dict[int, list[tuple[int, ...]]]:
    """What one epoch of the loaders delivers: (epoch, step, rank, micro-batch, row) of each sample, in order."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for rank, loader in enumerate(loaders):
        for number, batch in enumerate(loader):
            info = loader.last_batch
            assert info is not None
            ids = batch["id"].tolist()
            place = (info.epoch, first + number // accumulate, rank, number % accumulate)
            for row in np.flatnonzero(~info.filler).tolist():
                found.setdefault(ids[row], []).append((*place, row))
    return {number: sorted(places) for number, places in found.items()}


BALANCED = {"balance": lambda lengths: lengths * lengths}


@pytest.mark.parametrize("tail", ["pad", "exact"])
@pytest.mark.parametrize("balanced", [{}, BALANCED])
@pytest.mark.parametrize("world", [World(0, 1), World(0, 4, 2)])
def test_a_sample_is_where_the_loaders_deliver_it(shards: Path, world: World, balanced: Any, tail: Any) -> None:
    loaders = loaders_of(shards, 4, world, balanced, accumulate=2, tail=tail)
    delivered = seen(loaders, 2)
    assert sorted(delivered) == list(range(NUM_SAMPLES))
    for number in range(0, NUM_SAMPLES, 9):
        assert loaders[-1].where(number, [0]) == delivered[number]
        assert loaders[-1].streaming.where(number, [0]) == delivered[number]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [World(0, 1), World(0, 3), World(0, 4, 2)])
def test_a_sample_is_where_batches_of_a_budget_deliver_it_in_any_world(
    shards: Path, world: World, accumulate: int
) -> None:
    budget = {"batch_tokens": {"tokens": 12_000, "multiple": 2}}
    loaders = loaders_of(shards, None, world, budget, accumulate=accumulate)
    delivered = seen(loaders, accumulate)
    assert sorted(delivered) == list(range(NUM_SAMPLES))
    for number in range(0, NUM_SAMPLES, 9):
        assert loaders[-1].where(number, [0]) == delivered[number]


def test_a_dataset_alone_says_where_a_sample_is_only_if_it_knows_the_batch_size(shards: Path) -> None:
    arguments: dict[str, Any] = {"local": shards, "shuffle": True}
    (loader,) = loaders_of(shards, 12, World())
    delivered = seen([loader])
    alone = StreamingDataset(**arguments, batch_size=12)
    assert all(alone.where(sample_id, [0]) == delivered[sample_id] for sample_id in range(0, NUM_SAMPLES, 9))
    unknown = StreamingDataset(**arguments)
    with pytest.raises(ValueError, match="batch size"):
        unknown.where(5)
    loader = StreamingDataLoader(unknown, 12)
    next(iter(loader))
    assert unknown.where(5) == loader.where(5) == delivered[5]


def test_a_part_of_a_number_is_no_sample_epoch_or_step(shards: Path) -> None:
    [loader] = loaders_of(shards, 4, World())
    half: Any = 1.5
    for wrong in (lambda: loader.where(half), lambda: loader.where(1, epochs=[half]), lambda: loader.trace(half)):
        with pytest.raises(ValueError, match=r"found 1\.5"):
            wrong()


def test_where_counts_every_epoch_and_each_time_that_a_sample_is_drawn(shards: Path) -> None:
    dataset = {"streams": None, "epoch_size": 400, "balance": "tokens"}
    loaders = loaders_of(shards, 5, World(0, 3), dataset)
    epochs = [seen(loaders), seen(loaders)]
    for number in range(0, NUM_SAMPLES, 9):
        assert loaders[0].where(number, epochs=range(2)) == epochs[0][number] + epochs[1][number]
    assert max(len(places) for places in epochs[0].values()) == 3


def test_where_follows_the_changes_of_the_batch_size(shards: Path) -> None:
    whole = StreamingDataset(local=shards, shuffle=True, num_canonical_nodes=4)
    loader = StreamingDataLoader(whole, 16, world=World())
    batches, delivered = iter(loader), {}
    for step in range(3):
        for row, number in enumerate(next(batches)["id"].tolist()):
            delivered[number] = [(0, step, 0, 0, row)]
    loaders = loaders_of(shards, 4, World(0, 2), {"num_canonical_nodes": 4})
    for one in loaders:
        one.load_state_dict(loader.state_dict())
    delivered.update(seen(loaders, first=3))
    assert len(delivered) == NUM_SAMPLES
    for one in loaders:
        one.load_state_dict(loader.state_dict())
    for number in range(0, NUM_SAMPLES, 5):
        (found,), (wanted,) = loaders[0].where(number), delivered[number]
        assert found.step == wanted[1]
        assert found == wanted or found.step < 3  # on other ranks then


def test_ranks_of_one_replica_are_named_by_the_first_of_them(shards: Path) -> None:
    loader = StreamingDataLoader(StreamingDataset(local=shards), 4, world=World(3, 4, 4, replication=2), tail="drop")
    assert loader.where(5) == [(0, 0, 2, 0, 1)]
    assert loader.where(166) == []  # in the last partial batch, which is dropped


@pytest.mark.parametrize("workers", [0, 2])
def test_a_balance_delivers_the_same_samples_in_every_step(shards: Path, workers: int) -> None:
    plain, balanced = (loaders_of(shards, 4, World(0, 4, 4), one, num_workers=workers) for one in ({}, BALANCED))
    steps = [
        [np.concatenate([one["id"] for one in ranks]) for ranks in zip(*some, strict=True)]
        for some in (plain, balanced)
    ]
    assert [sorted({*step.tolist()}) for step in steps[1]] == [sorted({*step.tolist()}) for step in steps[0]]
    costs = [(LENGTHS.astype(np.int64)[step] ** 2).reshape(4, 4).sum(axis=1) for some in steps for step in some[:10]]
    spread = [one.max() / one.mean() for one in costs]
    assert np.mean(spread[10:]) < 1.05 < 1.2 < np.mean(spread[:10])


def test_a_run_continues_with_another_balance_in_another_world(shards: Path) -> None:
    first = loaders_of(shards, 4, World(0, 4))
    batches = [iter(one) for one in first]
    done = [number for _ in range(4) for one in batches for number in next(one)["id"].tolist()]
    state = first[0].state_dict()
    rest = loaders_of(shards, 8, World(0, 2), BALANCED)
    for one in rest:
        one.load_state_dict(state)
    later = seen(rest)
    assert sorted([*done, *later]) == list(range(NUM_SAMPLES))
    assert rest[0].state_dict()["epoch"] == 1


def test_a_subset_is_balanced_by_its_own_lengths(shards: Path) -> None:
    part = StreamingDataset(local=shards, shuffle=True, **BALANCED).subset([*range(79, 39, -1)])
    loaders = [StreamingDataLoader(part, 8, world=World(rank, 2, 2)) for rank in range(2)]
    costs = [[(LENGTHS[batch["id"]].astype(float) ** 2).sum() for batch in loader] for loader in loaders]
    assert np.allclose(*np.array(costs)[:, :2], rtol=0.02)


def test_a_balance_that_can_do_nothing_is_warned_of(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    for nodes, world, warned in ((1, World(0, 4), 0), (4, World(0, 4, 2), 0), (4, World(0, 4), 1), (1, World(0, 1), 0)):
        caplog.clear()
        next(iter(loaders_of(shards, 4, world, {**BALANCED, "num_canonical_nodes": nodes})[0]))
        assert sum("Shares are balanced among" in record.message for record in caplog.records) == warned


def test_a_balance_that_cannot_be_is_refused(shards: Path) -> None:
    with pytest.raises(NotFoundError, match="the lengths 'bytes'"):
        len(StreamingDataLoader(StreamingDataset(local=shards, balance="bytes"), 4))
    with pytest.raises(ValueError, match="this order assigns samples to ranks itself"):
        StreamingDataset(local=shards, batching_method="device_per_stream", balance="tokens")
    with pytest.raises(TypeError, match="a function of them; found 3"):
        StreamingDataset(local=shards, balance=3)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(5)
    with MDSWriter(out=str(folder), columns={"tokens": "ndarray:int32"}, lengths={"tokens": len}) as writer:
        for number, size in enumerate(rng.integers(1, 90, 400)):
            writer.write({"tokens": np.full(size, number, np.int32)})
    return folder


def test_a_document_is_in_the_rows_where_it_is_found(documents: Path) -> None:
    packed = {"pack": Packing(row_length=64, window=60)}
    loaders = loaders_of(documents, 4, World(0, 2, 2), packed, accumulate=2)
    found: dict[int, list[tuple[int, ...]]] = {}
    for rank, loader in enumerate(loaders):
        for number, batch in enumerate(loader):
            info = loader.last_batch
            assert info is not None
            for row in np.flatnonzero(~info.filler).tolist():
                place = (info.epoch, number // 2, rank, number % 2, row)
                for document in np.unique(batch["input_ids"][row, : batch["num_tokens"][row]]).tolist():
                    found.setdefault(document, []).append(place)
    for document in range(400):
        assert [tuple(one) for one in loaders[0].where(document, [0])] == sorted(found[document])


def test_rows_are_balanced_by_their_documents(documents: Path) -> None:
    packed = {"pack": Packing(row_length=64, window=60), "num_canonical_nodes": 1}
    balanced = {**packed, "balance": lambda lengths: lengths * lengths}
    state = loaders_of(documents, 8, World(0, 4, 4), balanced, tail="drop")[0].state_dict()
    costs = []
    for dataset in (packed, balanced):
        loaders = loaders_of(documents, 8, World(0, 4, 4), dataset, tail="drop")
        for loader in loaders:
            loader.load_state_dict(state)
        rows = [[batch.rows for batch in loader.micro_batches_from(loader.position).walk()] for loader in loaders]
        costs.append(np.array([[(one.num_tokens.astype(float) ** 2).sum() for one in each if one] for each in rows]))
    assert np.allclose(costs[0].sum(axis=0), costs[1].sum(axis=0)), "a step has the same rows"
    plain, even = (one.max(axis=0) / one.mean(axis=0) for one in costs)
    assert even.mean() < 1.02 < plain.mean()
