"""How equal the replicas of a training run are with balanced shares and with plain ones, and what the balance costs.

    python benchmarks/balance.py [--steps 8]

Documents are log-normal (mean 700 tokens). A packed row has 8,192 tokens, packed best-fit decreasing in windows of
16,384 documents; it costs the sum of its documents' squared lengths. A document alone costs its length squared.

    replicas    most expensive replica / mean, over all steps: plain shares, balanced shares, and the lower bound (the
                mean, or the most expensive row if that is larger)
    in step     the same where all replicas wait for each other at each of 4 micro-batches
    us a row    CPU time of one replica's share, for each row of the global batch; beside the same without a balance

The second table has machines of 8 replicas and 8 packed rows for each replica: where every machine keeps its own
samples (16 canonical nodes), and over all machines (1 canonical node, so that every machine downloads all shards).
"""

from __future__ import annotations

import argparse
import time
from bisect import bisect_left, insort
from dataclasses import replace

import numpy as np

from lightning_stream.order import BatchPlan, OrderConfig, RunOrder, Snapshot, StreamWeights, World
from lightning_stream.order.balance import Balance
from lightning_stream.order.downloads import estimate_factor

MICRO_BATCHES, ROW_LENGTH, WINDOW, REPLICAS_OF_A_MACHINE = 4, 8192, 16384, 8


def documents(count: int, seed: int = 1) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(700) - 0.72, 1.2, count)
    return np.clip(lengths.astype(np.int64) + 1, 1, ROW_LENGTH)


def packed_rows(count: int) -> np.ndarray:
    """The costs of packed rows, in random order."""
    costs, seed = [], 0
    while len(costs) < count:
        rooms: list[tuple[int, int]] = []  # of open rows, with their numbers
        window, seed = [0] * WINDOW, seed + 1
        opened = 0
        for length in sorted(documents(WINDOW, seed).tolist(), reverse=True):
            at = bisect_left(rooms, (length, -1))
            if at == len(rooms):
                room, row, opened = ROW_LENGTH, opened, opened + 1
            else:
                room, row = rooms.pop(at)
            insort(rooms, (room - length, row))
            window[row] += length**2
        costs += np.random.default_rng(seed).permutation(window[:opened]).tolist()
    return np.array(costs[:count], dtype=np.int64)


def measure(costs: np.ndarray, world: World, per_replica: int, steps: int, canonical_nodes: int) -> dict[str, float]:
    """Costs of all replicas over some steps: relative to the mean replica, the worst step of each kind."""
    batch_size, device = per_replica * world.num_replicas, max(1, per_replica // MICRO_BATCHES)
    config = OrderConfig.resolve(batch_size=batch_size, shuffle=True, canonical_nodes=canonical_nodes)
    shards = np.full(max(256, len(costs) // 1000), len(costs) // max(256, len(costs) // 1000))
    run = RunOrder(Snapshot.of([shards]), [StreamWeights()], config)
    order, found = run.epoch(0), {}
    for name, balance in (("plain", None), ("balanced", Balance(lambda ids: costs[ids], device))):
        worlds = [replace(world, rank=rank) for rank in range(world.num_ranks)]
        plans = [BatchPlan(order, batch_size=batch_size, world=one, balance=balance) for one in worlds]
        number = min(steps, plans[0].num_whole_batches)
        plans[0].share(number - 1)
        begin = time.process_time()
        for k in range(number):
            plans[0].share(k)
        found[f"{name} us"] = (time.process_time() - begin) / number / batch_size * 1e6
        count = plans[0].num_micro_batches(0, device)
        table = np.array(
            [
                [[costs[one.ids].sum() for one in plan.share(k).micro_batches(count)] for plan in plans]
                for k in range(number)
            ]
        )  # [steps, replicas, micro-batches]
        mean = table.sum(axis=(1, 2)) / len(plans)
        found[name] = float((table.sum(axis=2).max(axis=1) / mean).max())
        found[f"{name} in step"] = float((table.max(axis=1).sum(axis=1) / mean).max())
        largest = np.array([costs[plans[0].ids(k)].max() for k in range(number)])
        found["bound"] = float(np.maximum(largest / mean, 1).max())
    found["downloads"] = estimate_factor(run, epoch=0, batch_size=batch_size, world=world)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    rows = packed_rows(8 * 512 * steps)
    alone = documents(64 * 512 * 2) ** 2
    print("                                  replicas                   in step            us a row")
    print("                            plain balanced  bound     plain balanced    plain balanced")
    for kind, costs, counts in (("packed rows", rows, (1, 2, 4, 8)), ("documents", alone, (8, 64))):
        for per_replica in counts:
            for replicas in (8, 64, 512):
                number = steps if per_replica * replicas < 4096 else max(2, steps // 4)
                one = measure(costs, World(0, replicas, replicas), per_replica, number, canonical_nodes=1)
                label = f"{per_replica} {kind} x {replicas}"
                numbers = (one[name] for name in ("plain", "balanced", "bound", "plain in step", "balanced in step"))
                times = f"{one['plain us']:8.2f} {one['balanced us']:8.2f}"
                print(f"{label:<24} {'{:8.3f} {:8.3f} {:6.3f}  {:8.3f} {:8.3f}'.format(*numbers)} {times}")
    print("\n            16 canonical nodes            1 canonical node")
    print("machines    plain balanced downloads      plain balanced downloads")
    for machines in (1, 2, 4, 16, 64):
        world = World(0, machines * REPLICAS_OF_A_MACHINE, REPLICAS_OF_A_MACHINE)
        found = [measure(rows, world, 8, max(2, steps // 4), nodes) for nodes in (16, 1)]
        text = "     ".join(f"{one['plain']:8.3f} {one['balanced']:8.3f} {one['downloads']:8.1f}x" for one in found)
        print(f"{machines:8} {text}")


if __name__ == "__main__":
    main()
