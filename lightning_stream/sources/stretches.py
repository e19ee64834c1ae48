"""Stretches of a file in memory, of the file as it was when its index was made."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.sources.files import SourceFile
from lightning_stream.threads import DaemonPool

_GAP_BYTES = 1 << 18  # neighbours so near come in one range, with the bytes between them
_CONNECTIONS = 8


def stretches(file: SourceFile, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Return several stretches; of an object in a store, neighbours come in one range, several ranges at once."""
    if file.path is not None:
        data = file.view(is_read=False)
        return [data[begin:end] for begin, end in spans]
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if ranges and begin - ranges[-1][1] <= _GAP_BYTES:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((begin, end))
    with DaemonPool(_CONNECTIONS, "ranges") as pool:
        fetched = [fetch.result() for fetch in [pool.submit(file.view, *one) for one in ranges]]
    firsts = [begin for begin, _ in ranges]
    numbers = [bisect_right(firsts, begin) - 1 for begin, _ in spans]
    return [fetched[k][begin - firsts[k] : end - firsts[k]] for k, (begin, end) in zip(numbers, spans, strict=True)]


def rows_at(data: Any, begins: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Return ``width`` bytes from each of these positions: uint8[n, width]; a view where their distances are equal."""
    flat = np.frombuffer(data, np.uint8)
    steps = np.diff(begins)
    if len(begins) and width and (steps == steps[:1]).all() and (not len(steps) or steps[0] > 0):
        step = int(steps[0]) if len(steps) else width
        return np.lib.stride_tricks.as_strided(flat[int(begins[0]) :], (len(begins), width), (step, 1), writeable=False)
    if not width or not len(begins):
        return np.empty((len(begins), width), np.uint8)
    cells: Any = np.ndarray((len(flat) - width + 1,), f"V{width}", flat, 0, (1,))  # overlapping, one at every position
    found: NDArray[np.uint8] = cells[begins].view(np.uint8).reshape(len(begins), width)
    return found
