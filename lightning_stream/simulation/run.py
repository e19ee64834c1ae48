"""`simulate`: what a training run will wait for, for one number of nodes."""

from __future__ import annotations

import numpy as np

from lightning_stream.order.chain import readable
from lightning_stream.simulation.case import Case, Outcome, Part
from lightning_stream.simulation.needs import Shards, Training
from lightning_stream.simulation.node import INDEX_REQUESTS
from lightning_stream.simulation.result import INPUT_BOUND, Simulated, Timeline
from lightning_stream.simulation.settings import Link, Node, Prices, Work

_POINTS = 500
_QUICK = 0.1  # of the steps of a detailed simulation


def simulate(
    training: Training,
    shards: Shards,
    *,
    link: Link | None = None,
    work: Work | None = None,
    node: Node | None = None,
    prices: Prices | None = None,
    is_detailed: bool = True,
) -> Simulated:
    """Simulate the first epoch of a training run into empty caches. Nothing is read, and no time passes.

    Args:
        training, shards: The run and its data.
        link, work, node, prices: What is assumed; None for the defaults, and for no prices.
        is_detailed: Whether more steps are simulated, with the timeline; else ten times as fast.

    Example::

        config = OrderConfig.resolve(batch_size=256, shuffle=True)
        run = RunOrder(Snapshot.of([[1000] * 100]), [StreamWeights()], config)
        simulate(Training(run, 256, 32, World(0, 8, 8)), Shards.alike(100, 64 << 20, 1000)).first_batch_s
    """
    part = Part(training, shards, 1.0 if is_detailed else _QUICK)
    case = Case(part, link or Link(), work or Work(), node or Node())
    outcome = Outcome(case)
    model, num_nodes = outcome.model, training.world.num_nodes
    _, of_busiest, total, factor = case.part.downloads
    is_bound = outcome.wait_share >= INPUT_BOUND
    gains = outcome.gains() if is_bound and is_detailed else {}
    limited_by = outcome.limited_by(gains)
    again, per_byte = outcome.again, model.num_requests / max(1, model.num_bytes)
    num_bytes = round(total * again) + num_nodes * model.num_range_bytes
    num_requests = round(total * again * per_byte) + num_nodes * (model.num_range_requests + INDEX_REQUESTS)
    samples = case.part.num_steps * training.batch_size
    return Simulated(
        num_nodes=num_nodes,
        global_batch_size=training.batch_size,
        first_batch_s=model.first_batch_s,
        resume_s=case.resume_s(),
        epoch_s=outcome.epoch_s,
        samples_per_s=samples / max(outcome.after_first_s, 1e-9),
        steady_samples_per_s=training.batch_size / max(outcome.steady_step_s, 1e-9),
        needed_samples_per_s=training.batch_size / max(case.work.step_s, 1e-9),
        wait_share=outcome.wait_share,
        limited_by=limited_by,
        finding=_finding(outcome, limited_by, gains),
        gains=gains,
        download_bytes=num_bytes,
        busiest_node_bytes=round(of_busiest * again) + model.num_range_bytes,
        num_requests=num_requests,
        download_factor=factor * again,
        fetched_again=round(num_nodes * model.disk.num_fetched_again * case.part.num_steps / case.part.num_simulated),
        price_usd=None if prices is None else prices.of(num_bytes, num_requests),
        cache_needed_bytes=case.cache_need.num_bytes,
        cache_peak_bytes=model.disk.peak_bytes,
        simulated_share=case.part.num_simulated / case.part.num_steps,
        problem=_problem(outcome),
        timeline=_timeline(outcome) if is_detailed else None,
        link=case.link,
        work=case.work,
        node=case.node,
        prices=prices,
    )


def _finding(outcome: Outcome, limited_by: str, gains: dict[str, float]) -> str:
    """A sentence about what limits the throughput, and what to change."""
    if (problem := _problem(outcome)) is not None:
        return problem
    share = f"{100 * outcome.wait_share:.0f}%"
    if limited_by == "training":
        return f"Not input-bound: training waits {share} of the time for data."
    gain = gains.get(limited_by, 1.0)
    faster = f" Without this limit, it would be {gain:.1f} times as fast." if gain > 1 else ""
    return f"Input-bound {share}: {_LIMITS[limited_by]}{faster}"


_LIMITS = {
    "latency": "the store answers too late. Raise num_workers, or write larger shards (size_limit).",
    "connection": "each connection is too slow. Raise num_workers, which opens more connections.",
    "link": "the network is too slow. Write smaller samples (compression='zstd'), or train nearer to the data.",
    "workers": "making batches takes too long. Raise num_workers, or make the transform cheaper.",
    "cores": "the processor cores are busy. Use nodes with more cores, or make the transform cheaper.",
    "unpacking": "shards are decompressed and verified too slowly. Raise num_workers, or omit the compression.",
    "look_ahead": "shards are requested too late. Raise predownload.",
    "cache": "the cache is too small, so that shards are fetched again. Raise cache_limit.",
}


def _problem(outcome: Outcome) -> str | None:
    """Why the loader would stop; None if it would not."""
    case = outcome.case
    limit, need = case.node.cache_limit, case.cache_need
    if limit is None or (limit >= need.num_bytes and not outcome.is_stuck):
        return None
    return (
        f"The loader would refuse a cache limit of {readable(limit)}: a node needs {readable(need.num_bytes)}, for "
        f"{need.active_shards} shards that the order keeps active and {need.entering_shards} that are read ahead. Raise "
        "cache_limit, or lower predownload, num_workers or window."
    )


def _timeline(outcome: Outcome) -> Timeline:
    case, model = outcome.case, outcome.model
    ends, size = np.array(model.step_ends), case.part.training.batch_size
    if not len(ends):
        return Timeline()
    picked = np.unique(np.linspace(0, len(ends) - 1, min(_POINTS - 1, len(ends))).astype(int))
    micro_batches = sum(map(len, case.part.needs)) / case.part.num_simulated
    needed = np.floor((ends[picked] - model.first_batch_s) / max(case.work.step_s, 1e-9) + 1e-6) * size
    return Timeline(
        seconds=[model.first_batch_s, *ends[picked].tolist()],
        ready=[size, *(np.array(model.made)[picked] / micro_batches * size).astype(int).tolist()],
        needed=[0, *np.minimum(needed, case.part.num_simulated * size).astype(int).tolist()],
        trained=[0, *((picked + 1) * size).tolist()],
        fetched_bytes=[0, *np.array(model.fetched)[picked].tolist()],
    )
