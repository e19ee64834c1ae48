"""``inspect`` and ``verify``: what a dataset holds, and whether its files are what its index says."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning_stream.cli.places import add_place, datasets_at, readable, store_options
from lightning_stream.errors import DigestError, FormatError, NotFoundError
from lightning_stream.formats.codecs import decompress_file
from lightning_stream.formats.hashing import digest_file
from lightning_stream.formats.index import FileEntry, Index
from lightning_stream.stores import Store


def add_commands(commands: Any) -> None:
    """Add both to a parser's subcommands."""
    shown = commands.add_parser("inspect", help="what a dataset holds: columns, samples, shards, sizes, hashes")
    add_place(shown)
    shown.add_argument("--json", action="store_true", help="for programs")
    shown.add_argument("--samples", type=int, default=0, metavar="N", help="show the first N samples, too")
    shown.set_defaults(command=_inspect)
    checked = commands.add_parser(
        "verify", help="fetch every file and check size, hashes and decompression; exit code 1 where one is wrong"
    )
    add_place(checked)
    checked.add_argument("--shards", metavar="BEGIN:END", help="only these, counted from 0")
    checked.set_defaults(command=_verify)


# inspect


def _inspect(options: argparse.Namespace) -> int:
    found = datasets_at(options.place, store_options(options.option))
    described = {name: {"place": store.url, **description(index)} for name, (store, index) in found.items()}
    if options.json:
        print(json.dumps(described, indent=1))
        return 0
    for about in described.values():
        _print(about)
    for store, _ in found.values() if options.samples else ():
        _print_samples(store, options)
    return 0


def description(index: Index) -> dict[str, Any]:
    """What an index says of its dataset, as plain values."""
    first = index.entry(0) if index.num_shards else None
    files = [] if first is None else [file for raw, packed in first.files for file in (raw, packed) if file]
    raw, stored = int(index.raw_bytes.sum()), int(index.stored_bytes.sum())
    sizes = index.shard_sizes
    return {
        "samples": index.num_samples,
        "shards": index.num_shards,
        "format": index.schemas[0].format if index.schemas else None,
        "columns": dict(index.columns),
        "schemas": len(index.schemas),
        "compression": index.schemas[0].compression if index.schemas else None,
        "hashes": sorted({name for file in files for name in file.hashes}),
        "raw_bytes": raw,
        "stored_bytes": stored,
        "samples_per_shard": [int(sizes.min()), int(sizes.max())] if len(sizes) else [0, 0],
        "largest_shard_bytes": int(index.raw_bytes.max()) if len(sizes) else 0,
        "digest": index.digest,
    }


def _print(about: dict[str, Any]) -> None:
    least, most = about["samples_per_shard"]
    packed = f", {readable(about['stored_bytes'])} as stored" if about["compression"] else ""
    largest = readable(about["largest_shard_bytes"])
    lines = {
        "samples": f"{about['samples']:,}",
        "shards": f"{about['shards']:,} of {least:,} to {most:,} samples, the largest {largest}",
        "bytes": f"{readable(about['raw_bytes'])}{packed}",
        "format": str(about["format"]),
        "compression": about["compression"] or "none",
        "hashes": ", ".join(about["hashes"]) or "none: what is fetched is checked by size only",
        "digest": about["digest"],
    }
    print(about["place"])
    for name, text in lines.items():
        print(f"  {name:<12} {text}")
    print(
        "  columns"
        + (f"      (the first shard's; there are {about['schemas']} schemas)" if about["schemas"] > 1 else "")
    )
    for name, encoding in about["columns"].items():
        print(f"    {name:<20} {encoding}")


def _print_samples(store: Store, options: argparse.Namespace) -> None:
    from lightning_stream.reading.reader import ReaderConfig, SampleReader
    from lightning_stream.reading.stream import CacheDefaults, Stream

    with tempfile.TemporaryDirectory(prefix="lightning-stream-") as folder:
        local = folder if "://" in store.url or store.url.startswith("dbfs:") else None
        stream = Stream(remote=store.url, local=local, options=store_options(options.option))
        reader = SampleReader([stream], CacheDefaults(), ReaderConfig())
        for number in range(min(options.samples, reader.snapshot.num_samples)):
            print(f"  sample {number}")
            for name, value in reader.sample(number).items():
                print(f"    {name:<20} {_short(value)}")
        reader.close()


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and shape != ():
        return f"{type(value).__name__}{tuple(shape)} {value.dtype}"
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 90 else f"{text[:87]}..."


# verify


def _verify(options: argparse.Namespace) -> int:
    wrong = 0
    for store, index in datasets_at(options.place, store_options(options.option)).values():
        wrong += verify_dataset(store, index, _range(options.shards, index.num_shards))
    return 1 if wrong else 0


def _range(text: str | None, num_shards: int) -> range:
    if text is None:
        return range(num_shards)
    begin, colon, end = text.partition(":")
    try:
        return range(num_shards)[int(begin or 0) : int(end) if end else num_shards if colon else int(begin) + 1]
    except ValueError as error:
        raise ValueError(f"--shards takes BEGIN:END, numbers from 0; found {text!r}") from error


def verify_dataset(store: Store, index: Index, shards: range) -> int:
    """Fetch and check some shards, one after another; tells of each that is wrong, and gives their number.

    Every hash that the index has is checked, of the compressed files and of the raw ones.
    """
    wrong, num_bytes, by = 0, 0, set[str]()
    with tempfile.TemporaryDirectory(prefix="lightning-stream-") as folder:
        for shard in shards:
            entry = index.entry(shard)
            for raw, compressed in entry.files:
                try:
                    _verify_file(store, raw, compressed, entry.schema.compression, Path(folder))
                except (FormatError, NotFoundError) as error:
                    wrong += 1
                    print(f"shard {shard}: {error}", file=sys.stderr)
                by |= {*raw.hashes, *(compressed.hashes if compressed else ())}
                num_bytes += (compressed or raw).num_bytes
            _tell_progress(shard, shards)
    checked = f"by {', '.join(sorted(by))}" if by else "by size only, as the index has no hashes"
    verdict = f"{wrong} file(s) WRONG" if wrong else "all as the index says"
    print(f"{store.url}: {len(shards)} of {index.num_shards} shards, {readable(num_bytes)}, {checked}: {verdict}")
    return wrong


def _verify_file(
    store: Store, raw: FileEntry, compressed: FileEntry | None, compression: str | None, folder: Path
) -> None:
    draft, packed = folder / "raw", folder / "packed"
    if compressed is None or compression is None:
        store.get(raw.basename, draft, raw.num_bytes)
    else:
        store.get(compressed.basename, packed, compressed.num_bytes)
        _check(packed, compressed, store)
        decompress_file(compression, packed, draft, raw.num_bytes)
    _check(draft, raw, store)


def _check(path: Path, file: FileEntry, store: Store) -> None:
    """Raises DigestError where size or any hash is not as the index says."""
    where = f"{store.url}/{file.basename}"
    if (size := path.stat().st_size) != file.num_bytes:
        raise DigestError(f"{where}: the index promises {file.num_bytes:,} bytes; there are {size:,}.")
    found = digest_file(list(file.hashes), path)
    for name, promised in file.hashes.items():
        if found[name] != promised:
            raise DigestError(f"{where}: the index promises {name} {promised}; the bytes have {found[name]}.")


def _tell_progress(shard: int, shards: range) -> None:
    if sys.stderr.isatty():
        end = "\n" if shard == shards[-1] else ""
        print(f"\r{shard - shards[0] + 1} of {len(shards)} shards", end=end, file=sys.stderr, flush=True)
