"""`DataMonitor`: what a trainer logs, shows and tells the user about the time that training waits for its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from lightning_stream.dataset import source_of
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.monitoring.measured import INPUT_BOUND
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.monitoring.verdict import Verdict, verdict_of
from lightning_stream.monitoring.watch import Watch
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.trainers.agreement import gathered_numbers
from lightning_stream.trainers.log_writer import LogWriter

_SHOWN_S = 5.0  # how much time the text in the progress bar is about
_CHECKED_S = 60.0  # the pause between two messages, while training, that it is input-bound
_WORTH_S = 5.0  # of waiting in that time
_WORTH_AT_END_S = 1.0
_LONG_RUN_S = 60.0  # from here on, the end of training has a verdict also where all is well
_MOST_STREAMS = 20
_NUMBERS = tuple(LoaderStats().numbers())
_NAMES = (*_NUMBERS, *(f"drawn.{k}" for k in range(_MOST_STREAMS)))
_WAITED, _COMPUTED, _OTHERS = map(_NAMES.index, ("wait_s", "compute_s", "pauses.other_ranks"))
_PAUSED = np.array([name.startswith("pauses.") for name in _NAMES])
_SAMPLES = np.array([name.startswith(("num_samples", "num_tokens", "drawn.")) for name in _NAMES])
_ADDED = _SAMPLES | np.array([name.startswith("counters.") and not name.endswith("_s") for name in _NAMES])
Numbers = NDArray[np.float64]


class DataMonitor:
    """Follows the loader of one training run, in each of its processes.

    Args:
        say: Shows the user a sentence, which the log of the run keeps.
        monitor: Whether to do so.
        watch_after_s: See `StreamingDataLoader.watch`; None: no watch.
        is_alone: Whether to measure this process alone: then nothing is collective.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        monitor: bool = True,
        watch_after_s: float | None = 120.0,
        *,
        is_alone: bool = False,
    ) -> None:
        self._show = say
        self.is_on = monitor
        self._watch_after_s = watch_after_s
        self._is_alone = is_alone
        self._report: LogWriter | None = None
        self._loader: StreamingDataLoader | None = None
        self._watch: Watch | None = None
        self._past = self._base = LoaderStats()  # of loaders before this one; of this one, when it was attached
        self._streams: list[str] = []  # the largest of a mixture, and the rest; empty where there is only one
        self._stream_numbers = np.zeros(1, np.int64)  # by stream of the loader, its number in that list
        self._drawn = np.zeros(_MOST_STREAMS)  # samples by stream
        self._others_s = 0.0  # that this rank waited for other ranks
        # What was measured when the ranks were gathered last: in this process, and by rank in the order of _NAMES.
        self._gathered = LoaderStats()
        self._totals = np.zeros((1, len(_NAMES)))
        self._before = dict.fromkeys(("row", "log", "check"), self._totals)  # when each was done last
        self._checked_at = self._shown_at = perf_counter()
        self._shown = LoaderStats()
        self._text = "0%"
        self._late: int | None = None  # the rank that all others wait for, since this step
        self._late_since = self._last_step = 0
        self._said: set[str] = set()

    def say(self, sentence: str) -> None:
        """Show the user a sentence."""
        if self._report is not None:
            self._report.note_message(sentence)
        self._show(sentence)

    def begin_report(self, report: LogWriter) -> None:
        """Write the log of the run from now on; on all ranks."""
        self._is_alone = self._is_alone or report.loader.detect_world().num_ranks == 1
        self._report = report
        report.begin(is_alone=self._is_alone)

    # The loader

    def attach(self, loader: StreamingDataLoader) -> None:
        """Follow a loader from now on, and watch it; a trainer may make another one for each epoch."""
        if loader is self._loader:
            return
        self.detach()
        self._base = loader.stats()
        self._loader = loader
        if self.is_on:
            self._streams, self._stream_numbers = _largest_streams(loader)
            loader.meter.noted = self._note
            if self._watch_after_s is not None:
                self._watch = loader.watch(self._watch_after_s, self.say)
        if self._report is not None:
            self._report.loader = loader

    def detach(self) -> None:
        """Release the loader; what was measured stays."""
        loader = self._loader
        self._past = self.stats()
        self._loader = None  # at once: other threads ask for the stats
        if loader is not None:
            loader.meter.noted = None
        watch = self._watch
        self._watch = None
        if watch is not None:
            watch.close()

    def stop(self, error: BaseException | str | None) -> None:
        """Release the loader at the end of training, or when an error stops this rank."""
        if self._report is not None and not self._report.has_ended:
            if self._is_alone:
                self._gather()
            stats = self.stats()
            rest = stats - self._gathered
            self._add_row(rest)
            self._report.end(error, rest + self._over_ranks(self._totals), verdict_of(stats), is_whole=self._is_alone)
        self.detach()
        self._report = None

    def stats(self) -> LoaderStats:
        """What was measured in this process since training began."""
        loader = self._loader
        if loader is None:
            return self._past
        stats = self._past - self._base + loader.stats()
        return replace(stats, pauses={**stats.pauses, "other_ranks": self._others_s})

    def end_epoch(self) -> None:
        """Note that training stops: an epoch is over."""
        if self._loader is not None:
            self._loader.meter.stop(perf_counter())

    def _note(self, now: float, batch: MicroBatch | None) -> None:
        """Count a batch that is about to be handed out."""
        if batch is not None and batch.num_samples and self._streams and self._loader is not None:
            snapshot = source_of(self._loader.streaming).snapshot
            numbers = self._stream_numbers[snapshot.streams_of(batch.without_padding().sample_ids)]
            self._drawn += np.bincount(numbers, minlength=_MOST_STREAMS)
        if self._is_alone and self._report is not None and self._report.is_due(now):
            self._gather()

    def _add_row(self, rest: LoaderStats) -> None:
        """Add to the log what was measured since its last row, and what this rank alone knows."""
        recent = self._since("row")
        drawn = self._added(recent)[len(_NUMBERS) :].tolist()
        if self._report is not None:
            self._report.add(rest + self._over_ranks(recent), dict(zip(self._streams, drawn, strict=False)))

    # What the user sees

    def short(self) -> str:
        """The text for a progress bar, about the last seconds, e.g. ``2% · 310 MB/s``."""
        now = perf_counter()
        if now - self._shown_at >= _SHOWN_S:
            stats = self.stats()
            self._text = (stats - self._shown).short
            self._shown = stats
            self._shown_at = now
        return self._text

    def metrics(self, step: int) -> dict[str, float]:
        """The values for loggers since this was asked last, over all ranks, after this optimizer step. Collective.

        Samples and what was fetched are added up; the others are those of the rank that waited longest.
        """
        self._gather()
        recent = self._since("log")
        self._follow_late_rank(recent, step)
        if perf_counter() - self._checked_at >= _CHECKED_S:
            checked = self._since("check")
            self._checked_at = perf_counter()
            verdict = self._verdict(checked)
            is_worth_it = verdict.is_input_bound and self._over_ranks(checked).wait_s >= _WORTH_S
            if is_worth_it and verdict.cause not in self._said:
                self._said.add(verdict.cause)
                self.say(str(verdict))
        return self._over_ranks(recent).metrics()

    def end(self) -> None:
        """Tell the user how much of the time training waited for data, and what to change. Collective."""
        ranks = self._gather()
        measured = self._over_ranks(ranks)
        verdict = self._verdict(ranks)
        is_worth_it = verdict.is_input_bound and measured.wait_s >= _WORTH_AT_END_S
        if is_worth_it or measured.elapsed_s >= _LONG_RUN_S:
            self.say(str(verdict))
        if self._report is not None:
            self._add_row(LoaderStats())
            self._report.end(None, measured, verdict)

    def _gather(self) -> Numbers:
        """What each rank has measured, float64[ranks, len(_NAMES)]; the log has it, too. Collective unless alone."""
        stats = self.stats()
        numbers = np.array([*stats.numbers().values(), *self._drawn])
        ranks = numbers[np.newaxis] if self._is_alone else gathered_numbers(numbers)
        recent = ranks - self._totals
        training = recent[:, _COMPUTED] - recent[:, _PAUSED].sum(axis=1)
        recent[:, _OTHERS] = training - training.min()
        self._others_s += max(0.0, (stats - self._gathered).training_s - float(training.min()))
        self._gathered = replace(stats, pauses={**stats.pauses, "other_ranks": self._others_s})
        self._totals = self._totals + recent
        row = self._totals - self._before["row"]
        # A trainer logs between two batches, too, and the first batch comes before any training: neither has a rate.
        has_rate = row[:, _NAMES.index("num_batches")].any() and row[:, _COMPUTED].any()
        if self._report is not None and has_rate and self._report.is_due(perf_counter()):
            self._add_row(LoaderStats())
        return self._totals

    def _since(self, what: str) -> Numbers:
        """What was measured since this was done last, which is done now."""
        before = self._before[what]
        self._before[what] = self._totals
        return self._totals - before

    def _added(self, ranks: Numbers) -> Numbers:
        """The sum over ranks, of which some may get the same samples."""
        replication = 1 if self._loader is None or self._is_alone else self._loader.detect_world().replication
        added: Numbers = ranks.sum(axis=0) / np.where(_SAMPLES, replication if len(ranks) > 1 else 1, 1)
        return added

    def _over_ranks(self, ranks: Numbers) -> LoaderStats:
        """What all ranks measured: counts are added up, and the others are of the rank that waited longest."""
        return self._stats_of(np.where(_ADDED, self._added(ranks), ranks[_slowest(ranks)]))

    def _stats_of(self, numbers: Numbers) -> LoaderStats:
        here = self._gathered
        return replace(
            LoaderStats.of_numbers(dict(zip(_NAMES, numbers.tolist(), strict=True))),
            settings=here.settings,
            epoch_positions=here.epoch_positions,
            epoch_fraction=here.epoch_fraction,
        )

    def _follow_late_rank(self, recent: Numbers, step: int) -> None:
        """Note since when all other ranks have waited for the same one, which waits for its data."""
        shares = _wait_shares(recent)
        late = _slowest(recent) if np.ptp(shares) >= INPUT_BOUND else None
        if late != self._late:
            self._late = late
            self._late_since = self._last_step
        self._last_step = step

    def _verdict(self, ranks: Numbers) -> Verdict:
        """The verdict about the rank that waited longest, which it names if there are several."""
        rank = _slowest(ranks)
        verdict = verdict_of(self._stats_of(ranks[rank]))
        if len(ranks) == 1 or not verdict.is_input_bound:
            return verdict
        since = self._late_since if self._late == rank else 0
        others = f" The other ranks have waited for it since about step {since:,}." if since else ""
        return replace(verdict, finding=f"Rank {rank}: {verdict.finding}", remedy=f"{verdict.remedy}{others}".strip())


def _wait_shares(ranks: Numbers) -> Numbers:
    return ranks[:, _WAITED] / np.maximum(1e-9, ranks[:, _WAITED] + ranks[:, _COMPUTED])


def _slowest(ranks: Numbers) -> int:
    return int(_wait_shares(ranks).argmax())


def _largest_streams(loader: StreamingDataLoader) -> tuple[list[str], NDArray[np.int64]]:
    """The names of the largest streams, the last of which may be "other streams"; and the number of each stream's."""
    snapshot = source_of(loader.streaming).snapshot
    names = snapshot.stream_names
    sizes = np.diff(snapshot.shard_offsets[snapshot.stream_offsets])
    largest = np.argsort(-sizes, kind="stable")
    numbers = np.minimum(np.argsort(largest), _MOST_STREAMS - 1)
    shown = [names[stream] for stream in largest[:_MOST_STREAMS].tolist()] if len(names) > 1 else []
    return [*shown[:-1], "other streams"] if len(names) > _MOST_STREAMS else shown, numbers
