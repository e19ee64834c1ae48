"""``report``: the page of a training run, drawn from its log."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_stream.cli.output import ExitCode, Output

EXAMPLES = """examples:
  lightning-stream report runs/7
  lightning-stream report runs/7/data_log-1.jsonl --out former.html
  lightning-stream report runs/7 --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    parser.add_argument("run_path", metavar="RUN", help="the folder of a run, or its data_log.jsonl")
    parser.add_argument("--out", metavar="FILE", help="where to write the page (default: beside the log)")


def run(options: Namespace, out: Output) -> int:
    """Draw the page, and print the numbers of the run."""
    from lightning_stream.pages import write_run_page
    from lightning_stream.run_log import read_run

    log = read_run(options.run_path)
    path = write_run_page(log.path, None if options.out is None else Path(options.out))
    out.data = {**log.summary(), "page": str(path)}
    counts = ("lost", "repeated")  # of which 0 is news
    shown = {name: value for name, value in out.data.items() if value or (name in counts and value is not None)}
    out.show(shown)
    return ExitCode.OK
