"""``log``: the versions of a dataset."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from lightning_stream.cli.arguments import add_store_options, mds_at
from lightning_stream.cli.output import ExitCode, Output

HELP = "list the versions of a dataset"
_REMEDY = "Only MDS datasets have a log of versions here; a version of a Delta table is read with --version N."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``log``."""
    parser.add_argument("out", metavar="PATH|URL", help="folder or URL of a dataset")
    parser.add_argument("--publish", action="store_true", help="put index.json as the newest version has it")
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Print a line for each version, the newest first."""
    from lightning_stream import versions

    found = mds_at(options.out, options.store_options, _REMEDY)
    if len(found) > 1:
        raise ValueError(f"log takes one dataset; {options.out} is a folder of splits. Pass {found[0].store.url}")
    if options.publish:
        versions.publish(options.out, store_options=options.store_options)
    entries = versions.log(options.out, store_options=options.store_options)
    out.data = {"versions": [asdict(entry) for entry in entries]}
    out.line(f"{'number':>6}  {'digest':16}  {'time (UTC)':19}  {'samples':>14}  {'change':8}message")
    for entry in reversed(entries):
        samples = "" if entry.num_samples is None else f"{entry.num_samples:,}"
        time = entry.time[:19].replace("T", " ")
        text = f"{entry.number:>6}  {entry.digest[:16]}  {time:19}  {samples:>14}  {entry.operation:8}{entry.message}"
        out.line(text.rstrip())
    return ExitCode.OK
