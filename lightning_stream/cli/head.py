"""``head``: some samples of a dataset."""

from __future__ import annotations

import argparse

from lightning_stream.cli.arguments import add_source, datasets_of
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.cli.samples import add_ids, chosen_ids, plain, reader_of

HELP = "print samples: the first ones, or those with some ids"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``head``."""
    add_source(parser)
    add_ids(parser, 5)


def run(options: argparse.Namespace, out: Output) -> int:
    """Print samples of every dataset at the path or URL."""
    out.data = {"datasets": []}
    for dataset in datasets_of(options):
        out.line(dataset.store.url)
        samples = []
        with reader_of(dataset, options.store_options) as reader:
            for number in chosen_ids(options.ids, options.count, reader.snapshot.num_samples):
                sample = {name: plain(value) for name, value in reader.sample(number).items()}
                samples.append({"id": number, **sample})
                out.show({f"sample_{number}": sample})
        out.data["datasets"].append({"url": dataset.store.url, "samples": samples})
    return ExitCode.OK
