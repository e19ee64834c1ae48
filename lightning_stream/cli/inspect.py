"""``inspect``: what a dataset holds."""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import FoundDataset, add_dataset, datasets_at
from lightning_stream.cli.output import ExitCode, Output, readable
from lightning_stream.errors import NotFoundError
from lightning_stream.formats.index import Index

HELP = "show columns, samples, shards, sizes and hashes of a dataset"
_SHOWN_ARRAY = 16
_SHOWN_CLASSES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``inspect``."""
    add_dataset(parser)
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="show the first N samples, too")


def run(options: argparse.Namespace, out: Output) -> int:
    """Describe every dataset at the path or URL."""
    if options.samples < 0:
        raise ValueError(f"--samples is a number of samples; found {options.samples}")
    store_options = dict(options.store_options)
    described = []
    for dataset in datasets_at(options.remote, store_options):
        about = {"url": dataset.store.url, "split": dataset.split, **description(dataset.index), **_origin(dataset)}
        if options.samples:
            about["first_samples"] = _samples(dataset, options.samples, store_options)
        described.append(about)
        _print(about, out)
    out.data = {"datasets": described}
    return ExitCode.OK


def description(index: Index) -> dict[str, Any]:
    """What an index says about its dataset, as plain values."""
    first = index.entry(0) if index.num_shards else None
    files = [] if first is None else [file for raw, packed in first.files for file in (raw, packed) if file]
    sizes = index.shard_sizes
    return {
        "samples": index.num_samples,
        "shards": index.num_shards,
        "format": index.schemas[0].format if index.schemas else None,
        "columns": dict(index.columns),
        "schemas": len(index.schemas),
        "compression": index.schemas[0].compression if index.schemas else None,
        "hashes": sorted({name for file in files for name in file.hashes}),
        "raw_bytes": int(index.raw_bytes.sum()),
        "stored_bytes": int(index.stored_bytes.sum()),
        "samples_per_shard": [int(sizes.min()), int(sizes.max())] if len(sizes) else [0, 0],
        "largest_shard_bytes": int(index.raw_bytes.max()) if len(sizes) else 0,
        "digest": index.digest,
    }


def _origin(dataset: FoundDataset) -> dict[str, Any]:
    """What ``convert`` noted beside the index: class names, and samples of each class."""
    try:
        manifest = json.loads(dataset.store.read("manifest.json"))
    except (NotFoundError, ValueError):
        return {}
    return {name: manifest[name] for name in ("classes", "counts") if manifest.get(name)}


def _print(about: dict[str, Any], out: Output) -> None:
    least, most = about["samples_per_shard"]
    stored = f", {readable(about['stored_bytes'])} stored" if about["compression"] else ""
    out.line(about["url"])
    out.table(
        {
            "samples": f"{about['samples']:,}",
            "shards": f"{about['shards']:,} of {least:,} to {most:,} samples, up to "
            f"{readable(about['largest_shard_bytes'])}",
            "bytes": f"{readable(about['raw_bytes'])}{stored}",
            "format": str(about["format"]),
            "compression": about["compression"] or "none",
            "hashes": ", ".join(about["hashes"]) or "none: downloads are checked by size only",
            "digest": about["digest"],
        }
    )
    out.line("  columns" + (f" of the first of {about['schemas']} schemas" if about["schemas"] > 1 else ""))
    out.table(about["columns"], indent=4, width=20)
    for column, names in about.get("classes", {}).items():
        counts = about.get("counts", {}).get(column, {})
        out.line(f"  classes of {column}: {len(names)}")
        shown = names[:_SHOWN_CLASSES]
        out.table({name: f"{counts[name]:,}" if name in counts else "" for name in shown}, indent=4, width=20)
        if len(names) > len(shown):
            out.line("    ...")
    for number, sample in enumerate(about.get("first_samples", ())):
        out.line(f"  sample {number}")
        out.table({name: _text(value) for name, value in sample.items()}, indent=4, width=20)


def _text(value: Any) -> str:
    text = value["type"] if isinstance(value, dict) and set(value) == {"type"} else json.dumps(value)
    return text if len(text) <= 90 else f"{text[:87]}..."


def _samples(dataset: FoundDataset, count: int, store_options: dict[str, Any]) -> list[dict[str, Any]]:
    from lightning_stream.reading.reader import ReaderConfig, SampleReader
    from lightning_stream.reading.stream import CacheDefaults, Stream
    from lightning_stream.stores import LocalStore

    with tempfile.TemporaryDirectory(prefix="lightning-stream-") as folder:
        local = None if isinstance(dataset.store, LocalStore) else folder
        stream = Stream(remote=dataset.store.url, local=local, options=store_options)
        reader = SampleReader([stream], CacheDefaults(), ReaderConfig())
        try:
            ids = range(min(count, reader.snapshot.num_samples))
            return [{name: _plain(value) for name, value in reader.sample(number).items()} for number in ids]
        finally:
            reader.close()


def _plain(value: Any) -> Any:
    """A value as JSON; ``{"type": "JPEG 320x263"}`` for one that would fill the screen."""
    if isinstance(value, (bytes, bytearray)):
        return {"type": f"{len(value):,} bytes"}
    if hasattr(value, "getbands"):  # an image of Pillow
        return {"type": f"{value.format or value.mode} {value.width}x{value.height}"}
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "shape"):
        if np.size(value) <= _SHOWN_ARRAY and isinstance(value, np.ndarray):
            return value.tolist()
        return {"type": f"{value.dtype}{list(value.shape)}"}
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return {"type": str(value)}
    return value
