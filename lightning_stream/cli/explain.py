"""``explain``: where a checkpoint is in its data, and which samples come next."""

from __future__ import annotations

import argparse
import pickle
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning_stream
from lightning_stream.cli.arguments import Mixture, add_store_options, add_streams, mixtures_of
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.errors import NotFoundError, StateError
from lightning_stream.order import OrderConfig, Position, explain
from lightning_stream.stores import LocalStore, Store, open_store

HELP = "show the position of a checkpoint, and the next samples"
EXAMPLES = """examples:
  lightning-stream explain runs/flowers
  lightning-stream explain s3://bucket/run/last.ckpt --stream s3://bucket/train
  lightning-stream explain ep1-ba400.pt --stream s3://bucket/code=0.3 --stream s3://bucket/text=0.7
"""
_LATEST = ("last.ckpt", "last.pt", "latest-rank0.pt")
_OF_A_RUN = tuple(f"{folder}{name}" for folder in ("", "checkpoints/", "torch/", "composer/") for name in _LATEST)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``explain``."""
    parser.add_argument(
        "checkpoint",
        metavar="PATH|URL",
        help="a checkpoint of Lightning, Composer or plain PyTorch, or the folder of a training run",
    )
    add_streams(parser)
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Explain a checkpoint; with ``--stream``, over the data that it was trained on."""
    name, position = _position_in(options.checkpoint, options.store_options)
    about: dict[str, Any] = {
        "checkpoint": name,
        "epoch": position.epoch,
        "samples_trained_on": position.position,
        "global_batches": -(-position.position // position.batch_size),
        "global_batch_size": position.batch_size,
        "tail": position.tail,
        "data": {"samples": position.snapshot.num_samples, "shards": position.snapshot.num_shards},
        "order": settings_of(position.order),
    }
    matching, chosen = None, False
    if options.stream:
        mixtures = mixtures_of(options.stream, options.store_options)
        chosen = any(map(position.snapshot.has_streams_of, (one.snapshot for one in mixtures)))
        matching = next((one for one in mixtures if one.snapshot.digest == position.snapshot.digest), None)
        if matching:
            about["next"] = _next(position, matching)
        about["data"]["matches_stream"] = matching is not None
    out.show(about)
    out.data = about
    if options.stream and not matching:
        out.line(
            "  The training run read some of the samples of --stream, by a filter, exclude_ids or subset, so its next "
            "samples are not known here. Use loader.explain() in its script."
            if chosen
            else "  The data of --stream is not that of the checkpoint. Pass each stream of the training run, in order."
        )
    return ExitCode.OK if matching or not options.stream else ExitCode.NO


def settings_of(order: OrderConfig) -> dict[str, Any]:
    """The order settings that are set."""
    schedule = None if order.schedule is None else order.schedule.to_state()
    return {name: value for name, value in {**asdict(order), "schedule": schedule}.items() if value is not None}


def _next(position: Position, mixture: Mixture) -> dict[str, Any]:
    """The samples that come next over the checkpoint's data."""
    order = mixture.order(position.order)
    if differences := position.check(order, on_mismatch="warn"):
        raise StateError(f"{' '.join(differences)} Give every --stream its weight of the training run: URL=WEIGHT.")
    about = explain(order, position)
    found: dict[str, Any] = {"epoch": about.epoch, "epoch_samples": about.num_samples}
    found["global_batches_left"] = about.steps_left
    if batch := about.upcoming:
        streams, shards = sorted(set(batch.streams.tolist())), sorted(set(batch.shards.tolist()))
        found |= {"global_batch": batch.step, "streams": streams, "shards": shards, "ids": batch.ids.tolist()}
    return found


def _position_in(checkpoint: str, options: dict[str, Any] | None) -> tuple[str, Position]:
    """The name of a checkpoint, or of the newest in the folder of a training run, and the position in it."""
    read_position = lightning_stream.read_position  # imports torch, or raises an error that names the extra
    with tempfile.TemporaryDirectory(prefix="lightning-stream-") as folder:
        name, path = _local(checkpoint.rstrip("/"), options, Path(folder))
        try:
            return name, Position.from_state(read_position(path))
        except StateError as error:
            raise StateError(str(error).replace(str(path), name)) from error
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise StateError(
                f"{name} is not a checkpoint that torch reads with weights_only=True ({type(error).__name__}). Check "
                "the path; a file that you trust can be read in code: read_position(path, trusted=True)"
            ) from error


def _local(checkpoint: str, options: dict[str, Any] | None, folder: Path) -> tuple[str, Path]:
    """The name and the path of a checkpoint; one in a store is downloaded into the folder."""
    above, _, name = checkpoint.rpartition("/")
    store = open_store(checkpoint, options)
    if isinstance(store, LocalStore):
        path = store.folder
        found = [path / one for one in _OF_A_RUN if (path / one).exists()]
        if found or path.is_file() or any((path / one).is_file() for one in ("meta.pt", ".metadata")):
            path = max(found, key=lambda one: one.stat().st_mtime, default=path)
            return str(path), path
    elif not above.endswith("/") and (parent := open_store(above, options)).exists(name):
        parent.get(name, folder / "checkpoint")
        return checkpoint, folder / "checkpoint"
    else:
        for one in (*_OF_A_RUN, "meta.pt"):
            if store.exists(one):
                store.get(one, folder / "checkpoint")
                return f"{store.url}/{one}", folder / "checkpoint"
        if store.exists(".metadata"):
            _download_sharded(store, folder)
            return store.url, folder
    raise NotFoundError(
        f"there is no checkpoint at {store.url}, and no {', '.join(_LATEST)} below it. Check the path or URL."
    )


def _download_sharded(store: Store, folder: Path) -> None:
    """Of a sharded checkpoint, download the metadata and the one file that holds the position."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from lightning_stream.loading.plain import STATE_KEY

    store.get(".metadata", folder / ".metadata")
    held = FileSystemReader(folder).read_metadata().storage_data or {}
    for name in {info.relative_path for index, info in held.items() if index.fqn.endswith(f".{STATE_KEY}")}:
        store.get(name, folder / name)
