"""`DataMonitor`: what a trainer logs, shows and tells the user about the time that training waits for its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.meter import Mark
from lightning_stream.loading.stats import LoaderStats
from lightning_stream.loading.tuning import Tuner
from lightning_stream.loading.verdict import INPUT_BOUND, Verdict, verdict_of
from lightning_stream.loading.watch import Watch
from lightning_stream.trainers.agreement import gathered
from lightning_stream.trainers.report import RunReport
from lightning_stream.trainers.report_file import Row

_SHOWN_S = 5.0  # how much time the text in the progress bar is about
_CHECKED_S = 60.0  # the pause between two messages, while training, that it is input-bound
_WORTH_S = 5.0  # of waiting in that time
_WORTH_AT_END_S = 1.0
_LONG_RUN_S = 60.0  # from here on, the end of training has a verdict also where all is well
_ADDED = ("data/samples_per_s", "data/tokens_per_s", "data/download_mb_s", "data/retries", "data/bad_samples")
_LEAST = ("data/ready_share", "data/cache_hit", "data/headroom", "data/epoch_fraction")


@dataclass(frozen=True)
class _Report:
    """What one rank reports to all."""

    metrics: dict[str, float]
    training_s: float
    wait_s: float
    wait_share: float
    verdict: Verdict | None  # None before one is due
    share: Row  # for the report of the run

    @classmethod
    def of(cls, logged: LoaderStats, checked: LoaderStats | None, share: Row) -> _Report:
        verdict, checked = (None, LoaderStats()) if checked is None else (verdict_of(checked), checked)
        return cls(logged.metrics(), logged.training_s, checked.wait_s, checked.wait_share, verdict, share)


class DataMonitor:
    """Follows the loader of one training run, in each of its processes.

    Args:
        say: Shows the user a sentence, which the report of the run keeps.
        monitor: Whether to do so; ``"tune"`` also changes how shards are fetched where that lets training wait less.
        watch_after_s: See `StreamingDataLoader.watch`; None: no watch.

    Raises:
        ValueError: `monitor` is something else, or the time is not positive.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        monitor: bool | Literal["tune"] = True,
        watch_after_s: float | None = 120.0,
    ) -> None:
        if monitor not in (True, False, "tune"):
            raise ValueError(f'monitor= is True, False or "tune"; found {monitor!r}')
        if watch_after_s is not None and watch_after_s <= 0:
            raise ValueError(f"watch_after_s= is positive, or None for no watch; found {watch_after_s}")
        self._show, self.is_on, self._watch_after_s = say, bool(monitor), watch_after_s
        self._tuner = Tuner() if monitor == "tune" else None
        self._report: RunReport | None = None
        self._loader: StreamingDataLoader | None = None
        self._watch: Watch | None = None
        self._past = self._base = LoaderStats()  # of loaders before this one; of this one, when it was attached
        self._logged = self._checked = self._shown = LoaderStats()  # when each was done last
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
        """Report the run from now on; on all ranks."""
        self._report = report
        report.begin(self.stats)

    def attach(self, loader: StreamingDataLoader) -> None:
        """Follow a loader from now on, and watch it; a trainer may make another one for each epoch."""
        if loader is not self._loader:
            self.detach()
            self._loader, self._base = loader, loader.stats()
            if self.is_on and self._watch_after_s is not None:
                self._watch = loader.watch(self._watch_after_s, self.say)
            if self._tuner is not None:
                loader.tune(**self._tuner.settings)
            if self._report is not None:
                self._report.follow(loader)

    def detach(self) -> None:
        """Release the loader; what was measured stays."""
        self._past, self._loader = self.stats(), None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        if self._report is not None:
            self._report.release()

    def stop(self, error: BaseException | str | None) -> None:
        """Release the loader at the end of training, or when an error stops it."""
        if self._report is not None:
            self._report.end(error, [self._report.share()])
        self.detach()
        self._report = None

    def stats(self) -> LoaderStats:
        """What was measured in this process since training began."""
        if self._loader is None:
            return self._past
        found = self._past + (self._loader.stats() - self._base)
        return replace(found, pauses={**found.pauses, "other_ranks": self._others_s})

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

    def short(self) -> str:
        """The text for a progress bar, about the last seconds, e.g. ``2% · 310 MB/s``."""
        now = perf_counter()
        if now - self._shown_at >= _SHOWN_S:
            stats = self.stats()
            self._text, self._shown, self._shown_at = (stats - self._shown).short, stats, now
        return self._text

    def metrics(self, step: int) -> dict[str, float]:
        """The values for loggers since this was asked last, over all ranks, after this optimizer step. Collective.

        Rates and counts are added up; the others are those of the rank that has the worst value.
        """
        stats, now = self.stats(), perf_counter()
        logged = stats - self._logged
        checked = stats - self._checked if now - self._checked_at >= _CHECKED_S else None
        found = gathered(_Report.of(logged, checked, self._share()))
        self._follow_late_rank(found)
        self._last_step = step
        self._others_s += max(0.0, logged.training_s - min(one.training_s for one in found))
        self._logged = stats = replace(stats, pauses={**stats.pauses, "other_ranks": self._others_s})
        if self._report is not None:
            self._report.add([one.share for one in found])
        if all(one.verdict is not None for one in found):
            self._checked, self._checked_at = stats, now
            self._tell(found, _WORTH_S)
            self._tune(max(found, key=_wait_share), step)
        same = 1 if self._loader is None else self._loader.detect_world().replication
        return {name: _over_ranks(name, found, same) for name in found[0].metrics}

    def _tune(self, slowest: _Report, step: int) -> None:
        """Change the same setting on all ranks, as the rank needs it that waits longest."""
        if self._tuner is None or self._loader is None:
            return
        live = None if slowest.verdict is None or slowest.wait_s < _WORTH_S else slowest.verdict.live
        sentence = self._tuner.decide(live, slowest.wait_share, step)
        self._loader.tune(**self._tuner.settings)
        if sentence is not None:
            self.say(sentence)

    def _follow_late_rank(self, found: list[_Report]) -> None:
        """Note since when all other ranks have waited for the same one, which waits for its data."""
        shares = [one.metrics["data/wait_share"] for one in found]
        rank = shares.index(max(shares))
        if max(shares) - min(shares) < INPUT_BOUND:
            self._late = None
        elif self._late is None or self._late[0] != rank:
            self._late = rank, self._last_step

    def end(self) -> None:
        """Tell the user how much of the time training waited for data, and what to change. Collective."""
        stats = self.stats()
        found = gathered(_Report.of(stats, stats, self._share()))
        if not self._tell(found, _WORTH_AT_END_S, again=True) and stats.elapsed_s >= _LONG_RUN_S:
            self.say(str(max(found, key=_wait_share).verdict))
        if self._report is not None:
            self._report.end(None, [one.share for one in found])

    def _share(self) -> Row:
        return {} if self._report is None else self._report.share()

    def _tell(self, found: list[_Report], worth_s: float, again: bool = False) -> bool:
        """Tell the verdict of the rank that waits longest, if it is worth it; the same cause once, except `again`."""
        slowest = max(found, key=_wait_share)
        verdict, rank = slowest.verdict, found.index(slowest)
        if verdict is None or not verdict.is_input_bound or slowest.wait_s < worth_s:
            return False
        if again or verdict.cause not in self._said:
            self._said.add(verdict.cause)
            late = self._late is not None and self._late[0] == rank and self._late[1]
            others = f" The other ranks have waited for it since about step {late:,}." if late else ""
            self.say(f"Rank {rank}: {verdict}{others}" if len(found) > 1 else str(verdict))
        return True


def _over_ranks(name: str, found: list[_Report], replication: int) -> float:
    """A metric over all ranks, of which so many get the same samples."""
    values = [one.metrics[name] for one in found if name in one.metrics]
    if name in _ADDED:
        return sum(values) / (replication if name.endswith("_per_s") else 1)
    return min(values) if name in _LEAST else max(values)


def _wait_share(report: _Report) -> float:
    return report.wait_share
