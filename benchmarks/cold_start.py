"""The first epoch from an S3 store into an empty cache: time to the first batch, throughput, CPU per GB.

python benchmarks/cold_start.py [--rounds 3] [--pace 25ms slow link unlimited] [--order shuffled plain] [--workers 2]
    [--row-kb 2] [--shard-mb 8] [--shards 50] [--batch 256] [--tls]

All contenders read the same shards of rows through as many workers (0: in this process) from a server of this machine
(`paced_store.py`): with 25 ms to the first byte and 60 MB/s on each connection; "slow", with a tenth of that; "link",
with 100 MB/s for all connections together; or as fast as it goes. The column "of link" compares with these 100 MB/s or,
without such a bound, with four connections for each worker. The clock begins after the imports, and counts CPU of the
process and its workers. "bare boto3" is the floor: as many threads in as many processes, each a loop of `get_object`
that writes what it reads to a file; "ours, fetch" brings the shards, verified, into a cache likewise, and makes no
batches. "ours, ranges" is `start_by_range=True`. "before" is a former commit, where LIGHTNING_STREAM_BEFORE names its
checkout. Peers run where the environment names their Pythons:

    LIGHTNING_STREAM_MOSAIC_PYTHON=/path/to/python  LIGHTNING_STREAM_LITDATA_PYTHON=/path/to/python
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from paced_store import CERTIFICATE, Pace, make_certificate, serve

PYTHONS = {"mosaic": "LIGHTNING_STREAM_MOSAIC_PYTHON", "litdata": "LIGHTNING_STREAM_LITDATA_PYTHON"}
BEFORE = "LIGHTNING_STREAM_BEFORE"
THREADS = 4
PACES = {
    "25ms": Pace(0.025, 60e6),
    "slow": Pace(0.025, 6e6),
    "link": Pace(0.025, 60e6, 100e6),
    "unlimited": Pace(),
}


@dataclass(frozen=True)
class Case:
    """What is read: rows of so many bytes, in so many shards, by so many workers in batches of one size."""

    row_bytes: int = 2048
    shard_bytes: int = 8 << 20
    shards: int = 50
    batch: int = 256
    workers: int = 2
    tls: bool = False

    @property
    def samples(self) -> int:
        """Rows of the dataset; each also takes four bytes in its shard's table of offsets."""
        return self.shards * (self.shard_bytes // (self.row_bytes + 8))


CASE = Case(**json.loads(os.environ.get("COLD_START_CASE", "{}")))


def prepare(folder: Path, case: Case) -> None:
    """The same samples as MDS shards; as LitData's chunks where its Python is at hand."""
    import numpy as np

    from lightning_stream import MDSWriter

    rng = np.random.default_rng(0)
    columns = {"x": f"ndarray:uint8:{case.row_bytes}"}
    with MDSWriter(out=folder / "mds", columns=columns, size_limit=case.shard_bytes) as writer:
        for _ in range(case.shards):
            writer.write_batch({"x": rng.integers(0, 256, (case.samples // case.shards, case.row_bytes), np.uint8)})
    if python := os.environ.get(PYTHONS["litdata"]):
        env = {**os.environ, "COLD_START_CASE": json.dumps(asdict(case))}
        subprocess.run([python, __file__, "--litdata", str(folder)], check=True, capture_output=True, env=env)


def write_litdata(folder: Path, samples: int, sample_bytes: int, chunk_bytes: int) -> None:
    """Random samples as LitData's chunks."""
    import litdata
    import numpy as np

    rng = np.random.default_rng(0)
    writer = litdata.streaming.Cache(str(folder / "litdata"), chunk_bytes=chunk_bytes)
    for k in range(samples):
        writer[k] = {"x": rng.integers(0, 256, sample_bytes, np.uint8)}
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
    loader = StreamingDataLoader(dataset, batch_size=CASE.batch, num_workers=CASE.workers)
    return clock.read(batch["x"] for batch in loader)


def ours_by_range(scratch: Path, shuffled: bool) -> dict:
    return ours(scratch, shuffled, start_by_range=True)


def mosaic(scratch: Path, shuffled: bool) -> dict:
    from streaming import StreamingDataLoader, StreamingDataset

    clock = Clock()
    dataset = StreamingDataset(
        remote="s3://bucket/mds", local=str(scratch), shuffle=shuffled, batch_size=CASE.batch, shuffle_algo="py1e"
    )
    loader = StreamingDataLoader(dataset, batch_size=CASE.batch, num_workers=CASE.workers)
    return clock.read(batch["x"] for batch in loader)


def litdata(scratch: Path, shuffled: bool) -> dict:
    import litdata  # noqa: F401

    clock = Clock()
    return clock.read(batch["x"] for batch in litdata_loader(scratch, CASE.batch, CASE.workers, shuffled))


def litdata_loader(scratch: Path, batch: int, workers: int, shuffled: bool = True):
    """LitData's loader of its chunks in the bucket."""
    import litdata as peer
    from litdata.streaming import downloader

    # Its fast path, which this machine's server would end otherwise, without TLS or with a certificate of its own.
    options = {"allow_http": True, "allow_invalid_certificates": True}
    downloader._OBSTORE_CLIENT_OPTIONS.update(options)  # noqa: SLF001
    dataset = peer.StreamingDataset(
        "s3://bucket/litdata",
        cache_dir=str(scratch),
        shuffle=shuffled,
        drop_last=False,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    return peer.StreamingDataLoader(dataset, batch_size=batch, num_workers=workers)


def bare_boto3(scratch: Path, shuffled: bool) -> dict:  # noqa: ARG001 - in index order, whatever is asked
    return _in_processes(_get_all, scratch)


def ours_fetch(scratch: Path, shuffled: bool) -> dict:  # noqa: ARG001
    return _in_processes(_fetch_all, scratch)


def _in_processes(work: Callable[[Path, range], None], scratch: Path) -> dict:
    import boto3  # noqa: F401

    import lightning_stream.cache  # noqa: F401

    num_shards = len(json.loads((_data() / "index.json").read_bytes())["shards"])
    clock, processes = Clock(), max(1, CASE.workers)
    fork = multiprocessing.get_context("fork")
    parts = [fork.Process(target=work, args=(scratch, range(k, num_shards, processes))) for k in range(processes)]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    return clock.stop(CASE.samples)


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
    "before": ours,
    "ours, ranges": ours_by_range,
    "ours, fetch": ours_fetch,
    "bare boto3": bare_boto3,
    "mosaic": mosaic,
    "litdata": litdata,
}


def _python(contender: str) -> str | None:
    if contender == "before" and BEFORE not in os.environ:
        return None
    variable = PYTHONS.get(contender)
    return sys.executable if variable is None else os.environ.get(variable)


def environment(endpoint: str, scratch: str) -> dict[str, str]:
    """Of a process that reads from this machine's server, whatever its client."""
    names = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
    settings = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    env = {**os.environ, **dict.fromkeys(names, endpoint), **settings, "OMP_NUM_THREADS": "1", "TMPDIR": scratch}
    return env | {
        "AWS_ALLOW_HTTP": "true", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "PYTHONWARNINGS": "ignore"
    }  # fmt: skip


def _run(contender: str, endpoint: str, data: Path, order: str, case: Case) -> dict:
    python = _python(contender)
    assert python is not None
    with tempfile.TemporaryDirectory(dir=data) as scratch:
        env = environment(endpoint, scratch) | {
            "COLD_START_DATA": str(data),
            "COLD_START_CASE": json.dumps(asdict(case)),
        }
        if case.tls:
            env["AWS_CA_BUNDLE"] = str(data / CERTIFICATE)
        if contender == "before":
            env["PYTHONPATH"] = os.environ[BEFORE]
        _counts(endpoint)
        command = [python, __file__, "--contender", contender, "--scratch", scratch, "--order", order]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)
        if done.returncode:
            sys.stderr.write(f"{contender} failed:\n{done.stderr[-2000:]}\n")
            return {}
        return {**json.loads(done.stdout.splitlines()[-1]), **_counts(endpoint)}


def _counts(endpoint: str) -> dict:
    """Requests and bytes since it was called last."""
    trusting = ssl._create_unverified_context()  # noqa: SLF001 - of this machine's own server
    context = trusting if endpoint.startswith("https") else None
    return json.loads(urllib.request.urlopen(f"{endpoint}/_counts", context=context).read())


def _table(rounds: list[dict[str, dict]], pace: Pace, case: Case) -> str:
    link = (pace.all_bytes_per_s or max(1, case.workers) * THREADS * (pace.bytes_per_s or 0)) / 1e6
    lines = [f"{'':14}{'first batch s':>15}{'MB/s':>8}{'CPU-s/GB':>10}{'GETs':>7}{'GB sent':>9}{'of link':>9}"]
    for name in rounds[0]:
        runs = [one[name] for one in rounds if one[name]]
        if not runs:
            lines.append(f"{name:14}{'failed':>15}")
            continue
        size = case.row_bytes * case.samples / 1e9
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
    parser.add_argument("--workers", type=int, nargs="+", default=[Case.workers], help="processes that read")
    parser.add_argument("--row-kb", type=int, default=Case.row_bytes >> 10)
    parser.add_argument("--shard-mb", type=int, default=Case.shard_bytes >> 20)
    parser.add_argument("--shards", type=int, default=Case.shards)
    parser.add_argument("--batch", type=int, default=Case.batch)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--litdata", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.litdata:
        write_litdata(args.litdata, CASE.samples, CASE.row_bytes, CASE.shard_bytes)
        return
    if args.contender:
        found = CONTENDERS[args.contender](args.scratch, args.order == ["shuffled"])
        sys.stdout.write("\n" + json.dumps(found) + "\n")
        return
    shape = (args.row_kb << 10, args.shard_mb << 20, args.shards, args.batch)
    chosen = [name for name in args.only if _python(name)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, Case(*shape))
        if args.tls:
            make_certificate(folder)
        for pace, order, workers in itertools.product(args.pace, args.order, args.workers):
            case = Case(*shape, workers, args.tls)
            with serve(folder, PACES[pace], tls=args.tls) as endpoint:
                rounds = [
                    {name: _run(name, endpoint, folder, order, case) for name in chosen} for _ in range(args.rounds)
                ]
            sys.stdout.write(
                f"\n{order}, {pace}, {workers} workers: medians of {args.rounds} rounds\n"
                f"{_table(rounds, PACES[pace], case)}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
