"""``convert``: files of rows, or shards, to datasets of MDS shards; and lengths for a dataset that is there."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lightning_stream.cli.arguments import SPARK, add_flags, add_signature, imported, mds_at, session_of
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.convert import add_lengths, convert
from lightning_stream.errors import has_terminal
from lightning_stream.reading.lengths import summary

EXAMPLES = """examples:
  lightning-stream convert photos/ shards/ --val-fraction 0.1
  lightning-stream convert 'rows/*.parquet' s3://bucket/rows --num-workers 8
  lightning-stream convert texts.jsonl.gz texts --columns text=str --compression zstd:7
  lightning-stream convert table.csv rows --fill-nulls age=0 --source-options 'delimiter=;'
  lightning-stream convert s3://bucket/train s3://bucket/smaller --size-limit 16mb
  lightning-stream convert shards --lengths tokens                       # adds lengths to a dataset, in place
  lightning-stream convert shards --lengths text=my_tokenizer:count      # a function of the column's value

The flags are the arguments of lightning_stream.convert; "none" is None. The same command again continues a conversion
that was interrupted.
"""
_FLAGS = (
    "columns", "compression", "hashes", "size_limit", "num_workers", "kind", "fill_nulls", "drop_nulls",
    "val_fraction", "group_by", "shuffle", "seed", "tmp_dir", "overwrite", "force", "partition_bytes", "source_options",
    "source_store_options", "store_options",
)  # fmt: skip
_REMEDY = "Nothing is written beside it: convert it, with `lightning-stream convert SOURCE OUT --lengths COLUMN`."
_OF_LENGTHS = ("num_workers", "overwrite", "store_options", "progress_bar", "spark")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``convert``: those of `lightning_stream.convert.convert` that a command line can hold."""
    parser.usage = "%(prog)s SOURCE [SOURCE ...] OUT [flags]\n       %(prog)s DATASET --lengths COLUMN [flags]"
    text = "files, folders or patterns, as paths or URLs; and last the folder or URL of the dataset"
    parser.add_argument("paths", nargs="+", metavar="SOURCE OUT", help=text)
    add_signature(parser, convert, _FLAGS)
    add_flags(parser, SPARK)
    text = "column whose len, or FUNCTION of its value, readers get before any sample; without OUT, added to SOURCE"
    parser.add_argument("--lengths", action="append", metavar="COLUMN[=MODULE:FUNCTION]", help=text)


def run(options: Namespace, out: Output) -> int:
    """Convert, or add lengths, and print what was written."""
    settings = {name: getattr(options, name) for name in _FLAGS}
    settings |= {"progress_bar": has_terminal(), "spark": session_of(options)}
    lengths = {text.partition("=")[0]: _measure(text) for text in options.lengths or ()}
    *sources, place = options.paths
    if not sources:
        return _add_lengths(place, lengths, settings, options, out)
    source = sources[0] if len(sources) == 1 else sources
    done = convert(source, place, **settings, lengths=lengths or None)
    out.line(str(done))
    if done.keeps_order:
        out.line("A training run over SOURCE continues on it: the order is the same.")
    out.data = asdict(done)
    return ExitCode.OK


def _measure(text: str) -> Callable[[Any], int]:
    """The function of ``COLUMN[=MODULE:FUNCTION]``."""
    _, _, function = text.partition("=")
    return imported(function, "--lengths COLUMN=") if function else len


def _add_lengths(place: str, lengths: dict[str, Any], settings: dict[str, Any], options: Namespace, out: Output) -> int:
    """Add lengths to every dataset at the path or URL, and print what they are."""
    chosen = {name: settings.pop(name) for name in _OF_LENGTHS}
    others = [name for name, value in settings.items() if value != options.parser.get_default(name)]
    if not lengths or others:
        raise ValueError(
            "convert takes SOURCE and OUT, or one DATASET with --lengths, --num-workers, --overwrite, --store-options; "
            f"found {' '.join(['one path', *others])}. Pass OUT"
        )
    for dataset in mds_at(place, options.store_options, _REMEDY):
        try:
            added = add_lengths(dataset.store.url, lengths, **chosen)
        except TypeError as error:
            raise ValueError(f"{error}. Pass a function of the value: --lengths COLUMN=MODULE:FUNCTION") from error
        summaries = {name: summary(numbers) for name, numbers in added.items()}
        out.add("datasets", {"url": dataset.store.url, "lengths": summaries})
    return ExitCode.OK
