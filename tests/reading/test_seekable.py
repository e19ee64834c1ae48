"""Shards in frames: a sample comes without its shard. What is asked of the server is counted there."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servers.holding import HoldingServer  # noqa: E402
from servers.web import WebServer  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.errors import DigestError, StoreError  # noqa: E402
from lightning_stream.formats.codecs import compress, decompress  # noqa: E402
from lightning_stream.formats.seekable import Frames  # noqa: E402
from lightning_stream.reading import partial  # noqa: E402
from lightning_stream.stores import http  # noqa: E402

NUM_SAMPLES = 6000


@pytest.fixture(autouse=True)
def small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that cost as much as 4 KiB, bytes between neighbours and chunks as small, as beside shards of 64 MB."""
    monkeypatch.setattr(partial, "REQUEST_BYTES", 1 << 12)
    monkeypatch.setattr(partial, "_GAP_BYTES", 1 << 10)
    monkeypatch.setattr(http, "CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr(http, "_ENOUGH_BYTES", 1)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(2000)]
    texts = [" ".join(words[k] for k in rng.zipf(1.3, rng.integers(0, 300)) % 2000) for _ in range(NUM_SAMPLES)]
    return [{"id": number, "text": text, "x": b"x" * (number % 5)} for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def data(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("data")
    for part, compression in (("whole", "zstd"), ("frames", "zstd:seekable")):
        columns = {"id": "int", "text": "str", "x": "bytes"}
        with MDSWriter(out=folder / part, columns=columns, compression=compression, size_limit="2mb") as writer:
            for row in rows:
                writer.write(row)
    return {f"/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in folder.rglob("*.*")}


@pytest.fixture
def server(data: dict[str, bytes]) -> Iterator[WebServer]:
    with WebServer() as server:
        server.objects.update(data)
        yield server


def opened(server: WebServer, folder: Path, part: str = "frames", **options: Any) -> StreamingDataset:
    dataset = StreamingDataset(remote=f"{server.url}/{part}", local=folder, **options)
    assert dataset.size == NUM_SAMPLES
    server.asked.clear()
    server.headers.clear()
    return dataset


def ranges(server: WebServer) -> list[tuple[int, int] | None]:
    """The bytes of shards that were asked for since the last look; None for a whole shard."""
    both = zip(server.asked, server.headers, strict=True)
    asked = [headers.get("Range") for (_, path), headers in both if "shard" in path]
    server.asked.clear()
    server.headers.clear()
    bounds = [None if text is None else text.removeprefix("bytes=").split("-") for text in asked]
    return [None if bound is None else (int(bound[0]), int(bound[1]) + 1) for bound in bounds]


def num_bytes(server: WebServer, data: dict[str, bytes], part: str) -> int:
    shard = len(data[f"/{part}/shard.00000.mds{'.seekable' * (part == 'frames')}.zstd"])
    return sum(shard if bounds is None else bounds[1] - bounds[0] for bounds in ranges(server))


def test_a_sample_costs_the_table_and_one_frame_and_the_next_one_frame(
    server: WebServer, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    dataset = opened(server, tmp_path)
    file = dataset.reader.entry(0)[1].compressed
    assert file is not None
    assert dataset[7] == rows[7]
    table, frame = ranges(server)
    assert table is not None
    assert frame is not None
    assert table[1] == file.num_bytes
    assert table[1] - table[0] + frame[1] - frame[0] < 64_000
    assert dataset[8] == rows[8]
    assert ranges(server) == [frame]
    assert dataset[-1] == rows[-1]
    assert not list(tmp_path.glob("shard*"))


def test_any_batch_has_the_samples_of_the_shards(server: WebServer, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(10):
        dataset = opened(server, tmp_path / f"{number}")
        ids = rng.integers(0, NUM_SAMPLES, 12).tolist()
        batch = dataset.read_batch(ids)
        assert [batch["text"][k] for k in range(12)] == [rows[k]["text"] for k in ids]
        assert [bytes(batch["x"][k]) for k in range(12)] == [rows[k]["x"] for k in ids]
        asked = ranges(server)
        assert asked
        assert None not in asked


def test_a_first_batch_takes_a_fraction_of_its_shards(
    server: WebServer, data: dict[str, bytes], rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    took = {}
    for part in ("whole", "frames"):
        dataset = opened(server, tmp_path / part, part, shuffle=True)
        few = dataset.subset(range(0, NUM_SAMPLES, NUM_SAMPLES // 2))
        batch = next(iter(StreamingDataLoader(few, 2)))
        assert [batch["text"][k] for k in range(2)] == [rows[k]["text"] for k in batch["id"].tolist()]
        took[part] = num_bytes(server, data, part)
    assert took["frames"] < 0.25 * took["whole"]  # 0.1 with shards of 64 MB
    sizes = {part: sum(len(data[name]) for name in data if name.startswith(f"/{part}/shard")) for part in took}
    assert sizes["frames"] < 1.1 * sizes["whole"]


def test_training_reads_every_sample_once(server: WebServer, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    dataset = opened(server, tmp_path, shuffle=True, predownload={"by_range": True})
    seen = dict[int, str]()
    for batch in StreamingDataLoader(dataset, 50):
        seen |= dict(zip(batch["id"].tolist(), batch["text"], strict=True))
    assert [seen[number] for number in range(NUM_SAMPLES)] == [row["text"] for row in rows]


@pytest.fixture
def tenth(data: dict[str, bytes]) -> Iterator[HoldingServer]:
    """Sends a tenth of each shard, and the rest once the test lets it."""
    with HoldingServer(part=0.1) as server:
        server.objects.update(data)
        yield server
        server.go.set()


def test_a_first_batch_comes_from_a_tenth_of_its_shards_without_another_request(
    tenth: HoldingServer, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    batches = iter(StreamingDataLoader(opened(tenth, tmp_path, shuffle=True, num_canonical_nodes=1), 6))
    first = next(batches)
    assert not list(tmp_path.glob("shard*"))
    assert set(ranges(tenth)) == {None}
    tenth.go.set()
    seen = dict[int, str]()
    for batch in [first, *batches]:
        seen |= dict(zip(batch["id"].tolist(), batch["text"], strict=True))
    assert [seen[number] for number in range(NUM_SAMPLES)] == [row["text"] for row in rows]


def test_frames_are_found_while_their_file_grows(data: dict[str, bytes], server: WebServer, tmp_path: Path) -> None:
    content = data["/frames/shard.00000.mds.seekable.zstd"]
    frames = Frames(opened(server, tmp_path).reader.entry(0)[1])
    offsets = frames.offsets(content[slice(*frames.table)]).tolist()
    for step in (1, 7, 997):
        edges, file = [0], io.BytesIO(content)
        for num_bytes in range(0, len(content) // 2, step * 17):
            needed = frames.arrived(file, num_bytes, frames.num_frames - 1, edges)
            assert edges == [edge for edge in offsets if edge <= num_bytes]
            assert needed > num_bytes


@pytest.mark.parametrize("wrong", ["head", "zeros", "flipped"])
def test_a_beginning_that_is_no_frame_is_waited_for(
    tenth: HoldingServer, data: dict[str, bytes], rows: list[dict[str, Any]], tmp_path: Path, wrong: str
) -> None:
    for name, content in data.items():
        if name.startswith("/frames/shard"):
            begin = {"head": bytes(4), "zeros": content[:9] + bytes(1000), "flipped": content[:5000] + b"\0" * 9}[wrong]
            tenth.wrong[name] = begin + content[len(begin) :]
    dataset = opened(tenth, tmp_path, shuffle=True, num_canonical_nodes=1)
    threading.Timer(0.5, tenth.go.set).start()
    batch = next(iter(StreamingDataLoader(dataset, 6)))
    assert batch["text"] == [rows[number]["text"] for number in batch["id"].tolist()]


def test_neighbours_cost_one_range_and_many_distant_samples_a_whole_shard(
    server: WebServer, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(server, tmp_path / "near")
    assert dataset.read_batch(range(100, 200))["text"] == [row["text"] for row in rows[100:200]]
    asked = ranges(server)
    assert len(asked) == 2  # the table, and two frames
    assert sum(end - begin for begin, end in filter(None, asked)) < 100_000
    monkeypatch.setattr(partial, "REQUEST_BYTES", 1 << 16)
    dataset = opened(server, tmp_path / "far")
    dataset.read_batch(range(0, 2480, 300))
    assert ranges(server) == [None]


class Damage:
    """Answers to ranges that have other bytes: the first one of each range, or all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, once: bool) -> None:
        self._right, self._kind, self._once = partial.read_range, kind, once
        self._known: set[tuple[str, int]] = set()
        monkeypatch.setattr(partial, "read_range", self)

    def __call__(self, cache: Any, entry: Any, begin: int, end: int) -> tuple[bytes, str | None]:
        content, version = self._right(cache, entry, begin, end)
        place = entry.raw.basename, begin
        if self._once and place in self._known:
            return content, version
        self._known.add(place)
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        return {"short": content[:-1], "zeros": bytes(len(content)), "flipped": flipped}[self._kind], version


@pytest.mark.parametrize("kind", ["short", "zeros", "flipped"])
def test_a_damaged_answer_is_asked_for_again_and_then_the_shard(
    server: WebServer, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with monkeypatch.context() as patch:
        Damage(patch, kind, once=True)
        dataset = opened(server, tmp_path / "once")
        assert dataset[7] == rows[7]
        assert None not in ranges(server)
    with monkeypatch.context() as patch:
        Damage(patch, kind, once=False)
        dataset = opened(server, tmp_path / "always")
        assert dataset[7] == rows[7]
        assert ranges(server).count(None) == 1


def test_a_shard_that_was_replaced_is_not_mixed_with_the_new_one(server: WebServer, tmp_path: Path) -> None:
    dataset = opened(server, tmp_path)
    assert dataset[1]["id"] == 1
    name = "/frames/shard.00000.mds.seekable.zstd"
    server.objects[name] = server.objects[name][:-100] + bytes(100)
    with pytest.raises(DigestError, match=r"shard\.00000\.mds\.seekable\.zstd: the index promises"):
        dataset[1]


def test_frames_of_other_samples_are_found_once_the_shard_is_here(server: WebServer, tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "d", columns={"x": "bytes"}, compression="zstd:seekable") as writer:
        for number in range(6):
            writer.write({"x": np.random.default_rng(number).bytes(20_000)})
    server.objects.update({f"/d/{path.name}": path.read_bytes() for path in (tmp_path / "d").iterdir()})
    name = "/d/shard.00000.mds.seekable.zstd"
    right = server.objects[name]
    raw = bytearray(decompress("zstd", right, 1 << 20, name))
    raw[-30_000] ^= 1  # of sample 4
    server.objects[name] = compress("zstd:seekable", raw)
    assert len(server.objects[name]) == len(right)
    dataset = StreamingDataset(remote=f"{server.url}/d", local=tmp_path / "cache")
    assert dataset[4]["x"] != np.random.default_rng(4).bytes(20_000)
    server.objects[name] = right
    dataset.reader.fetch(np.array([0]))
    with pytest.raises(StoreError, match=r"verified file has other bytes.* samples \[4\]"):
        dataset[5]
