"""Starts runs under Composer's launcher and torchrun, and reads what their ranks wrote down."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from support.composer_runs import checkpoints

TESTS = Path(__file__).resolve().parent.parent
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_PORT")


def launch(out: Path, shards: Path, world: int, launcher: str = "composer", **options: Any) -> int:
    """Run one link of a chain to its end; the exit code."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "FSDP_VERSION": "2"}
    argument = json.dumps({"shards": str(shards), "out": str(out), **options})
    program = ["-m", "support.composer_worker", argument]
    if world > 1 and launcher == "composer":
        start = ["-m", "composer.cli", "-n", str(world), "--master_port", str(_free_port())]
        program = [*start, "-m", *program[1:]]
    elif world > 1:
        start = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={_free_port()}"]
        program = [*start, *program]
    done = subprocess.run([sys.executable, *program], env=env, capture_output=True, text=True, timeout=900, check=False)
    if "stop_at" not in options:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.returncode


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ranks_of(out: Path) -> list[dict[str, Any]]:
    """What each rank wrote."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]


def steps_of(out: Path, below: int = 10**9, ranks: slice = slice(None)) -> dict[int, list[int]]:
    """Optimizer step -> sorted sample ids over all ranks."""
    steps: dict[int, list[int]] = defaultdict(list)
    for rank in ranks_of(out)[ranks]:
        for step, ids in rank["steps"].items():
            if int(step) < below:
                steps[int(step)] += ids
    return {step: sorted(ids) for step, ids in steps.items()}


def newest(out: Path) -> tuple[int, Path]:
    """The last checkpoint of a run, and its step."""
    return list(checkpoints(out).items())[-1]
