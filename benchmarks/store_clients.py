"""What a GET costs in each client of S3: CPU-seconds of the client, and the first GET of a process with its imports.

python benchmarks/store_clients.py [--only "small"] [--gets 2000] [--large 100]

One thread, one connection, a server of this machine without latency (`paced_store.py`). "bare urllib3" is the floor: it
signs nothing. obstore returns the whole object; the others stream it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from frame import Clock, Group, Job, Result, main
from paced_store import Pace

SMALL = 1000
LARGE = 4 << 20
Get = Callable[[str], int]


def prepare(job: Job) -> None:
    (job.folder / "small").write_bytes(bytes(SMALL))
    (job.folder / "large").write_bytes(bytes(LARGE))


def ours() -> Get:
    from lightning_stream.stores import open_store

    store = open_store("s3://bucket")

    def get(name: str) -> int:
        with store.open(name) as stream:
            return sum(len(chunk) for chunk in stream)

    return get


def boto3() -> Get:
    import boto3 as client

    s3 = client.client("s3")
    return lambda name: sum(map(len, s3.get_object(Bucket="bucket", Key=name)["Body"].iter_chunks(1 << 20)))


def obstore() -> Get:
    import obstore as client
    from obstore.store import S3Store

    options = {"aws_endpoint": os.environ["AWS_ENDPOINT_URL"], "aws_region": "us-east-1"}
    store = S3Store("bucket", config=options, client_options={"allow_http": True})
    return lambda name: len(client.get(store, name).bytes())


def bare_urllib3() -> Get:
    import urllib3

    pool = urllib3.PoolManager()
    base = os.environ["AWS_ENDPOINT_URL"]
    return lambda name: len(pool.request("GET", f"{base}/bucket/{name}").data)


def small(client: Callable[[], Get], job: Job) -> Result:
    return many(client(), "small", job.sizes.gets)


def large(client: Callable[[], Get], job: Job) -> Result:
    result = many(client(), "large", job.sizes.large)
    return {**result, "CPU-s/GB": 1e6 * result["CPU ms/GET"] / LARGE}


def many(get: Get, name: str, gets: int) -> Result:
    for _ in range(3):
        get(name)
    clock = Clock()
    for _ in range(gets):
        get(name)
    result = clock.stop(gets)
    return {**result, "CPU ms/GET": 1e3 * result["cpu_s"] / gets}


def first(client: Callable[[], Get], _: Job) -> Result:
    import torch  # noqa: F401 - a trainer has it loaded

    clock = Clock()
    client()("small")
    result = clock.stop(1)
    return {**result, "first_s": result["wall_s"]}


if __name__ == "__main__":
    clients = {"ours": ours, "boto3": boto3, "obstore": obstore, "bare urllib3": bare_urllib3}

    cases = {run: {name: partial(run, client) for name, client in clients.items()} for run in (small, large, first)}
    groups = [
        Group("GETs of 1 kB", cases[small], prepare, Pace()),
        Group("GETs of 4 MiB", cases[large], prepare, Pace()),
        Group("the first GET after import torch", cases[first], prepare, Pace()),
    ]
    main(__doc__, groups, gets=(2000, 20), large=(100, 3))
