"""The dataset: random access, subsets, whole batches by id, and settings that cannot work."""

from __future__ import annotations

import gc
import json
import pickle
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.data import write_ids  # noqa: E402
from support.mosaic_work import epoch_work  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_stream import (  # noqa: E402
    CSVWriter,
    LocalDataset,
    MDSWriter,
    StatefulDataLoader,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    World,
    add_lengths,
)
from lightning_stream.errors import SnapshotMismatch, StateError  # noqa: E402
from lightning_stream.reading.shard_table import ReaderConfig  # noqa: E402

NUM_SAMPLES = 167


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    columns = {"id": "int", "x": "ndarray:float32:4", "name": "str"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1000, compression="zstd") as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"id": number, "x": np.full(4, number, np.float32), "name": f"sample {number}"})
    return folder


@pytest.fixture
def dataset(shards: Path, tmp_path: Path) -> StreamingDataset:
    return StreamingDataset(remote=shards, local=tmp_path / "cache", shuffle=True)


def ids_of(loader: StreamingDataLoader) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


def test_any_sample_can_be_read_by_its_index(dataset: StreamingDataset) -> None:
    assert dataset.size == dataset.num_samples == len(dataset) == NUM_SAMPLES
    assert dataset[7]["name"] == "sample 7"
    assert dataset[-1]["id"] == NUM_SAMPLES - 1
    assert [sample["id"] for sample in dataset[160:170:3]] == [160, 163, 166]
    assert [sample["id"] for sample in dataset[np.array([3, -1])]] == [3, 166]
    assert [sample["id"] for sample in dataset[[5, 4]]] == [5, 4]
    assert dataset[torch.tensor(3)]["id"] == 3
    assert dataset.get_item(np.int16(3))["id"] == 3  # type: ignore[arg-type]
    for wrong in (True, 1.5, "1"):
        with pytest.raises(TypeError, match="an index is a whole number"):
            dataset.get_item(wrong)  # type: ignore[arg-type]
    for wrong in (1.5, "x", None, True):
        with pytest.raises(TypeError, match="index"):
            dataset[wrong]
    with pytest.raises(IndexError, match="167 samples"):
        dataset[NUM_SAMPLES]


def test_a_batch_is_gathered_as_columns_in_the_order_asked_for(dataset: StreamingDataset) -> None:
    ids = np.array([166, 0, 50, 50, 3])
    out = np.zeros((5, 4), np.float32)
    columns = dataset.read_batch(ids, out={"x": out})
    assert columns["id"].tolist() == ids.tolist()
    assert columns["name"] == [f"sample {number}" for number in ids]
    assert out[:, 0].tolist() == ids.tolist()
    with pytest.raises(IndexError):
        dataset.read_batch([NUM_SAMPLES])
    for wrong in (ids < 50, [1.5]):
        with pytest.raises(TypeError, match="whole numbers"):
            dataset.read_batch(wrong)
        with pytest.raises(TypeError, match="whole numbers"):
            dataset.original_ids(wrong)
    with pytest.raises(ValueError, match="in one dimension"):
        dataset.read_batch(ids[None])
    for chosen in (dataset, dataset.subset([3, 4, 5])):
        for absent in (-1, NUM_SAMPLES):
            with pytest.raises(IndexError, match="sample ids must be in"):
                chosen.original_ids([absent])


def test_a_shard_or_a_sample_that_there_is_not_is_named(dataset: StreamingDataset) -> None:
    num_shards = dataset.num_shards
    for call in (dataset.prepare_shard, dataset.evict_shard):
        with pytest.raises(IndexError, match=f"has {num_shards} shards: index {num_shards} is not in"):
            call(num_shards)
        with pytest.raises(TypeError, match=r"found 1\.5"):
            call(1.5)  # type: ignore[arg-type]
    dataset.prepare_shard(-1)
    assert dataset.evict_shard(-1)
    for wrong in (1.5, True):
        with pytest.raises(TypeError, match="an index is a whole number"):
            dataset.spanner[wrong]


def test_of_more_shards_than_may_be_open_those_used_longest_ago_are_closed(dataset: StreamingDataset) -> None:
    dataset.reader.shards.config = ReaderConfig(max_open_shards=3)
    offsets = dataset.snapshot.shard_offsets.tolist()
    held = dataset.reader.shards.pool.open
    for _ in range(2):
        assert sorted(number for ids in ids_of(StreamingDataLoader(dataset, 16)) for number in ids) == [*range(167)]
        assert len(held) == 3
    dataset.read_batch(offsets[:3])
    dataset.read_batch(offsets[:1])  # all open: gathered at once, which is a use too
    assert dataset[offsets[3]]["id"] == offsets[3]
    assert [number for number in range(4) if number in held] == [0, 2, 3]


def test_streams_of_different_columns_mix_with_none_where_a_column_lacks(tmp_path: Path) -> None:
    for name, columns in (("a", {"id": "int", "left": "str"}), ("b", {"id": "int", "right": "int"})):
        with MDSWriter(out=str(tmp_path / name), columns=columns) as writer:
            for number in range(4):
                writer.write({"id": number, **({"left": "l"} if name == "a" else {"right": number})})
    dataset = StreamingDataset(streams=[Stream(local=tmp_path / name) for name in "ab"])
    (batch,) = StreamingDataLoader(dataset, 8)
    assert batch["id"].tolist() == [0, 1, 2, 3] * 2
    assert batch["left"] == ["l"] * 4 + [None] * 4
    assert batch["right"] == [None] * 4 + [0, 1, 2, 3]


def test_a_decoder_of_the_users_replaces_a_columns_encoding(shards: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote=shards, local=tmp_path / "cache", decoders={"name": len})
    assert dataset[100]["name"] == len("sample 100")
    assert dataset.read_batch([3, 100])["name"] == [8, 10]


def test_a_new_run_sees_what_was_appended_although_the_cache_knows_the_old_index(tmp_path: Path) -> None:
    def write(first: int, append: bool) -> None:
        write_ids(str(tmp_path / "set"), range(first, first + 10), append=append)

    write(0, append=False)
    old = StreamingDataset(remote=tmp_path / "set", local=tmp_path / "cache")
    assert len(old) == 10
    state = StreamingDataLoader(old, 5).state_dict()
    write(10, append=True)
    new = StreamingDataset(remote=tmp_path / "set", local=tmp_path / "cache")
    assert [sample["id"] for sample in new[:]] == list(range(20))
    assert [sample["id"] for sample in old[:]] == list(range(10))
    with pytest.raises(SnapshotMismatch, match="10 samples"):
        StreamingDataLoader(new, 5).load_state_dict(state)


def test_nothing_is_read_before_the_first_use(tmp_path: Path) -> None:
    dataset = StreamingDataset(remote=tmp_path / "not there yet", local=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    with pytest.raises(Exception, match="not there yet"):
        len(dataset)


def test_a_pickled_dataset_reads_the_same(dataset: StreamingDataset) -> None:
    dataset[0]
    assert pickle.loads(pickle.dumps(dataset))[5]["id"] == 5


def test_a_subset_has_an_order_and_a_state_of_its_own(dataset: StreamingDataset) -> None:
    chosen = list(range(0, NUM_SAMPLES, 3))
    part = dataset.subset(chosen)
    assert (part.size, len(part)) == (56, 56)
    loader = StreamingDataLoader(part, 10, num_workers=1)
    batches = ids_of(loader)
    assert sorted(number for batch in batches for number in batch) == chosen
    assert part[1]["id"] == 3
    with pytest.raises(StateError, match="56 samples"):
        StreamingDataLoader(dataset, 10).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("ids", [[1.5, 2.5], [True, False]])
def test_ids_that_are_not_whole_numbers_make_no_subset(dataset: StreamingDataset, ids: Any) -> None:
    with pytest.raises(TypeError, match="ids are whole numbers"):
        dataset.subset(ids)


def test_a_subset_fetches_only_its_shards(shards: Path, tmp_path: Path) -> None:
    part = StreamingDataset(remote=shards, local=tmp_path / "cache").subset([0, 1, 2])
    assert ids_of(StreamingDataLoader(part, 3)) == [[0, 1, 2]]
    assert len(list((tmp_path / "cache").rglob("*.mds"))) == 1


def test_a_local_dataset_is_a_plain_map_style_dataset(tmp_path: Path) -> None:
    write_ids(str(tmp_path / "train"), range(9))
    local = LocalDataset(tmp_path, split="train")
    assert (len(local), local[-1]) == (9, {"id": 8})
    loader = torch.utils.data.DataLoader(local, batch_size=4, shuffle=True)
    assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(9))


class Doubled(StreamingDataset):
    """A dataset as users of MDS write them."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)["id"] * 2


def test_a_subclass_with_its_own_getitem_is_read_through_it(shards: Path, tmp_path: Path) -> None:
    loader = StreamingDataLoader(Doubled(remote=shards, local=tmp_path / "cache", batch_size=16), num_workers=1)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(0, 2 * NUM_SAMPLES, 2))


def test_iterating_without_a_loader_follows_the_same_order(shards: Path, tmp_path: Path) -> None:
    def make() -> StreamingDataset:
        return StreamingDataset(remote=shards, local=tmp_path / "cache", shuffle=True, batch_size=16)

    plain = make()
    for epoch in ids_of(StreamingDataLoader(make())), None:
        seen = [sample["id"] for sample in plain]
        assert sorted(seen) == list(range(NUM_SAMPLES))
        if epoch is not None:
            assert seen == [number for batch in epoch for number in batch]


def test_an_error_that_ends_an_epoch_of_torchs_loader_says_that_its_rest_is_left_and_a_state_brings_it(
    shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad_days = [OSError("a bad day")]

    def flaky(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] == 40 and bad_days:
            raise bad_days.pop()
        return {"id": sample["id"]}

    dataset = StreamingDataset(shards, batch_size=16, transform=flaky)
    loader = DataLoader(dataset, 16)
    with pytest.raises(OSError, match="a bad day"):
        list(loader)
    assert "the next one begins the next epoch; found OSError in epoch 0. For the samples that are left" in caplog.text
    dataset.load_state_dict(dataset.state_dict(32, from_beginning=True))
    assert [number for batch in loader for number in batch["id"].tolist()] == list(range(32, NUM_SAMPLES))


def test_what_comes_next_can_be_explained_and_traced(dataset: StreamingDataset) -> None:
    loader = StreamingDataLoader(dataset, 16)
    epoch = ids_of(loader)
    again = StreamingDataLoader(dataset, 16)
    batches = iter(again)
    next(batches), next(batches)
    assert again.trace(0).ids.tolist() == epoch[0]
    assert again.trace(5).ids.tolist() == epoch[5]
    said = again.explain()
    assert (said.epoch, said.position) == (0, 32)
    assert "32" in str(said)


def test_a_run_of_mosaicml_streaming_continues_in_its_order(shards: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"shuffle": True, "shuffle_algo": "py1e", "num_canonical_nodes": 2, "batch_size": 8}
    sizes = StreamingDataset(remote=shards, local=tmp_path / "cache").snapshot.shard_sizes
    state = {
        "epoch": 1, "sample_in_epoch": 48, "num_canonical_nodes": 2, "shuffle_seed": 17, "initial_physical_nodes": 1,
    }  # fmt: skip
    whole = epoch_work(
        shard_sizes=sizes, weights=[None], sampling_method="balanced", sampling_granularity=1, shuffle=True,
        shuffle_algo="py1e", batching_method="random", num_physical_nodes=1, ranks_per_node=2, workers_per_rank=1,
        batch_size=8, num_canonical_nodes=2, epoch=1, sample_in_epoch=48, shuffle_seed=17, shuffle_block_size=None,
        partition_algo="relaxed",
    )  # fmt: skip
    for rank in range(2):
        dataset = StreamingDataset(remote=shards, local=tmp_path / "cache", world=World(rank, 2, 2), **options)
        loader = StreamingDataLoader(dataset)
        loader.load_state_dict(state)
        expected = [[number for number in batch if number >= 0] for batch in whole[0, rank, 0].tolist()]
        assert ids_of(loader) == [batch for batch in expected if batch]
        assert json.dumps(loader.state_dict())


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, StreamingDataLoader])
def test_a_state_of_mosaicml_streaming_says_seed_and_nodes_whatever_the_arguments_say(
    shards: Path, tmp_path: Path, kind: Any
) -> None:
    def loader(**options: Any) -> Any:
        local = tmp_path / "cache"
        dataset = StreamingDataset(shards, local=local, shuffle=True, shuffle_algo="py1e", batch_size=8, **options)
        return kind(dataset, batch_size=8)

    state = {"epoch": 0, "sample_in_epoch": 48, "num_canonical_nodes": 2, "shuffle_seed": 17}
    expected = loader(num_canonical_nodes=2, shuffle_seed=17)
    epochs = [ids_of(expected)[6:], ids_of(expected)]
    for options in ({}, {"num_canonical_nodes": 1}, {"shuffle_seed": 9}, {"num_canonical_nodes": 4, "shuffle_seed": 9}):
        resumed = loader(**options)
        (resumed if kind is StreamingDataLoader else resumed.dataset).load_state_dict(state)
        assert [ids_of(resumed), ids_of(resumed)] == epochs


def test_a_state_of_mosaicml_streaming_needs_the_algorithm_it_does_not_record(dataset: StreamingDataset) -> None:
    state = {"epoch": 0, "sample_in_epoch": 16, "num_canonical_nodes": 2, "shuffle_seed": 9176}
    with pytest.raises(StateError, match="does not record its algorithm"):
        StreamingDataLoader(dataset, 16).load_state_dict(state)


def test_a_cache_too_small_for_the_order_is_refused_before_training(shards: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote=shards, local=tmp_path / "cache", shuffle=True, cache_limit=4000)
    with pytest.raises(ValueError, match=r"cache_limit is 4\.0 kB.*Pass cache_limit=\d+"):
        next(iter(StreamingDataLoader(dataset, 16)))


def test_a_cache_limit_that_holds_the_active_shards_suffices(shards: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(
        remote=shards, local=tmp_path / "cache", shuffle=True, cache_limit=12_000, num_canonical_nodes=1, window=2
    )
    batches = ids_of(StreamingDataLoader(dataset, 8, num_workers=1))
    assert sorted(number for batch in batches for number in batch) == list(range(NUM_SAMPLES))
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.mds")) <= 12_000


def test_dropping_every_batch_is_refused(dataset: StreamingDataset) -> None:
    with pytest.raises(ValueError, match="leaves none of 167 samples"):
        next(iter(StreamingDataLoader(dataset, 200, tail="drop")))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs remote="),
        ({"streams": [Stream(remote="y")], "remote": "x"}, "not both"),
        ({"streams": [Stream(remote="y")], "stream_config": {"options": {}}}, "not both"),
        ({"remote": "x", "stream_name": "mine"}, r"'mine'\. Pass streams="),
        ({"remote": "x", "shuffle_algo": "py9"}, "py9"),
        ({"remote": "x", "shuffle_algo": "uniform"}, "found .uniform., the order of a StatefulDataLoader"),
        ({"remote": "x", "batching_method": "sometimes"}, "sometimes"),
        ({"remote": "x", "sampling_method": "rarely"}, "rarely"),
        ({"streams": [Stream(remote="x", proportion=1), Stream(remote="y", repeat=1)]}, "proportion"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_when_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StreamingDataset(**options)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda of: of(decoders={"x": "int"}), "decoders must be functions by name, .*; got dict {'x': 'str'}"),
        (lambda of: of(decoders=[bytes]), "decoders must be functions by name, .*; got list"),
        (lambda of: of(transform={"shards": dict}), "transform and collate_fn are functions; got dict"),
        (lambda of: of(schedule={"shards": 1.0}), "points are pairs of a number and weights by name"),
        (lambda of: of(schedule=[(0, [1.0])]), "points are pairs of a number and weights by name"),
        (lambda of: of(schedule=[(0, {1: 1.0, "shards": 2})]), "must be given by name, .*; got dict {1: 'float'"),
        (lambda of: of(stream_config=[1]), "stream_config must be arguments by name, .*; got list"),
        (lambda of: of(stream_config={"options": {1: "secret"}}), r"options must be .* by name, .*{1: 'str'}$"),
        (lambda of: StreamingDataLoader(of(), collate_fn={"x": list}), "transform and collate_fn are functions"),
        (lambda of: MDSWriter(out="never", columns=["x"]), "columns must be encodings by name"),
        (lambda of: StatefulDataLoader([1, 2], lengths={None: [1, 1]}), "lengths must be numbers by name"),
        (lambda of: StatefulDataLoader({1: [1], 2: [2]}, proportion={1: 1, 2: 1}), "datasets must be mixed by name"),
        (lambda of: StatefulDataLoader({"a": [1], "b": [2]}, proportion=0.5), "proportion must be numbers by name"),
    ],
)
def test_what_is_given_by_name_is_refused_at_once_where_it_is_not(shards: Path, wrong: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        wrong(partial(StreamingDataset, remote=shards, batch_size=4))


def test_streams_may_be_paths(shards: Path) -> None:
    mixed = StreamingDataset(streams=[str(shards), Stream(shards, repeat=2)])
    assert mixed.epoch_size == 3 * NUM_SAMPLES


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("shufle", "shuffle"),
        ("input_dir", "remote"),
        ("cache_dir", "local"),
        ("seed", "shuffle_seed"),
        ("max_cache_size", "cache_limit"),
    ],
)
def test_an_argument_that_does_not_exist_names_the_one_that_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"'{wrong}'. Did you mean '{meant}'"):
        StreamingDataset("shards", **{wrong: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "wrong", "meant"),
    [
        (Stream, "proprotion", "proportion"),
        (CSVWriter, "newlien", "newline"),
        (add_lengths, "num_worker", "num_workers"),
    ],
)
def test_other_misspelt_arguments_name_the_one_that_was_meant(call: Any, wrong: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) .*'{wrong}'. Did you mean '{meant}'"):
        call(**{wrong: 1})


def test_an_argument_like_no_other_is_answered_by_each_argument_once() -> None:
    with pytest.raises(TypeError, match="Its arguments are ") as caught:
        StreamingDataset("shards", qqq=1)  # type: ignore[call-arg]
    names = str(caught.value).partition("Its arguments are ")[2].split(", ")
    assert sorted(set(names)) == sorted(names)


def test_a_loader_of_another_dataset_names_the_loader_that_takes_it() -> None:
    with pytest.raises(TypeError, match=r"found list.*by StatefulDataLoader"):
        StreamingDataLoader([1, 2], batch_size=1)  # type: ignore[arg-type]


def test_a_single_stream_takes_further_arguments_as_a_mapping(shards: Path) -> None:
    config = {"choose": 10, "options": {"retries": 3}}
    dataset = StreamingDataset(remote=shards, stream_config=config, stream_name="stream")
    assert (dataset.epoch_size, dataset.num_samples, dataset.size) == (10, NUM_SAMPLES, NUM_SAMPLES)
    assert dataset.streams[0].options == config["options"]


@pytest.mark.parametrize("steps", [0, 3, 10_000])
def test_warming_fetches_the_shards_of_the_first_steps(shards: Path, tmp_path: Path, steps: int) -> None:
    dataset = StreamingDataset(remote=shards, local=tmp_path, shuffle=True, window=1, num_canonical_nodes=2)
    loader = StreamingDataLoader(dataset, 6, accumulate=2)
    first = np.concatenate([loader.trace(step).shards for step in range(min(steps, 13))] or [[]])
    wanted = {f"shard.{number:05}.mds" for number in first.astype(int).tolist()}
    assert loader.warm(steps) == len(wanted)
    assert {path.name for path in tmp_path.glob("*.mds")} == wanted
    with pytest.raises(ValueError, match="at least 0; found -1"):
        dataset.warm(-1)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists a process's open files; run it there")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_was_dropped_leaves_no_file_open(shards: Path, tmp_path: Path, workers: int) -> None:
    def open_files() -> list[str]:
        found = []
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile, by a thread that had it
                found.append(str(link.readlink()))
        return [path for path in found if str(tmp_path) in path]

    def read() -> list[str]:
        dataset = StreamingDataset(remote=shards, local=tmp_path / "cache", shuffle=True)
        assert len(list(StreamingDataLoader(dataset, 20, num_workers=workers))) == 9
        dataset[0]
        return open_files()

    assert read()
    gc.collect()
    assert not open_files()


def test_a_state_loaded_for_a_plain_data_loader_is_announced_once(
    dataset: StreamingDataset, shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning_stream")
    state = dataset.state_dict(40)
    resumed = StreamingDataset(remote=shards, shuffle=True, batch_size=8)
    resumed.load_state_dict(state)
    assert len(list(torch.utils.data.DataLoader(resumed, batch_size=8))) == 16
    resumed.load_state_dict(state)
    list(StreamingDataLoader(resumed, 8))
    announced = [one for one in caplog.messages if one.startswith("Resumed")]
    assert announced == 2 * ["Resumed at epoch 0, step 5 (40 of 167 samples of this epoch)."]


def place_of(dataset: StreamingDataset, *counted: Any) -> tuple[int, int]:
    state = dataset.state_dict(*counted)
    return state["epoch"], state["position"]


def test_a_state_without_a_loader_is_of_the_latest_iteration_until_it_is_over_and_another_epoch_is_set(
    shards: Path,
) -> None:
    dataset = StreamingDataset(local=shards, shuffle=True, batch_size=8)
    for epoch in range(2):
        assert len(list(dataset)) == NUM_SAMPLES
        assert place_of(dataset) == (epoch, NUM_SAMPLES)
        dataset.set_epoch(epoch + 1)
        assert place_of(dataset) == (epoch + 1, 0)
        with pytest.raises(StateError, match="the iteration that began last; found 167 samples"):
            dataset.state_dict(NUM_SAMPLES, True)
    samples = iter(dataset)
    next(samples), next(samples)
    dataset.set_epoch(5)
    assert place_of(dataset) == place_of(dataset, 2) == (2, 2)
    samples.close()  # type: ignore[attr-defined]
    assert place_of(dataset) == (5, 0)


def test_of_two_iterations_without_a_loader_the_one_that_began_last_counts(shards: Path) -> None:
    dataset = StreamingDataset(local=shards, shuffle=True, batch_size=8)
    first, second = iter(dataset), iter(dataset)
    next(first), next(second)
    assert len(list(first)) == NUM_SAMPLES - 1
    assert place_of(dataset) == (1, 1)
    assert place_of(dataset, 0) == (1, 0)  # the end of the first one is not that of the second


def test_workers_of_a_plain_loader_yield_samples_that_only_its_user_can_count(shards: Path) -> None:
    dataset = StreamingDataset(local=shards, shuffle=True, batch_size=8)
    batches = iter(DataLoader(dataset, 8, num_workers=1, collate_fn=len))
    next(batches)
    with pytest.raises(StateError, match="pass the number of samples trained on"):
        dataset.state_dict()
    assert place_of(dataset, 8) == (0, 8)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_state_at_an_epochs_end_needs_no_number_of_samples_that_divides_by_the_devices(
    shards: Path, num_ranks: int
) -> None:
    for rank in range(num_ranks):
        world = World(rank, num_ranks)
        dataset = StreamingDataset(local=shards, shuffle=True, batch_size=12 // num_ranks, world=world)
        num_yielded = len(list(dataset)) * num_ranks
        assert num_yielded == NUM_SAMPLES + 1  # with padding, as a trainer's clock counts them
        for counted in ((), (num_yielded,), (NUM_SAMPLES,)):
            assert place_of(dataset, *counted) == (0, NUM_SAMPLES)


def test_a_state_inside_a_batch_is_refused_where_its_first_samples_are_not_those_yielded(shards: Path) -> None:
    """Canonical nodes come one after another in a batch, so that of its positions 0, 2, 4, ... are yielded first."""
    whole = [sample["id"] for sample in StreamingDataset(local=shards, shuffle=True, batch_size=8)]
    for nodes, refused in ((2, True), (8, False)):
        dataset = StreamingDataset(local=shards, shuffle=True, batch_size=8, num_canonical_nodes=nodes)
        samples = iter(dataset)
        seen = [next(samples)["id"] for _ in range(11)]
        assert refused or seen == whole[:11]
        for counted in ((), (11,)):
            if refused:
                with pytest.raises(StateError, match=r"between two batches, .*; found 3 of 8 samples"):
                    dataset.state_dict(*counted)
            else:
                assert place_of(dataset, *counted) == (0, 11)
        rest = [next(samples)["id"] for _ in range(5)]
        assert place_of(dataset) == (0, 16)
        later = StreamingDataset(local=shards, shuffle=True, batch_size=8, num_canonical_nodes=nodes)
        later.load_state_dict(dataset.state_dict())
        assert sorted([*seen, *rest, *(sample["id"] for sample in later)]) == list(range(NUM_SAMPLES))
