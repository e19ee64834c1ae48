"""``verify``: whether the files of a dataset are what its index says."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_stream.cli.arguments import FoundDataset, add_source, datasets_of
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.errors import DigestError, FormatError, NotFoundError
from lightning_stream.formats.codecs import decompress_file
from lightning_stream.formats.hashing import digest_file
from lightning_stream.formats.index import FileEntry, ShardEntry
from lightning_stream.order.chain import readable
from lightning_stream.shared_files import scratch_folder
from lightning_stream.sources.in_place import InPlace
from lightning_stream.stores import Store
from lightning_stream.threads import DaemonPool

HELP = "read every file and check its size, hashes and decompression, or its rows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    add_source(parser)
    parser.add_argument("--shards", metavar="BEGIN:END", help="check only these shards, counted from 0")
    parser.add_argument("--num-workers", type=int, default=8, metavar="N", help="shards checked at once (default: 8)")


def run(options: argparse.Namespace, out: Output) -> int:
    """Verify every dataset at the path or URL."""
    if options.num_workers < 1:
        raise ValueError(f"--num-workers is at least 1; found {options.num_workers}")
    found = datasets_of(options)
    chosen = [_shards(options.shards, dataset) for dataset in found]
    verified = [_verify(*each, options.num_workers, out) for each in zip(found, chosen, strict=True)]
    out.data = {"datasets": verified}
    return ExitCode.NO if any(one["corrupt"] for one in verified) else ExitCode.OK


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


def _verify(dataset: FoundDataset, shards: range, num_workers: int, out: Output) -> dict[str, Any]:
    """Check some shards, print every corrupt file and then the verdict.

    Every hash in the index is checked: those of the compressed files, and those of the raw ones.
    """
    url, index = dataset.store.url, dataset.index
    corrupt: list[dict[str, Any]] = []
    hashes, num_bytes, num_unhashed = set[str](), 0, 0
    with (
        # Ctrl-C does not wait for the threads: they may still write into the folder.
        scratch_folder() as folder,
        DaemonPool(num_workers, "verify") as pool,
    ):
        checks = [pool.submit(_problems, dataset, shard, Path(folder)) for shard in shards]
        for shard, check in zip(shards, checks, strict=True):
            for problem in check.result():
                corrupt.append({"shard": shard, "error": problem})
                out.line(f"shard {shard}: {problem}")
            for raw, compressed in (pair for entry in index.entries(shard) for pair in entry.files):
                names = {*raw.hashes, *(compressed.hashes if compressed else ())}
                hashes, num_unhashed = hashes | names, num_unhashed + (not names)
                num_bytes += (compressed or raw).num_bytes
            out.progress(f"{shard - shards.start + 1:,} of {len(shards):,} shards")
        for name, problem in _lengths_problems(dataset, Path(folder)) if len(shards) == index.num_shards else ():
            corrupt.append({"lengths": name, "error": problem})
            out.line(f"lengths {name}: {problem}")
    by = f"{', '.join(sorted(hashes))} and size" if hashes else "size only, since the index has no hashes"
    num_samples = int(index.shard_sizes[shards.start : shards.stop].sum())
    by = f"reading all {num_samples:,} rows" if dataset.format else by
    by += f" ({num_unhashed:,} files by size only)" if hashes and num_unhashed else ""
    verdict = f"CORRUPT ({len(corrupt):,} file{'s' * (len(corrupt) != 1)})" if corrupt else "OK"
    counts = f"{len(shards):,} of {index.num_shards:,} shards, {readable(num_bytes)}"
    out.line(f"{verdict}: {url}: {counts}, verified by {by}")
    return {
        "url": url,
        "corrupt": corrupt,
        "shards": [shards.start, shards.stop],
        "samples": num_samples,
        "bytes": num_bytes,
        "hashes": sorted(hashes),
    }


def _problems(dataset: FoundDataset, shard: int, folder: Path) -> list[str]:
    """What is wrong with the files of a shard: at most one problem a file."""
    entries = dataset.index.entries(shard)
    if entries[0].raw.origin is not None:
        return _problems_in_place(dataset.store, entries[0], folder / f"{shard}")
    files = [(entry.schema.compression, *pair) for entry in entries for pair in entry.files]
    found = (
        _problem(dataset.store, raw, compressed, codec, folder / f"{shard}-{number}")
        for number, (codec, raw, compressed) in enumerate(files)
    )
    return list(filter(None, found))


def _problems_in_place(store: Store, entry: ShardEntry, draft: Path) -> list[str]:
    """What is wrong with the rows that a shard of another format is made from."""
    try:
        InPlace().write(store, entry, draft)
    except (FormatError, NotFoundError) as error:
        return [str(error)]
    finally:
        draft.unlink(missing_ok=True)
    return []


def _lengths_problems(dataset: FoundDataset, folder: Path) -> list[tuple[str, str]]:
    """What is wrong with the files of lengths, with the name of each length."""
    try:
        files = [(name, file) for name, files in dataset.index.lengths.items() for file in files]
    except FormatError as error:
        return [("", str(error))]
    found = ((name, _problem(dataset.store, file, None, None, folder / "lengths")) for name, file in files)
    return [(name, problem) for name, problem in found if problem]


def _problem(store: Store, raw: FileEntry, compressed: FileEntry | None, codec: str | None, draft: Path) -> str:
    """What is wrong with one file; empty if it is right."""
    packed = draft.with_suffix(".packed")
    try:
        if compressed is None or codec is None:
            store.get(raw.basename, draft, raw.num_bytes)
        else:
            store.get(compressed.basename, packed, compressed.num_bytes)
            _check(packed, compressed, store)
            decompress_file(codec, packed, draft, raw.num_bytes)
        _check(draft, raw, store)
    except (FormatError, NotFoundError) as error:
        return str(error)
    finally:
        draft.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)
    return ""


def _check(path: Path, file: FileEntry, store: Store) -> None:
    """Raise DigestError if the size or a hash is not that of the index."""
    where = f"{store.url}/{file.basename}"
    if (size := path.stat().st_size) != file.num_bytes:
        raise DigestError(f"{where}: the index says {file.num_bytes:,} bytes, the file has {size:,}.")
    found = digest_file(list(file.hashes), path)
    for name, expected in file.hashes.items():
        if found[name] != expected:
            raise DigestError(f"{where}: the index says {name} {expected}, the file has {found[name]}.")
