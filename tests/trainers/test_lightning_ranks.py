"""Runs on several ranks that end badly: they end, and the last checkpoint continues them exactly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import torch
from support.lightning_runs import EPOCHS, Run, checkpoints

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.distributed,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*"),
]
TESTS = Path(__file__).resolve().parent.parent
STEPS = EPOCHS * 11
LIMIT_S = 400  # for a run that should end by itself within seconds, on a busy machine


def start(out: Path, shards: Path, launcher: str, **options: Any) -> list[subprocess.Popen[str]]:
    """Two ranks, by torchrun, by Lightning's own launcher, or as two tasks of a SLURM job."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        env.pop(name, None)
    port = free_port()
    argument = json.dumps({"shards": str(shards), "out": str(out), "devices": 2, "strategy": "ddp", **options})
    worker = [sys.executable, "-m", "support.lightning_worker", argument]
    if launcher == "torchrun":
        run = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
        return [popen([sys.executable, *run, *worker[1:]], env)]
    env["MASTER_PORT"] = str(port)
    if launcher == "lightning":
        return [popen(worker, env)]
    job = {"JOB_ID": "7", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1", "NODEID": "0"}
    job |= {"NODELIST": "127.0.0.1"}
    tasks = [{**job, "PROCID": str(task), "LOCALID": str(task)} for task in range(2)]
    own = {"MASTER_ADDR": "127.0.0.1"}
    return [popen(worker, {**env, **own, **{f"SLURM_{k}": v for k, v in task.items()}}) for task in tasks]


def popen(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def end_of(processes: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    """Their exit codes and what they said; a run that does not end is ended, and fails the test."""
    end = time.monotonic() + LIMIT_S
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=max(1.0, end - time.monotonic()))[0])  # noqa: PERF401
    except subprocess.TimeoutExpired:
        pytest.fail(f"the run did not end within {LIMIT_S} s")
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return [process.returncode for process in processes], "\n".join(said)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def steps_of(out: Path, begin: int = 0, end: int = STEPS) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = defaultdict(list)
    for path in out.glob("rank*.json"):
        for step, ids in json.loads(path.read_text())["steps"].items():
            if begin <= int(step) < end:
                steps[int(step)] += ids
    return {step: sorted(ids) for step, ids in steps.items()}


@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
@pytest.mark.parametrize(
    "ends",
    [(8, [1], "an exception"), (8, [0], "an exception"), (8, [1], 9), (8, [0, 1], 15)],
    ids=["exception on rank 1", "exception on rank 0", "kill -9 of rank 1", "SIGTERM on both"],
)
def test_a_run_that_ends_badly_ends_and_continues_from_its_last_checkpoint(
    shards: Path, tmp_path: Path, launcher: str, ends: tuple[int, list[int], str | int]
) -> None:
    whole = Run(shards, tmp_path / "whole", every_n_train_steps=STEPS).steps
    _, said = end_of(start(tmp_path / "bad", shards, launcher, every=3, ends=ends))
    step, path = checkpoints(tmp_path / "bad")[-1]
    assert step == (9 if ends[2] == signal.SIGTERM else 6), said[-2000:]  # a SIGTERM lets the step be finished
    codes, said = end_of(start(tmp_path / "again", shards, launcher, ckpt=str(path)))
    assert codes == [0], said[-3000:]
    assert steps_of(tmp_path / "bad", end=step) | steps_of(tmp_path / "again") == whole


def test_ctrl_c_of_all_ranks_ends_the_run_and_it_continues(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path / "whole", every_n_train_steps=STEPS).steps
    end_of(start(tmp_path / "bad", shards, "torchrun", every=3, ends=(8, [0, 1], 2)))
    step, path = checkpoints(tmp_path / "bad")[-1]
    assert step == 6
    codes, said = end_of(start(tmp_path / "again", shards, "torchrun", ckpt=str(path)))
    assert codes == [0], said[-3000:]
    assert steps_of(tmp_path / "bad", end=step) | steps_of(tmp_path / "again") == whole


@pytest.mark.parametrize(("launcher", "signalled"), [("torchrun", [1]), ("lightning", [0]), ("torchrun", [0, 1])])
def test_a_signal_to_any_rank_lets_all_ranks_save_the_same_step(
    shards: Path, tmp_path: Path, launcher: str, signalled: list[int]
) -> None:
    whole = Run(shards, tmp_path / "whole", every_n_train_steps=STEPS).steps
    ends = (5, signalled, int(signal.SIGTERM))
    codes, said = end_of(start(tmp_path / "bad", shards, launcher, every=99, graceful=4, ends=ends))
    assert codes != [0], said[-3000:]
    path = tmp_path / "bad" / "graceful" / "last.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == 8, said[-3000:]
    codes, said = end_of(start(tmp_path / "again", shards, launcher, ckpt=str(path)))
    assert codes == [0], said[-3000:]
    assert steps_of(tmp_path / "bad", end=8) | steps_of(tmp_path / "again") == whole


def test_two_tasks_of_a_requeued_slurm_job_continue_by_themselves(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path / "whole", every_n_train_steps=STEPS).steps
    codes, said = end_of(start(tmp_path / "job", shards, "slurm", every=99, ends=(5, [0, 1], 10), max_steps=7))
    assert codes == [0, 0], said[-3000:]
    (hpc,) = (tmp_path / "job").glob("hpc_ckpt_*.ckpt")
    assert torch.load(hpc, weights_only=True)["global_step"] == 5
    first = steps_of(tmp_path / "job", end=5)
    codes, said = end_of(start(tmp_path / "job", shards, "slurm", every=99))
    assert codes == [0, 0], said[-3000:]
    again = steps_of(tmp_path / "job")
    assert min(again) == 5
    assert first | again == whole
