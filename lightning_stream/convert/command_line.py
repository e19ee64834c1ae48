"""The command line of `convert`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from lightning_stream.convert.api import convert
from lightning_stream.errors import LightningStreamError, MissingExtraError

_EXAMPLES = """
examples:
  python -m lightning_stream.convert photos/ shards/ --val-fraction 0.1
  python -m lightning_stream.convert 'rows/*.parquet' s3://bucket/rows --workers 8
  python -m lightning_stream.convert texts.jsonl.gz texts --column text=str --compression zstd:7
  python -m lightning_stream.convert table.csv rows --fill 'age=0' --source-option delimiter=';'

A run that was cut short goes on where it was when the same command is given again.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    given = _parser().parse_args(arguments)
    source = given.source[0] if len(given.source) == 1 else given.source
    try:
        done = convert(
            source,
            given.out,
            columns=dict(given.column) if given.column else None,
            compression=None if given.compression == "none" else given.compression,
            hashes=[name for name in given.hashes.split(",") if name],
            size_limit=given.size_limit,
            num_workers=given.workers,
            kind=given.kind,
            fill_nulls={name: _value(text) for name, text in given.fill},
            drop_nulls=given.drop_nulls,
            val_fraction=given.val_fraction,
            group_by=given.group_by,
            shuffle=given.shuffle,
            seed=given.seed,
            tmp_dir=given.tmp_dir,
            overwrite=given.overwrite,
            progress_bar=not given.quiet,
            partition_bytes=given.partition_bytes,
            source_options={name: _value(text) for name, text in given.source_option},
            source_store_options={name: _value(text) for name, text in given.source_store_option} or None,
            store_options={name: _value(text) for name, text in given.store_option} or None,
        )
    except (LightningStreamError, MissingExtraError, ValueError, FileExistsError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{done}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_stream.convert",
        description="Write files of rows (Parquet, JSON lines, CSV, image folders, ...) as an MDS dataset.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", nargs="+", help="files, folders or patterns; paths or URLs")
    parser.add_argument("out", help="a folder or URL for the dataset")
    parser.add_argument("--kind", help="what the files are, where their names do not tell")
    _add_pairs(parser, "--column", "NAME=ENCODING", "write this column, so encoded; may be repeated (default: all)")
    parser.add_argument(
        "--compression", default="auto", help="e.g. zstd:7, gz, br, none (default: zstd, none for images)"
    )
    parser.add_argument("--hashes", default="xxh3_64", help="digests in the index, with commas (default: xxh3_64)")
    parser.add_argument("--size-limit", default="64mb", help="bytes of a shard (default: 64mb)")
    parser.add_argument("--workers", type=int, help="processes (default: one per processor)")
    parser.add_argument(
        "--partition-bytes", help="bytes of the source that are written at a time (default: by its size)"
    )
    _add_pairs(parser, "--fill", "NAME=VALUE", "write this in the place of a column's nulls; may be repeated")
    parser.add_argument("--drop-nulls", action="store_true", help="leave out rows with nulls")
    parser.add_argument("--val-fraction", type=float, metavar="SHARE", help="write OUT/train and OUT/val, e.g. 0.1")
    parser.add_argument("--group-by", metavar="COLUMN", help="hold out rows with the same value there together")
    parser.add_argument("--shuffle", action="store_true", help="write the rows in a random order over the whole source")
    parser.add_argument("--seed", type=int, default=0, help="of the order and of the rows held out (default: 0)")
    parser.add_argument("--tmp_dir", metavar="FOLDER", help="where a shuffle keeps rows meanwhile")
    parser.add_argument("--overwrite", "--exist-ok", action="store_true", help="replace another dataset at OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    _add_pairs(parser, "--source-option", "NAME=VALUE", "for the reader, e.g. delimiter=;")
    _add_pairs(parser, "--source-store-option", "NAME=VALUE", "for the store of the source")
    _add_pairs(parser, "--store-option", "NAME=VALUE", "for the store of OUT, e.g. endpoint_url=http://host:9000")
    return parser


def _add_pairs(parser: argparse.ArgumentParser, name: str, metavar: str, help_text: str) -> None:
    parser.add_argument(name, action="append", default=[], type=_pair, metavar=metavar, help=help_text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"it is NAME=VALUE; got {text!r}")
    return name, value


def _value(text: str) -> Any:
    """A number, a truth value or a list if it reads as one in json, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
