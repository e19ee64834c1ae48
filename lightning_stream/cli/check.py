"""``check``: whether the files of a dataset are what its index says, and whether its samples can be decoded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import FoundDataset, add_source, datasets_of, reader_over
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.errors import DigestError, FormatError, NotFoundError
from lightning_stream.formats.codecs import decompress_file
from lightning_stream.formats.hashing import digest_file
from lightning_stream.formats.index import FileEntry, ShardEntry
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
  lightning-stream check s3://bucket/train --shards 100:200
  lightning-stream check s3://bucket/train --decode --resume checked.jsonl   # again with the same file: only the rest
"""
_PARTITION_BYTES, _AT_ONCE, _THREADS = 64 << 20, 64, 8
_REMEDY = "use fewer --num-workers"
_Problem = dict[str, Any]  # the shard, the id of the sample (None for the whole file), and the error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check``."""
    add_source(parser)
    parser.add_argument("--decode", action="store_true", help="decode every sample, too, images included")
    parser.add_argument("--shards", metavar="BEGIN:END", help="check only these shards, counted from 0")
    text = "note finished shards in this file, and skip those noted there"
    parser.add_argument("--resume", metavar="FILE", help=text)
    text = f"shards checked at once (default: {_THREADS}); with --decode processes (default: one per processor)"
    parser.add_argument("--num-workers", type=int, metavar="N", help=text)


def run(options: argparse.Namespace, out: Output) -> int:
    """Check every dataset at the path or URL, print every problem, and then the verdict."""
    workers = num_processes(options.num_workers if options.decode else options.num_workers or _THREADS)
    found = datasets_of(options)
    chosen = [_shards(options.shards, dataset) for dataset in found]
    out.data = {"datasets": []}
    for dataset, shards in zip(found, chosen, strict=True):
        problems = _problems(dataset, shards, workers, options, out)
        out.data["datasets"].append({"url": dataset.store.url, "corrupt": problems})
        out.data["datasets"][-1] |= _verdict(dataset, shards, problems, options.decode, out)
    return ExitCode.NO if any(checked["corrupt"] for checked in out.data["datasets"]) else ExitCode.OK


def _shards(text: str | None, dataset: FoundDataset) -> range:
    every = range(dataset.index.num_shards)
    if text is None:
        return every
    begin, colon, end = text.partition(":")
    try:
        chosen = every[int(begin or 0) : int(end) if end else len(every) if colon else int(begin) + 1]
    except ValueError as error:
        raise ValueError(f"--shards takes BEGIN:END, numbers from 0; found {text!r}") from error
    if not chosen:
        raise ValueError(f"--shards {text} selects no shard: {dataset.store.url} has {len(every)}, counted from 0")
    return chosen


class _Findings:
    """The problems of a dataset: printed when they are found, and noted in a file if the user names one."""

    def __init__(self, out: Output, path: str | None, key: str) -> None:
        self.problems: list[_Problem] = []
        self._out = out
        self._path = None if path is None else Path(path)
        self._key = key
        self._noted: dict[str, list[_Problem]] = {}
        is_begun = self._path is not None and self._path.is_file()
        for line in self._path.read_text().splitlines() if self._path and is_begun else ():
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut when the process was killed
                noted = json.loads(line)
                if noted["key"] == key:
                    self._noted[noted["part"]] = noted["problems"]

    def has_noted(self, part: ShardRange) -> bool:
        """Whether a part was checked before; its problems are shown again."""
        self.show(self._noted.get(str(part), ()))
        return str(part) in self._noted

    def add(self, result: tuple[ShardRange, list[_Problem]]) -> None:
        """Note and show the problems of a part."""
        part, problems = result
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"\n{json.dumps({'key': self._key, 'part': str(part), 'problems': problems})}\n")
        self.show(problems)

    def show(self, problems: Iterable[_Problem]) -> None:
        """Print problems."""
        for problem in problems:
            self.problems.append(problem)
            name, value = next(item for item in problem.items() if item[1] is not None)
            self._out.line(f"{name} {value}: {problem['error']}")


def _problems(
    dataset: FoundDataset, shards: range, workers: int, options: argparse.Namespace, out: Output
) -> list[_Problem]:
    """What is wrong with these shards, and with the files of lengths if these are all shards."""
    index = dataset.index
    cut = index.cut(_PARTITION_BYTES if options.decode else 1)
    clipped = ((max(begin, shards.start), min(end, shards.stop)) for begin, end in cut)
    parts = [ShardRange(number, *pair) for number, pair in enumerate(clipped) if pair[0] < pair[1]]
    # Of data in another format, the digest is the same whatever columns are read.
    key = f"{index.digest} {json.dumps(dataset.how.get('columns'))} {options.decode}"
    findings = _Findings(out, options.resume, key)
    left = [part for part in parts if not findings.has_noted(part)]
    # Ctrl-C does not wait for the threads: they may still write into the folder.
    with scratch_folder() as folder, DaemonPool(workers, "check") as pool:
        if options.decode:
            decoding = _Decoding(dataset.stream(folder, options.store_options), Path(folder))
            run_partitions(decoding.run, left, workers, findings.add, _REMEDY)
        else:
            files = partial(_of_files, dataset.store, Path(folder))
            checks = [pool.submit(files, part.begin, index.entries(part.begin)) for part in left]
            for number, (part, check) in enumerate(zip(left, checks, strict=True)):
                findings.add((part, check.result()))
                out.progress(f"{number + 1:,} of {len(left):,} shards")
        if len(shards) == index.num_shards:
            findings.show(_of_lengths(dataset, Path(folder)))
    return findings.problems


def _verdict(
    dataset: FoundDataset, shards: range, problems: Sequence[_Problem], decode: bool, out: Output
) -> dict[str, Any]:
    """Print what was checked, and by what."""
    index = dataset.index
    pairs = [pair for shard in shards for entry in index.entries(shard) for pair in entry.files]
    hashes = [{*raw.hashes, *(compressed.hashes if compressed else ())} for raw, compressed in pairs]
    names = sorted(set().union(*hashes))
    num_bytes = sum((compressed or raw).num_bytes for raw, compressed in pairs)
    num_samples = int(index.shard_sizes[shards.start : shards.stop].sum())
    num_unhashed = sum(not some for some in hashes)
    by = f"{', '.join(names)} and size" if names else "size only, since the index has no hashes"
    by += f" ({num_unhashed:,} files by size only)" if names and num_unhashed else ""
    by = f"reading all {num_samples:,} rows" if dataset.format else by
    by = f"decoding {num_samples:,} samples and by {by}" if decode else by
    verdict = f"CORRUPT ({len(problems):,})" if problems else "OK"
    out.line(
        f"{verdict}: {dataset.store.url}: {len(shards):,} of {index.num_shards:,} shards, {readable(num_bytes)}, "
        f"checked by {by}"
    )
    checked = {"shards": [shards.start, shards.stop], "samples": num_samples, "bytes": num_bytes}
    return {**checked, "hashes": names, "decoded": decode}


def _of_files(store: Store, folder: Path, shard: int, entries: Sequence[ShardEntry]) -> list[_Problem]:
    """What is wrong with the files of a shard: at most one problem a file."""
    draft = folder / f"{shard}"
    if entries[0].raw.origin is not None:
        errors = [_error(partial(_make, store, entries[0], draft))]
    else:
        files = [(entry.schema.compression, *pair) for entry in entries for pair in entry.files]
        errors = [_error(partial(_check_file, store, raw, packed, codec, draft)) for codec, raw, packed in files]
    return [{"shard": shard, "id": None, "error": error} for error in errors if error]


def _make(store: Store, entry: ShardEntry, draft: Path) -> None:
    """Read the rows that a shard of another format is made from."""
    try:
        InPlace().write(store, entry, draft)
    finally:
        draft.unlink(missing_ok=True)


def _check_file(store: Store, raw: FileEntry, compressed: FileEntry | None, codec: str | None, draft: Path) -> None:
    """Raise FormatError or NotFoundError unless a file is what the index says."""
    packed = draft.with_suffix(".packed")
    try:
        if compressed is None or codec is None:
            store.get(raw.basename, draft, raw.num_bytes)
        else:
            store.get(compressed.basename, packed, compressed.num_bytes)
            _check_digests(packed, compressed, store)
            decompress_file(codec, packed, draft, raw.num_bytes)
        _check_digests(draft, raw, store)
    finally:
        draft.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)


def _check_digests(path: Path, file: FileEntry, store: Store) -> None:
    """Raise DigestError if the size or a hash is not that of the index."""
    where = f"{store.url}/{file.basename}"
    if (size := path.stat().st_size) != file.num_bytes:
        raise DigestError(f"{where}: the index says {file.num_bytes:,} bytes, the file has {size:,}.")
    found = digest_file(list(file.hashes), path)
    for name, expected in file.hashes.items():
        if found[name] != expected:
            raise DigestError(f"{where}: the index says {name} {expected}, the file has {found[name]}.")


def _of_lengths(dataset: FoundDataset, folder: Path) -> Iterator[_Problem]:
    """What is wrong with the files of lengths, with the name of each length."""
    try:
        files = [(name, file) for name, files in dataset.index.lengths.items() for file in files]
    except FormatError as error:
        yield {"lengths": "", "error": str(error)}
        return
    for name, file in files:
        problem = _error(partial(_check_file, dataset.store, file, None, None, folder / "lengths"))
        if problem:
            yield {"lengths": name, "error": problem}


@dataclass(frozen=True)
class _Decoding:
    """Checks and decodes the samples of some shards. Picklable."""

    stream: Stream
    folder: Path

    def run(self, shards: ShardRange) -> tuple[ShardRange, list[_Problem]]:
        """Return these shards, and what is wrong with them."""
        reader = reader_over([self.stream], ReaderConfig(load_images=True))
        try:
            found = [self._of_shard(reader, shard) for shard in range(shards.begin, shards.end)]
            return shards, [problem for problems in found for problem in problems]
        finally:
            reader.close()

    def _of_shard(self, reader: SampleReader, shard: int) -> list[_Problem]:
        """What is wrong in a shard, which is deleted again if it was downloaded."""
        cache, entry = reader.entry(shard)
        if cache.in_place and entry.raw.origin is None:  # what is downloaded is verified then
            entries = reader.indexes[0].entries(shard)
            if problems := _of_files(cache.store, self.folder, shard, entries):
                return problems
        if error := _error(partial(reader.fetch, np.array([shard]))):
            return [{"shard": shard, "id": None, "error": error}]
        first, end = reader.snapshot.shard_offsets[shard : shard + 2].tolist()
        problems = []
        for begin in range(first, end, _AT_ONCE):
            ids = range(begin, min(begin + _AT_ONCE, end))
            if _error(partial(reader.batch, np.array(ids))):
                errors = [(number, _error(partial(reader.sample, number))) for number in ids]
                problems += [{"id": number, "shard": shard, "error": error} for number, error in errors if error]
        reader.close()
        cache.evict(entry)
        return problems


def _error(check: Callable[[], object]) -> str:
    """Why a check fails; empty if it does not."""
    try:
        check()
    except (FormatError, NotFoundError) as error:
        return str(error)
    return ""
