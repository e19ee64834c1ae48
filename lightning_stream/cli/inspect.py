"""``inspect``: what a dataset holds."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import FoundDataset, add_source, datasets_of
from lightning_stream.cli.lengths import shown_lengths
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.cli.samples import classes_of, plain, reader_of
from lightning_stream.formats.index import Index
from lightning_stream.reading.lengths import summary

HELP = "show columns, samples, shards, sizes and hashes of a dataset"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``inspect``."""
    add_source(parser)
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="show the first N samples, too")


def run(options: argparse.Namespace, out: Output) -> int:
    """Describe every dataset at the path or URL."""
    if options.samples < 0:
        raise ValueError(f"--samples is a number of samples; found {options.samples}")
    described = []
    for dataset in datasets_of(options):
        about = _of_files(dataset) if dataset.format else _description(dataset.index)
        if classes := classes_of(dataset):
            about["classes"] = classes
        about |= _read(dataset, options.samples, options.store_options)
        described.append({"url": dataset.store.url, **about})
        out.line(dataset.store.url)
        out.show({**about, **shown_lengths(about.get("lengths"))})
    out.data = {"datasets": described}
    return ExitCode.OK


def _description(index: Index) -> dict[str, Any]:
    """A dataset as its index describes it."""
    entry = index.entry(0) if index.num_shards else None
    files = [] if entry is None else [file for pair in entry.files for file in pair if file]
    return {
        "samples": index.num_samples - index.num_deleted,
        **({"deleted_samples": index.num_deleted} if index.num_deleted else {}),
        "shards": index.num_shards,
        "samples_per_shard": [int(limit(index.shard_sizes)) for limit in (np.min, np.max) if index.num_shards],
        "largest_shard_bytes": int(max(index.raw_bytes, default=0)),
        "raw_bytes": int(index.raw_bytes.sum()),
        "stored_bytes": int(index.stored_bytes.sum()),
        "format": None if entry is None else entry.schema.format,
        "compression": None if entry is None else entry.schema.compression,
        "hashes": sorted({name for file in files for name in file.hashes}),
        "digest": index.digest,
        **({"converted_from": index.source_digest} if index.source_digest else {}),
        "schemas": len(index.schemas),
        "columns": dict(index.columns),
    }


def _of_files(dataset: FoundDataset) -> dict[str, Any]:
    """A dataset in another format as its index describes it: bytes of shards are those of the parts of its files."""
    index = dataset.index
    origins = (index.entry(shard).raw.origin for shard in range(index.num_shards))
    files = {origin.name: origin.num_bytes for origin in origins if origin is not None}
    is_one_each = dataset.format == "images"
    return {
        "samples": index.num_samples,
        "files": index.num_samples if is_one_each else len(files),
        "stored_bytes": int(index.raw_bytes.sum()) if is_one_each else sum(files.values()),
        "shards": index.num_shards,
        "samples_per_shard": [int(limit(index.shard_sizes)) for limit in (np.min, np.max)],
        "estimated_shard_bytes": [int(limit(index.raw_bytes)) for limit in (np.min, np.max)],
        "format": dataset.format,
        "digest": index.digest,
        "columns": dict(index.columns),
    }


def _read(dataset: FoundDataset, count: int, store_options: dict[str, Any] | None) -> dict[str, Any]:
    """What is read besides the index: a summary of each length, and the first samples."""
    if not count and not dataset.index.lengths:
        return {}
    with reader_of(dataset, store_options) as reader:
        lengths = {name: summary(reader.lengths(name)) for name in dataset.index.lengths}
        ids = range(min(count, reader.snapshot.num_samples))
        shown = {f"sample_{k}": {name: plain(value) for name, value in reader.sample(k).items()} for k in ids}
        return {**({"lengths": lengths} if lengths else {}), **shown}
