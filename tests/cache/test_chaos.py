"""Hours of bad luck in minutes: processes killed over and over, a small limit, a network that does all it can.

pytest -m slow -s tests/cache/test_chaos.py tests/test_chaos.py      prints its counts; with Ceph where it is installed
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from servers.crowd import STEADY, Crowd, upload
from servers.fault_proxy import FaultProxy, Plan
from servers.s3 import options_of
from servers.shards import make_dataset, shard_content
from servers.workers import read_all

from lightning_stream.cache import CacheConfig, ShardCache
from lightning_stream.stores import LocalStore

SHARD_BYTES, NUM_SHARDS, EPOCHS = 100_000, 40, 12
OPTIONS = {"retries": 40, "first_pause_s": 0.005, "longest_pause_s": 0.1, "timeout_s": 0.5}
PROBABILITY = {"error": 0.1, "reset": 0.2, "truncate": 0.2, "stall": 0.03, "flip": 0.1}
ODD = {"page": 0.1, "empty": 0.05, "gone": 0.05, "short": 0.05, "unversioned": 0.05}  # where a body is resumed
SPAWN = multiprocessing.get_context("spawn")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_no_fault_and_no_kill_costs_a_byte(s3_endpoint: str, tmp_path: Path) -> None:
    make_dataset(tmp_path / "dataset", NUM_SHARDS, SHARD_BYTES, compression="zstd")
    options = {**options_of(s3_endpoint), **OPTIONS}
    upload("s3://bucket/shards", {**options, "timeout_s": 20.0}, tmp_path / "dataset")
    config = CacheConfig(limit_bytes=14 * SHARD_BYTES, refetches=20)
    cache = tmp_path / "cache"
    plan = Plan(latency_s=0.002, probability=PROBABILITY, resumed=ODD, burst=3)
    with FaultProxy(s3_endpoint, plan) as proxy:

        def start(seed: int, epochs: int) -> tuple[Any, Any]:
            said = SPAWN.Queue()
            given = (
                "s3://bucket/shards",
                {**options, "endpoint_url": proxy.url},
                cache,
                config,
                SHARD_BYTES,
                seed,
                epochs,
            )
            process = SPAWN.Process(target=read_all, args=(*given, said), daemon=True)
            process.start()
            return process, said

        crowd = Crowd(start, EPOCHS)
        crowd.run(limit_s=600)
        counts, gets = dict(proxy.counts), sum(n for (method, _), n in proxy.asked.items() if method == "GET")
    faults = sum(counts[name] for name in PROBABILITY)
    print(
        f"\nfaults {faults} {counts}; GETs {gets}; kills {crowd.kills}; reads {crowd.reads.total()}; ends {crowd.ended}"
    )
    assert crowd.wrong == []
    assert len(crowd.ended) == STEADY
    assert all(descriptors <= 3 and mebibytes <= 64 for _, descriptors, mebibytes in crowd.ended)
    assert faults >= 1000
    _check_folder(cache, config)


def _check_folder(cache: Path, config: CacheConfig) -> None:
    """Whole files under final names, within the limit; no lock is held, and what was left goes with the next start."""
    shards = list(cache.glob("shard.*"))
    assert all(path.read_bytes() == shard_content(int(path.name.split(".")[1]), SHARD_BYTES) for path in shards)
    assert sum(path.stat().st_size for path in shards) <= (config.limit_bytes or 0)
    ShardCache(LocalStore(cache.parent / "dataset"), cache, config)._place.prepare()
    assert list((cache / ".lightning_stream" / "drafts").iterdir()) == []
