"""`train.py trainer=composer` on two devices, under Composer's launcher and torchrun: one run, one conversion."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")
pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync --extra lightning")
pytest.importorskip("torchvision", reason="the recipes need torchvision")

from support.launches import TINY, free_port, launch, torchrun, train  # noqa: E402

from lightning_stream.trainers.checkpoints import read_position  # noqa: E402

RUN = [
    *TINY,
    "trainer=composer",
    "hardware.devices=2",
    "++trainer.options.device=cpu",
    "++trainer.options.progress_bar=false",
]


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_composers_launcher_makes_one_run_and_torchrun_resumes_it(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "composer.cli", "-n", "2", "--master_port", str(free_port())]
    done = launch(tmp_path, [*start, *train(*RUN, "trainer.max_epochs=1")[1:]])
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-4000:]
    folder = tmp_path / "runs" / "flowers"
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]
    assert {"composer", "config.yaml", "summary.json"} <= {entry.name for entry in folder.iterdir()}
    assert done.stdout.count("written to") == 1
    assert len(list((tmp_path / "runs" / "shards" / "flowers").iterdir())) == 1
    newest = folder / "composer" / "latest-rank0.pt"
    first = _samples(newest)
    assert read_position(newest, trusted=True)["epoch"] == 1

    done = launch(tmp_path, torchrun(2, *RUN, "trainer.max_epochs=2", "ckpt_path=last"))
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("Validation accuracy") == 1
    assert (read_position(newest, trusted=True)["epoch"], _samples(newest)) == (2, 2 * first)


def _samples(checkpoint: Path) -> int:
    """What the clock of a run has counted."""
    clock = torch.load(checkpoint, weights_only=False)["state"]["timestamp"]["Timestamp"]
    return int(clock["sample"])
