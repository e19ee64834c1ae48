"""Datasets of every kind of index and change, written in a fixed way. Importable, and a command that packs them:

    PYTHONPATH=PACKAGE:tests python tests/support/released.py tests/writer/golden_9621097.zip [DATASET ...]

That file has what the package of commit 9621097 wrote so, and what it read of it; golden_e46f85b2.zip has the datasets
with deletions of commit e46f85b2, which lists other hashes of the file of deleted samples.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np

from lightning_stream import MDSWriter, StreamingDataset, merge_index, version_log, versions
from lightning_stream.stores import LocalStore
from lightning_stream.version_log import read_version
from lightning_stream.writer import CSVWriter, JSONWriter, TSVWriter, XSVWriter

_OF_THE_RUN = re.compile(rb'"(time|writer)":\s*"[^"]*"')  # when a change was made, and by which writer


def rows(first: int, count: int) -> list[dict[str, Any]]:
    """Samples with a text of another length each."""
    return [{"name": "ä" * (k % 5), "x": k, "y": k / 4} for k in range(first, first + count)]


def _of_name(name: str) -> int:
    return len(name)


def _of_both(sample: dict[str, Any]) -> int:
    return len(sample["name"]) + int(sample["x"])


LENGTHS: dict[str, Callable[[Any], int]] = {"name": _of_name, "both länge/2": _of_both}


def _mds(out: Path) -> None:
    columns = {
        "image": "bytes", "label": "uint8", "name": "str", "shaped": "ndarray:int16:2,3", "text": "json",
        "tokens": "ndarray:uint16", "y": "float64",
    }  # fmt: skip
    with MDSWriter(out=out, columns=columns, size_limit=700, hashes=["sha1", "xxh64"]) as writer:
        for k in range(12):
            shaped = np.full((2, 3), k, np.int16)
            row = {"image": b"\xff\xd8\xff%d" % k, "label": k, "name": f"é{k}", "shaped": shaped, "text": {"k": [k]}}
            writer.write({**row, "tokens": np.arange(k, dtype=np.uint16), "y": k / 8})


def _compressed(out: Path) -> None:
    with MDSWriter(out=out, columns={"name": "str", "x": "int"}, compression="zstd:3", size_limit=200) as writer:
        for k in range(12):
            writer.write({"name": "abc" * k, "x": k})


def _unlimited(out: Path) -> None:
    with MDSWriter(out=out, columns={"x": "int32"}, size_limit=None, hashes=[]) as writer:
        writer.write_batch({"x": np.arange(20, dtype=np.int32)})


def _rows_by(kind: Any, **how: Any) -> Callable[[Path], None]:
    def write(out: Path) -> None:
        columns = {"name": "str", "x": "int", "y": "float"}
        with kind(out=out, columns=columns, size_limit=200, hashes=["md5"], **how) as writer:
            for row in rows(0, 12):
                writer.write({**row, "name": f"r{row['x']}"})

    return write


def _with_lengths(out: Path, first: int, count: int, **how: Any) -> None:
    columns = {"name": "str", "x": "int", "y": "float64"}
    with MDSWriter(out=out, columns=columns, size_limit=300, lengths=LENGTHS, hashes=["sha1"], **how) as writer:
        for row in rows(first, count):
            writer.write(row)


def _merged(out: Path) -> None:
    for part in range(2):
        _with_lengths(out / f"part{part}", 10 * part, 10)
    merge_index(out)


def _changed(out: Path) -> None:
    _with_lengths(out, 0, 10)
    _with_lengths(out, 10, 7, append=True, message="more ö", key="k-1")
    versions.delete_rows(out, [3, 12], message="bad", key="k-2")
    versions.add_column(out, "score", "float32", np.arange(15, dtype=np.float32))
    versions.add_column(out, "twice", "int", lambda row: 2 * row["x"], message="2 x")
    versions.delete_rows(out, where=lambda row: row["x"] == 5)


def _compacted(out: Path) -> None:
    _changed(out)
    versions.compact(out, message="smaller")
    columns = {"name": "str", "score": "float32", "twice": "int", "x": "int", "y": "float64"}
    with MDSWriter(out=out, columns=columns, lengths=LENGTHS, hashes=["sha1"], append=True) as writer:
        for row in rows(17, 3):
            writer.write({**row, "score": np.float32(row["x"]), "twice": 2 * row["x"]})


def _unpublished(out: Path) -> None:
    """As of an index over 1 MiB, which is not published by each commit."""
    limit, version_log._PUBLISHED_BYTES = version_log._PUBLISHED_BYTES, 0
    try:
        _changed(out)
    finally:
        version_log._PUBLISHED_BYTES = limit


DATASETS: dict[str, Callable[[Path], None]] = {
    "mds": _mds,
    "compressed": _compressed,
    "unlimited": _unlimited,
    "json": _rows_by(JSONWriter),
    "csv": _rows_by(CSVWriter),
    "tsv": _rows_by(TSVWriter),
    "xsv": _rows_by(XSVWriter, separator=" | "),
    "merged": _merged,
    "changed": _changed,
    "compacted": _compacted,
    "unpublished": _unpublished,
}


def write(name: str, folder: Path) -> None:
    """Write a dataset; the random bytes that are in the names of its files are zeros."""
    digits = mock.patch("secrets.token_hex", lambda count: os.urandom(count).hex())  # which uses the other one
    with digits, mock.patch("secrets.token_bytes", bytes):
        DATASETS[name](folder)


def files_of(folder: Path, *, masked: bool = True) -> dict[str, bytes]:
    """All files of a dataset by name, by default without what differs between two runs."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    files = {name: (folder / name).read_bytes() for name in names if not name.startswith(".")}
    return {name: _OF_THE_RUN.sub(b"", data) for name, data in files.items()} if masked else files


def read(folder: Path) -> list[list[Any]]:
    """The digest and the number of shards of each version of a dataset, with all samples and lengths."""
    found = []
    store = LocalStore(folder)
    for entry in versions.log(folder):
        dataset = StreamingDataset(local=folder, version=entry.number)
        samples = [_plain(dataset[k]) for k in range(len(dataset))]
        index = read_version(store, entry.number).index
        lengths = {name: dataset.lengths(name).tolist() for name in sorted(index.lengths)}
        found.append([index.digest, len(index), index.raw_bytes.tolist(), index.num_deleted, samples, lengths])
    return found


def _plain(sample: dict[str, Any]) -> str:
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in sample.items()}
    return repr(sorted(values.items()))


def pack(to: Path, names: Iterable[str]) -> None:
    """Write datasets, and what is read of them, into one file."""
    with tempfile.TemporaryDirectory() as scratch, ZipFile(to, "w", ZIP_DEFLATED) as archive:
        for name in names:
            folder = Path(scratch) / name
            write(name, folder)
            for file, data in files_of(folder, masked=False).items():
                archive.writestr(f"{name}/{file}", data)
            archive.writestr(f"{name}.json", json.dumps(read(folder)))


if __name__ == "__main__":
    pack(Path(sys.argv[1]), sys.argv[2:] or DATASETS)
