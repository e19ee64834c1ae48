"""Damaged, mixed and unusual files of every format: each is read right, or is an error with the file and the remedy."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
import pyarrow.feather as feather  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from lightning_stream import MDSWriter, Stream, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.convert import convert  # noqa: E402
from lightning_stream.errors import FormatError, NotFoundError, SnapshotMismatch  # noqa: E402
from lightning_stream.writer import JSONWriter  # noqa: E402

ROWS = pa.table({"id": range(6), "text": list("abcdef")})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def parquet(path: Path, rows: Any = ROWS, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, **options)


def shards(folder: Path) -> JSONWriter:
    """A writer of two shards of JSON lines; one is put."""
    writer = JSONWriter(out=folder, columns={"id": "int"}, size_limit=40, max_workers=0)
    writer.write_batch({"id": range(6)})
    return writer


def stream(path: Path, rows: Any = ROWS, batch: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as out:
        out.write_table(rows, max_chunksize=batch)


def saved(folder: Path, **state: Any) -> None:
    """As Hugging Face's ``save_to_disk`` writes."""
    stream(folder / "data-00000-of-00001.arrow")
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], **state}
    (folder / "state.json").write_text(json.dumps(state))


def tar(path: Path, files: dict[str, bytes]) -> bytes:
    with tarfile.open(path, "w") as out:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return path.read_bytes()


def array(value: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, value)
    return out.getvalue()


def read(uri: Path | str, **options: Any) -> list[dict[str, Any]]:
    dataset = StreamingDataset(streams=[Stream(remote=str(uri), **options)])
    return [dataset[k] for k in range(dataset.size)]


def cut(path: Path, keep: slice) -> None:
    path.write_bytes(path.read_bytes()[keep])


SAMPLES = {f"{k}.{ending}": b"7" for k in range(5) for ending in ("cls", "txt")}
NULLS = {"_indices_data_files": [{"filename": "indices.arrow"}]}


def of_messages(data: bytes) -> int:
    """Where the last record batch of a stream begins: the end mark of 8 bytes is behind it."""
    at, begins = 0, []
    while int.from_bytes(data[at + 4 : at + 8], "little"):
        begins.append(at)
        message = pa.ipc.read_message(pa.py_buffer(data[at:]))
        at += len(message.serialize())
    return begins[-1]


def of_stream(folder: Path) -> None:
    stream(folder / "b.arrow")
    cut(folder / "b.arrow", slice(of_messages((folder / "b.arrow").read_bytes())))


def signed(path: Path) -> None:
    """As Parquet's encryption leaves a file whose footer stays readable: behind it are 28 bytes of its signature."""
    parquet(path)
    data = path.read_bytes()
    num_bytes = int.from_bytes(data[-8:-4], "little")
    path.write_bytes(data[:-8] + bytes(28) + (num_bytes + 28).to_bytes(4, "little") + b"PAR1")


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "parquet that is cut off": (
        lambda folder: (parquet(folder / "b.parquet"), cut(folder / "b.parquet", slice(300))),
        r"b.parquet cannot be read: .* cut off: fetch it again",
    ),
    "empty parquet": (lambda folder: (folder / "b.parquet").touch(), r"b.parquet cannot be read.*0 bytes.*fetch it"),
    "encrypted parquet": (
        lambda folder: (folder / "b.parquet").write_bytes(b"PARE" + bytes(200) + b"\x08\0\0\0PARE"),
        r"b.parquet cannot be read: .*encrypt.* Write it without encryption",
    ),
    "encrypted parquet with a plain footer": (  # pyarrow aborts where the metadata of its columns is asked for
        lambda folder: signed(folder / "b.parquet"),
        r"b.parquet cannot be read: .*encrypt.* Write it without encryption",
    ),
    "parquet without a column": (
        lambda folder: parquet(folder / "b.parquet", ROWS.select(["id"])),
        r"b.parquet: all files must have the columns of the first; .* lacks text",
    ),
    "parquet with another type": (
        lambda folder: parquet(folder / "b.parquet", pa.table({"id": ["x"], "text": ["y"]})),
        r"b.parquet: .*column 'id': Arrow's string is not written as 'int64'. Cast the column",
    ),
    "parquet with numbers that do not fit": (
        lambda folder: parquet(folder / "b.parquet", pa.table({"id": [2.5], "text": ["y"]})),
        r"column 'id' of .*b.parquet does not: no type holds all numbers of int64 and double exactly. Cast it, or name",
    ),
    "two formats": (
        lambda folder: (folder / "b.jsonl").write_text('{"id": 1}\n'),
        r"must be of one format; .*bad holds 1 parquet, 1 jsonl. Name one: format= of a stream",
    ),
    "a name with a line end": (
        lambda folder: parquet(folder / "b\nc.parquet"),
        r"names of files must have no control character, backslash or drive; rename .*b\\nc.parquet",
    ),
    "splits": (
        lambda folder: [parquet(folder / "data" / f"{split}-0.parquet") for split in ("train", "test")],
        r"a stream must be one split; .* holds",
    ),
}
ALONE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "csv": (lambda folder: (folder / "a.csv").write_text("a\n1\n"), r"a.csv: files of the format csv cannot be read"),
    "arrow that is cut between batches": (of_stream, r"b.arrow must be an Arrow file or stream; .*cut off: copy it"),
    "a feather file without its end": (
        lambda folder: (feather.write_feather(ROWS, str(folder / "a.feather")), cut(folder / "a.feather", slice(-9))),
        r"a.feather must be .*; found no mark at its end. It may be cut off: copy it again",
    ),
    "feather of version 1": (
        lambda folder: (folder / "a.feather").write_bytes(b"FEA1" + bytes(100)),
        r"a.feather is a file of Feather version 1. Write it again as version 2",
    ),
    "a saved dataset without a file": (
        lambda folder: saved(folder, _data_files=[{"filename": "gone.arrow"}]),
        r"state.json names gone.arrow, which is not there. Copy the dataset again",
    ),
    "a saved dataset with chosen rows": (lambda folder: saved(folder, **NULLS), r"state.json .*Call flatten_indices"),
    "a saved dict of datasets": (
        lambda folder: [saved(folder / split) for split in ("train", "test")],
        r"a stream must be one split; .* holds test, train. Pass split=",
    ),
    "a damaged state": (
        lambda folder: (saved(folder), (folder / "state.json").write_text("{")),
        r"state.json cannot be read: .* fetch it again",
    ),
    "a tar that ends after a sample": (
        lambda folder: (folder / "a.tar").write_bytes(tar(folder / "a.tar", SAMPLES)[:4096]),
        r"a.tar must be a whole tar; it has no end mark.*cut off",
    ),
    "a tar that ends within a sample": (
        lambda folder: (folder / "a.tar").write_bytes(tar(folder / "a.tar", SAMPLES)[:5120]),
        r"a.tar must be a whole tar; .*cut off",
    ),
    "two tars in one": (
        lambda folder: (folder / "a.tar").write_bytes(2 * tar(folder / "a.tar", SAMPLES)),
        r"a.tar holds bytes behind the end mark",
    ),
    "a tar with an array of objects": (
        lambda folder: tar(folder / "a.tar", {"0.npy": array(np.array([{}], object))}),
        r"a.tar: a file 'npy' must be a plain array: Object arrays cannot be loaded",
    ),
    "a tar with a wrong class": (
        lambda folder: tar(folder / "a.tar", {"0.cls": b"1", "1.cls": b"cat"}),
        r"a.tar: sample '1': invalid literal.*or pass columns= without it or as 'bytes'",
    ),
    "a tar with a class whose digits are grouped": (
        lambda folder: tar(folder / "a.tar", {"0.cls": b"1", "1.cls": b"2021_03"}),
        r"a.tar: sample '1': b'2021_03' is no number.*or pass columns= without it or as 'bytes'",
    ),
    "a tar with a number that no float holds": (
        lambda folder: tar(folder / "a.tar", {"0.json": b"[1e300]", "1.json": b"[1e400]"}),
        r"a.tar: sample '1': 1e400 is beyond the largest float64",
    ),
    "a compressed tar": (
        lambda folder: (folder / "a.tar.gz").write_bytes(gzip.compress(tar(folder / "a", SAMPLES))),
        r"a.tar.gz: a compressed tar can only be read from its beginning. Convert it",
    ),
    "an array of objects": (
        lambda folder: (folder / "a.npy").write_bytes(array(np.array([{}] * 2000, object))),
        r"a.npy cannot be read: .*would run code",
    ),
    "a pickle that is named as an array": (
        lambda folder: (folder / "a.npy").write_bytes(pickle.dumps(Path("x" * 9000))),
        r"a.npy cannot be read: ",
    ),
    "a pickle that is named as arrays": (
        lambda folder: (folder / "a.npz").write_bytes(pickle.dumps({"x": 1})),
        r"a.npz cannot be read: .*would run code",
    ),
    "an array that is cut off": (
        lambda folder: (folder / "a.npy").write_bytes(array(np.zeros(5000))[:9000]),
        r"a.npy cannot be read: .* fetch it again",
    ),
    "arrays that are cut off": (
        lambda folder: (np.savez(folder / "a.npz", x=np.arange(3000)), cut(folder / "a.npz", slice(5000))),
        r"a.npz cannot be read: .*File is not a zip file. .* fetch it again",
    ),
    "lines that are cut off": (
        lambda folder: (folder / "a.jsonl").write_text('{"a": 1}\n{"a":'),
        r"a.jsonl, lines from byte 0: line 2 of them is not JSON",
    ),
    "compressed lines that are cut off": (
        lambda folder: (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 999)[:-20]),
        r"a.jsonl.gz cannot be read: .* fetch it again",
    ),
    "lines with nulls": (
        lambda folder: (folder / "a.jsonl").write_text('{"a": 1}\n{"a": null}\n'),
        r"a.jsonl .*only json columns may have nulls; found a: 1. Pass columns= .*'json'",
    ),
    "a chunk of LitData without its index": (
        lambda folder: (folder / "chunk-0-0.bin").write_bytes(bytes(100)),
        r"chunk-0-0.bin must lie beside LitData's index.json. Copy that, too",
    ),
    "an index of LitData without its chunks": (
        lambda folder: (folder / "index.json").write_text('{"chunks": [], "config": {}}'),
        r"holds no file of a known format; it holds no files",
    ),
    "a dataset whose writer has not ended": (
        lambda folder: shards(folder).flush_shard(),
        r"bad holds shard.00000.json, which is read by an index.json of .*bad: a writer puts it last",
    ),
    "partitions that are not merged": (
        lambda folder: (shards(folder / "0").finish(), shards(folder / "1").finish()),
        r"bad holds 0/shard.00000.json, which is read by .* and merge_index that of partitions",
    ),
    "unknown files": (
        lambda folder: (folder / "a.xyz").touch(),
        r"holds no file of a known format; it holds 1 \*.xyz. Name one: .*'files' takes any files",
    ),
}


@pytest.mark.parametrize("name", [*BAD, *ALONE])
def test_bad_input_is_an_error_with_the_file_and_the_remedy(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    if name in BAD and name != "splits":
        parquet(folder / "a.parquet")
    write, message = {**BAD, **ALONE}[name]
    write(folder)
    with pytest.raises((FormatError, NotFoundError, ValueError), match=f"(?s){message}") as error:
        read(folder)
    assert not re.search(r"[^.]\.\.[^.]", str(error.value))


def json_lines(folder: Path) -> None:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"id": 0}\n{"id": 1}'))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(b'\n{"id": 2}\r\n'))
    (folder / "c.json").write_text(json.dumps([{"id": 3}, {"id": 4}]))
    (folder / "d.ndjson").write_bytes(b'\xef\xbb\xbf{"id": 5}')


def hidden(folder: Path) -> None:
    for name in ("_SUCCESS", "_metadata", ".a.parquet.crc", "_temporary/b.parquet"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    with pq.ParquetWriter(folder / "a.parquet", ROWS.schema) as out:
        for part in (ROWS[:0], ROWS, ROWS[:0]):
            out.write_table(part)
    parquet(folder / "b.parquet", ROWS[:0])


GOOD: dict[str, Callable[[Path], Any]] = {
    "json lines of every kind": json_lines,
    "hidden files, empty row groups and empty files": hidden,
    "columns in another order": lambda folder: (
        parquet(folder / "a.parquet", ROWS[:3]),
        parquet(folder / "b.parquet", ROWS[3:].select(["text", "id"])),
    ),
    "names that are not plain, in folders": lambda folder: (
        parquet(folder / "1 ü%20" / "ä b.PARQUET", ROWS[:3]),
        parquet(folder / "2" / "3" / "c.pq", ROWS[3:]),
    ),
    "replaced dictionaries": lambda folder: stream(
        folder / "a.arrow", ROWS.set_column(1, "text", pa.chunked_array([ROWS["text"].chunk(0).dictionary_encode()]))
    ),
    "arrays of two files": lambda folder: np.savez(folder / "a.npz", id=np.arange(6), other=np.ones((6, 2))),
    "compressed arrays of many rows": lambda folder: np.savez_compressed(folder / "a.npz", id=np.arange(6)),
    "arrays by column": lambda folder: np.save(folder / "a.npy", np.array([(k,) for k in range(6)], [("id", "i4")])),
}


@pytest.mark.parametrize("name", GOOD)
def test_unusual_files_are_read_in_order(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "good"
    folder.mkdir()
    GOOD[name](folder)
    assert [int(row["id"]) for row in read(folder)] == [*range(6)]


def test_nulls_are_known_of_columns_with_dots(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", pa.table({"a.b": [1, None], "a": [{"b": None}, {"b": 2}]}))
    assert read(tmp_path / "a.parquet") == [{"a.b": 1, "a": {"b": None}}, {"a.b": None, "a": {"b": 2}}]


def test_columns_in_the_names_of_folders_are_read(tmp_path: Path) -> None:
    for number, folder in enumerate(["year=2024/kind=a%20b", "year=2025/kind=__HIVE_DEFAULT_PARTITION__"]):
        parquet(tmp_path / "table" / folder / "part-0.parquet", ROWS.slice(3 * number, 3))
    rows = read(tmp_path / "table")
    assert [(int(row["id"]), int(row["year"]), row["kind"]) for row in rows[2:4]] == [(2, 2024, "a b"), (3, 2025, None)]
    assert read(tmp_path / "table", columns=["year"])[5] == {"year": 2025}
    assert read(tmp_path / "table", columns={"year": "str"})[5] == {"year": "2025"}
    assert read(tmp_path / "table", columns={"year": "float32"})[5] == {"year": 2025.0}
    assert read(tmp_path / "table" / "year=2025", columns=["id", "kind"])[0] == {"id": 3, "kind": None}
    parquet(tmp_path / "table" / "part-9.parquet")
    with pytest.raises(ValueError, match=r"part-9.parquet: .*'kind' is not a column"):
        read(tmp_path / "table", columns=["kind"])


def test_columns_that_only_later_files_have_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parquet(tmp_path / "table" / "a.parquet", ROWS.select(["id"]))
    parquet(tmp_path / "table" / "b.parquet")
    with caplog.at_level(logging.WARNING):
        assert [set(row) for row in read(tmp_path / "table")] == [{"id"}] * 12
        assert "b.parquet has a column 'text', which the first file lacks: it is not read" in caplog.text
        caplog.clear()
        assert len(read(tmp_path / "table", columns=["id"])) == 12
        assert not caplog.text, "the columns were named"


def test_keys_of_json_that_only_unsampled_rows_have_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_stream.sources.lines.SAMPLED_ROWS", 2)
    (tmp_path / "a.jsonl").write_text('{"id": 0}\n{"id": 1}\n{"id": 2, "late": 1}\n')
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path / "a.jsonl") == [{"id": k} for k in range(3)]
        assert "a.jsonl (part 0 to 41) has 'late', which the rows that were looked at lack: not read" in caplog.text
        caplog.clear()
        assert len(read(tmp_path / "a.jsonl", columns=["id"])) == 3
        assert not caplog.text, "the columns were named"


def test_truth_values_among_numbers_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_stream.sources.lines.SAMPLED_ROWS", 1)
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 5, "b": [3, 4], "c": [1.5], "d": 1}\n{"a": true, "b": [2, true], "c": [false], "d": 0}\n')
    with caplog.at_level(logging.WARNING):
        assert [row["a"] for row in read(path)] == [5, 1]
        assert "a.jsonl (part 0 to 92) has truth values among the numbers of 'a', 'b', 'c': read as 1" in caplog.text
        caplog.clear()
        assert len(read(path, columns={"a": "int64", "b": "ndarray:int64"})) == 2
        assert not caplog.text, "the encodings were named"


def test_arrays_are_cut_into_shards_without_reading_all_of_them_for_each(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", id=np.arange(5000))
    assert [int(row["id"]) for row in read(tmp_path / "a.npz")] == [*range(5000)]
    dataset = StreamingDataset(remote=str(tmp_path / "a.npz"))
    assert dataset.size == 5000


def test_files_are_named_by_paths_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}").mkdir()
        tar(tmp_path / f"{number:02}" / "a{}.tar", {f"{number}.id": b"%d" % number})
    monkeypatch.chdir(tmp_path)

    def ids(remote: str) -> list[int]:
        return [int(row["id"]) for row in read(remote)]

    assert ids("{08..11}/*.tar") == ids(str(tmp_path / "{08..11}" / "a?}.tar")) == [8, 9, 10, 11]
    assert ids("./03/a{}.tar") == ids(f"file://{tmp_path}/03/a{{}}.tar") == [3]
    monkeypatch.chdir(tmp_path / "05")
    assert ids("a{}.tar") == ids("*.tar") == ids(".") == [5]
    with pytest.raises(NotFoundError, match=r"holds no files named {1\.\.2}\.tar"):
        ids("{1..2}.tar")
    for number in (8, 9, 11):
        tar(tmp_path / f"b-{number:02}.tar", {f"{number}.id": b"%d" % number})
    monkeypatch.chdir(tmp_path)
    assert ids("b-{08..09}.tar") == [8, 9]
    with pytest.raises(NotFoundError, match=r"lacks 2 of b-{08\.\.12}\.tar, the first is b-10\.tar"):
        ids("b-{08..12}.tar")
    assert ids("{00..999999999999}/*.tar") == [*range(12)], "a range is not written out"
    with pytest.raises(NotFoundError, match=r"lacks 99,999,999,997 of .*, the first is b-10\.tar"):
        ids("b-{08..100000000007}.tar")
    with pytest.raises(NotFoundError, match="holds no files named"):
        ids("b-{11..08}.tar")


def test_any_files_are_samples(tmp_path: Path) -> None:
    for name, data in {"cat/0.wav": b"RIFF", "cat/1.wav": b"", "dog/ü 2.wav": b"x"}.items():
        (tmp_path / "sounds" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sounds" / name).write_bytes(data)
    rows = read(tmp_path / "sounds")
    found = [(row["data"], int(row["label"]), row["name"]) for row in rows]
    assert found == [(b"RIFF", 0, "cat/0.wav"), (b"", 0, "cat/1.wav"), (b"x", 1, "dog/ü 2.wav")]
    (tmp_path / "sounds" / "cat" / "about.xyz").write_bytes(b"?")
    assert len(read(tmp_path / "sounds")) == 3
    assert len(read(tmp_path / "sounds", format="files")) == 4
    assert len(read(tmp_path / "sounds" / "**" / "*.xyz", format="files")) == 1
    dataset = StreamingDataset(remote=str(tmp_path / "sounds"))
    assert dataset.size == 3
    (tmp_path / "sounds" / "dog" / "ü 2.wav").write_bytes(b"y")
    (tmp_path / "cache").rename(tmp_path / "former")
    with pytest.raises(FormatError, match=r"ü 2.wav: a file must stay as it was"):
        dataset[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": "id"}, r"columns must be a list of names, or a mapping .*; got 'id'"),
        ({"columns": []}, r"columns must be a list of names"),
        ({"columns": {"id"}}, r"columns must be a list of names"),
        ({"columns": ["nope"]}, r"a.parquet: .*'nope' is not a column; the columns are id, text"),
        ({"columns": {"id": "int99"}}, r"a.parquet: .*column 'id': no encoding 'int99'"),
        ({"version": 3}, r"table is no Delta table: it has no _delta_log/. Pass no version="),
        ({"version": "abcdef12"}, r"version= opens versions of MDS datasets and Delta tables"),
        ({"format": "orc"}, r"a format must be one of arrow, .*; got 'orc'"),
        ({"format": "arrow"}, r"holds no file of the format 'arrow'; it holds 1 parquet"),
        ({"split": "train"}, r"train holds no files"),
    ],
)
def test_wrong_arguments_are_errors_that_state_the_choices(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    parquet(tmp_path / "table" / "a.parquet")
    with pytest.raises((ValueError, NotFoundError), match=message):
        read(tmp_path / "table", **options)


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl", "tar", "npy", "wav"])
def test_a_changed_file_is_noticed_while_it_is_read_and_named_when_a_run_resumes(ending: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        writers: dict[str, Callable[[Path], Any]] = {
            "parquet": parquet,
            "arrow": stream,
            "jsonl": lambda path: path.write_text('{"id": 1}\n' * 6),
            "tar": lambda path: tar(path, SAMPLES),
            "npy": lambda path: np.save(path, np.arange(6)),
            "wav": lambda path: path.write_bytes(b"RIFF"),
        }
        writers[ending](folder / f"{number}.{ending}")
    loader = StreamingDataLoader(StreamingDataset(remote=str(folder), shuffle=True), global_batch_size=1)
    next(iter(loader))
    state, fresh = loader.state_dict(), StreamingDataset(remote=str(folder), local=str(tmp_path / "fresh"))
    assert fresh.size >= 3
    os.utime(folder / f"2.{ending}", ns=(1, 1))  # as many bytes as before
    with pytest.raises(FormatError, match=rf"2.{ending}: a file must stay as it was .* was changed"):
        fresh[fresh.size - 1]
    changed = StreamingDataLoader(StreamingDataset(remote=str(folder), shuffle=True), global_batch_size=1)
    with pytest.raises(SnapshotMismatch, match=rf"Changed files: 2.{ending}\."):
        changed.load_state_dict(state)
    (folder / f"1.{ending}").unlink()
    (folder / f"3.{ending}").write_bytes((folder / f"0.{ending}").read_bytes())
    changed = StreamingDataLoader(StreamingDataset(remote=str(folder), shuffle=True), global_batch_size=1)
    message = rf"Changed files: 2.{ending}. New files: 3.{ending}. Files that are gone: 1.{ending}\."
    with pytest.raises(SnapshotMismatch, match=message):
        changed.load_state_dict(state)


def test_a_run_continues_over_the_former_files_where_files_were_added(tmp_path: Path) -> None:
    for number in range(2):
        parquet(tmp_path / "table" / f"{number}.parquet", ROWS.slice(3 * number, 3))
    loader = StreamingDataLoader(StreamingDataset(remote=str(tmp_path / "table"), shuffle=True), global_batch_size=1)
    seen = [int(batch["id"][0]) for _, batch in zip(range(2), loader, strict=False)]
    state = loader.state_dict()
    parquet(tmp_path / "table" / "2.parquet")
    newest = StreamingDataset(remote=str(tmp_path / "table"), shuffle=True)
    with pytest.raises(SnapshotMismatch, match=r"version='[0-9a-f]{16}' for .* New files: 2.parquet\."):
        StreamingDataLoader(newest, global_batch_size=1).load_state_dict(state)
    (version,) = state["snapshot"]["versions"]
    former = StreamingDataset(remote=str(tmp_path / "table"), shuffle=True, version=version)
    loader = StreamingDataLoader(former, global_batch_size=1)
    loader.load_state_dict(state)
    assert sorted(seen + [int(batch["id"][0]) for batch in loader]) == [*range(6)]


def test_text_of_parquet_that_is_not_utf_8_is_not_converted(tmp_path: Path) -> None:
    text = pa.array([b"plain", b"caf\xe9"]).cast(pa.string(), safe=False)
    parquet(tmp_path / "rows" / "a.parquet", pa.table({"id": [0, 1], "text": text}))
    with pytest.raises(ValueError, match=r"column 'text': text must be UTF-8; .* Cast it to binary"):
        convert(tmp_path / "rows", tmp_path / "out", num_workers=1)
    assert not (tmp_path / "out" / "index.json").exists()
    with pytest.raises(ValueError, match="column 'text': text must be UTF-8"):
        MDSWriter(out=tmp_path / "out2", columns={"text": "str"}).write_batch({"text": text})


def test_lists_of_json_lines_with_numbers_of_more_than_64_bits_are_json(tmp_path: Path) -> None:
    rows = [{"x": [1, 2]}, {"x": [2**64, -1]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = StreamingDataset(str(tmp_path / "rows.jsonl"))
    assert [dataset[k] for k in range(2)] == rows
