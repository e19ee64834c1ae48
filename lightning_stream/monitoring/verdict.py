"""`verdict_of`: why training waits for its data, and which setting to change to which value.

A pure function of what a loader has measured. It names a cause, not a stage: waiting for a shard may be the fault of
the store, of the cache's limit or of the look-ahead. The causes are a table, of which the first row counts that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_stream.monitoring.stats import INPUT_BOUND, LoaderStats, percent

_PAUSED = 0.05  # the part of the time from which on pauses of training matter
_VALIDATING = 0.3  # the part of the time from which on validations matter: they are wanted
_ALARMING = 0.1  # the part of the time that matters more than any wait at the start
_RATHER = 0.5  # the part from which on one of two explanations holds
_MANY = 0.1  # the part of requests, or of the time of fetching, from which on failures matter
_AGAIN = 0.2  # the part of the downloads from which on repeated ones matter
_BUSY = 0.5  # the part of the time that the connections are in use, from which on the store is the limit
_UNDISTURBED = 0.75  # a thread that computes with less of a core than this is disturbed
_OTHERS = 0.3  # of a core: what a busy process uses at least; of its processor time: what its other threads use
_SPARE = 1.1  # proposed workers make batches a little faster than they are needed
_IDLE = 0.99  # the part of the time spent waiting from which on the loop does not train at all
_WORTH = 1.1  # times as fast as now: a gain that is worth a sentence
_LEAST_S = 1e-9  # to divide by
_PAUSES = {
    "checkpoint": ("Writing checkpoints", "Save less often, or asynchronously"),
    "garbage_collection": ("Python's garbage collection", "Call gc.freeze() once the model and the data are set up"),
    "other_ranks": ("Waiting for ranks that got their batches later", "Look at the verdict of these ranks"),
    "validation": ("Validation", "Validate less often, or on fewer batches"),
}
_Value = int | str | bool | None


@dataclass(frozen=True)
class Verdict:
    """Why training waited for data.

    Attributes:
        cause: One of ``"none"`` (not input-bound), ``"cold_start"``, ``"epoch_start"``, ``"throttled"``,
            ``"store_errors"``, ``"corrupt_downloads"``, ``"small_cache"``, ``"look_ahead"``, ``"store_latency"``,
            ``"bandwidth"``, ``"decompression"``, ``"other_process"``, ``"disk"``, ``"decoding"``, ``"transform"``,
            ``"collate"``, ``"planning"``, ``"transport"``, ``"gil"``, ``"cores"``; or, where training is not
            input-bound but pauses, ``"checkpoint"``, ``"garbage_collection"``, ``"other_ranks"``, ``"validation"``.
        finding: What was measured, as a sentence.
        remedy: What to change, as a sentence; empty where nothing needs to change.
        setting, value: The setting that the remedy names, and the value to try; None where it names none.
        wait_share: The part of the time that training would wait with this value; None if it cannot be predicted.
    """

    cause: str
    finding: str
    remedy: str = ""
    setting: str | None = None
    value: _Value = None
    wait_share: float | None = None

    @property
    def is_input_bound(self) -> bool:
        """Whether training waits for data again and again, and not only at the start."""
        return self.cause not in ("none", "cold_start", *_PAUSES)

    def __str__(self) -> str:
        return f"{self.finding} {self.remedy}".rstrip()


def verdict_of(stats: LoaderStats) -> Verdict:
    """Name the main cause of the waiting, and its remedy.

    Example: ``print(verdict_of(loader.stats()))`` prints "Input-bound 37%: the store takes 810 ms to the first byte of
    an answer. Raise num_workers from 2 to 4, since each fetches 4 shards at a time, or write larger shards."
    """
    facts = _Facts(stats)
    row = next(row for row in (*_AT_THE_START, *_BY_STAGE[facts.stage]) if row.test(facts))
    value = row.value(facts)
    finding = row.finding.format(f=facts, value=value)
    verdict = Verdict(row.cause, finding, row.remedy.format(f=facts, value=value), row.setting, value)
    if verdict.is_input_bound:
        verdict = _with_gain(verdict, stats)
    shares = {name: seconds / max(_LEAST_S, stats.elapsed_s) for name, seconds in stats.pauses.items()}
    shares["validation"] = stats.validation_s / max(_LEAST_S, stats.elapsed_s + stats.validation_s)
    long = [name for name, share in shares.items() if share >= (_VALIDATING if name == "validation" else _PAUSED)]
    if not long:
        return verdict
    pause = max(long, key=shares.__getitem__)
    what, remedy = _PAUSES[pause]
    remedy = f"{verdict.remedy} {what} took {percent(shares[pause])} of the time. {remedy}.".lstrip()
    return replace(verdict, cause=verdict.cause if verdict.is_input_bound else pause, remedy=remedy)


def _with_gain(verdict: Verdict, stats: LoaderStats) -> Verdict:
    """The verdict with how long training waited, and what its remedy would save."""
    first = stats.first_wait_share
    of_which = f", {percent(first)} for first batches" if first >= INPUT_BOUND else ""
    finding = f"Input-bound {percent(stats.wait_share)}{of_which}: {verdict.finding}"
    after = _predicted(verdict, stats)
    remedy = verdict.remedy
    if after is not None:
        steady_s = stats.wait_s - stats.first_wait_s + stats.compute_s
        gain = (1 - after) / max(_LEAST_S, stats.compute_s / steady_s)
        remedy += f" Training would then be about {gain:.1f} times as fast." if gain >= _WORTH else ""
    return replace(verdict, finding=finding, remedy=remedy, wait_share=after)


def _predicted(verdict: Verdict, stats: LoaderStats) -> float | None:
    """The part of the time that training would wait with the proposed value; None if that cannot be known."""
    num_workers, computing_s = stats.settings.num_workers, stats.computing_s
    if verdict.cause == "gil":
        num_workers, computing_s = 1, stats.cpu_s
    elif verdict.setting == "num_workers" and verdict.cause != "cores" and isinstance(verdict.value, int):
        num_workers = verdict.value
    elif verdict.setting != "predownload":
        return None
    wait_s = max(0.0, stats.making_s(num_workers, computing_s) - (stats.compute_s if num_workers else 0.0))
    return wait_s / max(_LEAST_S, wait_s + stats.compute_s)


class _Facts:
    """What the tests and the sentences of the table need, by their names there."""

    def __init__(self, stats: LoaderStats) -> None:
        self.stats = stats
        self.settings = stats.settings
        self.counted = stats.counters
        self.waited = percent(stats.wait_share)
        self.steady_s = stats.wait_s - stats.first_wait_s
        self.steady = percent(stats.wait_share - stats.first_wait_share)
        self.start_s = stats.first_wait_s / max(1, stats.num_iterations)
        self.late = max(stats.first_waits, key=stats.first_waits.__getitem__)
        self.making_s = sum(stats.work.values())
        self.computing_s = max(stats.computing_s, _LEAST_S)
        self.compute_s = max(stats.compute_s, _LEAST_S)
        self.stage = max(stats.waits, key=stats.waits.__getitem__)
        if self.stage == "starting" and not self.lacks_cores:  # workers were still making other batches
            self.stage = max(stats.work, key=stats.work.__getitem__)
        self.unpacking_s = self.counted["verify_s"] + self.counted["decompress_s"] + self.counted["convert_s"]
        self.latency_ms = 1000 * self.counted["first_byte_s"] / max(1, self.counted["requests"])
        self.queued = stats.queued_s / self.computing_s
        # A worker only knows its own downloads: others of the same shards are as likely.
        fetched = max(1, self.counted["shards_fetched"])
        self.again = min(1.0, self.settings.num_readers * self.counted["shards_fetched_again"] / fetched)
        # Samples in which a worker needs twice as many new shards as it can fetch at once.
        size = self.settings.batch_size
        self.needed_ahead = size * math.ceil(2 * self.settings.fetch_threads * stats.num_samples / fetched / size)

    @property
    def faster(self) -> str:
        headroom = self.stats.headroom
        return f", which could keep up with {headroom:.1f} times this speed" if headroom > 1 else ""

    @property
    def of_each(self) -> str:
        return f" of each of {self.stats.num_iterations} iterations" if self.stats.num_iterations > 1 else ""

    @property
    def is_at_the_start(self) -> bool:
        """Whether only the first batch of each iteration was late."""
        steady = self.steady_s / self.stats.elapsed_s
        return steady < INPUT_BOUND or (steady < _ALARMING and self.steady_s < _RATHER * self.stats.wait_s)

    @property
    def is_failing(self) -> bool:
        """Whether many requests were sent again."""
        failures = self.counted["retries"] / max(1, self.counted["requests"])
        pauses = self.counted["retry_s"] / max(self.stats.fetching_s, _LEAST_S)
        return self.counted["retries"] > 0 and max(failures, pauses) >= _MANY

    @property
    def leaves_fetching_to_others(self) -> bool:
        fetches_few = self.counted["shards_fetched"] < _AGAIN * self.counted["shards_here"]
        return fetches_few and self.stats.fetching_s < _AGAIN * self.stats.elapsed_s

    @property
    def asks_too_late(self) -> bool:
        """Whether connections are idle, and the look-ahead has fewer shards than can be fetched at once."""
        fetching_s = self.stats.elapsed_s - self.stats.first_waits["starting"]
        connections = self.settings.num_readers * self.settings.fetch_threads
        is_idle = self.stats.fetching_s < _BUSY * connections * fetching_s
        return is_idle and self.settings.predownload < self.needed_ahead

    @property
    def needed_rate(self) -> str:
        rate = self.counted["fetched_bytes"] / 1e6 / self.compute_s
        return f"{rate:,.1f} MB/s" if self.stats.wait_share < _IDLE else "far more"

    @property
    def limit(self) -> str:
        return f"{math.ceil(self.settings.dataset_bytes / (1 << 20))}mb"

    @property
    def more_readers(self) -> int | None:
        """Workers whose connections suffice; None if there are no cores left for more."""
        makers = max(1, self.settings.num_workers)
        more = makers + max(1, math.ceil(makers * (self.stats.elapsed_s / self.compute_s - 1)))
        more = min(more, self.settings.num_cores)
        return more if more > self.settings.num_workers else None

    @property
    def more_workers(self) -> int | None:
        """Workers that make batches as fast as training needs them; None if there are no cores left for more."""
        num_workers, num_cores = self.settings.num_workers, self.settings.num_cores
        needed = math.ceil(_SPARE * self.making_s / self.compute_s)
        return min(num_cores, max(num_workers + 1, needed)) if num_workers < num_cores else None

    @property
    def uses_threads(self) -> bool:
        return self.settings.workers == "threads" and self.settings.num_workers > 0

    @property
    def is_disturbed(self) -> bool:
        return self.stats.cpu_s < _UNDISTURBED * self.computing_s

    @property
    def lacks_cores(self) -> bool:
        """Whether what makes batches waits for processor cores, and not for what its functions ask."""
        queues = self.stats.queued_s >= _RATHER * (self.computing_s - self.stats.cpu_s)
        return self.is_disturbed and (self.settings.num_workers > self.settings.num_cores or queues)

    @property
    def is_held_up(self) -> bool:
        """Whether what makes batches waits for other Python threads."""
        others_s = self.stats.all_cpu_s - self.stats.cpu_s
        is_busy = self.stats.all_cpu_s >= _OTHERS * self.making_s and others_s >= _OTHERS * self.stats.all_cpu_s
        return self.is_disturbed and (self.uses_threads or is_busy)

    def ms(self, seconds: float) -> str:
        return f"{1000 * seconds / max(1, self.stats.num_batches):,.1f} ms"

    @property
    def sending(self) -> str:
        return self.ms(self.stats.waits["sending"])

    @property
    def making(self) -> str:
        return self.ms(self.stats.work[self.stage])

    @property
    def training(self) -> str:
        return self.ms(self.stats.compute_s)


class _Row(NamedTuple):
    """A cause of waiting: whether it fits, what to say, and the setting to change to which value."""

    cause: str
    test: Callable[[_Facts], bool]
    finding: str
    remedy: str = ""
    setting: str | None = None
    value: Callable[[_Facts], _Value] = lambda _: None


def _more(
    cause: str,
    test: Callable[[_Facts], bool],
    finding: str,
    otherwise: str,
    more: Callable[[_Facts], int | None] = lambda f: f.more_workers,
    since: str = "",
) -> tuple[_Row, _Row]:
    """The rows of a cause against which more workers help, where there are cores for them, and another change."""
    remedy = f"Raise num_workers from {{f.settings.num_workers}} to {{value}}{since}, or {otherwise}."
    no_cores = f"All {{f.settings.num_cores}} cores have a worker: {otherwise}."
    return (
        _Row(cause, lambda f: test(f) and more(f) is not None, finding, remedy, "num_workers", more),
        _Row(cause, test, finding, no_cores),
    )


def _slow_store(cause: str, test: Callable[[_Facts], bool], finding: str, otherwise: str) -> tuple[_Row, ...]:
    """The rows of a cause against which more connections help."""
    each = "fetches {f.settings.fetch_threads} shards at a time"
    processes = f"Pass workers='processes', of which each {each}, or {otherwise}."
    return (
        _Row(cause, lambda f: test(f) and f.uses_threads, finding, processes, "workers", lambda _: "processes"),
        *_more(cause, test, finding, otherwise, lambda f: f.more_readers, f", since each {each}"),
    )


_AT_THE_START = (
    _Row(
        "none",
        lambda f: f.stats.wait_share < INPUT_BOUND,
        "Not input-bound: training waited {f.waited} of the time for data{f.faster}.",
    ),
    _Row(
        "epoch_start",
        lambda f: (
            f.is_at_the_start
            and f.stats.num_iterations > 1
            and f.late == "starting"
            and f.settings.num_workers > 0
            and not f.settings.persistent_workers
        ),
        "starting and ending the workers takes {f.start_s:.1f} s an epoch.",
        "Pass persistent_workers=True, which keeps the workers between epochs.",
        "persistent_workers",
        lambda _: True,
    ),
    _Row(
        "cold_start",
        lambda f: f.is_at_the_start,
        "Training waited {f.start_s:.1f} s for the first batch{f.of_each}, mostly {f.late}: with {f.steady} for all "
        "others, {f.waited} of the time.",
    ),
)
_FETCHING = (
    _Row(
        "corrupt_downloads",
        lambda f: f.is_failing and f.counted["corrupt"] >= _RATHER * f.counted["retries"],
        "{f.counted[corrupt]:,.0f} downloads did not have the bytes that the index promises.",
        "Run `lightning-stream check` on the dataset, and check the network.",
    ),
    _Row(
        "store_errors",
        lambda f: f.is_failing and f.counted["throttled"] < _RATHER * f.counted["retries"],
        "{f.counted[retries]:,.0f} of {f.counted[requests]:,.0f} requests to the store failed and were sent again.",
        "Check the network and the store: its log messages name each failure.",
    ),
    _Row(
        "throttled",
        lambda f: f.is_failing,
        "the store refused {f.counted[retries]:,.0f} of {f.counted[requests]:,.0f} requests because there were too "
        "many (status 429 or 503).",
        "Write larger shards (size_limit), so that there are fewer requests.",
    ),
    _Row(
        "small_cache",
        lambda f: f.again >= _AGAIN and f.settings.cache_limit is not None,
        "the cache is too small: {f.counted[evictions]:,.0f} shards were evicted, and about {f.again:.0%} of the "
        "downloads were of shards that had been here.",
        "Raise cache_limit to {value!r}, which holds all shards, if the disk has the space. Or lower window.",
        "cache_limit",
        lambda f: f.limit,
    ),
    _Row(
        "other_process",
        lambda f: f.leaves_fetching_to_others,
        "it waits for shards that another process of this machine fetches.",
        "Look at the verdict of the other ranks, of which one fetches them.",
    ),
    *_more(
        "decompression",
        lambda f: f.unpacking_s >= _RATHER * f.stats.fetching_s and f.counted["convert_s"] > f.unpacking_s / 2,
        "shards are converted from the dataset's own format more slowly than they are needed.",
        "convert the dataset to MDS",
    ),
    *_more(
        "decompression",
        lambda f: f.unpacking_s >= _RATHER * f.stats.fetching_s,
        "shards are decompressed and verified more slowly than they are needed.",
        "write the dataset without compression",
    ),
    _Row(
        "look_ahead",
        lambda f: f.asks_too_late,
        "shards are requested too late: the connections are idle most of the time.",
        "Raise predownload from {f.settings.predownload:,} to {value:,} samples.",
        "predownload",
        lambda f: f.needed_ahead,
    ),
    *_slow_store(
        "store_latency",
        lambda f: f.counted["first_byte_s"] >= _RATHER * f.counted["download_s"],
        "the store takes {f.latency_ms:,.0f} ms to the first byte of an answer.",
        "write larger shards (size_limit)",
    ),
    *_slow_store(
        "bandwidth",
        lambda _: True,
        "the store delivers {f.stats.download_mb_s:,.1f} MB/s, and training could use {f.needed_rate}.",
        "write smaller samples (compression='zstd') or train nearer to the data, where the network is the limit",
    ),
)
_GIL = (
    _Row(
        "gil",
        lambda f: f.is_held_up and f.uses_threads,
        "the threads that make batches wait for Python's lock (the GIL), or for a processor core.",
        "Pass workers='processes'.",
        "workers",
        lambda _: "processes",
    ),
    _Row(
        "gil",
        lambda f: f.is_held_up and f.settings.num_workers == 0,
        "other Python threads of the process that makes batches hold Python's lock (the GIL).",
        "Pass num_workers=1, which makes the batches in a process of its own.",
        "num_workers",
        lambda _: 1,
    ),
    _Row(
        "gil",
        lambda f: f.is_held_up,
        "other Python threads of the process that makes batches hold Python's lock (the GIL).",
        "Let the transform start no threads of its own.",
    ),
)
_CORES = (
    _Row(
        "cores",
        lambda f: f.lacks_cores and f.settings.num_workers > f.settings.num_cores,
        "{f.settings.num_workers} workers share {f.settings.num_cores} processor cores.",
        "Lower num_workers to {value}.",
        "num_workers",
        lambda f: f.settings.num_cores,
    ),
    _Row(
        "cores",
        lambda f: f.lacks_cores,
        "the processor cores are busy: what makes batches waited for one {f.queued:.0%} of its time.",
        "Train on more cores, or run fewer programs beside the training.",
    ),
)
_SENDING = (
    _Row(
        "transport",
        lambda f: f.making_s < f.stats.waits["sending"] and f.settings.num_workers > 0,
        "moving a batch from its worker to the training process takes {f.sending}.",
        "Pass num_workers=0: making the batches takes less time than moving them. Or send fewer bytes: keep images as "
        "uint8 and convert them on the device; drop columns that are not used.",
        "num_workers",
        lambda _: 0,
    ),
    _Row(
        "transport",
        lambda _: True,
        "moving a batch from its worker to the training process takes {f.sending}.",
        "Send fewer bytes: keep images as uint8 and convert them on the device; drop columns that are not used.",
    ),
)
_DISK = _Row(
    "disk",
    lambda f: f.stage == "reading" and f.stats.cpu_s < _RATHER * f.computing_s,
    "reading takes {f.making} a batch, and hardly computes meanwhile: it waits, mostly for the disk.",
    "Put the cache (local=) on a faster disk, unless a decoder or __getitem__ of your own waits.",
)
_TOO_SLOW = {  # by stage: the cause, what takes long, and what else than more workers helps
    "planning": ("planning", "planning", "use larger batches"),
    "reading": ("decoding", "reading and decoding", "store what is cheaper to decode"),
    "transforming": ("transform", "the transform", "make the transform cheaper"),
    "collating": ("collate", "collating", "make collate_fn cheaper"),
}
_TAKES = " takes {f.making} a batch, and training {f.training}."
_BY_STAGE: dict[str, tuple[_Row, ...]] = {
    "starting": _CORES,
    "fetching": _FETCHING,
    "sending": (*_CORES, *_SENDING),
    **{
        stage: (*_GIL, *_CORES, _DISK, *_more(cause, lambda _: True, what + _TAKES, otherwise))
        for stage, (cause, what, otherwise) in _TOO_SLOW.items()
    },
}
