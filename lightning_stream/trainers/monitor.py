"""`DataMonitor`: what a trainer logs, shows and tells the user about the time that training waits for its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.stats import LoaderStats
from lightning_stream.loading.verdict import Verdict, verdict_of
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
_LEAST = ("data/ready_share", "data/cache_hit")


@dataclass(frozen=True)
class _Report:
    """What one rank reports to all."""

    metrics: dict[str, float]
    wait_s: float
    wait_share: float
    verdict: Verdict
    is_due: bool
    share: Row  # for the report of the run


class DataMonitor:
    """Follows the loader of one training run, in each of its processes.

    Args:
        say: Shows the user a sentence, which the report of the run keeps.

    Attributes:
        validation_s: Seconds between `pause` and `resume`, which are not part of training.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._show, self.validation_s = say, 0.0
        self._report: RunReport | None = None
        self._loader: StreamingDataLoader | None = None
        self._watch: Watch | None = None
        self._past = self._base = LoaderStats()  # of loaders before this one; of this one, when it was attached
        self._logged = self._checked = self._shown = LoaderStats()  # when each was done last
        self._checked_at = self._shown_at = self._paused_at = perf_counter()
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

    def attach(self, loader: StreamingDataLoader, watches: bool = True) -> None:
        """Follow a loader from now on, and watch it; a trainer may make another one for each epoch."""
        if loader is not self._loader:
            self.detach()
            self._loader, self._base = loader, loader.stats()
            self._watch = loader.watch(say=self.say) if watches else None
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
        return self._past + (self._loader.stats() - self._base)

    def pause(self) -> None:
        """Note that training stops for a validation, or at the end of an epoch."""
        self._paused_at = perf_counter()
        if self._loader is not None:
            self._loader.meter.pause(self._paused_at)

    def resume(self) -> None:
        """Note that training continues after a validation."""
        now = perf_counter()
        self.validation_s += now - self._paused_at
        if self._loader is not None:
            self._loader.meter.resume(now)

    def short(self) -> str:
        """The text for a progress bar, about the last seconds, e.g. ``2% · 310 MB/s``."""
        now = perf_counter()
        if now - self._shown_at >= _SHOWN_S:
            stats = self.stats()
            self._text, self._shown, self._shown_at = (stats - self._shown).short, stats, now
        return self._text

    def metrics(self) -> dict[str, float]:
        """The values for loggers since this was asked last, over all ranks. Collective.

        Rates and counts are added up; the others are those of the rank that has the worst value.
        """
        stats, now = self.stats(), perf_counter()
        recent = stats - self._checked
        due = now - self._checked_at >= _CHECKED_S
        found = gathered(
            _Report(
                (stats - self._logged).metrics(),
                recent.wait_s,
                recent.wait_share,
                verdict_of(recent),
                due,
                self._share(),
            )
        )
        self._logged = stats
        if self._report is not None:
            self._report.add([one.share for one in found])
        if found[0].is_due:
            self._checked, self._checked_at = stats, now
            self._tell(found, _WORTH_S)
        return {name: self._over_ranks(name, found) for name in found[0].metrics}

    def _over_ranks(self, name: str, found: list[_Report]) -> float:
        values = [one.metrics[name] for one in found if name in one.metrics]
        if name in _ADDED:
            same = 1 if self._loader is None else self._loader.detect_world().replication
            return sum(values) / (same if name.endswith("_per_s") else 1)
        return min(values) if name in _LEAST else max(values)

    def end(self) -> None:
        """Tell the user how much of the time training waited for data, and what to change. Collective."""
        stats = self.stats()
        found = gathered(_Report({}, stats.wait_s, stats.wait_share, verdict_of(stats), True, self._share()))
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
        if not verdict.is_input_bound or slowest.wait_s < worth_s:
            return False
        if again or verdict.cause not in self._said:
            self._said.add(verdict.cause)
            self.say(f"Rank {rank}: {verdict}" if len(found) > 1 else str(verdict))
        return True


def _wait_share(report: _Report) -> float:
    return report.wait_share
