"""One billion samples in one million shards: plan, seek, read, and find a sample.

python benchmarks/order_scale.py [--shards 1000000] [--samples 1000]

Aims: planning under 0.2 s, a seek to anywhere under 50 ms, at least 10 million ids per second, and at most
1 ms to find where a sample is. Times are of the processor; "worst seek ms" is of 22, "where ms" the median of 200.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from frame import Clock, Group, Job, Result, main

from lightning_stream.order import BatchPlan, OrderConfig, RunOrder, Snapshot, StreamWeights, World

CHUNK = 1 << 20
BATCH = 1024


def ms(action: Callable[[int], Any], places: Iterable[int]) -> list[float]:
    """CPU of the action at each place, sorted."""
    times = []
    for place in places:
        began = time.process_time()
        action(place)
        times.append(1e3 * (time.process_time() - began))
    return sorted(times)


def order(method: str, job: Job) -> Result:
    num_streams = 1 if method == "random" else 4
    sizes = np.full(job.sizes.shards, job.sizes.samples, dtype=np.int64)
    snapshot = Snapshot.of(np.array_split(sizes, num_streams))
    config = OrderConfig.resolve(batch_size=BATCH, shuffle=True, batching_method=method, device_batch_size=32)
    run = RunOrder(snapshot, [StreamWeights()] * num_streams, config)

    def plan(epoch: int) -> BatchPlan:
        epoch_order = run.epoch(epoch)
        epoch_order.ids(0, BATCH)
        return BatchPlan(epoch_order, batch_size=BATCH, world=World(3, 8, 8))

    planning = ms(plan, [0])[0]
    ready = plan(1)
    total = snapshot.num_samples
    seeks = ms(ready.ids, [total * k // 23 // BATCH for k in range(1, 23)])
    finding = ms(lambda sample: run.where(sample, 0), range(0, total, total // 200))
    clock = Clock()
    result = clock.stop(sum(len(ready.order.ids(k * CHUNK, (k + 1) * CHUNK)) for k in range(4)))
    return {**result, "plan ms": planning, "worst seek ms": seeks[-1], "where ms": statistics.median(finding)}


if __name__ == "__main__":
    methods = ("random", "stratified", "per_stream", "device_per_stream")
    cases = {f"ours, {method}": partial(order, method) for method in methods}
    main(__doc__, [Group("orders", cases)], shards=(1_000_000, 8000), samples=(1000, 1000))
