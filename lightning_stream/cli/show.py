"""``show``: what a dataset holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import FoundDataset, add_source, datasets_of, only_dataset
from lightning_stream.cli.column_stats import ColumnStats
from lightning_stream.cli.output import ExitCode, Output, as_text
from lightning_stream.cli.sample_page import checked_path, write_page
from lightning_stream.cli.values import class_name, classes_of, plain, reader_of
from lightning_stream.order.chain import counted
from lightning_stream.reading.lengths import summary
from lightning_stream.reading.reader import SampleReader

EXAMPLES = """examples:
  lightning-stream show s3://bucket/train
  lightning-stream show s3://bucket/train --samples 5
  lightning-stream show shards/val --ids 17,1337:1340 --page some.html
  lightning-stream show rows.parquet --stats
"""
_AT_ONCE, _ON_PAGE = 256, 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``show``."""
    add_source(parser)
    parser.add_argument("--samples", type=int, metavar="N", help="print the first N samples")
    parser.add_argument("--ids", metavar="IDS", help="print the samples with these ids, e.g. 1337 or 0:10,500")
    text = "summarise each column: range, mean, missing values, counts; of all samples, or of these"
    parser.add_argument("--stats", action="store_true", help=text)
    text = f"write one page of HTML with the first {_ON_PAGE} samples, or with these"
    parser.add_argument("--page", metavar="FILE", help=text)


def run(options: argparse.Namespace, out: Output) -> int:
    """Show every dataset at the path or URL."""
    path = None if options.page is None else checked_path(options.page)
    found = datasets_of(options)
    if path is not None:
        only_dataset(found, "a page shows one dataset")
    out.data = {"datasets": []}
    for dataset in found:
        with reader_of(dataset, options.store_options) as reader:
            out.data["datasets"].append(_shown(dataset, reader, path, options, out))
    return ExitCode.OK


def _shown(
    dataset: FoundDataset, reader: SampleReader, path: Path | None, options: argparse.Namespace, out: Output
) -> dict[str, Any]:
    classes = classes_of(dataset)
    about = {"url": dataset.store.url, **_sizes(dataset), **({"classes": classes} if classes else {})}
    lengths = {name: summary(reader.lengths(name)) for name in dataset.index.lengths}
    out.line(dataset.store.url)
    out.show({name: value for name, value in about.items() if name != "url"})
    if lengths:
        about["lengths"] = lengths
        out.show({"lengths": {name: counted(counts) for name, counts in lengths.items()}})
    num_samples = reader.snapshot.num_samples
    ids = chosen_ids(options, num_samples)
    if options.stats:
        about["stats"] = _stats(reader, range(num_samples) if ids is None else ids, classes, out)
    if path is not None:
        ids = range(min(_ON_PAGE, num_samples)) if ids is None else ids
        columns = as_text("", [f"{name}: {kind}" for name, kind in dataset.index.columns.items()])
        samples = {number: _with_names(reader.sample(number), classes) for number in ids}
        write_page(path, dataset.store.url, f"{len(ids):,} of {num_samples:,} samples · columns: {columns}", samples)
        about |= {"page": str(path), "ids": list(ids)}
        out.line(f"{len(ids):,} samples in {path}")
    elif ids is not None and not options.stats:
        printed = {number: _printed(reader.sample(number)) for number in ids}
        about["printed"] = [{"id": number, **sample} for number, sample in printed.items()]
        out.show({f"sample_{number}": sample for number, sample in printed.items()})
    return about


def chosen_ids(options: argparse.Namespace, num_samples: int) -> Sequence[int] | None:
    """The ids of ``--ids 0:10,500`` or ``--samples``; None without both. ValueError for ids that there are not."""
    if options.ids is None:
        if options.samples is not None and options.samples < 1:
            raise ValueError(f"--samples is at least 1; found {options.samples}")
        return None if options.samples is None else range(min(options.samples, num_samples))
    ids: list[int] = []
    for part in options.ids.split(","):
        begin, colon, end = part.partition(":")
        try:
            first = int(begin or 0)
            last = first if not colon else int(end or num_samples) - 1
        except ValueError as error:
            raise ValueError(f"--ids takes numbers and ranges, e.g. 0:10,500; found {options.ids!r}") from error
        if not 0 <= first <= last < num_samples:
            raise ValueError(f"sample ids are 0 to {num_samples - 1:,} in this dataset; found {part}")
        ids += range(first, last + 1)
    return ids


def _sizes(dataset: FoundDataset) -> dict[str, Any]:
    """A dataset as its index describes it; in another format, the bytes of shards are those of parts of its files."""
    index, kind = dataset.index, dataset.format
    entry = index.entry(0) if index.num_shards else None
    shard_bytes = "estimated_shard_bytes" if kind else "shard_size_bytes"
    sizes: dict[str, Any] = {"samples": dataset.num_samples}
    if index.num_deleted:
        sizes["deleted_samples"] = index.num_deleted
    sizes["shards"] = index.num_shards
    if entry is not None:
        sizes["samples_per_shard"] = _least_and_most(index.shard_sizes)
        sizes[shard_bytes] = _least_and_most(index.raw_bytes)
    if kind is not None:
        origins = [index.entry(number).raw.origin for number in range(index.num_shards)]
        files = {origin.name: origin.num_bytes for origin in origins if origin is not None}
        is_one_each = kind == "images"
        sizes["files"] = index.num_samples if is_one_each else len(files)
        sizes["stored_bytes"] = int(index.raw_bytes.sum()) if is_one_each else sum(files.values())
        return {**sizes, "format": kind, "digest": index.digest, "columns": dict(index.columns)}
    hashes = {name for pair in (entry.files if entry else ()) for file in pair if file for name in file.hashes}
    return {
        **sizes,
        "raw_bytes": int(index.raw_bytes.sum()),
        "stored_bytes": int(index.stored_bytes.sum()),
        "format": entry.schema.format if entry else None,
        "compression": entry.schema.compression if entry else None,
        "hashes": sorted(hashes),
        "digest": index.digest,
        **({"converted_from": index.source_digest} if index.source_digest else {}),
        "schemas": len(index.schemas),
        "columns": dict(index.columns),
    }


def _least_and_most(numbers: Any) -> list[int]:
    return [int(np.min(numbers)), int(np.max(numbers))]


def _stats(
    reader: SampleReader, ids: Sequence[int], classes: dict[str, list[str]], out: Output
) -> dict[str, dict[str, Any]]:
    """Read samples, and summarise and print each column."""
    columns: dict[str, ColumnStats] = {}
    for begin in range(0, len(ids), _AT_ONCE):
        some = ids[begin : begin + _AT_ONCE]
        for name, values in reader.batch(np.array(some)).items():
            columns.setdefault(name, ColumnStats()).add(values)
        out.progress(f"{begin + len(some):,} of {len(ids):,} samples")
    found = {name: column.summary(classes.get(name)) for name, column in columns.items()}
    out.line(f"  statistics of {len(ids):,} samples")
    for name, facts in found.items():
        out.show({name: facts})
    return found


def _with_names(sample: dict[str, Any], classes: dict[str, list[str]]) -> dict[str, Any]:
    return {name: class_name(value, classes.get(name)) for name, value in sample.items()}


def _printed(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in sample.items()}
