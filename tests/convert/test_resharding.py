"""`convert` of a dataset with an index.json: the same samples, byte for byte, in other shards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import JSONWriter, MDSWriter, StreamingDataset, versions
from lightning_stream.convert import convert, read_manifest
from lightning_stream.errors import AccessError
from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import open_shard
from lightning_stream.stores import LocalStore, ObjectStream, RetryingStore
from lightning_stream.version_log import read_index

COLUMNS = {"id": "int", "text": "str", "x": "ndarray", "fixed": "ndarray:float32:2", "any": "json", "blob": "pkl"}


def write(out: Path, first: int = 0, count: int = 200, **options: Any) -> Path:
    with MDSWriter(out=str(out), columns=COLUMNS, size_limit=4096, lengths={"text": len}, **options) as writer:
        for number in range(first, first + count):
            x = np.arange(number % 7, dtype=np.int16)
            fixed = np.array([number, np.nan], np.float32)
            text = "ä" * (number % 9)
            sample = {
                "id": number,
                "text": text,
                "x": x,
                "fixed": fixed,
                "any": {"b": [number], "a": None},
                "blob": {number},
            }
            writer.write(sample)
    return out


def stored(folder: Path) -> list[dict[str, bytes]]:
    """The bytes of every value, in the order of the samples."""
    index, found = read_index(LocalStore(folder)), []
    for number in range(index.num_shards):
        shard = open_shard(index.entry(number), folder, allow_unsafe_types=True)
        found += [bytes(shard.stored(row)) for row in range(shard.num_samples)]
    return found


def order(remote: Path, **options: Any) -> list[int]:
    dataset = StreamingDataset(remote=str(remote), shuffle=True, batch_size=8, columns=["id"], **options)
    return [int(sample["id"]) for sample in dataset]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_other_shards_hold_the_same_bytes_in_the_same_order(tmp_path: Path, compression: str | None) -> None:
    data = write(tmp_path / "data", compression=compression)
    done = convert(data, tmp_path / "out", size_limit="1kb", compression=None, hashes=["sha1"], num_workers=2)
    assert done.num_shards[""] > 3 * len(read_index(LocalStore(data)))
    if compression is None:
        assert stored(tmp_path / "out") == stored(data)
    lengths = [StreamingDataset(remote=str(one)).lengths("text").tolist() for one in (data, tmp_path / "out")]
    assert lengths[0] == lengths[1]


def test_a_training_run_continues_over_shards_of_another_compression(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="a loader needs torch: uv sync")
    from lightning_stream import StreamingDataLoader

    data = write(tmp_path / "data")
    done = convert(data, tmp_path / "out", compression="zstd:3", num_workers=2)
    assert done.keeps_order
    assert order(tmp_path / "out") == order(data)

    def loader(remote: Path) -> StreamingDataLoader:
        return StreamingDataLoader(StreamingDataset(remote=str(remote), shuffle=True, columns=["id"]), batch_size=16)

    first = loader(data)
    batches = iter(first)
    for _ in range(4):
        next(batches)
    second = loader(tmp_path / "out")
    second.load_state_dict(first.state_dict())
    assert (
        torch.cat([batch["id"] for batch in second]).tolist() == torch.cat([batch["id"] for batch in batches]).tolist()
    )


def test_images_keep_their_bytes_and_classes_their_names(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="images need Pillow: uv sync")
    files = tmp_path / "photos"
    for number in range(12):
        (files / f"class{number % 3}").mkdir(parents=True, exist_ok=True)
        image.effect_noise((8 + number, 9), 90).save(files / f"class{number % 3}" / f"{number}.png")
    convert(files, tmp_path / "data", val_fraction=0.3, num_workers=1)
    done = convert(tmp_path / "data", tmp_path / "out", size_limit="1kb", num_workers=1)
    assert done.num_samples == read_manifest(tmp_path / "data").num_samples
    assert done.classes == read_manifest(tmp_path / "data").classes
    for split in ("train", "val"):
        assert stored(tmp_path / "out" / split) == stored(tmp_path / "data" / split)


def test_columns_are_chosen_and_stored_in_another_encoding(tmp_path: Path) -> None:
    data = write(tmp_path / "data", count=20)
    convert(data, tmp_path / "out", columns={"id": "float64", "text": "json"}, num_workers=1)
    found = [dict(sample) for sample in StreamingDataset(remote=str(tmp_path / "out"))]
    assert [(int(one["id"]), one["text"]) for one in found] == [(n, "ä" * (n % 9)) for n in range(20)]
    with pytest.raises(ValueError, match="has no column nope"):
        convert(data, tmp_path / "other", columns={"nope": "int"}, num_workers=1)


def test_a_transform_gets_samples_and_a_pickled_value_only_as_it_is(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "data"), columns={"id": "int", "text": "str"}) as writer:
        for number in range(10):
            writer.write({"id": number, "text": str(number)})
    convert(tmp_path / "data", tmp_path / "out", transform=doubled, num_workers=1)
    assert [sample["both"] for sample in StreamingDataset(remote=str(tmp_path / "out"))] == [
        json.dumps([number, f"{number}"]) for number in range(10)
    ]
    with pytest.raises(ValueError, match="allow_unsafe_types"):
        convert(write(tmp_path / "pickled", count=3), tmp_path / "no", columns={"blob": "json"}, num_workers=1)


def doubled(sample: dict[str, Any]) -> Mapping[str, Any]:
    return {"both": json.dumps([sample["id"], sample["text"]])}


def test_deleted_samples_are_gone_and_added_columns_are_plain(tmp_path: Path) -> None:
    data = write(tmp_path / "data", count=60)
    versions.add_column(data, "twice", "int", lambda sample: 2 * sample["id"], allow_unsafe_types=True)
    first = read_index(LocalStore(data)).digest
    versions.delete_rows(data, [0, 7, 59])
    done = convert(data, tmp_path / "out", compression=None, num_workers=1)
    assert not done.keeps_order
    kept = [number for number in range(60) if number not in (0, 7, 59)]
    found = StreamingDataset(remote=str(tmp_path / "out"), columns=["id", "twice", "text"])
    assert [(int(sample["id"]), int(sample["twice"])) for sample in found] == [(n, 2 * n) for n in kept]
    assert found.lengths("text").tolist() == [n % 9 for n in kept]
    before = convert(data, tmp_path / "before", source_options={"version": first[:12]}, num_workers=1)
    assert (before.total, before.keeps_order) == (60, True)
    with pytest.raises(FileExistsError, match="another conversion"):
        convert(data, tmp_path / "before", num_workers=1)


def test_row_formats_become_mds(tmp_path: Path) -> None:
    with JSONWriter(
        out=str(tmp_path / "data"), columns={"id": "int", "x": "float", "t": "str"}, size_limit=512
    ) as writer:
        for number in range(50):
            writer.write({"id": number, "x": number / 4, "t": f"t{number}"})
    done = convert(tmp_path / "data", tmp_path / "out", num_workers=1)
    assert done.columns == {"id": "int", "x": "float64", "t": "str"}
    assert order(tmp_path / "out") == order_of_rows(tmp_path / "data")


def order_of_rows(remote: Path) -> list[int]:
    return [int(sample["id"]) for sample in StreamingDataset(remote=str(remote), shuffle=True, batch_size=8)]


def test_a_dataset_is_not_written_onto_itself(tmp_path: Path) -> None:
    data = write(tmp_path / "data", count=5)
    with pytest.raises(ValueError, match="Name another"):
        convert(data, data, overwrite=True, num_workers=1)
    assert len(stored(data)) == 5


def test_shards_with_different_columns_must_be_chosen(tmp_path: Path) -> None:
    for name, kind in (("a", "int32"), ("b", "int64")):
        with MDSWriter(out=str(tmp_path / name), columns={"id": kind}) as writer:
            writer.write({"id": 3})
    shards = [json.loads((tmp_path / name / "index.json").read_text())["shards"][0] for name in "ab"]
    for name, shard in zip("ab", shards, strict=True):
        shard["raw_data"]["basename"] = f"{name}/{shard['raw_data']['basename']}"
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    with pytest.raises(ValueError, match="different columns"):
        convert(tmp_path, tmp_path.with_name("out"), num_workers=1)
    convert(tmp_path, tmp_path.with_name("out"), columns={"id": "int64"}, num_workers=1)
    assert [int(sample["id"]) for sample in StreamingDataset(remote=str(tmp_path.with_name("out")))] == [3, 3]


@pytest.mark.parametrize("compression", [None, "zstd:seekable"])
def test_a_conversion_that_was_killed_continues(tmp_path: Path, compression: str | None) -> None:
    data = write(tmp_path / "data", count=400)
    code = f"""
import os
from lightning_stream.convert import convert, task
put, count = task.PartitionTask.run, 0
def run(self, partition):
    if partition.partition_id == 2:
        os._exit(9)
    return put(self, partition)
task.PartitionTask.run = run
convert({str(data)!r}, {str(tmp_path / "out")!r}, partition_bytes=4096, compression={compression!r}, num_workers=1)
"""
    path = os.pathsep.join(sys.path)
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False).returncode
        == 9
    )
    assert not (tmp_path / "out" / "index.json").exists()
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.mds*")}
    assert written
    convert(data, tmp_path / "out", partition_bytes=4096, compression=compression, num_workers=1)
    if compression is not None:
        convert(tmp_path / "out", tmp_path / "raw", compression=None, num_workers=1)
    assert stored(tmp_path / ("out" if compression is None else "raw")) == stored(data)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in written.items())


@pytest.mark.parametrize("folder", ["mds/all_columns", "compress/gz", "json/plain", "csv/plain"])
def test_what_mosaicml_streaming_wrote_is_read(shared_golden: Path, tmp_path: Path, folder: str) -> None:
    data = shared_golden / folder
    index = Index((data / "index.json").read_bytes(), str(data))
    done = convert(data, tmp_path / "out", compression=None, num_workers=1)
    assert (done.total, done.keeps_order) == (index.num_samples, True)
    if folder == "mds/all_columns":
        assert stored(tmp_path / "out") == stored(data)


def test_a_source_without_hashes_that_was_written_again_is_converted_again(tmp_path: Path) -> None:
    for number in (1, 2):
        with MDSWriter(out=str(tmp_path / "data"), columns={"id": "int"}, hashes=[], overwrite=True) as writer:
            writer.write({"id": number})
        convert(tmp_path / "data", tmp_path / f"out{number}", num_workers=1)
    with pytest.raises(FileExistsError, match="other options"):
        convert(tmp_path / "data", tmp_path / "out1", num_workers=1)
    assert [int(sample["id"]) for sample in StreamingDataset(remote=str(tmp_path / "out2"))] == [2]


@pytest.mark.parametrize("refused", ["val", "set"])
def test_a_dataset_that_must_not_be_read_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    read = LocalStore.read
    for folder in ("set", "set/train") if refused == "set" else ("set/train", "set/val"):
        write(tmp_path / folder, count=3)

    def refusing(store: LocalStore, name: str, *span: Any) -> bytes:
        if store.folder.name == refused:
            raise AccessError("403")
        return read(store, name, *span)

    monkeypatch.setattr(LocalStore, "read", refusing)
    with pytest.raises(AccessError, match="403"):
        convert(tmp_path / "set", tmp_path / "out")


def test_what_is_converted_or_computed_comes_from_verified_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges of a shard have no hash: a byte that a proxy changed in one would get a right hash in the new shards."""
    url, bytes_of, count = "memory://convert-ranges", np.random.default_rng(0).bytes, 1200
    values = [bytes_of(10_000) for _ in range(count)]
    with MDSWriter(out=url, columns={"x": "bytes"}, size_limit=None) as writer:
        writer.write_batch({"x": values})
    versions.delete_rows(url, [*range(100), *range(130, count)])
    whole = RetryingStore.open

    def changed(self: RetryingStore, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        stream = whole(self, name, begin, end)
        if not name.endswith(".mds") or end is None or end - begin < 5000:
            return stream
        data = bytearray(b"".join(stream))
        data[-1] ^= 1
        return ObjectStream(iter([bytes(data)]), len(data), stream.version, tag=stream.tag)

    monkeypatch.setattr(RetryingStore, "open", changed)
    wanted = values[100:130]
    convert(url, tmp_path / "out", num_workers=1)
    assert [sample["x"] for sample in StreamingDataset(remote=tmp_path / "out", shuffle=False)] == wanted
    versions.add_column(url, "last", "bytes", lambda sample: sample["x"][-1:])
    found = StreamingDataset(remote=url, local=tmp_path / "cache", shuffle=False, validate_hash="xxh3_64")
    assert [sample["last"] for sample in found] == [value[-1:] for value in wanted]
