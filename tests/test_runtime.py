"""Who trains together: what the caller says, then torch.distributed, then a launcher's variables, then one alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lightning_stream.loading.distributed import detect_world  # noqa: E402
from lightning_stream.order import World  # noqa: E402

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith(("SLURM_", "OMPI_")):
            monkeypatch.delenv(name)


def test_alone_without_any_launcher() -> None:
    assert detect_world() == World(0, 1, 1)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, World(5, 8, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, World(1, 2, 2)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, World(5, 8, 4)),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            World(3, 4, 2),
        ),
    ],
    ids=["torchrun", "no local size", "srun", "mpirun"],
)
def test_a_launchers_variables_are_understood(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: World
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert detect_world() == expected


def test_a_batch_script_of_slurm_is_one_process_whatever_tasks_it_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert detect_world() == World(0, 1, 1)


def test_broken_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "zero")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK='zero'"):
        detect_world()


def test_what_the_caller_says_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert detect_world(World(3, 4, 4)) == World(3, 4, 4)
    assert detect_world((2, 4), replication=2) == World(2, 4, 4, 2)
    with pytest.raises(ValueError, match="replication is given twice"):
        detect_world(World(3, 4, 4), replication=2)


PROGRAM = """
import json, os, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.loading.distributed import detect_world
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
world = detect_world(mesh)
told = detect_world()
loader = StreamingDataLoader(StreamingDataset(remote=sys.argv[1], shuffle=True, world=mesh), global_batch_size=16)
ids = [batch["id"].tolist() for batch in loader]
out = [None] * 4
dist.all_gather_object(out, {"mesh": [world.rank, world.num_ranks], "told": [told.rank, told.num_ranks], "ids": ids})
if dist.get_rank() == 0:
    print(json.dumps(out), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads can abort a process that takes the groups of a mesh down
"""


@pytest.mark.distributed
def test_ranks_that_share_a_place_in_the_data_dimension_get_the_same_samples(tmp_path: Path) -> None:
    import json

    from lightning_stream import MDSWriter

    with MDSWriter(out=str(tmp_path / "shards"), columns={"id": "int"}, size_limit=500) as writer:
        for number in range(100):
            writer.write({"id": number})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(__file__).resolve().parent.parent)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    command = ["-m", "torch.distributed.run", "--nproc-per-node=4", f"--master-port={port}", "program.py"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "shards")],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    assert [rank["mesh"] for rank in ranks] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert [rank["told"] for rank in ranks] == [[rank, 4] for rank in range(4)]
    assert ranks[0]["ids"] == ranks[1]["ids"]
    assert ranks[2]["ids"] == ranks[3]["ids"]
    seen = {number for rank in ranks for batch in rank["ids"] for number in batch}
    assert seen == set(range(100))
