"""``diff``: whether two datasets hold the same samples, or two training runs have the same order."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import add_reading, add_rules, add_store_options, add_streams, one_dataset_at
from lightning_stream.cli.diff_runs import are_runs, diff_runs
from lightning_stream.cli.output import ExitCode, Output, as_text
from lightning_stream.cli.samples import is_image, plain, reader_of

HELP = "compare the samples of two datasets, or the order of two training runs"
EXAMPLES = """exit codes: 0 if the datasets hold equal samples in the same order, or the runs have one order; 1 if not

examples:
  lightning-stream diff s3://bucket/train shards/train
  lightning-stream diff tokens.parquet s3://bucket/tokens --count 10000
  lightning-stream diff runs/a runs/b/checkpoints/last.ckpt --stream s3://bucket/train
"""
_AT_ONCE, _SHOWN = 256, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``diff``."""
    for name in ("first", "second"):
        parser.add_argument(
            name, metavar="PATH|URL", help="a dataset; or a checkpoint, or the folder of a training run"
        )
    parser.add_argument("-n", "--count", type=int, metavar="N", help="compare the first N samples only")
    add_streams(parser)
    add_reading(parser)
    add_rules(parser)
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Compare two training runs; or two datasets, columns and counts first, then sample by sample."""
    if are_runs(options.first, options.second, options.store_options):
        return diff_runs(options, out)
    if options.stream:
        raise ValueError("--stream is for two training runs; pass two datasets alone")
    if options.count is not None and options.count < 1:
        raise ValueError(f"--count is at least 1; found {options.count}")
    urls = (options.first, options.second)
    pair = [one_dataset_at(url, options, "diff compares two datasets") for url in urls]
    with reader_of(pair[0], options.store_options) as one, reader_of(pair[1], options.store_options) as other:
        columns = [dict(dataset.index.columns) for dataset in pair]
        counts = [reader.snapshot.num_samples for reader in (one, other)]
        shared = [name for name in columns[0] if name in columns[1]]
        only = [sorted(mine.keys() - theirs.keys()) for mine, theirs in (columns, columns[::-1])]
        encodings = {name: [each[name] for each in columns] for name in shared if columns[0][name] != columns[1][name]}
        different: list[dict[str, Any]] = []
        least = min(*counts, options.count if options.count is not None else counts[0])
        for first in range(0, least if shared else 0, _AT_ONCE):
            ids = np.arange(first, min(least, first + _AT_ONCE))
            both = [reader.batch(ids) for reader in (one, other)]
            for row, sample_id in enumerate(ids.tolist()):
                different += [
                    {"id": sample_id, "column": name, "values": [plain(each[name][row]) for each in both]}
                    for name in shared
                    if not equal(both[0][name][row], both[1][name][row])
                ]
            out.progress(f"{first + len(ids):,} of {least:,} samples")
    about = {
        "samples": counts,
        "compared_samples": least,
        "columns_only_in_first": only[0],
        "columns_only_in_second": only[1],
        "encodings": encodings,
        "different_values": len(different),
        "first_differences": different[:_SHOWN],
    }
    out.data = {"urls": [dataset.store.url for dataset in pair], **about}
    is_same = counts[0] == counts[1] and not any(only) and not different
    out.line(_verdict(out.data) if not is_same else f"EQUAL: {least:,} samples, {len(shared)} columns")
    for name, (mine, theirs) in encodings.items():
        out.line(f"  column {name}: stored as {mine} and {theirs}")
    for each in different[:_SHOWN]:
        out.line(f"  sample {each['id']:,}, {each['column']}: {each['values'][0]} and {each['values'][1]}")
    return ExitCode.OK if is_same else ExitCode.NO


def _verdict(about: dict[str, Any]) -> str:
    parts = []
    first, second = about["samples"]
    if first != second:
        parts.append(f"{first:,} and {second:,} samples")
    only = {which: about[f"columns_only_in_{which}"] for which in ("first", "second")}
    parts += [f"only the {which} has {as_text('', names)}" for which, names in only.items() if names]
    if count := about["different_values"]:
        parts.append(f"{count:,} different values in {about['compared_samples']:,} samples")
    return f"DIFFERENT: {'; '.join(parts)}"


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same: numbers of any dtype, NaN with NaN, images by their pixels."""
    if is_image(one) and is_image(other):
        return bool(one.size == other.size and one.mode == other.mode and one.tobytes() == other.tobytes())
    if hasattr(one, "shape") or hasattr(other, "shape"):
        mine, theirs = np.asarray(one), np.asarray(other)
        if mine.shape != theirs.shape:
            return False
        is_float = mine.dtype.kind in "fc" and theirs.dtype.kind in "fc"
        return bool(np.array_equal(mine, theirs, equal_nan=is_float))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other or (one != one and other != other))  # NaN differs from itself
