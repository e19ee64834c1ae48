"""Rows planned from log-normal documents: padding and documents per CPU-second, beside simpler ways to pack.

    python benchmarks/pack_plan.py [--documents 1000000] [--mean 700] [--sigma 1.2]

Targets: padding of at most 0.1 % for rows of 8,192 tokens and 0.2 % for rows of 32,768 in windows of 16,384 documents, at
least 500,000 documents per CPU-s with the reading of their lengths, and a seek of at most 50 ms. Times are CPU seconds of
this one process. All packers get the same pieces of the same shuffled documents:

    lightning_stream   PackedEpoch: best-fit decreasing in groups of equal pieces, lengths memory-mapped
    one by one         the same rows in plain Python, a bit mask over the rooms of the open rows
    first fit of 8     the first of 8 open rows with room; where none has room, the fullest one is closed
    next fit           one open row
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights
from lightning_stream.order.packed_epoch import PackedEpoch, RowPosition
from lightning_stream.order.packing import Packing

ROW_LENGTHS, WINDOWS = (2048, 8192, 32768), (4096, 16384, 65536)


def pieces_of(lengths: np.ndarray, row_length: int) -> list[int]:
    """The documents in their order, those longer than a row cut after every ``row_length`` tokens."""
    whole, rest = np.divmod(lengths.astype(np.int64), row_length)
    pieces = [piece for full, last in zip(whole, rest, strict=True) for piece in [row_length] * full + [last] if piece]
    return list(map(int, pieces))


def one_by_one(pieces: list[int], row_length: int, window: int) -> int:
    rows = 0
    for first in range(0, len(pieces), window):
        mask, rooms = 0, {}
        for piece in sorted(pieces[first : first + window], reverse=True):
            fitting = mask >> piece
            if fitting:
                room = piece + (fitting & -fitting).bit_length() - 1
                rooms[room] -= 1
                if not rooms[room]:
                    mask ^= 1 << room
            else:
                room, rows = row_length, rows + 1
            left = room - piece
            if left:
                rooms[left] = rooms.get(left, 0) + 1
                mask |= 1 << left
    return rows


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


def show(name: str, window: str, documents: int, seconds: float, tokens: int, room: int) -> None:
    print(f"  {name:<18}{window:>8}{documents / seconds:>16,.0f}{1 - tokens / room:>12.3%}")


def seeks(packed: Callable[[], PackedEpoch], count: int) -> list[float]:
    """Milliseconds to the first row of windows all over the epoch, each planned by a new object."""
    found = []
    for i in range(count):
        fresh = packed()
        position = RowPosition(fresh.num_windows * i // count)
        found.append(cpu_seconds(lambda fresh=fresh, position=position: len(next(fresh.walk(position))))[0] * 1e3)
    return sorted(found)


def measure(lengths: np.ndarray) -> None:
    documents, tokens = len(lengths), int(lengths.sum())
    sizes = np.diff(np.append(np.arange(0, documents, 20_000), documents))
    run = RunOrder(Snapshot.of([sizes]), [StreamWeights()], OrderConfig.resolve(batch_size=256, shuffle=True))
    ids = run.epoch(0).ids(0, documents)
    few = documents // 4  # for the slower ways
    few_tokens = int(lengths[ids[:few]].sum())
    for row_length in ROW_LENGTHS:
        print(f"\nrows of {row_length:,} tokens\n  {'':<18}{'window':>8}{'documents/CPU-s':>16}{'padding':>12}")
        pieces = pieces_of(lengths[ids[:few]], row_length)
        for window in WINDOWS:
            packing = Packing(row_length, window)

            def packed(packing: Packing = packing) -> PackedEpoch:
                order = RunOrder(run.snapshot, run.weights, run.config).epoch(0)
                return PackedEpoch(order, lengths, packing, key=(run.config.seed, 0))

            whole = packed()
            seconds, rows = cpu_seconds(lambda whole=whole: whole.num_rows)
            show("lightning_stream", f"{window:,}", documents, seconds, tokens, rows * row_length)
            if window == 16384:
                times = seeks(packed, 12)
                seek = f"{statistics.median(times):.1f} (worst of 12: {times[-1]:.1f}) ms"
        seconds, rows = cpu_seconds(lambda: one_by_one(pieces, row_length, 16384))
        show("one by one", "16,384", few, seconds, few_tokens, rows * row_length)
        for name, num_open in (("first fit of 8", 8), ("next fit", 1)):
            seconds, rows = cpu_seconds(lambda num_open=num_open: first_fit(pieces, row_length, num_open))
            show(name, "", few, seconds, few_tokens, rows * row_length)
        print(f"  seek to a window of 16,384 documents: {seek}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--mean", type=float, default=700)
    parser.add_argument("--sigma", type=float, default=1.2)
    arguments = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(
        np.log(arguments.mean) - arguments.sigma**2 / 2, arguments.sigma, arguments.documents
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.bin"
        np.clip(drawn, 1, 200_000).astype("<u4").tofile(path)
        print(f"{arguments.documents:,} documents, {int(np.clip(drawn, 1, 200_000).sum()):,} tokens")
        measure(np.memmap(path, dtype="<u4", mode="r"))


if __name__ == "__main__":
    main()
