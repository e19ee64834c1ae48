"""The same command on two devices, however its processes are started: one run, one conversion, each sample once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")

from support.launches import LIGHTNING, TINY, launch, planned_ids, slurm, torchrun, train, trained_ids

TWO = "hardware.devices=2"


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("lightning", marks=pytest.mark.slow),
        pytest.param("torchrun", marks=pytest.mark.slow),
        pytest.param("slurm", marks=pytest.mark.slow),
    ],
)
def test_every_launcher_trains_on_the_planned_samples(launcher: str, tmp_path: Path) -> None:
    run = [*TINY, *LIGHTNING, TWO]
    if launcher == "slurm":
        done = launch(tmp_path, train(*run), train(*run), envs=slurm(2))
    else:
        done = launch(tmp_path, torchrun(2, *run) if launcher == "torchrun" else train(*run))
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-4000:]
    folder = tmp_path / "runs" / "flowers"
    assert done.stdout.count("written to") == 1
    assert done.stdout.count("Validation accuracy") == 1
    assert [each.name for each in (folder / "log").iterdir()] == ["version_0"]
    assert trained_ids(folder, 2) == planned_ids(tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_plain_loop_resumes_on_two_devices(tmp_path: Path) -> None:
    run = [*TINY, "trainer=torch", "trainer.enable_progress_bar=false"]
    first = launch(tmp_path, train(*run, "trainer.max_epochs=1"))
    assert first.code == 0, first.stderr[-4000:]
    second = launch(tmp_path, torchrun(2, *run, TWO, "trainer.max_epochs=2", "ckpt_path=last"))
    assert second.code == 0, second.stderr[-4000:]
    assert "Resumed at epoch 1" in second.stdout
    summary = json.loads((tmp_path / "runs" / "flowers" / "summary.json").read_text())
    assert set(summary["history"]) == {"0", "1"}
