"""One billion samples in one million shards: plan, seek and read, in one process.

    python benchmarks/order_scale.py [--shards 1000000] [--samples-per-shard 1000]

Targets: planning under 0.2 s and 150 MB, a seek to anywhere under 50 ms, at least 10 million ids per second, and at
most 1 ms to find where a sample is. Times are CPU seconds of the one process (all of this is single-threaded), so that
other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from lightning_stream.order import BatchPlan, OrderConfig, RunOrder, Snapshot, StreamWeights, World

CHUNK = 1 << 20


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds(action) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def measure(method: str, shards: int, samples: int) -> list[tuple[str, str]]:
    streams = 1 if method == "random" else 4
    sizes = np.full(shards, samples, dtype=np.int64)
    before = megabytes()
    snapshot = Snapshot.of(np.array_split(sizes, streams))
    config = OrderConfig.resolve(batch_size=1024, shuffle=True, batching_method=method, device_batch_size=32)
    num_samples = snapshot.num_samples

    def plan(epoch: int) -> BatchPlan:
        order = RunOrder(snapshot, [StreamWeights()] * streams, config).epoch(epoch)
        order.ids(0, 1024)
        return BatchPlan(order, batch_size=1024, world=World(3, 8, 8))

    planning = sorted(seconds(lambda epoch=epoch: plan(epoch)) for epoch in range(3))
    grown = megabytes() - before
    ready = plan(0)
    spots = [num_samples * i // 23 // 1024 for i in range(1, 23)]
    seeks = sorted(seconds(lambda spot=spot: ready.ids(spot)) for spot in spots)
    middle = num_samples // 2
    count = 16 if method == "random" else 4
    reading = seconds(lambda: [ready.order.ids(middle + i * CHUNK, middle + (i + 1) * CHUNK) for i in range(count)])
    shares = seconds(lambda: [ready.share(k) for k in range(2000)])
    run = RunOrder(snapshot, [StreamWeights()] * streams, config)
    samples_asked = [num_samples * i // 200 for i in range(200)]
    found = [run.where(sample_id, 0) for sample_id in samples_asked]
    asking = sorted(seconds(lambda one=one: run.where(one, 0)) for one in samples_asked)
    assert [run.epoch(0).ids(int(at[0]), int(at[0]) + 1)[0] for at in found] == samples_asked
    return [
        ("planning and first batch, s (best, worst of 3)", f"{planning[0]:.3f}, {planning[-1]:.3f}"),
        ("memory grown by it, MB", f"{grown:.0f}"),
        ("seek, ms (median, worst of 22)", f"{statistics.median(seeks) * 1e3:.1f}, {seeks[-1] * 1e3:.1f}"),
        ("ids read, million per s", f"{count * CHUNK / reading / 1e6:.1f}"),
        ("one rank's share of a batch of 1024, microseconds", f"{shares / 2000 * 1e6:.0f}"),
        ("where a sample is, ms (median, worst of 200)", f"{asking[100] * 1e3:.3f}, {asking[-1] * 1e3:.3f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--samples-per-shard", type=int, default=1000)
    arguments = parser.parse_args()
    shards, samples = arguments.shards, arguments.samples_per_shard
    print(f"{shards * samples:,} samples in {shards:,} shards, one process")
    for method in ("random", "stratified", "per_stream", "device_per_stream"):
        print(f"\n{method}")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            rows = fresh.submit(measure, method, shards, samples).result()
        for name, value in rows:
            print(f"  {name:<52} {value}")


if __name__ == "__main__":
    main()
