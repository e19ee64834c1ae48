"""The file of a seekable shard, as the published format has it, and what the index says of it."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import lightning_stream
from lightning_stream import versions
from lightning_stream.errors import FormatError
from lightning_stream.formats.codecs import check_compression, decompress
from lightning_stream.formats.index import Index
from lightning_stream.formats.model import to_text
from lightning_stream.formats.seekable import Frames, samples_per_frame
from lightning_stream.writer import JSONWriter, MDSWriter


def write(folder: Path, compression: str | None, rows: int = 1000, **options: Any) -> dict[str, Any]:
    columns = {"id": "int", "text": "str"}
    with MDSWriter(out=folder, columns=columns, compression=compression, **options) as writer:
        for number in range(rows):
            writer.write({"id": number, "text": f"row {number} " * (number % 60)})
    shards = json.loads((folder / "index.json").read_bytes())["shards"]
    return dict(shards[-1])


def frames_of(content: bytes) -> list[tuple[int, bytes]]:
    """The raw size and the bytes of each frame, by the table of version 0.1.0 of the format."""
    num_frames, flags, magic = struct.unpack("<IBI", content[-9:])
    assert (flags, magic) == (0, 0x8F92EAB1)
    begin = len(content) - 9 - 8 * num_frames - 8
    assert struct.unpack_from("<II", content, begin) == (0x184D2A5E, 8 * num_frames + 9)
    sizes = np.frombuffer(content, "<u4", 2 * num_frames, begin + 8).reshape(-1, 2)
    edges = [0, *sizes[:, 0].cumsum().tolist()]
    assert edges[-1] == begin
    return [(int(raw), content[first:end]) for (first, end), (_, raw) in zip(pairwise(edges), sizes, strict=True)]


@pytest.mark.parametrize(("compression", "written"), [("zstd:seekable", "zstd"), ("zstd:seekable:9", "zstd:9")])
def test_a_file_has_independent_frames_and_the_published_table(tmp_path: Path, compression: str, written: str) -> None:
    shard = write(tmp_path / "frames", compression)
    raw = write(tmp_path / "raw", written)
    assert shard["compression"] == written
    assert shard["zip_data"]["basename"] == "shard.00000.mds.seekable.zstd"
    assert shard["raw_data"] == raw["raw_data"]  # its hashes too
    frames = frames_of((tmp_path / "frames" / shard["zip_data"]["basename"]).read_bytes())
    parts = [zstandard.ZstdDecompressor().decompress(frame) for _, frame in frames]
    assert [len(part) for part in parts] == [size for size, _ in frames]
    content = b"".join(parts)
    offsets = np.frombuffer(content, "<u4", 1001, 4)
    per_frame = samples_per_frame(1000, len(content))
    assert 256 > per_frame > 1 or per_frame == 256
    assert np.cumsum([len(part) for part in parts[:-1]]).tolist() == offsets[:-1:per_frame].tolist()


def test_the_number_of_samples_in_a_frame_stays_as_files_were_written() -> None:
    sizes = {
        (1000, 10_000): 256,
        (1000, 10_000_000): 13,
        (10, 1 << 30): 1,
        (21119, 67107992): 41,
        (1, 1): 256,
        (0, 8): 1,
    }
    assert {given: samples_per_frame(*given) for given in sizes} == sizes


@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 513])
@pytest.mark.parametrize("columns", [{"x": "ndarray:uint8:3"}, {"x": "bytes"}, {"a": "str", "b": "int", "c": "bytes"}])
def test_every_sample_of_every_frame_is_found(tmp_path: Path, rows: int, columns: dict[str, str]) -> None:
    values = {"ndarray:uint8:3": np.uint8([1, 2, 3]), "bytes": b"12", "str": "é", "int": 3}
    with MDSWriter(out=tmp_path, columns=columns, compression="zstd:seekable") as writer:
        for _ in range(rows):
            writer.write({name: values[kind] for name, kind in columns.items()})
    entry = Index.from_file(tmp_path / "index.json").entry(0)
    assert entry.compression == "zstd:seekable"
    assert entry.compressed is not None
    content = (tmp_path / entry.compressed.basename).read_bytes()
    frames = Frames(entry)
    assert frames.of(np.arange(rows)).tolist() == list(range(1, frames.num_frames))
    offsets = frames.offsets(content[slice(*frames.table)])
    found = dict[int, bytes]()
    for number in range(1, frames.num_frames):
        packed = content[offsets[number] : offsets[number + 1]]
        found |= frames.samples(number, decompress("zstd:seekable", packed, entry.raw.num_bytes, "here"))
    whole = decompress("zstd", content, entry.raw.num_bytes, "here")
    edges = np.frombuffer(whole, "<u4", rows + 1, 4).tolist()
    assert [found[k] for k in range(rows)] == [whole[begin:end] for begin, end in pairwise(edges)]
    part = decompress("zstd", content[offsets[1] : offsets[2]], entry.raw.num_bytes, "here")
    for wrong in (part[:-1], part + b"\0", b"", bytes([255]) * len(part)):
        if columns == {"x": "ndarray:uint8:3"} and len(wrong) == len(part):
            continue  # any bytes are such samples
        with pytest.raises(FormatError, match="the samples of frame 1 do not fill it"):
            dict(frames.samples(1, wrong))
    for table in (b"", content[-9:], bytes(frames.table[1] - frames.table[0])):
        with pytest.raises(FormatError, match="its table does not fit the index"):
            frames.offsets(table)
    with pytest.raises(FormatError, match="at most 7 bytes when decompressed"):
        decompress("zstd", content, 7, "here")


def test_an_entry_is_written_as_it_was_read_and_changes_keep_the_frames(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="StreamingDataset needs torch: uv sync")
    write(tmp_path, "zstd:seekable:5", size_limit=20_000)
    index = Index.from_file(tmp_path / "index.json")
    text = json.loads((tmp_path / "index.json").read_bytes())["shards"][0]
    assert json.loads(to_text(index.entry(0))) == text
    assert {schema.compression for schema in index.schemas} == {"zstd:seekable:5"}
    versions.add_column(tmp_path, "twice", "int", lambda sample: 2 * sample["id"])
    versions.delete_rows(tmp_path, [0])
    versions.compact(tmp_path)
    entry = Index.from_file(tmp_path / "index.json").entry(0)
    assert entry.compression == "zstd:seekable:5"
    dataset = lightning_stream.StreamingDataset(local=tmp_path)
    assert [dataset[k]["twice"] for k in range(999)] == [2 * k for k in range(1, 1000)]


def test_rows_and_unknown_levels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'zstd:seekable' is for MDS shards alone. Use MDSWriter, or 'zstd'"):
        JSONWriter(out=tmp_path / "rows", columns={"id": "int"}, compression="zstd:seekable")
    for name in ("zstd:seekable:0", "zstd:seekable:23", "zstd:seekable:", "zstd:seekable:x"):
        with pytest.raises(ValueError, match="known are zstd:seekable:1 to zstd:seekable:22"):
            check_compression(name)
    with pytest.raises(ValueError, match="compression must be one of"):
        check_compression("seekable")
