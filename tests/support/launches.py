"""Starts `train.py` in every way that makes several processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """What the processes of a launch said."""

    code: int
    stdout: str
    stderr: str


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(cwd: Path, *commands: Sequence[str], envs: Sequence[Mapping[str, str]] = ({},)) -> Launched:
    """Start these commands side by side, each under its environment, and wait for all."""
    base = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    base |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    running = [
        subprocess.Popen(
            command, cwd=cwd, env={**base, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command, env in zip(commands, envs, strict=True)
    ]
    said = []
    try:
        said = [process.communicate(timeout=900) for process in running]
    finally:
        for process in running:
            process.kill()
    codes = [abs(process.returncode) for process in running]
    return Launched(max(codes), "\n".join(out for out, _ in said), "\n".join(err for _, err in said))


def train(*arguments: str) -> list[str]:
    """The command that starts `train.py`."""
    return [sys.executable, str(ROOT / "train.py"), *arguments]


def torchrun(num_processes: int, *arguments: str, more: Sequence[str] = ()) -> list[str]:
    """The same under torchrun."""
    given = [f"--nproc-per-node={num_processes}", *(more or (f"--master-port={free_port()}",))]
    return [sys.executable, "-m", "torch.distributed.run", *given, *train(*arguments)[1:]]


def slurm(num_tasks: int) -> list[dict[str, str]]:
    """The environment that each task of a job on one node finds."""
    job = {
        "SLURM_JOB_ID": "4711", "SLURM_JOBID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": str(num_tasks),
        "SLURM_NTASKS_PER_NODE": str(num_tasks), "SLURM_NNODES": "1", "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    return [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(num_tasks)]
