"""The commands on data in other formats, which are read in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
import pyarrow.parquet as pq  # noqa: E402

from lightning_stream import StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.cli import main  # noqa: E402

Answer = Callable[..., tuple[int, Any]]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two Parquet files with two row groups each."""
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(2):
        ids = range(number * 60, number * 60 + 60)
        table = pa.table({"id": ids, "text": [f"text {k}" for k in ids]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=40)
    return folder


def test_show_describes_files_shards_columns_and_sizes(rows: Path, answer: Answer) -> None:
    code, about = answer("show", str(rows), "--samples", "1")
    found = about["datasets"][0]
    assert (code, found["samples"], found["files"], found["shards"]) == (0, 120, 2, 4)
    assert (found["format"], found["samples_per_shard"]) == ("parquet", [20, 40])
    assert found["columns"] == {"id": "int64", "text": "str"}
    assert found["stored_bytes"] == sum(path.stat().st_size for path in rows.iterdir())
    assert found["printed"] == [{"id": 0, "text": "text 0"}]
    _, about = answer("show", str(rows), "--columns", "id=int32", "--samples", "1", "--format", "parquet")
    assert about["datasets"][0]["columns"] == {"id": "int32"}
    assert about["datasets"][0]["printed"] == [{"id": 0}]
    _, about = answer("show", str(rows), "--columns", "text")
    assert about["datasets"][0]["columns"] == {"text": "str"}


def test_the_index_that_a_command_makes_is_found_by_a_training_run(
    rows: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = answer("show", str(rows))[1]["datasets"][0]["digest"]
    monkeypatch.setattr(pq, "ParquetFile", None)  # no footer is read again
    assert StreamingDataset(remote=str(rows)).reader.indexes[0].digest == digest


def test_check_reads_every_row(rows: Path, answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(rows)]) == 0
    assert "reading all rows" in capsys.readouterr().out
    data = bytearray((rows / "1.parquet").read_bytes())
    group = pq.ParquetFile(rows / "1.parquet").metadata.row_group(1).column(1)
    begin = group.dictionary_page_offset or group.data_page_offset
    data[begin : begin + group.total_compressed_size] = bytes(group.total_compressed_size)
    (rows / "1.parquet").write_bytes(data)
    code, about = answer("check", str(rows))
    assert (code, [one["shard"] for one in about["datasets"][0]["corrupt"]]) == (1, [3])
    assert "1.parquet" in about["datasets"][0]["corrupt"][0]["error"]
    assert answer("check", str(rows), "--columns", "id")[0] == 0, "the other column is not read"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["log", "rows"], "holds data of the format parquet, which is read in place. Only MDS datasets have a log"),
        (["log", "rows", "--publish"], "Only MDS datasets have a log"),
        (["convert", "rows", "--lengths", "text"], "lightning-stream convert SOURCE OUT --lengths COLUMN"),
        (["show", "rows", "--format", "excel"], "a format must be one of arrow, "),
        (["show", "rows", "--columns", "words"], "the columns are id, text"),
        (["show", "cache"], "holds no files"),
        (["log", "splits"], "log takes one dataset"),
    ],
)
def test_errors_name_the_format_and_the_remedy(
    arguments: list[str], found: str, rows: Path, capsys: pytest.CaptureFixture[str], shards: Path
) -> None:
    places = {"rows": str(rows), "cache": str(rows.parent / "nothing"), "splits": str(shards)}
    before = {path: path.stat().st_mtime_ns for path in rows.iterdir()}
    assert main([places.get(one, one) for one in arguments]) == 2
    assert found in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in rows.iterdir()} == before


def test_convert_and_position_know_the_state_of_a_run_over_the_source(
    rows: Path, tmp_path: Path, answer: Answer
) -> None:
    torch = pytest.importorskip("torch")
    loader = StreamingDataLoader(StreamingDataset(remote=str(rows), shuffle=True), global_batch_size=8)
    assert len([None for _, _ in zip(range(3), loader, strict=False)]) == 3
    torch.save({"callbacks": {"lightning_stream": {"position": loader.state_dict()}}}, tmp_path / "last.pt")
    out = str(tmp_path / "out")
    code, done = answer("convert", str(rows), out, "--num-workers", "1")
    assert (code, done["num_shards"], done["keeps_order"]) == (0, {"": 4}, True)
    answers = [answer("position", str(tmp_path / "last.pt"), "--stream", place) for place in (str(rows), out)]
    assert [code for code, _ in answers] == [0, 0]
    assert answers[0][1]["batches"] == answers[1][1]["batches"]
    assert answer("check", out)[0] == 0
    assert answer("show", out)[1]["datasets"][0]["converted_from"] == json.loads(
        (Path(out) / "index.json").read_text()
    )["converted_from"]["source"]  # fmt: skip
    plans = [answer("plan", place, "--batch-size", "8")[1]["datasets"][0]["plans"][0] for place in (str(rows), out)]
    assert plans[0]["quality"]["mean"] == plans[1]["quality"]["mean"]
    code, done = answer("convert", str(rows), str(tmp_path / "other"), "--size-limit", "1kb", "--num-workers", "1")
    assert (code, done["keeps_order"]) == (0, False)
    assert answer("position", str(tmp_path / "last.pt"), "--stream", str(tmp_path / "other"))[0] == 1


def test_a_version_of_a_dataset_is_read(rows: Path, tmp_path: Path, answer: Answer) -> None:
    from lightning_stream import MDSWriter, versions

    out = str(tmp_path / "mds")
    for append in (False, True):
        with MDSWriter(out=out, columns={"x": "int"}, append=append) as writer:
            writer.write({"x": 1})
    digest = versions.log(out)[0].digest
    for wanted in ("0", digest[:8]):
        assert answer("show", out, "--version", wanted)[1]["datasets"][0]["samples"] == 1
        assert answer("check", out, "--version", wanted)[1]["datasets"][0]["samples"] == 1
    assert answer("show", out)[1]["datasets"][0]["samples"] == 2
    both = ["--stream", out, "--stream", str(rows)]
    torch = pytest.importorskip("torch")
    loader = StreamingDataLoader(StreamingDataset(remote=out), global_batch_size=1)
    torch.save(loader.state_dict(), tmp_path / "run.pt")
    code, about = answer("position", str(tmp_path / "run.pt"), "--version", "0", *both)
    assert (code, "that of one dataset" in about["error"]) == (2, True)


def test_a_version_of_a_delta_table_is_read(tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: uv sync --extra delta")
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    uri = str(tmp_path / "table")
    for k in range(3):
        deltalake.write_deltalake(uri, pa.table({"id": range(k * 5, k * 5 + 5)}), mode="append")
    assert [answer("show", uri, *more)[1]["datasets"][0]["samples"] for more in ([], ["--version", "0"])] == [15, 5]
    code, done = answer("convert", uri, str(tmp_path / "out"), "--source-options", "version=1", "--num-workers", "1")
    assert (code, done["num_samples"]) == (0, {"": 10})
    for given in ([uri, "--kind", "parquet"], [f"{uri}/*.parquet"]):
        code, done = answer("convert", given[0], str(tmp_path / "out"), *given[1:])
        assert (code, "whose files hold deleted rows, too" in done["error"]) == (2, True)
