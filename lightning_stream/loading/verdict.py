"""`verdict_of`: why training waits for its data, and which setting to change to which value.

A pure function of what a loader has measured. It names a cause, not a stage: waiting for a shard may be the fault of
the store, of the cache's limit or of the look-ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_stream.loading.stats import INPUT_BOUND, LoaderStats, percent

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
_MB = 1e6
_PAUSES = {
    "checkpoint": ("Writing checkpoints", "Save less often, or asynchronously"),
    "garbage_collection": ("Python's garbage collection", "Call gc.freeze() once the model and the data are set up"),
    "other_ranks": ("Waiting for ranks that got their batches later", "Look at the verdict of these ranks"),
    "validation": ("Validation", "Validate less often, or on fewer batches"),
}


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
    value: int | str | bool | None = None
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
    an answer. Raise num_workers from 2 to 4, since each worker fetches 4 shards at a time, or write larger shards."
    """
    found = _of_waiting(stats)
    if (pause := _pause(stats)) is None:
        return found
    cause, remedy = pause
    return replace(
        found, cause=found.cause if found.is_input_bound else cause, remedy=f"{found.remedy} {remedy}".lstrip()
    )


def _pause(stats: LoaderStats) -> tuple[str, str] | None:
    """What training pauses for most, and a sentence about it; None if that takes little time."""
    shares = {name: seconds / max(1e-9, stats.elapsed_s) for name, seconds in stats.pauses.items()}
    shares["validation"] = stats.validation_s / max(1e-9, stats.elapsed_s + stats.validation_s)
    long = [name for name, share in shares.items() if share >= (_VALIDATING if name == "validation" else _PAUSED)]
    if not long:
        return None
    cause = max(long, key=shares.__getitem__)
    what, remedy = _PAUSES[cause]
    return cause, f"{what} took {percent(shares[cause])} of the time. {remedy}."


def _of_waiting(stats: LoaderStats) -> Verdict:
    steady_s = stats.wait_s - stats.first_wait_s
    if stats.wait_share < INPUT_BOUND:
        faster = f", which could keep up with {stats.headroom:.1f} times this speed" if stats.headroom > 1 else ""
        waited = f"training waited {percent(stats.wait_share)} of the time for data{faster}."
        return Verdict("none", f"Not input-bound: {waited}")
    steady = steady_s / stats.elapsed_s
    if steady < INPUT_BOUND or (steady < _ALARMING and steady_s < _RATHER * stats.wait_s):
        return _at_the_start(stats)
    part = max(stats.waits, key=stats.waits.__getitem__)
    found = _CAUSES[part](stats)
    after, remedy = _predicted(stats, found), found.remedy
    now = stats.compute_s / (steady_s + stats.compute_s)
    if after is not None and (gain := (1 - after) / max(1e-9, now)) >= _WORTH:
        remedy += f" Training would then be about {gain:.1f} times as fast."
    return replace(found, finding=f"{_input_bound(stats)}: {found.finding}", remedy=remedy, wait_share=after)


def _input_bound(stats: LoaderStats) -> str:
    """How long training waited, first batches included, as all other places say it."""
    first = stats.first_wait_share
    of_which = f", {percent(first)} for first batches" if first >= INPUT_BOUND else ""
    return f"Input-bound {percent(stats.wait_share)}{of_which}"


def _predicted(stats: LoaderStats, found: Verdict) -> float | None:
    """The part of the time that training would wait with the proposed value; None if that cannot be known."""
    settings = stats.settings
    if found.cause == "gil":
        return _wait_share(stats, 1, settings.fetch_threads, stats.cpu_s)
    if found.setting == "predownload":
        return _wait_share(stats, settings.num_workers, settings.fetch_threads)
    if found.setting == "num_workers" and found.cause not in ("cores", "throttled") and isinstance(found.value, int):
        return _wait_share(stats, found.value, settings.fetch_threads)
    return None


def _wait_share(stats: LoaderStats, num_workers: int, fetch_threads: int, computing_s: float | None = None) -> float:
    """The part of the time that training would wait with these settings, and the look-ahead that they need.

    Workers share the making of batches, and all their threads the fetching; training waits for the slower of both.
    """
    makers = max(1, num_workers)
    making_s = (sum(stats.work.values()) - stats.work["fetching"] if computing_s is None else computing_s) / makers
    readers = 1 if stats.settings.workers == "threads" else makers
    making_s = max(making_s, stats.fetching_s / (readers * fetch_threads))
    wait_s = max(0.0, making_s - (stats.compute_s if num_workers else 0.0))
    return wait_s / max(1e-9, wait_s + stats.compute_s)


def _at_the_start(stats: LoaderStats) -> Verdict:
    """Only the first batch of each iteration was late."""
    count, settings = stats.num_iterations, stats.settings
    each = stats.first_wait_s / max(1, count)
    late = max(stats.first_waits, key=stats.first_waits.__getitem__)
    if count > 1 and late == "starting" and settings.num_workers and not settings.persistent_workers:
        finding = (
            f"Input-bound {percent(stats.wait_share)}: starting and ending the workers takes {each:.1f} s an epoch."
        )
        remedy = "Pass persistent_workers=True, which keeps the workers between epochs."
        return Verdict("epoch_start", finding, remedy, "persistent_workers", True)
    of_which = f" of each of {count} iterations" if count > 1 else ""
    steady = percent(stats.wait_share - stats.first_wait_share)
    return Verdict(
        "cold_start",
        f"Training waited {each:.1f} s for the first batch{of_which}, mostly {late}: with {steady} for all others, "
        f"{percent(stats.wait_share)} of the time.",
    )


def _fetching(stats: LoaderStats) -> Verdict:
    """Why workers waited for shards."""
    counted, settings = stats.counters, stats.settings
    makers = settings.num_readers
    unpacking_s = counted["verify_s"] + counted["decompress_s"] + counted["convert_s"]
    busy_s = stats.fetching_s
    fetched, requests = counted["shards_fetched"], max(1, counted["requests"])
    failures = max(counted["retries"] / requests, counted["retry_s"] / max(busy_s, 1e-9))
    # A worker only knows its own downloads: others of the same shards are as likely.
    again = min(1.0, makers * counted["shards_fetched_again"] / max(1, fetched))
    if counted["retries"] and failures >= _MANY:
        return _failing(stats)
    if again >= _AGAIN and settings.cache_limit is not None:
        return _small_cache(stats, again)
    if fetched < _AGAIN * counted["shards_here"] and busy_s < _AGAIN * stats.elapsed_s:
        finding = "it waits for shards that another process of this machine fetches."
        remedy = "Look at the verdict of the other ranks, of which one fetches them."
        return Verdict("other_process", finding, remedy)
    if unpacking_s >= _RATHER * busy_s:
        return _unpacking(stats)
    fetching_s = stats.elapsed_s - stats.first_waits["starting"]
    if busy_s < _BUSY * makers * settings.fetch_threads * fetching_s and not _looks_far(stats):
        return _look_ahead(stats)
    return _slow_store(stats)


def _failing(stats: LoaderStats) -> Verdict:
    counted = stats.counters
    counts = f"{counted['retries']:,.0f} of {counted['requests']:,.0f} requests"
    if counted["corrupt"] >= _RATHER * counted["retries"]:
        finding = f"{counted['corrupt']:,.0f} downloads did not have the bytes that the index promises."
        return Verdict(
            "corrupt_downloads", finding, "Run `lightning-stream check` on the dataset, and check the network."
        )
    if counted["throttled"] < _RATHER * counted["retries"]:
        finding = f"{counts} to the store failed and were sent again."
        return Verdict("store_errors", finding, "Check the network and the store: its log messages name each failure.")
    finding = f"the store refused {counts} because there were too many (status 429 or 503)."
    return Verdict("throttled", finding, "Write larger shards (size_limit), so that there are fewer requests.")


def _small_cache(stats: LoaderStats, again: float) -> Verdict:
    limit = f"{math.ceil(stats.settings.dataset_bytes / (1 << 20))}mb"
    finding = (
        f"the cache is too small: {stats.counters['evictions']:,.0f} shards were evicted, and about {percent(again)} "
        "of the downloads were of shards that had been here."
    )
    remedy = f"Raise cache_limit to {limit!r}, which holds all shards, if the disk has the space. Or lower window."
    return Verdict("small_cache", finding, remedy, "cache_limit", limit)


def _unpacking(stats: LoaderStats) -> Verdict:
    counted, workers = stats.counters, _more_workers(stats)
    converts = counted["convert_s"] > counted["verify_s"] + counted["decompress_s"]
    what = "converted from the dataset's own format" if converts else "decompressed and verified"
    other = "convert the dataset to MDS" if converts else "write the dataset without compression"
    finding = f"shards are {what} more slowly than they are needed."
    if workers is None:
        return Verdict("decompression", finding, f"{other[0].upper()}{other[1:]}.")
    remedy = f"Raise num_workers from {stats.settings.num_workers} to {workers}, or {other}."
    return Verdict("decompression", finding, remedy, "num_workers", workers)


def _looks_far(stats: LoaderStats) -> bool:
    """Whether the look-ahead covers the samples of as many shards as can be fetched at once."""
    return stats.settings.predownload >= _needed_look_ahead(stats)


def _needed_look_ahead(stats: LoaderStats) -> int:
    """Samples in which a worker needs twice as many new shards as it can fetch at once."""
    settings = stats.settings
    needed = 2 * settings.fetch_threads * _samples_per_shard(stats)
    return settings.batch_size * math.ceil(needed / settings.batch_size)


def _samples_per_shard(stats: LoaderStats) -> float:
    return stats.num_samples / max(1, stats.counters["shards_fetched"])


def _look_ahead(stats: LoaderStats) -> Verdict:
    needed, now = _needed_look_ahead(stats), stats.settings.predownload
    finding = "shards are requested too late: the connections are idle most of the time."
    remedy = f"Raise predownload from {now:,} to {needed:,} samples."
    return Verdict("look_ahead", finding, remedy, "predownload", needed)


def _slow_store(stats: LoaderStats) -> Verdict:
    counted, settings = stats.counters, stats.settings
    makers = max(1, settings.num_workers)
    more = makers + max(1, math.ceil(makers * (stats.elapsed_s / max(stats.compute_s, 1e-9) - 1)))
    more = min(more, settings.num_cores)
    setting, each = "num_workers", settings.fetch_threads
    parallel = f"num_workers from {settings.num_workers} to {more}, since each fetches {each} shards"
    if settings.workers == "threads" or more <= settings.num_workers:
        setting, more = "fetch_threads", 2 * each
        parallel = f"fetch_threads from {each} to {more} (loader.tune), to fetch so many shards"
    if counted["first_byte_s"] >= _RATHER * counted["download_s"]:
        latency_ms = 1000 * counted["first_byte_s"] / max(1, counted["requests"])
        finding = f"the store takes {latency_ms:,.0f} ms to the first byte of an answer."
        remedy = f"Raise {parallel} at a time, or write larger shards (size_limit)."
        return Verdict("store_latency", finding, remedy, setting, more)
    needed = f"{counted['fetched_bytes'] / _MB / max(stats.compute_s, 1e-9):,.1f} MB/s"
    needed = needed if stats.wait_share < _IDLE else "far more"
    finding = f"the store delivers {stats.download_mb_s:,.1f} MB/s, and training could use {needed}."
    remedy = (
        f"If each connection is limited, raise {parallel} at a time. If the network is, write smaller samples "
        "(compression='zstd'), or train nearer to the data."
    )
    return Verdict("bandwidth", finding, remedy, setting, more)


def _making(cause: str, doing: str, stage: str, otherwise: str) -> Callable[[LoaderStats], Verdict]:
    """The verdict where a stage of making batches is too slow: too few workers, or too little processor time."""

    def found(stats: LoaderStats) -> Verdict:
        settings, work = stats.settings, stats.work
        wall_s = sum(work.values())
        computing_s = max(wall_s - work["fetching"], 1e-9)
        undisturbed = stats.cpu_s >= _UNDISTURBED * computing_s
        others_s = stats.all_cpu_s - stats.cpu_s
        if settings.workers == "threads" and settings.num_workers and not undisturbed:
            return _held_up(stats)
        if not undisturbed and stats.all_cpu_s >= _OTHERS * wall_s and others_s >= _OTHERS * stats.all_cpu_s:
            return _held_up(stats)
        if _lacks_cores(stats):
            return _crowded(stats)
        if stage == "reading" and stats.cpu_s < _RATHER * computing_s:
            return _idle(stats)
        each_ms = 1000 * work[stage] / stats.num_batches
        step_ms = 1000 * stats.compute_s / stats.num_batches
        finding = f"{doing} takes {each_ms:,.1f} ms a batch, and training {step_ms:,.1f} ms."
        if (workers := _more_workers(stats)) is not None:
            remedy = f"Raise num_workers from {settings.num_workers} to {workers}, or {otherwise}."
            return Verdict(cause, finding, remedy, "num_workers", workers)
        return Verdict(cause, finding, f"All {settings.num_cores} cores have a worker: {otherwise}.")

    return found


def _lacks_cores(stats: LoaderStats) -> bool:
    """Whether what makes batches waits for processor cores, and not for what its functions ask."""
    computing_s = sum(stats.work.values()) - stats.work["fetching"]
    if stats.cpu_s >= _UNDISTURBED * computing_s:
        return False
    has_too_many = stats.settings.num_workers > stats.settings.num_cores
    return has_too_many or stats.queued_s >= _RATHER * (computing_s - stats.cpu_s)


def _crowded(stats: LoaderStats) -> Verdict:
    cores, workers = stats.settings.num_cores, stats.settings.num_workers
    if workers > cores:
        finding = f"{workers} workers share {cores} processor cores."
        return Verdict("cores", finding, f"Lower num_workers to {cores}.", "num_workers", cores)
    queued = stats.queued_s / max(1e-9, sum(stats.work.values()) - stats.work["fetching"])
    finding = f"the processor cores are busy: what makes batches waited for one {percent(queued)} of its time."
    return Verdict("cores", finding, "Train on more cores, or run fewer programs beside the training.")


def _late(stats: LoaderStats) -> Verdict:
    """Batches were begun late: their workers had no core, or were still making others."""
    return _crowded(stats) if _lacks_cores(stats) else _CAUSES[max(stats.work, key=stats.work.__getitem__)](stats)


def _idle(stats: LoaderStats) -> Verdict:
    """Reading that should compute, but does not."""
    each_ms = 1000 * stats.work["reading"] / stats.num_batches
    finding = f"reading takes {each_ms:,.1f} ms a batch, and hardly computes meanwhile: it waits, mostly for the disk."
    remedy = "Put the cache (local=) on a faster disk, unless a decoder or __getitem__ of your own waits."
    return Verdict("disk", finding, remedy)


def _held_up(stats: LoaderStats) -> Verdict:
    finding = "other Python threads of the process that makes batches hold Python's lock (the GIL)."
    if stats.settings.num_workers and stats.settings.workers == "threads":
        finding = "the threads that make batches wait for Python's lock (the GIL), or for a processor core."
        return Verdict("gil", finding, "Pass workers='processes'.", "workers", "processes")
    if stats.settings.num_workers == 0:
        remedy = "Pass num_workers=1, which makes the batches in a process of its own."
        return Verdict("gil", finding, remedy, "num_workers", 1)
    return Verdict("gil", finding, "Let the transform start no threads of its own.")


def _more_workers(stats: LoaderStats) -> int | None:
    """Workers that make batches as fast as training needs them; None if there are no cores left for more."""
    settings = stats.settings
    if settings.num_workers >= settings.num_cores:
        return None
    needed = math.ceil(_SPARE * sum(stats.work.values()) / max(stats.compute_s, 1e-9))
    return min(settings.num_cores, max(settings.num_workers + 1, needed))


def _sending(stats: LoaderStats) -> Verdict:
    if _lacks_cores(stats):
        return _crowded(stats)
    each_ms = 1000 * stats.waits["sending"] / stats.num_batches
    finding = f"moving a batch from its worker to the training process takes {each_ms:,.1f} ms."
    remedy = "Send fewer bytes: keep images as uint8 and convert them on the device; drop columns that are not used."
    if sum(stats.work.values()) < stats.waits["sending"] and stats.settings.num_workers:
        remedy += " Or pass num_workers=0: making the batches takes less time than moving them."
        return Verdict("transport", finding, remedy, "num_workers", 0)
    return Verdict("transport", finding, remedy)


_CAUSES: dict[str, Callable[[LoaderStats], Verdict]] = {
    "starting": _late,
    "fetching": _fetching,
    "sending": _sending,
    "planning": _making("planning", "planning", "planning", "use larger batches"),
    "reading": _making("decoding", "reading and decoding", "reading", "store what is cheaper to decode"),
    "transforming": _making("transform", "the transform", "transforming", "make the transform cheaper"),
    "collating": _making("collate", "collating", "collating", "make collate_fn cheaper"),
}
