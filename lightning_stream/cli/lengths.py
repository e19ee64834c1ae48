"""``lengths``: numbers that readers get before any sample, added to a dataset."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from lightning_stream.cli.arguments import add_dataset, add_store_options, imported, mds_at
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.order.chain import counted
from lightning_stream.reading.lengths import summary

HELP = "add the lengths of the samples (tokens, bytes, frames) to a dataset"
_REMEDY = "Nothing is written beside it: convert it, with `lightning-stream convert SOURCE OUT --lengths COLUMN`."
EXAMPLES = """examples:
  lightning-stream lengths s3://bucket/train --column tokens
  lightning-stream lengths shards --column text --by my_tokenizer:count_tokens

Every sample is read once. The lengths of a folder of splits are added to every split.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lengths``."""
    add_dataset(parser)
    parser.add_argument(
        "--column",
        action="append",
        required=True,
        metavar="NAME",
        help="column that is measured by its len, or by the function of --by; may be repeated",
    )
    parser.add_argument(
        "--by",
        metavar="MODULE:FUNCTION",
        help="function of the column's value that returns a whole number; of the whole sample if NAME is no column",
    )
    parser.add_argument("--num-workers", type=int, metavar="N", help="processes (default: one per processor)")
    parser.add_argument("--overwrite", action="store_true", help="replace lengths of this name")
    parser.add_argument("--allow-unsafe-types", action="store_true", help="decode pkl, which runs code of the data")
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Add the lengths to every dataset at the path or URL, and print what they are."""
    from lightning_stream.convert import add_lengths

    functions = dict.fromkeys(options.column, len if options.by is None else imported(options.by, "--by"))
    described = []
    for dataset in mds_at(options.remote, options.store_options, _REMEDY):
        try:
            added = add_lengths(
                dataset.store.url,
                functions,
                num_workers=options.num_workers,
                overwrite=options.overwrite,
                progress_bar=sys.stderr.isatty(),
                store_options=options.store_options,
                allow_unsafe_types=options.allow_unsafe_types,
            )
        except TypeError as error:
            raise ValueError(f"{error}. Pass a function of the value: --by MODULE:FUNCTION") from error
        lengths = {name: summary(numbers) for name, numbers in added.items()}
        described.append({"url": dataset.store.url, "lengths": lengths})
        out.line(dataset.store.url)
        out.show(shown_lengths(lengths))
    out.data = {"datasets": described}
    return ExitCode.OK


def shown_lengths(lengths: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """Summaries of lengths as text, by their names."""
    return {"lengths": {name: counted(one) for name, one in lengths.items()}} if lengths else {}
