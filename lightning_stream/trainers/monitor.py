"""`DataMonitor`: what a trainer logs, shows and tells the user about the time that training waits for its data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_stream.dataset import source_of
from lightning_stream.errors import redact
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.meter import Mark
from lightning_stream.loading.stats import INPUT_BOUND, LoaderStats
from lightning_stream.loading.verdict import Verdict, verdict_of
from lightning_stream.loading.watch import Watch
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.trainers.agreement import gathered_numbers

if TYPE_CHECKING:
    from lightning_stream.trainers.report import RunReport

_SHOWN_S = 5.0  # how much time the text in the progress bar is about
_CHECKED_S = 60.0  # the pause between two messages, while training, that it is input-bound
_WORTH_S = 5.0  # of waiting in that time
_WORTH_AT_END_S = 1.0
_LONG_RUN_S = 60.0  # from here on, the end of training has a verdict also where all is well
_MOST_STREAMS = 20
_COUNTED_TOGETHER = 1 << 15  # samples
_NAMES = tuple(LoaderStats().numbers())
_WAITED, _COMPUTED, _OTHERS = map(_NAMES.index, ("wait_s", "compute_s", "pauses.other_ranks"))
_PAUSED = np.array([name.startswith("pauses.") for name in _NAMES])
_SAMPLES = np.array([name in ("num_samples", "num_tokens") for name in _NAMES])
_ADDED = _SAMPLES | np.array([name.startswith("counters.") and not name.endswith("_s") for name in _NAMES])
Numbers = NDArray[np.float64]


class StreamCounts:
    """Counts the samples that are drawn from each stream of a mixture; nothing where there is only one stream."""

    def __init__(self, loader: StreamingDataLoader) -> None:
        self._snapshot = source_of(loader.streaming).snapshot
        names = self._snapshot.stream_names
        sizes = np.diff(self._snapshot.shard_offsets[self._snapshot.stream_offsets])
        largest = np.argsort(-sizes, kind="stable")
        self._shown = np.zeros(len(names), np.int64)  # by stream, which of `names` it counts for
        self._shown[largest] = np.minimum(np.arange(len(names)), _MOST_STREAMS - 1)
        self.names = [redact(names[stream]) for stream in largest[:_MOST_STREAMS].tolist()] if len(names) > 1 else []
        if len(names) > _MOST_STREAMS:
            self.names[-1] = "other streams"
        self._ids: list[NDArray[np.int64]] = []
        self._num_ids = 0
        self._counts: Numbers = np.zeros(len(self.names))

    def add(self, batch: MicroBatch) -> None:
        """Count a batch, in a moment or later: many at once cost less."""
        if self.names and batch.num_samples:
            ids = batch.without_padding().sample_ids
            self._ids.append(ids)
            self._num_ids += len(ids)
            if self._num_ids >= _COUNTED_TOGETHER:
                self._count()

    def take(self) -> Numbers:
        """The counts since this was asked last, float64[len(names)]."""
        if self._ids:
            self._count()
        counts, self._counts = self._counts, np.zeros(len(self.names))
        return counts

    def _count(self) -> None:
        streams = self._snapshot.streams_of(np.concatenate(self._ids))
        self._counts += np.bincount(self._shown[streams], minlength=len(self.names))
        self._ids, self._num_ids = [], 0


class DataMonitor:
    """Follows the loader of one training run, in each of its processes.

    Args:
        say: Shows the user a sentence, which the log of the run keeps.
        monitor: Whether to do so.
        watch_after_s: See `StreamingDataLoader.watch`; None: no watch.
        is_alone: Whether to measure this process alone: then nothing is collective.

    Raises:
        ValueError: `monitor` is something else, or the time is not positive.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        monitor: bool = True,
        watch_after_s: float | None = 120.0,
        *,
        is_alone: bool = False,
    ) -> None:
        if monitor not in (True, False):
            raise ValueError(f"monitor= is True or False; found {monitor!r}")
        if watch_after_s is not None and watch_after_s <= 0:
            raise ValueError(f"watch_after_s= is positive, or None for no watch; found {watch_after_s}")
        self._show, self.is_on, self._watch_after_s, self._is_alone = say, bool(monitor), watch_after_s, is_alone
        self._report: RunReport | None = None
        self._row_due = math.inf  # when this process writes a row by itself: its numbers are those of the run
        self._loader: StreamingDataLoader | None = None
        self._streams: StreamCounts | None = None
        self._watch: Watch | None = None
        self._past = self._base = LoaderStats()  # of loaders before this one; of this one, when it was attached
        self._logged = self._in_rows = self._shown = LoaderStats()  # when each was done last
        self._totals = self._checked = np.zeros((1, len(_NAMES)))  # of each rank; when they were checked last
        self._checked_at = self._shown_at = perf_counter()
        self._validating: Mark | None = None  # when the validation in progress began
        self._others_s = 0.0  # that this rank waited for other ranks
        self._late: tuple[int, int] | None = None  # the rank that all others wait for, and since which step
        self._last_step = 0
        self._said: set[str] = set()
        self._text = "0%"

    def say(self, sentence: str) -> None:
        """Show the user a sentence."""
        if self._report is not None:
            self._report.note_message(sentence)
        self._show(sentence)

    def begin_report(self, report: RunReport) -> None:
        """Write the log of the run from now on; on all ranks."""
        self._report, self._in_rows = report, self.stats()
        report.begin(is_alone=self._is_alone)
        self._row_due = report.row_due

    # The loader

    def attach(self, loader: StreamingDataLoader) -> None:
        """Follow a loader from now on, and watch it; a trainer may make another one for each epoch."""
        if loader is self._loader:
            return
        self.detach()
        self._loader, self._base = loader, loader.stats()
        if self.is_on:
            self._streams = StreamCounts(loader)
            loader.meter.noted = self._note
            if self._watch_after_s is not None:
                self._watch = loader.watch(self._watch_after_s, self.say)
        if self._report is not None:
            self._report.loader = loader

    def detach(self) -> None:
        """Release the loader; what was measured stays."""
        self._past = self.stats()
        if self._loader is not None:
            self._loader.meter.noted = None
        watch, self._loader, self._watch = self._watch, None, None
        if watch is not None:
            watch.close()

    def stop(self, error: BaseException | str | None) -> None:
        """Release the loader at the end of training, or when an error stops this rank."""
        if self._report is not None and not self._report.has_ended:
            stats = self.stats()
            measured = self._over_ranks(self._totals) + (stats - self._logged)
            self._add_own_row()
            self._report.end(error, measured, verdict_of(stats), is_whole=self._writes_rows)
        self.detach()
        self._report = None

    def stats(self) -> LoaderStats:
        """What was measured in this process since training began."""
        if self._loader is None:
            return self._past
        stats = self._past + (self._loader.stats() - self._base)
        return replace(stats, pauses={**stats.pauses, "other_ranks": self._others_s})

    def end_epoch(self) -> None:
        """Note that training stops: an epoch is over."""
        if self._loader is not None:
            self._loader.meter.stop(perf_counter())

    def begin_validation(self) -> None:
        """Note that a validation begins."""
        self._validating = self.mark()

    def end_validation(self) -> None:
        """Note that training continues after a validation."""
        since, self._validating = self._validating, None
        if since is not None:
            self.spent("validation", since)

    @staticmethod
    def mark() -> Mark:
        """This moment, for `spent`."""
        return Mark.of(perf_counter())

    def spent(self, what: str, since: Mark) -> None:
        """Note that a ``"checkpoint"`` was written, or a ``"validation"`` was made, since a mark."""
        if self._loader is not None and self._validating is None:
            self._loader.meter.spent(what, since, perf_counter())

    def _note(self, now: float, batch: MicroBatch | None) -> None:
        """Count a batch that is about to be handed out."""
        if batch is not None and self._streams is not None:
            self._streams.add(batch)
        if now >= self._row_due:
            self._add_own_row()

    def _add_own_row(self) -> None:
        """Add to the log what this process has measured since its last row."""
        stats = self.stats()
        self._add_row(stats - self._in_rows, self._take_counts())
        self._in_rows = stats

    def _add_row(self, recent: LoaderStats, drawn: Numbers) -> None:
        if self._report is not None and self._streams is not None:
            self._report.add(recent, dict(zip(self._streams.names, drawn.tolist(), strict=True)))
            self._row_due = self._report.row_due

    def _take_counts(self) -> Numbers:
        return np.zeros(0) if self._streams is None else self._streams.take()

    # What the user sees

    def short(self) -> str:
        """The text for a progress bar, about the last seconds, e.g. ``2% · 310 MB/s``."""
        now = perf_counter()
        if now - self._shown_at >= _SHOWN_S:
            stats = self.stats()
            self._text, self._shown, self._shown_at = (stats - self._shown).short, stats, now
        return self._text

    def metrics(self, step: int) -> dict[str, float]:
        """The values for loggers since this was asked last, over all ranks, after this optimizer step. Collective.

        Samples and what was fetched are added up; the others are those of the rank that waited longest.
        """
        ranks = self._gather()
        self._follow_late_rank(ranks)
        self._last_step = step
        now = perf_counter()
        if now - self._checked_at >= _CHECKED_S:
            recent, self._checked, self._checked_at = self._totals - self._checked, self._totals, now
            self._tell(recent)
        return self._over_ranks(ranks).metrics()

    def end(self) -> None:
        """Tell the user how much of the time training waited for data, and what to change. Collective."""
        self._gather()
        measured, verdict = self._over_ranks(self._totals), self._verdict(self._totals)
        is_worth_it = verdict.is_input_bound and measured.wait_s >= _WORTH_AT_END_S
        if is_worth_it or measured.elapsed_s >= _LONG_RUN_S:
            self.say(str(verdict))
        if self._report is not None:
            if self._writes_rows:
                self._add_own_row()
            self._report.end(None, measured, verdict)

    @property
    def _writes_rows(self) -> bool:
        """Whether what this process measures is all that the run measures."""
        return self._row_due < math.inf

    def _gather(self) -> Numbers:
        """What each rank has measured since this was asked last, float64[ranks, len(_NAMES)]; in the log, too."""
        stats = self.stats()
        recent = stats - self._logged
        counts = np.zeros(0)
        if self._streams is not None:
            counts = np.zeros(len(self._streams.names)) if self._writes_rows else self._streams.take()
        numbers = np.concatenate([list(recent.numbers().values()), counts])
        ranks, drawn = np.split(numbers[np.newaxis] if self._is_alone else gathered_numbers(numbers), [len(_NAMES)], 1)
        training = ranks[:, _COMPUTED] - ranks[:, _PAUSED].sum(axis=1)
        ranks[:, _OTHERS] = training - training.min()
        self._others_s += max(0.0, recent.training_s - float(training.min()))
        self._logged = replace(stats, pauses={**stats.pauses, "other_ranks": self._others_s})
        self._totals = self._totals + ranks
        if not self._writes_rows:
            self._in_rows = self._logged
            self._add_row(self._over_ranks(ranks), drawn.sum(axis=0) / self._replication)
        return ranks

    @property
    def _replication(self) -> int:
        """How many ranks get the same samples."""
        return 1 if self._loader is None else self._loader.detect_world().replication

    def _over_ranks(self, ranks: Numbers) -> LoaderStats:
        """What all ranks measured: counts are added up, and the others are of the rank that waited longest."""
        added = ranks.sum(axis=0) / np.where(_SAMPLES, self._replication if len(ranks) > 1 else 1, 1)
        return self._stats_of(np.where(_ADDED, added, ranks[_slowest(ranks)]))

    def _stats_of(self, numbers: Numbers) -> LoaderStats:
        here = self._logged
        stats = LoaderStats.of_numbers(dict(zip(_NAMES, numbers.tolist(), strict=True)))
        settings, positions, fraction = here.settings, here.epoch_positions, here.epoch_fraction
        return replace(stats, settings=settings, epoch_positions=positions, epoch_fraction=fraction)

    def _follow_late_rank(self, ranks: Numbers) -> None:
        """Note since when all other ranks have waited for the same one, which waits for its data."""
        shares, rank = _wait_shares(ranks), _slowest(ranks)
        if shares.max() - shares.min() < INPUT_BOUND:
            self._late = None
        elif self._late is None or self._late[0] != rank:
            self._late = rank, self._last_step

    def _verdict(self, ranks: Numbers) -> Verdict:
        """The verdict about the rank that waited longest, which it names if there are several."""
        rank = _slowest(ranks)
        verdict = verdict_of(self._stats_of(ranks[rank]))
        if len(ranks) == 1 or not verdict.is_input_bound:
            return verdict
        late = self._late[1] if self._late is not None and self._late[0] == rank else 0
        others = f" The other ranks have waited for it since about step {late:,}." if late else ""
        return replace(verdict, finding=f"Rank {rank}: {verdict.finding}", remedy=f"{verdict.remedy}{others}".strip())

    def _tell(self, ranks: Numbers) -> None:
        """Tell the verdict while training runs, if it is worth it, and the same cause once."""
        verdict = self._verdict(ranks)
        if verdict.is_input_bound and ranks[_slowest(ranks), _WAITED] >= _WORTH_S and verdict.cause not in self._said:
            self._said.add(verdict.cause)
            self.say(str(verdict))


def _wait_shares(ranks: Numbers) -> Numbers:
    return ranks[:, _WAITED] / np.maximum(1e-9, ranks[:, _WAITED] + ranks[:, _COMPUTED])


def _slowest(ranks: Numbers) -> int:
    return int(_wait_shares(ranks).argmax())
