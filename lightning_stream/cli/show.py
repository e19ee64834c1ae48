"""``show``: what a dataset holds."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import closing, suppress

import numpy as np

from lightning_stream.cli.arguments import OpenDataset, add_flags, add_source, datasets_of, only_dataset
from lightning_stream.cli.output import ExitCode, Facts, Output, as_text
from lightning_stream.cli.samples import ColumnStats, plain_sample, with_class_names, write_page
from lightning_stream.errors import StoreError
from lightning_stream.reading.lengths import summary
from lightning_stream.reading.reader import SampleReader
from lightning_stream.shared_files import scratch_folder

EXAMPLES = """examples:
  lightning-stream show s3://bucket/train
  lightning-stream show s3://bucket/train --samples 5
  lightning-stream show shards/val --ids 17,1337:1340 --page some.html
  lightning-stream show rows.parquet --stats
"""
_AT_ONCE = 256
_ON_PAGE = 48


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``show``."""
    add_source(parser)
    add_flags(parser, {
        "--samples N": "print the first N samples",
        "--ids IDS": "print the samples with these ids, e.g. 1337 or 0:10,500",
        "--stats": "summarise each column: range, mean, missing values, counts; of all samples, or of these",
        "--page FILE.html": f"write one page of HTML with the first {_ON_PAGE} samples, or with these",
    })  # fmt: skip


def run(options: Namespace, out: Output) -> int:
    """Show every dataset at the path or URL."""
    datasets = datasets_of(options)
    if options.page is not None:
        only_dataset(datasets, "a page shows one dataset")
    for dataset in datasets:
        with scratch_folder() as folder, closing(dataset.reader(folder)) as reader:
            facts = _sizes(dataset)
            chosen = _chosen_ids(options, reader.snapshot.num_samples)
            if dataset.index.lengths:
                facts["lengths"] = {name: summary(reader.lengths(name)) for name in dataset.index.lengths}
            out.add("datasets", facts)
            facts |= _of_samples(reader, chosen, options, facts, out)
    return ExitCode.OK


def _sizes(dataset: OpenDataset) -> Facts:
    """A dataset as its index describes it; in another format, the bytes of shards are those of parts of its files."""
    index = dataset.index
    entries = list(index)
    facts: Facts = {"url": dataset.store.url, "samples": index.num_samples - index.num_deleted}
    facts["shards"] = index.num_shards
    if index.num_deleted:
        facts["deleted_samples"] = index.num_deleted
    for name, sizes in (("samples_per_shard", index.shard_sizes), ("shard_size_bytes", index.raw_bytes)):
        facts[name] = [int(np.min(sizes)), int(np.max(sizes))] if entries else None
    facts["stored_bytes"] = int(index.stored_bytes.sum())
    facts["format"] = dataset.format
    files = {entry.raw.origin.name: entry.raw.origin.num_bytes for entry in entries if entry.raw.origin is not None}
    if dataset.format == "images":
        facts["files"] = index.num_samples
    elif files:
        facts["files"] = len(files)
        facts["stored_bytes"] = sum(files.values())
    elif entries:
        facts["raw_bytes"] = int(index.raw_bytes.sum())
        facts["format"] = entries[0].schema.format
        facts["compression"] = entries[0].schema.compression
        facts["hashes"] = sorted(entries[0].raw.hashes)
    facts["digest"] = index.digest
    if index.source_digest:
        facts["converted_from"] = index.source_digest
    facts["columns"] = dict(index.columns)
    with suppress(StoreError, ValueError, KeyError, TypeError):  # `convert` writes it beside the index
        facts["classes"] = dict(json.loads(dataset.store.read("manifest.json"))["classes"])
    return facts


def _of_samples(
    reader: SampleReader,
    chosen: Sequence[int] | None,
    options: Namespace,
    facts: Facts,
    out: Output,
) -> Facts:
    """What the user asks of samples: statistics, a page, or their values."""
    num_samples = reader.snapshot.num_samples
    classes = facts.get("classes", {})
    results: Facts = {}
    if options.stats:
        results["stats"] = _stats(reader, range(num_samples) if chosen is None else chosen, classes, out)
    if options.page:
        ids = range(min(_ON_PAGE, num_samples)) if chosen is None else chosen
        columns = as_text("", [f"{name}: {kind}" for name, kind in facts["columns"].items()])
        samples = {sample_id: with_class_names(reader.sample(sample_id), classes) for sample_id in ids}
        text = f"{len(ids):,} of {num_samples:,} samples · columns: {columns}"
        write_page(options.page, facts["url"], text, samples)
        out.line(f"{len(ids):,} samples in {options.page}")
        results |= {"page": options.page, "ids": list(ids)}
    if not results and chosen is not None:
        printed = {sample_id: plain_sample(reader.sample(sample_id)) for sample_id in chosen}
        results["printed"] = [{"id": sample_id, **sample} for sample_id, sample in printed.items()]
        out.show({f"sample_{sample_id}": sample for sample_id, sample in printed.items()})
    return results


def _chosen_ids(options: Namespace, num_samples: int) -> Sequence[int] | None:
    """The ids of ``--ids 0:10,500`` or ``--samples``; None without both."""
    text = options.ids if options.samples is None else f":{options.samples}"
    if text is None:
        return None
    ids: list[int] = []
    for part in text.split(","):
        begin, colon, end = part.partition(":")
        try:
            first = int(begin or 0 if colon else begin)
            ids += range(num_samples)[first : int(end) if end else None] if colon else [range(num_samples)[first]]
        except (ValueError, IndexError) as error:
            rule = f"--ids takes numbers and ranges of the {num_samples:,} samples, e.g. 0:10,500"
            raise ValueError(f"{rule}; found {part!r}") from error
    if not ids and options.samples is None:
        raise ValueError(f"--ids names at least one sample; found {text!r}")
    return ids


def _stats(reader: SampleReader, ids: Sequence[int], classes: Facts, out: Output) -> Facts:
    """Read samples, and summarise and print each column."""
    columns: dict[str, ColumnStats] = {}
    for begin in range(0, len(ids), _AT_ONCE):
        for name, values in reader.batch(np.array(ids[begin : begin + _AT_ONCE])).items():
            columns.setdefault(name, ColumnStats()).add(values)
        out.progress(f"{begin:,} of {len(ids):,} samples")
    out.line(f"  statistics of {len(ids):,} samples")
    summaries = {name: column.summary(classes.get(name)) for name, column in columns.items()}
    for name, facts in summaries.items():
        out.line(f"  {name}")
        out.show(facts, "    ")
    return summaries
