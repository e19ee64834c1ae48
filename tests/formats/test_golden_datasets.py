"""Data that mosaicml-streaming wrote is read exactly, and writing the same samples gives its bytes again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_stream.formats.codecs import decompress_file
from lightning_stream.formats.hashing import digest_file
from lightning_stream.formats.index import Index
from lightning_stream.formats.model import ShardEntry
from lightning_stream.formats.shard import Shard, open_shard
from lightning_stream.writer import MDSWriter

FOLDERS = ("mds", "compress", "json", "csv", "tsv", "xsv")
IMAGE_COLUMNS = ("jpeg", "png")


def unpacked(entry: ShardEntry, folder: Path, scratch: Path) -> Path:
    """The folder that holds the shard's raw files."""
    for raw, packed in entry.files:
        if packed is not None:
            assert entry.schema.compression is not None
            target = scratch / raw.basename
            target.parent.mkdir(parents=True, exist_ok=True)
            decompress_file(entry.schema.compression, folder / packed.basename, target, raw.num_bytes)
            assert digest_file(packed.hashes, folder / packed.basename) == packed.hashes
    return folder if entry.compressed is None else scratch


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other) and one.flags.writeable
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one != one


def datasets(golden: Path) -> list[Path]:
    return [
        *(path.parent for name in FOLDERS for path in sorted(golden.glob(f"{name}/*/index.json"))),
        golden / "hashed",
        golden / "merged",
    ]


def open_all(folder: Path, scratch: Path) -> list[Shard]:
    index = Index.from_file(folder / "index.json")
    entries = [index.entry(k) for k in range(len(index))]
    return [open_shard(entry, unpacked(entry, folder, scratch), allow_unsafe_types=True) for entry in entries]


def test_samples_and_columns_of_every_golden_dataset_agree(shared_golden: Path, tmp_path: Path) -> None:
    for number, folder in enumerate(datasets(shared_golden)):
        for shard in open_all(folder, tmp_path / str(number)):
            columns = shard.columns(np.arange(shard.num_samples))
            samples = [shard.sample(k) for k in range(shard.num_samples)]
            assert len(samples) > 0
            for name, column in columns.items():
                assert len(column) == len(samples)
                assert all(same(sample[name], value) for sample, value in zip(samples, column, strict=True)), (
                    folder,
                    name,
                )


@pytest.mark.parametrize("form", ["json", "csv", "tsv", "xsv"])
def test_rows_of_the_golden_row_formats_are_the_rows_written(shared_golden: Path, tmp_path: Path, form: str) -> None:
    for path in sorted(shared_golden.glob(f"{form}/*/index.json")):
        shards = open_all(path.parent, tmp_path / path.parent.name)
        rows = [shard.sample(k) for shard in shards for k in range(shard.num_samples)]
        assert rows == [{"id": i, "name": f"row-{i:04d}", "x": i * 0.5} for i in range(64)]


def test_writing_the_same_samples_gives_the_same_bytes_and_index(shared_golden: Path, tmp_path: Path) -> None:
    folders = [
        path.parent for name in ("mds", "compress") for path in sorted(shared_golden.glob(f"{name}/*/index.json"))
    ]
    for number, folder in enumerate([*folders, shared_golden / "hashed", shared_golden / "merged" / "part0"]):
        index = Index.from_file(folder / "index.json")
        schema, out = index.schemas[0], tmp_path / f"out{number}"
        as_stored = {
            name: bytes for name, encoding in schema.columns.items() if any(i in encoding for i in IMAGE_COLUMNS)
        }
        with MDSWriter(
            out=out,
            columns=schema.columns,
            compression=schema.compression,
            hashes=schema.hashes,
            size_limit=schema.size_limit,
        ) as writer:
            for k in range(len(index)):
                entry = index.entry(k)
                shard = open_shard(
                    entry, unpacked(entry, folder, tmp_path / str(number)), allow_unsafe_types=True, decoders=as_stored
                )
                for i in range(shard.num_samples):
                    writer.write(shard.sample(i))
        written = Index.from_file(out / "index.json")
        assert [written.entry(k).raw for k in range(len(written))] == [index.entry(k).raw for k in range(len(index))]
        if schema.compression is None:
            assert written.data == (folder / "index.json").read_bytes()
            for path in folder.glob("*.mds"):
                assert (out / path.name).read_bytes() == path.read_bytes()
