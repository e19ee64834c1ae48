"""Scheduled mixtures of packed documents: shares of tokens, and changes while training that lose no document."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream import (  # noqa: E402
    MDSWriter,
    Packing,
    PositionTracker,
    Schedule,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    World,
    verify_delivery,
)
from lightning_stream.errors import NotFoundError, StateError  # noqa: E402

MEANS = {"web": 20, "code": 60}  # tokens of a document
PACK = Packing(row_length=128, window=64)
EVEN = [(0, {"web": 1, "code": 1})]
ROWS = 8  # of a step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng, number = tmp_path_factory.mktemp("mix"), np.random.default_rng(3), 1
    for name, mean in MEANS.items():
        written: Any = {"columns": {"tokens": "ndarray:int32"}, "lengths": {"tokens": len}, "size_limit": 1 << 13}
        with MDSWriter(out=str(root / name), **written) as writer:
            for _ in range(300):  # each document has a number of its own, and its tokens are this number
                writer.write({"tokens": np.full(rng.integers(1, 2 * mean), number, np.int32)})
                number += 1
    return root


def dataset_of(folder: Path, schedule: Any, **settings: Any) -> StreamingDataset:
    streams = [Stream(local=folder / name) for name in MEANS]
    given = {"shuffle": True, "epoch_size": 600, "pack": PACK, "schedule": schedule, **settings}
    return StreamingDataset(streams=streams, **given)


def loaders(folder: Path, num_ranks: int = 1, schedule: Any = EVEN, **options: Any) -> list[StreamingDataLoader]:
    dataset = dataset_of(folder, schedule)
    worlds = [World(rank, num_ranks) for rank in range(num_ranks)]
    return [StreamingDataLoader(dataset, global_batch_size=ROWS, world=world, **options) for world in worlds]


def train(ranks: Sequence[StreamingDataLoader], steps: int, changes: Any = None) -> list[list[tuple[int, ...]]]:
    """The sorted rows of so many global batches, with changes of the mixture after some of them, on every rank."""
    found: list[list[tuple[int, ...]]] = []
    while len(found) < steps:
        iterators = [iter(loader) for loader in ranks]
        for first in iterators[0]:
            batches = [first["input_ids"], *(next(one)["input_ids"] for one in iterators[1:])]
            counted = [torch.from_numpy(~loader.last_batch.filler) for loader in ranks]  # type: ignore[union-attr]
            rows = torch.cat([batch[rows] for batch, rows in zip(batches, counted, strict=True)])
            found.append(sorted(map(tuple, rows.tolist())))
            if change := (changes or {}).get(len(found)):
                assert len({loader.change_mixture(**change) for loader in ranks}) == 1
            if len(found) == steps:
                break
        for one in iterators:
            one.close()
    return found


def shares(batches: Sequence[Sequence[tuple[int, ...]]]) -> float:
    """The share of `web` among the tokens."""
    tokens = np.array([token for rows in batches for row in rows for token in row])
    return float(((tokens > 0) & (tokens <= 300)).sum() / (tokens > 0).sum())


def mean_lengths(loader: StreamingDataLoader) -> dict[str, float]:
    return loader.state_dict()["order"]["schedule"]["mean_lengths"]


def test_mean_lengths_follow_from_the_lengths_of_the_dataset_and_are_in_the_state(folder: Path) -> None:
    schedule = Schedule(EVEN, unit="tokens")
    (loader,) = loaders(folder, schedule=schedule)
    lengths = loader.streaming.lengths("tokens")
    wanted = {"web": round(float(lengths[:300].mean()), 3), "code": round(float(lengths[300:].mean()), 3)}
    assert mean_lengths(loader) == wanted
    assert shares(train([loader], 12)) == pytest.approx(0.5, abs=0.04)
    assert shares(train(loaders(folder), 12)) == pytest.approx(0.25, abs=0.04)  # of documents
    state = loader.state_dict()
    assert Schedule.from_state(state["order"]["schedule"]).mean_lengths == wanted
    (again,) = loaders(folder, schedule=schedule)
    again.load_state_dict(state)
    assert train([again], 5) == train(loaders(folder, schedule=schedule), 17)[12:]
    unpacked = StreamingDataLoader(dataset_of(folder, schedule, pack=None), ROWS, collate_fn=list)
    assert mean_lengths(unpacked) == wanted


def test_the_mean_lengths_of_a_part_are_those_of_the_tokens_that_are_trained_on(folder: Path) -> None:
    schedule = Schedule(EVEN, unit="tokens")
    lengths = dataset_of(folder, EVEN).lengths("tokens").astype(int)
    for rule, kept in (("truncate", np.minimum(lengths, 32)), ("drop", np.where(lengths > 32, 0, lengths))):
        pack = Packing(row_length=32, long_documents=rule)
        loader = StreamingDataLoader(dataset_of(folder, schedule, pack=pack), ROWS)
        assert mean_lengths(loader)["code"] == pytest.approx(kept[300:].mean(), abs=1e-3)
    some = StreamingDataLoader(dataset_of(folder, schedule, filter={"lengths": {"tokens": (30, None)}}), ROWS)
    assert mean_lengths(some)["web"] == pytest.approx(lengths[:300][lengths[:300] >= 30].mean(), abs=1e-3)


def test_given_mean_lengths_are_kept_and_a_dataset_without_lengths_needs_them(folder: Path, tmp_path: Path) -> None:
    given = Schedule(EVEN, unit="tokens", mean_lengths={"web": 1, "code": 3})
    assert mean_lengths(loaders(folder, schedule=given)[0]) == {"web": 1, "code": 3}
    with MDSWriter(out=str(tmp_path / "bare"), columns={"id": "int"}) as writer:
        writer.write({"id": 1})
    bare = StreamingDataset(streams=[Stream(local=tmp_path / "bare")], schedule=Schedule([(0, {"bare": 1})], "tokens"))
    with pytest.raises(NotFoundError, match=r"lengths.*Or pass mean_lengths= to the Schedule"):
        StreamingDataLoader(bare, 1).state_dict()


def test_a_step_of_packed_rows_counts_as_its_tokens(folder: Path) -> None:
    schedule = Schedule([(0, {"web": 1}), (6, {"code": 1})], unit="steps")
    batches = train(loaders(folder, schedule=schedule), 14)
    assert [shares([rows]) for rows in batches[:4]] == [1] * 4
    assert [shares([rows]) for rows in batches[8:]] == [0] * 6  # a window is about a step and a half
    with pytest.raises(ValueError, match="Its steps count samples, so omit mean_lengths"):
        dataset_of(folder, Schedule(EVEN, "steps", mean_lengths=MEANS), pack=None)


CHANGES = {
    3: {"weights": {"web": 0, "code": 1}},  # drop a stream
    9: {"weights": {"web": 1, "code": 1}, "skip": {"web": 30}},  # add it again, and skip a range of it
    10: {"skip": {"code": 10}},
}


def test_a_change_loses_and_repeats_no_document_and_changes_no_row_handed_out(folder: Path) -> None:
    plain, wanted = train(loaders(folder), 30), train(loaders(folder), 30, CHANGES)
    assert wanted[:3] == plain[:3]
    assert shares(wanted[8:9]) == 0
    assert shares(wanted[20:]) == pytest.approx(0.25, abs=0.06)
    tokens = np.bincount([token for rows in wanted for row in rows for token in row], minlength=601)
    (loader,) = loaders(folder)
    lengths = loader.streaming.lengths("tokens")
    whole = tokens[1:] / lengths  # how often each document came; one in a row that is still to come came in part
    assert np.count_nonzero(whole % 1) <= 2 * PACK.rows("").window
    for num_ranks in (2, 4):
        assert train(loaders(folder, num_ranks), 30, CHANGES) == wanted


def test_a_changed_run_resumes_anywhere_and_repeats_without_the_feedback(folder: Path) -> None:
    wanted, draw = train(loaders(folder), 30, CHANGES), random.Random(5)
    for _ in range(6):
        stop = draw.randrange(2, 29)
        ranks = loaders(folder, draw.choice([1, 2, 4]))
        assert train(ranks, stop, CHANGES) == wanted[:stop]
        state = ranks[0].state_dict()
        assert all(loader.state_dict() == state for loader in ranks)
        assert len(str(state)) < 1024
        ranks = loaders(folder, draw.choice([1, 2, 4]))
        for loader in ranks:
            loader.load_state_dict(state)
        left = {step - stop: change for step, change in CHANGES.items() if step > stop}
        assert train(ranks, 30 - stop, left) == wanted[stop:]
    again = Schedule.from_state(ranks[0].state_dict()["order"]["schedule"])
    assert len(again.changes) == 3
    assert train(loaders(folder, 2, again), 30) == wanted


def test_a_resume_in_front_of_the_changed_window_reads_the_changed_rows(folder: Path) -> None:
    """A state between a change and its first row holds landmarks of windows that the change must not touch."""
    wanted = train(loaders(folder), 12, {2: CHANGES[3]})
    for stop in range(2, 9):
        (loader,) = loaders(folder)
        train([loader], stop, {2: CHANGES[3]})
        (resumed,) = loaders(folder)
        resumed.load_state_dict(loader.state_dict())
        assert train([resumed], 12 - stop) == wanted[stop:]


def test_the_record_of_a_changed_run_of_rows_is_verified(folder: Path, tmp_path: Path) -> None:
    (loader,) = loaders(folder)
    tracker = PositionTracker(loader, record_delivery=tmp_path)
    for _ in range(2):
        for _ in tracker:
            tracker.stepped()
            if tracker.num_steps == 5:
                loader.change_mixture({"code": 1}, skip={"web": 7}, after_steps=2)
    tracker.detach()
    found = verify_delivery(tmp_path, dataset_of(folder, EVEN))
    assert found.first_difference is None, found.sentence
    assert found.num_steps == tracker.num_steps


@pytest.mark.parametrize("pack", [PACK, None], ids=["rows", "samples"])
@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
@pytest.mark.parametrize("epoch_size", [200, 460])
def test_a_loop_over_a_mixture_that_ends_comes_to_its_end(folder: Path, pack: Any, tail: Any, epoch_size: int) -> None:
    schedule = Schedule(EVEN, exhausted="stop")

    def fresh() -> StreamingDataLoader:
        dataset = dataset_of(folder, schedule, pack=pack, epoch_size=epoch_size)
        return StreamingDataLoader(dataset, global_batch_size=ROWS, tail=tail, collate_fn=len)

    for follow in (lambda loader: loader, PositionTracker):
        loader, counts = fresh(), []
        run = follow(loader)
        while run.position.epoch < 6:
            assert len(counts) == run.position.epoch, "each pass is one epoch"
            counts.append(0)
            for _ in run:
                counts[-1] += 1
                if run is not loader:
                    run.stepped()
            resumed = fresh()
            resumed.load_state_dict(loader.state_dict())
            assert resumed.position == loader.position
        assert counts == [fresh().num_batches(epoch) for epoch in range(6)]
        assert counts[0] > 0
        assert counts[5] == 0


def test_an_optimizer_step_over_two_global_batches_is_refused(folder: Path) -> None:
    (loader,) = loaders(folder)
    tracker = PositionTracker(loader)
    batches = iter(tracker)
    next(batches)
    next(batches)
    with pytest.raises(StateError, match=r"one global batch.*before positions 8 to 16.*Step wherever"):
        tracker.stepped()
    assert tracker.position.position == 0
