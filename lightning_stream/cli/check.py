"""``check``: whether the files of a dataset are what its index says, and whether its samples can be decoded."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from lightning_stream.cli.arguments import (
    SPARK,
    OpenDataset,
    add_flags,
    add_source,
    datasets_of,
    reader_over,
    session_of,
)
from lightning_stream.cli.output import ExitCode, Facts, Output
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.processes import ShardRange, num_processes, run_partitions
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.shard_table import ReaderConfig
from lightning_stream.reading.stream import Stream
from lightning_stream.shared_files import scratch_folder, scratch_here
from lightning_stream.stores import absolute
from lightning_stream.threads import DaemonPool

EXAMPLES = """exit codes: 0 if all is right, 1 if something is corrupt

examples:
  lightning-stream check s3://bucket/train
  lightning-stream check s3://bucket/train --decode --spark spark://host:7077     # on all machines of a cluster
  lightning-stream check s3://bucket/train --decode --resume checked.jsonl   # again with the same file: only the rest
"""
_PART_BYTES = 16 << 20
_AT_ONCE = 64
_THREADS = 8
_Problem = Facts  # the shard or the name of the lengths, the id of the sample if it is one, and the error


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``check``."""
    add_source(parser)
    add_flags(parser, {
        "--decode": "decode every sample, too, images included",
        "--resume FILE": "note in this file what is checked, and skip what is noted there",
        "--num-workers N": f"threads (default: {_THREADS}); with --decode processes (default: one per processor)",
        **SPARK,
    })  # fmt: skip


def run(options: Namespace, out: Output) -> int:
    """Check every dataset at the path or URL, print every problem, and then the verdict."""
    for dataset in datasets_of(options):
        # Of data in another format, the digest is the same whatever columns are read.
        key = f"{dataset.index.digest} {dataset.store.url} {dataset.how} decode={options.decode}"
        findings = _Findings(out, Path(options.resume or os.devnull), key)
        parts = [ShardRange(partition_id, *pair) for partition_id, pair in enumerate(dataset.index.cut(_PART_BYTES))]
        left = [part for part in parts if not findings.has_noted(part)]
        with scratch_folder() as folder, DaemonPool(num_processes(options.num_workers or _THREADS), "check") as pool:
            stream = partial(Stream, absolute(dataset.remote), options=dataset.options, **dataset.how)
            check = _Check(stream, folder, options.decode)
            if options.decode or options.spark:
                run_partitions(check, left, session_of(options) or num_processes(options.num_workers), findings.note)
            else:  # Ctrl-C does not wait for these threads
                for checked in [pool.submit(check, part) for part in left]:
                    findings.note(checked.result())
            findings.show(_of_lengths(dataset, check.reader))
        out.add("datasets", _verdict(dataset, findings.shown, options.decode))
        out.data["datasets"][-1]["corrupt"] = findings.shown
    return ExitCode.NO if any(checked["corrupt"] for checked in out.data["datasets"]) else ExitCode.OK


class _Findings:
    """The problems of a dataset: printed when they are found, and noted in a file by its part."""

    def __init__(self, out: Output, path: Path, key: str) -> None:
        self.shown: list[_Problem] = []
        self._out = out
        self._path = path
        self._key = key
        self._noted: dict[str, list[_Problem]] = {}
        text = path.read_text(errors="replace") if path.exists() else ""
        if not '{"part": '.startswith(text.lstrip()[:9]):
            raise ValueError(f"--resume is a file that this command writes; found another, {path}. Name a new file")
        for line in text.splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut when the process was killed
                noted = json.loads(line)
                self._noted[noted["part"]] = noted["problems"]

    def has_noted(self, part: ShardRange) -> bool:
        """Whether a part was checked before; its problems are shown again."""
        problems = self._noted.get(f"{self._key} {part}")
        self.show(problems or ())
        return problems is not None

    def note(self, result: tuple[ShardRange, list[_Problem]]) -> None:
        """Note and show the problems of a part."""
        part, problems = result
        with self._path.open("a") as file:
            file.write(f"\n{json.dumps({'part': f'{self._key} {part}', 'problems': problems})}\n")
        self.show(problems)
        self._out.progress(f"{part} checked")

    def show(self, problems: Iterable[_Problem]) -> None:
        """Print problems."""
        for problem in problems:
            self.shown.append(problem)
            *place, (_, error) = problem.items()
            self._out.line(f"{', '.join(f'{name} {value}' for name, value in place)}: {error}")


def _verdict(dataset: OpenDataset, problems: list[_Problem], decode: bool) -> Facts:
    """What was checked, and by what."""
    index = dataset.index
    entries = [entry for shard in range(index.num_shards) for entry in index.entries(shard)]
    hashes = {name for entry in entries for pair in entry.files for file in pair if file for name in file.hashes}
    by = ["reading all rows"] if dataset.format else [*sorted(hashes), "size"]
    return {
        "url": dataset.store.url,
        "verdict": f"CORRUPT ({len(problems):,})" if problems else "OK",
        "shards": index.num_shards,
        "samples": index.num_samples,
        "stored_bytes": int(index.stored_bytes.sum()),
        "checked_by": [*by, "decoding"] if decode else by,
    }


@dataclass(frozen=True)
class _Check:
    """Fetches shards as a loader does, which verifies them, and decodes their samples. Picklable."""

    stream: Callable[..., Stream]
    folder: str
    decode: bool

    @cached_property
    def reader(self) -> SampleReader:
        """The reader of this process."""
        return reader_over([self.stream(local=scratch_here(self.folder))], ReaderConfig(load_images=True))

    def __call__(self, shards: ShardRange) -> tuple[ShardRange, list[_Problem]]:
        """Return these shards, and what is wrong with them."""
        problems: list[_Problem] = []
        for shard in range(shards.begin, shards.end):
            cache, entry = self.reader.entry(shard)
            if error := _error(partial(self.reader.fetch, np.array([shard]))):
                problems.append({"shard": shard, "error": error})
            elif self.decode:
                problems += self._undecodable(shard)
                self.reader.close()
            cache.evict(entry)
        return shards, problems

    def _undecodable(self, shard: int) -> Iterator[_Problem]:
        """The samples of a shard that cannot be decoded."""
        first, end = self.reader.snapshot.shard_offsets[shard : shard + 2].tolist()
        for begin in range(first, end, _AT_ONCE):
            ids = range(begin, min(begin + _AT_ONCE, end))
            for sample_id in ids if _error(partial(self.reader.batch, np.array(ids))) else ():
                if error := _error(partial(self.reader.sample, sample_id)):
                    yield {"shard": shard, "id": sample_id, "error": error}


def _of_lengths(dataset: OpenDataset, reader: SampleReader) -> Iterator[_Problem]:
    """What is wrong with the files of lengths, with the name of each length."""
    try:
        for name in dataset.index.lengths:
            if problem := _error(partial(reader.lengths, name)):
                yield {"lengths": name, "error": problem}
    except FormatError as error:
        yield {"lengths": "", "error": str(error)}


def _error(check: Callable[[], object]) -> str:
    """Why a check fails; empty if it does not."""
    try:
        check()
    except (FormatError, NotFoundError) as error:
        return str(error)
    return ""
