"""``lint``: whether every sample of a dataset can be decoded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import FoundDataset, Reading, add_source, datasets_of
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.processes import ShardRange, num_processes, run_partitions
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import CacheDefaults, Stream
from lightning_stream.reading.stream_shards import ReaderConfig
from lightning_stream.shared_files import scratch_folder
from lightning_stream.stores import LocalStore

HELP = "decode every sample, images included, in several processes"
EXAMPLES = """exit codes: 0 if all samples can be decoded, 1 if not

examples:
  lightning-stream lint s3://bucket/train
  lightning-stream lint s3://bucket/train --resume lint.jsonl   # again with the same file: only the rest
"""
_PARTITION_BYTES, _AT_ONCE = 64 << 20, 64
_REMEDY = "use fewer --num-workers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lint``."""
    add_source(parser)
    parser.add_argument("--num-workers", type=int, metavar="N", help="processes (default: one per processor)")
    parser.add_argument(
        "--resume", metavar="FILE", help="note finished shards in this file, and skip those noted there"
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Decode all samples of every dataset at the path or URL."""
    workers = num_processes(options.num_workers)
    out.data = {"datasets": []}
    for dataset in datasets_of(options):
        bad = _lint(dataset, options, workers, out)
        out.data["datasets"].append({"url": dataset.store.url, "bad": bad})
        verdict, done = (f"BAD ({len(bad):,})", "checked") if bad else ("OK", "decoded")
        count = dataset.index.num_samples - dataset.index.num_deleted
        out.line(f"{verdict}: {dataset.store.url}: {count:,} samples {done}")
    return ExitCode.NO if any(one["bad"] for one in out.data["datasets"]) else ExitCode.OK


def _lint(dataset: FoundDataset, options: argparse.Namespace, workers: int, out: Output) -> list[dict[str, Any]]:
    index = dataset.index
    parts = [ShardRange(number, *pair) for number, pair in enumerate(index.cut(_PARTITION_BYTES))]
    # Of data in another format, the digest is the same whatever columns are read.
    notes = _Notes(options.resume, f"{index.digest} {json.dumps(dataset.how.columns)}")
    left = [part for part in parts if part.begin not in notes.found]
    bad = [each for part in parts for each in notes.found.get(part.begin, ())]
    for each in bad:
        out.line(each["error"])
    num_done = len(parts) - len(left)

    def report(result: tuple[int, list[dict[str, Any]]]) -> None:
        nonlocal num_done
        num_done += 1
        notes.add(*result)
        bad.extend(result[1])
        for each in result[1]:
            out.line(each["error"])
        out.progress(f"{num_done:,} of {len(parts):,} parts of {dataset.store.url}")

    with scratch_folder() as folder:
        local = None if isinstance(dataset.store, LocalStore) else folder
        run_partitions(
            _Decoding(dataset.remote, dataset.how, local, options.store_options).run, left, workers, report, _REMEDY
        )
    return sorted(bad, key=lambda each: (each["shard"], each["id"] or 0))


class _Notes:
    """The parts of a dataset that were decoded before, in a file of JSON lines; without a file, none."""

    def __init__(self, path: str | None, digest: str) -> None:
        self._path, self._digest = None if path is None else Path(path), digest
        self.found: dict[int, list[dict[str, Any]]] = {}
        if self._path is not None and self._path.is_file():
            for line in self._path.read_text().splitlines():
                with suppress(ValueError, KeyError, TypeError):  # a line that was cut when the process was killed
                    noted = json.loads(line)
                    if noted["digest"] == digest:
                        self.found[int(noted["shard"])] = noted["bad"]

    def add(self, begin: int, bad: Sequence[dict[str, Any]]) -> None:
        """Note the shards from ``begin`` on."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"\n{json.dumps({'digest': self._digest, 'shard': begin, 'bad': bad})}\n")


@dataclass(frozen=True)
class _Decoding:
    """Decodes the samples of some shards. Picklable."""

    remote: str
    how: Reading
    local: str | None
    store_options: dict[str, Any] | None

    def run(self, shards: ShardRange) -> tuple[int, list[dict[str, Any]]]:
        """Return the first shard, and what cannot be read: its shard, its sample id (None for all) and the error."""
        stream = Stream(self.remote, local=self.local, options=self.store_options, **vars(self.how))
        reader = SampleReader([stream], CacheDefaults(), ReaderConfig(load_images=True))
        try:
            return shards.begin, [each for shard in range(shards.begin, shards.end) for each in _bad(reader, shard)]
        finally:
            reader.close()


def _bad(reader: SampleReader, shard: int) -> list[dict[str, Any]]:
    """What cannot be decoded in a shard, which is deleted again if it was downloaded."""
    first, end = reader.snapshot.shard_offsets[shard : shard + 2].tolist()
    found: list[dict[str, Any]] = []
    try:
        reader.fetch(np.array([shard]))
    except (FormatError, NotFoundError) as error:
        return [{"shard": shard, "id": None, "error": f"shard {shard}: {error}"}]
    for begin in range(first, end, _AT_ONCE):
        ids = range(begin, min(begin + _AT_ONCE, end))
        if _error(partial(reader.batch, np.array(ids))):
            errors = ((number, _error(partial(reader.sample, number))) for number in ids)
            found += [{"shard": shard, "id": number, "error": error} for number, error in errors if error]
    reader.close()
    cache, entry = reader.entry(shard)
    cache.evict(entry)
    return found


def _error(read: Callable[[], object]) -> str:
    """Why samples cannot be read; empty if they can."""
    try:
        read()
    except FormatError as error:
        return str(error)
    return ""
