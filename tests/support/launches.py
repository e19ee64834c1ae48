"""Starts `train.py` in every way that makes several processes, and says what they left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# No batch normalisation: an epoch's last partial batch may give a device a single sample.
TINY = [
    "+data=flowers", "data.synthetic_count=60", "data.val_fraction=0.2", "data.size_limit=16kb", "data.image_size=32",
    "data.global_batch_size=8", "data.num_workers=0", "model.arch=squeezenet1_1", "+model.model_kwargs.dropout=0.0",
    "hardware=cpu", "num_threads=1",
]  # fmt: skip
LIGHTNING = ["trainer.max_epochs=1", "callbacks=sample_log", "trainer.enable_progress_bar=false"]
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


def trained_ids(folder: Path, num_ranks: int) -> list[list[int]]:
    """The sorted ids of each optimizer step, over the ranks' files."""
    files = sorted((folder / "samples").iterdir())
    assert [file.name for file in files] == [f"rank-{rank}.jsonl" for rank in range(num_ranks)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [sorted(one for line in step for one in line["ids"]) for step in zip(*lines, strict=True)]


def planned_ids(root: Path, *, seed: int = 1) -> list[list[int]]:
    """What the first epoch of `TINY` is made of, by the order alone: sorted ids of each step."""
    from lightning_stream import StreamingDataLoader
    from recipes.data.images import ImageData

    dataset = ImageData(
        source="synthetic", synthetic_count=60, val_fraction=0.2, size_limit="16kb", hashes=["xxh3_64"],
        image_size=32, global_batch_size=8, seed=seed, remote=str(root / "shards" / "flowers"),
        local=str(root / "cache" / "flowers"),
    ).train_dataset  # fmt: skip
    loader = StreamingDataLoader(dataset, global_batch_size=8)
    steps = []
    for _ in loader:
        assert loader.last_batch is not None
        steps.append(sorted(loader.last_batch.ids[~loader.last_batch.filler].tolist()))
    return steps
