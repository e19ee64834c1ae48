"""Logs of runs that never were: for what a page shows, and in a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.run_log import LOG_NAME, LaunchEnd, LaunchStart, Message, Record, Row, line_of, numbers_of


@dataclass
class MadeLaunch:
    """A launch of rows of one second, each with these numbers; 10 rows are an epoch of 100 samples.

    `numbers` are those of `LoaderStats`, one value for each row or one for all.
    """

    numbers: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    drawn: Mapping[str, float] = field(default_factory=dict)
    rows: int = 20
    first: int = 0  # rows before it
    ranks: int = 1
    how: str | None = "finished"
    message: str = ""
    verdict: str = ""
    settings: str = "settings"

    def write(self, folder: Path) -> Path:
        start = LaunchStart(
            began="2026-11-25 12:00:00 +0000", place=divmod(self.first, 10), ranks=self.ranks, nodes=1,
            measured_ranks=self.ranks, settings=self.settings, streams=[], versions={"torch": "2"}, lost=0, repeated=0,
        )  # fmt: skip
        records: list[Record] = [start]
        if self.message:
            records.append(Message(at_s=1.0, step=1, text=self.message))
        whole, done = LoaderStats(), self.first
        standing: dict[str, Any] = {"lost": 0, "repeated": 0, "place": start.place, "at_s": 0.0}
        for number in range(self.rows):
            stats = LoaderStats.of_numbers({"num_samples": 10, "num_batches": 1, "compute_s": 0.9, **self._of(number)})
            whole = whole + stats
            done += 1
            standing |= {"place": (done // 10, 10 * (done % 10)), "step": done, "at_s": number + 1.0}
            records.append(Row(epochs=done / 10, stats=numbers_of(stats), drawn=dict(self.drawn), **standing))
        if self.how is not None:
            records.append(LaunchEnd(how=self.how, stats=numbers_of(whole), verdict=self.verdict, **standing))
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / LOG_NAME
        with log.open("ab" if self.first else "wb") as file:
            file.writelines(map(line_of, records))
        return log

    def _of(self, number: int) -> dict[str, float]:
        return {
            name: float(value) if isinstance(value, (int, float)) else float(value[number])
            for name, value in self.numbers.items()
        }
