"""``convert``, also called ``reshard``: files of rows, or shards, to datasets of MDS shards."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from lightning_stream.cli.arguments import Pairs, add_store_options
from lightning_stream.cli.output import ExitCode, Output, in_flags

HELP = "convert Parquet, CSV, image folders and others to MDS shards, or shards to other shards"
LENGTHS_HELP = "column whose length (len) readers get before any sample; may be repeated"
EXAMPLES = """examples:
  lightning-stream convert photos/ shards/ --val-fraction 0.1
  lightning-stream convert 'rows/*.parquet' s3://bucket/rows --num-workers 8
  lightning-stream convert texts.jsonl.gz texts --columns text=str --compression zstd:7
  lightning-stream convert table.csv rows --fill-nulls age=0 --source-options 'delimiter=;'
  lightning-stream reshard s3://bucket/train s3://bucket/smaller --size-limit 16mb --compression zstd:7

The same command again continues a conversion that was interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``convert``: those of `lightning_stream.convert.convert` that a command line can hold."""
    parser.add_argument("source", nargs="+", metavar="SOURCE", help="files, folders or patterns; paths or URLs")
    parser.add_argument("out", metavar="OUT", help="folder or URL of the dataset")
    parser.add_argument("--kind", help="format of the files, if their names do not show it: parquet, csv, images, ...")
    pairs: dict[str, Any] = {"action": Pairs, "metavar": "NAME=VALUE"}
    parser.add_argument(
        "--columns", help="encoding of a column that is written; may be repeated (default: all)", **pairs
    )
    parser.add_argument(
        "--compression", default="auto", help="e.g. zstd:7, gz, br, none; auto: zstd, but not of images"
    )
    parser.add_argument("--hashes", help="digests in the index, with commas, or none (default: xxh3_64)")
    parser.add_argument(
        "--size-limit",
        default="auto",
        metavar="SIZE",
        help="bytes of a shard, e.g. 64mb (default: as SOURCE is read in place, so that its order stays; else 64mb)",
    )
    parser.add_argument("--num-workers", type=int, metavar="N", help="processes (default: one per processor)")
    parser.add_argument("--partition-bytes", metavar="SIZE", help="source bytes that a process writes at a time")
    parser.add_argument("--fill-nulls", help="write this value for the nulls of a column; may be repeated", **pairs)
    parser.add_argument("--drop-nulls", action="store_true", help="omit rows with nulls")
    parser.add_argument("--val-fraction", type=float, metavar="F", help="write OUT/train and OUT/val, e.g. 0.1")
    parser.add_argument("--group-by", metavar="COLUMN", help="keep rows with the same value there in the same split")
    parser.add_argument("--shuffle", action="store_true", help="write the rows in a random order over the whole source")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of --shuffle and --val-fraction (default: 0)")
    parser.add_argument("--tmp-dir", metavar="FOLDER", help="folder for temporary files of --shuffle")
    parser.add_argument("--overwrite", action="store_true", help="replace another dataset at OUT")
    parser.add_argument("--force", action="store_true", help="convert again, even if OUT holds this very dataset")
    parser.add_argument(
        "--progress-bar",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count rows on stderr (default: on a terminal)",
    )
    parser.add_argument("--lengths", action="append", metavar="COLUMN", help=LENGTHS_HELP)
    parser.add_argument("--source-options", help="option of the reader, e.g. delimiter=;", **pairs)
    add_store_options(parser, "--source-store-options")
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Convert, and print what was written."""
    from lightning_stream.convert import convert

    settings = {name: value for name, value in vars(options).items() if name not in ("json", "parser", "run")}
    settings["progress_bar"] = options.progress_bar and sys.stderr.isatty()
    if len(options.source) == 1:
        settings["source"] = options.source[0]
    if options.compression == "none":
        settings["compression"] = None
    if options.hashes is not None:
        settings["hashes"] = [] if options.hashes == "none" else options.hashes.split(",")
    if options.columns is not None:
        settings["columns"] = {name: str(encoding) for name, encoding in options.columns.items()}
    settings["lengths"] = dict.fromkeys(options.lengths or (), len)
    done = convert(**settings)
    out.line(in_flags(str(done), options.parser))
    if done.keeps_order:
        out.line("A training run over SOURCE continues on it: the order is the same.")
    out.data = asdict(done)
    return ExitCode.OK
