"""Training through hours of bad luck: every sample of every epoch comes exactly once, bit-equal.

pytest -m slow -s tests/cache/test_chaos.py tests/test_chaos.py      prints its counts; with Ceph where it is installed
"""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("boto3")

from servers import early_runs  # noqa: E402
from servers.crowd import STEADY, Crowd, upload  # noqa: E402
from servers.fault_proxy import FaultProxy, Plan  # noqa: E402
from servers.s3 import options_of  # noqa: E402
from servers.workers import train  # noqa: E402

from lightning_stream import MDSWriter, Stream, StreamingDataLoader, StreamingDataset, World  # noqa: E402

NUM_SAMPLES, SAMPLE_BYTES, SHARD_BYTES, EPOCHS = 3000, 2000, 50_000, 8
LIMIT_BYTES = 90 * SHARD_BYTES  # of 120 shards; five orders are read at once, each with an active set of its own
OPTIONS = {"retries": 40, "first_pause_s": 0.005, "longest_pause_s": 0.1, "timeout_s": 0.5}
PROBABILITY = {"error": 0.1, "reset": 0.2, "truncate": 0.2, "stall": 0.03, "flip": 0.1}
ODD = {"page": 0.1, "empty": 0.05, "gone": 0.05, "short": 0.05, "unversioned": 0.05}  # where a body is resumed
FORK = multiprocessing.get_context("fork")
_LOADED = (StreamingDataLoader, World)  # before a fork beside threads, which may be importing


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SAMPLE_BYTES // 2) * 2


def dataset(folder: Path, options: dict[str, Any], seed: int) -> StreamingDataset:
    stream = Stream(remote="s3://bucket/data", local=folder, options=options)
    found = StreamingDataset(
        streams=[stream], shuffle=True, shuffle_seed=seed, window=2, num_canonical_nodes=2, predownload=40,
        cache_limit=LIMIT_BYTES,
    )  # fmt: skip
    # One in ten answers has a bit flipped: twice in a row is no rarity here.
    defaults = found.reader.shards.defaults
    found.reader.shards.defaults = replace(defaults, config=replace(defaults.config, refetches=20))
    return found


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside the proxy's thread
def test_no_fault_and_no_kill_costs_a_sample(s3_endpoint: str, tmp_path: Path) -> None:
    with MDSWriter(
        out=tmp_path / "data", columns={"id": "int", "x": "bytes"}, size_limit=SHARD_BYTES, compression="zstd",
        hashes=["xxh3_64"],
    ) as writer:  # fmt: skip
        for number in range(NUM_SAMPLES):
            writer.write({"id": number, "x": content(number)})
    options = {**options_of(s3_endpoint), **OPTIONS}
    upload("s3://bucket/data", {**options, "timeout_s": 20.0}, tmp_path / "data")
    with FaultProxy(s3_endpoint, Plan(latency_s=0.002, probability=PROBABILITY, resumed=ODD, burst=3)) as proxy:
        reach = {**options, "endpoint_url": proxy.url}

        def start(number: int, epochs: int) -> tuple[Any, Any]:
            """The first ranks train together; those that are killed read the same cache in orders of their own."""
            rank, seed = (number, 1) if number < STEADY else (number % 4, number)
            said = FORK.Queue()
            given = (dataset(tmp_path / "cache", reach, seed), rank, STEADY, epochs, content, said)
            process = FORK.Process(target=train, args=given, daemon=True)
            process.start()
            return process, said

        crowd = Crowd(start, EPOCHS)
        crowd.run(limit_s=700)
        counts, faults = dict(proxy.counts), proxy.faults()
    print(f"\nfaults {faults} {counts}; kills {crowd.kills}; epochs {sorted(crowd.delivered)}; ends {crowd.ended}")
    assert crowd.wrong == []
    assert len(crowd.ended) == STEADY
    assert sorted(crowd.delivered) == list(range(EPOCHS))
    assert all(sorted(ids) == list(range(NUM_SAMPLES)) for ids in crowd.delivered.values())
    assert all(descriptors <= 20 and mebibytes <= 64 for _, descriptors, mebibytes in crowd.ended)
    assert faults >= 2000
    assert sum(counts.get(name, 0) for name in ODD) >= 200
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").glob("shard.*"))
    assert kept <= LIMIT_BYTES


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside the server's threads
def test_no_run_ends_well_and_no_state_is_taken_after_wrong_samples(tmp_path: Path) -> None:
    """The first answer for each shard and range is wrong; runs end at random places."""
    with early_runs.FirstAnswersWrong(early_runs.write(tmp_path / "data")) as server:
        counts = early_runs.check(server, tmp_path, early_runs.cases(24, 2), 0)
    print(f"\n{dict(counts)} {dict(server.damaged)}")
    assert counts["runs"] == 24
    assert counts["states"] >= 5
    assert counts["ended with an error after wrong samples"] >= 3
    assert counts["ended well"] >= 8
