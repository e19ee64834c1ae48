"""A file that is another one than when its index was made is an error: never old and new rows in one dataset."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
import pyarrow.parquet as pq  # noqa: E402

from lightning_stream import Stream, StreamingDataset  # noqa: E402
from lightning_stream.convert import convert  # noqa: E402
from lightning_stream.errors import FormatError  # noqa: E402

ROWS = 100


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def parquet(path: Path, numbers: np.ndarray[Any, Any]) -> None:
    pq.write_table(pa.table({"v": numbers}), path, row_group_size=20, compression="none", use_dictionary=False)


def arrow(path: Path, numbers: np.ndarray[Any, Any]) -> None:
    rows = pa.table({"v": numbers})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as out:
        out.write_table(rows, max_chunksize=20)


def lines(path: Path, numbers: np.ndarray[Any, Any]) -> None:
    path.write_text("".join(json.dumps({"v": int(v)}) + "\n" for v in numbers))


def tar(path: Path, numbers: np.ndarray[Any, Any]) -> None:
    with tarfile.open(path, "w") as out:
        for k, v in enumerate(numbers):
            member = tarfile.TarInfo(f"{k:04}.cls")
            member.size = 8
            out.addfile(member, io.BytesIO(b"%8d" % v))


def npy(path: Path, numbers: np.ndarray[Any, Any]) -> None:
    np.save(path, numbers)


WRITERS: dict[str, Callable[..., None]] = {"parquet": parquet, "arrow": arrow, "jsonl": lines, "tar": tar, "npy": npy}
OLD, NEW = np.arange(ROWS) + 1000, np.arange(ROWS) + 5000


def replaced(path: Path, write: Callable[..., None]) -> None:
    """Put another file of the same size and time in its place."""
    known, other = path.stat(), path.with_name(f"new-{path.name}")
    write(other, NEW)
    assert other.stat().st_size == known.st_size
    os.utime(other, ns=(known.st_atime_ns, known.st_mtime_ns))
    other.replace(path)


def rewritten(path: Path, write: Callable[..., None]) -> None:
    """Write other bytes into it, and restore its time."""
    known = path.stat()
    write(path.with_name("new"), NEW) if path.suffix != ".npy" else npy(path.with_name("new.npy"), NEW)
    path.write_bytes(next(path.parent.glob("new*")).read_bytes())
    next(path.parent.glob("new*")).unlink()
    os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))


@pytest.mark.parametrize("change", [replaced, rewritten])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_of_the_same_size_and_time_is_another_one(
    kind: str, change: Callable[..., None], tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for k in range(2):
        WRITERS[kind](folder / f"{k}.{kind}", OLD)
    dataset = StreamingDataset(remote=str(folder), predownload=1)
    assert dataset.size == 2 * ROWS
    change(folder / f"1.{kind}", WRITERS[kind])
    with pytest.raises(FormatError, match="was changed"):
        [dataset[k] for k in range(2 * ROWS)]
    again = StreamingDataset(remote=str(folder))  # its index is made again
    values = [next(int(value) for name, value in again[k].items() if name != "__key__") for k in range(2 * ROWS)]
    assert values == [*OLD, *NEW]


def test_a_file_of_a_folder_that_is_replaced_is_read_again_by_the_next_run(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for k in range(3):
        (folder / f"{k}.mp3").write_bytes(b"old %d" % k)
    dataset = StreamingDataset(remote=str(folder))
    assert [dataset[k]["data"] for k in range(3)] == [b"old 0", b"old 1", b"old 2"]
    known = (folder / "1.mp3").stat()
    (folder / "1.mp3").write_bytes(b"new 1")
    os.utime(folder / "1.mp3", ns=(known.st_atime_ns, known.st_mtime_ns))
    again = StreamingDataset(remote=str(folder))
    assert [again[k]["data"] for k in range(3)] == [b"old 0", b"new 1", b"old 2"]


def test_an_index_of_an_older_version_is_accepted_as_it_is(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    parquet(folder / "a.parquet", OLD)
    before = StreamingDataset(streams=[Stream(str(folder), local=str(cache))])
    assert before.size == ROWS
    (path,) = cache.rglob("index.json")
    index = json.loads(path.read_text())
    assert index.pop("marks")
    for shard in index["shards"]:
        assert shard["raw_data"].pop("mark")
    path.write_text(json.dumps(index))
    (folder / "a.parquet").chmod(0o600)
    dataset = StreamingDataset(streams=[Stream(str(folder), local=str(cache))])
    assert [int(dataset[k]["v"]) for k in range(ROWS)] == [*OLD]
    assert path.read_text() == json.dumps(index)


def test_a_mark_is_no_part_of_what_a_state_compares(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    parquet(folder / "a.parquet", OLD)
    digests = []
    for mode in (0o600, 0o644):
        (folder / "a.parquet").chmod(mode)
        dataset = StreamingDataset(remote=str(folder))
        digests.append(dataset._streaming_source.reader.indexes[0].digest)
        assert int(dataset[0]["v"]) == OLD[0]
    assert digests[0] == digests[1]


def test_a_mark_of_another_machine_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    parquet(folder / "a.parquet", OLD)
    assert StreamingDataset(remote=str(folder)).size == ROWS
    (folder / "a.parquet").chmod(0o600)
    name = os.uname()
    monkeypatch.setattr(os, "uname", lambda: type(name)(("Linux", "another", *name[2:])))
    dataset = StreamingDataset(remote=str(folder))
    assert [int(dataset[k]["v"]) for k in range(ROWS)] == [*OLD]


def test_a_conversion_whose_source_is_replaced_publishes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    lines(folder / "a.jsonl", OLD)
    calls = []

    def change(row: dict[str, Any]) -> dict[str, Any]:
        if not calls:
            calls.append(row)
            replaced(folder / "a.jsonl", lines)
        return row

    with pytest.raises(FormatError, match="modified or removed"):
        convert(folder, tmp_path / "out", num_workers=1, transform=change, columns={"v": "int64"})
    assert not (tmp_path / "out" / "index.json").exists()
