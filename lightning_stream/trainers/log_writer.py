"""The log of a training run, written while it trains, and its page, drawn when it stops."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning_stream.dataset import source_of
from lightning_stream.errors import LightningStreamError, checking, redact
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.monitoring.verdict import Verdict
from lightning_stream.pages import write_run_page
from lightning_stream.reading.mapped import MapStream
from lightning_stream.run_log import (
    LOG_NAME,
    BadSample,
    LaunchEnd,
    LaunchStart,
    Message,
    Record,
    Row,
    line_of,
    numbers_of,
    open_log,
)
from lightning_stream.shared_files import LOCK_FDS
from lightning_stream.threads import Lock
from lightning_stream.trainers.audit import verify_delivery
from lightning_stream.trainers.tracker import PositionTracker, check_loader

# A row takes at least this long, and this part of the run so far
_SHORTEST_ROW_S = 0.2
_ROWS = 400
_MOST_BAD = 200
_MOST_VERIFIED = 5_000_000  # samples of a recorded run that are planned once more at its end, in a second or two
_PACKAGES = ("lightning_stream", "torch", "lightning", "pytorch_lightning", "composer", "transformers", "numpy")
_STREAM = ("remote", "local", "split", "proportion", "repeat", "choose", "version", "format")
PathLike = str | os.PathLike[str]


def checked_folder(folder: PathLike) -> Path:
    """A local folder that a user has chosen for ``report=``; ValueError where it is something else."""
    text = os.fspath(folder)
    if "://" in text or text.endswith(".html") or text.lower() in ("", "true", "false"):
        raise ValueError(
            "report= is a local folder, in which data_log.jsonl and data_report.html are written, or True or False; "
            f"found {redact(text)!r}. Pass the run's folder, e.g. 'runs/7'"
        )
    return Path(text).expanduser()


class LogWriter:
    """Writes the log of a run, and draws its page. The arguments are those of `RunReport`.

    Attributes:
        path: The log.
        loader: The loader of the run.
        has_ended: Whether the end of the launch was written.
    """

    @checking
    def __init__(
        self,
        folder: PathLike,
        loader: StreamingDataLoader,
        tracker: PositionTracker | None = None,
        *,
        step: Callable[[], int] = lambda: 0,
        say: Callable[[str], object] = print,
    ) -> None:
        check_loader(loader, "RunReport")
        self._folder = checked_folder(folder).absolute()  # a run may change its folder
        self.path = self._folder / LOG_NAME
        self._say = say
        self._step = step
        self._tracker = tracker
        self.loader = loader
        self.has_ended = False
        self._is_first = self._continues = self._has_failed = False
        self._fd: int | None = None
        self._unwritten = b""
        self._lock = Lock()  # the watch of a loader writes messages, too
        self._began = self._row_began = perf_counter()
        self._before_s = 0.0  # that the launches before this one took
        self._num_former = 0  # bytes of the list of bad samples, before this launch

    # The run

    def begin(self, *, is_alone: bool = False) -> None:
        """Begin a launch of the run.

        Args:
            is_alone: Whether no other rank adds what it has measured.
        """
        world = self.loader.detect_world()
        here = self.loader.position
        self._is_first = world.rank == 0
        self._began = self._row_began = perf_counter()
        with suppress(OSError):  # it is read again at the end
            self._num_former = len(self._listed_bad())
        loaded = [sys.modules[name] for name in _PACKAGES if name in sys.modules]
        streams = source_of(self.loader.streaming).reader.streams
        versions = {module.__name__: str(module.__version__) for module in loaded}
        self._continues = bool(here.epoch or here.position)
        self._append(
            LaunchStart,
            began=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z"),
            ranks=world.num_ranks,
            nodes=world.num_nodes,
            measured_ranks=1 if is_alone else world.num_ranks,
            settings=f"{self.loader!r}\n\n{self.loader.describe(count_rows=False)}",
            streams=[_described(stream) for stream in streams if not isinstance(stream, MapStream)],
            versions={"python": platform.python_version(), **versions},
        )

    def is_due(self, now: float) -> bool:
        """Whether enough time has passed for another row."""
        return now - self._row_began >= max(_SHORTEST_ROW_S, (self._before_s + now - self._began) / _ROWS)

    def add(self, recent: LoaderStats, drawn: Mapping[str, float]) -> None:
        """Write a row of what was measured since the last one, and of samples by stream."""
        if not any(recent.numbers().values()):
            return
        self.has_ended = False
        here = self.loader.position
        done = min(1.0, here.position / recent.epoch_positions) if recent.epoch_positions else 0.0
        drawn = {name: count for name, count in drawn.items() if count}
        self._append(Row, epochs=round(here.epoch + done, 6), stats=numbers_of(recent), drawn=drawn)
        self._row_began = perf_counter()  # behind the row's own time: or else the next one could come too soon

    def note_message(self, sentence: str) -> None:
        """Keep a sentence that the user was shown."""
        self._append(Message, text=sentence)

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
        self.has_ended = True
        if not self._is_first:
            return
        self._add_bad()
        reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}".removesuffix(": ")
        self._append(
            LaunchEnd,
            how="finished" if error is None else reason[:2000],
            stats=numbers_of(measured),
            verdict=str(verdict) if measured.num_batches else "",
            ledger="" if error is not None else self._ledger(measured.num_samples),
            is_whole=is_whole,
        )
        if self._fd is not None:
            LOCK_FDS.close(self._fd)
            self._fd = None
        try:
            write_run_page(self.path)
        except Exception as failure:  # noqa: BLE001 - a page that cannot be drawn must not fail the run
            self._say(f"The page of the run cannot be drawn, and its log is {self.path}: {redact(str(failure))}")

    def _append(self, kind: type[Record], **values: Any) -> None:
        """Write a record, and those that could not be written before; a failure is shown once."""
        if not self._is_first:
            return
        here = self.loader.position
        tracker = self._tracker
        is_checked = tracker is not None and tracker.check_delivery
        counts = {"lost": tracker.num_lost, "repeated": tracker.num_repeated} if tracker and is_checked else {}
        at_s = 0.0 if kind is LaunchStart else round(perf_counter() - self._began, 6)
        record = kind(at_s=at_s, place=(here.epoch, here.position), step=self._step(), **counts, **values)
        with self._lock:
            self._unwritten += line_of(record)
            try:
                if self._fd is None:
                    self.path, self._fd, self._before_s = open_log(
                        self._folder, continues=self._continues, say=self._say
                    )
                    self._continues = True
                self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]
            except OSError as error:
                if not self._has_failed:
                    self._say(f"The log {self.path} cannot be written now, and training continues: {error}")
                self._has_failed = True

    def _ledger(self, num_samples: int) -> str:
        """What the record of the run proves, where it keeps one."""
        folder = None if self._tracker is None else self._tracker.record_delivery
        if folder is None:
            return ""
        if num_samples > _MOST_VERIFIED:
            return f"Not verified yet, because that plans the run once more: verify_delivery({str(folder)!r}, dataset)"
        try:
            return verify_delivery(folder, self.loader.streaming).sentence
        except (LightningStreamError, ValueError, OSError) as error:
            return f"Not verified: {error}"

    def _listed_bad(self) -> bytes:
        """The list of bad samples that this run and others have written."""
        source = source_of(self.loader.streaming)
        path = source.bad_data.path_of(source.reader) if source.bad_data.policy.substitutes else None
        return path.read_bytes() if path is not None and path.exists() else b""

    def _add_bad(self) -> None:
        """Add the bad samples of this launch, each once."""
        lines = [b""]  # if there is no reading it
        listed = {}
        is_incomplete = False
        with suppress(OSError):
            lines = self._listed_bad()[self._num_former :].splitlines()
        for line in lines:
            try:
                sample = json.loads(line)
                listed[sample["stream"], sample["sample"]] = sample
            except (ValueError, LookupError, TypeError):  # others have written into it, or the disk was full
                is_incomplete = True
        if is_incomplete:
            self.note_message("The list of bad samples is incomplete here: not all of its file can be read")
        for sample in list(listed.values())[:_MOST_BAD]:
            sample.pop("launch", None)
            self._append(BadSample, values=sample)


def _described(stream: Any) -> dict[str, str]:
    """Where a stream is, for a reader in any folder, and its weight."""
    values = {name: getattr(stream, name, None) for name in _STREAM}
    for name in ("remote", "local"):
        place = values[name]
        if place and ":/" not in str(place):
            values[name] = Path(place).absolute()
    return {name: str(value) for name, value in values.items() if value not in (None, "")}
