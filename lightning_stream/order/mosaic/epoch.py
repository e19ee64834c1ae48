"""A run of mosaicml-streaming 0.13: its settings, its state, and what each rank and worker is delivered.

The peer's global batches depend on the world (its nodes, and for some methods its ranks), so an epoch is made for one
world. Elastic resume is the peer's own rule: the samples used up are dropped from the front of the epoch as it would
be in the new world, or, with `relaxed` and nodes that do not divide, from the epoch of the world that began the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.order.mosaic.partitions import PADDING, PARTITIONS, global_batches
from lightning_stream.order.mosaic.resample import Sampler
from lightning_stream.order.mosaic.shuffles import DEFAULT_BLOCK_SIZE, SHUFFLES
from lightning_stream.order.mosaic.stream_weights import StreamDraws, Weight, stream_draws
from lightning_stream.order.mosaic.work import BATCHING_METHODS, WorkPlan, work_of

Ids = NDArray[np.int64]

SAMPLING_METHODS = ("balanced", "fixed")
_SAMPLES_IN_BLOCKS = 4_000_000
_CHOICES = {
    "shuffle_algo": SHUFFLES,
    "partition_algo": PARTITIONS,
    "batching_method": BATCHING_METHODS,
    "sampling_method": SAMPLING_METHODS,
}
_LEAST = {
    "batch_size": 1,
    "shuffle_seed": 0,
    "shuffle_block_size": 1,
    "num_canonical_nodes": 1,
    "sampling_granularity": 1,
    "initial_physical_nodes": 1,
}


@dataclass(frozen=True)
class MosaicWorld:
    """Who shares an epoch: ranks count once per distinct share, see `replicated`."""

    num_nodes: int = 1
    ranks_per_node: int = 1
    workers_per_rank: int = 1

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.ranks_per_node, self.workers_per_rank) < 1:
            raise ValueError(f"a world has at least one node, rank and worker (0 workers count as 1); found {self}")

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def replicated(self, replication: int) -> MosaicWorld:
        """Count each group of `replication` consecutive ranks, which get the same samples, as one rank.

        Nodes keep their number of ranks where the replicas fill whole nodes; else all are on one node.
        """
        if replication < 1 or self.num_ranks % replication:
            raise ValueError(f"replication must divide the ranks; found {replication} and {self.num_ranks} ranks")
        ranks = self.num_ranks // replication
        whole = ranks % self.ranks_per_node == 0
        nodes = ranks // self.ranks_per_node if whole else 1
        return MosaicWorld(nodes, ranks // nodes, self.workers_per_rank)


@dataclass(frozen=True)
class MosaicState:
    """The state that mosaicml-streaming writes. `sample_in_epoch` counts samples over all replicas."""

    epoch: int
    sample_in_epoch: int
    num_canonical_nodes: int
    shuffle_seed: int
    initial_physical_nodes: int | None = None

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> MosaicState:
        """Read the peer's dictionary; states of its older versions lack `initial_physical_nodes`."""
        names = ("epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed")
        missing = [name for name in names if not isinstance(state.get(name), (int, np.integer))]
        if missing:
            raise ValueError(
                f"a state of mosaicml-streaming has {', '.join(names)}; this one lacks {', '.join(missing)}"
            )
        nodes = state.get("initial_physical_nodes")
        required = {name: int(state[name]) for name in names}
        return cls(**required, initial_physical_nodes=None if nodes is None else int(nodes))

    def to_dict(self) -> dict[str, int | None]:
        """Give the dictionary that the peer's `load_state_dict` takes."""
        return dict(vars(self))


@dataclass(frozen=True)
class MosaicSettings:
    """What the peer's dataset is constructed with, under its names and with its defaults.

    Args:
        batch_size: Samples of a rank's batch.
        shuffle: Whether to shuffle.
        shuffle_algo: One of `SHUFFLES`.
        shuffle_seed: Key of all draws.
        shuffle_block_size: Samples of a shuffle block; None: by `num_canonical_nodes`.
        partition_algo: `orig` or `relaxed`.
        num_canonical_nodes: Parts of an epoch; None: by the nodes of the first world.
        batching_method: One of `BATCHING_METHODS`.
        sampling_method: `balanced`, new picks each epoch, or `fixed`.
        sampling_granularity: Samples of one pick of a shard.
        epoch_size: Samples of an epoch, for proportions.
        initial_physical_nodes: Nodes of the world that began the run, known on resume.
    """

    batch_size: int
    shuffle: bool = False
    shuffle_algo: str = "py1e"
    shuffle_seed: int = 9176
    shuffle_block_size: int | None = None
    partition_algo: str = "relaxed"
    num_canonical_nodes: int | None = None
    batching_method: str = "random"
    sampling_method: str = "balanced"
    sampling_granularity: int = 1
    epoch_size: int | str | None = None
    initial_physical_nodes: int | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be one of {', '.join(known)}, found {getattr(self, name)!r}"
            for name, known in _CHOICES.items()
            if getattr(self, name) not in known
        ]
        given = {name: getattr(self, name) for name in _LEAST}
        wrong += [
            f"{name} must be at least {_LEAST[name]}, found {value}"
            for name, value in given.items()
            if value is not None and value < _LEAST[name]
        ]
        if wrong:
            raise ValueError("; ".join(wrong))

    def resolved(self, num_nodes: int) -> MosaicSettings:
        """Fill in what the user left open, for a run on `num_nodes` nodes; keeps what a state has said."""
        spread = 64 if self.shuffle_algo in ("py1s", "py2s") else 1
        canonical = self.num_canonical_nodes or num_nodes * spread
        block = self.shuffle_block_size or max(_SAMPLES_IN_BLOCKS // canonical, DEFAULT_BLOCK_SIZE)
        return replace(self, num_canonical_nodes=canonical, shuffle_block_size=block)

    def resumed(self, state: MosaicState) -> MosaicSettings:
        """Take from a state what it decides; the rest must be said as the first run said it."""
        return replace(
            self,
            num_canonical_nodes=state.num_canonical_nodes,
            shuffle_seed=state.shuffle_seed,
            initial_physical_nodes=state.initial_physical_nodes,
        )


@dataclass(frozen=True, eq=False)
class MosaicEpoch:
    """What is left of an epoch in one world; batches count from the resume point.

    Args:
        epoch: The epoch, counted from 0.
        work: int64[nodes, ranks per node, workers, batches, batch size], -1 for padding.
    """

    epoch: int
    work: Ids
    _steps: Ids = field(init=False, repr=False)

    def __post_init__(self) -> None:
        nodes, ranks, _, _, batch_size = self.work.shape
        steps = global_batches(self.work).reshape(-1, nodes * ranks, batch_size)
        object.__setattr__(self, "_steps", steps[(steps != PADDING).any(axis=(1, 2))])

    @property
    def num_batches(self) -> int:
        """Global batches that hold any sample."""
        return len(self._steps)

    @property
    def num_samples(self) -> int:
        """Samples delivered over all ranks, the peer's repeats included."""
        return int(np.count_nonzero(self._steps != PADDING))

    def ids(self) -> Ids:
        """All that is delivered, global batch after global batch, each in the order of ranks."""
        return _without_padding(self._steps)

    def global_batch(self, step: int) -> Ids:
        """What all ranks together get at a step, in the order of ranks."""
        return _without_padding(self._steps[step])

    def rank_batch(self, step: int, rank: int) -> Ids:
        """What a rank gets at a step, from its worker `step % workers`; fewer samples at the end, perhaps none."""
        return _without_padding(self._steps[step, rank])

    def worker_ids(self, rank: int, worker: int) -> Ids:
        """What iterating over the dataset yields in one worker of a rank."""
        node, rank_of_node = divmod(rank, self.work.shape[1])
        return _without_padding(self.work[node, rank_of_node, worker])


def _without_padding(ids: Ids) -> Ids:
    kept: Ids = ids[ids != PADDING]
    return kept


class MosaicOrder:
    """The epochs of a run, in any world.

    Args:
        shard_sizes: Samples of each shard, per stream; sample ids run through all streams.
        weights: One per stream, or None: see `stream_draws`.
        settings: What the run was constructed with.

    Raises:
        ValueError: Weights that cannot be met.
    """

    def __init__(
        self,
        shard_sizes: Sequence[Sequence[int] | Ids],
        weights: Sequence[Weight] | None,
        settings: MosaicSettings,
    ) -> None:
        self.settings = settings
        self.draws: StreamDraws = stream_draws(shard_sizes, weights, settings.epoch_size, settings.shuffle_seed)
        self._sampler = Sampler(
            [np.asarray(sizes, dtype=np.int64) for sizes in shard_sizes],
            self.draws.choose,
            settings.sampling_method == "balanced",
            settings.sampling_granularity,
            settings.shuffle_seed,
            settings.shuffle,
        )

    def epoch(self, epoch: int, world: MosaicWorld, sample_in_epoch: int = 0) -> MosaicEpoch:
        """Make the rest of an epoch for a world. Costs time and memory in proportion to the whole epoch.

        Raises:
            ValueError: The world, the streams or the resume point do not fit the settings.
        """
        if epoch < 0 or sample_in_epoch < 0:
            raise ValueError(f"an epoch and a sample in it count from 0; found {epoch} and {sample_in_epoch}")
        settings = self.settings.resolved(world.num_nodes)
        plan = WorkPlan(
            self.draws,
            self._sampler,
            settings.shuffle,
            settings.shuffle_algo,
            settings.shuffle_seed,
            settings.shuffle_block_size or DEFAULT_BLOCK_SIZE,
            settings.partition_algo,
            settings.num_canonical_nodes or 1,
            (world.num_nodes, world.ranks_per_node, world.workers_per_rank),
            settings.batch_size,
            settings.initial_physical_nodes,
        )
        return MosaicEpoch(epoch, work_of(plan, settings.batching_method, epoch, sample_in_epoch))

    def drawn(self, epoch: int) -> Ids:
        """Give the sample ids that an epoch is made of, each as often as it was drawn; in no order."""
        streams = range(len(self.draws.choose))
        together = self.settings.batching_method == "random"
        return np.concatenate(
            [self._sampler.draw(epoch, some).ids for some in ([streams] if together else [[one] for one in streams])]
        )

    def state(self, epoch: int, sample_in_epoch: int, world: MosaicWorld) -> MosaicState:
        """Give the state that the peer would write; it loads there."""
        settings = self.settings.resolved(world.num_nodes)
        began = settings.initial_physical_nodes or world.num_nodes
        canonical = settings.num_canonical_nodes or 1
        return MosaicState(epoch, sample_in_epoch, canonical, settings.shuffle_seed, began)


def epoch_work(
    weights: Sequence[Weight] | None,
    sampling_method: str,
    sampling_granularity: int,
    shuffle: bool,
    shuffle_algo: str,
    batching_method: str,
    num_physical_nodes: int,
    ranks_per_node: int,
    workers_per_rank: int,
    batch_size: int,
    num_canonical_nodes: int | None,
    epoch: int,
    sample_in_epoch: int,
    shuffle_seed: int,
    shuffle_block_size: int | None,
    partition_algo: str,
    *,
    shard_sizes: Sequence[Sequence[int] | Ids],
    epoch_size: int | str | None = None,
    initial_physical_nodes: int | None = None,
) -> Ids:
    """Give a whole epoch: int64[nodes, ranks per node, workers per rank, batches, batch size], -1 for padding.

    `shard_sizes` and `weights` have one entry per stream; the other arguments are those of `MosaicSettings`.

    Raises:
        ValueError: A setting out of range, or streams that cannot fill what is asked.
    """
    settings = MosaicSettings(
        batch_size=batch_size,
        shuffle=shuffle,
        shuffle_algo=shuffle_algo,
        shuffle_seed=shuffle_seed,
        shuffle_block_size=shuffle_block_size,
        partition_algo=partition_algo,
        num_canonical_nodes=num_canonical_nodes,
        batching_method=batching_method,
        sampling_method=sampling_method,
        sampling_granularity=sampling_granularity,
        epoch_size=epoch_size,
        initial_physical_nodes=initial_physical_nodes,
    )
    world = MosaicWorld(num_physical_nodes, ranks_per_node, workers_per_rank)
    return MosaicOrder(shard_sizes, weights, settings).epoch(epoch, world, sample_in_epoch).work
