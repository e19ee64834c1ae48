"""The log of a training run: one file of JSON lines, which is only ever appended to, and from which its page is drawn.

`RunReport` writes it and `read_run` reads it. All numbers of a run follow from its `LoaderStats`: those of its rows
while it trains, and those of its end once it has ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lightning_stream.errors import CacheError, redact
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.shared_files import LOCK_FDS, same_file, try_flock

LOG_NAME = "data_log.jsonl"
PAGE_NAME = "data_report.html"
FORMAT = 1
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
Place = tuple[int, int]  # an epoch, and the samples of it that were trained on


class Record(Struct, tag_field="kind", kw_only=True, omit_defaults=True):
    """A line of the log: when it was written, and where the run stood."""

    at_s: float = 0.0  # since the launch began
    place: Place = (0, 0)
    step: int = 0
    lost: int | None = None  # samples, in this launch until now; None where that is not checked
    repeated: int | None = None


class LaunchStart(Record, tag="launch", omit_defaults=False):
    """The first record of a launch: a run has one for its beginning, and one for each resume."""

    began: str
    ranks: int
    nodes: int
    measured_ranks: int
    settings: str
    streams: list[dict[str, Any]]
    versions: dict[str, str]
    format: int = FORMAT


class Row(Record, tag="row"):
    """What all ranks measured since the row before."""

    epochs: float
    stats: dict[str, float]  # see `LoaderStats.numbers`
    drawn: dict[str, float] = {}  # samples by stream


class Message(Record, tag="message"):
    """A sentence that the user was shown."""

    text: str


class BadSample(Record, tag="bad"):
    """A sample that could not be read, as the quarantine lists it."""

    values: dict[str, Any]


class LaunchEnd(Record, tag="end"):
    """How a launch ended, and what was measured in all of it."""

    how: str  # "finished", or what stopped it
    stats: dict[str, float]
    verdict: str = ""
    ledger: str = ""
    is_whole: bool = True  # whether it has all that the other ranks measured


_DECODER = msgspec.json.Decoder(LaunchStart | Row | Message | BadSample | LaunchEnd)


def line_of(record: Record) -> bytes:
    """The line of a record."""
    return msgspec.json.encode(_cleaned(msgspec.to_builtins(record))) + b"\n"


def _cleaned(value: Any) -> Any:
    """A value without credentials, and without halves of characters, which file names may hold and JSON may not."""
    if isinstance(value, str):
        return redact(value).encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_cleaned(name): _cleaned(part) for name, part in value.items()}
    return [_cleaned(part) for part in value] if isinstance(value, (list, tuple)) else value


def numbers_of(stats: LoaderStats) -> dict[str, float]:
    """The numbers of a record: without zeros, and without digits that nobody measures."""
    return {name: round(value, 6) for name, value in stats.numbers().items() if value}


def page_of(log: Path) -> Path:
    """Where the page of a log is."""
    return log.with_name(f"{log.stem.replace('log', 'report')}.html")


class Launch:
    """One launch of a run: its records.

    Attributes:
        start, rows, messages, bad: Its records by kind.
        latest: The record that says where the launch stands.
        end: The last record; None while it trains, or where it was killed.
        how: How it ended.
        stats: What was measured: over all ranks, with the times of the rank that waited longest.
    """

    def __init__(self, start: LaunchStart, records: list[Record]) -> None:
        self.start = start
        self.rows = [record for record in records if isinstance(record, Row)]
        self.messages = [record for record in records if isinstance(record, Message)]
        self.bad = [record for record in records if isinstance(record, BadSample)]
        standing = [start, *(record for record in records if isinstance(record, (Row, LaunchEnd)))]
        self.latest = standing[-1]  # rows follow an end where the trainer was started once more
        self.end = self.latest if isinstance(self.latest, LaunchEnd) else None
        self.how = "no end was written" if self.end is None else self.end.how
        measured = self.rows if self.end is None else [self.end]
        self.stats = sum((LoaderStats.of_numbers(record.stats) for record in measured), LoaderStats())


class Run:
    """A run, from its log.

    Attributes:
        path: The log.
        launches: At least one.
        num_bytes: The bytes of the whole lines: a killed run may leave a part of another one.
        name: That of the run's folder.
        seconds: How long all launches took.
        stats: What was measured in all launches.
        lost, repeated: Samples; None where a launch did not check that.
    """

    def __init__(self, path: Path, launches: list[Launch], num_bytes: int) -> None:
        self.path = path
        self.launches = launches
        self.num_bytes = num_bytes
        self.name = path.resolve().parent.name
        self.seconds = sum(launch.latest.at_s for launch in launches)
        self.stats = sum((launch.stats for launch in launches), LoaderStats())
        self.lost = _added([launch.latest.lost for launch in launches])
        self.repeated = _added([launch.latest.repeated for launch in launches])

    def summary(self) -> dict[str, Any]:
        """The numbers of the run, as its page shows them."""
        stats = self.stats
        last = self.launches[-1]
        counted = {name: int(stats.counters[name]) for name in ("fetched_bytes", "retries", "bad_samples")}
        names = ("samples_per_s", "elapsed_s", "wait_s", "first_wait_s", "wait_share", "cache_hit")
        return {
            "ended": last.how,
            "verdict": "" if last.end is None else last.end.verdict,
            "launches": len(self.launches),
            "samples": stats.num_samples,
            "tokens": stats.num_tokens,
            **{name: getattr(stats, name) for name in names},
            **counted,
            "lost": self.lost,
            "repeated": self.repeated,
        }


def _added(counts: list[int | None]) -> int | None:
    return None if None in counts else sum(count or 0 for count in counts)


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
    launches: list[tuple[LaunchStart, list[Record]]] = []
    for line_number, line in enumerate(content[:num_bytes].splitlines(), 1):
        try:
            record = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{log} is no log of a run: line {line_number}: {error}") from error
        if isinstance(record, LaunchStart):
            launches.append((record, []))
        elif launches:
            launches[-1][1].append(record)
    if not launches or launches[-1][0].format != FORMAT:
        raise ValueError(f"{log} is no log of a run: it has no launch of format {FORMAT}")
    return Run(log, [Launch(start, records) for start, records in launches], num_bytes)


def open_log(folder: Path, *, continues: bool, say: Callable[[str], object]) -> tuple[Path, int, float]:
    """Open the log of a folder for a launch that continues its run, or starts over.

    A log that cannot be continued is renamed, with its page. Where another run writes it, this one gets another name.

    Returns:
        The path, the file's descriptor in `LOCK_FDS`, and the seconds that the launches before took.
    """
    path = folder / LOG_NAME
    folder.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    fd = None if path.is_dir() else _locked(path)
    if fd is None:
        other, fd = _made_beside(path)
        say(f"Another run writes {path}: the log of this one is {other}.")
        return other, fd, 0.0
    if is_new:
        return path, fd, 0.0
    with suppress(ValueError):
        former = read_run(path)
        if continues:
            os.truncate(fd, former.num_bytes)
            return path, fd, former.seconds
    other, other_fd = _made_beside(path)
    path.rename(other)
    LOCK_FDS.close(other_fd)
    LOCK_FDS.close(fd)
    if page_of(path).is_file():
        page_of(path).rename(page_of(other))
    former_log = "A log that this run cannot continue" if continues else "The log of the former run"
    say(f"{former_log} is now {other}.")
    return open_log(folder, continues=False, say=say)


def _locked(path: Path) -> int | None:
    """Open a log for this process alone; None where another one writes it."""
    fd = LOCK_FDS.open(path, _FLAGS, 0o644)
    with suppress(CacheError):  # the file system has no locks
        if not try_flock(fd, path):
            LOCK_FDS.close(fd)
            return None
    if same_file(fd, path):
        return fd
    LOCK_FDS.close(fd)  # another run has renamed it
    return _locked(path)


def _made_beside(path: Path) -> tuple[Path, int]:
    """Make the first of ``name-1``, ``name-2``, ... that neither a log nor its page has: no other run gets it."""
    index = 0
    while True:
        index += 1
        other = path.with_name(f"{path.stem}-{index}{path.suffix}")
        with suppress(FileExistsError):
            if not page_of(other).exists():
                return other, LOCK_FDS.open(other, _FLAGS | os.O_EXCL, 0o644)
