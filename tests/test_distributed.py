"""Which processes train together: by the caller, torch.distributed, a launcher's variables, or one alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.warm import python

torch = pytest.importorskip("torch")

from servers.ports import free_port  # noqa: E402
from support.data import write_ids  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402

from lightning_stream import StatefulDataLoader, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.distributed import detect_world  # noqa: E402
from lightning_stream.order import World  # noqa: E402

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


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


@pytest.mark.parametrize(("rank", "size"), [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])
def test_a_rank_of_nobody_knows_how_many_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    """It would read all samples, as every other rank."""
    monkeypatch.setenv(rank, "2")
    with pytest.raises(ValueError, match=f"Set {size}"):
        detect_world()
    monkeypatch.setenv(size, "4")
    assert detect_world() == World(2, 4, 4)


def test_a_number_of_ranks_without_a_rank_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="WORLD_SIZE=4 without RANK"):
        assert detect_world() == World(0, 1, 1)


def test_what_the_caller_says_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert detect_world(World(3, 4, 4)) == World(3, 4, 4)
    assert detect_world((2, 4), replication=2) == World(2, 4, 4, 2)
    with pytest.raises(ValueError, match=r"replication is given twice.*Pass it to the World alone"):
        detect_world(World(3, 4, 4), replication=2)


SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "4(x4)"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@contextmanager
def process_group(rank: int, num_ranks: int) -> Iterator[None]:
    """A group of which only this process exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("variables", "ranks_per_node"),
    [
        (SRUN, 4),
        (MPIRUN, 4),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "2", **SRUN}, 2),
        ({"RANK": "5", "WORLD_SIZE": "16", **SRUN}, 4),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, 4),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x3),2(x2)"}, 16),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, 16),
    ],
    ids=["srun", "mpirun", "torchrun in srun", "RANK by hand in srun", "one task a node", "unequal nodes", "one task"],
)
def test_the_nodes_are_the_launchers_whether_or_not_a_process_group_is_up(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], ranks_per_node: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert detect_world((5, 16)) == World(5, 16, ranks_per_node)
    with process_group(5, 16):
        assert detect_world() == World(5, 16, ranks_per_node)


LAYOUTS = {
    "data outside": (("dp_replicate", "dp_shard", "tp"), [[0, 1], [2, 3], [4, 5], [6, 7]], 2),
    "data inside": (("tp", "dp_replicate", "dp_shard"), [[0, 4], [1, 5], [2, 6], [3, 7]], 4),
    "data around": (("dp_replicate", "tp", "dp_shard"), [[0, 2], [1, 3], [4, 6], [5, 7]], 2),
}


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_one_data_replica_get_the_same_samples_in_any_layout(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    names, replicas, replicas_per_node = LAYOUTS[layout]
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for replica, ranks in enumerate(replicas):
        for rank in ranks:
            with process_group(rank, 8):
                # Torch 2.7 keeps the parts of a mesh by its names, also beyond the process group.
                mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=[n.replace("tp", f"tp{rank}") for n in names])
                hsdp = mesh["dp_replicate", "dp_shard"]
                flat = hsdp._flatten(mesh_dim_name="dp")
                both = ("dp_replicate", "dp_shard")
                expected = World(replica, 4, replicas_per_node)
                assert detect_world((mesh, both)) == expected
                assert (
                    detect_world(mesh)
                    == detect_world(flat)
                    == detect_world(hsdp)
                    == World(replica, 4, replicas_per_node)
                )
                assert detect_world((hsdp, both)) == expected
                assert detect_world((mesh, f"tp{rank}")).num_ranks == 2


@pytest.mark.parametrize(("tp_rank", "dp_rank"), [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_permuted_ranks_get_the_samples_of_their_place_in_the_mesh(tp_rank: int, dp_rank: int) -> None:
    ranks = torch.tensor([[0, 3], [2, 1]])
    with process_group(int(ranks[dp_rank, tp_rank]), 4):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", f"tp{dp_rank}{tp_rank}"))
        assert detect_world(mesh) == detect_world(mesh["dp"]) == World(dp_rank, 2, 2)


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim:UserWarning")
def test_a_flattened_name_gives_the_ranks_of_its_group_or_an_error() -> None:
    for rank in range(8):
        with process_group(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", f"tp{rank}", "b"))
            flat = mesh["a", "b"]._flatten(mesh_dim_name="ab")
            replica = flat.mesh.tolist().index(rank)
            assert detect_world((flat, "ab")) == World(replica, 4, 4)
            if torch.equal(mesh["ab"].mesh, flat.mesh):
                assert detect_world((mesh, "ab")) == World(replica, 4, 4)
            else:  # torch 2.7
                with pytest.raises(ValueError, match="Pass the mesh that _flatten"):
                    detect_world((mesh, "ab"))


def test_a_mesh_that_leaves_the_data_dimension_open_is_refused() -> None:
    with process_group(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
        with pytest.raises(ValueError, match=r"looked for \['dp'\], the mesh has \['data', 'tp'\]"):
            detect_world(mesh)
        with pytest.raises(ValueError, match="must name its data dimension"):
            detect_world(init_device_mesh("cpu", (4,)))
        with pytest.raises(ValueError, match="must name its data dimension"):
            detect_world((mesh, ("data", "data")))
        with pytest.raises(ValueError, match="Omit replication"):
            detect_world((mesh, "data"), replication=2)


def test_a_world_is_a_pair_of_numbers_or_of_a_mesh_and_names_and_nothing_else(tmp_path: Path) -> None:
    """A job without data parallelism has no mesh of these names: its ranks share samples, so none is guessed."""
    wrong: tuple[Any, ...] = ("dp", 4, (1, 2, 3), ((0, 4), "dp"), (World(), "dp"), (1, "dp"), ("dp", 1), (0.0, 4), [])
    wrong += ((None, "dp"),)
    for world in wrong:
        with pytest.raises(TypeError, match=r"a world is a World, a pair .*found .*Pass e\.g\. world=\(mesh,"):
            detect_world(world)
    with process_group(3, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        assert detect_world((mesh, ["data"])) == detect_world((mesh, "data"))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"looked for \['dp'\].* Pass world=\(mesh, NAMES\)"):
            detect_world((mesh, "dp"))
        write_ids(str(tmp_path), range(8))
        dataset = StreamingDataset(remote=str(tmp_path), world=(mesh, "data"))
        assert [StreamingDataLoader(dataset, 1, world=world).detect_world() for world in (None, mesh)] == [
            detect_world((mesh, "data"))
        ] * 2
        assert StreamingDataLoader(dataset, 1, world=(mesh, "model")).detect_world() == detect_world((mesh, "model"))
        loader = StatefulDataLoader([1, 2, 3, 4], world=(mesh, ("data", "model")))
        assert loader.detect_world().num_replicas == 4


def test_ranks_that_share_samples_in_megatron_get_none_of_their_own_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    megatron = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_rank=lambda: 0,
        get_data_parallel_world_size=lambda: 1,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", megatron)
    alone = StatefulDataLoader([1, 2, 3, 4], batch_size=2)
    assert [batch.tolist() for batch in alone] == [[1, 2], [3, 4]]
    with process_group(1, 2):
        for options in ({}, {"replication": 1}):
            with pytest.raises(
                ValueError, match=r"replica 0 of 1, and without world= it would be in 1 of 2.*world=\(mp"
            ):
                next(iter(StatefulDataLoader([1, 2, 3, 4], **options)))
        for options in ({"replication": 2}, {"world": (0, 1)}):
            shared = StatefulDataLoader([1, 2, 3, 4], batch_size=2, **options)
            assert [batch.tolist() for batch in shared] == [[1, 2], [3, 4]]
        assert StatefulDataLoader([1, 2, 3, 4], world=(1, 2)).detect_world().num_replicas == 2


PROGRAM = """
import json, os, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.distributed import detect_world
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
world = detect_world(mesh)
seen = detect_world()
loader = StreamingDataLoader(StreamingDataset(remote=sys.argv[1], shuffle=True, world=mesh), global_batch_size=16)
ids = [batch["id"].tolist() for batch in loader]
out = [None] * 4
dist.all_gather_object(out, {"mesh": [world.rank, world.num_ranks], "seen": [seen.rank, seen.num_ranks], "ids": ids})
if dist.get_rank() == 0:
    print(json.dumps(out), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads can abort a process that takes the groups of a mesh down
"""


@pytest.mark.distributed
def test_ranks_that_share_a_place_in_the_data_dimension_get_the_same_samples(tmp_path: Path) -> None:
    import json

    write_ids(str(tmp_path / "shards"), range(100), size_limit=500)
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(__file__).resolve().parents[2])
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    command = ["-m", "torch.distributed.run", "--nproc-per-node=4", f"--master-port={free_port()}", "program.py"]
    done = subprocess.run(
        [python(), *command, str(tmp_path / "shards")],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    assert [rank["mesh"] for rank in ranks] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert [rank["seen"] for rank in ranks] == [[rank, 4] for rank in range(4)]
    assert ranks[0]["ids"] == ranks[1]["ids"]
    assert ranks[2]["ids"] == ranks[3]["ids"]
    seen = {number for rank in ranks for batch in rank["ids"] for number in batch}
    assert seen == set(range(100))
