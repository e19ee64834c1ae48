"""``pull``: download a dataset into a folder, or into the cache."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_stream.cli.arguments import add_flags, add_source, datasets_of, reader_over
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.processes import num_processes
from lightning_stream.threads import DaemonPool

EXAMPLES = """Afterwards StreamingDataset(URL, local=FOLDER) downloads nothing.

examples:
  lightning-stream pull s3://bucket/train /data/train
  lightning-stream pull s3://bucket/train
"""
_THREADS = 16


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``pull``."""
    add_source(parser)
    parser.add_argument("local", metavar="FOLDER", nargs="?", help="where to; without it, the default cache")
    add_flags(parser, {"--num-workers N": f"files at once (default: {_THREADS})"})


def run(options: Namespace, out: Output) -> int:
    """Download every dataset at the URL."""
    workers = num_processes(options.num_workers or _THREADS)
    for dataset in datasets_of(options):
        if dataset.is_local:
            raise ValueError(
                f"pull downloads from a store; {dataset.remote} is a folder of this machine, which is read where it is"
            )
        split = dataset.remote.rstrip("/")[len(options.remote.rstrip("/")) :].strip("/")
        local = None if options.local is None else str(Path(options.local, split))
        reader = reader_over([dataset.stream(local)])  # which stores the index, too
        (cache,) = reader.caches
        (index,) = reader.indexes
        entries = list(index)
        num_new = sum(not cache.present(entry) for entry in entries)
        with DaemonPool(workers, "pull") as pool:
            for num_done, fetch in enumerate([pool.submit(cache.ensure, entry) for entry in entries], 1):
                fetch.result()
                out.progress(f"{num_done:,} of {index.num_shards:,} shards")
        for name in index.lengths:
            reader.lengths(name)
        _ = reader.members  # which samples are deleted is a file, too
        facts = {"url": dataset.store.url, "folder": str(cache.folder), "shards": len(entries), "new_shards": num_new}
        out.add("datasets", facts)
    return ExitCode.OK
