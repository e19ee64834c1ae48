"""``verify``: whether the files of a dataset are what its index says."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_stream.cli.arguments import FoundDataset, add_dataset, datasets_at
from lightning_stream.cli.output import ExitCode, Output, readable
from lightning_stream.errors import DigestError, FormatError, NotFoundError
from lightning_stream.formats.codecs import decompress_file
from lightning_stream.formats.hashing import digest_file
from lightning_stream.formats.index import FileEntry
from lightning_stream.stores import Store
from lightning_stream.threads import DaemonPool

HELP = "download every file and check its size, hashes and decompression"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    add_dataset(parser)
    parser.add_argument("--shards", metavar="BEGIN:END", help="check only these shards, counted from 0")
    parser.add_argument(
        "--num-workers", type=int, default=8, metavar="N", help="shards that are checked at once (default: 8)"
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Verify every dataset at the path or URL."""
    if options.num_workers < 1:
        raise ValueError(f"--num-workers is at least 1; found {options.num_workers}")
    found = datasets_at(options.remote, dict(options.store_options))
    ranges = [_shards(options.shards, dataset) for dataset in found]
    verified = [
        verify_dataset(dataset, shards, options.num_workers, out)
        for dataset, shards in zip(found, ranges, strict=True)
    ]
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
        raise ValueError(f"--shards {text} selects no shard: {dataset.store.url} has {len(every)} shards, from 0")
    return chosen


def verify_dataset(dataset: FoundDataset, shards: range, num_workers: int, out: Output) -> dict[str, Any]:
    """Download and check some shards, print every corrupt file and then the verdict, and return both.

    Every hash in the index is checked: those of the compressed files, and those of the raw ones.
    """
    corrupt: list[dict[str, Any]] = []
    hashes, num_bytes, without = set[str](), 0, 0
    with tempfile.TemporaryDirectory(prefix="lightning-stream-") as folder, DaemonPool(num_workers, "verify") as pool:
        checks = {shard: pool.submit(_wrong_files, dataset, shard, Path(folder)) for shard in shards}
        for done, (shard, check) in enumerate(checks.items()):
            out.progress(f"{done:,} of {len(shards):,} shards")
            for name, reason in check.result():
                corrupt.append({"shard": shard, "file": name, "error": reason})
                out.line(f"shard {shard}: {reason}")
            for raw, compressed in dataset.index.entry(shard).files:
                names = {*raw.hashes, *(compressed.hashes if compressed else ())}
                hashes |= names
                without += not names
                num_bytes += (compressed or raw).num_bytes
    of = "" if len(shards) == dataset.index.num_shards else f" of {dataset.index.num_shards:,}"
    checked = f"{', '.join(sorted(hashes))} and sizes" if hashes else "sizes only: the index has no hashes"
    partly = f", {without:,} files by size only" if hashes and without else ""
    verdict = f"CORRUPT: {_files(len(corrupt))}" if corrupt else "OK"
    out.line(
        f"{verdict}: {dataset.store.url}: {len(shards):,}{of} shard{'s' * (len(shards) != 1)}, {readable(num_bytes)}, "
        f"checked by {checked}{partly}"
    )
    return {
        "url": dataset.store.url,
        "split": dataset.split,
        "ok": not corrupt,
        "shards": [shards.start, shards.stop],
        "num_shards": dataset.index.num_shards,
        "bytes": num_bytes,
        "hashes": sorted(hashes),
        "corrupt": corrupt,
    }


def _files(count: int) -> str:
    return f"{count:,} file{'s' * (count != 1)}"


def _wrong_files(dataset: FoundDataset, shard: int, folder: Path) -> list[tuple[str, str]]:
    """The files of a shard that are corrupt or missing, with the reasons."""
    entry = dataset.index.entry(shard)
    return [
        ((compressed or raw).basename, reason)
        for raw, compressed in entry.files
        for reason in _problems(dataset.store, raw, compressed, entry.schema.compression, folder / f"{shard}")
    ]


def _problems(
    store: Store, raw: FileEntry, compressed: FileEntry | None, compression: str | None, draft: Path
) -> Iterator[str]:
    packed = draft.with_suffix(".packed")
    try:
        if compressed is None or compression is None:
            store.get(raw.basename, draft, raw.num_bytes)
        else:
            store.get(compressed.basename, packed, compressed.num_bytes)
            _check(packed, compressed, store)
            decompress_file(compression, packed, draft, raw.num_bytes)
        _check(draft, raw, store)
    except (FormatError, NotFoundError) as error:
        yield str(error)
    finally:
        draft.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)


def _check(path: Path, file: FileEntry, store: Store) -> None:
    """Raise DigestError if the size or a hash is not that of the index."""
    where = f"{store.url}/{file.basename}"
    if (size := path.stat().st_size) != file.num_bytes:
        raise DigestError(f"{where}: the index says {file.num_bytes:,} bytes, the file has {size:,}.")
    found = digest_file(list(file.hashes), path)
    for name, promised in file.hashes.items():
        if found[name] != promised:
            raise DigestError(f"{where}: the index says {name} {promised}, the file has {found[name]}.")
