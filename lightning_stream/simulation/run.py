"""`simulate`: what a training run will wait for, for one number of nodes."""

from __future__ import annotations

import numpy as np

from lightning_stream.simulation.case import MOST_GAIN, Outcome, Part
from lightning_stream.simulation.node import INDEX_REQUESTS
from lightning_stream.simulation.result import INPUT_BOUND, Simulated, Timeline
from lightning_stream.simulation.settings import Machine

_POINTS = 500
_STUCK = "The cache is too small: all that it holds is in use, and the next shard does not fit. Raise cache_limit."
_SHOWN_GAIN = 1.05
_LEAST_S = 1e-6  # an epoch of one batch takes no time after it, if training takes none


def simulate(part: Part, machine: Machine) -> Simulated:
    """Simulate an epoch of a training run into empty caches. Nothing is read, and no time passes.

    Args:
        part: The run and its data.
        machine: What is assumed of the store and the nodes.

    Example::

        config = OrderConfig.resolve(batch_size=256, shuffle=True)
        run = RunOrder(Snapshot.of([[1000] * 100]), [StreamWeights()], config)
        training = Training(run, batch_size=256, device_batch_size=32, world=World(0, 8, 8))
        simulate(Part(training, Shards.alike(100, 64 << 20, 1000)), Machine(Link(latency_s=0.1))).first_batch_s

    Raises:
        ValueError: The epoch has no batch.
    """
    if not part.num_steps:
        raise ValueError("an epoch must have a batch to be simulated. Choose a smaller batch, or tail='pad' or 'exact'")
    outcome, downloads, training = Outcome(part, machine), part.downloads, part.training
    model, num_nodes, total = outcome.model, training.world.num_nodes, int(downloads.num_bytes.sum())
    gains = outcome.gains() if outcome.wait_share >= INPUT_BOUND and part.most == 1.0 else {}
    limited_by = outcome.limited_by(gains)
    problem = part.problem(machine.node) or (_STUCK if outcome.is_stuck else None)
    again, per_byte = outcome.again, model.num_requests / max(1, model.num_bytes)
    range_bytes, ranges = (
        sum(getattr(one.ranges, name) for one in model.workers) for name in ("num_bytes", "num_requests")
    )
    num_bytes = round(total * again) + num_nodes * range_bytes
    num_requests = round(total * again * per_byte) + num_nodes * (ranges + INDEX_REQUESTS)
    samples, num_steps = training.run.epoch(training.epoch).documents.num_samples, part.num_steps
    return Simulated(
        num_nodes=num_nodes,
        global_batch_size=training.batch_size,
        first_batch_s=model.first_batch_s,
        resume_s=part.resume_s(machine),
        epoch_s=outcome.epoch_s,
        samples_per_s=samples / (outcome.after_first_s if outcome.after_first_s > _LEAST_S else outcome.epoch_s),
        steady_samples_per_s=samples / num_steps / max(outcome.steady_step_s, 1e-9),
        needed_samples_per_s=samples / num_steps / machine.work.step_s if machine.work.step_s else None,
        wait_share=outcome.wait_share,
        limited_by=limited_by,
        finding=problem or _finding(outcome, limited_by, gains),
        gains=gains,
        download_bytes=num_bytes,
        busiest_node_bytes=round(int(downloads.num_bytes.max()) * again) + range_bytes,
        num_requests=num_requests,
        download_factor=downloads.factor * again,
        fetched_again=round(num_nodes * model.disk.num_fetched_again * part.num_steps / part.num_simulated),
        price_usd=None if machine.prices is None else machine.prices.of(num_bytes, num_requests),
        cache_needed_bytes=part.cache_need(machine.node).num_bytes,
        cache_peak_bytes=model.disk.peak_bytes,
        simulated_share=part.num_simulated / part.num_steps,
        problem=problem,
        timeline=_timeline(outcome),
        machine=machine,
    )


def _finding(outcome: Outcome, limited_by: str, gains: dict[str, float]) -> str:
    """A sentence about what limits the throughput, and what to change."""
    share = f"{100 * outcome.wait_share:.0f}%"
    if limited_by == "training":
        return f"Not input-bound: training waits {share} of the time for data."
    gain = gains.get(limited_by, 1.0)
    times = f"over {gain:.0f}" if gain == MOST_GAIN else f"{gain:.1f}"
    faster = f" Without this limit, it would be {times} times as fast." if gain >= _SHOWN_GAIN else ""
    waits = f"Input-bound: training waits {share} of the time for data. " if outcome.machine.work.step_s else ""
    return f"{waits}{_LIMITS[limited_by]}{faster}"


_LIMITS = {
    "latency": "The latency of the store limits training. Raise num_workers, or write larger shards (size_limit).",
    "connection": "The rate of each connection limits training. Raise num_workers, which opens more connections.",
    "link": "The network limits training. Write smaller samples (compression='zstd'), or train nearer to the data.",
    "workers": "Making batches limits training. Raise num_workers, or make the transform cheaper.",
    "cores": "The processor cores limit training. Use nodes with more cores, or make the transform cheaper.",
    "unpacking": "Verifying and decompressing limits training. Raise num_workers, or omit the compression.",
    "look_ahead": "The look-ahead limits training: shards are requested too late. Raise predownload.",
    "cache": "The cache limits training: it is too small, and shards are fetched again. Raise cache_limit.",
}


def _timeline(outcome: Outcome) -> Timeline:
    part, model = outcome.part, outcome.model
    ends, size = np.array(model.step_ends), part.training.batch_size
    if not len(ends):
        return Timeline()
    picked = np.unique(np.linspace(0, len(ends) - 1, min(_POINTS - 1, len(ends))).astype(int))
    micro_batches = sum(map(len, part.needs)) / part.num_simulated
    needed = np.floor((ends[picked] - model.first_batch_s) / max(outcome.machine.work.step_s, 1e-9) + 1e-6) * size
    return Timeline(
        seconds=[model.first_batch_s, *ends[picked].tolist()],
        ready=[size, *(np.array(model.made)[picked] / micro_batches * size).astype(int).tolist()],
        needed=[0, *np.minimum(needed, part.num_simulated * size).astype(int).tolist()],
        trained=[0, *((picked + 1) * size).tolist()],
        fetched_bytes=[0, *np.array(model.fetched)[picked].tolist()],
    )
