"""The processes that train together, as one frozen value, which `loading` detects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lightning_stream.errors import checking


@checking
@dataclass(frozen=True)
class World:
    """Where one training process stands among all of them.

    Args:
        rank: This process, counted over all nodes, 0-based.
        num_ranks: All training processes.
        ranks_per_node: Training processes on one machine; divides ``num_ranks``.
        replication: Groups of this many consecutive ranks get the same samples (tensor or sequence parallelism).
        disks: What the disks of the nodes held at the start, the same on every rank, see `placement_of`.

    Raises:
        ValueError: Numbers that contradict each other; every contradiction is named.

    Example::

        world = World(rank=9, num_ranks=16, ranks_per_node=8)
        world.node, world.replica  # (1, 9)
    """

    rank: int = 0
    num_ranks: int = 1
    ranks_per_node: int = 1
    replication: int = 1
    disks: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if problems := " ".join(self._problems()):
            raise ValueError(
                f"A world must be consistent. {problems} Found {self!r}; correct the arguments or the launcher's "
                "environment."
            )

    def _problems(self) -> Iterator[str]:
        if self.num_ranks < 1 or self.ranks_per_node < 1 or self.replication < 1:
            yield "num_ranks, ranks_per_node and replication must each be at least 1."
            return
        if not 0 <= self.rank < self.num_ranks:
            yield f"rank must be in [0, num_ranks), but rank {self.rank} is not in [0, {self.num_ranks})."
        for name, value in (("ranks_per_node", self.ranks_per_node), ("replication", self.replication)):
            if self.num_ranks % value:
                yield f"{name} must divide num_ranks, but {value} does not divide {self.num_ranks}."

    @property
    def replica(self) -> int:
        """The data replica of this rank: ranks of one replica read the same samples."""
        return self.rank // self.replication

    @property
    def num_replicas(self) -> int:
        """The number of shares that a global batch is cut into."""
        return self.num_ranks // self.replication

    @property
    def num_nodes(self) -> int:
        """Data nodes: machines, or groups of ranks where one group spans several machines."""
        return min(self.num_ranks // self.ranks_per_node, self.num_replicas)

    @property
    def node(self) -> int:
        """The data node of this rank, below :attr:`num_nodes`."""
        return self.replica if self.replication > self.ranks_per_node else self.rank // self.ranks_per_node
