"""Which processes train together: the `World`, detected at the moment it is needed.

Order of belief: what the caller says (a `World`, a ``(rank, num_ranks)`` pair, a device mesh); the process group
of `torch.distributed` where one is up; the variables of a launcher (torchrun, Composer, SLURM, Open MPI); else one
process alone. Never makes a process group, never writes the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

import torch.distributed as dist

from lightning_stream.order import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WorldLike = Union[World, tuple[int, int], "DeviceMesh", None]

# (rank, number of ranks, ranks on this node) as each launcher names them. SLURM's step variables exist only inside
# an `srun` step: in a batch script SLURM_NTASKS is set although a single process runs.
_LAUNCHERS = {
    "torchrun or composer": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
}


def detect_world(given: WorldLike = None, replication: int = 1, data_dimension: str = "dp") -> World:
    """Say which process of which world this is.

    Args:
        given: A `World` (returned as it is), a ``(rank, num_ranks)`` pair, a device mesh, or None to detect.
        replication: Groups of this many consecutive ranks get the same samples (tensor or sequence parallel).
        data_dimension: With a device mesh, the name of its data-parallel dimension.

    Raises:
        ValueError: The parts contradict each other.
    """
    if isinstance(given, World):
        if replication not in (1, given.replication):
            raise ValueError(f"replication is given twice: {given.replication} in the world, {replication} beside it")
        return given
    if isinstance(given, tuple):
        rank, num_ranks = given
        return World(rank, num_ranks, _ranks_per_node(num_ranks, os.environ), replication)
    if given is not None:
        return _world_of_mesh(given, data_dimension)
    if dist.is_available() and dist.is_initialized():
        num_ranks = dist.get_world_size()
        return World(dist.get_rank(), num_ranks, _ranks_per_node(num_ranks, os.environ), replication)
    rank, num_ranks, ranks_per_node = _world_of_launcher(os.environ)
    return World(rank, num_ranks, ranks_per_node, replication)


def _world_of_launcher(environ: Mapping[str, str]) -> tuple[int, int, int]:
    for launcher, (rank_name, size_name, local_name) in _LAUNCHERS.items():
        if rank_name not in environ or size_name not in environ:
            continue
        try:
            rank, num_ranks = int(environ[rank_name]), int(environ[size_name])
        except ValueError as error:
            found = f"{rank_name}={environ[rank_name]!r}, {size_name}={environ[size_name]!r}"
            raise ValueError(f"{launcher} sets whole numbers in its variables; found {found}") from error
        return rank, num_ranks, _ranks_per_node(num_ranks, environ, local_name)
    return 0, 1, 1


def _ranks_per_node(num_ranks: int, environ: Mapping[str, str], name: str = "LOCAL_WORLD_SIZE") -> int:
    """Ranks on each node; where no launcher says so, all ranks are taken to share one node."""
    # SLURM writes "4(x2)" for four tasks on each of two nodes.
    text = environ.get(name, "").split("(")[0]
    local = int(text) if text.isdigit() else num_ranks
    return local if 0 < local <= num_ranks and num_ranks % local == 0 else num_ranks


def _world_of_mesh(mesh: DeviceMesh, data_dimension: str) -> World:
    """The world as the mesh's data dimension sees it: ranks that differ only elsewhere get the same samples."""
    names: tuple[str, ...] = tuple(mesh.mesh_dim_names or ())
    if data_dimension not in names:
        raise ValueError(
            f"a device mesh must name its data dimension: looked for {data_dimension!r}, the mesh has {list(names)}. "
            f"Pass data_dimension= with one of them."
        )
    replicas: Any = mesh[data_dimension]
    # The data coordinate alone decides the samples, whatever the layout of ranks in the mesh.
    return World(replicas.get_local_rank(), replicas.size(), _replicas_per_node(mesh, replicas.size()), 1)


def _replicas_per_node(mesh: DeviceMesh, num_replicas: int) -> int:
    num_nodes = max(1, mesh.size() // _ranks_per_node(mesh.size(), os.environ))
    return num_replicas // num_nodes if num_replicas % num_nodes == 0 else num_replicas
