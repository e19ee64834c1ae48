"""Processes that read while others are killed beside them."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servers.s3 import bucket_at

from lightning_stream.stores import open_store

STEADY, KILLED = 4, 4


@dataclass
class Crowd:
    """Processes that read; half of them are killed at random instants and started again.

    Attributes:
        start: From a number and how many epochs to read, to a process and the queue on which it speaks.
        epochs: How many those read that are left alone.
        reads: What was said to be read, counted.
        delivered: Sample ids by epoch, as those said that are left alone.
        wrong: What must not have happened.
        ended: What those said at their end that are left alone.
    """

    start: Any
    epochs: int
    reads: Counter[int] = field(default_factory=Counter)
    delivered: dict[int, list[int]] = field(default_factory=dict)
    wrong: list[Any] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)
    kills: int = 0

    def run(self, limit_s: float) -> None:
        steady = [self.start(seed, self.epochs) for seed in range(STEADY)]
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
        self._listen(said, is_steady=False)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        self.kills += 1

    def _drain(self, pairs: list[tuple[Any, Any]]) -> None:
        for _, said in pairs:
            self._listen(said)

    def _listen(self, said: Any, *, is_steady: bool = True) -> None:
        with contextlib.suppress(queue.Empty, EOFError, OSError):
            while True:
                kind, pid, *rest = said.get_nowait()
                if kind == "read":
                    self.reads[rest[0]] += 1
                if kind == "epoch" and is_steady:
                    self.delivered.setdefault(rest[0], []).extend(rest[1])
                if kind == "end":
                    self.ended.append((pid, *rest))
                if kind == "error" or (kind == "read" and not rest[1]):
                    self.wrong.append((kind, *rest))


def upload(url: str, options: dict[str, Any], folder: Path) -> None:
    """Put a folder's files into a new bucket."""
    bucket_at(options["endpoint_url"])
    store = open_store(url, options)
    for path in folder.iterdir():
        store.put(path.name, path)
