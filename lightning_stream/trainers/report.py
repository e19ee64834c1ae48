"""`RunReport`: the log of a training run, written while it trains, and its page, drawn when it stops."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lightning_stream.dataset import source_of
from lightning_stream.errors import LightningStreamError, redact
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.stats import LoaderStats
from lightning_stream.loading.verdict import Verdict
from lightning_stream.pages import write_run_page
from lightning_stream.run_log import BadSample, LaunchEnd, LaunchStart, Message, Row, RunLog, clean, numbers_of
from lightning_stream.trainers.audit import verify_delivery
from lightning_stream.trainers.monitor import DataMonitor
from lightning_stream.trainers.tracker import PositionTracker

if TYPE_CHECKING:
    from typing_extensions import Self

_SHORTEST_ROW_S, _ROWS = 0.2, 400  # a row takes at least this long, and this part of the run so far
_MOST_MESSAGES, _MOST_BAD = 500, 200
_MOST_VERIFIED = 5_000_000  # samples of a recorded run that are planned once more at its end, in a second or two
_PACKAGES = ("lightning_stream", "torch", "lightning", "pytorch_lightning", "composer", "transformers", "numpy")
_STREAM = ("remote", "local", "split", "proportion", "repeat", "choose", "version", "format")
PathLike = str | os.PathLike[str]


def chosen_folder(report: bool | PathLike, monitor: bool) -> bool | Path:
    """Check what a user has chosen for ``report=``; False where it is left to us and the monitor is off."""
    if isinstance(report, bool):
        return report and monitor
    if not monitor:
        raise ValueError("report= shows what the monitor measures, and monitor=False turns that off: omit one of them")
    return _checked(report)


def _checked(folder: PathLike) -> Path:
    text = os.fspath(folder)
    if "://" in text or text.endswith(".html"):
        raise ValueError(
            "report= is a local folder, in which data_log.jsonl and data_report.html are written; "
            f"found {redact(text)!r}. Pass the run's folder, e.g. 'runs/7'"
        )
    return Path(text).expanduser()


class RunReport:
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

    def __init__(
        self,
        folder: PathLike,
        loader: StreamingDataLoader,
        tracker: PositionTracker | None = None,
        *,
        step: Callable[[], int] | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        self._log = RunLog(_checked(folder), say)
        self._say, self._step, self._tracker, self.loader = say, step, tracker, loader
        self.row_due = math.inf  # when the only process that measures is to add a row
        self.has_ended = False
        self._is_first = self._has_failed = False
        self._began = self._row_began = 0.0
        self._before_s = 0.0  # that the launches before this one took
        self._row, self._drawn = LoaderStats(), dict[str, float]()  # of the next row
        self._num_samples = self._num_messages = 0
        self._bad: set[tuple[Any, Any]] = set()
        self._bad_from: tuple[Path, int] | None = None

    @property
    def path(self) -> Path:
        """The log."""
        return self._log.path

    # A plain loop

    def __enter__(self) -> Self:
        self._monitor = DataMonitor(self._say, watch_after_s=None, is_alone=True)
        self._monitor.attach(self.loader)
        self._monitor.begin_report(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._monitor.stop(error)

    # The run

    def begin(self, *, is_alone: bool = False) -> None:
        """Begin a launch of the run.

        Args:
            is_alone: Whether no other rank adds what it has measured.
        """
        world, here = self.loader.detect_world(), self.loader.position
        self._is_first = world.rank == 0
        self._began = self._row_began = perf_counter()
        if not self._is_first:
            return
        source = source_of(self.loader.streaming)
        loaded = [sys.modules[name] for name in _PACKAGES if name in sys.modules]
        versions = {module.__name__: str(module.__version__) for module in loaded}
        start = LaunchStart(
            began=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z"),
            place=(here.epoch, here.position),
            ranks=world.num_ranks,
            nodes=world.num_nodes,
            measured_ranks=1 if is_alone else world.num_ranks,
            checks=self._tracker is not None and self._tracker.check_delivery,
            settings=clean(f"{self.loader!r}\n\n{self.loader.describe(count_rows=False)}"),
            streams=[_described(stream) for stream in source.reader.streams],
            versions={"python": platform.python_version(), **versions},
        )
        self._before_s = self._log.begin(start, continues=bool(here.epoch or here.position))
        if is_alone or world.num_ranks == 1:
            self.row_due = 0.0
        if source.bad_data.policy.substitutes:
            path = source.bad_data.path_of(source.reader)
            self._bad_from = (path, path.stat().st_size if path.exists() else 0)

    def add(self, recent: LoaderStats, drawn: Mapping[str, float]) -> None:
        """Add what was measured, and samples by stream; a row is written when enough time has passed."""
        if not self._is_first:
            return
        self.has_ended = False
        self._row = self._row + recent
        for name, number in drawn.items():
            self._drawn[name] = self._drawn.get(name, 0) + number
        now = perf_counter()
        interval_s = max(_SHORTEST_ROW_S, (self._before_s + now - self._began) / _ROWS)
        # A trainer logs between two batches, too, and the first batch comes before any training: neither has a rate.
        if self._row.num_batches and self._row.compute_s and now - self._row_began >= interval_s:
            self._write_row()
        if self.row_due < math.inf:
            self.row_due = now + interval_s

    def _write_row(self) -> None:
        here, stats = self.loader.position, self._row
        self._num_samples += stats.num_samples
        done = min(1.0, here.position / stats.epoch_positions) if stats.epoch_positions else 0.0
        drawn = {clean(name): number for name, number in self._drawn.items() if number}
        self._log.append(
            Row(
                at_s=self._now_s(),
                step=self._steps(),
                place=(here.epoch, here.position),
                epochs=round(here.epoch + done, 6),
                stats=numbers_of(stats),
                drawn=drawn,
                **self._counts(),
            )
        )
        self._row, self._drawn, self._row_began = LoaderStats(), {}, perf_counter()
        if stats.counters["bad_samples"]:
            self._list_bad()

    def note_message(self, sentence: str) -> None:
        """Keep a sentence that the user was shown."""
        self._num_messages += 1
        if self._is_first and self._num_messages <= _MOST_MESSAGES:
            self._log.append(Message(self._now_s(), self._steps(), clean(sentence)))

    def end(
        self, error: BaseException | str | None, measured: LoaderStats, verdict: Verdict, *, is_whole: bool = True
    ) -> None:
        """Write the end of the log, and draw the page.

        Args:
            error: What stopped the run, or when; None at the end.
            measured: What was measured in this launch over all ranks.
            verdict: Why training waited.
            is_whole: Whether this has all that the other ranks measured.
        """
        if not self._is_first or self.has_ended:
            return
        if any(self._row.numbers().values()):
            self._write_row()
        self._list_bad()
        here = self.loader.position
        self._log.append(
            LaunchEnd(
                at_s=self._now_s(),
                how="finished" if error is None else clean(_reason(error))[:2000],
                place=(here.epoch, here.position),
                stats=numbers_of(measured),
                verdict=clean(str(verdict)) if measured.num_batches else "",
                ledger="" if error is not None else clean(self._ledger()),
                is_whole=is_whole,
                **self._counts(),
            )
        )
        self.has_ended = True
        try:
            write_run_page(self.path)
        except Exception as failure:  # noqa: BLE001 - a page that cannot be drawn must not fail the run
            self._say(f"The page of the run cannot be drawn, and its log is {self.path}: {redact(str(failure))}")

    def _now_s(self) -> float:
        return round(perf_counter() - self._began, 6)

    def _steps(self) -> int:
        return 0 if self._step is None else self._step()

    def _counts(self) -> dict[str, int]:
        """The samples that were lost and repeated."""
        tracker = self._tracker
        return {} if tracker is None else {"lost": tracker.num_lost, "repeated": tracker.num_repeated}

    def _ledger(self) -> str:
        """What the record of the run proves, where it keeps one."""
        folder = None if self._tracker is None else self._tracker.record_delivery
        if folder is None:
            return ""
        if self._num_samples > _MOST_VERIFIED:
            return f"Not verified yet, because that plans the run once more: verify_delivery({str(folder)!r}, dataset)"
        try:
            return verify_delivery(folder, self.loader.streaming).sentence
        except (LightningStreamError, ValueError, OSError) as error:
            return f"Not verified: {error}"

    def _list_bad(self) -> None:
        """Add the samples that the quarantine lists since this was asked last."""
        if self._bad_from is None or not self._bad_from[0].exists():
            return
        path, begin = self._bad_from
        try:
            with path.open("rb") as file:
                file.seek(begin)
                lines = file.read(1 << 20)
            lines = lines[: lines.rfind(b"\n") + 1]
            self._bad_from = (path, begin + len(lines))
            for line in lines.splitlines():
                self._add_bad(json.loads(line))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # others have written into it
            self._bad_from = None
            self.note_message(f"The list of bad samples is incomplete here, since its file cannot be read: {error}")

    def _add_bad(self, sample: dict[str, Any]) -> None:
        key = (sample["stream"], sample["sample"])
        if key in self._bad or len(self._bad) >= _MOST_BAD:
            return
        self._bad.add(key)
        values = {name: clean(value) if isinstance(value, str) else value for name, value in sample.items()}
        self._log.append(BadSample(values))


def _described(stream: Any) -> dict[str, Any]:
    """Where a stream is, for a reader in any folder, and its weight."""
    values = {name: getattr(stream, name, None) for name in _STREAM}
    for name in ("remote", "local"):
        if (place := values[name]) and ":/" not in str(place):
            values[name] = Path(place).absolute()
    return {
        name: value if isinstance(value, (int, float)) else clean(str(value))
        for name, value in values.items()
        if value not in (None, "")
    }


def _reason(error: BaseException | str) -> str:
    return error if isinstance(error, str) else f"{type(error).__name__}: {error}".removesuffix(": ")
