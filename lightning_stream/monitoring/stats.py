"""`LoaderStats`: what a loader has measured, as users see it: for loggers, in a progress bar, and as a table."""

from __future__ import annotations

from lightning_stream.monitoring.measured import MB, PARTS, PAUSE_LABELS, Amounts, Measured, ratio
from lightning_stream.monitoring.verdict import verdict_of

_LEAST_SHOWN_MB_S = 0.05


class LoaderStats(Measured):
    """What one process has measured at its loader: since it was made, or between two moments.

    `StreamingDataLoader.stats` returns a value of its own, which nothing that is measured later changes. Its `str` is a
    table of where the time went, with a verdict. Its attributes are those of `Measured`.

    Example::

        before = loader.stats()
        train(loader)
        print(loader.stats() - before)
    """

    @property
    def short(self) -> str:
        """The short text of progress bars, e.g. ``2% · 310 MB/s``: the time spent waiting, and downloads if any."""
        rate = self.download_mb_s
        shown = f" · {rate:.{0 if rate >= 10 else 1}f} MB/s" if rate >= _LEAST_SHOWN_MB_S else ""
        return f"{100 * self.wait_share:.0f}%{shown}"

    def metrics(self) -> Amounts:
        """The values for a trainer's loggers, by their names."""
        metrics = {
            "data/samples_per_s": self.samples_per_s,
            "data/wait_ms": 1000 * ratio(self.wait_s, self.num_batches),
            "data/wait_share": self.wait_share,
            "data/ready_share": self.ready_share,
            "data/download_mb_s": self.download_mb_s,
            "data/cache_hit": self.cache_hit,
            "data/epoch_fraction": self.epoch_fraction,
            "data/retries": self.counters["retries"],
            "data/bad_samples": self.counters["bad_samples"],
        }
        if self.num_tokens:
            metrics["data/tokens_per_s"] = self.num_tokens / self.elapsed_s
        if self.headroom:
            metrics["data/headroom"] = self.headroom
        return metrics

    def __str__(self) -> str:
        if not self.num_batches:
            return "No batch was handed out yet."
        head = (
            f"{self.num_batches:,} batches, {self.num_samples:,} samples in {self.elapsed_s:.1f} s "
            f"({self.samples_per_s:,.0f} samples/s); {100 * self.ready_share:.0f}% of the batches were ready."
        )
        if self.epoch_fraction < 1:
            head += (
                f"\n{100 * self.epoch_fraction:.0f}% of the epoch is done; the rest takes {self.epoch_left_s:,.0f} s."
            )
        rows = [("training", self.training_s)]
        rows += [(label, self.pauses[name]) for name, label in PAUSE_LABELS.items() if self.pauses[name] > 0]
        rows += [(f"waiting: {name}", self.waits[name] + self.first_waits[name]) for name in PARTS]
        table = [f"  {name:<22}{seconds:>9.2f} s{100 * seconds / self.elapsed_s:>7.1f}%" for name, seconds in rows]
        validation = f"Validation took {self.validation_s:.1f} s besides. " if self.validation_s else ""
        foot = (
            f"{validation}{self.counters['fetched_bytes'] / MB:,.1f} MB fetched ({self.download_mb_s:.0f} MB/s), "
            f"{self.counters['shards_fetched']:,.0f} shards; {self.counters['shards_here']:,.0f} were in the cache; "
            f"{self.counters['retries']:,.0f} retries, {self.counters['bad_samples']:,.0f} bad samples."
        )
        return "\n".join([head, *table, foot, str(verdict_of(self))])
