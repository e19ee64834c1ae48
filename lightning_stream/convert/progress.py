"""A line on stderr that counts parts and rows, and a summary when all is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from lightning_stream.convert.receipt import Receipt

_PERIOD_S = 0.2


class Progress:
    """Counts while parts are written.

    Args:
        num_parts: That are to be written.
        phase: What is done with them.
        shown: Whether to write the line.

    Attributes:
        receipts: Of the parts that are written now, by number.
    """

    def __init__(self, num_parts: int, phase: str, shown: bool) -> None:
        self.receipts: dict[int, dict[str, Receipt]] = {}
        self._num_parts, self._phase, self._shown = num_parts, phase, shown
        self._rows: dict[int, int] = {}
        self._begin = time.monotonic()
        self._next = 0.0

    def __call__(self, part: Any, rows: int, receipts: dict[str, Receipt] | None) -> None:
        """Take news of a part."""
        if receipts is not None:
            self.receipts[part.number] = receipts
            rows = _count(receipts)
        self._rows[part.number] = rows
        now = time.monotonic()
        if self._shown and (now >= self._next or receipts is not None):
            self._next = now + _PERIOD_S
            self._tell(now - self._begin)

    def _tell(self, seconds: float) -> None:
        done, rows = len(self.receipts), sum(self._rows.values())
        full = round(20 * done / max(1, self._num_parts))
        line = f"{self._phase} [{'#' * full}{'.' * (20 - full)}] {done:,} of {self._num_parts:,} parts, {rows:,} rows"
        sys.stderr.write(f"\r{line}, {rows / max(seconds, 1e-9):,.0f} per s\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        """End the line."""
        if self._shown and self._rows:
            sys.stderr.write("\n")


def _count(receipts: Mapping[str, Receipt]) -> int:
    return sum(receipt.num_samples for receipt in receipts.values())
