"""Rows planned from log-normal documents: padding and documents per CPU-second, beside simpler ways to pack.

    python benchmarks/pack_plan.py [--documents 1000000] [--mean 700] [--sigma 1.2]

Targets, in windows of 16,384 documents: padding of at most 0.1 % for rows of 8,192 tokens and 0.2 % for rows of 32,768,
at least 500,000 documents per CPU-s, and a resume within 50 ms. Times are CPU seconds of this one process:

    lightning_stream   the rows of a shuffled epoch, with the reading of memory-mapped lengths
    one by one         the same best-fit decreasing, one piece after another, a bit mask over the rooms of the open rows
    first fit of 8     no windows; the first of 8 open rows with room; where none has room, the fullest one is closed
    next fit           no windows; one open row

The last three of these get the lengths as Python integers in the order of the epoch, long documents already cut, and
their time is that of the placement alone. The last two cannot seek: every row depends on all rows before it.

Then batches of whole documents, padded to their longest one, of 64 documents or of a budget of 64 times the longest:
batches of the shuffled order as they come, `bucket_by`, and `batch_tokens`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np

from lightning_stream.order import BatchPlan, EpochOrder, OrderConfig, RunOrder, Snapshot, StreamWeights, World
from lightning_stream.order.batching.buckets import LengthBuckets
from lightning_stream.order.batching.packed import Landmark
from lightning_stream.order.packing import RowPacking

ROW_LENGTHS, WINDOWS = (2048, 8192, 32768), (4096, 16384, 65536)


def pieces_of(lengths: np.ndarray, row_length: int) -> list[int]:
    """The documents in their order, those longer than a row cut after every ``row_length`` tokens."""
    whole, rest = (part.tolist() for part in np.divmod(lengths.astype(np.int64), row_length))
    return [piece for full, last in zip(whole, rest, strict=True) for piece in [row_length] * full + [last] if piece]


def one_by_one(windows: list[list[int]], row_length: int) -> int:
    num_rows = 0
    for pieces in windows:
        mask, rows, placed = 0, {}, []
        for piece in sorted(pieces, reverse=True):
            fitting = mask >> piece
            if fitting:
                room = piece + (fitting & -fitting).bit_length() - 1
                row = rows[room].pop()
                if not rows[room]:
                    mask ^= 1 << room
            else:
                room, row, num_rows = row_length, num_rows, num_rows + 1
            placed.append(row)
            if room > piece:
                rows.setdefault(room - piece, []).append(row)
                mask |= 1 << (room - piece)
    return num_rows


def first_fit(pieces: list[int], row_length: int, num_open: int) -> int:
    rooms: list[int] = []
    closed = 0
    for piece in pieces:
        for i, room in enumerate(rooms):
            if room >= piece:
                rooms[i] = room - piece
                break
        else:
            if len(rooms) == num_open:
                rooms.remove(min(rooms))
                closed += 1
            rooms.append(row_length - piece)
    return closed + len(rooms)


def cpu_seconds(action: Callable[[], int]) -> tuple[float, int]:
    begin = time.process_time()
    result = action()
    return time.process_time() - begin, result


class Data:
    """Documents in 20,000 a shard, in the shuffled order of epoch 0."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths, documents = lengths, len(lengths)
        sizes = np.diff(np.append(np.arange(0, documents, 20_000), documents))
        self.snapshot = Snapshot.of([sizes])
        config = OrderConfig.resolve(batch_size=256, shuffle=True)
        self.shuffled = lengths[RunOrder(self.snapshot, [StreamWeights()], config).epoch(0).ids(0, documents)]

    def packed(self, row_length: int, window: int) -> EpochOrder:
        """A new order, of which nothing is planned yet."""
        packing = RowPacking(row_length, window)
        config = OrderConfig.resolve(batch_size=256, shuffle=True, packing=packing)
        return RunOrder(self.snapshot, [StreamWeights()], config, self.lengths).epoch(0)

    def resume_ms(self, row_length: int, window: int, num_machines: int, count: int = 12) -> list[float]:
        """Times to the first global batch of one machine, at places all over the epoch, each in a new order."""
        known, found = self.packed(row_length, window), []
        for i in range(count):
            start = known.num_samples * i // count
            landmark, packed = known.landmark(start), self.packed(row_length, window)

            def first(packed: EpochOrder = packed, landmark: Landmark = landmark, start: int = start) -> int:
                packed.learn(landmark)
                plan = BatchPlan(packed, batch_size=256, world=World(0, num_machines), start=start)
                return len(plan.share(0))

            found.append(cpu_seconds(first)[0] * 1e3)
        return sorted(found)


def measure_batches(data: Data, longest: int = 8192, size: int = 64) -> None:
    """Padding of batches of whole documents, and the CPU seconds that planning them takes."""
    lengths = np.minimum(data.lengths, longest)
    print(f"\nbatches of documents of at most {longest:,} tokens{'documents/CPU-s':>18}{'padding':>12}")
    for name, budget in (("as they come", None), ("bucket_by", None), ("batch_tokens", size * longest)):
        buckets = None
        if name != "as they come":
            buckets = LengthBuckets.resolved(lengths, batch_size=size if budget is None else None, batch_tokens=budget)
        multiple = size if buckets is None else buckets.batch_size
        config = OrderConfig.resolve(batch_size=multiple, shuffle=True, buckets=buckets)
        order = RunOrder(data.snapshot, [StreamWeights()], config, None if buckets is None else lengths).epoch(0)

        def padded(order: EpochOrder = order, multiple: int = multiple) -> int:
            plan, ids = BatchPlan(order, batch_size=multiple), order.ids(0, order.num_samples)
            edges = np.array([plan.bounds(k)[0] for k in range(plan.num_batches)])
            return int((np.maximum.reduceat(lengths[ids], edges) * np.diff(edges, append=len(ids))).sum())

        seconds, tokens = cpu_seconds(padded)
        print(f"  {name:<42}{len(lengths) / seconds:>18,.0f}{1 - int(lengths.sum()) / tokens:>12.1%}")


def show(name: str, window: str, lengths: np.ndarray, row_length: int, action: Callable[[], int]) -> None:
    seconds, rows = cpu_seconds(action)
    padding = 1 - int(lengths.sum()) / (rows * row_length)
    print(f"  {name:<18}{window:>8}{len(lengths) / seconds:>18,.0f}{padding:>12.3%}")


def measure(data: Data, row_length: int) -> None:
    print(f"\nrows of {row_length:,} tokens\n  {'':<18}{'window':>8}{'documents/CPU-s':>18}{'padding':>12}")
    for window in WINDOWS:
        packed = data.packed(row_length, window)
        show("lightning_stream", f"{window:,}", data.lengths, row_length, lambda packed=packed: packed.num_samples)
    windows = np.split(data.shuffled, range(16384, len(data.shuffled), 16384))
    pieces = [pieces_of(one, row_length) for one in windows]
    show("one by one", "16,384", data.lengths, row_length, lambda: one_by_one(pieces, row_length))
    flat = list(chain.from_iterable(pieces))
    show("first fit of 8", "", data.lengths, row_length, lambda: first_fit(flat, row_length, 8))
    show("next fit", "", data.lengths, row_length, lambda: first_fit(flat, row_length, 1))
    window = RowPacking(row_length).usual_window(data.lengths)
    for machines in (1, 16):
        times = data.resume_ms(row_length, window, machines)
        median, most = statistics.median(times), times[-1]
        print(f"  resume with windows of {window:,} on {machines} machines: {median:.1f} ms, {most:.1f} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--mean", type=float, default=700)
    parser.add_argument("--sigma", type=float, default=1.2)
    given = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(np.log(given.mean) - given.sigma**2 / 2, given.sigma, given.documents)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.bin"
        np.clip(drawn, 1, 200_000).astype("<u4").tofile(path)
        data = Data(np.memmap(path, dtype="<u4", mode="r"))
        print(f"{given.documents:,} documents of {data.lengths.mean():,.0f} tokens in the mean")
        for row_length in ROW_LENGTHS:
            measure(data, row_length)
        measure_batches(data)


if __name__ == "__main__":
    main()
