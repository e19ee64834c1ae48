"""``merge``: one index over the partitions of a dataset."""

from __future__ import annotations

import argparse

from lightning_stream.cli.arguments import add_store_options, datasets_at
from lightning_stream.cli.output import ExitCode, Output

HELP = "write one index.json over all partitions below a folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``merge``."""
    parser.add_argument("out", metavar="PATH|URL", help="the folder above the partitions, each with an index.json")
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Merge the indexes."""
    from lightning_stream.writer import merge_index

    merge_index(options.out, store_options=options.store_options)
    (merged,) = datasets_at(options.out, options.store_options)
    out.data = {"url": merged.store.url, "samples": merged.index.num_samples, "shards": merged.index.num_shards}
    out.show(out.data)
    return ExitCode.OK
