"""Starts `train.py`, or a worker of the resume contract, in every way that makes several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers.ports import free_port

from support.warm import python

ROOT = Path(__file__).resolve().parent.parent.parent
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """What the processes of a launch said."""

    code: int
    stdout: str
    stderr: str


def launch(
    cwd: Path, *commands: Sequence[str], envs: Sequence[Mapping[str, str]] = ({},), timeout_s: float = 900
) -> Launched:
    """Start these commands side by side, each under its environment, and wait for all; none outlives the call."""
    base = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    base |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "FSDP_VERSION": "2"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [
        subprocess.Popen(command, cwd=cwd, env={**base, **env}, start_new_session=True, **pipes)
        for command, env in zip(commands, envs, strict=True)
    ]
    ends_at = time.monotonic() + timeout_s
    try:
        said = [process.communicate(timeout=max(1.0, ends_at - time.monotonic())) for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    codes = [abs(process.returncode) for process in running]
    return Launched(max(codes), "\n".join(out for out, _ in said), "\n".join(err for _, err in said))


def worker(host: str, shards: Path, out: Path, **options: Any) -> list[str]:
    """The command that starts a worker of the resume contract."""
    text = json.dumps({"shards": str(shards), "out": str(out), **options}, default=str)
    return [python(), "-m", "support.worker", host, text]


def under(launcher: str, num_processes: int, command: Sequence[str]) -> list[str]:
    """A command of Python under ``"torchrun"`` or ``"composer"``."""
    port = str(free_port())
    if launcher == "torchrun":
        start = ["-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", f"--master-port={port}"]
    else:
        start = ["-m", "composer.cli", "-n", str(num_processes), "--master_port", port]
    return [python(), *start, *command[1:]]


def train(*arguments: str) -> list[str]:
    """The command that starts `train.py`."""
    return [python(), str(ROOT / "train.py"), *arguments]


def torchrun(num_processes: int, *arguments: str) -> list[str]:
    """The same under torchrun."""
    return under("torchrun", num_processes, train(*arguments))


def slurm(num_tasks: int) -> list[dict[str, str]]:
    """The environment that each task of a job on one node finds."""
    job = {
        "SLURM_JOB_ID": "4711", "SLURM_JOBID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": str(num_tasks),
        "SLURM_NTASKS_PER_NODE": str(num_tasks), "SLURM_NNODES": "1", "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    return [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(num_tasks)]
