"""Composed datasets through real loaders: exact after stops, in other worlds, with other numbers of workers."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.documents import (  # noqa: E402
    BATCH,
    LENGTHS,
    MIXED,
    POINTS,
    SIZES,
    WHOLE,
    composed,
    dataset_of,
    is_kept,
    write,
)

from lightning_stream import (  # noqa: E402
    Packing,
    PositionTracker,
    Schedule,
    StreamingDataLoader,
    StreamingDataset,
    World,
    verify_delivery,
)
from lightning_stream.dataset import source_of  # noqa: E402
from lightning_stream.loading.shared_position import Start  # noqa: E402

CHANGE = {"code": 3, "math": 1}
Make = Callable[[Path], StreamingDataset]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("documents"))


def with_bad_samples(folder: Path, **given: Any) -> StreamingDataset:
    dataset = composed(folder, on_bad={"sample": "substitute", "quarantine": folder / "bad.jsonl"}, **given)
    source_of(dataset).bad_data.samples.update(dict.fromkeys((7, 50, 120), "it is damaged"))
    return dataset


TOKENS = Schedule(POINTS, unit="tokens", mean_lengths=dict.fromkeys(SIZES, 35.5), interpolation="linear")
COMPOSITIONS: dict[str, Make] = {
    "pack": dataset_of,
    "filter, pack": partial(dataset_of, filter=is_kept),
    "lengths, ids, pack": partial(
        dataset_of, filter={"lengths": {"tokens": (8, 200)}, "exclude_ids": range(0, 500, 9)}
    ),
    "schedule, pack": partial(dataset_of, **MIXED),
    "schedule in tokens, pack, balance": partial(dataset_of, **{**MIXED, "schedule": TOKENS}, balance="tokens"),
    "forget, pack": partial(dataset_of, forget=range(5, 500, 50)),
    "forget, schedule": partial(dataset_of, **MIXED, forget=range(5, 500, 50), pack=None),
    "subset, pack": lambda folder: dataset_of(folder).subset(range(0, 500, 2)),
    "replication, pack": partial(dataset_of, replication=2, batching_method="stratified"),
    "schedule, filter, pack, balance": composed,
    "bad samples, schedule, filter, pack, balance": with_bad_samples,
}
whole = partial(dataset_of, pack=WHOLE)
COST = "tokens ** 2 + 40 * images"
COMPOSITIONS |= {
    "whole": whole,
    "whole, index order": partial(whole, shuffle=False),
    "whole, balance": partial(whole, balance=COST),
    "whole, a stored length": partial(dataset_of, pack=Packing(None, 80, 40, "drop", lengths="tokens")),
    "whole, filter": partial(whole, filter={"sample": is_kept, "lengths": {"tokens + 9 * images": (4, 80)}}),
    "whole, ids, epoch size": partial(whole, filter={"exclude_ids": range(0, 500, 9)}, epoch_size=333),
    "whole, stratified, replication": partial(whole, replication=2, batching_method="stratified"),
    "whole, forget": partial(whole, forget=range(5, 500, 50)),
    "whole, schedule": partial(whole, **MIXED),
    "whole, schedule in tokens, balance": partial(whole, **{**MIXED, "schedule": TOKENS}, balance=COST),
    "whole, subset": lambda folder: whole(folder).subset(range(0, 500, 2)),
    "whole, schedule, filter, balance by a function": partial(composed, pack=WHOLE),
    "whole, bad samples, schedule, filter, balance": partial(with_bad_samples, pack=WHOLE),
}


def ranks_of(
    make: Make, folder: Path, num_ranks: int, workers: int = 0, accumulate: int = 1, **options: Any
) -> list[StreamingDataLoader]:
    """The loader of every replica."""
    loaders = []
    for replica in range(num_ranks):
        dataset = make(folder)
        each = dataset.replication or 1
        world = World(replica * each, num_ranks * each, num_ranks * each, each)
        given = {"global_batch_size": BATCH, "num_workers": workers, "accumulate": accumulate, **options}
        loaders.append(StreamingDataLoader(dataset, world=world, **given))
    return loaders


def rows_in(loader: StreamingDataLoader, batch: dict[str, Any]) -> list[tuple[int, ...]]:
    """The rows, or samples, of a batch that count."""
    info = loader.last_batch
    assert info is not None
    if "row_splits" in batch:
        return [row for row, filler in zip(rows_of_samples(batch), info.filler.tolist(), strict=True) if not filler]
    packed = "input_ids" in batch
    rows = batch["input_ids"].tolist() if packed else [tokens.tolist() for tokens in batch["tokens"]]
    if packed:
        for tokens, mask, count in zip(rows, batch["mask"].tolist(), batch["num_tokens"].tolist(), strict=True):
            assert mask[:count] == [token % 3 for token in tokens[:count]]
    return [tuple(row) for row, filler in zip(rows, info.filler.tolist(), strict=True) if not filler]


def rows_of_samples(batch: dict[str, Any]) -> list[tuple[int, ...]]:
    """The tokens of each row of whole samples, which have the lengths that they were packed by."""
    samples, edges = batch["splits"]["tokens"].tolist(), batch["row_splits"].tolist()
    tokens = batch["tokens"].tolist()
    assert batch["mask"].tolist() == [token % 3 for token in tokens]
    lengths = batch["cu_seqlens"].diff().tolist()
    for begin, end, length in zip(samples, samples[1:], lengths, strict=False):
        assert length in (end - begin, end - begin + 9 * (tokens[begin] // 1000 % 3))
        assert tokens[begin:end] == list(range(tokens[begin] // 1000 * 1000, tokens[begin] + end - begin))
    return [tuple(tokens[samples[begin] : samples[end]]) for begin, end in pairwise(edges)]


def take(ranks: Sequence[StreamingDataLoader], steps: int, change_at: int | None = None) -> list[list[tuple[int, ...]]]:
    """The sorted rows of so many optimizer steps, over epochs, and perhaps a change of the mixture after some."""
    found: list[list[tuple[int, ...]]] = []
    while len(found) < steps:
        iterators = [iter(loader) for loader in ranks]
        for first in iterators[0]:
            rows = rows_in(ranks[0], first)
            for loader, one in zip(ranks, iterators, strict=True):
                while loader is not ranks[0] or not loader.last_batch.completes_step:
                    rows += rows_in(loader, next(one))
                    if loader.last_batch.completes_step:
                        break
            found.append(sorted(rows))
            if len(found) == change_at:
                assert len({loader.change_mixture(CHANGE) for loader in ranks}) == 1
            if len(found) == steps:
                break
        for one in iterators:
            one.close()
    return found


def tokens_of(steps: Sequence[Sequence[tuple[int, ...]]]) -> list[int]:
    return sorted(token for rows in steps for row in rows for token in row if token)


def expect_exact(make: Make, folder: Path, seed: int, stops: int, workers: Sequence[int], **options: Any) -> None:
    """Stop and resume a run, each time in another world, and compare it with one that never stops."""
    draw, steps = random.Random(seed), 12 * stops
    wanted = take(ranks_of(make, folder, 1, **options), steps)
    ends, state, found = sorted(draw.sample(range(1, steps), stops)), None, []
    for begin, end in zip([0, *ends], [*ends, steps], strict=True):
        num_ranks, accumulate = draw.choice(((1, 2), (1, 4), (2, 1), (2, 3), (3, 1), (3, 2), (4, 3), (6, 1), (6, 2)))
        ranks = ranks_of(make, folder, num_ranks, draw.choice(workers), accumulate, **options)
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(state)
        found += take(ranks, end - begin)
        states = [loader.state_dict() for loader in ranks]
        assert all(one == states[0] for one in states)
        assert len(json.dumps(states[0], separators=(",", ":"))) <= 1024
        state = states[0]
        for loader in ranks:
            loader.close()
    assert found == wanted


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composed_dataset_is_exact_after_stops_in_other_worlds(folder: Path, name: str) -> None:
    expect_exact(COMPOSITIONS[name], folder, seed=1, stops=2, workers=[0])


# Those that workers need most settings for; the others, and more stops, are nightly: a case starts dozens of processes.
WITH_WORKERS = (
    "schedule, filter, pack, balance",
    "whole, stratified, replication",
    "whole, bad samples, schedule, filter, balance",
)


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in WITH_WORKERS),
        *(pytest.param(name, 4, marks=pytest.mark.nightly) for name in COMPOSITIONS),
    ],
)
def test_a_composed_dataset_is_exact_with_workers(folder: Path, name: str, stops: int) -> None:
    expect_exact(COMPOSITIONS[name], folder, seed=2, stops=stops, workers=[0, 1, 2, 4])


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_change_of_packed_rows_keeps_the_window_in_progress(folder: Path, after: int) -> None:
    make = COMPOSITIONS["schedule, pack"]
    plain, wanted = take(ranks_of(make, folder, 1), 20), take(ranks_of(make, folder, 1), 20, after)
    assert wanted[:after] == plain[:after]
    assert wanted[after + 5 :] != plain[after + 5 :]
    ranks = ranks_of(make, folder, 3, workers=1)
    assert take(ranks, after + 2, after) == wanted[: after + 2]
    state = ranks[0].state_dict()
    ranks = ranks_of(make, folder, 2)
    for loader in ranks:
        loader.load_state_dict(state)
    assert take(ranks, 18 - after) == wanted[after + 2 :]


def test_a_change_neither_loses_nor_repeats_a_token_of_packed_rows(folder: Path) -> None:
    loader, epoch = ranks_of(COMPOSITIONS["schedule, pack"], folder, 1, tail="exact")[0], []
    for number, batch in enumerate(loader):
        epoch.append(rows_in(loader, batch))
        if number == 3:
            loader.change_mixture(CHANGE)
    run = loader._run(loader.settings(loader.position.order))
    documents = run.epoch(0).documents
    ids = documents.ids(0, documents.num_samples)
    assert tokens_of(epoch) == sorted(int(i) * 1000 + t for i in ids for t in range(LENGTHS[i]) if i or t)


@pytest.mark.parametrize("name", ["filter, pack", "schedule, filter, pack, balance"])
def test_an_evaluation_has_every_row_once_in_every_world(folder: Path, name: str) -> None:
    def rows_of(num_ranks: int, workers: int) -> list[tuple[int, ...]]:
        ranks = ranks_of(COMPOSITIONS[name], folder, num_ranks, workers, evaluation=True)
        return sorted(row for loader in ranks for batch in loader for row in rows_in(loader, batch))

    wanted = rows_of(1, 0)
    assert len(wanted) > 100
    assert rows_of(2, 1) == rows_of(3, 0) == rows_of(6, 0) == wanted


def test_bad_documents_are_in_no_row(folder: Path) -> None:
    ranks = ranks_of(with_bad_samples, folder, 2)
    reader = source_of(ranks[0].streaming).reader
    bad = reader.original_ids(np.array([7, 50, 120])).tolist()
    tokens = set(tokens_of(take(ranks, 50)))
    assert not tokens & {number * 1000 + at for number in bad for at in range(LENGTHS[number])}
    assert sum(loader.num_substituted for loader in ranks) > 2


@pytest.mark.parametrize("name", ["schedule, pack", "bad samples, schedule, filter, pack, balance"])
def test_the_record_of_a_composed_run_is_verified(folder: Path, tmp_path: Path, name: str) -> None:
    for loader in ranks_of(COMPOSITIONS[name], folder, 2):
        tracker = PositionTracker(loader, record_delivery=tmp_path)
        for _ in range(3):
            for _ in tracker:
                tracker.stepped()
                if tracker.num_steps in (3, 14):
                    loader.change_mixture(CHANGE, after_steps=2)
        run, steps = loader._run(loader.settings(loader.position.order)), tracker.num_steps
        tracker.detach()
    rows = [run.epoch(epoch).num_samples for epoch in range(3)]
    assert rows[1] > rows[0] or rows[2] > rows[1], "the test needs a longer epoch behind a shorter one"
    found = verify_delivery(tmp_path, COMPOSITIONS[name](folder))
    assert found.sentence == f"all {steps} recorded steps saw exactly the planned samples"


def test_a_document_is_where_it_was_delivered_after_changes_of_mixture_batch_and_world(folder: Path) -> None:
    (first,) = ranks_of(composed, folder, 1, global_batch_size=8)
    take([first], 5, change_at=5)
    ranks = ranks_of(composed, folder, 3, accumulate=2)
    found: dict[int, list[tuple[int, ...]]] = {}
    for rank, loader in enumerate(ranks):
        loader.load_state_dict(first.state_dict())
        for number, _ in enumerate(loader):
            info = loader.last_batch
            assert info is not None
            for row in np.flatnonzero(~info.filler).tolist():
                for sample_id in info.rows.take(np.array([row])).ids.tolist():
                    found.setdefault(sample_id, []).append((0, 5 + number // 2, rank, number % 2, row))
        loader.load_state_dict(first.state_dict())
    for sample_id in range(0, first.streaming.size, 7):
        places = [one for one in ranks[1].where(sample_id) if one.step >= 5]
        assert sorted(places) == sorted(set(found.get(sample_id, [])))  # a row is listed once, whatever it has of it


def test_what_workers_get_does_not_hold_the_lengths_of_all_samples(folder: Path) -> None:
    (loader,) = ranks_of(composed, folder, 1)
    (wanted,) = take([loader], 1)
    source, settings = source_of(loader.streaming), loader.settings()
    assert settings == loader.settings(), "persistent workers live on only with equal settings"
    sent = pickle.dumps((source, settings))
    assert len(sent) - len(pickle.dumps(source)) < 1000 < 4 * source.snapshot.num_samples
    again, same = pickle.loads(sent)
    assert not again.orders
    rows = same.micro_batches(again, Start())[0].rows
    assert len(rows) == len(wanted)
    assert again.reader.lengths("tokens")[rows.ids].tolist() == source.reader.lengths("tokens")[rows.ids].tolist()


def test_persistent_workers_stay_with_a_balance(folder: Path) -> None:
    (loader,) = ranks_of(composed, folder, 1, 1, persistent_workers=True)
    kept = []
    for _ in range(2):
        next(batches := iter(loader))
        kept.append(loader._workers._persistent)
        batches.close()
    loader.close()
    assert kept[0] is kept[1] is not None
