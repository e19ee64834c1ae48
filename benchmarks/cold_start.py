"""The first epoch from an S3 store into an empty cache: time to the first batch, throughput, CPU per GB.

python benchmarks/cold_start.py [--rounds 3] [--pace 25ms slow unlimited] [--order shuffled plain] [--workers 2]

All contenders read the same gigabyte through two workers from a server of this machine (`paced_store.py`): with 25 ms
to the first byte and 60 MB/s on each connection; "slow", with a tenth of that, where no CPU is scarce; or as fast as it
goes. The last column compares with the link: connections of that speed, four for each worker. The clock begins
after the imports, and counts CPU of the process and its workers. "bare boto3" is the floor: as many threads in as many
processes, each a loop of `get_object` that writes what it reads to a file; "ours, fetch" brings the shards, verified,
into a cache likewise, and makes no batches. "ours, ranges" is `start_by_range=True`. Peers run where the environment
names their Pythons:

    LIGHTNING_STREAM_MOSAIC_PYTHON=/path/to/python  LIGHTNING_STREAM_LITDATA_PYTHON=/path/to/python
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paced_store import Pace, serve

PYTHONS = {"mosaic": "LIGHTNING_STREAM_MOSAIC_PYTHON", "litdata": "LIGHTNING_STREAM_LITDATA_PYTHON"}
WORKERS = int(os.environ.get("COLD_START_WORKERS", "2"))
PACES = {"25ms": Pace(0.025, 60e6), "slow": Pace(0.025, 6e6), "unlimited": Pace()}
WIDTH, SAMPLES, SHARD_BYTES, BATCH, THREADS = 1 << 16, 16384, 1 << 24, 32, 4


def prepare(folder: Path) -> None:
    """The same samples as MDS shards; as LitData's chunks where its Python is at hand."""
    import numpy as np

    from lightning_stream import MDSWriter

    rng = np.random.default_rng(0)
    columns = {"x": f"ndarray:uint8:{WIDTH}"}
    with MDSWriter(out=folder / "mds", columns=columns, size_limit=SHARD_BYTES) as writer:
        for _ in range(SAMPLES):
            writer.write({"x": rng.integers(0, 256, WIDTH, np.uint8)})
    if python := os.environ.get(PYTHONS["litdata"]):
        subprocess.run([python, __file__, "--litdata", str(folder)], check=True, capture_output=True)


def _prepare_litdata(folder: Path) -> None:
    import litdata
    import numpy as np

    rng = np.random.default_rng(0)
    writer = litdata.streaming.Cache(str(folder / "litdata"), chunk_bytes=SHARD_BYTES)
    for k in range(SAMPLES):
        writer[k] = {"x": rng.integers(0, 256, WIDTH, np.uint8)}
    writer.done()
    writer.merge()


class Clock:
    """Wall and CPU seconds, those of children that ended included."""

    def __init__(self) -> None:
        self.begun, self._cpu, self.first_s = time.perf_counter(), self._used(), 0.0

    @staticmethod
    def _used() -> float:
        both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in both)

    def read(self, batches) -> dict:
        """Take all batches, and give what it took."""
        count = 0
        for x in batches:
            self.first_s = self.first_s or time.perf_counter() - self.begun
            count += len(x)
        return self.stop(count)

    def stop(self, count: int) -> dict:
        wall = time.perf_counter() - self.begun
        return {"samples": count, "first": self.first_s, "wall": wall, "cpu": self._used() - self._cpu}


def ours(scratch: Path, shuffled: bool, **options: bool) -> dict:
    import boto3  # noqa: F401 - the peers have it loaded too
    import torch  # noqa: F401

    from lightning_stream import StreamingDataLoader, StreamingDataset

    clock = Clock()
    dataset = StreamingDataset(remote="s3://bucket/mds", local=scratch, shuffle=shuffled, **options)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)
    return clock.read(batch["x"] for batch in loader)


def ours_by_range(scratch: Path, shuffled: bool) -> dict:
    return ours(scratch, shuffled, start_by_range=True)


def mosaic(scratch: Path, shuffled: bool) -> dict:
    from streaming import StreamingDataLoader, StreamingDataset

    clock = Clock()
    dataset = StreamingDataset(
        remote="s3://bucket/mds", local=str(scratch), shuffle=shuffled, batch_size=BATCH, shuffle_algo="py1e"
    )
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)
    return clock.read(batch["x"] for batch in loader)


def litdata(scratch: Path, shuffled: bool) -> dict:
    import litdata as peer
    from litdata.streaming import downloader

    # Its fast path, which the server's missing TLS would end otherwise.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001
    clock = Clock()
    dataset = peer.StreamingDataset(
        "s3://bucket/litdata",
        cache_dir=str(scratch),
        shuffle=shuffled,
        drop_last=False,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    loader = peer.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)
    return clock.read(batch["x"] for batch in loader)


def bare_boto3(scratch: Path, shuffled: bool) -> dict:  # noqa: ARG001 - in index order, whatever is asked
    return _in_processes(_get_all, scratch)


def ours_fetch(scratch: Path, shuffled: bool) -> dict:  # noqa: ARG001
    return _in_processes(_fetch_all, scratch)


def _in_processes(work: Callable[[Path, range], None], scratch: Path) -> dict:
    import boto3  # noqa: F401

    import lightning_stream.cache  # noqa: F401

    num_shards = len(json.loads((_data() / "index.json").read_bytes())["shards"])
    clock = Clock()
    fork = multiprocessing.get_context("fork")
    parts = [fork.Process(target=work, args=(scratch, range(k, num_shards, WORKERS))) for k in range(WORKERS)]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    return clock.stop(SAMPLES)


def _data() -> Path:
    return Path(os.environ["COLD_START_DATA"]) / "mds"


def _fetch_all(scratch: Path, numbers: range) -> None:
    from lightning_stream.cache import ShardCache
    from lightning_stream.stores import open_store

    cache = ShardCache(open_store("s3://bucket/mds"), scratch)
    index = cache.index()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(cache.ensure, map(index.entry, numbers)))


def _get_all(scratch: Path, numbers: range) -> None:
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(max_pool_connections=THREADS))

    def get(number: int) -> None:
        name = f"shard.{number:05}.mds"
        body = client.get_object(Bucket="bucket", Key=f"mds/{name}")["Body"]
        with (scratch / name).open("wb", buffering=0) as file:
            while chunk := body.read(1 << 20):
                file.write(chunk)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(get, numbers))


CONTENDERS = {
    "ours": ours,
    "ours, ranges": ours_by_range,
    "ours, fetch": ours_fetch,
    "bare boto3": bare_boto3,
    "mosaic": mosaic,
    "litdata": litdata,
}


def _python(contender: str) -> str | None:
    variable = PYTHONS.get(contender)
    return sys.executable if variable is None else os.environ.get(variable)


def _run(contender: str, endpoint: str, data: Path, order: str, workers: int) -> dict:
    python = _python(contender)
    assert python is not None
    with tempfile.TemporaryDirectory(dir=data) as scratch:
        names = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
        settings = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        env = {**os.environ, **dict.fromkeys(names, endpoint), **settings, "OMP_NUM_THREADS": "1"}
        env |= {
            "COLD_START_DATA": str(data),
            "COLD_START_WORKERS": str(workers),
            "PYTHONWARNINGS": "ignore",
            "TMPDIR": scratch,
        }
        env |= {"AWS_ALLOW_HTTP": "true", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        urllib.request.urlopen(f"{endpoint}/_counts").read()
        command = [python, __file__, "--contender", contender, "--scratch", scratch, "--order", order]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)
        if done.returncode:
            sys.stderr.write(f"{contender} failed:\n{done.stderr[-2000:]}\n")
            return {}
        counts = json.loads(urllib.request.urlopen(f"{endpoint}/_counts").read())
        return {**json.loads(done.stdout.splitlines()[-1]), **counts}


def _table(rounds: list[dict[str, dict]], pace: Pace, workers: int) -> str:
    link = workers * THREADS * (pace.bytes_per_s or 0) / 1e6
    lines = [f"{'':14}{'first batch s':>15}{'MB/s':>8}{'CPU-s/GB':>10}{'GETs':>7}{'GB sent':>9}{'of link':>9}"]
    for name in rounds[0]:
        runs = [one[name] for one in rounds if one[name]]
        if not runs:
            lines.append(f"{name:14}{'failed':>15}")
            continue
        size = WIDTH * SAMPLES / 1e9
        first, wall, cpu = (statistics.median(run[key] for run in runs) for key in ("first", "wall", "cpu"))
        gets, sent = runs[0]["gets"], runs[0]["bytes"] / 1e9
        lines.append(f"{name:14}{first:15.2f}{size * 1e3 / wall:8.0f}{cpu / size:10.2f}{gets:7d}{sent:9.2f}")
        lines[-1] += f"{size * 1e3 / wall / link:9.2f}" if link else ""
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", nargs="+", choices=PACES, default=list(PACES))
    parser.add_argument("--order", nargs="+", choices=("shuffled", "plain"), default=["shuffled", "plain"])
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes that read")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--litdata", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.litdata:
        _prepare_litdata(args.litdata)
        return
    if args.contender:
        found = CONTENDERS[args.contender](args.scratch, args.order == ["shuffled"])
        sys.stdout.write("\n" + json.dumps(found) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for pace in args.pace:
            with serve(Path(folder), PACES[pace]) as endpoint:
                for order in args.order:
                    chosen = [name for name in args.only if _python(name)]
                    rounds = [
                        {name: _run(name, endpoint, Path(folder), order, args.workers) for name in chosen}
                        for _ in range(args.rounds)
                    ]
                    sys.stdout.write(
                        f"\n{order}, {pace}, {args.workers} workers: medians of {args.rounds} rounds\n"
                        f"{_table(rounds, PACES[pace], args.workers)}\n"
                    )
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
