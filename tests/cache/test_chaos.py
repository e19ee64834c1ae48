"""Hours of bad luck in minutes: processes killed over and over, a small limit, a network that does all it can."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from servers import processes
from servers.fault_proxy import FaultProxy, Plan
from servers.shards import make_dataset, shard_content
from servers.workers import read_all

from lightning_stream.cache import CacheConfig, ShardCache
from lightning_stream.storage import LocalStore, open_store

KEY, SECRET = "TESTKEY", "TESTSECRET"
SHARD_BYTES, NUM_SHARDS, EPOCHS, STEADY, KILLED = 100_000, 40, 12, 4, 4
OPTIONS = {"retries": 12, "first_pause_s": 0.005, "longest_pause_s": 0.1, "timeout_s": 0.5}
PROBABILITY = {"error": 0.1, "reset": 0.2, "truncate": 0.2, "stall": 0.03, "flip": 0.1}
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Ceph where it is installed, else moto."""
    folder = tmp_path_factory.mktemp("server")
    real = shutil.which("radosgw") and shutil.which("ceph-mon")
    with processes.ceph(folder, KEY, SECRET) if real else processes.moto(folder) as url:
        yield url


@dataclass
class Crowd:
    """Processes that read; half of them are killed at random instants and started again."""

    start: Any
    reads: Counter[int] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)
    kills: int = 0

    def run(self, limit_s: float) -> None:
        steady = [self.start(seed, EPOCHS) for seed in range(STEADY)]
        victims = [self.start(100 + seed, 10_000) for seed in range(KILLED)]
        rng, deadline = random.Random(0), time.monotonic() + limit_s
        while len(self.ended) < STEADY and not self.wrong and time.monotonic() < deadline:
            self._drain(steady)
            victim = rng.randrange(KILLED)
            # By chance in the time it takes to read a few shards: no instant is special.
            victims[victim][0].join(rng.random() * 1.2)
            self._kill(victims[victim])
            victims[victim] = self.start(200 + self.kills, 10_000)
        for pair in victims:
            self._kill(pair)
        for process, _ in steady:
            process.join(30)
        self._drain(steady)

    def _kill(self, pair: tuple[Any, Any]) -> None:
        process, said = pair
        self._listen(said)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        self.kills += 1

    def _drain(self, pairs: list[tuple[Any, Any]]) -> None:
        for _, said in pairs:
            self._listen(said)

    def _listen(self, said: Any) -> None:
        with contextlib.suppress(queue.Empty, EOFError, OSError):
            while True:
                kind, pid, *rest = said.get_nowait()
                if kind == "read":
                    self.reads[rest[0]] += 1
                if kind == "end":
                    self.ended.append((pid, *rest))
                if kind == "error" or (kind == "read" and not rest[1]):
                    self.wrong.append((kind, *rest))


def upload(url: str, options: dict[str, Any], folder: Path) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=options["endpoint_url"], region_name="us-east-1", aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )  # fmt: skip
    client.create_bucket(Bucket="bucket")
    store = open_store(url, options)
    for path in folder.iterdir():
        store.put(path.name, path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_fault_and_no_kill_costs_a_byte(endpoint: str, tmp_path: Path) -> None:
    make_dataset(tmp_path / "dataset", NUM_SHARDS, SHARD_BYTES, compression="zstd")
    options = {**OPTIONS, "access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}
    upload("s3://bucket/data", {**options, "endpoint_url": endpoint, "timeout_s": 20.0}, tmp_path / "dataset")
    config = CacheConfig(limit_bytes=14 * SHARD_BYTES, refetches=20)
    cache = tmp_path / "cache"
    plan = Plan(latency_s=0.002, probability=PROBABILITY, burst=3)
    with FaultProxy(endpoint, plan) as proxy:

        def start(seed: int, epochs: int) -> tuple[Any, Any]:
            said = SPAWN.Queue()
            given = (
                "s3://bucket/data",
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

        crowd = Crowd(start)
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
