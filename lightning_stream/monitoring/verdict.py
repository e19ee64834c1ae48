"""`verdict_of`: why training waits for its data, and which setting to change to which value.

A pure function of what a loader has measured. It names a cause, not a stage: waiting for a shard may be the fault of
the store, of the cache's limit or of the look-ahead. The first cause that fits counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from lightning_stream.monitoring.measured import INPUT_BOUND, Measured, percent, ratio

_VALIDATING = 0.3  # the part of the time from which on validations matter: they are wanted
_ALARMING = 0.1  # the part of the time that matters more than any wait at the start
_RATHER = 0.5  # the part from which on one of two explanations holds
_MANY = 0.1  # the part of requests, or of the time of fetching, from which on failures matter
_AGAIN = 0.2  # the part of the downloads from which on repeated ones matter
_BUSY = 0.75  # the part of the time that connections or cores are in use, from which on there are too few
_HELD = 0.25  # the part of making batches from which on it matters that its thread does not compute
_QUEUED = 0.2  # the part of making batches spent in the queue for a core, from which on that matters
_OTHERS = 0.3  # of a core: what a busy process uses at least; of its processor time: what its other threads use
_SPARE = 1.1  # proposed workers make batches a little faster than they are needed
_IDLE = 0.99  # the part of the time spent waiting from which on the loop does not train at all
_WORTH = 1.1  # times as fast as now: a gain that is worth a sentence
_TINY_S = 3e-4  # moving a batch takes about as long if it holds nothing
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


Verdicts = Iterator[Verdict]  # the first is the main cause


def verdict_of(stats: Measured) -> Verdict:
    """Name the main cause of the waiting, and its remedy.

    Example: ``print(verdict_of(loader.stats()))`` prints "Input-bound 37%: the store takes 810 ms to the first byte of
    an answer. Raise num_workers from 2 to 4, since each fetches 4 shards at a time, or write larger shards."
    """
    verdict = next(chain(_at_the_start(stats), _by_stage(stats)))
    if verdict.is_input_bound:
        verdict = _with_gain(verdict, stats)
    shares = {name: ratio(seconds, stats.elapsed_s) for name, seconds in stats.pauses.items()}
    shares["validation"] = ratio(stats.validation_s, stats.elapsed_s + stats.validation_s)
    long = [name for name, share in shares.items() if share >= (_VALIDATING if name == "validation" else INPUT_BOUND)]
    if not long:
        return verdict
    pause = max(long, key=shares.__getitem__)
    what, remedy = _PAUSES[pause]
    remedy = f"{verdict.remedy} {what} took {percent(shares[pause])} of the time. {remedy}.".lstrip()
    return replace(verdict, cause=verdict.cause if verdict.is_input_bound else pause, remedy=remedy)


def _with_gain(verdict: Verdict, stats: Measured) -> Verdict:
    """The verdict with how long training waited, and what its remedy would save."""
    first = stats.first_wait_share
    of_which = f", {percent(first)} for first batches" if first >= INPUT_BOUND else ""
    finding = f"Input-bound {percent(stats.wait_share)}{of_which}: {verdict.finding}"
    after = _predicted(verdict, stats)
    remedy = verdict.remedy
    if after is not None:
        gain = _gain(after, stats)
        training = "If more of them get more in all, training" if verdict.cause in ("bandwidth", "disk") else "Training"
        remedy += f" {training} would then be about {gain:.1f} times as fast." if gain >= _WORTH else ""
    return replace(verdict, finding=finding, remedy=remedy, wait_share=after)


def _gain(after: float, stats: Measured) -> float:
    """How many times as fast training would be if it waited this part of the time."""
    return (1 - after) * ratio(stats.steady_wait_s + stats.compute_s, stats.compute_s)


def _predicted(verdict: Verdict, stats: Measured) -> float | None:
    """The part of the time that training would wait with the proposed value; None if that cannot be known."""
    if verdict.setting not in ("num_workers", "workers", "predownload"):
        return None
    proposed = {"fetch_threads": stats.fetchers, verdict.setting: verdict.value}
    settings = replace(stats.settings, **proposed)  # type: ignore[arg-type]  # each fits its setting
    is_uneven = stats.ready_share >= _RATHER and stats.waits["fetching"] < _RATHER * stats.steady_wait_s
    if is_uneven and verdict.value:
        return None  # a few batches take long, which further workers seldom make at the same time
    wait_s = _wait_s(replace(stats, settings=settings), stats.cpu_s if verdict.cause == "gil" else stats.computing_s)
    return ratio(wait_s, wait_s + stats.compute_s)


def _wait_s(stats: Measured, computing_s: float) -> float:
    """Seconds that training would wait if making its batches took so long: without workers, only fetching overlaps."""
    return max(0.0 if stats.settings.num_workers else computing_s, stats.making_s(computing_s) - stats.compute_s)


def _more(stats: Measured, cause: str, finding: str, otherwise: str, work_s: float, since: str = "") -> Verdict:
    """A cause against which workers that share this work help, as many as there are cores; and another change."""
    now = stats.settings.num_workers
    needs_cores = not since and stats.held_share <= _RATHER  # what waits needs none
    idle_cores = round(stats.idle_cores) if needs_cores else stats.settings.num_cores
    needed = math.ceil(_SPARE * ratio(work_s, stats.compute_s))
    more = min(stats.settings.num_cores, max(1, now) + idle_cores, max(now + 1, needed))
    if more <= now or not work_s or (needs_cores and stats.queued_share >= _QUEUED):
        return Verdict(cause, finding, f"No core is free for another worker: {otherwise}.")
    remedy = f"Raise num_workers from {now} to {more}{since}, or {otherwise}."
    verdict = Verdict(cause, finding, remedy, "num_workers", more)
    after = _predicted(verdict, stats)
    if after is not None and _gain(after, stats) < _WORTH:
        return Verdict(cause, finding, f"More workers would help by less than a tenth: {otherwise}.")
    return verdict


def _at_the_start(stats: Measured) -> Verdicts:
    """Training does not wait, or only for the first batch of each iteration."""
    settings = stats.settings
    count = stats.num_iterations
    start_s = ratio(stats.first_wait_s, count)
    steady = stats.wait_share - stats.first_wait_share
    late = max(stats.first_waits, key=stats.first_waits.__getitem__)
    restarts = count > 1 and late == "starting" and settings.num_workers > 0 and not settings.persistent_workers
    faster = f", which could keep up with {stats.headroom:.1f} times this speed" if stats.headroom > 1 else ""
    of_each = f" of each of {count} iterations" if count > 1 else ""
    if not stats.elapsed_s:
        yield Verdict("none", "Nothing was measured: no batch was handed out.")
    if stats.wait_share < INPUT_BOUND:
        yield Verdict(
            "none", f"Not input-bound: training waited {percent(stats.wait_share)} of the time for data{faster}."
        )
    if steady >= max(INPUT_BOUND, min(_ALARMING, _RATHER * stats.wait_share)):
        return
    if restarts:
        yield Verdict(
            "epoch_start",
            f"starting and ending the workers takes {start_s:.1f} s an epoch.",
            "Pass persistent_workers=True, which keeps the workers between epochs.",
            "persistent_workers",
            True,
        )
    yield Verdict(
        "cold_start",
        f"Training waited {start_s:.1f} s for the first batch{of_each}, mostly {late}: with "
        f"{percent(steady)} for all others, {percent(stats.wait_share)} of the time.",
    )


def _by_stage(stats: Measured) -> Verdicts:
    """The causes of waiting for a stage."""
    stage = max(stats.waits, key=stats.waits.__getitem__)
    cores = list(_cores(stats))
    if stage == "starting" and not cores:  # workers were still making other batches
        stage = max(stats.work, key=stats.work.__getitem__)
    if stage in _TOO_SLOW:
        return chain(_gil(stats), cores, _making(stats, stage))
    if stage == "fetching":
        return chain(_failing(stats), _late_shards(stats), _slow_store(stats))
    return chain(cores, _gil(stats, is_certain=True), _sending(stats))  # nothing moves within a process


def _failing(stats: Measured) -> Verdicts:
    """Requests for shards are sent again."""
    counted = stats.counters
    retries = counted["retries"]
    refused = f"{retries:,.0f} of {counted['requests']:,.0f} requests"
    if not retries or max(ratio(retries, counted["requests"]), ratio(counted["retry_s"], stats.fetching_s)) < _MANY:
        return
    if counted["corrupt"] >= _RATHER * retries:
        yield Verdict(
            "corrupt_downloads",
            f"{counted['corrupt']:,.0f} downloads did not have the bytes that the index promises.",
            "Run `lightning-stream check` on the dataset, and check the network.",
        )
    if counted["throttled"] < _RATHER * retries:
        yield Verdict(
            "store_errors",
            f"{refused} to the store failed and were sent again.",
            "Check the network and the store: its log messages name each failure.",
        )
    yield Verdict(
        "throttled",
        f"the store refused {refused} because there were too many (status 429 or 503).",
        "Write larger shards (size_limit), so that there are fewer requests.",
    )


def _late_shards(stats: Measured) -> Verdicts:
    """Shards come late for another reason than the store."""
    counted = stats.counters
    settings = stats.settings
    busy_s = stats.fetching_s
    fetched = max(1, counted["shards_fetched"])
    # A worker only knows its own downloads, until it ends: others of the same shards are as likely.
    of_workers = settings.num_readers * counted["shards_fetched_again"] / fetched
    again = min(1.0, max(of_workers, 1 - settings.dataset_bytes / max(1, counted["fetched_bytes"])))
    limit = f"{math.ceil(settings.dataset_bytes / (1 << 20))}mb"
    unpacking_s = counted["verify_s"] + counted["decompress_s"] + counted["convert_s"]
    converts = counted["convert_s"] > unpacking_s / 2
    how = "converted from the dataset's own format" if converts else "decompressed and verified"
    connections_s = settings.num_readers * stats.fetchers * (stats.elapsed_s - stats.first_waits["starting"])
    # Samples in which a worker needs twice as many new shards as it can fetch at once.
    size = settings.batch_size
    ahead = size * math.ceil(2 * stats.fetchers * stats.num_samples / fetched / size)
    if again >= _AGAIN and settings.cache_limit is not None:
        yield Verdict(
            "small_cache",
            f"the cache is too small: {counted['evictions']:,.0f} shards were evicted, and about {percent(again)} of "
            "the downloads were of shards that had been here.",
            f"Raise cache_limit to {limit!r}, which holds all shards, if the disk has the space. Or lower window.",
            "cache_limit",
            limit,
        )
    if counted["shards_fetched"] < _AGAIN * counted["shards_here"] and busy_s < _AGAIN * stats.elapsed_s:
        yield Verdict(
            "other_process",
            "it waits for shards that another process of this machine fetches.",
            "Look at the verdict of the other ranks, of which one fetches them.",
        )
    if unpacking_s >= _RATHER * busy_s:
        yield _more(
            stats,
            "decompression",
            f"shards are {how} more slowly than they are needed.",
            "convert the dataset to MDS" if converts else "write the dataset without compression",
            0.0 if unpacking_s >= _BUSY * settings.num_cores * stats.elapsed_s else stats.work_s,
        )
    if busy_s < _BUSY * connections_s and settings.predownload < ahead:
        yield Verdict(
            "look_ahead",
            "shards are requested too late: the connections are idle most of the time.",
            f"Raise predownload from {settings.predownload:,} to {ahead:,} samples.",
            "predownload",
            ahead,
        )


def _slow_store(stats: Measured) -> Verdicts:
    """The store answers late or slowly: more connections help."""
    settings = stats.settings
    usable = (
        f"{ratio(stats.counters['fetched_bytes'] / 1e6, stats.compute_s):,.1f} MB/s"
        if stats.wait_share < _IDLE
        else "far more"
    )
    cause = "bandwidth"
    finding = f"the store delivers {stats.download_mb_s:,.1f} MB/s, and training could use {usable}."
    otherwise = "write smaller samples (compression='zstd') or train nearer to the data, where the network is the limit"
    if stats.counters["first_byte_s"] >= _RATHER * stats.counters["download_s"]:
        cause = "store_latency"
        finding = (
            f"the store takes {1000 * ratio(stats.counters['first_byte_s'], stats.counters['requests']):,.0f} ms "
            "to the first byte of an answer."
        )
        otherwise = "write larger shards (size_limit)"
    fetching = f"each fetches {stats.fetchers} shards at a time"
    if settings.workers == "threads" and settings.num_workers:
        remedy = f"Pass workers='processes', of which {fetching}, or {otherwise}."
        yield Verdict(cause, finding, remedy, "workers", "processes")
    yield _more(stats, cause, finding, otherwise, stats.fetching_s / stats.fetchers, f", since {fetching}")


def _gil(stats: Measured, is_certain: bool = False) -> Verdicts:
    """Other Python threads hold up what makes batches; certainly, where nothing else can delay them."""
    others_s = stats.all_cpu_s - stats.cpu_s
    num_workers = stats.settings.num_workers
    in_threads = stats.settings.workers == "threads" and num_workers > 0
    makers = num_workers if in_threads else 1
    is_held = stats.held_share >= _HELD and makers * stats.all_cpu_s >= _OTHERS * stats.work_s
    is_slowed = is_held and others_s >= _OTHERS * stats.all_cpu_s and not is_certain
    # Threads that the transform starts would go with it to a worker; while training computes, they wait.
    goes_on = stats.beside_s * stats.computing_s >= _RATHER * others_s * stats.compute_s
    unless = ", or pass num_workers=1 if they are not its own" * (num_workers == 0 and stats.wait_share >= _IDLE)
    holds = "other Python threads of the process that makes batches hold Python's lock (the GIL)."
    if in_threads and (is_certain or is_held):
        finding = "the threads that make batches wait for Python's lock (the GIL), or for a processor core."
        yield Verdict("gil", finding, "Pass workers='processes'.", "workers", "processes")
    if num_workers == 0 and (is_certain or (is_slowed and goes_on)):
        remedy = "Pass num_workers=1, which makes the batches in a process of its own."
        yield Verdict("gil", holds, remedy, "num_workers", 1)
    if is_slowed:
        yield Verdict("gil", holds, f"Let the transform start no threads of its own{unless}.")


def _cores(stats: Measured) -> Verdicts:
    """With a core for each thread that makes batches, training would wait less than half as long."""
    is_crowded = stats.settings.num_workers > stats.settings.num_cores
    busy = f"the processor cores are busy: what makes batches waited for one {percent(stats.queued_share)} of its time."
    shared = f"{stats.settings.num_workers} workers share {stats.settings.num_cores} processor cores."
    left_s = _wait_s(stats, (1 - stats.queued_share) * stats.computing_s)
    helps = stats.queued_share >= _QUEUED and left_s < _RATHER * stats.steady_wait_s
    is_unknown = is_crowded and not stats.queued_s and stats.held_share >= _HELD
    if helps or is_unknown:
        yield Verdict(
            "cores",
            shared if is_crowded else busy,
            "Train on more cores, run fewer programs beside the training, or let batches need less computing.",
        )


def _ms(stats: Measured, seconds: float) -> str:
    return f"{1000 * ratio(seconds, stats.num_batches):,.1f} ms"


def _making(stats: Measured, stage: str) -> Verdicts:
    """A stage of making batches is too slow."""
    cause, what, otherwise = _TOO_SLOW[stage]
    of_it = ", most of which it waits" if stats.held_share > _RATHER else ""
    if of_it and stage == "reading":
        cause = "disk"
        otherwise = "put the cache (local=) on a faster disk, unless a decoder or __getitem__ of your own waits"
    finding = (
        f"{what} takes {_ms(stats, stats.work[stage])} a batch{of_it}, and training {_ms(stats, stats.compute_s)}."
    )
    if stats.settings.num_workers == 0 and stats.work_s < _TINY_S * stats.num_batches:
        yield Verdict(cause, finding, "Use larger batches: a worker would take as long to hand one over.")
    yield _more(stats, cause, finding, otherwise, stats.work_s)


def _sending(stats: Measured) -> Verdicts:
    """Batches move slowly to the trainer."""
    sending_s = stats.waits["sending"]
    finding = f"moving a batch from its worker to the training process takes {_ms(stats, sending_s)}."
    fewer = "end fewer bytes: keep images as uint8 and convert them on the device; drop columns that are not used."
    if sending_s < _TINY_S * stats.num_batches:
        yield Verdict(
            "transport", "handing over a batch takes its time, however little the batch holds.", "Use larger batches."
        )
    if stats.work_s < sending_s:
        remedy = f"Pass num_workers=0: making the batches takes less time than moving them. Or s{fewer}"
        yield Verdict("transport", finding, remedy, "num_workers", 0)
    yield Verdict("transport", finding, f"S{fewer}")


_TOO_SLOW = {  # by stage: the cause, what takes long, and what else than more workers helps
    "planning": ("planning", "planning", "use larger batches"),
    "reading": ("decoding", "reading and decoding", "store what is cheaper to decode"),
    "transforming": ("transform", "the transform", "make the transform cheaper"),
    "collating": ("collate", "collating", "make collate_fn cheaper"),
}
