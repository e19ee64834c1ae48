"""A training run switches versions of its data at a declared step: exactly, on any devices, and after any resume."""

from __future__ import annotations

from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data import write_ids

from lightning_stream import Packing, Stream, StreamingDataLoader, StreamingDataset, World, versions
from lightning_stream.errors import SnapshotMismatch
from lightning_stream.order.ledger import expected

BATCH = 8
OLD = sorted({*range(100)} - {1, 2})  # version 1
NEW = sorted({*range(150)} - {1, 2, *range(10, 30)})  # version 3
Steps = list[list[int]]


def write(out: Path, first: int, end: int, **how: Any) -> None:
    write_ids(out, np.arange(first, end), size_limit=300, **how)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A dataset of five versions: written, deleted from, appended to, deleted from, and with another column."""
    write(tmp_path / "set", 0, 100)
    versions.delete_rows(tmp_path / "set", [1, 2])
    write(tmp_path / "set", 100, 150, append=True)
    versions.delete_rows(tmp_path / "set", range(10, 30))
    versions.add_column(tmp_path / "set", "half", "float64", lambda sample: sample["id"] / 2)
    return tmp_path / "set"


def loaders(data: Path | list[Stream], version: Any, ranks: int = 1, **how: Any) -> list[StreamingDataLoader]:
    """A loader for each rank; all have global batches of one size."""
    loading = {"num_workers": how.pop("num_workers", 0), "tail": how.pop("tail", "pad")}
    where: dict[str, Any] = {"streams": data} if isinstance(data, list) else {"remote": data, "version": version}
    return [
        StreamingDataLoader(
            StreamingDataset(**where, **{"shuffle": True, **how}),
            BATCH // ranks,
            world=World(rank=rank, num_ranks=ranks),
            **loading,
        )
        for rank in range(ranks)
    ]


def steps_of(ranks: list[StreamingDataLoader], count: int | None = None) -> Steps:
    """The sorted samples of each global batch, up to the end of the epoch or so many; padding omitted."""
    batches = [iter(one) for one in ranks]
    found: Steps = []
    for parts in islice(zip(*batches, strict=True), count):
        last = [one.last_batch for one in ranks]
        ids = [part["id"][np.flatnonzero(~one.filler)].tolist() for part, one in zip(parts, last, strict=True)]
        found.append(sorted(chain.from_iterable(ids)))
    return found


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]


def flat(steps: Steps) -> list[int]:
    return list(chain.from_iterable(steps))


def epoch(data: Path, version: Any, number: int = 0, **how: Any) -> Steps:
    ranks = loaders(data, version, **how)
    for one in ranks:
        one.set_epoch(number)
    return steps_of(ranks)


WORLDS = [(1, 0), (2, 0), (4, 0)]
WORKERS = [(1, 2), (2, 2), (4, 2)]


@pytest.mark.parametrize(
    ("step", "ranks", "num_workers"),
    [
        *((step, *world) for step in (1, 12, 13) for world in WORLDS),
        *(pytest.param(step, *world, marks=pytest.mark.nightly) for step in (5, 20) for world in WORLDS),
        *((5, *world) for world in WORKERS),
        *(pytest.param(13, *world, marks=pytest.mark.slow) for world in WORKERS),
    ],
)
def test_each_sample_of_the_new_version_comes_once_and_the_rest_is_that_of_each_version(
    data: Path, step: int, ranks: int, num_workers: int
) -> None:
    found = loaders(data, [(0, 1), (step, 3)], ranks, num_workers=num_workers)
    epochs = [steps_of(found) for _ in range(3)]
    switched, begin = divmod(step, 13)  # 98 samples of version 1 are 13 batches
    assert epochs[:switched] == [epoch(data, 1, number) for number in range(switched)]
    assert epochs[switched][:begin] == epoch(data, 1, switched)[:begin]
    before, after = flat(epochs[switched][:begin]), flat(epochs[switched][begin:])
    assert len({*before, *after}) == len(before) + len(after)
    assert sorted({*before, *after} & {*NEW}) == NEW
    assert {*after} <= {*NEW}
    assert epochs[switched + 1 :] == [epoch(data, 3, number) for number in range(switched + 1, 3)]


@pytest.mark.parametrize("at", [0, 3, 5, 6, 11, 17, 18, 24])
def test_a_resume_before_at_and_behind_the_switch_on_other_devices_continues_exactly(data: Path, at: int) -> None:
    declared = [(0, 1), (5, 3)]
    whole = loaders(data, declared)
    wanted = [*steps_of(whole), *steps_of(whole)]  # 18 steps, then 16
    first = loaders(data, declared, 2)
    assert steps_of(first, min(at, 18)) == wanted[: min(at, 18)]
    if at > 18:
        assert steps_of(first, at - 18) == wanted[18:at]
    states = [one.state_dict() for one in first]
    assert states[0] == states[1]
    for ranks, num_workers in ((4, 0), (1, 2)):
        later = loaders(data, declared, ranks, num_workers=num_workers)
        for one in later:
            one.load_state_dict(states[0])
        rest = steps_of(later)
        assert rest == wanted[at : at + len(rest)]
        assert at + len(rest) in (18, 34)
        assert later[0].state_dict()["ledger"] == "0" * 16  # the next epoch begins


def test_a_run_over_one_version_continues_with_a_switch_at_its_step_or_later(data: Path) -> None:
    (plain,) = loaders(data, 1)
    batches = iter(plain)
    seen = [next(batches)["id"].tolist() for _ in range(4)]
    state = plain.state_dict()
    for step in (4, 6):
        (later,) = loaders(data, [(0, 1), (step, 3)])
        later.load_state_dict(state)
        rest = [batch["id"].tolist() for batch in later]
        (whole,) = loaders(data, [(0, 1), (step, 3)])
        assert seen + rest == [batch["id"].tolist() for batch in whole]
    (early,) = loaders(data, [(0, 1), (3, 3)])
    with pytest.raises(SnapshotMismatch, match=r"must not lie before the state.* at step 3 does"):
        early.load_state_dict(state)
    with pytest.raises(SnapshotMismatch, match="must continue over the data it began with"):
        loaders(data, [(0, 0), (6, 3)])[0].load_state_dict(state)


def test_a_state_keeps_its_switches_until_their_epoch_is_over(data: Path) -> None:
    first, second = (entry.digest[:16] for entry in versions.log(data)[1:4:2])
    (loader,) = loaders(data, [(0, 1), (5, 3)])
    iterator = iter(loader)
    for number in range(1, 8):
        next(iterator)
        if number in (2, 7):
            for other in (1, 3, [(0, 1), (6, 3)], [(0, 1), (5, 2)], [(0, 2), (5, 3)]):
                wanted = rf"version=\[\(0, '{first}'\), \(5, '{second}'\)\]"
                with pytest.raises(SnapshotMismatch, match=wanted):
                    loaders(data, other)[0].load_state_dict(loader.state_dict())
    assert flat([batch["id"].tolist() for batch in iterator])
    state = loader.state_dict()
    with pytest.raises(SnapshotMismatch):
        loaders(data, 1)[0].load_state_dict(state)
    (plain,) = loaders(data, 3)
    plain.load_state_dict(state)
    assert steps_of([plain]) == epoch(data, 3, 1)
    loaders(data, [(0, 1), (5, 3)])[0].load_state_dict(state)


def test_a_run_switches_several_times_and_to_a_version_with_another_column(data: Path) -> None:
    declared = [(0, 0), (2, 1), (4, 2), (6, 3), (30, 4)]
    (loader,) = loaders(data, declared)
    seen: list[int] = []
    have = [set(range(100)), {*OLD}, {*range(150)} - {1, 2}, {*NEW}]
    for number, batch in enumerate(loader):
        assert {*batch["id"].tolist()} <= have[min(number // 2, 3)]
        assert "half" not in batch
        seen += batch["id"][~loader.last_batch.filler].tolist()
    assert len(seen) == len({*seen})
    assert {*seen} >= {*NEW}
    batches = [(len(batch), "half" in batch) for batch in loader for _ in batch["id"][~loader.last_batch.filler]]
    number = sum(batches[0] == one for one in batches)
    assert (number, len(batches)) == ((30 - 18) * BATCH, len(NEW))
    with pytest.raises(ValueError, match="steps that rise from 0"):
        StreamingDataset(data, version=[(0, 0), (5, 1), (5, 2)])
    for state in (loader.state_dict(), loaders(data, declared[:2])[0].state_dict()):
        loaders(data, declared)[0].load_state_dict(state)


def test_an_added_column_comes_from_the_switch_on_and_no_sample_gets_a_value_that_it_does_not_have(data: Path) -> None:
    declared = [(0, 0), (5, 4)]  # samples 10 to 29 were deleted before the column was added
    for collate in (None, list):
        (loader,) = loaders(data, declared)
        loader = StreamingDataLoader(loader.streaming, BATCH, collate_fn=collate)
        for number, batch in enumerate(loader):
            samples = batch if isinstance(batch, list) else rows_of(batch)
            for sample in samples:
                assert ("half" in sample) == (number >= 5)
                assert sample.get("half", sample["id"] / 2) == sample["id"] / 2
    dataset = loader.streaming
    assert [("half" in sample, sample.get("half", 0)) for sample in dataset[8:12]] == [
        (True, 4.0),
        (True, 4.5),
        (False, 0),
        (False, 0),
    ]
    assert dataset.read_batch([9, 10, 30])["half"] == [4.5, None, 15.0]


@pytest.mark.parametrize("how", [{"shuffle": False}, {"num_canonical_nodes": 2}, {"window": 1}, {"tail": "drop"}])
def test_the_law_holds_for_every_native_order(data: Path, how: dict[str, Any]) -> None:
    steps = epoch(data, [(0, 1), (5, 3)], **how)
    new = {*flat(steps)} & {*NEW}
    assert len(flat(steps)) == len({*flat(steps)})
    assert len(new) >= len(NEW) - (BATCH - 1 if "tail" in how else 0)
    assert {*flat(steps[5:])} <= {*NEW}
    if how == {"shuffle": False}:
        assert flat(steps[5:]) == [one for one in NEW if one not in flat(steps[:5])]


def test_streams_of_a_mix_switch_at_steps_of_their_own(data: Path, tmp_path: Path) -> None:
    write(tmp_path / "b", 1000, 1040)
    write(tmp_path / "b", 1040, 1060, append=True)

    def mix() -> list[Stream]:
        return [Stream(data, version=[(0, 1), (3, 3)]), Stream(tmp_path / "b", version=[(0, 0), (6, 1)])]

    found = loaders(mix(), None, 2)
    steps = steps_of(found)
    assert len(flat(steps)) == len({*flat(steps)})
    assert {*flat(steps)} >= {*NEW, *range(1000, 1060)}
    assert not {*flat(steps[:3])} & {*range(100, 150)}
    assert not {*flat(steps[:6])} & {*range(1040, 1060)}
    assert not {*flat(steps[3:])} & {*range(10, 30)}
    later = loaders(mix(), None, 1)
    assert steps_of(later) == steps
    assert sorted(flat(steps_of(later))) == [*NEW, *range(1000, 1060)]


def test_ledger_lookups_and_the_description_know_the_switch(data: Path) -> None:
    (loader,) = loaders(data, [(0, 1), (5, 3)])
    steps = steps_of([loader])
    run = loader._source.order(loader.settings().order)
    order = run.epoch(0)
    ids = loader._source.reader.original_ids(order.ids(0, order.num_samples))
    assert sorted(ids.tolist()) == sorted(flat(steps))
    sums = [expected(order, begin, end) for begin, end in pairwise([0, 40, order.num_samples])]
    assert sum(sums) % 2**64 == expected(order, 0, order.num_samples)
    (original,) = loader._source.reader.original_ids(np.array([7])).tolist()
    assert [loader.where(7, epochs=[0])[0].step] == [k for k, step in enumerate(steps) if original in step]
    assert "from step 5" in str(loader.describe())


def test_what_cannot_be_switched_is_refused(data: Path, tmp_path: Path) -> None:
    declared = [(0, 1), (5, 3)]
    refused: list[dict[str, Any]] = [
        {"filter": lambda sample: sample["id"] > 3},
        {"filter": {"exclude_ids": [3]}},
        {"forget": [3]},
        {"pack": Packing("id", 8)},
        {"epoch_size": 50},
        {"batching_method": "stratified"},
        {"shuffle_algo": "py1e"},
        {"bucket_by": "id"},
        {"on_bad": "substitute"},
        {"schedule": [(0, {"set": 1})]},
        {"stream_config": {"proportion": 1}},
    ]
    for one in refused:
        with pytest.raises(ValueError, match="switches versions"):
            StreamingDataset(data, version=declared, shuffle=True, **one)
    with pytest.raises(ValueError, match="or a subset"):
        StreamingDataset(data, version=declared).subset([1, 2])
    with pytest.raises(ValueError, match="names each version"):
        Stream(data, version=[(0, 1), (5, None)])  # type: ignore[list-item]
    for wrong in ([(1, 1)], [], [(0, 1), (5,)], (0, 1)):
        with pytest.raises(ValueError, match="steps that rise from 0"):
            Stream(data, version=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"found 2\.5"):
        Stream(data, version=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a batch size"):
        next(iter(StreamingDataset(data, version=declared)))
    versions.compact(data)
    with pytest.raises(ValueError, match=r"as after versions\.compact"):
        len(StreamingDataset(data, version=[(0, 1), (5, 5)]))
    assert flat(epoch(data, declared))  # which the older versions do not depend on
