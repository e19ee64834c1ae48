"""The log of a training run: one file of JSON lines, which is only ever appended to, and from which its page is drawn.

`RunLog` writes it and `read_run` reads it. All numbers of a run follow from its `LoaderStats`: those of its rows while
it trains, and those of its end once it has ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from lightning_stream.errors import redact
from lightning_stream.loading.stats import LoaderStats

LOG_NAME = "data_log.jsonl"
PAGE_NAME = "data_report.html"
FORMAT = 1
Place = tuple[int, int]  # an epoch, and the samples of it that were trained on


class LaunchStart(Struct, tag_field="kind", tag="launch"):
    """The first record of a launch: a run has one for its beginning, and one for each resume."""

    began: str
    place: Place
    ranks: int
    nodes: int
    measured_ranks: int
    checks: bool  # whether samples that are lost or repeated would be counted
    settings: str
    streams: list[dict[str, Any]]
    versions: dict[str, str]
    format: int = FORMAT


class Row(Struct, tag_field="kind", tag="row", omit_defaults=True):
    """What all ranks measured since the row before, and where the run stands."""

    at_s: float  # since the launch began
    step: int
    place: Place
    epochs: float
    stats: dict[str, float]  # see `LoaderStats.numbers`
    drawn: dict[str, float] = {}  # samples by stream
    lost: int = 0
    repeated: int = 0


class Message(Struct, tag_field="kind", tag="message"):
    """A sentence that the user was shown."""

    at_s: float
    step: int
    text: str


class BadSample(Struct, tag_field="kind", tag="bad"):
    """A sample that could not be read, as the quarantine lists it."""

    values: dict[str, Any]


class LaunchEnd(Struct, tag_field="kind", tag="end", omit_defaults=True):
    """How a launch ended, and what was measured in all of it."""

    at_s: float
    how: str  # "finished", or what stopped it
    place: Place
    stats: dict[str, float]
    verdict: str = ""
    ledger: str = ""
    lost: int = 0
    repeated: int = 0
    is_whole: bool = True  # whether it has all that the other ranks measured


Record = LaunchStart | Row | Message | BadSample | LaunchEnd
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Record)


def clean(text: str) -> str:
    """A text without credentials, and without halves of characters, which file names may hold and JSON may not."""
    return redact(text).encode(errors="replace").decode()


def numbers_of(stats: LoaderStats) -> dict[str, float]:
    """The numbers of a record: without zeros, and without digits that nobody measures."""
    return {name: round(value, 6) for name, value in stats.numbers().items() if value}


def page_of(log: Path) -> Path:
    """Where the page of a log is."""
    return log.with_name(f"{log.stem.replace('log', 'report')}.html")


# Reading


@dataclass
class Launch:
    """One launch of a run: its records."""

    start: LaunchStart
    rows: list[Row] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    end: LaunchEnd | None = None

    def add(self, record: Record) -> None:
        """Take up the next record."""
        if isinstance(record, Row):
            self.rows.append(record)
            self.end = None  # the trainer was started once more
        elif isinstance(record, Message):
            self.messages.append(record)
        elif isinstance(record, BadSample):
            self.bad.append(record)
        elif isinstance(record, LaunchEnd):
            self.end = record

    @property
    def latest(self) -> Row | LaunchEnd | None:
        """The record that says where the launch stands."""
        return self.end or (self.rows[-1] if self.rows else None)

    @property
    def seconds(self) -> float:
        """How long it took, as far as is known."""
        return 0.0 if self.latest is None else self.latest.at_s

    @property
    def place(self) -> Place:
        """Where it came to."""
        return self.start.place if self.latest is None else self.latest.place

    @property
    def how(self) -> str:
        """How it ended."""
        return "no end was written" if self.end is None else self.end.how

    def counted(self, what: Literal["lost", "repeated"]) -> int | None:
        """Samples that were lost or repeated; None where that was not checked."""
        return getattr(self.latest, what, 0) if self.start.checks else None

    @cached_property
    def stats(self) -> LoaderStats:
        """What was measured: over all ranks, with the times of the rank that waited longest."""
        if self.end is not None:
            return LoaderStats.of_numbers(self.end.stats)
        return sum((LoaderStats.of_numbers(row.stats) for row in self.rows), LoaderStats())


@dataclass(frozen=True)
class Run:
    """A run, from its log.

    Attributes:
        path: The log.
        launches: At least one.
        num_bytes: The bytes of the whole lines: a killed run may leave a part of another one.
    """

    path: Path
    launches: list[Launch]
    num_bytes: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.path.resolve().parent.name

    @property
    def seconds(self) -> float:
        """How long all launches took."""
        return sum(launch.seconds for launch in self.launches)

    @cached_property
    def stats(self) -> LoaderStats:
        """What was measured in all launches."""
        return sum((launch.stats for launch in self.launches), LoaderStats())

    @property
    def num_lost(self) -> int | None:
        """Samples that were lost; None where that was not checked."""
        return _added([launch.counted("lost") for launch in self.launches])

    @property
    def num_repeated(self) -> int | None:
        """Samples that were repeated; None where that was not checked."""
        return _added([launch.counted("repeated") for launch in self.launches])

    def summary(self) -> dict[str, Any]:
        """The numbers of the run, as its page shows them."""
        stats, last = self.stats, self.launches[-1]
        return {
            "ended": last.how,
            "verdict": "" if last.end is None else last.end.verdict,
            "launches": len(self.launches),
            "samples": stats.num_samples,
            "samples_per_s": stats.samples_per_s,
            "tokens": stats.num_tokens,
            "trained_s": stats.elapsed_s,
            "wait_s": stats.wait_s,
            "first_wait_s": stats.first_wait_s,
            "wait_share": stats.wait_share,
            "downloaded_bytes": int(stats.counters["fetched_bytes"]),
            "cache_hit": stats.cache_hit,
            "retries": int(stats.counters["retries"]),
            "bad_samples": int(stats.counters["bad_samples"]),
            "lost": self.num_lost,
            "repeated": self.num_repeated,
        }


def _added(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the log of a run: a file, or the folder that holds ``data_log.jsonl``.

    Raises:
        FileNotFoundError: There is none.
        ValueError: The file is another one, or is damaged before its last line.
    """
    log = Path(path)
    log = log / LOG_NAME if log.is_dir() else log
    content = log.read_bytes()
    num_bytes = content.rfind(b"\n") + 1
    launches: list[Launch] = []
    for number, line in enumerate(content[:num_bytes].splitlines(), 1):
        try:
            record = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{log} is no log of a run: line {number}: {error}") from error
        if isinstance(record, LaunchStart):
            launches.append(Launch(record))
        elif launches:
            launches[-1].add(record)
    if not launches or launches[-1].start.format != FORMAT:
        raise ValueError(f"{log} is no log of a run: it has no launch of format {FORMAT}")
    return Run(log, launches, num_bytes)


# Writing


class RunLog:
    """Appends the records of one launch; a failure is shown once, and never stops the run.

    Args:
        folder: The folder of the run.
        say: Shows the user a sentence.

    Attributes:
        path: Where the log is: under another name where another run writes that one.
    """

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        self.path = folder.absolute() / LOG_NAME  # a run may change its folder
        self._say = say
        self._start = self._unwritten = b""
        self._stamp: tuple[int, int] | None = None  # of the file, as this launch left it
        self._has_failed = False
        self._lock = threading.RLock()  # the watch of a loader writes messages, too

    def begin(self, start: LaunchStart, *, continues: bool) -> float:
        """Write the first record behind those of the run that this launch continues; another run's log is renamed.

        Returns:
            The seconds that the launches before it took.
        """
        self._start = self._unwritten = _ENCODER.encode(start) + b"\n"
        before_s = 0.0
        try:
            before_s = self._join(continues)
            self._write(b"")
        except OSError as error:
            self._failed(error)
        return before_s

    def append(self, record: Record) -> None:
        """Write a record."""
        line = _ENCODER.encode(record) + b"\n"
        with self._lock:
            try:
                self._write(line)
            except OSError as error:
                self._failed(error)

    def _join(self, continues: bool) -> float:
        if not self.path.is_file():
            return 0.0
        problem = ""
        try:
            run = read_run(self.path)
        except ValueError as error:
            problem = str(error)
        else:
            if continues:
                os.truncate(self.path, run.num_bytes)
                self._stamp = _stamp(self.path)
                return run.seconds
        other = _free_name(self.path)
        self.path.rename(other)
        if page_of(self.path).is_file():
            page_of(self.path).rename(page_of(other))
        if problem:
            self._say(f"{problem}. It is now {other}.")
        return 0.0

    def _write(self, line: bytes) -> None:
        if _stamp(self.path) != self._stamp:
            self._step_aside()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(self._unwritten + line)
        self._unwritten = b""
        self._stamp = _stamp(self.path)

    def _step_aside(self) -> None:
        """Leave the file to the run that has taken its name; or begin another one where it was deleted."""
        former, found = self.path, _stamp(self.path)
        renamed = [path for path in former.parent.glob(f"{former.stem}-*") if _stamp(path) == self._stamp]
        if renamed:
            self.path = renamed[0]
        else:
            self._unwritten, self._stamp = self._start, None
            self.path = former if found is None else _free_name(former)
        if found is not None:
            self._say(f"Another run writes {former}: the log of this one is {self.path}.")

    def _failed(self, error: OSError) -> None:
        if self._stamp is not None:
            with suppress(OSError):
                os.truncate(self.path, self._stamp[1])  # no part of a line
        if not self._has_failed:
            self._say(f"The log {self.path} cannot be written now, and training continues: {error}")
        self._has_failed = True


def _free_name(path: Path) -> Path:
    """The first of ``name-1``, ``name-2``, ... that neither a log nor its page has."""
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
    return next(other for other in names if not other.exists() and not page_of(other).exists())


def _stamp(path: Path) -> tuple[int, int] | None:
    """The inode and the size of a file; None where there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size
