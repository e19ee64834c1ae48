"""Runs over a server whose first answers are wrong, which end at random places; each writes down what it was given.

A run's journal has a line for each batch, with the samples that had wrong bytes, and one for each state that was taken.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from servers.web import Handler, WebServer
from torch.utils.data import DataLoader

from lightning_stream import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from lightning_stream.errors import LightningStreamError

NUM_SAMPLES, WIDTH, SHARD_BYTES = 1200, 20_000, 6 << 20
FORK = multiprocessing.get_context("fork")

WORKERS: dict[str, dict[str, Any]] = {
    "here": {},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "threads": {"num_workers": 2, "workers": "threads"},
    "persistent": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "plain": {},
    "plain workers": {"num_workers": 2, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
    "forkserver": {"num_workers": 1, "multiprocessing_context": "forkserver"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "in order": {"shuffle": False},
    "ranges": {"predownload": {"by_range": True}},
    "no quick start": {"window": {"quick_start": False}},
    "excluded": {"filter": {"exclude_ids": [3, 500, 501]}, "predownload": {"by_range": True}},
    "few": {},  # a subset of a few samples of each shard
    "limit": {"cache_limit": 5 * SHARD_BYTES // 2 * 2, "shuffle": False},
    "hash": {"validate_hash": "xxh3_64", "predownload": {"by_range": True}},
}
ENDS = ("break", "islice", "close", "exception", "kill", "all", "state", "look")


def value(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, WIDTH, dtype=np.uint8)


def write(folder: Path) -> dict[str, bytes]:
    """The files of the dataset: raw shards of samples of one size, whose damage no decoder finds."""
    columns = {"id": "int", "x": f"ndarray:uint8:{WIDTH}"}
    with MDSWriter(out=folder, columns=columns, size_limit=SHARD_BYTES, hashes=["xxh3_64"]) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"id": number, "x": value(number)})
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class FirstAnswersWrong(WebServer):
    """Serves `/RUN/NAME`: the first answer for each shard, and for each range, may have wrong bytes, or too few."""

    def __init__(self, files: dict[str, bytes], damages: bool = True) -> None:
        super().__init__()
        self.files, self.damages = files, damages
        self.first: set[tuple[str, str]] = set()
        self.damaged: Counter[str] = Counter()

    def handler(self) -> type[Handler]:
        return _Damaging


class _Damaging(Handler):
    def answer(self) -> None:
        _, run, name = self.where.split("/", 2)
        content = self.owner.files.get(name)
        if content is None:
            return self.refuse(404, "no such file")
        begin, end = 0, len(content)
        wanted = self.headers.get("Range")
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            begin, end = int(first), min(end, int(last or end - 1) + 1)
        body = bytearray(content[begin:end])
        with self.owner.lock:
            key = (run, f"{name} {wanted}")
            is_first = key not in self.owner.first
            self.owner.first.add(key)
        if is_first and name.endswith(".mds") and self.owner.damages:
            body = self._damaged(body, wanted)
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", '"v1"')
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(body) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for at in range(0, len(body), 1 << 18):
            self.wfile.write(body[at : at + (1 << 18)])
            if not wanted and name.endswith(".mds"):
                time.sleep(0.006)
        return None

    def _damaged(self, body: bytearray, wanted: str | None) -> bytearray:
        rng = random.Random(f"{self.where} {wanted}")
        kind = rng.choice(["flip", "flip", "zeros", "short" if wanted else "late", "none"])
        with self.owner.lock:
            self.owner.damaged[("range: " if wanted else "shard: ") + kind] += 1
        if kind == "short":
            return body[: len(body) // 2]
        if kind == "zeros":
            return bytearray(len(body)) if wanted else body[: len(body) // 20] + bytes(len(body) - len(body) // 20)
        if kind in ("flip", "late"):
            table = 0 if wanted else 4000
            first = len(body) * 9 // 10 if kind == "late" else table
            for at in range(first, len(body), max(1, WIDTH // 3)):
                body[at] ^= 0x10
        return body


def batches_of(url: str, folder: Path, workers: str, settings: str) -> tuple[Any, Any]:
    """What a run iterates over, and the loader or dataset whose state it takes."""
    stream = Stream(remote=url, local=folder, options={"first_pause_s": 0.01})
    options = {"shuffle": True, "shuffle_seed": 5, "batch_size": 8, **SETTINGS[settings]}
    dataset = StreamingDataset(streams=[stream], **options)
    if settings == "few":
        dataset = dataset.subset(range(7, NUM_SAMPLES, 200))
    if workers.startswith("plain"):
        return DataLoader(dataset, batch_size=8, **WORKERS[workers]), dataset
    loader = StreamingDataLoader(dataset, 8, **WORKERS[workers])
    return loader, loader


def run(url: str, folder: Path, journal: Path, workers: str, settings: str, end: str, seed: int) -> None:
    """One run; a normal end is one without an error, which says that what was delivered is right."""
    rng = random.Random(seed)
    batches, owner = batches_of(url, folder, workers, settings)
    count = rng.choice([1, 2, 3, 5, 8, 20]) if end != "look" else 1
    is_plain, num_samples = workers.startswith("plain"), 0
    with journal.open("a", buffering=1) as lines:

        def note(batch: Any) -> None:
            nonlocal num_samples
            pairs = zip(batch["id"].tolist(), batch["x"].numpy(), strict=True)
            wrong = [number for number, x in pairs if not 0 <= number < NUM_SAMPLES or (x != value(number)).any()]
            num_samples += len(batch["id"])
            lines.write(json.dumps({"wrong": wrong, "samples": len(batch["id"])}) + "\n")
            time.sleep(rng.choice([0, 0, 0.05]))

        def take_state() -> None:
            state = owner.state_dict(num_samples, True) if is_plain else owner.state_dict()
            lines.write(json.dumps({"state": state["position"]}) + "\n")

        iterator = iter(batches)
        if end == "look":
            note(next(iter(batches)))
            time.sleep(rng.choice([0, 0.3]))
        if end == "islice":
            for batch in itertools.islice(iterator, count):
                note(batch)
            return
        for number, batch in enumerate(iterator, 1):
            note(batch)
            if end == "state" and number % 2:
                take_state()
            if end == "exception" and number == count:
                take_state()
                raise RuntimeError("the user's own")
            if end == "kill" and number == count:
                take_state()
                os.kill(os.getpid(), signal.SIGKILL)
            if end in ("break", "close", "state") and number == count:
                break
        if end == "close" and hasattr(iterator, "close"):
            iterator.close()


def _child(*arguments: Any) -> None:
    try:
        run(*arguments)
    except (LightningStreamError, RuntimeError) as error:
        print(f"ended: {type(error).__name__}: {error}"[:300], flush=True)
        sys.exit(1)


def check(server: FirstAnswersWrong, folder: Path, cases: list[tuple[str, str, str]], seed: int) -> Counter[str]:
    """Run all of these; AssertionError where a run ended well, or took a state, after wrong samples."""
    counts: Counter[str] = Counter()
    for number, case in enumerate(cases):
        journal, name = folder / f"journal-{number}", f"run-{seed}-{number}"
        arguments = (f"{server.url}/{name}", folder / name, journal, *case, seed + number)
        process = FORK.Process(target=_child, args=arguments)
        process.start()
        process.join(120)
        assert process.exitcode is not None, f"{case} hangs"
        lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        wrong = 0
        for line in lines:
            if "state" in line:
                counts["states"] += 1
                assert not wrong, f"{case}, seed {seed + number}: a state after {wrong} wrong samples"
            else:
                counts["batches"] += 1
                counts["samples"] += line["samples"]
                counts["wrong samples"] += len(line["wrong"])
                wrong += len(line["wrong"])
        counts["runs"] += 1
        ended = {0: "well", 1: "with an error", -signal.SIGKILL: "killed"}[process.exitcode]
        counts[f"ended {ended}"] += 1
        counts[f"ended {ended} after wrong samples"] += wrong > 0
        assert process.exitcode or not wrong, f"{case}, seed {seed + number}: ended well after {wrong} wrong samples"
    return counts


def cases(count: int, seed: int, slow_starts: int = 0) -> list[tuple[str, str, str]]:
    """Random combinations of workers, settings and ends; so many of them with workers that start slowly."""
    rng = random.Random(seed)
    quick = [name for name in WORKERS if name not in ("spawn", "forkserver")]
    found = [(rng.choice(quick), rng.choice(list(SETTINGS)), rng.choice(ENDS)) for _ in range(count - slow_starts)]
    slow = [
        (rng.choice(["spawn", "forkserver"]), rng.choice(list(SETTINGS)), rng.choice(ENDS)) for _ in range(slow_starts)
    ]
    return [*found, *slow]
