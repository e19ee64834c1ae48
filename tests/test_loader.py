"""The loader: the same batches in every world, and a position that any other world can resume from."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from lightning_stream import (  # noqa: E402
    MapDataset,
    MDSWriter,
    Packing,
    PositionTracker,
    RunReport,
    StatefulDataLoader,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    World,
)
from lightning_stream.errors import SettingsMismatch, SnapshotMismatch, StateError  # noqa: E402
from lightning_stream.trainers.audit import verify_delivery  # noqa: E402

NUM_SAMPLES = 167


def write(folder: Path, first: int = 0, count: int = NUM_SAMPLES) -> Path:
    columns = {"id": "int", "x": "ndarray:float32:4", "name": "str"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1000, compression="zstd", hashes=["xxh64"]) as writer:
        for number in range(first, first + count):
            writer.write({"id": number, "x": np.full(4, number, np.float32), "name": f"sample {number}"})
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def dataset(shards: Path, tmp_path: Path) -> StreamingDataset:
    return StreamingDataset(remote=shards, local=tmp_path / "cache", shuffle=True)


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def one_epoch(dataset: StreamingDataset, batch_size: int = 16, **options: Any) -> list[list[int]]:
    return ids_of(StreamingDataLoader(dataset, batch_size, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 2, "prefetch_factor": 5},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
        {"num_workers": 1, "multiprocessing_context": "forkserver"},
    ],
    ids=str,
)
def test_batches_do_not_depend_on_workers(dataset: StreamingDataset, options: dict[str, Any]) -> None:
    alone, many = StreamingDataLoader(dataset, 16), StreamingDataLoader(dataset, 16, **options)
    for _ in range(3):
        assert ids_of(many) == ids_of(alone)


def test_without_workers_a_timeout_is_refused_and_torch_warns_as_usual(dataset: StreamingDataset) -> None:
    with pytest.raises(ValueError, match="found timeout=3 and no workers"):
        next(iter(StreamingDataLoader(dataset, 16, timeout=3)))
    if not torch.accelerator.is_available():
        with warnings.catch_warnings(record=True) as usual:
            warnings.simplefilter("always")
            assert list(DataLoader([1], pin_memory=True)) == [torch.tensor([1])]  # torch 2.6 says nothing
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert one_epoch(dataset, 16, pin_memory=True) == one_epoch(dataset, 16)
        assert {str(warning.message) for warning in caught} == {str(warning.message) for warning in usual}


@pytest.mark.parametrize("worlds", [(2, 1), (4, 2), (8, 4)], ids=str)
def test_global_batches_do_not_depend_on_ranks(dataset: StreamingDataset, worlds: tuple[int, int]) -> None:
    num_ranks, per_node = worlds
    alone = one_epoch(dataset, 16)
    ranks = [
        ids_of(StreamingDataLoader(dataset, global_batch_size=16, world=World(rank, num_ranks, per_node), tail="exact"))
        for rank in range(num_ranks)
    ]
    together = [sorted(number for ids in step for number in ids) for step in zip(*ranks, strict=True)]
    whole = [sorted(ids) for ids in alone]
    if len(whole[-1]) < num_ranks:  # then it takes from the batch before it, so that no rank repeats a sample
        for steps in (whole, together):
            steps[-2:] = [sorted(steps[-2] + steps[-1])]
    assert together == whole


def test_filler_is_flagged_and_counts_for_nothing(dataset: StreamingDataset) -> None:
    delivered: list[int] = []
    steps = set()
    for rank in range(4):
        loader = StreamingDataLoader(dataset, 4, world=World(rank, 4, 4))
        num_steps = 0
        for batch in loader:
            num_steps += 1
            info = loader.last_batch
            assert info is not None
            delivered += batch["id"].numpy()[~info.filler].tolist()
        steps.add((num_steps, len(loader)))
    assert steps == {(11, 11)}
    assert sorted(delivered) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_state_taken_after_any_batch_resumes_at_the_next(dataset: StreamingDataset, stop: int) -> None:
    whole = StreamingDataLoader(dataset, 16)
    expected = ids_of(whole) + ids_of(whole) + ids_of(whole)
    loader = StreamingDataLoader(dataset, 16, num_workers=1)
    batches = iter(loader)
    for _ in range(stop):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) < 1000
    again = StreamingDataLoader(dataset, 16)
    again.load_state_dict(state)
    assert len(again) == 11
    rest = ids_of(again)
    assert rest + ids_of(again) == expected[stop : stop + len(rest) + 11]


def test_a_state_resumes_in_another_world_and_with_another_batch_size(dataset: StreamingDataset) -> None:
    order = [number for ids in one_epoch(dataset, 16) for number in ids]
    loader = StreamingDataLoader(dataset, 16, tail="exact")
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    for size, num_ranks in ((8, 2), (3, 4), (50, 1)):
        ranks = []
        for rank in range(num_ranks):
            again = StreamingDataLoader(dataset, size, world=World(rank, num_ranks, num_ranks), tail="exact")
            again.load_state_dict(state)
            ranks.append(ids_of(again))
        steps = [sorted(number for ids in step for number in ids) for step in zip(*ranks, strict=True)]
        rest = order[32:]
        for step in steps:
            assert step == sorted(rest[: len(step)])
            rest = rest[len(step) :]
        assert not rest


def test_accumulated_micro_batches_move_the_position_only_as_a_whole(dataset: StreamingDataset) -> None:
    loader = StreamingDataLoader(dataset, global_batch_size=16, accumulate=4)
    positions = [loader.state_dict()["position"] for _ in loader]
    assert positions[:9] == [0, 0, 0, 16, 16, 16, 16, 32, 32]
    assert len(positions) == len(loader) == 42


def test_the_last_batch_ends_the_epoch_before_anyone_asks_for_more(dataset: StreamingDataset) -> None:
    loader = StreamingDataLoader(dataset, 16)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)


def test_a_broken_off_epoch_is_followed_by_the_next(dataset: StreamingDataset) -> None:
    reference = StreamingDataLoader(dataset, 16)
    _, second = ids_of(reference), ids_of(reference)
    loader = StreamingDataLoader(dataset, 16, num_workers=2)
    for step, _ in enumerate(loader):
        if step == 1:
            break
    assert ids_of(loader) == second


def test_a_look_at_one_batch_moves_nothing(dataset: StreamingDataset) -> None:
    epochs = [
        one_epoch(dataset, 16),
        *[ids_of(loader) for loader in [StreamingDataLoader(dataset, 16)] for _ in "01"][1:],
    ]
    loader = StreamingDataLoader(dataset, 16)
    next(iter(loader))
    kept = iter(loader)  # a look whose iterator is kept
    next(kept)
    seen = []
    for batch in loader:
        seen.append(batch["id"].tolist())
        if len(seen) == 4:
            state = loader.state_dict()
            next(iter(loader))
            assert loader.state_dict() == state
            assert len(list(loader.look())) == len(loader)
            assert loader.state_dict() == state
    assert seen == epochs[0]
    assert ids_of(loader) == epochs[1]


@pytest.mark.parametrize("stop", [10, 11])
def test_a_look_at_the_last_batch_of_an_epoch_moves_nothing(dataset: StreamingDataset, stop: int) -> None:
    loader = StreamingDataLoader(dataset, 16)
    whole = one_epoch(dataset, 16)
    batches = iter(loader)
    for _ in range(stop):
        next(batches)
    state = loader.state_dict()
    again = StreamingDataLoader(dataset, 16)
    again.load_state_dict(state)
    expected = again.position
    next(iter(again))
    assert again.position == expected
    if stop == 10:
        assert ids_of(again) == whole[10:]


@pytest.mark.parametrize("stop", [3, 10])
def test_loaders_that_are_read_in_step_come_to_the_epochs_end_together(dataset: StreamingDataset, stop: int) -> None:
    pair = [StreamingDataLoader(dataset, 16), StreamingDataLoader(dataset, 16)]
    whole = one_epoch(dataset, 16)
    batches = iter(pair[0])
    for _ in range(stop):
        next(batches)
    state = pair[0].state_dict()
    batches.close()
    for loader in pair:
        loader.load_state_dict(state)
    assert [[one["id"].tolist(), other["id"].tolist()] for one, other in zip(*pair, strict=False)] == [
        [ids, ids] for ids in whole[stop:]
    ]
    assert ids_of(pair[0]) == ids_of(pair[1])  # of the next epoch


def test_a_position_after_a_look_is_where_the_next_iteration_begins_and_a_state_decides(
    dataset: StreamingDataset,
) -> None:
    loader = StreamingDataLoader(dataset, 16)
    next(iter(loader))
    assert loader.position.position == 0
    assert loader.state_of(loader.position) == loader.state_dict()
    batches = iter(loader)
    next(batches)
    assert batches.start is not None
    assert batches.start.position == 0
    assert loader.state_of(loader.position) == loader.state_dict() == batches.state_dict()
    batches.close()
    assert loader.position.position == 16
    counted = StreamingDataLoader(dataset, 16)
    next(iter(counted))
    state = counted.state_dict()
    assert state["position"] == counted.position.position == 16
    assert counted.state_of(counted.position) == state


def test_a_loop_that_takes_each_batch_from_a_new_iteration_is_warned_after_three_looks(
    dataset: StreamingDataset,
) -> None:
    loader = StreamingDataLoader(dataset, 16)
    next(iter(loader)), next(iter(loader))
    assert len(ids_of(loader)) == 11
    next(iter(loader)), next(iter(loader)), next(iter(loader))
    with pytest.warns(UserWarning, match=r"keep one iterator, batches = iter\(loader\)"):
        next(iter(loader))


def test_a_loop_that_cuts_each_epoch_after_its_first_batch_is_warned(dataset: StreamingDataset) -> None:
    """A state was taken in each, so that none of these iterations is a look."""
    loader = StreamingDataLoader(dataset, 16)
    for _ in range(3):
        next(iter(loader))
        loader.state_dict()
    with pytest.warns(UserWarning, match="next epoch where a state was taken.*To train, keep one iterator"):
        next(iter(loader))


def test_the_epoch_that_a_look_begins_in_is_kept_when_it_is_set(dataset: StreamingDataset) -> None:
    whole = one_epoch(dataset, 16)
    first = StreamingDataLoader(dataset, 16)
    batches = iter(first)
    next(batches), next(batches)
    loader = StreamingDataLoader(dataset, 16)
    loader.load_state_dict(first.state_dict())
    for state_is_taken in (False, True):
        next(iter(loader))
        loader.set_epoch(0)
        if state_is_taken:  # the look is no batch that was trained on
            assert loader.state_dict()["position"] == 32
        assert ids_of(copy.deepcopy(loader)) == whole[2:]


def test_a_tracked_loop_continues_where_its_loader_or_dataset_is_set(dataset: StreamingDataset) -> None:
    plain = StreamingDataLoader(copy.deepcopy(dataset), 16)
    whole, second = ids_of(plain), ids_of(plain)
    plain.set_epoch(0)
    batches = iter(plain)
    next(batches), next(batches)
    state = plain.state_dict()

    def trained(tracker: PositionTracker) -> list[list[int]]:
        ids = []
        for batch in tracker:
            tracker.stepped()
            ids.append(batch["id"].tolist())
        return ids

    for load in (lambda loader: loader.load_state_dict(state), lambda loader: loader.streaming.load_state_dict(state)):
        loader = StreamingDataLoader(copy.deepcopy(dataset), 16)
        tracker = PositionTracker(loader)
        assert trained(tracker) == whole
        load(loader)
        assert trained(tracker) == whole[2:]
        loader.set_epoch(1)
        assert trained(tracker) == second
        loader.set_epoch(1)
        assert trained(tracker) == second
        load(loader)
        loader.set_epoch(0)  # the state is of this epoch
        assert trained(tracker) == whole[2:]


def test_a_tracked_loop_that_never_steps_is_an_error_and_one_left_inside_a_step_does_it_again(
    dataset: StreamingDataset, tmp_path: Path
) -> None:
    loader = StreamingDataLoader(dataset, 16, accumulate=2)
    tracker = PositionTracker(loader)
    assert len(list(tracker)) == len(loader)
    for continues in (tracker.state, lambda: next(iter(tracker))):
        with pytest.raises(StateError, match="an optimizer step must use up one global batch, but none came"):
            continues()
    tracker = PositionTracker(loader, record_delivery=tmp_path)
    for num_batches in (5, 6, None):  # after the first micro-batch, after the second one, and to the end
        for number, _ in enumerate(tracker, 1 + loader.batches_before(tracker.position)):
            if number == num_batches:
                break
            if tracker.current is not None and tracker.current.completes_step:
                tracker.stepped()
    verdict = verify_delivery(tmp_path, dataset)
    assert verdict.first_difference is None
    assert verdict.num_steps == -(-len(loader) // 2)


def test_a_second_iterator_moves_nothing_while_the_first_one_goes(dataset: StreamingDataset) -> None:
    loader = StreamingDataLoader(dataset, 16)
    whole = one_epoch(dataset, 16)
    first = iter(loader)
    seen = [next(first)["id"].tolist() for _ in range(3)]
    list(loader)  # a whole pass of another iterator
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 48)
    second = iter(loader)
    next(second), next(second)
    with pytest.raises(StateError, match=r"several iterations .* after 2 and 3 batches|after 3 and 2 batches"):
        loader.state_dict()
    assert first.state_dict()["position"] == 48
    second.close()
    assert loader.state_dict()["position"] == 48
    assert seen + ids_of(first) == whole


def test_an_iterator_that_continues_after_a_state_was_loaded_moves_nothing(dataset: StreamingDataset) -> None:
    loader = StreamingDataLoader(dataset, 16)
    whole = one_epoch(dataset, 16)
    old = iter(loader)
    next(old)
    state = loader.state_dict()
    loader.load_state_dict(state)
    next(old), next(old)
    assert ids_of(loader) == whole[1:]


def test_set_epoch_overrides_but_keeps_a_position_inside_that_epoch(dataset: StreamingDataset) -> None:
    loader = StreamingDataLoader(dataset, 16)
    epochs = [ids_of(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert ids_of(loader) == epochs[1]
    new = StreamingDataLoader(dataset, 16)
    new.set_epoch(2)
    with pytest.raises(TypeError, match="integer"):  # a state would hold half an epoch
        new.set_epoch(1.5)  # type: ignore[arg-type]
    assert ids_of(new) == epochs[2]
    stopped = StreamingDataLoader(dataset, 16)
    batches = iter(stopped)
    for _ in range(5):
        next(batches)
    again = StreamingDataLoader(dataset, 16)
    again.load_state_dict(stopped.state_dict())
    again.set_epoch(0)
    assert ids_of(again) == epochs[0][5:]


def test_an_iteration_in_progress_has_the_position_until_the_epoch_that_was_set_begins(
    dataset: StreamingDataset,
) -> None:
    loader = StreamingDataLoader(dataset, 16)
    epochs = [ids_of(loader) for _ in range(3)]
    for ends in (False, True):
        loader.set_epoch(0)
        batches = iter(loader)
        next(batches), next(batches)
        loader.set_epoch(1)
        loader.set_epoch(2)
        copied = copy.deepcopy(loader)
        assert [next(batches)["id"].tolist(), loader.state_dict()["position"]] == [epochs[0][2], 48]
        if ends:
            batches.close()
            assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (2, 0)
        assert ids_of(loader) == ids_of(copied) == epochs[2]


def test_two_loaders_over_one_dataset_have_two_positions(dataset: StreamingDataset) -> None:
    expected = one_epoch(dataset, 16)
    first, second = StreamingDataLoader(dataset, 16, num_workers=1), StreamingDataLoader(dataset, 16)
    interleaved = [(a["id"].tolist(), b["id"].tolist()) for a, b in zip(first, second, strict=True)]
    assert interleaved == [(ids, ids) for ids in expected]


def test_one_loader_in_two_threads_delivers_whole_epochs(dataset: StreamingDataset) -> None:
    loader = StreamingDataLoader(dataset, 16)
    seen: list[list[int]] = []

    def read() -> None:
        seen.append(sorted(number for ids in ids_of(loader) for number in ids))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [list(range(NUM_SAMPLES))] * 2


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))], ids=["deep", "pickle"]
)
def test_a_copy_of_a_loader_continues_by_itself(dataset: StreamingDataset, copied: Any) -> None:
    loader = StreamingDataLoader(dataset, 16, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    first = [next(batches)["id"].tolist() for _ in range(2)]
    state = loader.state_dict()
    other = copied(loader)
    assert other.state_dict() == state
    rest = ids_of(batches)
    assert first + rest == one_epoch(dataset, 16)
    other.load_state_dict(state)
    assert ids_of(other) == rest


def test_evaluation_reads_the_same_epoch_every_time(dataset: StreamingDataset) -> None:
    loader = StreamingDataLoader(dataset, 16, evaluation=True, num_workers=1)
    assert ids_of(loader) == ids_of(loader)


def test_a_plain_dataloader_gives_the_same_batches_epoch_by_epoch(shards: Path, tmp_path: Path) -> None:
    ours = StreamingDataset(remote=shards, local=tmp_path / "cache", shuffle=True, batch_size=16)
    loader = StreamingDataLoader(ours)
    expected = [ids_of(loader) for _ in range(3)]
    for workers in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        plain = StreamingDataset(remote=shards, local=tmp_path / "cache", shuffle=True, batch_size=16)
        torch_loader = torch.utils.data.DataLoader(plain, batch_size=16, **workers)
        got = []
        for _ in range(3):
            torch.manual_seed(0)  # torch then gives every iteration's workers the same seed
            got.append(ids_of(torch_loader))
        assert got == expected


def test_a_plain_dataloader_resumes_through_the_dataset(shards: Path, tmp_path: Path) -> None:
    def make() -> StreamingDataset:
        return StreamingDataset(remote=shards, local=tmp_path / "cache", shuffle=True, batch_size=16)

    expected = one_epoch(make(), 16)
    stopped = make()
    batches = iter(torch.utils.data.DataLoader(stopped, batch_size=16, num_workers=2))
    for _ in range(4):
        next(batches)
    state = json.loads(json.dumps(stopped.state_dict(64, from_beginning=True)))
    again = make()
    again.load_state_dict(state)
    assert ids_of(torch.utils.data.DataLoader(again, batch_size=16, num_workers=2)) == expected[4:]


def test_the_state_of_a_dataset_that_our_loader_reads_is_the_loaders(dataset: StreamingDataset) -> None:
    # Composer asks the dataset of whatever loader it was given, and mosaicml-streaming's users ask it themselves.
    loader = StreamingDataLoader(dataset, 16)
    batches = iter(loader)
    next(batches), next(batches)
    state = dataset.state_dict(32, True)
    assert state == loader.state_dict()
    again = StreamingDataset(streams=dataset.streams, shuffle=True)
    again.load_state_dict(state)
    assert ids_of(StreamingDataLoader(again, 16)) == ids_of(batches)


def test_a_plain_dataloader_with_workers_needs_the_batch_size(dataset: StreamingDataset) -> None:
    with pytest.raises(ValueError, match="pass batch_size= to StreamingDataset"):
        next(iter(torch.utils.data.DataLoader(dataset, batch_size=16, num_workers=2)))


@pytest.mark.usefixtures("workers_by_fork")  # they have this process's filters, which make an error of a warning
def test_workers_of_a_plain_dataloader_warn_of_another_batch_size(shards: Path) -> None:
    dataset = StreamingDataset(remote=shards, batch_size=8)
    equal = torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2)
    assert sum(len(batch["id"]) for batch in equal) == dataset.size
    for size, says in ((6, "takes 6 at a time"), (None, "takes 1 at a time")):
        with pytest.raises(UserWarning, match=f"the DataLoader {says}"):
            next(iter(torch.utils.data.DataLoader(dataset, batch_size=size, num_workers=2)))


class Noisy:
    """A transform that draws from every global generator."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        import random

        noise = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)
        return {"id": sample["id"], "noise": noise}


def test_a_transforms_random_numbers_depend_on_the_samples_place_alone(shards: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote=shards, local=tmp_path / "cache", shuffle=True, transform=Noisy())
    before = torch.random.get_rng_state()
    alone = [batch["noise"] for batch in StreamingDataLoader(dataset, 16)]
    assert torch.equal(before, torch.random.get_rng_state())
    many = [batch["noise"] for batch in StreamingDataLoader(dataset, 16, num_workers=2)]
    assert all(torch.equal(a, b) for a, b in zip(alone, many, strict=True))
    assert len(torch.cat(alone).unique()) == 3 * NUM_SAMPLES
    stopped, again = StreamingDataLoader(dataset, 16), StreamingDataLoader(dataset, 16)
    for _ in zip(range(3), stopped, strict=False):
        state = stopped.state_dict()
    again.load_state_dict(state)
    resumed = [batch["noise"] for batch in again]
    assert all(torch.equal(a, b) for a, b in zip(alone[3:], resumed, strict=True))


def test_changed_data_or_settings_are_refused_with_what_differs(dataset: StreamingDataset, tmp_path: Path) -> None:
    state = StreamingDataLoader(dataset, 16).state_dict()
    other = StreamingDataset(remote=write(tmp_path / "other", count=100), shuffle=True)
    with pytest.raises(SnapshotMismatch, match=r"167 samples.*100 samples"):
        StreamingDataLoader(other, 16).load_state_dict(state)
    unshuffled = StreamingDataset(remote=dataset.streams[0].remote, local=tmp_path / "cache", shuffle=False)
    loader = StreamingDataLoader(unshuffled, 16)
    with pytest.raises(SettingsMismatch, match="shuffle was True and is False now") as found:
        loader.load_state_dict(state)
    assert str(found.value).count(" was ") == 1  # not what follows from shuffle
    assert loader.state_dict()["position"] == 0
    with pytest.warns(UserWarning, match="shuffle was True"):
        StreamingDataLoader(unshuffled, 16, on_mismatch="warn").load_state_dict(state)
    with pytest.raises(StateError):
        loader.load_state_dict({"epoch": "later"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "pass batch_size="),
        ({"batch_size": 4, "global_batch_size": 8}, "not both"),
        ({"batch_size": 4, "tail": "pad", "drop_last": True}, "not both"),
        ({"batch_size": 4, "tail": "cut"}, "'pad', 'drop' or 'exact'"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": 4, "shuffle": True}, "shuffle=True and shuffle_seed= to the StreamingDataset"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(dataset: StreamingDataset, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StreamingDataLoader(dataset, **options)


def test_a_global_batch_that_does_not_divide_names_what_would(dataset: StreamingDataset) -> None:
    with pytest.raises(ValueError, match=r"16 samples do not divide by 3 replicas.*multiple of 3"):
        len(StreamingDataLoader(dataset, global_batch_size=16, world=World(0, 3, 3)))


@pytest.mark.parametrize("method", ["random", "stratified", "per_stream", "device_per_stream"])
def test_mixtures_are_elastic_and_resumable(tmp_path: Path, method: str) -> None:
    streams = [
        Stream(remote=write(tmp_path / "a", 0, 80), proportion=3),
        Stream(remote=write(tmp_path / "b", 1000, 120), proportion=1),
    ]
    options: dict[str, Any] = {"streams": streams, "shuffle": True, "batching_method": method, "epoch_size": 160}

    def ranks(num_ranks: int, size: int, state: Any = None) -> list[list[int]]:
        each = []
        for rank in range(num_ranks):
            loader = StreamingDataLoader(StreamingDataset(**options), size, world=World(rank, num_ranks, num_ranks))
            if state:
                loader.load_state_dict(state)
            each.append([batch["id"].numpy()[~loader.last_batch.filler].tolist() for batch in loader])  # type: ignore[union-attr]
        return [sorted(number for ids in step for number in ids) for step in zip(*each, strict=True)]

    alone = ranks(1, 16)
    if method != "device_per_stream":
        assert ranks(2, 8) == ranks(4, 4) == alone
    loader = StreamingDataLoader(StreamingDataset(**options), 16)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert ranks(1, 16, loader.state_dict()) == alone[3:]
    counts = sum(number < 1000 for step in alone for number in step)
    assert counts == 120


@pytest.mark.parametrize("asked", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM], ids=str)
def test_workers_outlive_a_signal_to_the_whole_job(shards: Path, asked: signal.Signals) -> None:
    program = (
        "import os, select, signal, sys\n"
        "from lightning_stream import StreamingDataLoader, StreamingDataset\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, lambda *_: os.write(1, b'asked\\n'))  # print may be interrupted by a print\n"
        "loader = StreamingDataLoader(StreamingDataset(remote=sys.argv[1], shuffle=True), 4, num_workers=2)\n"
        "for number, batch in enumerate(loader):\n"
        "    print(*batch['id'].tolist(), flush=True)\n"
        "    if number == 3:\n"
        "        while not select.select([sys.stdin], [], [], 0.1)[0]:  # a signal just before a read waits\n"
        "            pass\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(shards)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    lines = [process.stdout.readline() for _ in range(4)]
    os.killpg(process.pid, asked)
    lines.append(process.stdout.readline())
    process.stdin.write("go on\n")
    rest, _ = process.communicate(timeout=250)
    assert process.returncode == 0
    numbers = [int(word) for line in [*lines, *rest.splitlines()] for word in line.split() if word != "asked"]
    assert "asked" in lines[-1]
    assert sorted(numbers) == list(range(NUM_SAMPLES))


def test_workers_end_at_once_with_a_trainer_that_an_error_ends(shards: Path) -> None:
    program = (
        "import sys\n"
        "from lightning_stream import StreamingDataLoader, StreamingDataset\n"
        "from lightning_stream.loading import worker_signals\n"
        "worker_signals._GRACE_S = 3600\n"
        "dataset = StreamingDataset(remote=sys.argv[1], shuffle=True)\n"
        "loader = StreamingDataLoader(dataset, 4, num_workers=2, persistent_workers=True)\n"
        "for batch in loader:\n"
        "    raise RuntimeError('of the user')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(shards)], capture_output=True, text=True, timeout=250, check=False
    )
    assert run.returncode == 1
    assert "of the user" in run.stderr


class Slow:
    """A collate function that takes half a second by the clock of the test."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self, samples: list[Any]) -> list[Any]:
        self.now_s += 0.5 if samples[0]["id"] else 2.0
        return samples


def test_a_loader_counts_the_seconds_that_its_consumer_waits(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr("lightning_stream.loading.iteration.perf_counter", lambda: slow.now_s)
    loader = StreamingDataLoader(StreamingDataset(remote=shards), 8, collate_fn=slow)
    for _ in loader:
        slow.now_s += 100.0  # training does not count
    stats = loader.stats()
    assert (stats.wait_s, stats.longest_wait_s) == (2.0 + 0.5 * (len(loader) - 1), 2.0)


def test_a_generator_is_refused_since_the_dataset_has_the_seed(shards: Path) -> None:
    dataset = StreamingDataset(remote=shards)
    StreamingDataLoader(dataset, 8, generator=None, pin_memory_device="", in_order=True)
    with pytest.raises(ValueError, match=r"does not take shuffle, .*generator.* shuffle_seed= to the StreamingDataset"):
        StreamingDataLoader(dataset, 8, generator=torch.Generator())  # type: ignore[arg-type]


def test_a_loaded_state_is_announced_once(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning_stream")
    states = {}
    for step, _ in enumerate(first := StreamingDataLoader(StreamingDataset(remote=shards), 8, accumulate=2), 1):
        states[step] = first.state_dict()
    assert [one for one in caplog.messages if "Resumed" in one] == []
    resumed = StreamingDataLoader(StreamingDataset(remote=shards), 16)
    resumed.load_state_dict(states[10])
    list(resumed)
    list(resumed)
    sentence = f"Resumed at epoch 0, step 5 (80 of {NUM_SAMPLES} samples of this epoch)."
    assert [one for one in caplog.messages if "Resumed" in one] == [sentence]


def test_a_state_that_the_dataset_was_given_is_announced_too(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = StreamingDataLoader(StreamingDataset(remote=shards), 8)
    next(iter(first))
    caplog.set_level("INFO", "lightning_stream")
    dataset = StreamingDataset(remote=shards)
    dataset.load_state_dict(first.state_dict())
    next(iter(StreamingDataLoader(dataset, 8)))
    assert f"Resumed at epoch 0, step 1 (8 of {NUM_SAMPLES} samples of this epoch)." in caplog.messages


@pytest.mark.parametrize("batch_size", [None, 8])
def test_a_state_that_the_dataset_was_given_holds_before_the_first_batch(shards: Path, batch_size: int | None) -> None:
    first = StreamingDataLoader(StreamingDataset(remote=shards), 8)
    batches = iter(first)
    next(batches), next(batches)
    state = first.state_dict()

    def resumed() -> tuple[StreamingDataset, StreamingDataLoader]:
        dataset = StreamingDataset(remote=shards, batch_size=batch_size)
        dataset.load_state_dict(state)
        return dataset, StreamingDataLoader(dataset, 8)

    dataset, loader = resumed()
    assert loader.position.position == 16
    assert (dataset.state_dict(), loader.state_dict()) == (state, state)
    assert next(iter(PositionTracker(resumed()[1])))["id"].tolist() == list(range(16, 24))
    assert next(iter(resumed()[1]))["id"].tolist() == list(range(16, 24))


@pytest.mark.parametrize("read", [iter, DataLoader])
def test_a_dataset_that_cannot_continue_from_a_state_by_itself_says_so(
    shards: Path, read: Callable[[StreamingDataset], Iterable[Any]]
) -> None:
    first = StreamingDataLoader(StreamingDataset(remote=shards), 8)
    next(iter(first))
    dataset = StreamingDataset(remote=shards)
    dataset.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="Pass batch_size= to StreamingDataset"):
        next(iter(read(dataset)))


def test_other_ranks_do_not_announce_a_resume(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = StreamingDataLoader(StreamingDataset(remote=shards), 8, world=(1, 2))
    next(iter(first))
    caplog.set_level("INFO", "lightning_stream")
    first.load_state_dict(first.state_dict())
    assert caplog.messages == []


def test_the_shuffle_is_described_in_one_line(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning_stream")
    loader = StreamingDataLoader(StreamingDataset(remote=shards, shuffle=True), 8)
    list(loader)
    list(loader)
    (sentence,) = caplog.messages
    assert re.fullmatch(r"Shuffle quality \d+/100 \(perfect shuffle: 8\)\. Cache needed: 1 MB\.", sentence)


def test_a_loader_is_shown_in_one_line(shards: Path) -> None:
    dataset = StreamingDataset(remote=shards)
    assert repr(StreamingDataLoader(dataset, 8)) == (
        f"StreamingDataLoader({dataset!r}, batch_size=8, num_workers=0, tail='pad')"
    )
    assert "global_batch_size=32, num_workers=2" in repr(
        StreamingDataLoader(dataset, global_batch_size=32, num_workers=2)
    )
    assert repr(dataset) == f"StreamingDataset(Stream({str(shards)!r}))"


@pytest.mark.usefixtures("workers_by_fork")
@pytest.mark.parametrize(("num_workers", "bad", "loads"), [(0, 40, True), (1, 40, False), (0, 8, False), (0, 0, False)])
def test_an_epoch_that_an_error_ends_is_not_over_and_continued_by_the_next_iteration(
    shards: Path, num_workers: int, bad: int, loads: bool
) -> None:
    broken = {bad}

    def fails(sample: dict[str, Any]) -> Any:
        if sample["id"] in broken:
            raise KeyError("no label")
        return sample["id"]

    loader = StreamingDataLoader(StreamingDataset(remote=shards, transform=fails), 8, num_workers=num_workers)
    batches, seen = iter(loader), list[int]()
    with pytest.raises(KeyError, match="no label"):
        seen.extend(number for batch in batches for number in batch.tolist())
    for _ in range(2):
        with pytest.raises(StateError, match=r"(?s)found next\(\) after a KeyError.*load_state_dict"):
            next(batches)
    broken.clear()
    if loads:
        loader.load_state_dict(loader.state_dict())
    seen += [number for batch in loader for number in batch.tolist()]
    assert seen == list(range(len(seen)))
    assert len(seen) == loader.num_samples


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "workers": "threads"}])
@pytest.mark.parametrize("interrupted", [0, 3, NUM_SAMPLES // 8 - 1])
def test_a_batch_that_ctrl_c_kept_from_being_handed_out_is_the_next_one(
    shards: Path, options: dict[str, Any], interrupted: int
) -> None:
    loader = StreamingDataLoader(StreamingDataset(remote=shards), 8, **options)
    count = iter(range(1000))

    def interrupt(*_: object) -> None:
        if next(count) == interrupted:
            raise KeyboardInterrupt

    loader.meter.noted = interrupt
    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        seen.extend(number for batch in loader for number in batch["id"].tolist())
    assert len(seen) == 8 * interrupted
    again = StreamingDataLoader(StreamingDataset(remote=shards), 8)
    again.load_state_dict(loader.state_dict())
    for resumed in (loader, again):
        assert seen + [number for batch in resumed for number in batch["id"].tolist()] == list(range(NUM_SAMPLES))


@pytest.mark.usefixtures("workers_by_fork")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_transform_names_sample_shard_and_stream(shards: Path, num_workers: int) -> None:
    def fails(sample: dict[str, Any]) -> float:
        return 1 / (sample["id"] - 40)

    loader = StreamingDataLoader(StreamingDataset(remote=shards, transform=fails), 8, num_workers=num_workers)
    with pytest.raises(ZeroDivisionError) as caught:
        list(loader)
    text = "".join(traceback.format_exception(caught.value))
    assert re.search(rf"While transforming samples \[40\] of stream '{shards}', shard shard\.\d+\.mds\.", text)


def test_a_transform_that_asks_for_an_absent_column_is_shown_those_that_are_there(shards: Path) -> None:
    dataset = StreamingDataset(remote=shards, transform=lambda sample: sample["absent"])
    with pytest.raises(KeyError, match="absent") as caught:
        next(iter(StreamingDataLoader(dataset, 8)))
    assert caught.value.__notes__[1].startswith("The sample has id")


def test_what_follows_a_loader_asks_for_it_where_it_gets_a_dataset(shards: Path, tmp_path: Path) -> None:
    dataset: Any = StreamingDataset(remote=shards)
    for follower in (PositionTracker, PositionTracker().attach, partial(RunReport, tmp_path)):
        with pytest.raises(TypeError, match=r"follows a loader; found StreamingDataset\. Pass the StreamingDataLoader"):
            follower(dataset)


@pytest.mark.parametrize(("called", "wrong", "right"), [(Packing, "lenghts", "lengths"), (World, "ranks", "rank")])
def test_a_misspelt_argument_of_a_value_names_the_right_one(called: Any, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=rf"{called.__name__}\(\) got .* '{wrong}'\. Did you mean '{right}'"):
        called(**{wrong: 1})


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("drop_last", "false", "True or False"),
        ("evaluation", "no", "True or False"),
        ("num_workers", 1.5, "an integer or 'auto'"),
        ("on_mismatch", "ignore", "'error' or 'warn'"),
        ("timeout", "10", "a number"),
    ],
)
def test_a_value_of_another_type_is_no_argument_of_a_loader(shards: Path, name: str, value: Any, rule: str) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} must be {rule}; found {value!r}"):
        StreamingDataLoader(StreamingDataset(local=shards), 8, **options)


def test_text_is_no_yes_in_a_dataset_or_a_stream(shards: Path) -> None:
    text: Any = "False"
    for called in (
        partial(StreamingDataset, local=shards, shared_cache=text),
        partial(StreamingDataset, local=shards, allow_unsafe_types=text),
        partial(Stream, local=shards, keep_zip=text),
        partial(MapDataset, range(3), shuffle=text),
        partial(StatefulDataLoader, range(3), drop_last=text),
    ):
        with pytest.raises(ValueError, match="must be True or False; found 'False'"):
            called()


def test_numbers_of_numpy_are_arguments(shards: Path) -> None:
    dataset = StreamingDataset(local=shards, shuffle=np.bool_(True), shuffle_seed=np.int64(7), batch_size=np.int32(8))
    loader = StreamingDataLoader(dataset, num_workers=np.int64(0), drop_last=np.bool_(False), timeout=np.float32(0))
    assert len(loader) == 21


class _Word(str, Enum):  # noqa: UP042 - as programs have it that ran on Python 3.10
    PY1E = "py1e"


@pytest.mark.parametrize("yes", [1, np.bool_(True), torch.tensor(True)], ids=repr)
def test_a_run_with_numbers_of_numpy_and_words_of_enums_resumes(shards: Path, yes: Any) -> None:
    """The state of such a run is that of Python's own values: any of them continues it."""

    def loader(yes: Any, number: Callable[[int], Any], word: Callable[[str], Any]) -> StreamingDataLoader:
        words = {"shuffle_algo": word("py1e"), "batching_method": word("random"), "sampling_method": np.str_("fixed")}
        dataset = StreamingDataset(local=shards, shuffle=yes, num_canonical_nodes=number(2), **words)
        return StreamingDataLoader(dataset, number(4), accumulate=number(2))

    unusual = loader(yes, np.int64, lambda text: _Word(text) if text == "py1e" else np.str_(text))
    next(iter(unusual))
    state = unusual.state_dict()
    usual = loader(True, int, str)
    next(iter(usual))
    assert json.dumps(state) == json.dumps(usual.state_dict())
    for other in (loader(yes, np.int64, np.str_), loader(True, int, str)):
        other.load_state_dict(json.loads(json.dumps(state)))
        assert other.state_dict() == state


def test_settings_of_hydra_are_arguments(shards: Path, tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    settings = omegaconf.OmegaConf.create(
        {
            "writer": {"out": [str(tmp_path / "a"), str(tmp_path / "b")], "columns": {"id": "int"}, "hashes": ["sha1"]},
            "data": {
                "streams": [str(shards)],
                "world": [0, 2],
                "window": {"shards": 4},
                "filter": {"exclude_ids": [1]},
            },
            "stream": {"columns": ["id"], "version": [[0, "abcdef"], [5, "fedcba"]]},
        }
    )
    with MDSWriter(**settings.writer) as writer:
        writer.write({"id": 1})
    assert (writer.columns, writer.hashes) == ({"id": "int"}, ["sha1"])
    dataset = StreamingDataset(shuffle=True, batch_size=8, **settings.data)
    assert (dataset.size, len(dataset)) == (NUM_SAMPLES - 1, (NUM_SAMPLES - 1) // 2 + (NUM_SAMPLES - 1) % 2)
    json.dumps(StreamingDataLoader(dataset).state_dict())
    assert Stream(remote=shards, **settings.stream).version == "fedcba"


def test_what_is_none_or_empty_in_a_file_of_settings_is_omitted(shards: Path) -> None:
    for options in ({"shuffle": None}, {"shuffle": 0}, {"validate_hash": ""}, {"split": None}):
        assert StreamingDataset(local=shards, batch_size=8, **options).next_epoch == 0
    assert len(StreamingDataset(local=shards.parent, split=Path(shards.name))) == NUM_SAMPLES
    with pytest.raises(TypeError, match="positional arguments"):
        StreamingDataLoader(StreamingDataset(local=shards), 8, False)  # type: ignore[misc]


def test_a_new_loader_after_another_one_says_that_it_begins_anew(
    shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = StreamingDataset(local=shards, shuffle=True, batch_size=8)
    next(iter(StreamingDataLoader(dataset)))  # a look
    first = StreamingDataLoader(dataset)
    of_first = [batch["id"].tolist() for batch in first]
    resumed = StreamingDataLoader(dataset)
    resumed.load_state_dict(first.state_dict())
    chosen = StreamingDataLoader(dataset)
    chosen.set_epoch(1)
    of_chosen = [batch["id"].tolist() for batch in chosen]
    assert [batch["id"].tolist() for batch in resumed] == of_chosen != of_first
    list(StreamingDataLoader(dataset, evaluation=True))
    assert "a new loader" not in caplog.text
    assert [batch["id"].tolist() for batch in StreamingDataLoader(dataset)] == of_first
    assert "a new loader begins a training run, at epoch 0" in caplog.text
    assert "loader.set_epoch(2)" in caplog.text


def test_an_argument_that_is_set_afterwards_warns(shards: Path) -> None:
    class Own(StreamingDataset):
        def __init__(self, batch_size: int) -> None:
            self.batch_size = batch_size
            super().__init__(local=shards, batch_size=batch_size)
            self.batch_size = np.int64(batch_size)
            self.transform = None
            self.transform = len

    dataset = Own(8)
    with pytest.warns(UserWarning, match="found shuffle_seed set to 1 afterwards"):
        dataset.shuffle_seed = 1


@pytest.mark.parametrize("kind", [str, Stream, set, frozenset, dict])
def test_streams_are_a_list_since_each_rank_has_another_order_of_a_set(shards: Path, kind: Any) -> None:
    paths = [(str(shards), 1), (f"{shards}/b", 2)]
    streams = kind(paths if kind is dict else str(shards) if kind in (str, Stream) else dict(paths))
    with pytest.raises(TypeError, match=f"streams is a list of Streams .*; found a {kind.__name__}. Pass a list"):
        StreamingDataset(streams=streams)


def test_the_error_of_a_wrong_argument_hides_what_signs_requests() -> None:
    urls: Any = ["https://account.blob.core.windows.net/data?sig=SECRET", "s3://key:SECRET@bucket/data"]
    with pytest.raises(ValueError, match="remote must be a string or a path; found") as caught:
        StreamingDataset(remote=urls)
    assert "SECRET" not in str(caught.value)
