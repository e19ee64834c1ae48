"""Rows are made MDS shards once, where they are fetched, whatever their dataset's place; nothing else of it changes."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import LocalDataset, StreamingDataset
from lightning_stream.cache import ShardCache
from lightning_stream.errors import DigestError, FormatError
from lightning_stream.formats import rows
from lightning_stream.stores.local import LocalStore
from lightning_stream.writer import CSVWriter, JSONWriter

COLUMNS = {"n": "int", "part": "float", "text": "str"}
NUM_SAMPLES = 300


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "home"))


def row(number: int) -> dict[str, Any]:
    return {"n": number, "part": number / 4, "text": f"row {number:04}"}


def write(out: Path, kind: type[Any] = JSONWriter, first: int = 0, **options: Any) -> Path:
    with kind(out=out, columns=COLUMNS, size_limit=4000, **options) as writer:
        for number in range(NUM_SAMPLES):
            writer.write(row(first + number))
    return out


def opened(remote: Path, local: Path | None, **options: Any) -> StreamingDataset:
    return StreamingDataset(remote=str(remote), local=None if local is None else str(local), batch_size=4, **options)


def content(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("is_in_place", [True, False])
def test_samples_and_chosen_columns_are_those_written(
    tmp_path: Path, compression: str | None, is_in_place: bool
) -> None:
    remote = write(tmp_path / "remote", compression=compression)
    before, local = content(remote), None if is_in_place else tmp_path / "local"
    data = opened(remote, local, validate_hash="xxh3_64")
    assert [data[k] for k in (299, 0, 17)] == [row(299), row(0), row(17)]
    chosen = opened(remote, local, columns=["text", "n"])
    assert chosen[5] == {"n": 5, "text": "row 0005"}
    batch = chosen.reader.batch(np.array([7, 200]))
    assert batch["n"].tolist() == [7, 200]
    assert content(remote) == before
    folder = tmp_path / "home" if local is None else local
    assert {"".join(path.suffixes[-2:]) for path in folder.rglob("shard*")} >= {".json.mds"}
    assert not list(folder.rglob("*.meta"))


def test_a_dataset_that_is_written_again_in_place_is_read_anew_without_hashes(tmp_path: Path) -> None:
    folder = write(tmp_path / "rows", hashes=[])
    assert LocalDataset(folder)[3] == row(3)
    for path in folder.iterdir():
        path.unlink()
    write(folder, first=500, hashes=[])
    assert LocalDataset(folder)[3] == row(503)


def test_processes_of_a_node_make_each_shard_once(tmp_path: Path) -> None:
    remote, log = write(tmp_path / "remote"), tmp_path / "log"

    def work() -> None:
        make = rows.write_as_mds

        def logged(entry: Any, *options: Any) -> None:
            make(entry, *options)
            with log.open("a") as out:
                out.write(f"{entry.raw.basename}\n")

        from lightning_stream.cache import shards

        vars(shards)["write_as_mds"] = logged
        data = opened(remote, tmp_path / "local")
        assert [data[k] for k in range(NUM_SAMPLES)] == [row(k) for k in range(NUM_SAMPLES)]

    processes = [multiprocessing.get_context("fork").Process(target=work) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    made = log.read_text().split()
    assert len(made) == len(set(made)) > 2


def test_rows_that_a_former_release_has_fetched_are_not_fetched_again(tmp_path: Path) -> None:
    remote, local = write(tmp_path / "remote"), tmp_path / "local"
    ShardCache(LocalStore(remote), local).index()
    for path in [*remote.glob("*.json"), *remote.glob("*.meta")]:
        if path.name != "index.json":
            path.rename(local / path.name)
    assert opened(remote, local)[250] == row(250)


def test_a_file_that_does_not_match_its_hash_is_refused_before_it_is_made(tmp_path: Path) -> None:
    remote = write(tmp_path / "remote")
    path = remote / "shard.00000.json"
    path.write_bytes(path.read_bytes().replace(b"row 0000", b"row 9999"))
    with pytest.raises(DigestError, match=r"shard\.00000\.json"):
        opened(remote, tmp_path / "local")[0]


SPOILED = [(JSONWriter, b'"n": 7,', b'"n": x,', "JSONDecodeError"), (CSVWriter, b"7,1.75", b"x,1.75", "ValueError")]


def spoil(remote: Path, old: bytes, new: bytes) -> str:
    """Make sample 7 no row, as its writer would have written it."""
    path = next(remote.glob("shard.00000.*[nv]"))
    path.write_bytes(path.read_bytes().replace(old, new))
    return path.name


@pytest.mark.parametrize("columns", [None, ["n"], ["text"]])
@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize(("kind", "old", "new", "cause"), SPOILED)
def test_a_malformed_row_is_an_error_of_that_sample_alone(
    tmp_path: Path, kind: type[Any], old: bytes, new: bytes, cause: str, is_in_place: bool, columns: list[str] | None
) -> None:
    remote = write(tmp_path / "remote", kind, hashes=[])
    name = spoil(remote, old, new)
    data = opened(remote, None if is_in_place else tmp_path / "local", columns=columns)
    says = rf"{name}\.mds, sample 7, column '\(the row\)': .*{cause}"
    for _ in range(2):
        with pytest.raises(FormatError, match=says):
            data[7]
        with pytest.raises(FormatError, match=says):
            data.reader.batch(np.array([3, 7]))
    others = [k for k in range(NUM_SAMPLES) if k != 7]
    expected = [{key: row(k)[key] for key in columns or COLUMNS} for k in others]
    assert [data[k] for k in others] == expected
    batch = data.reader.batch(np.array(others))
    assert {key: list(values) for key, values in batch.items()} == {
        key: [sample[key] for sample in expected] for key in expected[0]
    }


@pytest.mark.parametrize(("kind", "old", "new", "cause"), SPOILED)
def test_the_policy_for_bad_samples_replaces_a_malformed_row_alone(
    tmp_path: Path, kind: type[Any], old: bytes, new: bytes, cause: str
) -> None:
    remote = write(tmp_path / "remote", kind, hashes=[])
    spoil(remote, old, new)
    for policy in ({}, {"on_bad": {"shard": "substitute"}}):
        with pytest.raises(FormatError, match="sample 7"):
            list(opened(remote, tmp_path / "local", **policy))
    data = opened(remote, tmp_path / "local", on_bad={"sample": "substitute"})
    seen = [sample["n"] for sample in data]
    assert len(seen) == NUM_SAMPLES
    assert {*range(NUM_SAMPLES)} - {*seen} == {7}
    (line,) = map(json.loads, (tmp_path / "local" / "quarantine.jsonl").read_text().splitlines())
    assert line["sample"] == 7
    assert cause in line["reason"]


MALFORMED = {
    b"": "JSONDecodeError",
    b"[1, 2]": "TypeError: a row must be a JSON object",
    b'{"n": 1, "part": 1.0}': "KeyError: 'text'",
    b'{"n": 1.5, "part": 1.0, "text": ""}': "TypeError",
    b'{"n": 1, "part": "1", "text": ""}': "TypeError: not a number",
    b'{"n": 1, "part": 1, "text": 3}': "TypeError: not a str",
    b'{"n": 36893488147419103232, "part": 1, "text": ""}': "ValueError: a number of 66 bits is no int64",
    b'{"n": 1, "part": 1%s, "text": ""}' % (b"0" * 400): "OverflowError",
    b"[" * 100_000: "RecursionError",
    b'{"n": 1, "part": 1, "text": "\xff"}': "UnicodeDecodeError",
}


def test_whatever_is_wrong_with_rows_is_said_of_each_of_them(tmp_path: Path) -> None:
    lines = [json.dumps(row(0)).encode(), *MALFORMED, json.dumps(row(9)).encode()]
    with JSONWriter(out=tmp_path / "rows", columns=COLUMNS, hashes=[]) as writer:
        for line in lines:
            writer.write({"n": 0, "part": 0.0, "text": "x" * len(line)})
    path = tmp_path / "rows" / "shard.00000.json"
    padded = zip(lines, path.read_bytes().splitlines(), strict=True)
    path.write_bytes(b"".join(line.ljust(len(stored)) + b"\n" for line, stored in padded))
    data = LocalDataset(tmp_path / "rows")
    assert (data[0], data[len(lines) - 1]) == (row(0), row(9))
    for sample, cause in enumerate(MALFORMED.values(), 1):
        with pytest.raises(FormatError, match=rf"sample {sample}, column '\(the row\)': .*{cause}"):
            data[sample]


def test_a_column_of_any_name_is_read(tmp_path: Path) -> None:
    names = ["(the row)", "(the row) ", "fault"]
    with JSONWriter(out=tmp_path / "rows", columns=dict.fromkeys(names, "str")) as writer:
        writer.write({name: name for name in names})
    data = LocalDataset(tmp_path / "rows")
    assert data[0] == {name: name for name in names}
    assert data.reader.batch(np.array([0])) == {name: [name] for name in names}


def test_a_cache_limit_counts_what_is_made_and_evicts_it(tmp_path: Path) -> None:
    remote, local = write(tmp_path / "remote", compression="zstd"), tmp_path / "local"
    cache = ShardCache(LocalStore(remote), local)
    index = cache.index()
    for number in range(len(index)):
        cache.lease(index.entry(number)).close()
    assert cache.present(index.entry(0))
    assert cache.evict(index.entry(0))
    assert not cache.present(index.entry(0))
    assert not [path for path in local.rglob("shard.00000*") if path.stat().st_size]
    data = opened(remote, tmp_path / "small", cache_limit=20_000)
    assert [data[k] for k in range(NUM_SAMPLES)] == [row(k) for k in range(NUM_SAMPLES)]
    assert sum(path.stat().st_size for path in (tmp_path / "small").glob("*.mds")) <= 20_000


def test_a_made_shard_that_is_damaged_is_made_again(tmp_path: Path) -> None:
    remote, local = write(tmp_path / "remote"), tmp_path / "local"
    assert opened(remote, local)[0] == row(0)
    path = local / "shard.00000.json.mds"
    os.truncate(path, 100)
    assert opened(remote, local)[0] == row(0)
    assert json.loads((remote / "index.json").read_text())["shards"][0]["raw_data"]["basename"] == "shard.00000.json"
