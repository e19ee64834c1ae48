"""What an S3 client costs in CPU: our store (boto3), a bare boto3 loop, and obstore (Rust).

python benchmarks/s3_clients.py [--rounds 3]

From a server of this machine (`paced_store.py`), as fast as it goes. Seconds until a first small GET was answered, the
client's making included but not the imports; milliseconds for each of 400 GETs of 32 KiB, one after another; and
seconds per GB for 16 objects of 16 MiB into files, by four threads. obstore runs where the environment names a Python
that has it: LIGHTNING_STREAM_OBSTORE_PYTHON=/path/to/python
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from paced_store import Pace, serve

NUM_OBJECTS, OBJECT_BYTES, SMALL_BYTES, NUM_SMALL, THREADS, CHUNK_BYTES = 16, 1 << 24, 1 << 15, 400, 4, 1 << 20
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
Client = tuple[Callable[[str], object], Callable[[str, Path], object]]


def ours() -> Callable[[], Client]:
    import boto3  # noqa: F401

    import lightning_stream.stores.s3  # noqa: F401
    from lightning_stream.stores import open_store

    def make() -> Client:
        store = open_store("s3://bucket")
        return lambda name: store.get_range(name, 0, SMALL_BYTES), lambda name, to: store.get(name, to, OBJECT_BYTES)

    return make


def bare_boto3() -> Callable[[], Client]:
    import boto3

    def make() -> Client:
        client = boto3.client("s3")

        def small(name: str) -> bytes:
            wanted = {"Bucket": "bucket", "Key": name, "Range": f"bytes=0-{SMALL_BYTES - 1}"}
            return client.get_object(**wanted)["Body"].read()

        def whole(name: str, to: Path) -> None:
            body = client.get_object(Bucket="bucket", Key=name)["Body"]
            with to.open("wb", buffering=0) as file:
                while chunk := body.read(CHUNK_BYTES):
                    file.write(chunk)

        return small, whole

    return make


def obstore() -> Callable[[], Client]:
    import obstore as peer
    from obstore.store import S3Store

    def make() -> Client:
        store = S3Store("bucket", endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})

        def whole(name: str, to: Path) -> None:
            with to.open("wb", buffering=0) as file:
                for chunk in peer.get(store, name).stream(min_chunk_size=CHUNK_BYTES):
                    file.write(chunk)

        return lambda name: bytes(peer.get_range(store, name, start=0, end=SMALL_BYTES)), whole

    return make


CLIENTS = {"ours": ours, "bare boto3": bare_boto3, "obstore": obstore}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(name: str, scratch: Path) -> dict[str, float]:
    """CPU of one client, in this process."""
    names = [f"{number:02}" for number in range(NUM_OBJECTS)]
    make = CLIENTS[name]()
    times = [_cpu_s()]
    small, whole = make()
    small(names[0])
    times.append(_cpu_s())
    for number in range(NUM_SMALL):
        small(names[number % NUM_OBJECTS])
    times.append(_cpu_s())
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda name: whole(name, scratch / name), names))
    times.append(_cpu_s())
    first, many, bulk = (after - before for before, after in pairwise(times))
    return {"first": first, "small": 1e3 * many / NUM_SMALL, "bulk": 1e9 * bulk / NUM_OBJECTS / OBJECT_BYTES}


def _run(name: str, endpoint: str) -> dict[str, float]:
    python = os.environ["LIGHTNING_STREAM_OBSTORE_PYTHON"] if name == "obstore" else sys.executable
    env = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": endpoint, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as scratch:
        command = [python, __file__, "--client", name, "--scratch", scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        sys.stdout.write(json.dumps(measure(args.client, args.scratch)) + "\n")
        return
    names = [name for name in CLIENTS if name != "obstore" or "LIGHTNING_STREAM_OBSTORE_PYTHON" in os.environ]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_OBJECTS):
            (Path(folder) / f"{number:02}").write_bytes(os.urandom(OBJECT_BYTES))
        with serve(Path(folder), Pace()) as endpoint:
            rounds = [{name: _run(name, endpoint) for name in names} for _ in range(args.rounds)]
    sys.stdout.write(f"CPU, medians of {args.rounds}\n{'':12}{'first GET s':>13}{'GET ms':>9}{'s/GB':>8}\n")
    for name in names:
        first, small, bulk = (statistics.median(one[name][key] for one in rounds) for key in ("first", "small", "bulk"))
        sys.stdout.write(f"{name:12}{first:13.3f}{small:9.2f}{bulk:8.2f}\n")


if __name__ == "__main__":
    main()
