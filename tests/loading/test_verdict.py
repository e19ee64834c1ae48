"""The verdict names the right cause of waiting, and a remedy that helps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from support.simulated_loading import Loop, measured

from lightning_stream.loading.stats import LoaderStats, LoadingSettings
from lightning_stream.loading.verdict import verdict_of

SEEDS = 20
TWO = LoadingSettings(batch_size=32, num_workers=2, num_cores=8, dataset_bytes=10 << 30)
NONE = replace(TWO, num_workers=0)
LIMITED = replace(TWO, cache_limit=1 << 30)
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
    "a cache that is too small": (
        "small_cache",
        Loop(latency=0.1, transfer=2.0, shard_every=1, settings=LIMITED, counted={
            "shards_fetched_again": 0.2, "evictions": 0.9,
        }),
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
    "other programs": ("cores", Loop(planning=0.5, cpu=0.2, settings=TWO)),
    "large batches": ("transport", Loop(sending=0.05, settings=TWO)),
    "threads that hold the GIL": ("gil", Loop(reading=0.3, cpu=0.5, others_cpu=0.5, settings=NONE)),
    "more workers than cores": ("cores", Loop(reading=3.0, cpu=0.4, settings=CROWDED)),
    "a slow start": ("cold_start", Loop(startup=30.0, steps=400, settings=TWO)),
    "workers that start in each epoch": ("epoch_start", Loop(startup=4.0, steps=50, epochs=5, settings=TWO)),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_the_verdict_names_the_cause_that_was_injected(case: str) -> None:
    cause, loop = CAUSES[case]
    found = Counter(verdict_of(measured(loop, seed)).cause for seed in range(SEEDS))
    assert found[cause] >= 0.95 * SEEDS, found


def test_healthy_runs_raise_no_alarm() -> None:
    for seed in range(200):
        every, workers = seed % 4, (2, 4, 8)[seed % 3]
        settings = replace(TWO, num_workers=workers)
        loop = Loop(shard_every=every, latency=0.05, transfer=0.2, transforming=0.02, settings=settings, steps=60)
        verdict = verdict_of(measured(loop, seed))
        assert not verdict.is_input_bound, (seed, verdict)


@pytest.mark.parametrize("case", CAUSES)
def test_the_parts_add_up_to_the_time_of_the_loop(case: str) -> None:
    stats = measured(CAUSES[case][1], 0)
    assert sum(stats.waits.values()) + sum(stats.first_waits.values()) == pytest.approx(stats.wait_s)
    assert min(*stats.waits.values(), *stats.first_waits.values()) >= -1e-9


@pytest.mark.parametrize(
    "case", ["too few workers", "no workers", "a slow transform", "a slow collate function", "slow planning",
             "a slow first byte", "a look-ahead that is too short", "threads that hold the GIL"],
)  # fmt: skip
def test_the_proposed_value_ends_the_waiting(case: str) -> None:
    loop = CAUSES[case][1]
    verdict = verdict_of(measured(loop, 1))
    assert verdict.setting in ("num_workers", "predownload")
    assert str(verdict.value) in verdict.remedy.replace(",", "")
    if verdict.setting == "num_workers":
        changed = replace(loop, settings=replace(loop.settings, num_workers=verdict.value))
        if verdict.cause == "gil":
            changed = replace(changed, reading=0.09, cpu=0.98, others_cpu=0.0)  # a process of its own
        if verdict.cause == "store_latency":  # the workers share the shards
            changed = replace(changed, shard_every=loop.shard_every * verdict.value // loop.settings.num_workers)
    else:
        changed = replace(loop, ahead=verdict.value // loop.settings.batch_size)
    after = verdict_of(measured(changed, 1))
    assert not after.is_input_bound, (verdict, after)


def test_nothing_is_said_of_a_run_of_one_batch() -> None:
    assert verdict_of(LoaderStats()).cause == "none"
    assert verdict_of(measured(Loop(startup=9.0, steps=1), 0)).cause == "none"


def test_a_verdict_is_a_finding_and_a_remedy() -> None:
    verdict = verdict_of(measured(CAUSES["a slow first byte"][1], 0))
    assert str(verdict).startswith("Input-bound ")
    assert "ms to the first byte of an answer. Raise num_workers from 2 to" in str(verdict)
