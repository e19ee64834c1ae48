"""`Run`: one training run under a trainer, which is its clock."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from lightning_stream.errors import checking
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.trainers.monitor import DataMonitor
from lightning_stream.trainers.options import PositionOptions
from lightning_stream.trainers.report import RunReport, chosen_folder
from lightning_stream.trainers.tracker import PositionTracker


class Run(PositionTracker):
    """The position of a training run, and where its time goes; for the arguments see `RunOptions`.

    Attributes:
        monitor: Of the latest training.
    """

    @checking
    def __init__(
        self,
        *,
        monitor: bool = True,
        watch_after_s: float | None = 120.0,
        report: bool | str | os.PathLike[str] = True,
        **options: Unpack[PositionOptions],
    ) -> None:
        super().__init__(**options)
        self._report = chosen_folder(report, monitor)
        self._new_monitor = partial(DataMonitor, self.say, monitor, watch_after_s)
        self.monitor = self._new_monitor()

    def measure(self, default_folder: Callable[[], Path | None]) -> None:
        """Measure from now on, and write the log where the user chose, or else in the folder that this gives."""
        self.monitor = self._new_monitor()
        self.monitor.attach(self.loader)
        folder = default_folder() if self._report is True else self._report
        if folder:
            self.monitor.begin_report(RunReport(folder, self.loader, self, step=self.clock.step, say=self.say))

    def metrics(self) -> dict[str, float]:
        """The monitor's values for loggers since the last ones. Collective."""
        return self.monitor.metrics(self.clock.step())

    def shown(self) -> dict[str, str]:
        """What a progress bar shows of the time; nothing without the monitor."""
        return {"data": self.monitor.short()} if self.monitor.is_on else {}

    def tell(self) -> None:
        """Tell the user what to change if training waited for its data. Collective."""
        if self.monitor.is_on:
            self.monitor.end()


def streaming_loader(loader: Any, needed_by: str) -> StreamingDataLoader:
    """The loader that a trainer trains on.

    Raises:
        TypeError: It is not a `StreamingDataLoader`.
    """
    if not isinstance(loader, StreamingDataLoader):
        raise TypeError(f"{needed_by} reads the batches of a StreamingDataLoader; found {type(loader).__name__}.")
    return loader
