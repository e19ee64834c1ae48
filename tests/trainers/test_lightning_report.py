"""Under Lightning every run that leaves files leaves a report of its data, also where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from support.lightning_runs import EPOCHS, NUM_SAMPLES, Run, checkpoints

from lightning_stream import StreamingCallback
from lightning_stream.pages import embedded

pytestmark = pytest.mark.filterwarnings("ignore:.*(callbacks used to create|without a model|You def).*")
STEPS_PER_EPOCH = 11


class Raises(Callback):
    def __init__(self, error: BaseException, step: int) -> None:
        self.error, self.step = error, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error


def values_in(folder: Path) -> dict[str, Any]:
    return embedded((folder / "data_report.html").read_text(encoding="utf-8"))


def test_a_run_leaves_its_report_in_its_folder(shards: Path, tmp_path: Path) -> None:
    run = Run(shards, tmp_path)
    values, stats = values_in(tmp_path), run.data.position_callback.monitor.stats()
    assert sum(values["columns"]["samples"]) == stats.num_samples == EPOCHS * NUM_SAMPLES
    assert sum(values["columns"]["wait_s"]) == pytest.approx(stats.wait_s, abs=1e-4)
    assert values["columns"]["step"][-1] == EPOCHS * STEPS_PER_EPOCH
    (launch,) = values["kept"]["launches"]
    assert (launch["ended"], launch["to"], launch["lost"], launch["repeated"]) == ("finished", [EPOCHS, 0], 0, 0)


@pytest.mark.parametrize(
    ("error", "ended"),
    [(ValueError("no more"), "ValueError: no more"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_a_run_that_stops_names_the_reason_and_the_resumed_run_continues_its_page(
    shards: Path, tmp_path: Path, error: BaseException, ended: str
) -> None:
    raises = (ValueError, KeyboardInterrupt, SystemExit)
    Run(shards, tmp_path, callbacks=[Raises(error, 7)], every_n_train_steps=4, raises=raises)
    assert values_in(tmp_path)["kept"]["launches"][0]["ended"] == ended
    Run(shards, tmp_path, checkpoints(tmp_path)[0][1])
    values = values_in(tmp_path)
    assert [one["ended"] for one in values["kept"]["launches"]] == [ended, "finished"]
    assert [one["from"] for one in values["kept"]["launches"]] == [[0, 0], [0, 64]]
    assert sum(values["columns"]["samples"]) == 7 * 16 + EPOCHS * NUM_SAMPLES - 64
    assert [path.name for path in tmp_path.glob("*.html")] == ["data_report.html"]


@pytest.mark.parametrize("options", [{"data": {"report": False}}, {"data": {"monitor": False}}, {"fast_dev_run": 2}])
def test_no_report_is_written_where_none_is_wanted(shards: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    Run(shards, tmp_path, **options)
    assert list(tmp_path.glob("*.html")) == []


@pytest.mark.parametrize("logs", [True, False])
def test_without_a_chosen_folder_the_report_is_beside_the_logs(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Run(shards, tmp_path, default_root_dir=None, logger=CSVLogger(tmp_path) if logs else False)
    expected = [tmp_path / "lightning_logs" / "version_0" / "data_report.html"] if logs else []
    assert list(tmp_path.rglob("*.html")) == expected


def test_the_report_has_the_path_that_was_chosen(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, data={"report": tmp_path / "mine" / "run.html"})
    assert [path.name for path in tmp_path.rglob("*.html")] == ["run.html"]


def test_a_report_needs_the_monitor() -> None:
    with pytest.raises(ValueError, match="monitor=False turns that off"):
        StreamingCallback(report="run.html", monitor=False)
