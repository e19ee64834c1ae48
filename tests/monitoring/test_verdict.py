"""The verdict names the right cause of waiting, and a remedy that helps."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.simulated_loading import Loop, measured

from lightning_stream.monitoring.measured import LoadingSettings
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.monitoring.verdict import verdict_of

SEEDS = 20
TWO = LoadingSettings(batch_size=32, num_workers=2, num_cores=8, dataset_bytes=10 << 30)
NONE = replace(TWO, num_workers=0)
LIMITED = replace(TWO, cache_limit=1 << 30)
SMALL = replace(LIMITED, dataset_bytes=6 << 30)
FULL = replace(TWO, num_workers=8)
CROWDED = replace(TWO, num_workers=16, num_cores=4)
SLOW = {"shard_every": 1, "settings": TWO}
CAUSES: dict[str, tuple[str, Loop]] = {
    "a slow first byte": ("store_latency", Loop(latency=2.0, transfer=0.1, **SLOW)),
    "few bytes per second": ("bandwidth", Loop(latency=0.05, transfer=2.0, **SLOW)),
    "refused requests": (
        "throttled",
        Loop(latency=0.1, transfer=2.0, counted={"retries": 0.6, "retry_s": 0.5, "throttled": 0.6}, **SLOW),
    ),
    "broken connections": ("store_errors", Loop(latency=0.1, transfer=2.0, counted={"retries": 0.5}, **SLOW)),
    "spoiled answers": (
        "corrupt_downloads",
        Loop(latency=0.1, transfer=2.0, counted={"retries": 0.2, "corrupt": 0.2, "throttled": 0.02}, **SLOW),
    ),
    "a cache that is too small": (
        "small_cache",
        Loop(latency=0.1, transfer=2.0, shard_every=1, settings=LIMITED, counted={
            "shards_fetched_again": 0.2, "evictions": 0.9,
        }),
    ),
    "a cache that is too small, and workers that end with each epoch": (
        "small_cache",
        Loop(latency=0.1, transfer=2.0, shard_every=1, settings=SMALL, epochs=2, steps=100, counted={"evictions": 0.9}),
    ),
    "a look-ahead that is too short": ("look_ahead", Loop(latency=0.1, transfer=0.6, ahead=1, **SLOW)),
    "shards that are slow to decompress": ("decompression", Loop(latency=0.1, transfer=0.1, unpack=2.0, **SLOW)),
    "a dataset in a format that is slow to read": (
        "decompression", Loop(unpack=2.0, unpacks_as="convert_s", **SLOW)
    ),
    "too few workers": ("decoding", Loop(reading=0.5, settings=TWO)),
    "no workers": ("decoding", Loop(reading=0.5, settings=NONE)),
    "too few cores": ("decoding", Loop(reading=2.0, settings=FULL)),
    "a slow transform": ("transform", Loop(transforming=0.6, settings=TWO)),
    "a transform that waits": ("transform", Loop(transforming=0.6, cpu=0.05, settings=TWO)),
    "a slow collate function": ("collate", Loop(collating=0.6, settings=TWO)),
    "slow planning": ("planning", Loop(planning=0.6, settings=TWO)),
    "a slow disk": ("disk", Loop(reading=0.5, cpu=0.1, settings=TWO)),
    "other programs": ("cores", Loop(planning=0.5, cpu=0.2, queued=0.7, settings=TWO)),
    "a transform that is kept from its core": (
        "cores", Loop(transforming=0.6, cpu=0.5, queued=0.4, settings=TWO)
    ),
    "batches that move slowly between busy cores": (
        "cores", Loop(reading=0.15, sending=0.3, cpu=0.5, queued=0.4, settings=TWO)
    ),
    "large batches": ("transport", Loop(sending=0.05, settings=TWO)),
    "threads that hold the GIL": ("gil", Loop(reading=0.18, cpu=0.5, others_cpu=0.5, settings=NONE)),
    "more workers than cores": ("cores", Loop(reading=3.0, cpu=0.4, settings=CROWDED)),
    "a slow start": ("cold_start", Loop(startup=30.0, steps=400, settings=TWO)),
    "workers that start in each epoch": ("epoch_start", Loop(startup=4.0, steps=50, epochs=5, settings=TWO)),
    "checkpoints that take long": ("checkpoint", Loop(paused={"checkpoint": 0.02}, settings=TWO)),
    "garbage that is collected often": (
        "garbage_collection", Loop(paused={"garbage_collection": 0.02, "checkpoint": 0.003}, settings=TWO)
    ),
    "a rank that is late": ("other_ranks", Loop(paused={"other_ranks": 0.05}, settings=TWO)),
    "validations that take long": (
        "validation", Loop(paused={"validation": 0.1, "checkpoint": 0.01}, settings=TWO)
    ),
    "checkpoints beside a slow transform": (
        "transform", Loop(transforming=0.6, paused={"checkpoint": 0.02}, settings=TWO)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_the_verdict_names_the_cause_that_was_injected(case: str) -> None:
    cause, loop = CAUSES[case]
    found = Counter(verdict_of(measured(loop, seed)).cause for seed in range(SEEDS))
    assert found[cause] >= 0.95 * SEEDS, found


def test_a_pause_of_a_request_that_failed_before_this_time_is_no_failure_in_it() -> None:
    stats = measured(CAUSES["a slow first byte"][1], 0)
    stats.counters["retry_s"] = stats.fetching_s
    verdict = verdict_of(stats)
    assert verdict.cause == "store_latency", verdict


def test_nothing_is_said_of_training_that_has_not_begun() -> None:
    assert str(verdict_of(LoaderStats())) == "Nothing was measured: no batch was handed out."


def test_healthy_runs_raise_no_alarm() -> None:
    for seed in range(200):
        every, workers = seed % 4, (2, 4, 8)[seed % 3]
        settings = replace(TWO, num_workers=workers)
        paused = {"checkpoint": 0.002, "garbage_collection": 0.001, "validation": 0.02}
        loop = Loop(shard_every=every, latency=0.05, transfer=0.2, transforming=0.02, settings=settings, steps=60)
        verdict = verdict_of(measured(replace(loop, paused=paused), seed))
        assert verdict.cause in ("none", "cold_start"), (seed, verdict)


@pytest.mark.parametrize("case", CAUSES)
def test_the_parts_add_up_to_the_time_of_the_loop(case: str) -> None:
    loop = CAUSES[case][1]
    stats = measured(loop, 0)
    assert sum(stats.waits.values()) + sum(stats.first_waits.values()) == pytest.approx(stats.wait_s)
    assert min(*stats.waits.values(), *stats.first_waits.values()) >= -1e-9
    steps = loop.epochs * (loop.steps - 1)
    assert stats.training_s == pytest.approx(loop.compute * steps, rel=0.1)  # of lengths at random


PREDICTED = {
    **{
        name: CAUSES[name][1]
        for name in (
            "too few workers", "no workers", "a slow transform", "a slow collate function", "slow planning",
            "a slow first byte", "a look-ahead that is too short", "threads that hold the GIL", "large batches",
        )
    },
    "too few workers for the cores": Loop(reading=0.9, settings=replace(TWO, num_cores=3)),
    "a slow transform on few cores": Loop(transforming=0.6, settings=replace(TWO, num_cores=4)),
    "a look-ahead that is too short for a slow store": Loop(latency=0.1, transfer=0.9, ahead=1, **SLOW),
    "a slow first byte, without workers": Loop(latency=1.0, shard_every=1, settings=NONE),
    "a look-ahead that is too short, without workers": Loop(latency=0.3, ahead=1, shard_every=1, settings=NONE),
    "a store that is too slow for all cores": Loop(latency=3.0, shard_every=1, settings=replace(TWO, num_cores=3)),
}  # fmt: skip


def changed(loop: Loop, cause: str, setting: str, value: int) -> Loop:
    """The loop with another setting."""
    if setting == "predownload":
        return replace(loop, ahead=value // loop.settings.batch_size)
    if cause == "gil":
        loop = replace(loop, reading=loop.reading * loop.cpu, cpu=1.0, others_cpu=0.0)  # a process of its own
    return replace(loop, settings=replace(loop.settings, **{setting: value}))


def check_prediction(loop: Loop, other: Loop, predicted: float | None, seed: int) -> LoaderStats:
    """Compare the time that a change saves with what was predicted, within 20 %."""
    before, after = measured(loop, seed), measured(other, seed)
    assert predicted is not None
    saved_s = before.elapsed_s - after.elapsed_s
    assert before.elapsed_s - before.compute_s / (1 - predicted) == pytest.approx(saved_s, rel=0.2)
    return after


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", PREDICTED)
def test_a_remedy_saves_what_was_predicted(case: str, seed: int) -> None:
    loop = PREDICTED[case]
    verdict = verdict_of(measured(loop, seed))
    assert verdict.setting in ("num_workers", "predownload")
    assert str(verdict.value) in verdict.remedy.replace(",", "")
    other = changed(loop, verdict.cause, verdict.setting, int(verdict.value))
    after = check_prediction(loop, other, verdict.wait_share, seed)
    if case in CAUSES and case != "large batches":  # enough cores, and the store is fast enough
        assert not verdict_of(after).is_input_bound, (verdict, after)


@pytest.mark.parametrize("times", [1.5, 3.0, 10.0])
def test_the_headroom_is_how_much_faster_training_could_be(times: float) -> None:
    work = 2 * 0.1 / times  # of two workers, for steps of 0.1 s
    stats = measured(Loop(planning=0.0, reading=work, collating=0.0, settings=TWO), 0)
    assert stats.headroom == pytest.approx(times, rel=0.1)
    assert f"could keep up with {stats.headroom:.1f} times this speed" in str(verdict_of(stats))
    faster = measured(Loop(compute=0.1 / times, planning=0.0, reading=work, collating=0.0, settings=TWO), 0)
    assert faster.samples_per_s == pytest.approx(times * stats.samples_per_s, rel=0.15)


@pytest.mark.parametrize("case", ["a slow first byte", "few bytes per second", "too few workers"])
def test_a_loop_that_only_reads_learns_how_much_faster_it_could_be(case: str) -> None:
    verdict = verdict_of(measured(replace(CAUSES[case][1], compute=1e-6), 0))  # as a user's first benchmark
    assert verdict.setting == "num_workers"
    assert verdict.remedy.endswith(" times as fast.")
    assert 3.5 <= float(verdict.remedy.split()[-4]) <= 4.5  # from 2 workers to 8
    assert ("could use far more." in verdict.finding) == (verdict.cause == "bandwidth")


def test_a_remedy_that_hardly_helps_promises_nothing() -> None:
    verdict = verdict_of(measured(Loop(reading=2.0, settings=replace(TWO, num_workers=15, num_cores=16)), 0))
    assert verdict.value == 16
    assert "times as fast" not in str(verdict)


@pytest.mark.parametrize(("reading", "value"), [(0.007, None), (0.02, 1)])
def test_workers_are_proposed_only_where_training_would_be_a_tenth_faster(reading: float, value: int | None) -> None:
    verdict = verdict_of(measured(Loop(reading=reading, planning=0.0, collating=0.0, settings=NONE), 0))
    assert verdict.is_input_bound
    assert verdict.value == value
    assert verdict.remedy.endswith(
        "less than a tenth: store what is cheaper to decode." if value is None else "as fast."
    )


@pytest.mark.parametrize("cores", [1, 3])
def test_no_verdict_proposes_more_workers_than_cores_or_calls_much_waiting_little(cores: int) -> None:
    for _, loop in CAUSES.values():
        few = replace(loop, steps=min(loop.steps, 80), settings=replace(loop.settings, num_cores=cores))
        stats = measured(few, 0)
        verdict = verdict_of(stats)
        if verdict.setting == "num_workers":
            assert int(str(verdict.value)) <= cores, verdict
        if stats.wait_share > 0.1:
            assert verdict.is_input_bound or f"{100 * stats.wait_share:.0f}%" in verdict.finding, verdict


@pytest.mark.parametrize("queued", [0.0, 0.6])
def test_a_proposed_number_of_workers_is_not_taken_back_by_the_next_verdict(queued: float) -> None:
    for cores in (1, 2, 4, 8):
        loop = Loop(transforming=0.9, cpu=0.3, queued=queued, settings=replace(NONE, num_cores=cores))
        for _ in range(3):
            verdict = verdict_of(measured(loop, 0))
            if verdict.setting != "num_workers":
                break
            assert int(str(verdict.value)) > loop.settings.num_workers
            loop = replace(loop, settings=replace(loop.settings, num_workers=int(str(verdict.value))))


def test_a_run_of_one_batch_that_was_late_is_not_called_well() -> None:
    assert verdict_of(LoaderStats()).cause == "none"
    late = verdict_of(measured(Loop(startup=9.0, steps=1), 0))
    assert late.cause == "cold_start"
    assert "100% of the time" in late.finding


def test_a_verdict_is_a_finding_and_a_remedy() -> None:
    verdict = verdict_of(measured(CAUSES["a slow first byte"][1], 0))
    assert str(verdict).startswith("Input-bound ")
    assert "ms to the first byte of an answer. Raise num_workers from 2 to" in str(verdict)


def test_threads_get_remedies_that_threads_can_have() -> None:
    threads = replace(TWO, workers="threads")
    assert (TWO.num_readers, NONE.num_readers, threads.num_readers) == (2, 1, 1)
    locked = verdict_of(measured(Loop(reading=0.6, cpu=0.5, settings=threads), 0))
    assert (locked.cause, locked.setting, locked.value) == ("gil", "workers", "processes")
    busy = verdict_of(measured(Loop(reading=0.6, settings=threads), 0))
    assert (busy.cause, busy.setting) == ("decoding", "num_workers")
    waits = verdict_of(measured(Loop(latency=2.0, transfer=0.1, shard_every=1, settings=threads), 0))
    assert (waits.cause, waits.setting, waits.value) == ("store_latency", "workers", "processes")
    assert "Pass workers='processes', of which each fetches 4 shards at a time" in waits.remedy


def test_threads_that_hold_the_lock_are_told_from_the_transforms_own() -> None:
    stats = replace(measured(Loop(transforming=0.9, cpu=0.4, settings=NONE), 0), queued_s=0.0)
    stats = replace(stats, all_cpu_s=2 * stats.computing_s)
    theirs = verdict_of(replace(stats, beside_s=stats.compute_s))
    assert (theirs.cause, theirs.setting, theirs.value) == ("gil", "num_workers", 1)
    own = verdict_of(replace(stats, beside_s=0.1 * stats.compute_s))
    assert (own.cause, own.setting) == ("gil", None)
    assert "Let the transform start no threads of its own." in own.remedy
    waits = dict.fromkeys(stats.waits, 0.0) | {"transforming": 1e6 * stats.compute_s}
    unknown = verdict_of(replace(stats, waits=waits, wait_s=1e6 * stats.compute_s))
    assert "or pass num_workers=1 if they are not its own." in unknown.remedy


def test_nothing_moves_from_threads_and_little_from_small_batches() -> None:
    sending = Loop(reading=0.1, sending=0.5, settings=TWO)
    moved = verdict_of(measured(sending, 0))
    assert (moved.cause, moved.setting) == ("transport", "num_workers")
    held = verdict_of(measured(replace(sending, settings=replace(TWO, workers="threads")), 0))
    assert (held.cause, held.value) == ("gil", "processes")
    alone = verdict_of(replace(measured(sending, 0), settings=NONE))
    assert (alone.cause, alone.setting, alone.value) == ("gil", "num_workers", 1)
    stats = measured(sending, 0)
    tiny = verdict_of(replace(stats, num_batches=10_000_000))
    assert (tiny.cause, tiny.setting, "Use larger batches." in tiny.remedy) == ("transport", None, True)


def test_no_worker_is_proposed_where_unpacking_takes_all_cores() -> None:
    slow = measured(CAUSES["shards that are slow to decompress"][1], 0)
    free = verdict_of(replace(slow, settings=replace(slow.settings, num_cores=16)))
    assert (free.cause, free.setting) == ("decompression", "num_workers")
    full = verdict_of(replace(slow, settings=replace(slow.settings, num_cores=4)))
    assert (full.cause, full.setting) == ("decompression", None)
    assert "No core is free for another worker: write the dataset without compression." in full.remedy


RECORDED = {  # figures of real loops, of which each has one fault, on two cores, which are idle unless "beside" another
    name: replace(LoaderStats.of_numbers(loop["numbers"]), settings=LoadingSettings(**loop["settings"]))
    for name, loop in json.loads((Path(__file__).parent / "recorded_loops.json").read_text()).items()
}


@pytest.mark.parametrize(
    ("loop", "cause", "setting", "promises"),
    [
        ("a transform that sleeps in eight workers on two cores", "transform", None, False),
        ("a transform that sleeps, beside other programs", "transform", "num_workers", True),
        ("a transform that computes, beside other programs", "transform", None, False),
        ("two workers beside four programs", "cores", None, False),
        ("eight workers that compute on two cores", "cores", None, False),
        ("a thread that waits for a core, not for the lock", "transform", None, False),
        ("batches of one sample", "decoding", None, False),
        ("batches of one sample, from a worker", "transport", "num_workers", True),
        ("one slow batch in ten", "transform", "num_workers", False),
        ("a network that all connections share", "bandwidth", "num_workers", True),
        ("samples that a database answers", "disk", "num_workers", True),
        ("a collate function that sleeps", "collate", "num_workers", True),
        ("a slow first byte, and batches of many shards", "store_latency", "num_workers", True),
    ],
)
def test_figures_of_real_loops_lead_to_their_causes(loop: str, cause: str, setting: str | None, promises: bool) -> None:
    verdict = verdict_of(RECORDED[loop])
    assert (verdict.cause, verdict.setting, verdict.wait_share is not None) == (cause, setting, promises), verdict


def test_no_remedy_takes_workers_away_that_only_wait_or_adds_some_where_no_core_is_free() -> None:
    for stats in RECORDED.values():
        verdict = verdict_of(stats)
        if verdict.setting != "num_workers":
            continue
        more = int(str(verdict.value)) - stats.settings.num_workers
        assert more > 0 or verdict.cause == "transport", verdict
        needs_cores = verdict.cause not in ("store_latency", "bandwidth") and stats.held_share <= 0.5
        assert more < 0 or stats.queued_share < 0.2 or not needs_cores, verdict


def test_a_part_of_the_time_in_the_queue_for_a_core_is_no_more_than_was_lost() -> None:
    for stats in RECORDED.values():  # the times of short batches are measured at one in 64
        assert 0 <= stats.queued_share <= 1
        assert stats.cpu_s + stats.queued_share * stats.computing_s <= max(stats.cpu_s, stats.computing_s) + 1e-9


@pytest.mark.parametrize("case", ["few bytes per second", "a slow disk"])
def test_a_gain_that_a_shared_limit_may_prevent_is_promised_with_an_if(case: str) -> None:
    shared = verdict_of(measured(CAUSES[case][1], 0))
    assert " If more of them get more in all, training would then be about " in shared.remedy
    assert " Training would then be about " in verdict_of(measured(CAUSES["a slow transform"][1], 0)).remedy


def test_a_store_is_asked_by_as_many_connections_as_were_measured() -> None:
    stats = RECORDED["a slow first byte, and batches of many shards"]
    assert (stats.settings.fetch_threads, stats.fetchers) == (4, 14)
    verdict = verdict_of(stats)
    assert "each fetches 14 shards at a time" in verdict.remedy
    assert float(verdict.remedy.split()[-4]) == pytest.approx(1.54, rel=0.3)  # with two workers, it was


def test_threads_that_sleep_do_not_wait_for_the_lock() -> None:
    threads = replace(TWO, workers="threads", num_cores=4)
    stats = measured(Loop(transforming=0.6, cpu=0.02, settings=threads), 0)
    assert (verdict_of(stats).cause, verdict_of(stats).value) == ("transform", 4)


def test_the_gain_of_processes_instead_of_threads_counts_all_of_them() -> None:
    stats = measured(Loop(transforming=0.9, cpu=0.5, settings=replace(TWO, workers="threads")), 0)
    verdict = verdict_of(stats)
    assert verdict.value == "processes"
    after = measured(Loop(transforming=0.45, settings=TWO), 0)  # each computes all the time
    assert verdict.wait_share == pytest.approx(after.wait_share, rel=0.2)


@pytest.mark.parametrize(("idle", "more"), [(0.2, None), (1.0, 3), (6.0, 7)])
def test_workers_that_compute_are_proposed_for_idle_cores_alone(idle: float, more: int | None) -> None:
    computing = verdict_of(measured(Loop(transforming=0.6, idle=idle, settings=TWO), 0))
    assert (computing.cause, computing.value) == ("transform", more)
    sleeping = verdict_of(measured(Loop(transforming=0.6, cpu=0.02, idle=idle, settings=TWO), 0))
    assert (sleeping.cause, sleeping.value) == ("transform", 7)
    alone = verdict_of(measured(Loop(transforming=0.12, idle=0.0, settings=NONE), 0))
    assert alone.value == 1  # it works while training waits for its device
