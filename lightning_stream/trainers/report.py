"""`RunReport`: the log and the page of a training run, under a trainer and in a loop of your own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_stream.trainers.log_writer import LogWriter, PathLike, checked_folder
from lightning_stream.trainers.monitor import DataMonitor

if TYPE_CHECKING:
    from typing import Self


def chosen_folder(report: bool | PathLike, monitor: bool) -> bool | Path:
    """Check what a user has chosen for ``report=``; False where it is left to us and the monitor is off."""
    if isinstance(report, bool):
        return report and monitor
    if not monitor:
        raise ValueError("report= shows what the monitor measures, and monitor=False turns that off: omit one of them")
    return checked_folder(report)


class RunReport(LogWriter):
    """Writes ``data_log.jsonl`` while a run trains, and draws ``data_report.html`` from it when the run stops.

    Lightning and Composer make one, see ``report=`` of `StreamingCallback` and `data_spec`. In a loop of your own it is
    a context manager, and reports what its own process measures. ``lightning-stream report FOLDER`` draws the page at
    any time, also after a crash.

    Args:
        folder: The folder of the run. Where the run resumes, its log continues; a run that starts over keeps the
            former log and page under other names.
        loader: The loader of the run.
        tracker: Its `PositionTracker`, which knows whether samples were lost or repeated.
        step: The trainer's count of optimizer steps.
        say: Shows the user a sentence.

    Raises:
        ValueError: The folder is a URL, or a page.

    Example::

        with RunReport("runs/1", loader):
            for batch in loader:
                train(batch)
    """

    def __enter__(self) -> Self:
        self._monitor = DataMonitor(self._say, watch_after_s=None, is_alone=True)
        self._monitor.attach(self.loader)
        self._monitor.begin_report(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._monitor.stop(error)
