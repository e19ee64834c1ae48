"""`train.py trainer=composer`: on one device, and resumed on two under Composer's launcher and torchrun."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.warm import python

pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")
pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync --extra lightning")
pytest.importorskip("hydra", reason="the configs are composed by Hydra: uv sync")

from servers.ports import free_port

from lightning_stream.trainers.checkpoints import read_position

ROOT = Path(__file__).resolve().parents[2]
RUN = [
    str(ROOT / "train.py"), "+data=table", "data.synthetic_count=200", "data.num_workers=0", "trainer=composer",
    "hardware=cpu", "+trainer.options.progress_bar=false",
]  # fmt: skip


def _launch(folder: Path, launcher: Sequence[str], *overrides: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [python(), *launcher, *RUN, *overrides]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _position(folder: Path) -> tuple[int, int]:
    """The epoch of the last checkpoint, and the samples of it that were trained on: 171 are all."""
    state = read_position(folder / "runs/table/checkpoints/last.ckpt", trusted=True)
    return state["epoch"], state["position"]


@pytest.mark.timeout(600)
def test_a_run_on_one_device_ends_with_its_validation_loss(tmp_path: Path) -> None:
    assert "val/loss" in _launch(tmp_path, [], "trainer.max_epochs=1")
    assert _position(tmp_path) == (0, 171)


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_composers_launcher_makes_one_run_and_torchrun_resumes_it(tmp_path: Path) -> None:
    composer = ["-m", "composer.cli", "-n", "2", "--master_port", str(free_port())]
    printed = _launch(tmp_path, composer, "trainer.max_epochs=1")
    assert printed.count("train / ") == 1
    assert len(list((tmp_path / "runs/shards/table").iterdir())) == 1
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    _launch(tmp_path, torchrun, "trainer.max_epochs=2", "ckpt_path=last")
    assert _position(tmp_path) == (1, 171)
