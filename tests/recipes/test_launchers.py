"""The same command on two devices, however its processes are started: one run, one conversion, each sample once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from servers.ports import free_port

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")

import torch
from support.launches import launch, slurm, torchrun, train

from lightning_stream import StreamingDataset, verify_delivery

RUN = [
    "+data=table", "data.synthetic_count=200", "data.record_delivery=record", "hardware=cpu", "hardware.devices=2",
    "trainer.max_epochs=1", "trainer.enable_progress_bar=false",
]  # fmt: skip
LAUNCHERS = {"torchrun": ([torchrun(2, *RUN)], [{}]), "slurm": ([train(*RUN)] * 2, slurm(2))}


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "launcher", [pytest.param("torchrun", marks=pytest.mark.nightly), pytest.param("slurm", marks=pytest.mark.slow)]
)
def test_every_launcher_trains_on_the_planned_samples(launcher: str, tmp_path: Path) -> None:
    commands, envs = LAUNCHERS[launcher]
    done = launch(tmp_path, *commands, envs=envs)
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("train / ") == 1
    assert done.stdout.count("val/loss") == 1
    (shards,) = (tmp_path / "runs/shards/table").iterdir()
    dataset = StreamingDataset(remote=str(shards / "train"), local=str(tmp_path / "cache"))
    assert "exactly the planned samples" in verify_delivery(tmp_path / "record", dataset).sentence


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_steps", [[0, 3], pytest.param([4, 3], marks=pytest.mark.nightly)])
def test_a_plain_loop_of_which_one_process_is_signalled_first_saves_one_step_for_all(
    in_steps: list[int], tmp_path: Path
) -> None:
    """The other process failed in its next collective, or waited there, and nothing was saved."""
    plain = [setting for setting in RUN if "progress_bar" not in setting]
    model = ["model._target_=support.signalled.Signalled", f"+model.in_steps={in_steps}"]
    command = train(*plain, *model, "trainer=torch")
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    envs = [{**meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    stopped = launch(tmp_path, command, command, envs=envs, timeout_s=300)
    assert stopped.code == 128 + signal.SIGTERM, stopped.stderr[-4000:]
    (saved,) = tmp_path.rglob("last.ckpt")
    assert torch.load(saved, weights_only=True)["step"] == 3


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "data", [pytest.param("chats", marks=pytest.mark.nightly), pytest.param("image_chats", marks=pytest.mark.slow)]
)
def test_packed_chats_that_stop_on_two_devices_continue_on_one(data: str, tmp_path: Path) -> None:
    command = [
        f"+data={data}", "data.synthetic_count=60", "data.record_delivery=record", "hardware=cpu", "trainer=torch",
        "trainer.max_epochs=2", "model.d_model=32", "model.n_layers=1",
    ]  # fmt: skip
    stopped = launch(tmp_path, torchrun(2, *command, "hardware.devices=2", "trainer.max_steps=3"))
    assert stopped.code == 0, stopped.stdout[-2000:] + stopped.stderr[-4000:]
    done = launch(tmp_path, train(*command, "ckpt_path=last"))
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Trained up to epoch 2, sample 0: 0 lost, 0 repeated" in done.stdout + done.stderr
