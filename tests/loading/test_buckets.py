"""Loaders of batches of similar lengths, and of batches of a budget of tokens."""

from __future__ import annotations

import copy
import pickle
from itertools import chain

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_stream import MDSWriter, Packing, Stream, StreamingDataLoader, StreamingDataset
from lightning_stream.errors import LightningStreamError, SettingsMismatch

COUNT = 500
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(3, 1, COUNT), 200).astype(int) + 1
BUDGET = {"batch_tokens": 4000}
SORTED = {"bucket_by": {"lengths": "tokens", "window": 96}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("buckets")
    for name, half in (("a", range(0, COUNT, 2)), ("b", range(1, COUNT, 2))):
        columns = {"tokens": "ndarray:int32"}
        with MDSWriter(out=str(path / name), columns=columns, size_limit=1 << 12, lengths={"tokens": len}) as writer:
            for number in half:
                writer.write({"tokens": np.full(LENGTHS[number], number, np.int32)})
    return path


def padded(samples):
    longest = max(len(sample["tokens"]) for sample in samples)
    rows = [np.pad(sample["tokens"], (0, longest - len(sample["tokens"])), constant_values=-1) for sample in samples]
    return np.stack(rows)


def loaders_of(folder, ranks=1, *, accumulate=1, workers=0, loader=None, **options):
    size = {} if "batch_tokens" in options else {"global_batch_size": 24}
    found = []
    for rank in range(ranks):
        dataset = StreamingDataset(local=str(folder / "a"), shuffle=True, world=(rank, ranks), **options)
        given = {"accumulate": accumulate, "num_workers": workers, "collate_fn": padded, **size, **(loader or {})}
        found.append(StreamingDataLoader(dataset, **given))
    return found


def steps_of(loaders, *, stop=None):
    """The samples of each global batch, without padding, and the largest array that a rank got in it."""
    steps, last = [], None
    for parts in zip(*loaders, strict=True):
        here = loaders[0].last_batch
        if here.begin != last:
            if stop is not None and len(steps) == stop:
                break
            steps.append(([], []))
            last = here.begin
        for loader, part in zip(loaders, parts, strict=True):
            counted = ~loader.last_batch.filler
            steps[-1][0].extend(part[counted, 0].tolist())
            steps[-1][1].append(part.size)
        if stop is not None and len(steps) == stop and here.completes_step:
            break
    return [sorted(ids) for ids, _ in steps], [sum(sizes) for _, sizes in steps]


@pytest.mark.parametrize(
    "options", [BUDGET, SORTED, {"batch_tokens": {"tokens": 4000, "multiple": 6}, "bucket_by": {"window": 96}}]
)
@pytest.mark.parametrize(("ranks", "workers", "accumulate"), [(2, 0, 1), (3, 2, 1), (2, 1, 3), (4, 0, 2), (6, 0, 1)])
def test_global_batches_are_the_same_in_every_world(folder, options, ranks, workers, accumulate):
    alone, sizes = steps_of(loaders_of(folder, **options))
    assert sorted(chain.from_iterable(alone)) == list(range(0, COUNT, 2))
    if "batch_tokens" in options:
        assert max(sizes) <= 4000
        assert max(map(len, alone)) > 2 * min(map(len, alone))
    found, _ = steps_of(loaders_of(folder, ranks, workers=workers, accumulate=accumulate, **options))
    assert found == alone


@pytest.mark.parametrize(
    "options", [BUDGET, {"batch_tokens": {"tokens": 4000, "multiple": 12}, "bucket_by": {"window": 96}}]
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4, 8])
def test_every_batch_of_a_budget_has_as_many_micro_batches_as_are_accumulated(folder, options, ranks, accumulate):
    (alone,) = loaders_of(folder, **options)
    ends = [batch.end for batch in alone.micro_batches_from(alone.first_position()).walk()]
    for loader in loaders_of(folder, ranks, accumulate=accumulate, **options):
        micro = list(loader.micro_batches_from(loader.first_position()).walk())
        assert [batch.end for batch in micro] == [end for end in ends for _ in range(accumulate)]
        assert [batch.completes_step for batch in micro] == ([False] * (accumulate - 1) + [True]) * len(ends)
        assert all(batch.ids.size > 0 for batch in micro)


@pytest.mark.parametrize("options", [BUDGET, SORTED, {**BUDGET, "bucket_by": {"window": 64}}])
def test_a_run_resumes_on_other_devices_at_the_next_batch(folder, options):
    alone, _ = steps_of(loaders_of(folder, **options))
    rng = np.random.default_rng(1)
    for stop in rng.integers(1, len(alone), 6).tolist():
        ranks, others = rng.integers(1, 5, 2).tolist()
        first = loaders_of(folder, ranks, **options)
        before, _ = steps_of(first, stop=stop)
        states = [loader.state_dict() for loader in first]
        assert all(state == states[0] for state in states)
        second = loaders_of(folder, others, **options)
        for loader in second:
            loader.load_state_dict(states[0])
        after, _ = steps_of(second)
        assert before + after == alone


def test_a_loader_counts_the_batches_of_each_epoch(folder):
    (loader,) = loaders_of(folder, accumulate=2, **BUDGET, bucket_by={"window": 64})
    for epoch in range(3):
        assert len(loader) == loader.num_batches(epoch)
        assert sum(1 for _ in loader) == loader.num_batches(epoch)


def test_the_part_of_an_epoch_that_is_done_counts_samples(folder):
    (loader,) = loaders_of(folder, **BUDGET, bucket_by={"window": 64})
    for _ in zip(loader, range(loader.num_batches(0) // 2), strict=False):
        done = loader.last_batch.end / loader.num_samples
        assert loader.stats().epoch_fraction == done


def test_a_mixture_keeps_its_shares_and_a_budget_has_tails_and_evaluations(folder):
    streams = [{"local": str(folder / "a"), "proportion": 0.75}, {"local": str(folder / "b"), "proportion": 0.25}]
    made = [Stream(**one) for one in streams]
    dataset = StreamingDataset(streams=made, shuffle=True, batching_method="stratified", epoch_size=400, **SORTED)
    loader = StreamingDataLoader(dataset, global_batch_size=24, collate_fn=padded)
    shares = [int((part[:, 0] % 2 == 0).sum()) for part in loader][:16]
    assert set(shares) <= {17, 18, 19}
    for tail, wanted in (("drop", COUNT // 2 // 16 * 16), ("pad", COUNT // 2), ("exact", COUNT // 2)):
        steps, _ = steps_of(loaders_of(folder, 3, loader={"tail": tail}, **BUDGET))
        assert len([*chain.from_iterable(steps)]) == wanted
    steps, _ = steps_of(loaders_of(folder, 3, loader={"evaluation": True}, **BUDGET))
    assert sorted(chain.from_iterable(steps)) == list(range(0, COUNT, 2))


def test_where_and_trace_find_samples_in_batches_of_any_size(folder):
    loaders = loaders_of(folder, 2, **BUDGET)
    seen = {}
    for step, parts in enumerate(zip(*loaders, strict=True)):
        for rank, (loader, part) in enumerate(zip(loaders, parts, strict=True)):
            for row in np.flatnonzero(~loader.last_batch.filler).tolist():
                seen[int(part[row, 0])] = (0, step, rank, 0, row)
    looked = loaders_of(folder, 2, **BUDGET)[0]
    for sample in range(0, COUNT // 2, 7):
        assert [tuple(one) for one in looked.where(sample)] == [seen[2 * sample]]
    assert sorted(2 * looked.trace(3).ids) == sorted(number for number, place in seen.items() if place[1] == 3)


def test_copies_and_pickles_give_the_same_batches(folder):
    (loader,) = loaders_of(folder, **BUDGET)
    alone, _ = steps_of([loader])
    assert steps_of([copy.deepcopy(loaders_of(folder, **BUDGET)[0])])[0] == alone
    dataset = pickle.loads(pickle.dumps(loader.streaming))
    assert steps_of([StreamingDataLoader(dataset, collate_fn=padded)])[0][0] != []


def test_a_resume_with_another_budget_is_refused(folder):
    (loader,) = loaders_of(folder, **BUDGET)
    steps_of([loader], stop=2)
    for options in (
        {"batch_tokens": 5000},
        {"bucket_by": {"window": 64}, **BUDGET},
        {"batch_tokens": {"tokens": 4000, "multiple": 4}},
        SORTED,
    ):
        (other,) = loaders_of(folder, **options)
        with pytest.raises(SettingsMismatch, match="buckets was"):
            other.load_state_dict(loader.state_dict())


def test_padding_in_every_batch_is_warned_of(folder, caplog):
    next(iter(loaders_of(folder, 3, **BUDGET)[0]))
    assert "set the multiple of batch_tokens" in caplog.text
    caplog.clear()
    next(iter(loaders_of(folder, 3, batch_tokens={"tokens": 4000, "multiple": 12})[0]))
    assert "multiple of" not in caplog.text


@pytest.mark.parametrize(
    ("options", "loader", "message"),
    [
        (BUDGET, {"batch_size": 8}, "batch_tokens=4000 decides the batch sizes"),
        (BUDGET, {"global_batch_size": 8}, "batch_tokens=4000 decides the batch sizes"),
        ({"batch_tokens": 100}, {}, "room for 1 samples of the greatest length"),
        ({"batch_tokens": 0}, {}, "batch_tokens"),
        ({"bucket_by": {"window": 64}}, {"batch_size": 8}, "the window of bucket_by needs its lengths"),
        ({"batch_tokens": {"multiple": 6}}, {"batch_size": 8}, "the multiple of batch_tokens needs its tokens"),
        ({"batch_tokens": {"token": 6}}, {}, "batch_tokens has the parts tokens, multiple; found .'token'"),
        ({"bucket_by": "words"}, {"batch_size": 8}, "words"),
        ({**BUDGET, "pack": Packing(row_length=64)}, {}, "Packed rows have one length"),
        ({**SORTED, "batching_method": "per_stream"}, {"batch_size": 8}, "batching_method random or stratified"),
        ({**SORTED, "shuffle_algo": "py1e"}, {"batch_size": 8}, "native order"),
    ],
)
def test_mistakes_get_a_clear_error(folder, options, loader, message):
    with pytest.raises((ValueError, LightningStreamError), match=message):
        next(iter(StreamingDataLoader(StreamingDataset(local=str(folder / "a"), **options), **loader)))


def test_a_plain_dataloader_cannot_read_batches_of_a_budget(folder):
    dataset = StreamingDataset(local=str(folder / "a"), **BUDGET)
    with pytest.raises(ValueError, match="load the dataset by StreamingDataLoader"):
        next(iter(DataLoader(dataset, batch_size=4)))
