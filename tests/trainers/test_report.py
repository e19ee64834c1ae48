"""The log of a run holds what its loader measured, over stops, resumes and failures; its page is drawn from that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.warm import python

pytest.importorskip("torch")

from lightning_stream import MDSWriter, PositionTracker, RunReport, Stream, StreamingDataLoader, StreamingDataset
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.monitoring.verdict import Verdict
from lightning_stream.pages import run_page, write_run_page
from lightning_stream.run_log import LOG_NAME, PAGE_NAME, Launch, Run, read_run
from lightning_stream.trainers import log_writer
from lightning_stream.trainers.monitor import DataMonitor

EVIL = "</script><img src=x onerror=alert(1)>"
NUM_SAMPLES, BATCH = 96, 8
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


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


def train(tracker: PositionTracker, folder: Path, stop_at: int | None = None, say: Any = print) -> StreamingDataLoader:
    """Train on the rest of an epoch, or until a batch raises."""
    loader = tracker.loader
    with RunReport(folder, loader, tracker, step=lambda: tracker.num_steps, say=say):
        for number, _ in enumerate(tracker):
            if number == stop_at:
                raise RuntimeError(EVIL)
            tracker.stepped()
    return loader


def stopped(data: Path, folder: Path, stop_at: int = 3) -> PositionTracker:
    tracker = PositionTracker(loader_of(data))
    with pytest.raises(RuntimeError):
        train(tracker, folder, stop_at)
    return tracker


def resumed(data: Path, tracker: PositionTracker) -> PositionTracker:
    other = PositionTracker(loader_of(data))
    other.load(tracker.state())
    return other


def launch_in(path: Path) -> Launch:
    (launch,) = read_run(path).launches
    return launch


def of_rows(launch: Launch) -> LoaderStats:
    return sum((LoaderStats.of_numbers(row.stats) for row in launch.rows), LoaderStats())


def drawn_in(run: Run) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in (row for launch in run.launches for row in launch.rows):
        for name, number in row.drawn.items():
            found[name] = found.get(name, 0) + number
    return found


def test_the_rows_and_the_end_add_up_to_the_loaders_own_stats(data: Path) -> None:
    loader = train(PositionTracker(loader_of(data)), data / "run")
    run, stats = read_run(data / "run"), loader.stats()
    for found in (run.stats, of_rows(run.launches[0])):
        expected = {name: pytest.approx(number, abs=1e-4) for name, number in stats.numbers().items()}
        assert found.numbers() == expected
    assert stats.num_samples == NUM_SAMPLES
    assert drawn_in(run) == {f"{data}/code": 32, f"{data}/text": 64}
    assert run.launches[0].how == "finished"
    page = (data / "run" / PAGE_NAME).read_text()
    assert "Trained on epoch 0: 0 lost, 0 repeated" in page


def test_rows_without_a_batch_are_not_written(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "_SHORTEST_ROW_S", 0.0)
    loader, monitor = loader_of(data), DataMonitor(print)
    monitor.attach(loader)
    monitor.begin_report(RunReport(data / "run", loader))
    for step, _ in enumerate(loader):
        for _ in range(3):
            monitor.metrics(step)
    monitor.stop(None)
    launch = launch_in(data / "run")
    assert all(row.stats.get("num_batches") for row in launch.rows[:-1])
    assert of_rows(launch).num_samples == NUM_SAMPLES


def test_the_page_begins_with_the_name_of_the_run_and_how_it_ended(data: Path) -> None:
    stopped(data, data / "run 7")
    page = (data / "run 7" / PAGE_NAME).read_text(encoding="utf-8")
    assert "<title>run 7: data of a training run</title>" in page
    assert f"<h2>Training stopped</h2><p>RuntimeError: {escape(EVIL)}</p>" in page


def test_a_run_that_changes_its_folder_writes_one_log(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    with RunReport("run", loader_of(data)) as report:
        (data / "other").mkdir()
        monkeypatch.chdir(data / "other")
    assert report.path == data / "run" / LOG_NAME
    assert launch_in(report.path).how == "finished"
    assert list(Path().iterdir()) == []


def test_many_streams_are_shown_as_the_largest_and_the_rest(tmp_path: Path) -> None:
    streams = [Stream(remote=str(tmp_path / f"s{k}")) for k in range(25)]
    for k in range(25):
        write(tmp_path / f"s{k}", 8 + 8 * (k == 7))
    loader = StreamingDataLoader(StreamingDataset(streams=streams, shuffle=True), BATCH)
    train(PositionTracker(loader), tmp_path / "run")
    drawn = drawn_in(read_run(tmp_path / "run"))
    assert len(drawn) == 20
    assert (drawn[str(tmp_path / "s7")], drawn["other streams"], sum(drawn.values())) == (16, 6 * 8, 26 * 8)


def test_rows_grow_with_the_run_and_lose_no_count(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "_SHORTEST_ROW_S", 0.0)
    monkeypatch.setattr(log_writer, "_ROWS", 4)
    train(PositionTracker(loader_of(data, batch_size=1)), data / "run")
    launch = launch_in(data / "run")
    assert of_rows(launch).num_samples == NUM_SAMPLES
    ends = [row.at_s for row in launch.rows[:-1]]
    assert all(after - before >= 0.9 * after / 4 for before, after in pairwise(ends))
    assert 0 < launch.rows[0].epochs < 1


def test_a_run_that_fails_names_the_error_and_a_resumed_one_continues_its_log(data: Path) -> None:
    folder = data / "run"
    tracker = stopped(data, folder)
    seconds = launch_in(folder).latest.at_s
    train(resumed(data, tracker), folder)
    run = read_run(folder)
    first, second = run.launches
    assert (first.how, second.how) == (f"RuntimeError: {EVIL}", "finished")
    assert (first.start.place, first.latest.place, second.start.place, second.latest.place) == (
        (0, 0),
        (0, 24),
        (0, 24),
        (1, 0),
    )
    assert run.stats.num_samples == NUM_SAMPLES + BATCH  # the batch that raised was handed out twice
    assert first.latest.at_s == seconds
    page = (folder / PAGE_NAME).read_text()
    assert "Trained on epoch 0: 0 lost, 0 repeated" in page
    assert "<h2>Launches</h2>" in page


def test_no_text_of_the_data_is_part_of_the_html(data: Path) -> None:
    name = "a<img src=x onerror=alert(2)>"
    write(data / name, 16, column="<script>c")
    write(data / "b", 16, column="<script>c")
    streams = [Stream(remote=str(data / name)), Stream(remote=str(data / "b"))]
    loader = StreamingDataLoader(StreamingDataset(streams=streams, shuffle=False), BATCH)
    with pytest.raises(RuntimeError):
        train(PositionTracker(loader), data / "run", stop_at=1)
    html = (data / "run" / PAGE_NAME).read_text()
    assert "<img" not in html
    assert "<script" not in html


def test_credentials_are_neither_in_the_log_nor_on_the_page(data: Path) -> None:
    error = OSError("s3://user:secret3@host/data?sig=secret4 refused")
    report = RunReport(data / "run", loader_of(data))
    report.begin()
    report.note_message("cannot read s3://user:secret1@host/data?X-Amz-Signature=secret2")
    report.end(error, LoaderStats(), Verdict("none", "https://user:secret5@host"))
    assert "secret" not in (data / "run" / PAGE_NAME).read_text()
    assert "secret" not in (data / "run" / LOG_NAME).read_text()


def test_the_log_says_where_the_streams_are_and_what_was_installed(data: Path) -> None:
    train(PositionTracker(loader_of(data)), data / "run")
    start = launch_in(data / "run").start
    places = [(stream["remote"], stream["local"]) for stream in start.streams]
    assert places == [(str(data / name), str(data / "cache" / name)) for name in ("code", "text")]
    assert {"python", "torch", "numpy"} <= start.versions.keys()
    assert "batch_size=8" in start.settings


@pytest.mark.parametrize(
    "former",
    [
        b"a note of mine\n", b"", b"\xff\xfe\x00broken\n", b'{"kind": "launch"}\n', b'{"kind": "row"}\n',
        b"[" * 100_000 + b"\n",
    ],
)  # fmt: skip
def test_a_former_log_that_is_damaged_or_foreign_is_kept_beside(data: Path, former: bytes) -> None:
    tracker, folder, said = stopped(data, data / "other"), data / "run", list[str]()
    folder.mkdir()
    (folder / LOG_NAME).write_bytes(former)
    train(resumed(data, tracker), folder, say=said.append)
    assert (folder / "data_log-1.jsonl").read_bytes() == former
    assert "data_log-1.jsonl" in said[0]
    assert launch_in(folder).how == "finished"


def test_a_torn_last_line_is_no_obstacle(data: Path) -> None:
    folder = data / "run"
    tracker = stopped(data, folder)
    whole = (folder / LOG_NAME).read_bytes()
    (folder / LOG_NAME).write_bytes(whole + whole[:30])
    assert len(read_run(folder).launches) == 1
    train(resumed(data, tracker), folder)
    assert (folder / LOG_NAME).read_bytes().startswith(whole)
    assert [launch.how for launch in read_run(folder).launches] == [f"RuntimeError: {EVIL}", "finished"]


def test_a_run_that_starts_over_keeps_the_log_and_the_page_of_the_former_run(data: Path) -> None:
    folder = data / "run"
    train(PositionTracker(loader_of(data)), folder)
    former = [(folder / name).read_bytes() for name in (LOG_NAME, PAGE_NAME)]
    train(PositionTracker(loader_of(data)), folder)
    assert [(folder / name).read_bytes() for name in ("data_log-1.jsonl", "data_report-1.html")] == former
    assert len(read_run(folder).launches) == 1


@pytest.mark.parametrize("is_resumed", [False, True])
def test_two_runs_that_write_one_log_get_one_each(data: Path, is_resumed: bool) -> None:
    said: list[str] = []
    tracker = stopped(data, data / "run") if is_resumed else PositionTracker(loader_of(data))
    trackers = [resumed(data, tracker) for _ in range(2)]
    one, other = (RunReport(data / "run", tracker.loader, tracker, say=said.append) for tracker in trackers)
    with one, other:
        pass
    ends = [read_run(report.path).launches[-1].how for report in (one, other)]
    assert ends == ["finished", "finished"]
    assert one.path != other.path
    assert sum("Another run writes" in sentence for sentence in said) == 1


def test_training_continues_where_no_log_can_be_written(data: Path) -> None:
    (data / "file").write_text("in the way")
    said: list[str] = []
    loader = loader_of(data)
    with RunReport(data / "file", loader, say=said.append):
        assert sum(len(batch["x"]) for batch in loader) == NUM_SAMPLES
    assert "cannot be written" in said[0]


def test_a_log_is_written_again_after_a_failure(data: Path) -> None:
    said: list[str] = []
    (data / "run").write_text("in the way")
    loader = loader_of(data)
    with RunReport(data / "run", loader, say=said.append):
        (data / "run").unlink()
        assert sum(len(batch["x"]) for batch in loader) == NUM_SAMPLES
    assert len(said) == 1
    assert launch_in(data / "run").stats.num_samples == NUM_SAMPLES


def test_a_folder_in_the_way_is_left_alone(data: Path) -> None:
    (data / "run" / LOG_NAME).mkdir(parents=True)
    with RunReport(data / "run", loader_of(data), say=lambda _: None) as report:
        pass
    assert (data / "run" / LOG_NAME).is_dir()
    assert launch_in(report.path).how == "finished"


def test_bad_samples_are_listed_with_their_ids(data: Path) -> None:
    (shard, *_) = sorted((data / "text").glob("shard.*.mds"))
    shard.write_bytes(bytes(shard.stat().st_size))
    loader = loader_of(data, on_bad="substitute")
    train(PositionTracker(loader), data / "run")
    run = read_run(data / "run")
    listed = [sample.values for sample in run.launches[0].bad]
    assert len(listed) == run.stats.counters["bad_samples"] > 0
    assert {values["stream"] for values in listed} == {str(data / "text")}
    assert "<h2>Bad samples" in run_page(run)


def test_a_list_of_bad_samples_that_others_write_into_stops_no_run(data: Path) -> None:
    quarantine = data / "bad.jsonl"
    loader = loader_of(data, on_bad={"sample": "substitute", "quarantine": quarantine})
    with RunReport(data / "run", loader):
        others = json.dumps({"stream": "web", "sample": 7, "reason": "its bytes"})
        quarantine.write_text(f'a note of mine\n{{"stream": "we{others}\n{others}\n')  # and a line that was cut
        assert sum(len(batch["x"]) for batch in loader) == NUM_SAMPLES
    (message,) = launch_in(data / "run").messages
    assert [sample.values["sample"] for sample in launch_in(data / "run").bad] == [7]
    assert "The list of bad samples is incomplete" in message.text


def test_the_record_of_the_run_is_verified_at_its_end(data: Path) -> None:
    train(PositionTracker(loader_of(data), record_delivery=data / "audit"), data / "run")
    assert "all 12 recorded steps saw exactly the planned samples" in (data / "run" / PAGE_NAME).read_text()


@pytest.mark.parametrize("folder", ["s3://bucket/run", "run.html", Path("run/data_report.html")])
def test_what_is_no_local_folder_is_refused(data: Path, folder: Any) -> None:
    with pytest.raises(ValueError, match=r"report= is a local folder"):
        RunReport(folder, loader_of(data))


RANK = """
import os, sys, torch
from lightning_stream import RunReport, StreamingDataLoader, StreamingDataset
from lightning_stream.trainers.monitor import DataMonitor
_, meeting, rank, data, folder, fails = sys.argv
torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
loader = StreamingDataLoader(StreamingDataset(remote=data), 4)
monitor = DataMonitor(print)
monitor.attach(loader)
monitor.begin_report(RunReport(folder, loader))
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
def test_two_processes_write_one_log(data: Path, fails: bool) -> None:
    folder, meeting = data / "run", data / "meeting"
    arguments = [[meeting, str(rank), data / "text", folder, "yes" if fails else "no"] for rank in range(2)]
    processes = [subprocess.Popen([python(), "-c", RANK, *given], env=ONE_THREAD) for given in arguments]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert sorted(path.name for path in folder.iterdir()) == [LOG_NAME, PAGE_NAME]
    launch = launch_in(folder)
    assert (launch.start.ranks, launch.start.measured_ranks) == (2, 2)
    assert launch.how == ("RuntimeError: lost a rank" if fails else "finished")
    # 8 batches of each rank: the last two are in no row of both ranks, where the run stops without a word.
    expected = 6 * 8 + 2 * 4 if fails else 64
    assert launch.stats.num_samples == of_rows(launch).num_samples == expected
    assert ("What the other ranks measured last is missing" in (folder / PAGE_NAME).read_text()) == fails


KILLED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # Composer, if it is imported, sets one of its own
from lightning_stream import RunReport, StreamingDataLoader, StreamingDataset
from lightning_stream.trainers import log_writer
log_writer._SHORTEST_ROW_S = 0.0
loader = StreamingDataLoader(StreamingDataset(remote=sys.argv[1]), 8)
with RunReport(sys.argv[2], loader):
    for number, batch in enumerate(loader):
        if number == 4:
            os.kill(os.getpid(), int(sys.argv[3]))
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_the_page_of_a_killed_run_is_drawn_from_its_log(data: Path, signum: int) -> None:
    arguments = [python(), "-c", KILLED, data / "text", data / "run", str(signum)]
    process = subprocess.run(arguments, env=ONE_THREAD, capture_output=True, timeout=120, check=False)
    assert process.returncode in (-signum, 1)
    launch = launch_in(data / "run")
    assert launch.how == ("no end was written" if signum == signal.SIGKILL else "KeyboardInterrupt")
    assert launch.stats.num_samples >= 8
    page = write_run_page(data / "run").read_text()
    assert ("Still training, or killed" in page) == (signum == signal.SIGKILL)
