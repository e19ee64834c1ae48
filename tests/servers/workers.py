"""What the processes of the cache's tests do; importable, so that they can be started afresh."""

from __future__ import annotations

import os
import random
import traceback
from pathlib import Path
from typing import Any

from servers.shards import shard_content

from lightning_stream.cache import CacheConfig, ShardCache
from lightning_stream.stores import open_store


def read_all(
    url: str,
    options: dict[str, Any],
    folder: Path,
    config: CacheConfig,
    shard_bytes: int,
    seed: int,
    epochs: int,
    said: Any,
) -> None:
    """Read every shard `epochs` times in an order of its own and compare its bytes; says ("read", pid, shard) and more.

    Says ("error", text) for what was raised, and at the end ("end", descriptors grown, MiB grown).
    """
    try:
        cache = ShardCache(open_store(url, options), folder, config)
        index = cache.index()
        order = list(range(index.num_shards)) * epochs
        random.Random(seed).shuffle(order)
        before = None
        for number in order:
            with cache.lease(index.entry(number)) as lease:
                content = (lease.folder / index.entry(number).raw.basename).read_bytes()
            said.put(("read", os.getpid(), number, content == shard_content(number, shard_bytes)))
            before = before or footprint()
        now = footprint()
        before = before or now
        said.put(("end", os.getpid(), now[0] - before[0], now[1] - before[1]))
    except BaseException as error:  # noqa: BLE001 (the parent judges)
        where = traceback.extract_tb(error.__traceback__)[-1]
        said.put(("error", os.getpid(), type(error).__name__, f"{error} at {where.filename}:{where.lineno}"))


def train(dataset: Any, rank: int, num_ranks: int, epochs: int, content: Any, said: Any) -> None:
    """Be one rank that reads `epochs` epochs and compares each sample's bytes; says ("epoch", pid, epoch, ids).

    Also ("error", text) for what was raised or wrong, and at the end ("end", descriptors grown, MiB grown).
    """
    from lightning_stream import StreamingDataLoader, World

    try:
        loader = StreamingDataLoader(dataset, 20, world=World(rank, num_ranks, num_ranks), tail="exact")
        before = None
        for epoch in range(epochs):
            ids: list[int] = []
            for batch in loader:
                ids += batch["id"].tolist()
                wrong = [k for k, x in zip(batch["id"].tolist(), batch["x"], strict=True) if bytes(x) != content(k)]
                if wrong:
                    said.put(("error", os.getpid(), f"samples {wrong} have other bytes"))
            said.put(("epoch", os.getpid(), epoch, ids))
            before = before or footprint()
        now = footprint()
        before = before or now
        said.put(("end", os.getpid(), now[0] - before[0], now[1] - before[1]))
    except BaseException as error:  # noqa: BLE001 (the parent judges)
        where = traceback.extract_tb(error.__traceback__)[-1]
        said.put(("error", os.getpid(), type(error).__name__, f"{error} at {where.filename}:{where.lineno}"))


def footprint() -> tuple[int, int]:
    """Open descriptors, and resident MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(list(Path("/proc/self/fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE") >> 20
