"""``log``: the versions of a dataset, and one index over the partitions of several writers."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from lightning_stream.cli.arguments import add_dataset, add_store_options, datasets_at, mds_at, only_dataset
from lightning_stream.cli.output import ExitCode, Output

EXAMPLES = """examples:
  lightning-stream log s3://bucket/train
  lightning-stream log s3://bucket/parts --merge   # after several writers, each in a folder of its own below
"""
_REMEDY = "Only MDS datasets have a log of versions here; a version of a Delta table is read with --version N."


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``log``."""
    add_dataset(parser)
    text = "first write one index.json over all partitions below the folder"
    parser.add_argument("--merge", action="store_true", help=text)
    text = "first put index.json as the newest version has it, for other readers of MDS"
    parser.add_argument("--publish", action="store_true", help=text)
    add_store_options(parser)


def run(options: Namespace, out: Output) -> int:
    """Merge or publish if asked to, and print a line for each version, the newest first."""
    from lightning_stream import versions
    from lightning_stream.writer import merge_index

    if options.merge:
        merge_index(options.remote, store_options=options.store_options)
        (merged,) = datasets_at(options.remote, options.store_options)
        out.data = {"samples": merged.index.num_samples, "shards": merged.index.num_shards}
        out.line(
            f"merged: {merged.index.num_samples:,} samples in {merged.index.num_shards:,} shards, {merged.store.url}"
        )
    only_dataset(mds_at(options.remote, options.store_options, _REMEDY), "log takes one dataset")
    if options.publish:
        versions.publish(options.remote, store_options=options.store_options)
    entries = versions.log(options.remote, store_options=options.store_options)
    out.table("versions", [{**asdict(entry), "digest": entry.digest[:16]} for entry in reversed(entries)])
    return ExitCode.OK
