"""Logs of runs that never were: for what a page shows, and in a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_stream.loading.stats import LoaderStats
from lightning_stream.run_log import LaunchEnd, LaunchStart, Message, Row, RunLog, numbers_of


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
        log = RunLog(folder, print)
        start = LaunchStart(
            began="2026-11-25 12:00:00 +0000", place=divmod(self.first, 10), ranks=self.ranks, nodes=1,
            measured_ranks=self.ranks, checks=True, settings=self.settings, streams=[], versions={"torch": "2"},
        )  # fmt: skip
        log.begin(start, continues=self.first > 0)
        if self.message:
            log.append(Message(1.0, 1, self.message))
        whole = LoaderStats()
        for number in range(self.rows):
            stats = LoaderStats.of_numbers({"num_samples": 10, "num_batches": 1, "compute_s": 0.9, **self._of(number)})
            whole = whole + stats
            done = self.first + number + 1
            place = (done // 10, 10 * (done % 10))
            log.append(Row(number + 1.0, done, place, done / 10, numbers_of(stats), dict(self.drawn)))
        if self.how is not None:
            done = self.first + self.rows
            place = (done // 10, 10 * (done % 10))
            log.append(LaunchEnd(float(self.rows), self.how, place, numbers_of(whole), verdict=self.verdict))
        return log.path

    def _of(self, number: int) -> dict[str, float]:
        return {
            name: float(value) if isinstance(value, (int, float)) else float(value[number])
            for name, value in self.numbers.items()
        }
