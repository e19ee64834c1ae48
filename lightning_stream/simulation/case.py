"""The steps of a training run that are simulated, and how the rest of its epoch continues."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_stream.order.cache_need import CacheNeed, ReadAhead, need_of_node
from lightning_stream.order.chain import readable
from lightning_stream.order.downloads import DownloadPlan, estimate_downloads, plan_downloads
from lightning_stream.reading.look_ahead import read_ahead_depth
from lightning_stream.simulation.needs import Need, Shards, Training
from lightning_stream.simulation.node import NodeModel
from lightning_stream.simulation.result import INPUT_BOUND
from lightning_stream.simulation.settings import Machine, Node

_MICRO_BATCHES, _POSITIONS = 6000, 1 << 21  # simulated step by step, at most; the rest continues like their end
_LEAST_STEPS = 3
QUICK = 0.3
"""Of the steps of a detailed simulation: enough for a curve."""
_STEADY_STEPS = 9  # from so many on, their last third shows what the look-ahead costs
_LEAST_EFFICIENCY = 0.05
# Of an epoch whose downloads are counted; those of a longer one are estimated.
_EXACT_SAMPLES, _EXACT_REPLICAS = 1 << 21, 256
_FASTER, _FURTHER = 1e15, 16
MOST_GAIN = 100.0
_PAYS = 1.02  # the gain from which on a single limit explains the throughput
_MB = 1e6


@dataclass(frozen=True, eq=False)
class Part:
    """The steps of a training run that are simulated one by one.

    Args:
        training, shards: The run and its data.
        most: So much of the usual number of steps is simulated; the rest of the epoch continues like their end.

    Example: ``Part(training, Shards.alike(100, 64 << 20, 1000))``.
    """

    training: Training
    shards: Shards
    most: float = 1.0

    @cached_property
    def num_steps(self) -> int:
        """Steps of the epoch."""
        return self.training.plan().num_batches

    @cached_property
    def num_simulated(self) -> int:
        """Steps that are simulated one by one."""
        training, world = self.training, self.training.world
        micro_batches = -(-training.batch_size // world.num_replicas // training.device_batch_size)
        of_node = max(1, micro_batches) * world.ranks_per_node
        positions = training.batch_size * training.run.epoch(training.epoch).samples_per_position
        steps = self.most * min(_MICRO_BATCHES / of_node, _POSITIONS / positions)
        return min(self.num_steps, max(_LEAST_STEPS, int(steps)))

    @cached_property
    def downloads(self) -> DownloadPlan:
        """What each node downloads in the epoch: counted, or estimated for a large epoch or many nodes."""
        training = self.training
        epoch, size, world = training.epoch, training.batch_size, training.world
        stored, samples = self.shards.stored_bytes, training.run.epoch(epoch).documents.num_samples
        if samples > _EXACT_SAMPLES or world.num_replicas > _EXACT_REPLICAS:
            found = estimate_downloads(training.run, epoch=epoch, batch_size=size, world=world, shard_bytes=stored)
            if self.num_steps > 1:
                return found
            first = {shard for own in training.needs(0, 0, 1) for need in own for shard in need.shards}
            return replace(found, num_bytes=np.full(world.num_nodes, int(stored[list(first)].sum())))
        tail = training.tail
        return plan_downloads(training.run, epoch=epoch, batch_size=size, world=world, tail=tail, shard_bytes=stored)

    @property
    def busiest(self) -> int:
        """The node that downloads most."""
        return int(self.downloads.num_bytes.argmax())

    @cached_property
    def needs(self) -> list[list[Need]]:
        """What each rank of the busiest node reads in the simulated steps."""
        return self.training.needs(self.busiest, 0, self.num_simulated)

    def resume_s(self, machine: Machine) -> float | None:
        """Seconds to the first batch from the middle of the epoch; None where the epoch is too short."""
        half = self.num_steps // 2
        if not half:
            return None
        start = self.training.plan().bounds(half)[0]
        count = min(self.num_steps - half, -(-self.num_simulated // 2))
        model = NodeModel(self.training.needs(self.busiest, start, count), self.training, self.shards, machine)
        model.run(1)
        return model.first_batch_s if model.step_ends else None

    def cache_need(self, node: Node) -> CacheNeed:
        """What the cache of a node must hold at once; the loader refuses a smaller limit."""
        training, shards = self.training, self.shards
        size, raw, stored = training.device_batch_size, shards.raw_bytes, int(shards.stored_bytes.sum())
        depth = read_ahead_depth(node.predownload, size)
        ahead = ReadAhead(max(1, node.num_workers), depth, node.prefetch_factor if node.num_workers else 0)
        packed = stored / max(1, int(raw.sum())) * bool((shards.stored_bytes != raw).any())
        return need_of_node(training.run, raw, ahead, device_batch_size=size, world=training.world, packed=packed)

    def problem(self, node: Node) -> str | None:
        """Why the loader would not start; None if it would."""
        limit, need = node.cache_limit, self.cache_need(node)
        if limit is None or limit >= need.num_bytes:
            return None
        return (
            f"The loader would refuse cache_limit={readable(limit)}: a node needs {readable(need.num_bytes)}, for "
            f"{need.active_shards} shards that the order keeps active and {need.entering_shards} that are read ahead. "
            "Raise it, or lower predownload, num_workers or window."
        )


class Outcome:
    """The simulated steps of a training run on a machine, and how the rest of its epoch continues."""

    def __init__(self, part: Part, machine: Machine) -> None:
        self.part, self.machine = part, machine
        self.model = NodeModel(part.needs, part.training, part.shards, machine)
        self.model.run()
        self.is_stuck = len(self.model.step_ends) < part.num_simulated
        bytes_once = int(part.shards.stored_bytes[list(self.model.disk.were_here)].sum())
        self.again = max(1.0, self.model.num_bytes / max(1, bytes_once))
        self.left_steps = left_steps = part.num_steps - part.num_simulated
        left_bytes = int(part.downloads.num_bytes.max()) * self.again - self.model.num_bytes
        self.demands = self._seconds(left_steps, max(0.0, left_bytes)) if left_steps else self._of_end()
        self.rest_s = max(self.demands.values()) / self._efficiency() if left_steps else 0.0
        self.end_s = self.model.step_ends[-1] if self.model.step_ends else self.model.clock.now
        self.epoch_s = self.end_s + self.rest_s
        self.after_first_s = self.epoch_s - self.model.first_batch_s

    def _seconds(self, num_steps: float, num_bytes: float) -> dict[str, float]:
        """The seconds that each resource of the node needs for so many steps and bytes, if nothing else limits them."""
        node, work, link = self.machine.node, self.machine.work, self.machine.link
        training, model, world = self.part.training, self.model, self.part.training.world
        processes = len(model.ranks) * max(1, node.num_workers)
        per_byte = [total / max(1, model.num_bytes) for total in (model.num_requests, model.num_raw_bytes)]
        requests, raw_bytes = (each * num_bytes for each in per_byte)
        samples = num_steps * training.batch_size / world.num_replicas * len(model.ranks)
        samples *= training.run.epoch(training.epoch).samples_per_position
        making_s = samples * work.sample_s
        unpacking_s = raw_bytes / _MB * work.unpack_s_per_mb + requests * work.shard_s
        connections = processes * node.fetch_threads
        train_s = num_steps * work.step_s
        found = {
            "training": train_s,
            "workers": making_s / processes + (0.0 if node.num_workers else train_s),
            "connection": num_bytes / link.connection_bytes_per_s / connections,
            "latency": requests * link.latency_s / connections,
            "link": num_bytes / model.link.capacity,
            "unpacking": unpacking_s / connections,
            "cores": (making_s + unpacking_s) / model.cores.capacity,
        }
        fetching_s = found["connection"] + found["latency"] + found["unpacking"]  # one after another
        largest = max(("connection", "latency", "unpacking"), key=found.__getitem__)
        return {**found, largest: fetching_s}

    @property
    def _steady_from(self) -> int:
        """The first of the last third of the simulated steps: it starts with a full look-ahead."""
        return 2 * len(self.model.step_ends) // 3

    def _of_end(self) -> dict[str, float]:
        model, first = self.model, self._steady_from
        if not first:
            return self._seconds(1, model.num_bytes)
        return self._seconds(len(model.step_ends) - first, model.fetched[-1] - model.fetched[first - 1])

    def _efficiency(self) -> float:
        """The part of the possible throughput that the last third of the simulated steps had."""
        ends = self.model.step_ends
        if len(ends) < _STEADY_STEPS:
            return 1.0
        spent_s = ends[-1] - ends[self._steady_from - 1]
        return min(1.0, max(_LEAST_EFFICIENCY, max(self._of_end().values()) / max(spent_s, 1e-9)))

    @property
    def steady_step_s(self) -> float:
        """Seconds of a step after the start."""
        ends, first = self.model.step_ends, self._steady_from
        if self.rest_s:
            return self.rest_s / self.left_steps
        return (ends[-1] - ends[first - 1]) / (len(ends) - first) if first else self.after_first_s

    @property
    def wait_share(self) -> float:
        """The part of the time after the first batch that training waits for data."""
        train_s = self.part.num_steps * self.machine.work.step_s
        return max(0.0, 1 - train_s / max(self.after_first_s, train_s)) if train_s else 1.0

    def gains(self) -> dict[str, float]:
        """How much faster the epoch is after its first batch, if one limit is lifted."""
        found = {}
        for name, lifted in _lifted(self.machine, self.part.training.device_batch_size).items():
            other = Outcome(self.part, lifted)
            if not other.is_stuck:
                found[name] = min(MOST_GAIN, self.after_first_s / max(other.after_first_s, 1e-9))
        return found

    def limited_by(self, gains: dict[str, float]) -> str:
        """What limits the throughput: what gains most if it is lifted, else what takes longest."""
        if self.is_stuck:
            return "cache"
        if self.wait_share < INPUT_BOUND:
            return "training"
        best = max(gains, key=gains.__getitem__, default="")
        if best and gains[best] >= _PAYS:
            computes = best in ("workers", "unpacking") and gains.get("cores", 1.0) >= _PAYS
            return "cores" if computes else best
        return max((one for one in self.demands if one != "training"), key=self.demands.__getitem__)


def _lifted(machine: Machine, device_batch_size: int) -> dict[str, Machine]:
    """The same machine without one of its limits."""
    link, work, node = machine.link, machine.work, machine.node
    further = _FURTHER * max(1, read_ahead_depth(node.predownload, device_batch_size)) * device_batch_size
    lifted = {
        "latency": replace(machine, link=replace(link, latency_s=0.0)),
        "connection": replace(machine, link=replace(link, connection_bytes_per_s=_FASTER)),
        "workers": replace(machine, work=replace(work, sample_s=0.0, send_s=0.0)),
        "unpacking": replace(machine, work=replace(work, unpack_s_per_mb=0.0, shard_s=0.0)),
        "look_ahead": replace(machine, node=replace(node, predownload=further)),
    }
    if link.of_node(1) is not None:
        lifted["link"] = replace(machine, link=replace(link, node_bytes_per_s=None, bucket_bytes_per_s=None))
    if node.num_cores is not None:
        lifted["cores"] = replace(machine, node=replace(node, num_cores=None))
    if node.cache_limit is not None:
        lifted["cache"] = replace(machine, node=replace(node, cache_limit=None))
    return lifted
