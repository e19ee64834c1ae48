"""A dataset with a mixture schedule: the same batches in every world, exact resumes, changes made while training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.data import write_ids  # noqa: E402
from torch.distributed import checkpoint  # noqa: E402

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
from lightning_stream.errors import SettingsMismatch, StateError  # noqa: E402

SIZES = {"web": 90, "code": 50, "math": 30}
POINTS = [(0, {"web": 0.6, "code": 0.3, "math": 0.1}), (240, {"web": 0.2, "code": 0.3, "math": 0.5})]
LINEAR = Schedule(POINTS, interpolation="linear")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, first = tmp_path_factory.mktemp("mix"), 0
    for name, size in SIZES.items():
        write_ids(str(root / name), range(first, first + size), size_limit=200)
        first += size
    return root


def dataset_of(folder: Path, schedule: Any = LINEAR, **settings: Any) -> StreamingDataset:
    streams = [Stream(local=folder / name) for name in SIZES]
    given = {"shuffle": True, "epoch_size": 120, "schedule": schedule, **settings}
    return StreamingDataset(streams=streams, **given)


def loaders(folder: Path, num_ranks: int, batch: int = 24, **options: Any) -> list[StreamingDataLoader]:
    made = {name: options.pop(name) for name in ("schedule", "batching_method") if name in options}
    return [
        StreamingDataLoader(
            dataset_of(folder, **made), global_batch_size=batch, world=World(rank, num_ranks), **options
        )
        for rank in range(num_ranks)
    ]


def take(ranks: Sequence[StreamingDataLoader], steps: int, per_step: int = 1) -> list[list[int]]:
    """The sorted ids of so many global batches, over epochs, from where the loaders are."""
    found: list[list[int]] = []
    while len(found) < steps:
        iterators = [iter(loader) for loader in ranks]
        while len(found) < steps:
            try:
                ids = [next(one)["id"] for _ in range(per_step) for one in iterators]
            except StopIteration:
                break
            found.append(sorted(torch.cat(ids).tolist()))
    return found


def stream_of(ids: Sequence[int]) -> list[int]:
    return np.searchsorted(np.cumsum([*SIZES.values()]), ids, side="right").tolist()


def test_a_schedule_decides_which_streams_a_batch_holds(folder: Path) -> None:
    batches = take(loaders(folder, 1), 15)
    shares = [np.bincount(stream_of(ids), minlength=3).tolist() for ids in batches]
    assert shares[0][0] >= 13
    assert shares[0][2] <= 4
    assert all(np.abs(np.array(one) - [4.8, 7.2, 12]).max() <= 2 for one in shares[10:])
    total = np.cumsum(shares, axis=0)
    assert np.abs(total[9] - [96, 72, 72]).max() <= 1  # the integral over the linear part: 240 samples


@pytest.mark.parametrize("method", ["random", "per_stream"])
def test_global_batches_are_the_same_in_every_world(folder: Path, method: str) -> None:
    wanted = take(loaders(folder, 1, batching_method=method), 12)
    for num_ranks in (2, 3, 4, 6):
        assert take(loaders(folder, num_ranks, batching_method=method), 12) == wanted
    assert take(loaders(folder, 2, accumulate=3), 12, per_step=3) == take(loaders(folder, 1), 12)


def test_device_blocks_follow_the_schedule_in_every_world(folder: Path) -> None:
    def ranks(num_ranks: int) -> list[StreamingDataLoader]:
        dataset = dataset_of(folder, batching_method="device_per_stream")
        accumulate = 6 // num_ranks
        worlds = [World(rank, num_ranks) for rank in range(num_ranks)]
        return [StreamingDataLoader(dataset, 4, accumulate=accumulate, world=world) for world in worlds]

    wanted = take(ranks(1), 10, per_step=6)
    assert take(ranks(2), 10, per_step=3) == take(ranks(6), 10) == wanted


def test_workers_deliver_what_this_process_does(folder: Path) -> None:
    wanted = take(loaders(folder, 1), 7)
    assert take(loaders(folder, 1, num_workers=2, persistent_workers=True), 7) == wanted


def test_a_run_resumes_at_random_positions_in_other_worlds(folder: Path) -> None:
    wanted, draw = take(loaders(folder, 1), 20), random.Random(17)
    for _ in range(8):
        first, second = sorted(draw.sample(range(1, 19), 2))
        ranks = loaders(folder, draw.choice([1, 2, 3, 4, 6]))
        assert take(ranks, first) == wanted[:first]
        states = [one.state_dict() for one in ranks]
        assert all(state == states[0] for state in states)
        ranks = loaders(folder, draw.choice([1, 2, 3, 4, 6]))
        for loader in ranks:
            loader.load_state_dict(states[0])
        assert take(ranks, second - first) == wanted[first:second]


def test_a_run_does_not_resume_with_another_schedule(folder: Path) -> None:
    (loader,) = loaders(folder, 1)
    take([loader], 3)
    state = loader.state_dict()
    assert len(str(state)) < 1024
    (other,) = loaders(folder, 1, schedule=POINTS)
    with pytest.raises(SettingsMismatch, match=r"schedule was .*linear.* and is .*step.* now"):
        other.load_state_dict(state)
    with pytest.raises(StateError):
        StreamingDataLoader(dataset_of(folder, None), 24).load_state_dict(state)
    (steps,) = loaders(folder, 1, schedule=Schedule(POINTS, unit="steps"))
    with pytest.raises(SettingsMismatch, match="unit='steps'"):
        steps.load_state_dict(state)


def test_a_plain_loop_reads_the_same_mixture(folder: Path) -> None:
    wanted, dataset = take(loaders(folder, 1), 10), dataset_of(folder, batch_size=24)
    ids = [sample["id"] for _ in range(2) for sample in dataset]
    assert [sorted(ids[k : k + 24]) for k in range(0, 240, 24)] == wanted


def test_streams_are_named_by_their_folders_or_by_the_user(folder: Path) -> None:
    with pytest.raises(ValueError, match="names 'wiki', but the streams are web, code, math"):
        dataset_of(folder, [(0, {"wiki": 1})])
    same = [Stream(local=folder / "web"), Stream(local=folder / "web")]
    with pytest.raises(ValueError, match=r"different names, but they are 'web', 'web'. Pass Stream\(name=...\)"):
        StreamingDataset(streams=same, schedule=[(0, {"web": 1})])
    named = [Stream(local=folder / "web", name="a"), Stream(local=folder / "web", name="b")]
    dataset = StreamingDataset(streams=named, schedule=[(0, {"a": 1, "b": 2})])
    assert len(dataset) == 180
    with pytest.raises(ValueError, match="proportion, repeat or choose of their own"):
        len(StreamingDataset(streams=[Stream(local=folder / "web", repeat=2)], schedule=[(0, {"web": 1})]))


def test_a_mixture_whose_streams_all_stop_is_read_once(folder: Path) -> None:
    schedule = Schedule(POINTS, exhausted="stop")
    (loader,) = loaders(folder, 1, schedule=schedule)
    ids: list[int] = []
    for _ in range(3):
        num_batches = len(loader)  # of the epoch to come: the second is short, and the third has none
        batches = [batch["id"][~loader.last_batch.filler].tolist() for batch in loader]
        assert len(batches) == num_batches
        ids += [one for batch in batches for one in batch]
    assert sorted(ids) == list(range(170))


# Changes made while training

CHANGE = {"code": 3, "math": 1}


def changed_run(ranks: Sequence[StreamingDataLoader], after: int, steps: int, **change: Any) -> list[list[int]]:
    """Global batches over epochs, with a change of the mixture after some of them, on every rank."""
    found = []
    while len(found) < steps:
        iterators = [iter(loader) for loader in ranks]
        for first in iterators[0]:
            ids = [first["id"], *(next(one)["id"] for one in iterators[1:])]
            found.append(sorted(torch.cat(ids).tolist()))
            if len(found) == after:
                assert len({loader.change_mixture(CHANGE, **change) for loader in ranks}) == 1
            if len(found) == steps:
                break
        for one in iterators:
            one.close()
    return found


@pytest.mark.parametrize("after", [1, 3, 5, 7])
def test_a_change_takes_effect_at_the_next_batch_of_all_ranks(folder: Path, after: int) -> None:
    plain = take(loaders(folder, 1), 12)
    wanted = changed_run(loaders(folder, 1), after, 12)
    assert wanted[:after] == plain[:after]
    for ids in wanted[after:]:
        assert np.abs(np.bincount(stream_of(ids), minlength=3) - [0, 18, 6]).max() <= 1
    for num_ranks in (2, 3, 6):
        assert changed_run(loaders(folder, num_ranks), after, 12) == wanted


@pytest.mark.parametrize("options", [{"num_workers": 2, "prefetch_factor": 3}, {"persistent_workers": True}])
def test_workers_that_read_ahead_begin_again_where_a_change_takes_effect(folder: Path, options: Any) -> None:
    (loader,) = loaders(folder, 1, **{"num_workers": 1, **options})
    assert changed_run([loader], 3, 9) == changed_run(loaders(folder, 1), 3, 9)
    loader.close()


def test_a_global_batch_in_progress_is_completed_before_a_change(folder: Path) -> None:
    (loader,) = loaders(folder, 1, accumulate=3)
    batches = iter(loader)
    ids = [one for _ in range(4) for one in next(batches)["id"].tolist()]
    assert loader.change_mixture(CHANGE) == 48
    ids += [one for _ in range(5) for one in next(batches)["id"].tolist()]
    wanted = changed_run(loaders(folder, 1), 2, 3)
    assert [sorted(ids[k : k + 24]) for k in (0, 24, 48)] == wanted


def test_a_changed_run_resumes_and_repeats_from_its_state(folder: Path) -> None:
    wanted = changed_run(loaders(folder, 1), 4, 14, skip={"code": 5})
    ranks = loaders(folder, 2)
    assert changed_run(ranks, 4, 8, skip={"code": 5}) == wanted[:8]
    state = ranks[0].state_dict()
    assert state == ranks[1].state_dict()
    assert len(str(state)) < 1024
    ranks = loaders(folder, 3)
    for loader in ranks:
        loader.load_state_dict(state)
    assert take(ranks, 6) == wanted[8:]
    again = Schedule.from_state(ranks[0].state_dict()["order"]["schedule"])
    assert take(loaders(folder, 2, schedule=again), 14) == wanted


def test_a_run_replays_its_changes_from_a_state_before_them(folder: Path) -> None:
    wanted, states = [], []
    (loader,) = loaders(folder, 1)
    for _ in range(3):
        for batch in loader:
            wanted.append(sorted(batch["id"].tolist()))
            states.append(loader.state_dict())
            if len(wanted) in (4, 7):
                loader.change_mixture(CHANGE, skip={"web": len(wanted)})
    changed = Schedule.from_state(states[-1]["order"]["schedule"])
    assert len(changed.changes) == 2
    for done in (1, 3, 5, 6, 9):
        ranks = loaders(folder, 2, schedule=changed)
        for one in ranks:
            one.load_state_dict(states[done - 1])
        assert take(ranks, 12 - done) == wanted[done:12]
    (other,) = loaders(folder, 1, schedule=LINEAR.changed(0, CHANGE))
    with pytest.raises(SettingsMismatch, match="schedule was"):
        other.load_state_dict(states[1])
    first = next(step for step in range(5, 15) if not {*wanted[step]} <= set().union(*wanted[:step]))
    sample_id = min({*wanted[first]} - set().union(*wanted[:first]))
    assert dataset_of(folder, changed).plan_replay([sample_id], states).checkpoint == first - 1


def test_a_stream_is_added_and_dropped_and_nothing_is_fetched_of_one_that_has_no_weight(
    folder: Path, tmp_path: Path
) -> None:
    streams = [Stream(remote=folder / name, local=tmp_path / name) for name in SIZES]
    schedule = [(0, {"web": 1, "code": 1})]
    dataset = StreamingDataset(streams=streams, shuffle=True, epoch_size=120, schedule=schedule)
    loader = StreamingDataLoader(dataset, 24, world=World())
    batches = iter(loader)
    assert {*stream_of(next(batches)["id"].tolist())} == {0, 1}
    assert not [*(tmp_path / "math").glob("*.mds")]
    loader.change_mixture({"web": 1, "math": 1})
    assert {*stream_of(next(batches)["id"].tolist())} == {0, 2}
    assert [*(tmp_path / "math").glob("*.mds")]
    batches.close()
    assert [one.weights for one in loader.schedule.changes] == [{"math": 1, "web": 1}]
    loader.schedule.changes[0].weights["web"] = 5  # type: ignore[index]  # a copy: the run keeps its own
    assert [one.weights for one in loader.schedule.changes] == [{"math": 1, "web": 1}]


def test_a_skip_omits_exactly_the_next_samples_of_a_stream(folder: Path) -> None:
    (loader,) = loaders(folder, 1, schedule=[(0, {"web": 2, "code": 1})])
    plain = np.concatenate([loader.trace(step).ids for step in range(4)])
    take([loader], 1)
    state = loader.state_dict()
    loader.change_mixture(skip={"web": 7})
    web = plain[plain < SIZES["web"]]
    begin = int((plain[:24] < SIZES["web"]).sum())
    found = np.concatenate([loader.trace(step).ids for step in (1, 2)])
    assert np.array_equal(found[found < SIZES["web"]], web[begin + 7 :][: np.count_nonzero(found < SIZES["web"])])
    assert np.array_equal(found[found >= SIZES["web"]], plain[24:72][plain[24:72] >= SIZES["web"]])
    assert loader.state_dict()["ledger"] == state["ledger"]  # of what was trained on before


def test_a_change_before_or_between_epochs_holds_from_the_next_batch(folder: Path) -> None:
    (loader,) = loaders(folder, 1)
    assert loader.change_mixture({"math": 1}) == 0
    assert set(stream_of(take([loader], 1)[0])) == {2}
    (loader,) = loaders(folder, 1)
    for _ in loader:
        pass
    assert loader.change_mixture({"math": 1}) == loader.change_mixture({"math": 1, "web": 0}) == 120
    assert set(stream_of(take([loader], 1)[0])) == {2}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, first, rng = tmp_path_factory.mktemp("documents"), 1, np.random.default_rng(0)
    for name, size in SIZES.items():
        columns, lengths = {"tokens": "ndarray:int32"}, {"tokens": len}
        with MDSWriter(out=str(root / name), columns=columns, size_limit=1000, lengths=lengths) as writer:
            for number in range(first, first + size):
                writer.write({"tokens": np.full(rng.integers(1, 20), number, np.int32)})
        first += size
    return root


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = [torch.as_tensor(one["tokens"]) for one in samples]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)}


CHAINS = {
    "rows": ({"pack": Packing(row_length=24, window=30)}, {"global_batch_size": 6}),
    "rows_of_nodes": ({"pack": Packing(row_length=24, window=10), "num_canonical_nodes": 4}, {"global_batch_size": 6}),
    "buckets": ({"bucket_by": {"lengths": "tokens", "window": 24}}, {"global_batch_size": 12, "collate_fn": padded}),
    "budget": ({"batch_tokens": 320, "bucket_by": {"window": 48}}, {"collate_fn": padded}),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("after", [*(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2)), 5])
def test_a_change_leaves_the_batches_before_it_where_windows_are_rearranged(
    documents: Path, chain: str, after: int
) -> None:
    dataset, loading = CHAINS[chain]

    def run(ranks: int, steps: int, schedule: Any = LINEAR, state: Any = None, after: int = 0) -> Any:
        made = [
            StreamingDataLoader(dataset_of(documents, schedule, **dataset), world=World(rank, ranks), **loading)
            for rank in range(ranks)
        ]
        found: list[list[int]] = []
        for loader in made:
            if state is not None:
                loader.load_state_dict(state)
        while len(found) < steps:
            iterators = [iter(loader) for loader in made]
            for parts in zip(*iterators, strict=True):
                kept = [part["input_ids"][~one.last_batch.filler] for part, one in zip(parts, iterators, strict=True)]
                found.append(sorted(token for part in kept for token in part.flatten().tolist() if token))
                if len(found) == after:
                    assert len({loader.change_mixture(CHANGE, skip={"code": 3}) for loader in made}) == 1
                if len(found) == steps:
                    break
            states = [one.state_dict() for one in made]
            for one in iterators:
                one.close()
        assert all(one == states[0] for one in states)
        return found, states[0]

    plain, _ = run(1, 24)
    changed, _ = run(1, 24, after=after)
    assert changed[:after] == plain[:after]
    assert changed[after:] != plain[after:]
    last = [np.asarray(batch) - 1 for batch in changed[-4:]]
    assert 0 not in stream_of(np.concatenate(last).tolist()), "the change drops this stream"
    for ranks in (2, 3):
        half, state = run(ranks, after + 3, after=after)
        assert half == changed[: after + 3]
        assert run(4 - ranks, 24 - after - 3, state=state)[0] == changed[after + 3 :]
    again = Schedule.from_state(state["order"]["schedule"])
    assert run(2, 24, again)[0] == changed


def test_a_change_of_a_dataset_without_a_schedule_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="Only a mixture with a schedule can change"):
        loaders(folder, 1, schedule=None)[0].change_mixture({"web": 1})
    with pytest.raises(ValueError, match="names 'wiki', but the streams are web, code, math"):
        loaders(folder, 1)[0].change_mixture({"wiki": 1})
    with pytest.raises(ValueError, match=r"after_steps counts steps .* from 0; found -1"):
        loaders(folder, 1)[0].change_mixture({"web": 1}, after_steps=-1)


def test_nothing_changes_behind_the_end_of_all_streams(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    schedule = Schedule([(0, {"web": 1, "code": 1})], exhausted="stop")  # math never comes: 140 samples in two epochs
    (loader,) = loaders(folder, 1, schedule=schedule)
    take([loader], 5)
    assert loader.change_mixture({"code": 1}) == 120
    (loader,) = loaders(folder, 1, schedule=schedule)
    assert sum(len(batch["id"]) for _ in range(2) for batch in loader) == 140
    before = loader.state_dict()
    assert loader.change_mixture({"math": 1}) == 140
    assert "its streams have ended, at global sample 140" in caplog.text
    assert loader.state_dict() == before
    with pytest.raises(ValueError, match="names 'wiki'"):
        loader.change_mixture({"wiki": 1})


def test_the_record_of_a_changed_run_is_verified(folder: Path, tmp_path: Path) -> None:
    for rank in range(2):
        loader = loaders(folder, 2)[rank]
        tracker = PositionTracker(loader, record_delivery=tmp_path)
        for _ in range(2):
            for _ in tracker:
                tracker.stepped()
                if tracker.num_steps == 3:
                    loader.change_mixture(CHANGE, skip={"math": 2})
        tracker.detach()
    found = verify_delivery(tmp_path, dataset_of(folder))
    assert (found.num_steps, found.first_difference) == (10, None), found.sentence


def test_settings_that_contradict_each_other_are_refused_before_any_data_is_read(tmp_path: Path) -> None:
    def streams(**weight: Any) -> list[Stream]:
        return [Stream(local=tmp_path / name, **weight) for name in SIZES]  # nothing is there

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"streams": streams(repeat=2), "epoch_size": 100}, "drop epoch_size"),
        ({"streams": streams(choose=2), "epoch_size": 100}, "drop epoch_size"),
        ({"streams": streams(repeat=-1)}, "repeat=-1, which must be a number of at least 0"),
        ({"streams": streams(proportion=0)}, "must be above 0; all are 0"),
        ({"streams": streams(repeat=2), "schedule": LINEAR}, "repeat or choose of their own: omit these"),
        ({"streams": streams(), "shuffle_algo": "py1s", "forget": [1]}, "'py1s': omit forget"),
    ]
    for settings, message in wrong:
        with pytest.raises(ValueError, match=message):
            StreamingDataset(**settings)
    for method in ("per_stream", "device_per_stream"):
        cut = {"schedule": LINEAR, "batching_method": method}
        with pytest.raises(ValueError, match=f"{method} takes 8 samples of a stream at a time"):
            StreamingDataset(streams=streams(), epoch_size=101, batch_size=8, **cut)
        with pytest.raises(ValueError, match=f"{method} takes 8 samples of a stream at a time"):
            StreamingDataLoader(StreamingDataset(streams=streams(), **cut), batch_size=8)
        StreamingDataLoader(StreamingDataset(streams=streams(), epoch_size=104, batch_size=8, **cut))


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_changed_mixture_comes_back_from_a_sharded_checkpoint(folder: Path, tmp_path: Path) -> None:
    """torch loses an empty dict at the end of a list, such as a change that skips nothing."""
    (loader,) = loaders(folder, 1)
    batches = iter(loader)
    next(batches)
    loader.change_mixture({"web": 1, "code": 5})
    next(batches)
    checkpoint.save({"data": loader}, checkpoint_id=tmp_path)
    (resumed,) = loaders(folder, 1)
    checkpoint.load({"data": resumed}, checkpoint_id=tmp_path)
    assert resumed.state_dict() == loader.state_dict()
    assert [batch["id"].tolist() for batch in resumed] == [batch["id"].tolist() for batch in batches]
