"""A writer puts a quick hash of every file into the index by default; readers check the files that they fetch by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="StreamingDataset needs torch: uv sync")

from lightning_stream import StreamingDataset
from lightning_stream.convert import convert
from lightning_stream.errors import DigestError
from lightning_stream.formats.hashing import digest_file
from lightning_stream.formats.index import Index
from lightning_stream.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter

ROWS = [{"id": k, "text": f"row {k}"} for k in range(40)]
COLUMNS = {"id": "int", "text": "str"}
WRITERS: dict[str, Callable[..., Any]] = {
    "mds": MDSWriter, "json": JSONWriter, "csv": CSVWriter, "tsv": TSVWriter, "xsv": partial(XSVWriter, separator="|")
}  # fmt: skip


def write(form: str, out: Path, **options: Any) -> Index:
    with WRITERS[form](out=out, columns=COLUMNS, size_limit=300, **options) as writer:
        for row in ROWS:
            writer.write(row)
    return Index.from_file(out / "index.json")


def held(index: Index) -> set[tuple[str, ...]]:
    """The names of the hashes that the index has, over all files."""
    entries = [index.entry(k) for k in range(len(index))]
    pairs = [file for entry in entries for pair in entry.files for file in pair if file is not None]
    return {tuple(file.hashes) for file in pairs} | {entry.schema.hashes for entry in entries}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("form", sorted(WRITERS))
def test_every_writer_hashes_every_file_by_default(tmp_path: Path, form: str, compression: str | None) -> None:
    index = write(form, tmp_path / "default", compression=compression)
    assert held(index) == {("xxh3_64",)}
    entry = index.entry(0)
    for raw, packed in entry.files:
        stored = packed or raw
        assert digest_file(["xxh3_64"], tmp_path / "default" / stored.basename) == stored.hashes
    assert held(write(form, tmp_path / "same", compression=compression, hashes=None)) == {("xxh3_64",)}
    assert held(write(form, tmp_path / "none", compression=compression, hashes=[])) == {()}
    assert held(write(form, tmp_path / "other", compression=compression, hashes=["sha1"])) == {("sha1",)}


def test_convert_hashes_every_file_by_default(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,text\n" + "".join(f"{k},row {k}\n" for k in range(9)))
    for name, options, wanted in (
        ("a", {}, ("xxh3_64",)),
        ("b", {"hashes": None}, ("xxh3_64",)),
        ("c", {"hashes": []}, ()),
    ):
        convert(tmp_path / "rows.csv", tmp_path / name, num_workers=1, **options)
        assert held(Index.from_file(tmp_path / name / "index.json")) == {wanted}


def test_a_flipped_byte_is_found_as_a_shard_is_fetched_with_no_argument_anywhere(tmp_path: Path) -> None:
    index = write("mds", tmp_path / "remote")
    path = tmp_path / "remote" / index.entry(0).raw.basename
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    dataset = StreamingDataset(remote=tmp_path / "remote", local=tmp_path / "cache")
    with pytest.raises(DigestError, match="the index promises xxh3_64"):
        dataset[0]
    assert dataset[len(ROWS) - 1] == ROWS[-1]


def test_the_default_hash_asks_for_no_more_threads_and_memory_than_none(tmp_path: Path) -> None:
    def threads(hashes: list[str] | None) -> int:
        pool = MDSWriter(out=tmp_path, hashes=hashes)._pipeline._pool
        assert pool is not None
        return pool._max_workers

    assert threads(None) == threads([]) == 1
    assert threads(["sha1"]) >= 1
