"""Under Lightning every run that leaves files leaves a log of its data and a page, also where it fails."""

from __future__ import annotations

import csv
import logging
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from support.lightning_runs import EPOCHS, NUM_SAMPLES, Run, checkpoints
from support.metered_loading import spend

from lightning_stream import StreamingCallback
from lightning_stream.monitoring.measured import percent
from lightning_stream.run_log import LOG_NAME, PAGE_NAME, read_run
from lightning_stream.trainers import monitor as trainers_monitor

pytestmark = pytest.mark.filterwarnings("ignore:.*(callbacks used to create|without a model|You def).*")
STEPS_PER_EPOCH = 11


class Raises(Callback):
    def __init__(self, error: BaseException, step: int) -> None:
        self.error, self.step = error, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error


def pages_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.html"))


def slow(sample: Any) -> Any:
    spend(0.002)
    return sample


def test_the_terminal_the_metrics_the_log_and_the_page_agree(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(trainers_monitor, "_WORTH_AT_END_S", 0.0)
    every = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    run = Run(shards, tmp_path, dataset={"transform": slow}, **every)
    (launch,) = read_run(tmp_path).launches
    assert launch.end is not None
    measured, stats = run.data.position_callback.monitor.stats(), launch.stats
    assert stats.numbers() == {name: pytest.approx(value, abs=1e-5) for name, value in measured.numbers().items()}
    of_rows = [sum(row.stats.get(name, 0.0) for row in launch.rows) for name in ("num_samples", "wait_s", "compute_s")]
    assert of_rows == pytest.approx([EPOCHS * NUM_SAMPLES, measured.wait_s, measured.compute_s], abs=1e-4)

    assert launch.end.verdict.startswith(f"Input-bound {percent(measured.wait_share)}")
    assert launch.end.verdict in [record.message for record in caplog.records]
    page = (tmp_path / PAGE_NAME).read_text()
    assert f"<b>{percent(measured.wait_share)}</b><span>of the time spent waiting: {measured.waited}</span>" in page
    (shown,) = re.findall(r"<b>([\d.,]+)</b><span>samples per second</span>", page)
    assert float(shown.replace(",", "")) == pytest.approx(measured.samples_per_s, rel=0.01)
    (table,) = tmp_path.glob("lightning_logs/*/metrics.csv")
    rows = csv.DictReader(table.read_text().splitlines())
    logged = [float(row["data/wait_ms"]) for row in rows if row["data/wait_ms"]]
    assert len(logged) == EPOCHS * STEPS_PER_EPOCH  # a batch each
    assert sum(logged) / 1000 == pytest.approx(measured.wait_s, rel=0.05)  # but the end of the last epoch


def test_a_run_leaves_its_log_and_its_page_in_its_folder(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path)
    (launch,) = read_run(tmp_path).launches
    assert (launch.rows[-1].step, launch.rows[-1].epochs) == (EPOCHS * STEPS_PER_EPOCH, EPOCHS)
    assert (launch.how, launch.latest.place) == ("finished", (EPOCHS, 0))
    assert (launch.latest.lost, launch.latest.repeated) == (0, 0)
    assert pages_in(tmp_path) == [tmp_path / PAGE_NAME]


@pytest.mark.parametrize(
    ("error", "ended"),
    [(ValueError("no more"), "ValueError: no more"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_a_run_that_stops_names_the_reason_and_the_resumed_run_continues_its_log(
    shards: Path, tmp_path: Path, error: BaseException, ended: str
) -> None:
    raises = (ValueError, KeyboardInterrupt, SystemExit)
    Run(shards, tmp_path, callbacks=[Raises(error, 7)], every_n_train_steps=4, raises=raises)
    assert [launch.how for launch in read_run(tmp_path).launches] == [ended]
    Run(shards, tmp_path, checkpoints(tmp_path)[0][1])
    run = read_run(tmp_path)
    assert [launch.how for launch in run.launches] == [ended, "finished"]
    assert [launch.start.place for launch in run.launches] == [(0, 0), (0, 64)]
    assert run.stats.num_samples == 7 * 16 + EPOCHS * NUM_SAMPLES - 64
    assert pages_in(tmp_path) == [tmp_path / PAGE_NAME]


@pytest.mark.parametrize("options", [{"data": {"report": False}}, {"data": {"monitor": False}}, {"fast_dev_run": 2}])
def test_no_log_is_written_where_none_is_wanted(shards: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    Run(shards, tmp_path, **options)
    assert [*tmp_path.rglob(LOG_NAME), *pages_in(tmp_path)] == []


@pytest.mark.parametrize("logs", [True, False])
def test_without_a_chosen_folder_the_log_is_beside_the_other_logs(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Run(shards, tmp_path, default_root_dir=None, logger=CSVLogger(tmp_path) if logs else False)
    expected = [tmp_path / "lightning_logs" / "version_0" / LOG_NAME] if logs else []
    assert list(tmp_path.rglob(LOG_NAME)) == expected


def test_the_log_is_in_the_folder_that_was_chosen(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, data={"report": tmp_path / "mine"})
    assert pages_in(tmp_path) == [tmp_path / "mine" / PAGE_NAME]


def test_a_report_needs_the_monitor() -> None:
    with pytest.raises(ValueError, match="monitor=False turns that off"):
        StreamingCallback(report="run", monitor=False)
