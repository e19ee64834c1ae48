"""Random access to shards that are not here: what is asked of the server is counted there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servers.web import Handler, WebServer  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.errors import DigestError, StoreError  # noqa: E402
from lightning_stream.reading import look_ahead, partial  # noqa: E402
from lightning_stream.reading.shard_pool import ShardPool  # noqa: E402

WIDTH, NUM_SAMPLES, SHARD_BYTES = 1 << 16, 240, 6 << 20


class SlowServer(WebServer):
    """Answers requests for whole shards only once `slow` is set."""

    slow: threading.Event | None = None

    def handler(self) -> type[Handler]:
        return _SlowHandler


class _SlowHandler(Handler):
    def answer(self) -> None:
        if self.owner.slow and "shard" in self.where and "Range" not in self.headers:
            self.owner.slow.wait(20)
        super().answer()


@dataclass
class Served:
    """A server with data, and what it was asked since the last look: (shard, first and last byte, or None)."""

    server: SlowServer

    def asked(self) -> list[tuple[str, str | None]]:
        both = zip(self.server.asked, self.server.headers, strict=True)
        found = [(path.rpartition("/")[2], headers.get("Range")) for (_, path), headers in both if "shard" in path]
        self.server.asked.clear()
        self.server.headers.clear()
        return found

    def dataset(self, folder: Path, part: str = "raw", **options: Any) -> StreamingDataset:
        dataset = StreamingDataset(remote=f"{self.server.url}/{part}", local=folder, **options)
        assert dataset.size == NUM_SAMPLES
        return dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("data")
    parts: dict[str, dict[str, Any]] = {
        "raw": {},
        "packed": {"compression": "zstd"},
        "seekable": {"compression": "zstd:seekable"},
        "small": {"size_limit": 1 << 18},
    }
    for part, options in parts.items():
        options = {"size_limit": SHARD_BYTES, "hashes": ["xxh3_64"], **options}
        with MDSWriter(out=folder / part, columns={"id": "int", "x": "bytes"}, **options) as writer:
            for number in range(NUM_SAMPLES):
                writer.write(sample(number))
    return {f"/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in folder.rglob("*.*")}


@pytest.fixture(autouse=True)
def small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that cost as much as 512 KiB, so that some pay beside shards of a few MiB."""
    monkeypatch.setattr("lightning_stream.reading.partial.REQUEST_BYTES", 1 << 19)


@pytest.fixture
def served(data: dict[str, bytes]) -> Iterator[Served]:
    with SlowServer() as server:
        server.objects.update(data)
        yield Served(server)


def sample(number: int) -> dict[str, Any]:
    return {"id": number, "x": np.random.default_rng(number).bytes(WIDTH + number)}


def test_a_sample_costs_the_table_and_its_bytes_and_the_next_only_its_bytes(served: Served, tmp_path: Path) -> None:
    dataset = served.dataset(tmp_path)
    assert dataset[7] == sample(7)
    table, one = served.asked()
    first_shard = dataset.reader.entry(0)[1]
    assert table == ("shard.00000.mds", f"bytes=0-{4 * (first_shard.num_samples + 2) - 1}")
    begin, end = map(int, (one[1] or "").removeprefix("bytes=").split("-"))
    assert WIDTH < end - begin < WIDTH + 100
    assert dataset[-1] == sample(NUM_SAMPLES - 1)
    assert dataset[8] == sample(8)
    assert [name for name, _ in served.asked()] == ["shard.00002.mds", "shard.00002.mds", "shard.00000.mds"]
    assert not list(tmp_path.glob("shard*"))


def test_samples_of_one_size_come_while_the_table_does(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MDSWriter(out=tmp_path / "d", columns={"x": f"ndarray:uint8:{WIDTH}"}, size_limit=SHARD_BYTES) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"x": np.full(WIDTH, number, np.uint8)})
    files = {f"/fixed/{path.name}": path.read_bytes() for path in (tmp_path / "d").iterdir()}
    served.server.objects.update(files)
    dataset = served.dataset(tmp_path / "cache", "fixed")
    sample_came, read_range = threading.Event(), partial.read_range

    def table_last(cache: Any, entry: Any, begin: int, end: int) -> Any:
        assert begin or sample_came.wait(30)
        found = read_range(cache, entry, begin, end)
        sample_came.set()
        return found

    monkeypatch.setattr(partial, "read_range", table_last)
    assert (dataset[7]["x"] == 7).all()
    assert (dataset[9]["x"] == 9).all()
    lengths = [end - begin + 1 for begin, end in (map(int, (one or "")[6:].split("-")) for _, one in served.asked())]
    assert sorted(lengths)[1:] == [WIDTH, WIDTH]  # and the table, once
    dataset.reader.fetch(np.array([0]))
    assert (dataset[8]["x"] == 8).all()  # what came before is found in the whole shard

    name = "/fixed/shard.00001.mds"
    content = files[name]
    table = np.frombuffer(content[4 : 4 * (dataset.reader.entry(1)[1].num_samples + 2)], "<u4").copy()
    table[1:-1] += 1
    served.server.objects[name] = content[:4] + table.tobytes() + content[4 + table.nbytes :]
    with pytest.raises(DigestError, match=r"fixed/shard\.00001\.mds: the index promises"):
        dataset[NUM_SAMPLES // 2]


def test_once_ranges_have_cost_as_much_as_the_shard_it_is_fetched(served: Served, tmp_path: Path) -> None:
    dataset = served.dataset(tmp_path)
    assert [dataset[number] for number in range(20)] == [sample(number) for number in range(20)]
    asked = served.asked()
    assert 5 < len(asked) < 14
    assert [value for _, value in asked].count(None) == 1
    assert asked[-1] == ("shard.00000.mds", None)
    dataset.reader.fetch(np.array([0]))  # the last samples may have come before all of it
    assert (tmp_path / "shard.00000.mds").exists()
    assert not served.asked()


def test_a_batch_asks_neighbours_in_one_range_and_keeps_its_order(served: Served, tmp_path: Path) -> None:
    dataset = served.dataset(tmp_path)
    ids = [101, 3, 4, 5, 3, 230]
    batch = dataset.read_batch(ids)
    assert batch["id"].tolist() == ids
    assert [bytes(x) for x in batch["x"]] == [sample(number)["x"] for number in ids]
    assert sorted(name for name, _ in served.asked()) == [f"shard.0000{k}.mds" for k in (0, 0, 1, 1, 2, 2)]


def test_what_came_by_range_is_compared_with_the_shard_once_that_is_here(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = served.dataset(tmp_path / "whole")
    assert dataset[7] == sample(7)
    dataset.reader.fetch(np.array([0]))
    assert dataset[8] == sample(8)  # the shard's now, and the same
    ranges = dataset.reader.shards.pool.partial
    assert (ranges._tables, ranges._versions, ranges._costs) == ({}, {}, {})

    def flipped(cache: Any, entry: Any, begin: int, end: int) -> tuple[bytes, str | None]:
        content, version = whole_range(cache, entry, begin, end)
        return (content if begin == 0 else content[:-1] + bytes([content[-1] ^ 1])), version

    whole_range = partial.read_range
    monkeypatch.setattr(partial, "read_range", flipped)
    dataset = served.dataset(tmp_path / "flipped")
    assert dataset[7] != sample(7)
    dataset.reader.fetch(np.array([0]))
    with pytest.raises(StoreError, match=r"raw/shard\.00000\.mds: .*verified file has other bytes.* samples \[7\]"):
        dataset[8]


def refuse_wrong(found: dict[str, Any]) -> dict[str, Any]:
    assert found == sample(found["id"])
    return found


def test_a_batch_whose_transform_fails_on_wrong_samples_that_came_by_range_is_made_again(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, whole_range = set[int](), partial.read_range

    def flipped(cache: Any, entry: Any, begin: int, end: int) -> tuple[bytes, str | None]:
        content, version = whole_range(cache, entry, begin, end)
        if not begin or begin in wrong:
            return content, version
        wrong.add(begin)
        return content[:-1] + bytes([content[-1] ^ 1]), version

    monkeypatch.setattr(partial, "read_range", flipped)
    dataset = served.dataset(tmp_path, transform=refuse_wrong).subset([5, 150, 231])
    loader = StreamingDataLoader(dataset, 3)
    assert [batch["id"].tolist() for batch in loader] == [[5, 150, 231]]
    assert len(wrong) == 3
    assert loader.state_dict()["epoch"] == 1
    assert all(value is not None for _, value in served.asked())


def test_tables_are_kept_up_to_a_bound_and_fetched_again_behind_it(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_stream.reading.partial._HELD_BYTES", 100)
    dataset = served.dataset(tmp_path)
    for number in (1, 100, 230, 101, 2):
        assert dataset.read_batch([number])["id"].tolist() == [number]
    asked = [value for _, value in served.asked()]
    assert len(asked) == 10
    assert sum((value or "").startswith("bytes=0-") for value in asked) == 5  # tables, each time again


def test_a_batch_takes_from_shards_that_are_here_and_from_others(served: Served, tmp_path: Path) -> None:
    dataset = served.dataset(tmp_path)
    dataset.reader.fetch(np.array([1]))
    served.asked()
    ids = [1, 100, 2]
    assert dataset.read_batch(ids)["id"].tolist() == ids
    assert {name for name, _ in served.asked()} == {"shard.00000.mds"}


@pytest.mark.parametrize(
    ("part", "options"),
    [("raw", {"validate_hash": "xxh3_64"}), ("seekable", {"validate_hash": "xxh3_64"}), ("packed", {}), ("small", {})],
)
def test_whole_shards_where_a_hash_is_demanded_or_ranges_bring_nothing(
    served: Served, tmp_path: Path, part: str, options: dict[str, Any]
) -> None:
    dataset = served.dataset(tmp_path, part, **options)
    assert dataset[7] == sample(7)
    assert [value for _, value in served.asked()] == [None]
    assert dataset[8] == sample(8)
    assert len(served.asked()) <= (part == "small")


def test_training_fetches_whole_shards_once(served: Served, tmp_path: Path) -> None:
    dataset = served.dataset(tmp_path, shuffle=True)
    seen = [number for batch in StreamingDataLoader(dataset, 16) for number in batch["id"].tolist()]
    assert sorted(seen) == list(range(NUM_SAMPLES))
    assert sorted(served.asked()) == [(f"shard.0000{k}.mds", None) for k in range(3)]


def test_a_start_by_range_waits_for_no_shard_and_still_fetches_each_once(served: Served, tmp_path: Path) -> None:
    served.server.slow = threading.Event()
    dataset = served.dataset(tmp_path, shuffle=True, predownload={"by_range": True})
    batches = iter(StreamingDataLoader(dataset, 4))
    seen = next(batches)["id"].tolist()  # though no shard can have come yet
    served.server.slow.set()
    seen += [number for batch in batches for number in batch["id"].tolist()]
    assert sorted(seen) == list(range(NUM_SAMPLES))
    asked = served.asked()
    assert sorted(name for name, value in asked if value is None) == [f"shard.0000{k}.mds" for k in range(3)]
    assert 0 < sum(value is not None for _, value in asked) < 40


@pytest.mark.parametrize("options", [{}, {"predownload": {"by_range": False}}, {"on_bad": {"shard": "substitute"}}])
def test_by_default_training_starts_by_range_within_the_requests_to_spare(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(look_ahead, "_FILES_PER_RANGE", 0.1)  # 30 requests for 3 shards
    served.server.slow = threading.Event()
    dataset = served.dataset(tmp_path, shuffle=True, **options)
    if options:
        served.server.slow.set()
    batches = iter(StreamingDataLoader(dataset, 4))
    seen = next(batches)["id"].tolist()
    served.server.slow.set()
    seen += [number for batch in batches for number in batch["id"].tolist()]
    assert sorted(seen) == list(range(NUM_SAMPLES))
    asked = served.asked()
    assert sorted(name for name, value in asked if value is None) == [f"shard.0000{k}.mds" for k in range(3)]
    assert (0 < len(asked) - 3 <= 30) if not options else len(asked) == 3


def test_a_start_by_range_does_not_wait_because_a_shard_is_in_the_cache(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_ahead, "_FILES_PER_RANGE", 0.1)  # 30 requests for 3 shards
    served.dataset(tmp_path).reader.fetch(np.array([1]))
    waited: list[int] = []
    monkeypatch.setattr(ShardPool, "fetch_first", lambda _, numbers: waited.extend(numbers))
    served.server.slow = threading.Event()
    dataset = served.dataset(tmp_path, shuffle=True)
    batches = iter(StreamingDataLoader(dataset, 4))
    seen = next(batches)["id"].tolist()  # though the other shards cannot have come yet
    needed = {f"shard.0000{number}.mds" for number in dataset.snapshot.shards_of(np.array(seen)).tolist()}
    assert len(needed) > 1
    assert {name for name, value in served.asked() if value is not None} == needed - {"shard.00001.mds"}
    assert set(waited) <= {1}  # no further connection is opened for shards that the batch does not wait for
    served.server.slow.set()
    seen += [number for batch in batches for number in batch["id"].tolist()]
    assert sorted(seen) == list(range(NUM_SAMPLES))


def test_a_subset_of_few_samples_reads_only_these(served: Served, tmp_path: Path) -> None:
    part = served.dataset(tmp_path).subset([5, 150, 231])
    assert [part[k]["id"] for k in range(3)] == [5, 150, 231]
    assert all(value is not None for _, value in served.asked())
    seen = [number for batch in StreamingDataLoader(part, 3) for number in batch["id"].tolist()]
    assert seen == [5, 150, 231]
    asked = served.asked()
    assert len(asked) == 3
    assert all(value is not None for _, value in asked)


def test_a_shard_that_was_replaced_is_not_mixed_with_the_new_one(served: Served, tmp_path: Path) -> None:
    dataset = served.dataset(tmp_path)
    assert dataset[1] == sample(1)
    served.server.objects["/raw/shard.00000.mds"] = b"\0" * len(served.server.objects["/raw/shard.00000.mds"])
    for _ in range(2):
        with pytest.raises(DigestError, match=r"raw/shard\.00000\.mds: the index promises"):
            dataset[2]


class FirstAnswers:
    """Ranges whose first answers have a wrong byte at their end, or are too short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, tables_too: bool = True) -> None:
        self._right, self._kind, self._tables_too = partial.read_range, kind, tables_too
        self._known: set[tuple[str, int]] = set()
        monkeypatch.setattr(partial, "read_range", self)

    def __call__(self, cache: Any, entry: Any, begin: int, end: int) -> tuple[bytes, str | None]:
        content, version = self._right(cache, entry, begin, end)
        place = entry.raw.basename, begin
        if place in self._known or (begin == 0 and not self._tables_too):
            return content, version
        self._known.add(place)
        return (content[:-1] if self._kind == "short" else content[:-1] + bytes([content[-1] ^ 1])), version


@pytest.mark.parametrize("kind", ["short", "table"])
def test_an_answer_by_range_that_does_not_fit_is_asked_for_again(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    dataset = served.dataset(tmp_path)
    FirstAnswers(monkeypatch, kind)
    assert dataset[7]["id"] == 7
    assert dataset.read_batch([100, 230])["id"].tolist() == [100, 230]
    assert all(value is not None for _, value in served.asked())


def test_a_sample_that_never_fits_by_range_is_read_from_its_shard(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = partial.read_range
    monkeypatch.setattr(partial, "read_range", lambda *a: (bytes(len(right(*a)[0])), None) if a[2] else right(*a))
    dataset = served.dataset(tmp_path)
    assert dataset[7] == sample(7)
    assert dataset.read_batch([100])["id"].tolist() == [100]
    assert [name for name, value in served.asked() if value is None] == ["shard.00000.mds", "shard.00001.mds"]


def few_of(served: Served, folder: Path) -> StreamingDataset:
    return served.dataset(folder, shuffle=False).subset([5, 150, 231])


def test_samples_of_shards_that_nobody_fetches_count_once_a_second_answer_agrees(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = few_of(served, tmp_path / "right")
    loader = StreamingDataLoader(part, 3)
    assert next(iter(loader))["id"].tolist() == [5, 150, 231]
    assert loader.state_dict()["position"] == 0  # of the next epoch
    assert len(served.asked()) == 9  # tables, samples, and samples again
    FirstAnswers(monkeypatch, "flip", tables_too=False)
    loader = StreamingDataLoader(few_of(served, tmp_path / "wrong"), 3)
    assert bytes(next(iter(loader))["x"][0]) != sample(5)["x"]
    with pytest.raises(StoreError, match=r"samples \[5\]. They may .* positions 0 to 3"):
        loader.state_dict()


def start_by_range(served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch) -> StreamingDataset:
    """A dataset whose first samples come by ranges, with a wrong byte each."""
    served.server.slow = threading.Event()
    dataset = served.dataset(folder, shuffle=True, predownload={"by_range": True}, batch_size=4)
    FirstAnswers(monkeypatch, "flip", tables_too=False)
    return dataset


def test_a_plain_loop_takes_no_state_after_wrong_samples(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = start_by_range(served, tmp_path, monkeypatch)
    samples = iter(dataset)
    first = [next(samples) for _ in range(4)]
    assert any(one != sample(one["id"]) for one in first)
    served.server.slow.set()
    with pytest.raises(StoreError, match=r"verified file has other bytes.* positions 0 to 4"):
        dataset.state_dict(4, True)


@pytest.mark.filterwarnings("ignore:workers divide the dataset's batches")
def test_the_workers_of_a_plain_dataloader_yield_nothing_that_was_not_compared(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = start_by_range(served, tmp_path, monkeypatch)
    served.server.slow.set()
    batches = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    seen = list(batches)
    assert all(bytes(one["x"]) == sample(int(one["id"]))["x"] for one in seen)
    assert sorted(int(one["id"]) for one in seen) == list(range(NUM_SAMPLES))


def test_the_chosen_samples_of_a_dataset_start_by_range_too(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_ahead, "_FILES_PER_RANGE", 0.1)  # 30 requests for 3 shards
    served.server.slow = threading.Event()
    dataset = served.dataset(tmp_path, shuffle=True).subset(range(1, NUM_SAMPLES))
    batches = iter(StreamingDataLoader(dataset, 4))
    seen = next(batches)["id"].tolist()  # though no shard can have come yet
    served.server.slow.set()
    seen += [number for batch in batches for number in batch["id"].tolist()]
    assert sorted(set(seen)) == list(range(1, NUM_SAMPLES))


def test_a_subset_of_a_subset_has_one_reader_of_shards_which_close_closes(served: Served, tmp_path: Path) -> None:
    inner = served.dataset(tmp_path, shuffle=False).subset(range(200))
    dataset = inner.subset(range(100))
    assert len(list(StreamingDataLoader(dataset, 4))) == 25
    assert dataset.reader.shards is inner.reader.shards
    held = dataset.reader.shards.pool.open
    assert len(held)
    dataset.reader.close()
    assert not held


def test_nothing_unverified_is_read_where_shards_are_to_be_whole(served: Served, tmp_path: Path) -> None:
    """Also of shards that nobody fetches yet: single samples, sparse batches and subsets."""
    dataset = served.dataset(tmp_path, predownload={"by_range": False})
    assert dataset[7]["id"] == 7
    part = dataset.subset([NUM_SAMPLES - 1])
    assert next(iter(StreamingDataLoader(part, 1)))["id"].tolist() == [NUM_SAMPLES - 1]
    assert all(value is None for _, value in served.asked())
