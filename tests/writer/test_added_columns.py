"""Columns that are added to a dataset: no shard is changed, and each sample has the value that it was given."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="StreamingDataset needs torch: uv sync")

from servers.s3 import bucket_at, options_of
from servers.web import WebServer

from lightning_stream import Stream, StreamingDataLoader, StreamingDataset, add_lengths, merge_index, versions
from lightning_stream.cli import main
from lightning_stream.errors import ConflictError, FormatError, NotFoundError, SnapshotMismatch
from lightning_stream.formats.index import Index
from lightning_stream.reading import partial
from lightning_stream.writer import MDSWriter

COLUMNS = {"id": "int", "text": "str"}


def write(out: Any, first: int, count: int = 60, columns: dict[str, str] = COLUMNS, **how: Any) -> None:
    with MDSWriter(out=out, columns=columns, size_limit=400, **how) as writer:
        for number in range(first, first + count):
            sample = {"id": number, "text": "x" * (number % 7), "half": number / 2}
            writer.write({name: sample[name] for name in columns})


def half(sample: dict[str, Any]) -> float:
    return float(sample["id"] / 2)


def check(dataset: StreamingDataset, wanted: list[int], **loading: Any) -> None:
    """Every way to read gives each of these samples its own values."""
    samples = dataset[:]
    assert [sample["id"] for sample in samples] == wanted
    assert all(sample["half"] == sample["id"] / 2 for sample in samples)
    assert all(list(sample) == ["half", "id", "text"] for sample in samples)
    seen = []
    for batch in StreamingDataLoader(dataset, 7, tail="exact", **loading):
        assert batch["half"].tolist() == [number / 2 for number in batch["id"].tolist()]
        assert [len(text) for text in batch["text"]] == [number % 7 for number in batch["id"].tolist()]
        seen += batch["id"].tolist()
    assert sorted(seen) == wanted


def serve(server: WebServer, folder: Path) -> None:
    server.objects.clear()
    files = (path for path in folder.rglob("*") if path.is_file())
    server.objects.update({f"/set/{path.relative_to(folder)}": path.read_bytes() for path in files})


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_get_their_values_after_deletions_and_appends_and_no_shard_is_changed(
    tmp_path: Path, num_workers: int, compression: str | None
) -> None:
    write(tmp_path, 0, compression=compression)
    versions.delete_rows(tmp_path, [*range(20), 33, 59])
    shards = {path: path.read_bytes() for path in tmp_path.glob("shard.*")}
    kept = [*range(20, 33), *range(34, 59)]
    assert versions.add_column(tmp_path, "half", "float64", half, message="halves") == 38
    assert all(path.read_bytes() == data for path, data in shards.items())
    check(StreamingDataset(local=tmp_path, shuffle=True), kept, num_workers=num_workers)
    assert "half" not in StreamingDataset(local=tmp_path, version=1)[0]
    write(tmp_path, 60, 20, {**COLUMNS, "half": "float64"}, append=True, compression=compression)
    versions.delete_rows(tmp_path, where=lambda sample: sample["half"] == 35)
    wanted = [*kept, *range(60, 70), *range(71, 80)]
    check(StreamingDataset(local=tmp_path, shuffle=True), wanted, num_workers=num_workers)
    assert [entry.operation for entry in versions.log(tmp_path)][1:] == ["delete", "column", "append", "delete"]
    assert versions.compact(tmp_path) == len(shards) + 1
    assert Index.from_file(tmp_path / "index.json").joined == ()
    check(StreamingDataset(local=tmp_path, shuffle=True), wanted, num_workers=num_workers)
    check(StreamingDataset(local=tmp_path, version=4), wanted)


def test_values_may_be_arrays_lists_or_generators_and_columns_of_any_encoding(tmp_path: Path) -> None:
    write(tmp_path, 0)
    versions.delete_rows(tmp_path, [0, 7])
    ids = [number for number in range(60) if number not in (0, 7)]
    vectors = np.arange(58 * 3, dtype=np.float32).reshape(58, 3)
    versions.add_column(tmp_path, "vector", "ndarray:float32:3", vectors)
    versions.add_column(tmp_path, "words", "str", (f"w{number}" for number in ids))
    versions.add_column(tmp_path, "about", "json", [{"n": number} for number in ids])
    dataset = StreamingDataset(local=tmp_path, columns=["vector", "id", "about", "words"])
    for number, sample in zip(ids, dataset[:], strict=True):
        assert (sample["id"], sample["words"], sample["about"]) == (number, f"w{number}", {"n": number})
    assert np.array_equal(np.stack([sample["vector"] for sample in dataset[:]]), vectors)
    alone = StreamingDataset(local=tmp_path, columns=["words"])  # none of the shards' own
    assert alone[:] == [{"words": f"w{number}"} for number in ids]
    assert alone.reader.batch(np.arange(58)) == {"words": [f"w{number}" for number in ids]}
    batch = next(iter(StreamingDataLoader(dataset, 58)))
    assert np.array_equal(batch["vector"].numpy(), vectors)
    assert batch["words"] == [f"w{number}" for number in ids]


@pytest.mark.parametrize("limit", [None, 4000])
def test_an_added_column_is_fetched_only_where_it_is_read(tmp_path: Path, limit: int | None) -> None:
    write(tmp_path / "set", 0, 300)
    before = {path.name for path in (tmp_path / "set").glob("shard.*")}
    versions.add_column(tmp_path / "set", "half", "float64", half)
    added = {path.name for path in (tmp_path / "set").glob("shard.*")} - before
    with WebServer() as server:
        serve(server, tmp_path / "set")
        place: dict[str, Any] = {"remote": f"{server.url}/set", "local": tmp_path / "cache", "cache_limit": limit}
        place |= {"shuffle": True, "window": 2, "num_canonical_nodes": 1, "predownload": 7}
        for columns in (["id"], ["text", "id"]):
            for batch in StreamingDataLoader(StreamingDataset(**place, columns=columns), 7):
                assert set(batch) - {"id", "text"} == set()
        assert not any(server.count("GET", name) for name in added)
        check(StreamingDataset(**place), list(range(300)))
        assert all(server.count("GET", name) for name in added)
        if limit is None:
            assert all(server.count("GET", name) == 1 for name in before)


def test_single_samples_come_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "REQUEST_BYTES", 50)
    with MDSWriter(out=tmp_path / "set", columns={"id": "int", "text": "str"}) as writer:
        writer.write_batch({"id": range(3000), "text": ["x" * (k % 7) for k in range(3000)]})
    versions.add_column(tmp_path / "set", "half", "float64", np.arange(3000) / 2)
    with WebServer() as server:
        serve(server, tmp_path / "set")
        dataset = StreamingDataset(remote=f"{server.url}/set", local=tmp_path / "cache")
        for number in (5, 2999, 1234):
            assert dataset[number] == {"half": number / 2, "id": number, "text": "x" * (number % 7)}
        assert dataset.read_batch([7, 3, 7])["half"].tolist() == [3.5, 1.5, 3.5]
        assert not list((tmp_path / "cache").glob("shard.*"))


def test_streams_with_and_without_the_column_mix(tmp_path: Path) -> None:
    write(tmp_path / "a", 0)
    write(tmp_path / "b", 60)
    versions.add_column(tmp_path / "a", "half", "float64", half)
    dataset = StreamingDataset(streams=[Stream(tmp_path / "a"), Stream(tmp_path / "b", columns=["id"])], shuffle=True)
    for batch in StreamingDataLoader(dataset, 8):
        for number, value, text in zip(batch["id"].tolist(), batch["half"], batch["text"], strict=True):
            assert (value, text) == ((number / 2, "x" * (number % 7)) if number < 60 else (None, None))
    assert "half" not in dataset[60]


def test_wrong_names_values_and_encodings_are_refused_and_change_nothing(tmp_path: Path) -> None:
    write(tmp_path, 0)
    versions.delete_rows(tmp_path, [1])
    with pytest.raises(FileExistsError, match="'text' already"):
        versions.add_column(tmp_path, "text", "str", ["x"] * 59)
    for wrong in (range(60), range(58), []):
        with pytest.raises(ValueError, match=r"a value per sample, 59 \(without 1 deleted ones\); got"):
            versions.add_column(tmp_path, "half", "int", wrong)
    with pytest.raises(ValueError, match="float65"):
        versions.add_column(tmp_path, "half", "float65", half)
    with pytest.raises((TypeError, ValueError), match="column 'half'"):
        versions.add_column(tmp_path, "half", "int", ["a"] * 59)
    with pytest.raises(KeyError):
        versions.add_column(tmp_path, "half", "int", lambda sample: sample["none"])
    with pytest.raises(NotFoundError, match=r"no index\.json"):
        versions.add_column(tmp_path / "none", "half", "int", half)
    assert len(versions.log(tmp_path)) == 2
    versions.add_column(tmp_path, "half", "float64", half)
    with pytest.raises(FileExistsError, match="'half' already"):
        versions.add_column(tmp_path, "half", "float64", half)
    with pytest.raises(ValueError, match="appended shards must have the dataset's format and columns"):
        write(tmp_path, 60, append=True)
    with pytest.raises(ValueError, match="no column quarter; it has half, id, text"):
        len(StreamingDataset(local=tmp_path, columns=["id", "quarter"]))
    with pytest.raises(ValueError, match="keep their encodings"):
        len(StreamingDataset(local=tmp_path, columns={"id": "int32"}))
    versions.compact(tmp_path)
    versions.add_column(tmp_path, "third", "float64", half)
    with pytest.raises(ValueError, match="no added columns"):
        merge_index([str(tmp_path / "index.json")], out=str(tmp_path.parent))


def test_of_an_append_and_a_column_at_once_the_later_one_fits_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0)
    meanwhile = [lambda: write(tmp_path, 60, 5, append=True)]
    real = versions.finalize_shard

    def late(*given: Any) -> Any:
        while meanwhile:
            meanwhile.pop()()
        return real(*given)

    monkeypatch.setattr(versions, "finalize_shard", late)
    assert versions.add_column(tmp_path, "half", "float64", half) == 65
    check(StreamingDataset(local=tmp_path), list(range(65)))
    meanwhile.append(lambda: write(tmp_path, 65, 5, {**COLUMNS, "half": "float64"}, append=True))
    with pytest.raises(ConflictError, match="no values of 'more'"):
        versions.add_column(tmp_path, "more", "int", range(65))
    meanwhile.append(lambda: versions.compact(tmp_path) and None)
    with pytest.raises(ConflictError, match="compacted meanwhile"):
        versions.add_column(tmp_path, "more", "int", range(70))
    check(StreamingDataset(local=tmp_path), list(range(70)))
    writer = MDSWriter(out=tmp_path, columns={**COLUMNS, "half": "float64"}, append=True)
    writer.write({"id": 70, "text": "", "half": 35.0})
    versions.add_column(tmp_path, "more", "int", range(70))
    with pytest.raises(ConflictError, match="other columns"):
        writer.finish()
    assert [sample["more"] for sample in StreamingDataset(local=tmp_path)[:]] == list(range(70))


def test_values_belong_to_the_version_that_they_were_made_for_whatever_others_change_since(tmp_path: Path) -> None:
    write(tmp_path, 0)
    versions.delete_rows(tmp_path, [3])
    made_for = versions.log(tmp_path)[-1].digest
    halves = [sample["id"] / 2 for sample in StreamingDataset(local=tmp_path, version=made_for)[:]]
    versions.delete_rows(tmp_path, [0, 40])
    versions.add_column(tmp_path, "other", "int", range(57))
    assert versions.add_column(tmp_path, "half", "float64", halves, version=made_for) == 59
    samples = StreamingDataset(local=tmp_path)[:]
    assert [sample["id"] for sample in samples] == [k for k in range(60) if k not in (0, 3, 40)]
    assert all(sample["half"] == sample["id"] / 2 for sample in samples)
    write(tmp_path / "grown", 0)
    versions.delete_rows(tmp_path / "grown", [7])
    write(tmp_path / "grown", 60, 1, append=True)  # as many samples as before
    with pytest.raises(ConflictError, match="got new samples"):
        versions.add_column(tmp_path / "grown", "half", "float64", [k / 2 for k in range(60)], version=0)
    assert versions.add_column(tmp_path / "grown", "half", "float64", half, version=0) == 60
    versions.compact(tmp_path)
    with pytest.raises(ConflictError, match="compacted"):
        versions.add_column(tmp_path, "again", "float64", halves, version=made_for)
    with pytest.raises(NotFoundError, match="version must be one that the dataset has"):
        versions.add_column(tmp_path, "again", "float64", halves, version="abcdef")


_KILLED = """
import os, signal, sys
from lightning_stream import versions
from lightning_stream.stores import LocalStore

put, when = LocalStore.put, sys.argv[2]

def killed(self, name, *rest, **how):
    if when == "publishing" and name == "index.json":
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "committing" and name.startswith("versions/"):
        os.kill(os.getpid(), signal.SIGKILL)
    return put(self, name, *rest, **how)

def half(sample):
    if when == "reading" and sample["id"] == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample["id"] / 2

LocalStore.put = killed
versions.add_column(sys.argv[1], "half", "float64", half)
"""


@pytest.mark.parametrize("when", ["reading", "committing", "publishing"])
def test_a_kill_leaves_the_version_before_or_the_whole_column(tmp_path: Path, when: str) -> None:
    write(tmp_path, 0)
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), when], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    if when == "publishing":
        check(StreamingDataset(local=tmp_path), list(range(60)))
        return
    assert len(versions.log(tmp_path)) == 1
    assert set(StreamingDataset(local=tmp_path)[59]) == {"id", "text"}
    versions.add_column(tmp_path, "half", "float64", half)
    check(StreamingDataset(local=tmp_path), list(range(60)))
    write(tmp_path, 0, overwrite=True)  # which deletes what the killed process has left
    listed = Index.from_file(tmp_path / "index.json")
    assert len(list(tmp_path.glob("shard.*"))) == len(listed)


def test_a_column_changes_no_id_and_no_order_and_a_state_pins_its_version(tmp_path: Path) -> None:
    write(tmp_path, 0)
    before = StreamingDataLoader(StreamingDataset(local=tmp_path, shuffle=True), 5)
    order = [batch["id"].tolist() for batch in before]
    state = StreamingDataLoader(StreamingDataset(local=tmp_path, shuffle=True), 5).state_dict()
    versions.add_column(tmp_path, "half", "float64", half)
    after = StreamingDataLoader(StreamingDataset(local=tmp_path, shuffle=True), 5)
    assert [batch["id"].tolist() for batch in after] == order
    with pytest.raises(SnapshotMismatch, match="version="):
        StreamingDataLoader(StreamingDataset(local=tmp_path, shuffle=True), 5).load_state_dict(state)
    StreamingDataLoader(StreamingDataset(local=tmp_path, shuffle=True, version=0), 5).load_state_dict(state)


def test_lengths_filters_decoders_and_the_commands_know_added_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 0)
    versions.add_column(tmp_path, "words", "str", lambda sample: "w" * (sample["id"] % 5))
    add_lengths(tmp_path, {"words": len, "text": len}, num_workers=1)
    dataset = StreamingDataset(local=tmp_path, filter=lambda sample: sample["words"] == "ww")
    assert dataset.lengths("words").tolist() == [2] * 12
    decoded = StreamingDataset(local=tmp_path, decoders={"words": len, "text": len})
    assert [sample["words"] for sample in decoded[:]] == [number % 5 for number in range(60)]
    with pytest.raises(ValueError, match="no column 'absent'; there are id, text, words"):
        StreamingDataset(local=tmp_path, decoders={"absent": len})[0]
    assert main(["show", str(tmp_path), "--samples", "1"]) == 0
    assert "words" in capsys.readouterr().out
    assert main(["log", str(tmp_path)]) == 0
    assert {"column", "words"} <= set(capsys.readouterr().out.split())
    assert main(["check", str(tmp_path)]) == 0
    name = Index.from_file(tmp_path / "index.json").joined[0].entry(0).raw.basename
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1] + b"?")
    assert main(["check", str(tmp_path)]) != 0
    assert name in capsys.readouterr().out


def test_an_index_whose_joined_shards_do_not_fit_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, 30)
    write(tmp_path / "b", 0, 29)
    versions.add_column(tmp_path / "a", "half", "float64", half)
    data = (tmp_path / "a/index.json").read_bytes()
    versions.add_column(tmp_path / "b", "half", "float64", half)
    other = (tmp_path / "b/index.json").read_bytes()
    joined = other[other.index(b'"joined"') :]
    for wrong in (data[: data.index(b'"joined"')] + joined, data.replace(b'"half"', b'"text"')):
        with pytest.raises(FormatError, match="must have the samples of the index's own shards, and other columns"):
            Index.from_bytes(wrong, "x")


@pytest.mark.nightly
def test_a_column_on_a_real_s3_server_is_read_appended_to_and_compacted(tmp_path: Path, ceph_endpoint: str) -> None:
    bucket_at(ceph_endpoint, "columns")
    url, options = "s3://columns/set", options_of(ceph_endpoint)
    write(url, 0, store_options=options)
    versions.delete_rows(url, [5], store_options=options)
    versions.add_column(url, "half", "float64", half, store_options=options)
    write(url, 60, 20, {**COLUMNS, "half": "float64"}, append=True, store_options=options)
    wanted = [number for number in range(80) if number != 5]
    for number in range(2):
        stream = Stream(url, local=tmp_path / f"cache-{number}", options=options)
        check(StreamingDataset(streams=[stream], shuffle=True), wanted, num_workers=2)
        versions.compact(url, store_options=options)
