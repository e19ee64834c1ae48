"""Any map-style dataset is loaded in our order: every sample once an epoch, and the state continues in any world."""

from __future__ import annotations

import json
import math
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from lightning_stream import (  # noqa: E402
    MapDataset,
    Packing,
    StatefulDataLoader,
    StreamingDataset,
)
from lightning_stream.errors import StateError  # noqa: E402

NUM_SAMPLES, GLOBAL_BATCH = 53, 8


class Squares(Dataset[dict[str, Any]]):
    """Numbers, and what is drawn at random for each."""

    def __init__(self, size: int = NUM_SAMPLES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "square": torch.tensor([index**2]), "drawn": (torch.rand(()), np.random.rand())}


def made(world: tuple[int, int] = (0, 1), **options: Any) -> StatefulDataLoader:
    size = GLOBAL_BATCH // world[1]
    return StatefulDataLoader(Squares(), size, shuffle=True, seed=3, **{"world": world, **options})


def rows(loader: StatefulDataLoader) -> Iterator[list[tuple[int, float, float]]]:
    """The samples of each batch of an epoch, without padding."""
    for batch in loader:
        assert loader.last_batch is not None
        torch_drawn, numpy_drawn = batch["drawn"]
        found = zip(batch["id"].tolist(), torch_drawn.tolist(), numpy_drawn.tolist(), strict=True)
        yield [row for row, filler in zip(found, loader.last_batch.filler, strict=True) if not filler]


def numbers(loader: StatefulDataLoader) -> Iterator[list[int]]:
    """The batches of an epoch of numbers, without padding."""
    for batch in loader:
        assert loader.last_batch is not None
        yield batch[~torch.from_numpy(loader.last_batch.filler)].tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_continues_in_any_world_with_the_same_samples_and_random_numbers(num_workers: int) -> None:
    loader = made(num_workers=num_workers)
    whole = [sorted(batch) for _ in range(2) for batch in rows(loader)]
    assert [len({row[0] for batch in epoch for row in batch}) for epoch in (whole[:7], whole[7:])] == [NUM_SAMPLES] * 2
    assert [row[0] for batch in whole[:7] for row in batch] != [row[0] for batch in whole[7:] for row in batch]
    writers = [made((rank, 2), num_workers=num_workers) for rank in range(2)]
    for at in (3, 7, 9):
        for writer in writers:
            writer.load_state_dict(made().state_dict())
            epochs = (batch for _ in range(2) for batch in rows(writer))
            assert len([*islice(epochs, at)]) == at
        states = [json.dumps(writer.state_dict()) for writer in writers]
        assert states[0] == states[1]
        assert len(states[0]) <= 1024
        parts = []
        for rank in range(4):
            reader = made((rank, 4))
            reader.load_state_dict(json.loads(states[0]))
            parts.append([batch for _ in range(2) for batch in rows(reader)][: len(whole) - at])
        assert [sorted(chain(*shares)) for shares in zip(*parts, strict=True)] == whole[at:]


def test_one_process_has_the_batches_that_torch_has() -> None:
    loader = StatefulDataLoader(Squares(10), 4)
    expected = torch.utils.data.DataLoader(Squares(10), 4)
    assert [batch["square"].tolist() for batch in loader] == [batch["square"].tolist() for batch in expected]
    assert len(loader) == len(expected) == 3
    assert len(StatefulDataLoader(Squares(10), 4, drop_last=True)) == 2
    assert len(loader.dataset) == loader.dataset.size == 10


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_collated_as_torch_does(num_workers: int) -> None:
    samples = [
        {"n": {"t": torch.ones(2) * k, "s": f"{k}"}, "l": [k, k + 1], "p": (k, 0.5), "a": np.full(3, k)}
        for k in range(4)
    ]
    (batch,) = StatefulDataLoader(samples, 4, num_workers=num_workers)
    assert repr(batch) == repr(default_collate(samples))


@pytest.mark.parametrize("size", [4, pytest.param(5, marks=pytest.mark.nightly)])
def test_an_epoch_is_a_random_permutation(size: int) -> None:
    loader = StatefulDataLoader(range(size), size, shuffle=True)
    run = loader.dataset.order(loader.settings().order)
    num_orders = math.factorial(size)
    orders = Counter(tuple(run.epoch(epoch).ids(0, size).tolist()) for epoch in range(20 * num_orders))
    assert len(orders) == num_orders
    assert max(abs(count - 20) for count in orders.values()) < 20


def test_mixtures_have_their_proportions_and_continue() -> None:
    datasets = {"a": [{"id": k} for k in range(30)], "b": [{"id": -k} for k in range(1, 200)]}

    def mixed(rank: int = 0, world: int = 1) -> StatefulDataLoader:
        options: dict[str, Any] = {"proportion": {"a": 0.25, "b": 0.75}, "epoch_size": 80, "seed": 1}
        return StatefulDataLoader(datasets, 8 // world, True, world=(rank, world), **options)

    loader, seen, state = mixed(), [], {}
    for epoch in range(3):
        for step, batch in enumerate(loader):
            seen.append(sorted(batch["id"].tolist()))
            if (epoch, step) == (1, 3):
                state = loader.state_dict()
    ids = [*chain(*seen[:10])]
    assert (sum(k >= 0 for k in ids), len(set(ids))) == (20, 80)
    assert sorted(seen[:10]) != sorted(seen[10:20])
    shares = []
    for rank in range(2):
        reader = mixed(rank, 2)
        reader.load_state_dict(state)
        shares.append([batch["id"].tolist() for batch in [*reader, *reader]])
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == seen[14:]


def test_a_schedule_changes_the_shares() -> None:
    datasets = {"a": range(30), "b": range(100, 130)}
    loader = StatefulDataLoader(
        datasets, 10, shuffle=True, schedule=[(0, {"a": 1.0}), (20, {"a": 0.5, "b": 0.5})], epoch_size=60
    )
    counts = [int((batch >= 100).sum()) for batch in loader]
    assert counts[:2] == [0, 0]
    assert sum(counts) == 20
    state = loader.state_dict()
    assert len(json.dumps(state)) <= 1024


@pytest.mark.parametrize("change", ["replaced", "in place"])
@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_a_sampler_that_is_changed_after_its_loader_was_made_is_refused(change: str, method: str | None) -> None:
    sampler = WeightedRandomSampler(
        torch.arange(10, dtype=torch.double), 30, generator=torch.Generator().manual_seed(2)
    )
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": method}
    loader = StatefulDataLoader(range(10), 10, sampler=sampler, **(workers if method else {}))
    assert [len([*loader]), len([*loader])] == [3, 3]
    if change == "replaced":
        sampler.weights = sampler.weights.flip(0)
    else:
        sampler.weights[:] = sampler.weights.flip(0)
    with pytest.raises(ValueError, match="was changed after its loader was made"):
        next(iter(loader))


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(NUM_SAMPLES)),
        RandomSampler(range(NUM_SAMPLES), generator=torch.Generator().manual_seed(1)),
        WeightedRandomSampler([1.0] * 20 + [3.0] * 33, 41),
        SubsetRandomSampler([*range(10, 40)]),
        [5, 3, 3, 8],
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_sampler_is_taken_in_its_order_and_continues_in_any_world(sampler: Any) -> None:
    def sampled(rank: int = 0, world: int = 1, num_workers: int = 0) -> StatefulDataLoader:
        return StatefulDataLoader(
            range(NUM_SAMPLES), 4 // world, sampler=sampler, world=(rank, world), num_workers=num_workers
        )

    loader = sampled(num_workers=1)
    whole = [batch.tolist() for _ in range(2) for batch in loader]
    assert [len(epoch) for epoch in (whole[: len(loader)], whole[len(loader) :])] == [-(-len(sampler) // 4)] * 2
    loader = sampled()
    next(iter(loader))
    state, shares = json.loads(json.dumps(loader.state_dict())), []
    for rank in range(2):
        reader = sampled(rank, 2)
        reader.load_state_dict(state)
        shares.append([ids for _ in range(2) for ids in numbers(reader)][: len(whole) - 1])
    assert [sorted(chain(*share)) for share in zip(*shares, strict=True)] == [*map(sorted, whole[1:])]
    with pytest.raises(StateError, match="shuffle_algo was 'sampler'"):
        StatefulDataLoader(range(NUM_SAMPLES), 4).load_state_dict(state)


class Batched:
    """Reads several samples at once; some of them draw at random."""

    def __init__(self, *, draws: bool = True) -> None:
        self.draws, self.single, self.batched = draws, 0, 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.single += 1
        if index == 13:
            raise KeyError("thirteen")
        return index, random.random() if self.draws and index % 5 == 0 else 0.0

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        self.batched += 1
        return [self[index] for index in indices]


def test_samples_are_read_at_once_and_seeded_one_by_one_where_any_draws() -> None:
    sampler = [k for k in range(40) if k != 13]
    expected: dict[int, float] = {}
    for size in (1, 4, 39):
        random.seed(1)
        before = random.getstate()
        for batch in StatefulDataLoader(Batched(), size, sampler=sampler):
            for number, drawn in zip(*map(torch.Tensor.tolist, batch), strict=True):
                assert expected.setdefault(number, drawn) == drawn
        assert random.getstate() == before
    assert len({drawn for number, drawn in expected.items() if number % 5 == 0}) == 8
    data = Batched(draws=False)
    assert len([*StatefulDataLoader(data, 4, sampler=sampler)]) == data.batched == 10


@pytest.mark.parametrize(("draws", "named"), [(False, "[8, 9, 10, 11, 12, 13, 14, 15]"), (True, "[13]")])
def test_an_error_names_the_samples(draws: bool, named: str) -> None:
    loader = StatefulDataLoader(Batched(draws=draws), 8)
    with pytest.raises(KeyError, match="thirteen") as caught:
        list(loader)
    assert f"While reading samples {named}" in caught.value.__notes__[0]


def test_a_dataset_that_grew_or_shrank_is_no_longer_what_was_planned() -> None:
    data = [*range(16)]
    for one, options in ((data, {}), ({"one": data, "other": range(4)}, {"proportion": {"one": 0.5, "other": 0.5}})):
        loader = StatefulDataLoader(one, 4, **options)
        assert len([*loader])
        data.append(16)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"found \[16.*\] samples then and \[17.*\] now. Make a new loader"):
                list(loader)
        data.pop()
        assert len([*loader])


def test_a_part_of_a_dataset_is_refused_with_how_to_make_one() -> None:
    with pytest.raises(TypeError, match="Subset"):
        MapDataset(range(8)).subset([1, 2])


class Ends(Batched):
    """The user's code ends an iterator of its own, or returns too few samples."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return super().__getitem__(index) if index != 13 else next(iter(()))


class Short(Batched):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [self[index] for index in indices if index != 13]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("transform", [None, lambda sample: sample])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Ends(draws=False), "StopIteration"),
        (Ends(draws=True), "StopIteration"),
        (Short(draws=False), "found 7 samples for 8 numbers"),
    ],
    ids=["ends", "draws and ends", "short"],
)
def test_no_sample_is_lost_silently_by_the_datasets_own_code(
    data: Batched, says: str, transform: Any, num_workers: int
) -> None:
    options = {"transform": transform, "num_workers": num_workers, "multiprocessing_context": "fork"}
    loader = StatefulDataLoader(data, 8, **options if num_workers else {"transform": transform})
    with pytest.raises((RuntimeError, ValueError), match=says):
        list(loader)


class Columns(Batched):
    def __getitems__(self, indices: list[int]) -> Any:
        return {f"column {k}": indices for k in range(8)}


def test_columns_are_never_taken_for_samples_also_where_there_are_as_many() -> None:
    with pytest.raises(ValueError, match="found 8 samples for 8 numbers, as dict"):
        next(iter(StatefulDataLoader(Columns(draws=False), 8)))


class Returns(Batched):
    """Its `__getitems__` returns numbers in a form of their own."""

    def __init__(self, form: Any) -> None:
        super().__init__(draws=False)
        self.form = form

    def __getitems__(self, indices: list[int]) -> Any:
        return self.form(indices)


@pytest.mark.parametrize("collate_fn", [None, lambda batch: batch])
@pytest.mark.parametrize("form", ["DataFrame", "Table", "set"])
def test_tables_and_sets_are_never_taken_for_samples(form: str, collate_fn: Any) -> None:
    forms: dict[str, Any] = {
        "DataFrame": lambda ids: pytest.importorskip("pandas").DataFrame(dict.fromkeys(range(8), ids)),
        "Table": lambda ids: pytest.importorskip("pyarrow").table(dict.fromkeys("abcdefgh", ids)),
        "set": set,
    }
    with pytest.raises(ValueError, match=f"for 8 numbers, as {form}. Return a list"):
        next(iter(StatefulDataLoader(Returns(forms[form]), 8, collate_fn=collate_fn)))


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_a_collate_fn_gets_what_getitems_returned_as_in_torch(form: Any) -> None:
    data = Returns(form)
    for collate_fn in (type, None):
        ours = StatefulDataLoader(data, 8, collate_fn=collate_fn)
        theirs = torch.utils.data.DataLoader(data, 8, collate_fn=collate_fn)
        if collate_fn is None and form is torch.tensor:  # which torch's own collate refuses
            assert torch.equal(next(iter(ours)), torch.arange(8))
        else:
            assert str(next(iter(ours))) == str(next(iter(theirs)))


def test_rows_are_packed_of_documents_and_of_whole_samples(caplog: pytest.LogCaptureFixture) -> None:
    documents = [{"tokens": np.arange(1 + k % 7), "id": k} for k in range(60)]

    def lengths(data: list[Any]) -> list[int]:
        return [len(document["tokens"]) for document in data]

    packing = Packing(row_length=16, cu_seqlens=True)
    loader = StatefulDataLoader(documents, 2, shuffle=True, lengths=lengths, pack=packing, num_workers=1)
    batches = [*loader]
    assert sum(int(batch["num_tokens"].sum()) for batch in batches) == sum(lengths(documents))
    assert {"input_ids", "cu_seqlens", "document_ids"} <= set(batches[0])
    assert len(json.dumps(loader.state_dict())) <= 1024
    names = {"tokens": lengths, "ids": lambda data: [document["id"] % 3 for document in data]}
    whole = StatefulDataLoader(
        documents, 2, shuffle=True, lengths=names, pack=Packing(lengths="tokens + ids", row_length=16)
    )
    assert sorted(chain.from_iterable(batch["id"].tolist() for batch in whole)) == [*range(60)]
    short = Packing(column=None, lengths="tokens", row_length=6, long_documents="drop")
    with caplog.at_level("WARNING"):
        list(StatefulDataLoader(documents, 2, lengths=lengths, pack=short))
    assert "8 of 60 samples are longer than a row" in caplog.text


class _Hidden(RandomSampler):
    """Draws from a generator that nothing can seed."""

    def __init__(self) -> None:
        super().__init__(range(9))
        self.random = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(9), 9))


class _CountsEpochs:
    """Counts its epochs itself, so that its list depends on how often it was asked."""

    epochs = 0

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter(np.random.default_rng(self.epochs).permutation(9).tolist())


class _Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (_Endless(), {}, "an iterable dataset"),
        ("shards", {}, "A path or URL is read by StreamingDataset"),
        (object(), {}, "has __len__ and __getitem__"),
        (range(3), {"batch_sampler": [[0]]}, "does not take batch_sampler"),
        (range(3), {"in_order": False}, "does not take in_order"),
        (range(3), {"proportion": {"a": 1}}, "mix several datasets"),
        ({"train": range(3), "test": range(3)}, {}, "mixed by proportion= or by schedule="),
        (range(3), {"batch_tokens": 10}, "found none"),
        (range(3), {"batch_tokens": 10, "lengths": [1, 2]}, "one for each of the 3 samples"),
        (range(9), {"sampler": _Hidden()}, "lists others"),
        (range(9), {"sampler": iter([1])}, "has __iter__ and __len__"),
        (range(9), {"sampler": [9]}, "indices of the dataset's 9 samples"),
        (range(9), {"sampler": _CountsEpochs()}, "lists others"),
        (range(9), {"sampler": [(0, 1), (1, 2)]}, "whole numbers; found others"),
        (range(9), {"sampler": [0.5]}, "whole numbers; found others"),
        (range(9), {"lengths": [1] * 9, "pack": Packing(row_length=4)}, "mappings with 'tokens'; found int"),
        (range(9), {"sampler": DistributedSampler(range(9), 2, 0)}, "those of one rank"),
        (range(9), {"sampler": [1], "shuffle": True}, "omit shuffle"),
        (range(9), {"sampler": [1], "epoch_size": 5, "forget": [2]}, "omit epoch_size, forget"),
        (range(9), {"sampler": [1], "batching_method": "per_stream"}, "omit batching_method"),
        (range(9), {"pack": {"row_length": 4}}, "pack is a Packing"),
        (range(3), {"shufle": True}, "Did you mean 'shuffle'"),
        (Squares, {}, "found type. Of a class, pass an object"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_to_do(dataset: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        list(StatefulDataLoader(dataset, **options))


def test_a_state_of_other_data_or_settings_is_refused() -> None:
    state = made().state_dict()
    with pytest.raises(StateError, match=r"over 53 samples.*has 54"):
        StatefulDataLoader(Squares(54), 8, True, seed=3).load_state_dict(state)
    with pytest.raises(StateError, match="seed"):
        StatefulDataLoader(Squares(), 8, True, seed=4).load_state_dict(state)
    generator = torch.Generator().manual_seed(3)
    StatefulDataLoader(Squares(), 8, True, generator=generator).load_state_dict(state)


def test_a_function_of_lengths_that_fails_says_what_it_is_called_with() -> None:
    with pytest.raises(TypeError) as caught:
        list(StatefulDataLoader([{"t": [1]}], lengths=lambda sample: len(sample["t"]), batch_tokens=4))
    assert "called with the dataset" in caught.value.__notes__[0]


def test_budgets_of_tokens_hold_with_lengths_that_are_found_once() -> None:
    calls: list[int] = []

    def lengths(dataset: Squares) -> list[int]:
        calls.append(len(dataset))
        return [1 + k % 7 for k in range(len(dataset))]

    loader = StatefulDataLoader(Squares(), shuffle=True, lengths=lengths, batch_tokens=40, num_workers=1)
    batches = [batch["id"].tolist() for batch in loader]
    assert sorted(chain(*batches)) == [*range(NUM_SAMPLES)]
    assert all(len(batch) * max(1 + k % 7 for k in batch) <= 40 for batch in batches)
    copied = pickle.loads(pickle.dumps(loader.dataset))  # though the function cannot be pickled
    assert copied.lengths("tokens").tolist() == lengths(Squares())
    assert calls == [NUM_SAMPLES] * 2


class Scaled(Dataset[int]):
    """Samples that depend on what the training sets."""

    scale = 1
    _offset = 0
    epoch = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * self.scale + self._offset + 1000 * self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def transform(self) -> str:
        return "theirs"


def _open_in_worker(_: int) -> None:
    worker = torch.utils.data.get_worker_info()
    assert worker is not None
    worker.dataset._offset = 100


def _open_of_subset(_: int) -> None:
    worker = torch.utils.data.get_worker_info()
    assert worker is not None
    worker.dataset.dataset._offset = 100


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, StatefulDataLoader])
def test_what_a_worker_sets_is_set_on_the_users_own_dataset_as_in_torch(kind: Any) -> None:
    options = {"batch_size": 8, "num_workers": 1, "multiprocessing_context": "fork"}
    (batch,) = kind(Scaled(), worker_init_fn=_open_in_worker, **options)
    assert batch.tolist() == [*range(100, 108)]
    part = torch.utils.data.Subset(Scaled(), [3, 1])
    (batch,) = kind(part, worker_init_fn=_open_of_subset, **options)
    assert batch.tolist() == [103, 101]


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, StatefulDataLoader])
def test_what_is_set_on_a_loaders_dataset_is_what_its_samples_are_made_with(kind: Any) -> None:
    loader = pickle.loads(pickle.dumps(kind(Scaled(), 8)))
    loader.dataset.scale = 2
    loader.dataset._offset = 1
    loader.dataset.set_epoch(3)
    assert (loader.dataset._offset, loader.dataset.transform()) == (1, "theirs")
    (batch,) = loader
    assert batch.tolist() == [3001 + 2 * index for index in range(8)]
    with pytest.raises(AttributeError):
        kind([1, 2]).dataset.scale = 2


def test_a_subclass_of_a_map_dataset_has_attributes_of_its_own() -> None:
    class Counted(MapDataset):
        def __init__(self) -> None:
            super().__init__(Batched(draws=False))
            self.count = 3

        def get_item(self, sample_id: int, retry: int = 7) -> Any:
            return sample_id + self.count

    (batch,) = islice(StatefulDataLoader(Counted(), 2), 1)
    assert batch.tolist() == [3, 4]


class Drawing:
    """Documents whose tokens are drawn at random; the first of each is its number."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = np.random.randint(1000, 10**6, index % 9)
        return {"tokens": np.array([index, *drawn]), "mask": np.full(1 + index % 9, random.randrange(2))}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_packed_documents_draw_is_the_same_in_any_world(num_workers: int) -> None:
    options: dict[str, Any] = {"lengths": [1 + k % 9 for k in range(60)], "shuffle": True, "seed": 5}
    options["pack"] = Packing(row_length=6, columns=("mask",))  # most documents are cut

    def packed(rank: int, world: int, workers: int) -> list[list[tuple[list[int], list[int]]]]:
        random.seed(rank + workers)
        np.random.seed(rank + workers)
        before = random.getstate()
        loader = StatefulDataLoader(Drawing(), 4 // world, world=(rank, world), num_workers=workers, **options)
        read = []
        for batch in chain(loader, loader):
            assert loader.last_batch is not None
            of_rows = zip(batch["input_ids"].tolist(), batch["mask"].tolist(), loader.last_batch.filler, strict=True)
            read.append([(tokens, mask) for tokens, mask, is_filler in of_rows if not is_filler])
        assert random.getstate() == before
        return read

    whole = packed(0, 1, 0)
    shares = [packed(rank, 2, num_workers) for rank in range(2)]
    assert [a + b for a, b in zip(*shares, strict=True)] == whole
    drawn = [tokens for rows_of_batch in whole for tokens, _ in rows_of_batch]
    assert len({token for tokens in drawn for token in tokens if token >= 1000}) > 450  # those of two epochs differ


def test_datasets_by_name_are_no_arguments_of_one() -> None:
    pytest.importorskip("lightning")
    from lightning_stream import StreamingDataModule

    for several in ({"a": range(3), "b": [1, 2]}, {"web": StreamingDataset("nowhere")}):
        with pytest.raises(TypeError, match=f"train= takes one dataset.*names {', '.join(several)}. Mix"):
            StreamingDataModule(several, batch_size=2)


def test_a_loader_has_its_length_also_where_a_loop_keeps_a_number_of_batches_on_it() -> None:
    loader = StatefulDataLoader([1, 2, 3, 4, 5], batch_size=2)
    loader.num_batches = len(loader)  # type: ignore[assignment,method-assign]
    assert len(loader) == len(list(loader)) == 3
