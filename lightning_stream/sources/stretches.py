"""Stretches of a file in memory, of the file as it was when its index was made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.sources.files import RangedFile, SourceFile
from lightning_stream.threads import DaemonPool

_GAP_BYTES = 1 << 18  # neighbours so near come in one range, with the bytes between them
_CONNECTIONS = 8


def stretches(file: SourceFile, spans: Iterable[tuple[int, int]]) -> dict[tuple[int, int], memoryview]:
    """Return several stretches by their spans; of an object in a store, neighbours in one range, several at once."""
    wanted = sorted(set(spans))
    found = _joined(file, wanted)
    whole = {(a, b): next(one for one in found if one[0] <= a and b <= one[1]) for a, b in wanted}
    return {(a, b): found[one][a - one[0] : b - one[0]] for (a, b), one in whole.items()}


def _joined(file: SourceFile, wanted: Sequence[tuple[int, int]]) -> dict[tuple[int, int], memoryview]:
    """The ranges that hold ascending spans; a few large ones, or all of a local file."""
    if file.path is not None:
        return {(0, file.num_bytes): file.view(is_read=False)}
    ranges: list[tuple[int, int]] = []
    for begin, end in wanted:
        if ranges and begin - ranges[-1][1] <= _GAP_BYTES:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((begin, end))
    with DaemonPool(_CONNECTIONS, "ranges") as pool:
        fetches = {one: pool.submit(file.view, *one) for one in ranges}
        return {one: fetch.result() for one, fetch in fetches.items()}


class FetchedFile(RangedFile):
    """An object of a store as a file, whose parts are fetched before they are read."""

    def __init__(self, file: SourceFile) -> None:
        super().__init__(file)
        self._parts: dict[tuple[int, int], memoryview] = {}

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch what is read next, and forget what was fetched before."""
        self._parts = _joined(self._file, sorted(spans))

    def _bytes(self, most: int) -> memoryview:
        begin, end = self._at, min(self._at + most, self._file.num_bytes)
        held = next(((a, part) for (a, b), part in self._parts.items() if a <= begin and end <= b), None)
        return self._file.view(begin, end) if held is None else held[1][begin - held[0] : end - held[0]]


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
