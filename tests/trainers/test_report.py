"""The report of a run: its page holds what the loader measured, over stops, resumes and failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from lightning_stream import MDSWriter, PositionTracker, RunReport, Stream, StreamingDataLoader, StreamingDataset
from lightning_stream.loading.meter import PARTS
from lightning_stream.pages import embedded
from lightning_stream.trainers import report as reports

EVIL = "</script><img src=x onerror=alert(1)>"
NUM_SAMPLES, BATCH = 96, 8


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, count in (("code", 32), ("text", 64)):
        write(tmp_path / name, count)
    return tmp_path


def write(folder: Path, count: int, column: str = "x") -> None:
    with MDSWriter(out=str(folder), columns={column: "ndarray:int32:8"}, size_limit=512) as writer:
        for number in range(count):
            writer.write({column: np.full(8, number, np.int32)})


def loader_of(data: Path, batch_size: int = BATCH, **options: Any) -> StreamingDataLoader:
    streams = [Stream(remote=str(data / name), local=str(data / "cache" / name)) for name in ("code", "text")]
    return StreamingDataLoader(StreamingDataset(streams=streams, shuffle=True, **options), batch_size)


def values_in(path: Path) -> dict[str, Any]:
    return embedded(path.read_text(encoding="utf-8"))


def total(values: dict[str, Any], name: str) -> float:
    return sum(values["columns"][name])


def texts(values: dict[str, Any]) -> str:
    return json.dumps(values["sections"], ensure_ascii=False)


def train(tracker: PositionTracker, path: Path, stop_at: int | None = None) -> StreamingDataLoader:
    """Train on the rest of an epoch, or until a batch raises."""
    loader = tracker.loader
    with RunReport(path, loader, tracker, step=lambda: tracker.num_steps):
        for number, _ in enumerate(tracker):
            if number == stop_at:
                raise RuntimeError(EVIL)
            tracker.stepped()
    return loader


def test_the_columns_add_up_to_the_loaders_own_stats(data: Path) -> None:
    loader = loader_of(data)
    train(PositionTracker(loader), data / "run/data_report.html")
    values, stats = values_in(data / "run/data_report.html"), loader.stats()
    assert total(values, "samples") == stats.num_samples == NUM_SAMPLES
    assert total(values, "batches") == stats.num_batches
    assert total(values, "wait_s") == pytest.approx(stats.wait_s, abs=1e-4)
    assert total(values, "compute_s") == pytest.approx(stats.compute_s, abs=1e-4)
    for part in PARTS:
        assert total(values, f"{part}_s") == pytest.approx(stats.waits[part] + stats.first_waits[part], abs=1e-4)
    for name in ("fetched_bytes", "shards_fetched", "shards_here", "requests"):
        assert total(values, name) == stats.counters[name]
    assert total(values, f"stream:{data}/code") == 32
    assert total(values, f"stream:{data}/text") == 64
    assert "Trained on epoch 0: 0 lost, 0 repeated" in texts(values)
    assert values["kept"]["launches"][0]["ended"] == "finished"
    (mixture,) = [one for one in values["sections"] if one.get("title") == "Mixture"]
    assert [one["name"] for one in mixture["series"]] == ["text", "code"]  # the largest first


def test_what_is_logged_between_two_batches_makes_no_row_without_a_rate(data: Path) -> None:
    loader = loader_of(data)
    with RunReport(data / "run/data_report.html", loader) as report:
        report._interval_s = 0.0
        for _ in loader:
            report.add([report.share()])
    values = values_in(data / "run/data_report.html")
    assert all(values["columns"]["batches"])
    assert total(values, "samples") == NUM_SAMPLES
    assert total(values, "compute_s") == pytest.approx(loader.stats().compute_s, abs=1e-4)


def test_the_page_begins_with_the_name_of_the_run_and_how_it_ended(data: Path) -> None:
    with pytest.raises(RuntimeError):
        train(PositionTracker(loader_of(data)), data / "run 7/data_report.html", stop_at=3)
    page = (data / "run 7/data_report.html").read_text(encoding="utf-8")
    assert "<title>run 7: data of a training run</title>" in page
    first = embedded(page)["sections"][0]
    assert first["title"] == "Training stopped"
    assert first["text"].startswith(f"RuntimeError: {EVIL}")


def test_a_run_that_changes_its_folder_writes_one_page(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    with RunReport("page.html", loader_of(data)) as report:
        (data / "other").mkdir()
        monkeypatch.chdir(data / "other")
    assert report.path == data / "page.html"
    assert values_in(data / "page.html")["kept"]["launches"][0]["ended"] == "finished"
    assert list(Path().iterdir()) == []


def test_many_streams_are_shown_as_the_largest_and_the_rest(tmp_path: Path) -> None:
    streams = [Stream(remote=str(tmp_path / f"s{k}")) for k in range(25)]
    for k in range(25):
        write(tmp_path / f"s{k}", 8 + 8 * (k == 7))
    loader = StreamingDataLoader(StreamingDataset(streams=streams, shuffle=True), BATCH)
    train(PositionTracker(loader), tmp_path / "data_report.html")
    values = values_in(tmp_path / "data_report.html")
    drawn = {name.partition(":")[2]: total(values, name) for name in values["columns"] if name.startswith("stream:")}
    assert len(drawn) == 20
    assert (drawn[str(tmp_path / "s7")], drawn["other streams"], sum(drawn.values())) == (16, 6 * 8, 26 * 8)


def test_a_long_run_has_no_more_rows_than_fit_and_loses_no_count(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_MOST_ROWS", 5)
    monkeypatch.setattr(reports, "_FIRST_INTERVAL_S", 0.0)
    loader = loader_of(data, batch_size=1)
    train(PositionTracker(loader), data / "data_report.html")
    values = values_in(data / "data_report.html")
    assert 2 <= len(values["columns"]["samples"]) <= 5
    assert total(values, "samples") == NUM_SAMPLES
    ends = values["columns"]["end_s"]
    assert ends == sorted(ends)


def test_a_run_that_fails_names_the_error_and_a_resumed_one_continues_the_page(data: Path) -> None:
    path, tracker = data / "data_report.html", PositionTracker(loader_of(data))
    with pytest.raises(RuntimeError):
        train(tracker, path, stop_at=3)
    failed = values_in(path)
    assert failed["kept"]["launches"][0]["ended"] == f"RuntimeError: {EVIL}"
    resumed = PositionTracker(loader_of(data))
    resumed.load(tracker.state())
    train(resumed, path)
    values = values_in(path)
    first, second = values["kept"]["launches"]
    assert (first["ended"], second["ended"]) == (f"RuntimeError: {EVIL}", "finished")
    assert (first["from"], first["to"], second["from"], second["to"]) == ([0, 0], [0, 24], [0, 24], [1, 0])
    assert total(values, "samples") == NUM_SAMPLES + BATCH  # the batch that raised was handed out twice
    assert second["at_s"] == pytest.approx(failed["columns"]["end_s"][-1])
    assert "Trained on epoch 0: 0 lost, 0 repeated" in texts(values)
    marks = [one["marks"] for one in values["sections"] if one["kind"] == "chart"]
    assert marks[0] == [[second["at_s"], "resumed"]]


def test_no_text_of_the_data_is_part_of_the_html(data: Path) -> None:
    name = "a<img src=x onerror=alert(2)>"
    write(data / name, 16, column="<script>c")
    loader = StreamingDataLoader(StreamingDataset(remote=str(data / name), shuffle=False), BATCH)
    with pytest.raises(RuntimeError):
        train(PositionTracker(loader), data / "data_report.html", stop_at=1)
    html = (data / "data_report.html").read_text()
    assert "<img" not in html
    assert html.count("<script") == html.count("</script>") == 2
    assert EVIL in texts(values_in(data / "data_report.html"))


def test_credentials_are_not_in_the_page(data: Path) -> None:
    loader = loader_of(data)
    with RunReport(data / "data_report.html", loader) as report:
        report.note_message("cannot read s3://user:secret1@host/data?X-Amz-Signature=secret2")
        report.end(OSError("s3://user:secret3@host/data?sig=secret4 refused"), [report.share()])
    assert "secret" not in (data / "data_report.html").read_text()


@pytest.mark.parametrize(
    "former",
    [
        b"<html>somebody's own page</html>", b"", b"\xff\xfe\x00broken",
        b'<script type="application/json" id="page">{"kept": {}, "columns": {}}</script>',
        b'<script type="application/json" id="page">{"kept": {"format": 1, "launches": []</script>',
        b'<script type="application/json" id="page">{"kept": {"format": 1, "launches": [{}]}, "columns": {}}</script>',
        b'<script type="application/json" id="page">' + b"[" * 100_000 + b"</script>",
    ],
)  # fmt: skip
def test_a_former_page_that_is_damaged_or_foreign_is_kept_beside(data: Path, former: bytes) -> None:
    path, said = data / "data_report.html", list[str]()
    path.write_bytes(former)
    with RunReport(path, loader_of(data), say=said.append):
        pass
    assert (data / "data_report-1.html").read_bytes() == former
    assert "data_report-1.html" in said[0]
    assert values_in(path)["kept"]["launches"][0]["ended"] == "finished"


def test_a_former_page_whose_rows_are_no_numbers_is_kept_beside(data: Path) -> None:
    path, tracker, said = data / "data_report.html", PositionTracker(loader_of(data)), list[str]()
    with pytest.raises(RuntimeError):
        train(tracker, path, stop_at=3)
    former = path.read_text(encoding="utf-8").replace('"evictions": [0', '"evictions": [null')
    path.write_text(former, encoding="utf-8")
    loader = loader_of(data)
    loader.load_state_dict(tracker.state())
    with RunReport(path, loader, say=said.append):
        assert sum(len(batch["x"]) for batch in loader) == NUM_SAMPLES - 3 * BATCH
    assert (data / "data_report-1.html").read_text(encoding="utf-8") == former
    assert "evictions" in said[0]
    assert len(values_in(path)["kept"]["launches"]) == 1


def test_a_run_that_starts_over_keeps_the_page_of_the_former_run(data: Path) -> None:
    path = data / "data_report.html"
    train(PositionTracker(loader_of(data)), path)
    former = path.read_bytes()
    train(PositionTracker(loader_of(data)), path)
    assert (data / "data_report-1.html").read_bytes() == former
    assert len(values_in(path)["kept"]["launches"]) == 1


def test_two_runs_that_write_one_page_get_one_each(data: Path) -> None:
    path, said = data / "data_report.html", list[str]()
    one, other = RunReport(path, loader_of(data), say=said.append), RunReport(path, loader_of(data), say=said.append)
    with one, other:
        pass
    pages = sorted(data.glob("*.html"))
    assert len({values_in(page)["kept"]["run"] for page in pages}) == len(pages) == 2
    ended = [values_in(page)["kept"]["launches"][0].get("ended") for page in (one.path, other.path)]
    assert ended == ["finished", "finished"]
    assert one.path != other.path


def test_training_continues_where_no_page_can_be_written(data: Path) -> None:
    (data / "file").write_text("in the way")
    said: list[str] = []
    loader = loader_of(data)
    with RunReport(data / "file" / "data_report.html", loader, say=said.append):
        assert sum(len(batch["x"]) for batch in loader) == NUM_SAMPLES
    assert "cannot be written" in said[0]
    assert len(said) == 1


def test_bad_samples_are_listed_with_their_ids(data: Path) -> None:
    (shard, *_) = sorted((data / "text").glob("shard.*.mds"))
    shard.write_bytes(bytes(shard.stat().st_size))
    loader = loader_of(data, on_bad_sample="substitute", on_bad_shard="substitute")
    train(PositionTracker(loader), data / "data_report.html")
    values = values_in(data / "data_report.html")
    listed = {one["sample"] for one in values["kept"]["bad"]}
    assert len(listed) == total(values, "bad_samples") > 0
    assert {one["stream"] for one in values["kept"]["bad"]} == {str(data / "text")}
    (shown,) = [one for one in values["sections"] if one.get("title") == "Bad samples"]
    assert {row[0] for row in shown["rows"]} == listed


def test_a_list_of_bad_samples_that_others_write_into_stops_no_run(data: Path) -> None:
    quarantine, path = data / "bad.jsonl", data / "data_report.html"
    loader = loader_of(data, on_bad_sample="substitute", quarantine=quarantine)
    with RunReport(path, loader):
        quarantine.write_text("a note of mine\n")
        assert sum(len(batch["x"]) for batch in loader) == NUM_SAMPLES
    assert "The list of bad samples is incomplete" in texts(values_in(path))


def test_a_page_is_written_again_after_a_failure(data: Path) -> None:
    said: list[str] = []
    (data / "run").write_text("in the way")
    with RunReport(data / "run" / "data_report.html", loader_of(data), say=said.append):
        (data / "run").unlink()
    assert len(said) == 1
    assert values_in(data / "run" / "data_report.html")["kept"]["launches"][0]["ended"] == "finished"


def test_a_folder_in_the_way_is_left_alone(data: Path) -> None:
    (data / "data_report.html").mkdir()
    with RunReport(data / "data_report.html", loader_of(data), say=lambda _: None) as report:
        pass
    assert (data / "data_report.html").is_dir()
    assert values_in(report.path)["kept"]["launches"][0]["ended"] == "finished"


def test_the_record_of_the_run_is_verified_at_its_end(data: Path) -> None:
    loader = loader_of(data)
    train(PositionTracker(loader, record_delivery=data / "audit"), data / "data_report.html")
    assert "all 12 recorded steps saw exactly the planned samples" in texts(values_in(data / "data_report.html"))


@pytest.mark.parametrize("path", ["s3://bucket/report.html", "run", "report.htm", Path("folder/")])
def test_a_path_that_is_no_local_page_is_refused(data: Path, path: Any) -> None:
    with pytest.raises(ValueError, match=r"takes a local file that ends with \.html"):
        RunReport(path, loader_of(data))


RANK = """
import os, sys, torch
from lightning_stream import RunReport, StreamingDataLoader, StreamingDataset
from lightning_stream.trainers.monitor import DataMonitor
_, meeting, rank, data, page, fails = sys.argv
torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
loader = StreamingDataLoader(StreamingDataset(remote=data), 4)
monitor = DataMonitor(print)
monitor.attach(loader)
monitor.begin_report(RunReport(page, loader))
for number, batch in enumerate(loader):
    if number % 3 == 2:
        monitor.metrics(number)
if fails == "yes":
    monitor.stop(RuntimeError("lost a rank"))
else:
    monitor.end()
    monitor.stop(None)
torch.distributed.barrier()
os._exit(0)  # gloo's own end may abort where the other rank has ended already
"""


@pytest.mark.distributed
@pytest.mark.parametrize("fails", [False, True])
def test_two_processes_write_one_page(data: Path, fails: bool) -> None:
    page, meeting = data / "run" / "data_report.html", data / "meeting"
    arguments = [[meeting, str(rank), data / "text", page, "yes" if fails else "no"] for rank in range(2)]
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK, *each], env={**os.environ, "OMP_NUM_THREADS": "1"})
        for each in arguments
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert list(page.parent.iterdir()) == [page]
    values = values_in(page)
    (launch,) = values["kept"]["launches"]
    assert (launch["ranks"], launch["measured_ranks"]) == (2, 2)
    assert launch["ended"] == ("RuntimeError: lost a rank" if fails else "finished")
    # 8 batches of each rank: the last two are in no row of both ranks, where the run stops without a word.
    assert total(values, "samples") == (6 * 8 + 2 * 4 if fails else 64)
    assert ("The plots lack what the other ranks measured" in texts(values)) == fails


KILLED = """
import os, signal, sys
from lightning_stream import RunReport, StreamingDataLoader, StreamingDataset
from lightning_stream.trainers import report
report._WRITTEN_EVERY_S, report._FIRST_INTERVAL_S, report._WRITING_SHARE = 0.0, 0.0, 1e9
loader = StreamingDataLoader(StreamingDataset(remote=sys.argv[1]), 8)
with RunReport(sys.argv[2], loader):
    for number, batch in enumerate(loader):
        if number == 4:
            os.kill(os.getpid(), int(sys.argv[3]))
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_leaves_the_page_that_it_wrote_last(data: Path, signum: int) -> None:
    path = data / "data_report.html"
    process = subprocess.run(
        [sys.executable, "-c", KILLED, data / "text", path, str(signum)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode in (-signum, 1)
    (launch,) = values_in(path)["kept"]["launches"]
    assert launch.get("ended") == (None if signum == signal.SIGKILL else "KeyboardInterrupt")
    assert total(values_in(path), "samples") >= 8
