"""`RunReport`: one page of HTML about the data of a training run, written while it trains and when it stops.

The page holds its own rows. So a resumed run reads them back and continues them, on any number of devices.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.dataset import source_of
from lightning_stream.errors import LightningStreamError, redact
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.meter import PARTS
from lightning_stream.loading.stats import LoaderStats
from lightning_stream.loading.verdict import verdict_of
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.trainers.audit import verify_delivery
from lightning_stream.trainers.report_file import FORMAT, PageFile, Row, checked_path
from lightning_stream.trainers.report_page import page_of
from lightning_stream.trainers.tracker import PositionTracker

if TYPE_CHECKING:
    from typing_extensions import Self

_MOST_ROWS = 2000
_FIRST_INTERVAL_S = 0.2  # of a row; doubles whenever there are too many rows
_WRITTEN_EVERY_S, _WRITING_SHARE = 60.0, 1 / 500  # the pause between two pages, and the most that writing may take
_COUNTED_TOGETHER = 1 << 15  # samples
_MOST_STREAMS, _MOST_BAD, _MOST_MESSAGES = 20, 200, 500
_MOST_VERIFIED = 5_000_000  # samples of a recorded run that are planned once more at its end, in a second or two
_COUNTERS = (
    "requests", "fetched_bytes", "retries", "throttled", "shards_fetched", "shards_fetched_again", "shards_here",
    "evictions", "bad_samples",
)  # fmt: skip
_COUNTS = ("samples", "tokens", "batches", "ready_batches")
_TIMES = ("compute_s", "wait_s", *(f"{part}_s" for part in PARTS))
_STATES = ("end_s", "time", "step", "epoch", "position")  # of a row: where it ends


class RunReport:
    """Follows one training run in each of its processes, and writes its page on the first rank.

    Lightning and Composer make one, see ``report=`` of `StreamingCallback` and `data_spec`. In a loop of your own it is
    a context manager, and reports what its own process measures.

    Args:
        path: The page, a file whose name ends with ``.html``. Where the run resumes, the page continues; a run that
            starts over keeps the former page under another name.
        loader: The loader of the run.
        tracker: Its `PositionTracker`, which knows whether samples were lost or repeated.
        step: The trainer's count of optimizer steps.
        say: Shows the user a sentence.

    Raises:
        ValueError: The path is no local file that ends with ``.html``.

    Example::

        with RunReport("runs/1/data_report.html", loader):
            for batch in loader:
                train(batch)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        loader: StreamingDataLoader,
        tracker: PositionTracker | None = None,
        *,
        step: Callable[[], int] | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        self._file, self._step, self._tracker = PageFile(checked_path(path), say), step, tracker
        self._loader, self._base = loader, LoaderStats()
        self._stats: Callable[[], LoaderStats] = lambda: self._loader.stats() - self._base
        self._began = self._last_s = self._row_began = 0.0
        self._due = self._next_write = math.inf
        self._interval_s = _FIRST_INTERVAL_S
        self._shared = LoaderStats()
        self._ids: list[NDArray[np.int64]] = []
        self._num_ids = 0
        self._drawn: Row = {}
        self._rows: list[Row] = []
        self._kept: dict[str, Any] = {}
        self._is_first = self._has_ended = False
        self._bad_from: tuple[Path, int] | None = None

    @property
    def path(self) -> Path:
        """Where the page is: another name than was given where another run writes that one."""
        return self._file.path

    # A plain loop

    def __enter__(self) -> Self:
        self._base = self._loader.stats()
        self.begin(is_alone=True)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(error, [self.share()])

    # The run

    def begin(self, stats: Callable[[], LoaderStats] | None = None, *, is_alone: bool = False) -> None:
        """Begin a launch of the run, or continue the page of an earlier one.

        Args:
            stats: What was measured since this launch began, over all of its loaders; None for this loader's.
            is_alone: Whether no other rank adds what it has measured.
        """
        self._stats = stats or self._stats
        world, here = self._loader.detect_world(), self._loader.position
        self._is_first = world.rank == 0
        self._kept = {"format": FORMAT, "run": secrets.token_hex(8), "launches": [], "messages": [], "bad": []}
        former = self._file.former(continues=bool(here.epoch or here.position)) if self._is_first else None
        if former is not None:
            (self._kept, self._rows), self._interval_s = former, float(former[0]["interval_s"])
        self._kept["name"] = self.path.resolve().parent.name
        self._last_s = self._rows[-1]["end_s"] if self._rows else 0.0
        self._began, self._shared = perf_counter() - self._last_s, self._stats()
        if self._is_first and (is_alone or world.num_ranks == 1):
            self._due = 0.0
        launch = {
            "began": _now(), "at_s": self._last_s, "from": [here.epoch, here.position], "ranks": world.num_ranks,
            "nodes": world.num_nodes, "measured_ranks": 1 if is_alone else world.num_ranks,
            "checks": self._tracker is not None and self._tracker.check_delivery,
        }  # fmt: skip
        self._kept["launches"].append(launch)
        self.follow(self._loader)
        if self._is_first:
            self._kept["settings"] = redact(f"{self._loader!r}\n\n{self._loader.describe(count_rows=False)}")
            self._mark_bad()
            self._write()

    def follow(self, loader: StreamingDataLoader) -> None:
        """Count what this loader hands out from now on; a trainer may make another one for each epoch."""
        self.release()
        self._loader = loader
        snapshot = source_of(loader.streaming).snapshot
        names = [redact(name) for name in snapshot.stream_names]
        edges = snapshot.shard_offsets[snapshot.stream_offsets]
        largest = set(np.argsort(-np.diff(edges), kind="stable")[: _MOST_STREAMS - 1].tolist())
        fits = len(names) <= _MOST_STREAMS
        self._lanes = [name if fits or k in largest else "other streams" for k, name in enumerate(names)]
        self._snapshot = snapshot
        loader.meter.noted = self._note

    def release(self) -> None:
        """Count no more of the loader's batches."""
        self._loader.meter.noted = None

    def _note(self, now: float, batch: MicroBatch | None) -> None:
        """Count a batch that is about to be handed out."""
        if batch is not None and batch.num_samples and len(self._lanes) > 1:
            ids = batch.without_padding().sample_ids
            self._ids.append(ids)
            self._num_ids += len(ids)
            if self._num_ids >= _COUNTED_TOGETHER:
                self._count()
        if now >= self._due:
            self.add([self.share()])

    def _count(self) -> None:
        ids, self._ids, self._num_ids = self._ids, [], 0
        if ids:
            counts = np.bincount(self._snapshot.streams_of(np.concatenate(ids)), minlength=len(self._lanes))
            for number in np.flatnonzero(counts).tolist():
                name = f"stream:{self._lanes[number]}"
                self._drawn[name] = self._drawn.get(name, 0) + int(counts[number])

    def share(self) -> Row:
        """What this rank has measured since it was asked last."""
        stats = self._stats()
        recent, self._shared = stats - self._shared, stats
        self._count()
        drawn, self._drawn = self._drawn, {}
        times = {f"{part}_s": recent.waits[part] + recent.first_waits[part] for part in PARTS}
        counts = (recent.num_samples, recent.num_tokens, recent.num_batches, recent.num_ready)
        counted = {name: recent.counters[name] for name in _COUNTERS}
        times |= {"compute_s": recent.compute_s, "wait_s": recent.wait_s}
        return {**times, **dict(zip(_COUNTS, counts, strict=True)), **counted, **drawn}

    def add(self, shares: Sequence[Row]) -> None:
        """Add a row, from the shares of the ranks: counts are added up, times are of the rank that waits longest."""
        if not self._is_first:
            return
        now = perf_counter() - self._began
        shares = [one for one in shares if one]  # a rank without a report has none
        slowest = max(shares, key=lambda one: one["wait_s"])
        same = 1 if len(shares) == 1 else self._loader.detect_world().replication
        row = {name: slowest[name] for name in _TIMES}
        for name in dict.fromkeys(name for one in shares for name in one if name not in _TIMES):
            whole = sum(one.get(name, 0) for one in shares)
            row[name] = whole if name in _COUNTERS else whole / same
        here = self._loader.position
        row |= {"end_s": now, "time": time.time(), "step": 0 if self._step is None else self._step()}
        row |= {"epoch": here.epoch, "position": here.position}
        self._has_ended = False
        is_first = self._last_s == self._kept["launches"][-1]["at_s"]
        # A trainer logs between two batches, too: a row without a batch would have no rate.
        if not is_first and (now - self._row_began < self._interval_s or not row["batches"]):
            self._rows[-1] = _joined(self._rows[-1], row)
        else:
            self._rows.append(row)
            self._row_began = self._last_s
        self._last_s = now
        while len(self._rows) > _MOST_ROWS:
            self._rows, self._interval_s = _halved(self._rows), 2 * self._interval_s
        if self._due < math.inf:
            self._due = perf_counter() + self._interval_s
        if now >= self._next_write:
            self._write()

    def note_message(self, sentence: str) -> None:
        """Keep a sentence that the user was shown."""
        at_s = perf_counter() - self._began
        step = 0 if self._step is None else self._step()
        self._kept["messages"] = [*self._kept["messages"], [at_s, step, redact(sentence)]][-_MOST_MESSAGES:]

    def end(self, error: BaseException | str | None, shares: Sequence[Row]) -> None:
        """Write the page at the end of training, or when it stops.

        Args:
            error: What stopped it, or when; None at the end.
            shares: What the ranks have measured since the last row: of all ranks, or of this one if it stops alone.
        """
        if self._is_first and not self._has_ended:
            self.add(shares)
            launch = self._kept["launches"][-1]
            launch["ended"] = "finished" if error is None else redact(_described(error))[:2000]
            launch["last_row_ranks"] = len(shares) if launch["measured_ranks"] > 1 else 1
            stats = self._stats()
            launch["verdict"] = str(verdict_of(stats)) if stats.num_batches else ""
            if error is None:
                launch["ledger"] = self._ledger()
            self._has_ended = True
            self._write()
        self.release()

    def _ledger(self) -> str:
        """What the record of the run proves, where it keeps one."""
        folder = None if self._tracker is None else self._tracker.record_delivery
        if folder is None:
            return ""
        if sum(row["samples"] for row in self._rows) > _MOST_VERIFIED:
            return f"Not verified yet, because that plans the run once more: verify_delivery({str(folder)!r}, dataset)"
        try:
            return verify_delivery(folder, self._loader.streaming).sentence
        except (LightningStreamError, ValueError, OSError) as error:
            return f"Not verified: {error}"

    # The page

    def _mark_bad(self) -> None:
        """Remember where the list of bad samples ends now: what is listed later is of this run."""
        source = source_of(self._loader.streaming)
        if source.bad_data.policy.substitutes:
            path = source.bad_data.path_of(source.reader)
            self._bad_from = (path, path.stat().st_size if path.exists() else 0)

    def _list_bad(self) -> None:
        """Add what was listed since the last page."""
        path, begin = self._bad_from or (Path(), 0)
        if self._bad_from is None or not path.exists():
            return
        with path.open("rb") as file:
            file.seek(begin)
            lines = file.read(1 << 20).splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._bad_from = (path, begin + sum(map(len, whole)))
        found = {(one["stream"], one["sample"]): one for one in self._kept["bad"]}
        for line in whole:
            one = json.loads(line)
            one |= {name: redact(one[name]) for name in ("stream", "reason")}
            found.setdefault((one["stream"], one["sample"]), one)
        self._kept["bad"] = list(found.values())[:_MOST_BAD]

    def _write(self) -> None:
        """Write the page."""
        began, here = perf_counter(), self._loader.position
        try:
            self._list_bad()
        except (OSError, ValueError, LookupError, TypeError) as error:  # lines that others wrote into the file
            self._bad_from = None
            self.note_message(f"The list of bad samples is incomplete here, since its file cannot be read: {error}")
        launch = self._kept["launches"][-1]
        launch |= {"to": [here.epoch, here.position], "written": _now()}
        if self._tracker is not None:
            launch |= {"lost": self._tracker.num_lost, "repeated": self._tracker.num_repeated}
        if not self._has_ended:
            launch.pop("ended", None)
        self._kept["interval_s"] = self._interval_s
        names = dict.fromkeys(name for row in self._rows for name in row)
        columns = {name: [_rounded(row.get(name, 0)) for row in self._rows] for name in names}
        content = page_of(self._kept, columns).encode()
        self._file.write(content)
        now = perf_counter()
        self._next_write = now - self._began + max(_WRITTEN_EVERY_S, (now - began) / _WRITING_SHARE)


def _halved(rows: Sequence[Row]) -> list[Row]:
    """Every two rows as one; no count is lost."""
    pairs = (rows[i : i + 2] for i in range(0, len(rows), 2))
    return [_joined(*pair) if len(pair) == 2 else pair[0] for pair in pairs]


def _joined(first: Row, second: Row) -> Row:
    return {**first, **{name: v if name in _STATES else first.get(name, 0) + v for name, v in second.items()}}


def _described(error: BaseException | str) -> str:
    return error if isinstance(error, str) else f"{type(error).__name__}: {error}".removesuffix(": ")


def _rounded(value: float) -> float:
    return int(value) if value == int(value) else round(value, 6)


def _now() -> str:
    return datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
