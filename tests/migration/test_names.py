"""Names, arguments, indices and overrides mean here what users of mosaicml-streaming know them to mean."""

from __future__ import annotations

import copy
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.data import write_ids  # noqa: E402

from lightning_stream import LocalDataset, PositionTracker, Stream, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.stores import LocalStore  # noqa: E402

NUM_SAMPLES = 50


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name, first, last in (("a", 0, 20), ("b", 20, NUM_SAMPLES)):
        write_ids(str(root / name), range(first, last), size_limit=200, compression="zstd")
    return root


@pytest.fixture
def mixed(data: Path, tmp_path: Path) -> StreamingDataset:
    streams = [Stream(remote=str(data / name), local=str(tmp_path / name)) for name in "ab"]
    return StreamingDataset(streams=streams, epoch_size=30, batch_size=5, cache_limit="1gb", predownload=16)


def ids_of(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


# What a dataset has


def test_num_samples_counts_all_shards_and_epoch_size_what_an_epoch_draws(mixed: StreamingDataset) -> None:
    assert (mixed.num_samples, mixed.size, mixed.epoch_size, len(mixed), mixed.length) == (50, 50, 30, 30, 30)


def test_shards_and_streams_are_described_by_arrays(mixed: StreamingDataset) -> None:
    counts = np.array([len(shard) for shard in mixed.shards])
    assert mixed.num_shards == len(mixed.shards) == counts.size > 4
    assert (mixed.num_streams, counts.sum(), mixed.samples_per_stream.tolist()) == (2, 50, [20, 30])
    assert np.array_equal(mixed.samples_per_shard, counts)
    assert np.array_equal(mixed.sample_offset_per_shard, counts.cumsum() - counts)
    assert mixed.sample_offset_per_stream.tolist() == [0, 20]
    assert np.bincount(mixed.stream_per_shard).tolist() == mixed.shards_per_stream.tolist()
    assert mixed.shard_offset_per_stream.tolist() == [0, mixed.shards_per_stream[0]]
    assert [mixed.shards[shard][within]["id"] for shard, within in mixed.spanner] == list(range(50))
    with pytest.raises(IndexError):
        mixed.spanner[-1]


def test_a_shard_says_what_its_index_says_and_reads_its_samples(mixed: StreamingDataset, data: Path) -> None:
    shard = mixed.shards[-1]
    assert (shard.column_names, shard.column_encodings, shard.column_sizes) == (["id"], ["int"], [8])
    assert shard.raw_data.basename == shard.basename.removesuffix(".zstd")
    assert shard.get_zip_size() == (data / "b" / shard.zip_data.basename).stat().st_size
    assert shard.get_max_size() == shard.get_raw_size() + shard.get_zip_size()
    assert shard[-1] == {"id": 49}
    assert [each.basename for each in mixed.shards[:2]] == ["shard.00000.mds", "shard.00001.mds"]


def test_settings_are_attributes_under_the_names_of_their_arguments(mixed: StreamingDataset) -> None:
    found = {
        name: getattr(mixed, name) for name in inspect.signature(StreamingDataset).parameters if hasattr(mixed, name)
    }
    assert {
        "cache_limit": 1 << 30,
        "predownload": 16,
        "batch_size": 5,
        "shuffle_algo": "window",
    }.items() <= found.items()
    assert {"partition_algo", "batching_method", "sampling_method", "sampling_granularity", "shuffle_block_size",
            "num_canonical_nodes", "allow_unsafe_types", "replication", "shuffle", "shuffle_seed", "epoch_size",
            "streams"} <= set(found)  # fmt: skip
    assert mixed.world.num_ranks == 1
    assert mixed.initial_physical_nodes is None


def test_a_shard_can_be_fetched_and_evicted(mixed: StreamingDataset, tmp_path: Path) -> None:
    assert mixed.cache_usage == 0
    mixed.prepare_shard(0)
    mixed.prepare_shard(mixed.num_shards - 1)
    assert mixed.cache_usage == mixed.shards[0].get_raw_size() + mixed.shards[-1].get_raw_size()
    assert mixed[0] == {"id": 0}
    assert mixed.evict_shard(0)
    assert not list((tmp_path / "a").glob("*.mds"))
    assert not mixed.evict_shard(0)
    with pytest.raises(IndexError):
        mixed.prepare_shard(mixed.num_shards)


def test_to_evict_a_shard_ends_no_fetch_of_another_thread(
    mixed: StreamingDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, get = threading.Event(), LocalStore.get

    def slow(store: LocalStore, *given: Any) -> int:
        assert go.wait(30)
        return get(store, *given)

    assert mixed[0] == {"id": 0}
    monkeypatch.setattr(LocalStore, "get", slow)
    pool = mixed.reader.shards.pool
    with mixed.reader.read_ahead(np.arange(10, 20)), ThreadPoolExecutor(1) as threads:  # all fetchers are at work
        read = threads.submit(mixed.read_batch, [40, 41])
        while mixed.spanner[41][0] not in pool.fetches:
            time.sleep(0.001)
        assert mixed.evict_shard(0)
        assert not mixed.evict_shard(mixed.spanner[41][0])
        go.set()
        assert read.result(30)["id"].tolist() == [40, 41]
    assert mixed.evict_shard(mixed.spanner[41][0])
    assert [mixed[k]["id"] for k in (0, 41, 49)] == [0, 41, 49]


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, StreamingDataLoader])
def test_next_epoch_is_the_epoch_that_the_next_iteration_begins(data: Path, kind: Any) -> None:
    dataset = StreamingDataset(str(data / "b"), shuffle=True, batch_size=5)
    loader = kind(dataset, batch_size=5)
    epochs = []
    for epoch in range(3):
        assert dataset.next_epoch == epoch
        epochs.append(ids_of(loader))
    dataset.next_epoch = 1
    assert ids_of(loader) == epochs[1]


class AskingEpochs(StreamingDataset):
    """Reads the epoch, as augmentations do that differ by epoch."""

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        return {**super().get_item(sample_id, retry), "next_epoch": self.next_epoch}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.utils.data.DataLoader, {}),
        (StreamingDataLoader, {}),
        (StreamingDataLoader, {"num_workers": 1, "persistent_workers": True}),
    ],
)
def test_a_sample_sees_the_epoch_after_its_own_as_the_next_one_in_any_process_and_after_a_resume(
    data: Path, kind: Any, settings: dict[str, Any]
) -> None:
    def loader() -> Any:
        return kind(AskingEpochs(str(data / "b"), shuffle=True, batch_size=5), batch_size=5, **settings)

    def seen(batches: Any) -> set[int]:
        return {number for batch in batches for number in batch["next_epoch"].tolist()}

    saving = loader()
    assert [seen(saving) for _ in range(3)] == [{1}, {2}, {3}]
    resumed = loader()
    resumed.dataset.load_state_dict(saving.dataset.state_dict(num_samples=0, from_beginning=True))
    assert seen(resumed) == {4}
    assert (saving.dataset.next_epoch, resumed.dataset.next_epoch) == (3, 4)


def test_a_local_dataset_has_the_same_attributes(data: Path) -> None:
    dataset = LocalDataset(str(data), split="a")
    assert (dataset.local, dataset.split, dataset.num_samples, dataset.size, len(dataset)) == (
        str(data),
        "a",
        20,
        20,
        20,
    )
    assert sum(shard.samples for shard in dataset.shards) == 20
    assert dataset.get_item(3) == dataset[3] == {"id": 3}
    for wrong in (-1, len(dataset)):
        with pytest.raises(IndexError, match=rf"the dataset has 20 samples: index {wrong} is not in \[0, 20\)"):
            dataset.get_item(wrong)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_after_no_sample_is_the_beginning_of_the_epoch_that_is_iterated_or_of_the_next_between_epochs(
    data: Path, workers: int
) -> None:
    """As of a loop that saves ``if step % every == 0``, its first step included, from an iteration's first batch on."""

    def loader() -> Any:
        dataset = StreamingDataset(str(data / "b"), shuffle=True, shuffle_algo="py1e", batch_size=5)
        return torch.utils.data.DataLoader(dataset, batch_size=5, num_workers=workers)

    saving = loader()
    for _ in range(2):
        batches = iter(saving)
        began = [next(batches)]
        state = saving.dataset.state_dict(num_samples=0, from_beginning=True)
        epoch = ids_of([*began, *batches])
        resumed = loader()
        resumed.dataset.load_state_dict(state)
        assert ids_of(resumed) == epoch
        resumed = loader()
        resumed.dataset.load_state_dict(saving.dataset.state_dict(num_samples=0, from_beginning=True))
        assert resumed.dataset.next_epoch == saving.dataset.next_epoch  # between epochs, the next one's


@pytest.mark.parametrize("algorithm", ["py1e", "py1s", "py1br", "py2s", "naive"])
@pytest.mark.parametrize("workers", [0, 2])
def test_where_an_order_repeats_samples_inside_an_epoch_a_state_continues_after_the_batches_that_it_counts(
    data: Path, workers: int, algorithm: str
) -> None:
    """The 16 canonical nodes of 30 samples deliver 32: trainers count these."""

    def loader() -> Any:
        settings = {"shuffle": True, "shuffle_algo": algorithm, "num_canonical_nodes": 16, "batch_size": 2}
        return torch.utils.data.DataLoader(StreamingDataset(str(data / "b"), **settings), 2, num_workers=workers)

    saving = loader()
    whole = [batch["id"].tolist() for batch in saving]
    assert len(whole) == 16
    for stop in range(1, 15):
        counted, resumed, again = loader(), loader(), loader()
        next(iter(counted))
        resumed.dataset.load_state_dict(counted.dataset.state_dict(num_samples=2 * stop, from_beginning=True))
        assert next(iter(resumed))["id"].tolist() == whole[stop]
        again.dataset.load_state_dict(resumed.dataset.state_dict(num_samples=2, from_beginning=False))
        assert [batch["id"].tolist() for batch in again] == whole[stop + 1 :]


OWN_NAMES = (
    "reader order world snapshot window subset decoders transform size num_samples num_shards shards spanner index "
    "tokenizer settings read_batch replication predownload cache_limit epoch_size config columns schema split local "
    "remote length prepare_shard cache_usage streams shuffle get_items"
)


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, StreamingDataLoader])
def test_a_subclass_may_use_any_name_for_an_attribute_of_its_own(data: Path, kind: Any) -> None:
    class Own(StreamingDataset):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            for name in OWN_NAMES.split():
                setattr(self, name, f"my {name}")

    dataset = Own(remote=str(data / "a"), batch_size=5)
    assert (dataset[3], dataset[-1], dataset.transform) == ({"id": 3}, {"id": 19}, "my transform")
    assert ids_of(kind(dataset, batch_size=5)) == list(range(20))
    assert copy.deepcopy(dataset).order == "my order"


def test_a_repr_says_what_is_known_and_reads_nothing(data: Path, tmp_path: Path) -> None:
    absent = repr(StreamingDataset(str(tmp_path / "absent"), shuffle=True, batch_size=4))
    assert "absent" in absent
    assert "shuffle=True" in absent
    assert "batch_size=4" in absent
    dataset = StreamingDataset(str(data / "a"))
    assert "samples" not in repr(dataset)
    assert len(dataset) == 20
    assert "20 samples in" in repr(dataset)
    assert "5 samples in" in repr(dataset.subset(range(5)))


def test_a_repr_hides_credentials() -> None:
    assert "secret" not in repr(
        StreamingDataset(
            "s3://bucket/set", stream_config={"options": {"access_key_id": "secret", "secret_access_key": "secret"}}
        )
    )


# Its arguments


@pytest.mark.parametrize(
    ("argument", "value", "means"),
    [
        ("cache_limit", 1e9, 10**9),
        ("cache_limit", 0, None),
        ("epoch_size", 10.0, 10),
        ("epoch_size", 0, 20),
        ("epoch_size", "0.01k", 10),
        ("predownload", 8.0, 8),
        ("batch_size", 4.0, 4),
        ("batch_size", np.int64(4), 4),
        ("shuffle_block_size", 1e5, 100_000),
        ("num_canonical_nodes", 2.0, 2),
        ("shuffle_seed", 7.0, 7),
        ("sampling_granularity", 2.0, 2),
        ("keep_zip", None, None),
    ],
)
def test_whole_numbers_may_be_of_any_type(data: Path, argument: str, value: Any, means: Any) -> None:
    dataset = StreamingDataset(str(data / "a"), **{argument: value})
    found = getattr(dataset, argument, None)
    assert found == means
    assert not isinstance(found, float)
    assert len(ids_of(StreamingDataLoader(dataset, None if argument == "batch_size" else 5))) == len(dataset)


@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan"), float("inf"), True, "4"])
@pytest.mark.parametrize(
    "argument", ["batch_size", "replication", "shuffle_block_size", "num_canonical_nodes", "sampling_granularity"]
)
def test_a_number_that_cannot_be_is_refused_by_its_name(argument: str, value: Any) -> None:
    names = {"num_canonical_nodes": "canonical_nodes"}
    with pytest.raises(ValueError, match=names.get(argument, argument)):
        StreamingDataset("x", **{argument: value})


@pytest.mark.parametrize(
    "options",
    [{"partition_algo": "x"}, {"cache_limit": 1.5}, {"epoch_size": -1}, {"predownload": -1}, {"shuffle_seed": -1}],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused_by_its_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)).removeprefix("shuffle_")):
        StreamingDataset("x", **options)


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: StreamingDataset("x", shufle=True), "StreamingDataset.*'shufle'. Did you mean 'shuffle'"),
        (lambda: StreamingDataset("x", bogus=True), "'bogus'. Its arguments are remote, streams"),
        (lambda: StreamingDataLoader(None, num_worker=1), "'num_worker'. Did you mean 'num_workers'"),
        (lambda: LocalDataset("x", splits="a"), "'splits'. Did you mean 'split'"),
        (lambda: PositionTracker(seed_step=1), "'seed_step'. Did you mean 'seed_steps'"),
    ],
)
def test_a_mistyped_argument_names_the_one_that_was_meant(make: Any, meant: str) -> None:
    with pytest.raises(TypeError, match=meant):
        make()


def test_a_path_alone_is_read_in_place(data: Path) -> None:
    assert ids_of(StreamingDataLoader(StreamingDataset(str(data / "a")), 5.0)) == list(range(20))
    assert "streams" in inspect.signature(StreamingDataset).parameters


# Its indices


@pytest.mark.parametrize(
    "index",
    [
        [[1, 2], [3, -4]],
        [[1], [2, 3], []],
        [1, [2, [3, np.int64(4)]], (5, -6)],
        np.array([[1, 2], [3, -4]]),
        np.arange(8).reshape(2, 2, 2),
        torch.tensor([[1, 2], [3, -4]]),
        torch.tensor(3),
        np.array(3),
        range(3),
        [slice(0, 3), 4],
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [StreamingDataset, LocalDataset])
def test_nested_indices_give_samples_nested_alike(data: Path, index: Any, kind: Any) -> None:
    dataset = kind(local=str(data / "a"))

    def expected(at: Any) -> Any:
        if isinstance(at, slice):
            return [{"id": i} for i in range(len(dataset))[at]]
        if isinstance(at, (list, tuple, range)):
            return [expected(each) for each in at]
        return {"id": int(at) % len(dataset)}

    assert dataset[index] == expected(index.tolist() if hasattr(index, "tolist") else index)


@pytest.mark.parametrize(
    "index", [1.5, np.array([1.5]), [True], np.array([True]), torch.tensor(1.5), "1", [None]], ids=str
)
def test_an_index_that_is_no_number_is_refused(data: Path, index: Any) -> None:
    with pytest.raises(TypeError):
        StreamingDataset(str(data / "a"))[index]


# Its overrides

REFUSED = [
    "prepare_shard",
    "evict_shard",
    "resample_streams",
    "_get_work",
    "_resume",
    "_prepare_thread",
    "on_exception",
]


@pytest.mark.parametrize("method", REFUSED)
@pytest.mark.parametrize("base", [StreamingDataset, LocalDataset])
def test_an_override_that_would_never_be_called_is_refused_at_construction(base: Any, method: str) -> None:
    kind = type("Mine", (base,), {method: lambda self, *arguments: None})
    with pytest.raises(TypeError, match=rf"Mine\.{method}, which would never be called. Instead, \w+"):
        kind(local="x")


@pytest.mark.parametrize("method", ["__iter__", "__len__"])
def test_a_loader_refuses_an_override_that_it_never_calls(data: Path, method: str) -> None:
    kind = type("Mine", (StreamingDataset,), {method: lambda self: getattr(super(kind, self), method)()})
    dataset = kind(remote=str(data / "a"), batch_size=5)
    assert ids_of(torch.utils.data.DataLoader(dataset, batch_size=5)) == list(range(20))
    with pytest.raises(TypeError, match=rf"Mine\.{method}"):
        StreamingDataLoader(dataset)


def test_a_loader_of_ones_own_may_not_count_batches_otherwise(data: Path) -> None:
    class Mine(StreamingDataLoader):
        def _get_batch_size(self, batch: Any) -> int:
            return 1

    with pytest.raises(TypeError, match=r"Mine\._get_batch_size"):
        Mine(StreamingDataset(str(data / "a")), 5)


class Marked(StreamingDataset):
    """States with an entry of the user's own, which is taken out again."""

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:
        state = super().state_dict(num_samples, from_beginning)
        return {"mine": state.pop("mine", 0) + 1, "inner": state}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state["mine"]
        super().load_state_dict(state["inner"])


@pytest.mark.parametrize("by", ["loader", "iterator", "dataset"])
def test_overrides_of_the_state_are_called_once_on_every_path(data: Path, by: str) -> None:
    loader = StreamingDataLoader(Marked(str(data / "a")), 5)
    batches = iter(loader)
    next(batches)
    state = {"loader": loader, "iterator": batches, "dataset": loader.streaming}[by].state_dict()
    assert (state["mine"], state["inner"]["position"]) == (1, 5)
    again = StreamingDataLoader(Marked(str(data / "a")), 5)
    (again.streaming if by == "dataset" else again).load_state_dict(state)
    assert ids_of(again) == list(range(5, 20))
    assert again.streaming.loaded == 1


def test_a_correction_of_the_number_of_samples_is_not_needed_and_warned_of(data: Path) -> None:
    class Packed(StreamingDataset):
        def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:  # type: ignore[override]
            return super().state_dict(2 * num_samples, from_beginning)

    loader = StreamingDataLoader(Packed(str(data / "a")), 5)
    next(iter(loader))
    with pytest.warns(UserWarning, match="found 5 samples, .* corrects to 10"):
        assert loader.state_dict()["position"] == 5
    loader = StreamingDataLoader(StreamingDataset(str(data / "a")), 5)
    batches = iter(loader)
    next(batches)
    with pytest.warns(UserWarning, match="found 5 samples, .* corrects to 0"):
        assert loader.streaming.state_dict(0, True)["position"] == 5
    assert loader.streaming.state_dict(5, True)["position"] == 5
    list(batches)
    assert loader.streaming.state_dict(20, True)["epoch"] == 1  # the epoch's end is the next one's beginning
    plain = Packed(str(data / "a"), batch_size=5)
    next(iter(torch.utils.data.DataLoader(plain, batch_size=5)))
    assert plain.state_dict(5, True)["position"] == 10
