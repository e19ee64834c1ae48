"""``check``: whether the files of a dataset are what its index says, and whether its samples can be decoded."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import FoundDataset, add_flags, add_source, datasets_of, reader_over
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.errors import DigestError, FormatError, NotFoundError
from lightning_stream.formats.codecs import decompress_file
from lightning_stream.formats.hashing import digest_file
from lightning_stream.formats.index import FileEntry
from lightning_stream.order.chain import readable
from lightning_stream.processes import ShardRange, num_processes, run_partitions
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import Stream
from lightning_stream.reading.stream_shards import ReaderConfig
from lightning_stream.shared_files import scratch_folder
from lightning_stream.sources.in_place import InPlace
from lightning_stream.stores import Store
from lightning_stream.threads import DaemonPool

EXAMPLES = """exit codes: 0 if all is right, 1 if something is corrupt

examples:
  lightning-stream check s3://bucket/train
  lightning-stream check s3://bucket/train --decode --resume checked.jsonl   # again with the same file: only the rest
"""
_PART_BYTES, _AT_ONCE, _THREADS = 16 << 20, 64, 8
_REMEDY = "use fewer --num-workers"
_Problem = dict[str, Any]  # the shard or the name of the lengths, the id of the sample if it is one, and the error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check``."""
    add_source(parser)
    add_flags(parser, {
        "--decode": "decode every sample, too, images included",
        "--resume FILE": "note in this file what is checked, and skip what is noted there",
        "--num-workers N": f"threads (default: {_THREADS}); with --decode processes (default: one per processor)",
    })  # fmt: skip


def run(options: argparse.Namespace, out: Output) -> int:
    """Check every dataset at the path or URL, print every problem, and then the verdict."""
    out.data = {"datasets": []}
    for dataset in datasets_of(options):
        # Of data in another format, the digest is the same whatever columns are read.
        key = f"{dataset.index.digest} {dataset.how} decode={options.decode}"
        findings = _Findings(out, Path(options.resume or os.devnull), key)
        parts = [ShardRange(number, *pair) for number, pair in enumerate(dataset.index.cut(_PART_BYTES))]
        left = [part for part in parts if not findings.has_noted(part)]
        with scratch_folder() as folder, DaemonPool(num_processes(options.num_workers or _THREADS), "check") as pool:
            check = _Check(dataset.stream(folder, options.store_options), Path(folder), options.decode)
            if options.decode:
                run_partitions(check, left, num_processes(options.num_workers), findings.note, _REMEDY)
            else:  # Ctrl-C does not wait for these threads
                for checked in [pool.submit(check, part) for part in left]:
                    findings.note(checked.result())
            findings.show(_of_lengths(dataset, Path(folder, "lengths")))
        out.data["datasets"].append(_verdict(dataset, findings.shown, options.decode, out))
    return ExitCode.NO if any(checked["corrupt"] for checked in out.data["datasets"]) else ExitCode.OK


class _Findings:
    """The problems of a dataset: printed when they are found, and noted in a file by its part."""

    def __init__(self, out: Output, path: Path, key: str) -> None:
        self.shown: list[_Problem] = []
        self._out, self._path, self._key = out, path, key
        self._noted: dict[str, list[_Problem]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
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


def _verdict(dataset: FoundDataset, problems: list[_Problem], decode: bool, out: Output) -> dict[str, Any]:
    """Print what was checked, and by what."""
    index = dataset.index
    files = [pair for shard in range(index.num_shards) for entry in index.entries(shard) for pair in entry.files]
    hashes = sorted({name for pair in files for file in pair if file for name in file.hashes})
    num_bytes = sum((compressed or raw).num_bytes for raw, compressed in files)
    by = f"{', '.join(hashes)} and size" if hashes else "size only, since the index has no hashes"
    by = f"reading all {index.num_samples:,} rows" if dataset.format else by
    by += f", and {index.num_samples:,} samples decoded" if decode else ""
    verdict = f"CORRUPT ({len(problems):,})" if problems else "OK"
    out.line(f"{verdict}: {dataset.store.url}: {index.num_shards:,} shards, {readable(num_bytes)}, checked by {by}")
    counts = {"shards": index.num_shards, "samples": index.num_samples, "bytes": num_bytes}
    return {"url": dataset.store.url, "corrupt": problems, **counts, "hashes": hashes, "decoded": decode}


@dataclass(frozen=True)
class _Check:
    """Checks the files of shards, and decodes their samples. Picklable."""

    stream: Stream
    folder: Path
    decode: bool

    def __call__(self, shards: ShardRange) -> tuple[ShardRange, list[_Problem]]:
        """Return these shards, and what is wrong with them."""
        reader = reader_over([self.stream], ReaderConfig(load_images=True))
        try:
            numbers = range(shards.begin, shards.end)
            return shards, [problem for shard in numbers for problem in self._of_shard(reader, shard)]
        finally:
            reader.close()

    def _of_shard(self, reader: SampleReader, shard: int) -> Iterator[_Problem]:
        """What is wrong in a shard, which is deleted again if it was downloaded."""
        cache, entry = reader.entry(shard)
        draft = self.folder / f"{shard}"
        checks: list[Callable[[], object]] = []
        if self.decode and not (cache.in_place and entry.raw.origin is None):
            checks.append(partial(reader.fetch, np.array([shard])))  # which verifies what it downloads
        elif entry.raw.origin is not None:
            checks.append(partial(InPlace().write, cache.store, entry, draft))
        else:
            for part in reader.indexes[0].entries(shard):
                codec = part.schema.compression
                checks += [partial(_check_file, cache.store, pair, codec, draft) for pair in part.files]
        errors = [error for error in map(_error, checks) if error]
        yield from ({"shard": shard, "error": error} for error in errors)
        if self.decode and not errors:
            yield from _undecodable(reader, shard)
            reader.close()
            cache.evict(entry)


def _undecodable(reader: SampleReader, shard: int) -> Iterator[_Problem]:
    """The samples of a shard that cannot be decoded."""
    first, end = reader.snapshot.shard_offsets[shard : shard + 2].tolist()
    for begin in range(first, end, _AT_ONCE):
        ids = range(begin, min(begin + _AT_ONCE, end))
        for number in ids if _error(partial(reader.batch, np.array(ids))) else ():
            if error := _error(partial(reader.sample, number)):
                yield {"shard": shard, "id": number, "error": error}


def _of_lengths(dataset: FoundDataset, draft: Path) -> Iterator[_Problem]:
    """What is wrong with the files of lengths, with the name of each length."""
    try:
        for name, files in dataset.index.lengths.items():
            for file in files:
                problem = _error(partial(_check_file, dataset.store, (file, None), None, draft))
                yield from [{"lengths": name, "error": problem}] if problem else []
    except FormatError as error:
        yield {"lengths": "", "error": str(error)}


def _error(check: Callable[[], object]) -> str:
    """Why a check fails; empty if it does not."""
    try:
        check()
    except (FormatError, NotFoundError) as error:
        return str(error)
    return ""


def _check_file(store: Store, files: tuple[FileEntry, FileEntry | None], codec: str | None, draft: Path) -> None:
    """Raise FormatError or NotFoundError unless a file, and its compressed form, are what the index says."""
    raw, compressed = files
    if compressed is None or codec is None:
        store.get(raw.basename, draft, raw.num_bytes)
    else:
        packed = draft.with_suffix(".packed")
        store.get(compressed.basename, packed, compressed.num_bytes)
        _check_digests(packed, compressed, store)
        decompress_file(codec, packed, draft, raw.num_bytes)
        packed.unlink()
    _check_digests(draft, raw, store)
    draft.unlink()


def _check_digests(path: Path, file: FileEntry, store: Store) -> None:
    """Raise DigestError if the size or a hash is not that of the index."""
    where, size = f"{store.url}/{file.basename}", path.stat().st_size
    if size != file.num_bytes:
        raise DigestError(f"{where}: the index says {file.num_bytes:,} bytes, the file has {size:,}.")
    found = digest_file(list(file.hashes), path)
    for name, expected in file.hashes.items():
        if found[name] != expected:
            raise DigestError(f"{where}: the index says {name} {expected}, the file has {found[name]}.")
