"""Which processes train together: the `World`, detected when it is needed.

In this order: what the caller passes (a `World`, a ``(rank, num_ranks)`` pair, a device mesh, or a pair of that and the
names of its data dimensions); the process group of `torch.distributed` if one is up; the variables of a launcher
(torchrun, Composer, Open MPI, SLURM); one process alone.
Nothing here makes a process group or writes to the environment.

All ranks must see the same nodes, since a node's samples depend on their number. Most launchers give a process only how
many ranks its own node has: where nodes differ in size, ranks agree by the store of the process group.
"""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any, Union, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.utils.data import get_worker_info

from lightning_stream.order import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Dimensions = Union[str, tuple[str, ...]]
WorldLike = Union[World, tuple[int, int], "DeviceMesh", tuple["DeviceMesh", Dimensions], None]

# (rank, number of ranks, ranks on this node) as each launcher names them. SLURM's step variables exist only inside
# an `srun` step: in a batch script SLURM_NTASKS is set although a single process runs.
_LAUNCHERS = {
    "torchrun or composer": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
}
_agreed: WeakKeyDictionary[Any, dict[int, int]] = WeakKeyDictionary()  # ranks per node, by group and number of ranks


def with_names(world: WorldLike, names: Dimensions = "dp") -> tuple[Any, Dimensions]:
    """A world, and the names of the data dimensions if it is a mesh: those beside it, else these."""
    if isinstance(world, tuple | list) and len(world) == 2 and isinstance(world[1], str | tuple | list):
        return world
    return world, names


def detect_world(world: WorldLike = None, replication: int = 1, names: Dimensions = "dp") -> World:
    """Return the world and this process's rank in it.

    Example: ``detect_world((mesh, ("dp_replicate", "dp_shard")))``.

    Args:
        world: A `World` (returned as it is), a ``(rank, num_ranks)`` pair, a device mesh, a pair of a mesh and the
            names of its data-parallel dimensions, flattened ones included, or None to detect.
        replication: Groups of this many consecutive ranks get the same samples (tensor or sequence parallel).
        names: The data dimensions of a mesh alone. ``"dp"`` also stands for ``dp_replicate`` and ``dp_shard`` in a mesh
            that has no ``"dp"``.

    Raises:
        TypeError: The world is something else.
        ValueError: The arguments or the launcher's variables contradict each other, or a rank has no number of ranks.
    """
    if isinstance(world, World):
        if replication not in (1, world.replication):
            raise ValueError(
                f"replication is given twice: {world.replication} in the world, {replication} beside it. Pass it to "
                "the World alone"
            )
        return world
    mesh, names = with_names(world, names)
    if hasattr(mesh, "mesh_dim_names"):
        if replication != 1:
            raise ValueError(
                "a device mesh says itself which ranks get the same samples: those that differ only outside its "
                f"data dimension {names!r}; found replication={replication} beside it. Omit replication"
            )
        return _world_of_mesh(mesh, names)
    if world is not None:
        if not isinstance(world, tuple | list) or [isinstance(value, Integral) for value in world] != [True, True]:
            raise TypeError(
                "a world is a World, a pair (rank, num_ranks), a device mesh, or a pair of a device mesh and the names "
                f'of its data dimensions; found {world!r}. Pass e.g. world=(mesh, "dp_shard"); (0, 1) where all ranks '
                "get the same samples; or omit it where each gets its own"
            )
        rank, num_ranks = cast("tuple[int, int]", world)
    elif dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        num_ranks = dist.get_world_size()
    else:
        rank, num_ranks = _rank_of_launcher(os.environ)
    return World(rank, num_ranks, _agreed_ranks_per_node(num_ranks), replication)


def refuse_other_replicas(world: World) -> None:
    """Raise ValueError where Megatron, whose tensor and pipeline parallel ranks share samples, has other replicas."""
    megatron: Any = sys.modules.get("megatron.core.parallel_state")
    if megatron is None or not megatron.model_parallel_is_initialized():
        return
    replica = megatron.get_data_parallel_rank()
    num_replicas = megatron.get_data_parallel_world_size()
    if (world.replica, world.num_replicas) != (replica, num_replicas):
        raise ValueError(
            f"ranks of one data replica must get the same samples, but Megatron has rank {world.rank} in replica "
            f"{replica} of {num_replicas}, and without world= it would be in {world.replica} of {world.num_replicas}. "
            "Pass world=(mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()) of "
            "megatron.core.parallel_state"
        )


def _rank_of_launcher(environ: Mapping[str, str]) -> tuple[int, int]:
    for launcher, (rank, size, _) in _LAUNCHERS.items():
        if rank in environ and size in environ:
            try:
                return int(environ[rank]), int(environ[size])
            except ValueError as error:
                variables = f"{rank}={environ[rank]!r}, {size}={environ[size]!r}"
                raise ValueError(f"{launcher} sets whole numbers in its variables; found {variables}") from error
    for launcher, (rank, size, _) in _LAUNCHERS.items():
        if environ.get(rank, "0") != "0":
            raise ValueError(
                f"each process must know how many train together, or all of them would read all samples; {launcher} "
                f"sets {rank} and {size}, but found {rank}={environ[rank]} alone. Set {size}, make the process group "
                "first, or pass world="
            )
    if environ.get("WORLD_SIZE", "1") != "1" and "LOCAL_RANK" not in environ:  # Lightning's children have no RANK
        warnings.warn(
            f"WORLD_SIZE={environ['WORLD_SIZE']} without RANK: this process reads all samples, as one that trains "
            "alone. Set RANK, make the process group first, or pass world=",
            stacklevel=2,
        )
    return 0, 1


def _agreed_ranks_per_node(num_ranks: int) -> int:
    """Ranks on each node: what the rank of the process group says that asks first; without a group, what this one says.

    It may differ between ranks where nodes differ in size.
    """
    ranks_per_node = _ranks_per_node(num_ranks, os.environ)
    if not (dist.is_available() and dist.is_initialized()):
        return ranks_per_node
    agreed = _agreed.setdefault(dist.group.WORLD, {})
    if num_ranks not in agreed and get_worker_info() is None:  # a worker shares the connection of its trainer
        with suppress(RuntimeError, ValueError):  # MPI has no store
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
            key = f"lightning_stream/{num_ranks}/ranks_per_node"
            agreed[num_ranks] = int(store.compare_set(key, "", str(ranks_per_node)))
    return agreed.get(num_ranks, ranks_per_node)


def _ranks_per_node(num_ranks: int, environ: Mapping[str, str]) -> int:
    """Ranks on each node, from the launcher's number of nodes; all ranks if there is no launcher."""
    for _, size_name, local_name in _LAUNCHERS.values():
        size = environ.get(size_name, "")
        # SLURM writes "4(x2)" for four tasks on each of two nodes, "4,2" where they differ.
        local = re.fullmatch(r"([1-9]\d*)(\(x\d+\))?", environ.get(local_name, ""))
        if local is None or not size.isdigit():
            continue
        num_nodes, rest = divmod(int(size), int(local[1]))
        # The launcher may have started one task per node, and that task the node's ranks.
        if num_nodes and rest == 0 and num_ranks % num_nodes == 0:
            return num_ranks // num_nodes
    return num_ranks


def _world_of_mesh(mesh: DeviceMesh, data_names: Dimensions) -> World:
    """The world of data replicas: ranks that differ only in other dimensions of the mesh get the same samples."""
    mesh, names = _data_mesh(mesh, (data_names,) if isinstance(data_names, str) else tuple(data_names))
    dimensions = [(mesh.mesh_dim_names or ()).index(name) for name in names]
    num_replicas = math.prod(mesh.size(dimension) for dimension in dimensions)
    # The ranks of each replica, in any layout.
    replicas = mesh.mesh.movedim(dimensions, list(range(len(dimensions)))).reshape(num_replicas, -1).tolist()
    indices = [replica for replica, ranks in enumerate(replicas) if mesh.get_rank() in ranks]
    # Torch 2.7 gives the wrong ranks for root["flat"] where the flattened dimensions are not neighbours.
    group = dist.get_process_group_ranks(mesh.get_group()) if mesh.ndim == 1 else None
    if not indices or (group and {*group} != {*mesh.mesh.tolist()}):
        raise ValueError(
            f"the data mesh must have this rank and the ranks of its group; found rank {mesh.get_rank()} and {mesh}. "
            "Pass the mesh that _flatten() returned, or world=(mesh, NAMES) with the root mesh and a tuple of its names"
        )
    return World(indices[0], num_replicas, _replicas_per_node(replicas))


def _data_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[DeviceMesh, tuple[str, ...]]:
    """The mesh that has all of these dimensions; a flattened dimension is a mesh of its own."""
    has = mesh.mesh_dim_names or ()
    if names == ("dp",) and "dp" not in has:
        names = tuple(name for name in has if name in ("dp_replicate", "dp_shard")) or names
    if len(names) == 1 and names[0] not in has:
        with suppress(KeyError, RuntimeError):  # it has no such dimension
            return mesh[names[0]], names
    if not names or len({*names} & {*has}) < len(names):
        raise ValueError(
            f"a device mesh must name its data dimension: looked for {list(names)}, the mesh has {list(has)}. Pass "
            "world=(mesh, NAMES) with one of them or a tuple of several, or pass the flattened mesh itself"
        )
    return mesh, names


def _replicas_per_node(replicas: list[list[int]]) -> int:
    """Consecutive replicas on each node; all of them where the layout gives the nodes something else."""
    ranks_per_node = _agreed_ranks_per_node(dist.get_world_size())
    on_node: dict[int, list[int]] = defaultdict(list)
    for replica, ranks in enumerate(replicas):
        for node in {rank // ranks_per_node for rank in ranks}:
            on_node[node].append(replica)
    groups = sorted({tuple(group) for group in on_node.values()})
    equal = len({len(group) for group in groups}) == 1
    return len(groups[0]) if equal and sum(groups, ()) == tuple(range(len(replicas))) else len(replicas)
