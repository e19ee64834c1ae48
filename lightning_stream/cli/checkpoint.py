"""``checkpoint``: the position of the data in a checkpoint of any trainer, and its way into the file of another."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import lightning_stream
from lightning_stream.cli.arguments import Mixture, add_reading, add_rules, add_store_options, add_streams, mixtures_of
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.errors import FormatError, NotFoundError, StateError
from lightning_stream.formats.index import INDEX_NAME
from lightning_stream.order import OrderConfig, Position, RunOrder, is_mosaic_state, mosaic_state
from lightning_stream.order.chain import Chain, stage_of_batches, stages_of_order, summarized
from lightning_stream.reading.reader import SampleReader
from lightning_stream.shared_files import scratch_folder
from lightning_stream.stores import LocalStore, Store, open_store

HELP = "show the position of the data in a checkpoint, or convert it for another trainer"
EXAMPLES = """examples:
  lightning-stream checkpoint show runs/flowers
  lightning-stream checkpoint convert runs/flowers/checkpoints/last.ckpt position.pt
  lightning-stream checkpoint convert last.ckpt moved.pt --to composer --into ep0-ba0-rank0.pt
  lightning-stream checkpoint convert last.ckpt state.pt --to mosaicml-streaming --stream s3://bucket/train

A position in a file of its own is loaded by loader.load_state_dict(read_position(FILE)), or under any trainer by
start_at(read_position(FILE), data). With --into, a copy of a checkpoint gets the position; its weights stay.
"""
_MOSAIC = "mosaicml-streaming"
_LATEST = ("last.ckpt", "last.pt", "latest-rank0.pt", "trainer_state.json")
_OF_A_RUN = tuple(f"{folder}{name}" for folder in ("", "checkpoints/", "torch/", "composer/") for name in _LATEST)


class Checkpoint(NamedTuple):
    """A checkpoint: its path or URL, its path on this machine, and the position of the data in it."""

    name: str
    path: Path
    state: Mapping[str, Any]

    @property
    def position(self) -> Position:
        """The position. Raises StateError for one of mosaicml-streaming, which is none without its order."""
        if is_mosaic_state(self.state):
            raise StateError(
                f"{self.name} holds a state of mosaicml-streaming, which does not record its order. See it with "
                "`checkpoint show`; to continue, load it into a dataset with the shuffle_algo of that run"
            )
        return Position.from_state(self.state)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``checkpoint``."""
    parser.add_argument("action", choices=("show", "convert"), help="what to do")
    parser.add_argument("checkpoint", metavar="PATH|URL", help="a checkpoint, or the folder of a training run")
    parser.add_argument("out", nargs="?", metavar="OUT", help="convert: the file to write; a .json file is JSON")
    kinds = ("plain", "lightning", "composer", _MOSAIC)
    parser.add_argument("--to", choices=kinds, help="convert: for which trainer or library (default: plain, or --into)")
    parser.add_argument("--into", metavar="PATH|URL", help="convert: a checkpoint to copy with this position in it")
    add_streams(parser)
    add_reading(parser)
    add_rules(parser)
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Show or convert a checkpoint."""
    with opened(options.checkpoint, options.store_options) as checkpoint:
        if options.action == "convert":
            return _convert(checkpoint, options, out)
        if options.out or options.to or options.into or options.stream:
            raise ValueError("OUT, --to, --into and --stream belong to `checkpoint convert`")
        return show(checkpoint, out)


def show(checkpoint: Checkpoint, out: Output) -> int:
    """Print what a checkpoint records of its data, without that data."""
    if is_mosaic_state(checkpoint.state):
        out.data = {"checkpoint": checkpoint.name, "library": _MOSAIC, **checkpoint.state}
        out.show(out.data)
        return ExitCode.OK
    position = checkpoint.position
    about, chain = described(checkpoint.name, position), recorded_chain(position)
    print_position(about, chain, out)
    data = {"samples": position.snapshot.num_samples, "shards": position.snapshot.num_shards}
    out.data = {**about, "data": data, "order": settings_of(position.order), "chain": chain.to_json()}
    return ExitCode.OK


def described(name: str, position: Position) -> dict[str, Any]:
    """Where a training run is, as its checkpoint records it."""
    what = "samples" if position.order.packing is None else "rows"
    about: dict[str, Any] = {
        "checkpoint": name,
        "epoch": position.epoch,
        f"{what}_trained_on": position.position,
        "global_batch_size": position.batch_size,
        "tail": position.tail,
    }
    if position.batch_changes:
        about["batch_size_changes"] = [f"{size} from {at}" for at, size in position.batch_changes]
    if position.order.buckets is None or position.order.buckets.batch_tokens is None:
        about["global_batches"] = position.num_steps(None)
    return about


def recorded_chain(position: Position) -> Chain:
    """The chain from streams to batches, as far as a checkpoint records it."""
    last = stage_of_batches(position.order, position.batch_size, position.tail)
    return Chain((summarized(position.snapshot), *stages_of_order(position.order), last))


def print_position(about: Mapping[str, Any], chain: Chain, out: Output) -> None:
    """Print a position and its chain; what the chain shows is not repeated."""
    out.show({name: value for name, value in about.items() if name not in ("global_batch_size", "tail")})
    out.lines(str(chain))


def settings_of(order: OrderConfig) -> dict[str, Any]:
    """The order settings that are set, as in a state."""
    schedule = None if order.schedule is None else order.schedule.to_state()
    found = {**asdict(order), "schedule": schedule, "quick_start": order.quick_start or None}
    return {name: value for name, value in found.items() if value not in (None, ())}


def matching_mixture(
    position: Position, options: argparse.Namespace, folder: str
) -> tuple[Mixture | None, Position, bool]:
    """The mixture of ``--stream`` that a position is over, and the position there; else whether it may be of others."""
    mixtures = mixtures_of(options.stream, options, folder)
    for mixture in mixtures:
        here = position.converted(mixture.snapshot)
        if here.snapshot.digest == mixture.snapshot.digest:
            return mixture, here, False
    return None, position, any(map(position.snapshot.has_streams_of, (one.snapshot for one in mixtures)))


def order_over(mixture: Mixture, position: Position, forget: str | None) -> RunOrder:
    """The order of a training run over the data of its checkpoint. Raises StateError where something is missing."""
    forgotten = mixture.forgotten(forget)
    if position.order.forgotten != (None if forgotten is None else forgotten.digest):
        own, given = position.order.forgotten, "none" if forgotten is None else f"{len(forgotten.ids):,} other ones"
        raise StateError(
            f"--forget must name the samples that the training run forgets (digest {own or 'none'}); found {given}. "
            "Pass the file of their ids, or omit --forget if there are none."
        )
    run = mixture.order(position.order, lengths_of(position.order, mixture.reader), forget)
    if differences := position.check(run, on_mismatch="warn"):
        raise StateError(f"{' '.join(differences)} Give every --stream its weight of the training run: URL=WEIGHT.")
    return run


def lengths_of(order: OrderConfig, reader: SampleReader) -> str | None:
    """The name of the lengths that a state's order depends on; None if there are none."""
    if (sized := order.packing or order.buckets) is None:
        return None
    for name in dict.fromkeys(name for index in reader.indexes for name in (*index.lengths, *index.columns)):
        with suppress(NotFoundError, FormatError):
            if reader.lengths_digest(name) == sized.lengths:
                return name
    raise StateError(
        f"The batches of the checkpoint were planned by lengths with digest {sized.lengths}, which --stream does "
        "not have. Pass the dataset with the lengths that it had in the training run."
    )


def is_checkpoint(text: str, options: Mapping[str, Any] | None) -> bool:
    """Whether a path or URL is a checkpoint or the folder of a training run, and not a dataset."""
    if Path(text).suffix in (".ckpt", ".pt", ".pth"):
        return True
    store = open_store(text, options)
    if isinstance(store, LocalStore) and store.folder.is_file():
        return store.folder.suffix == ".json" and b'"order_version"' in store.folder.read_bytes()
    if store.exists(INDEX_NAME):
        return False
    return any(map(store.exists, (*_OF_A_RUN, "meta.pt", ".metadata"))) or (
        isinstance(store, LocalStore) and any(_saved_below(store.folder))
    )


def _convert(checkpoint: Checkpoint, options: argparse.Namespace, out: Output) -> int:
    from lightning_stream.trainers.checkpoints import write_position

    if options.out is None or "://" in options.out:
        raise ValueError(f"checkpoint convert writes a file of this machine: pass its path as OUT; found {options.out}")
    if options.to in ("lightning", "composer") and options.into is None:
        raise ValueError(
            f"a checkpoint of {options.to} has weights, which are not converted: pass --into CHECKPOINT, one that "
            f"{options.to} saved with the weights to continue with, e.g. before its first step"
        )
    state, steps = checkpoint.state, -1
    if options.to == _MOSAIC and not is_mosaic_state(state):
        state, steps = _of_mosaic(checkpoint.position, options, out)
    elif options.stream:
        raise ValueError("--stream is for --to mosaicml-streaming; other trainers read the position as it is")
    if options.to == "plain" and options.into:
        raise ValueError("--into copies a checkpoint of Lightning or Composer; omit it for a plain file")
    trainer = "plain"
    with scratch_folder() as folder:
        into = None if options.into is None else local_checkpoint(options.into, options.store_options, Path(folder))[1]
        with _named(into, options.into):
            trainer = write_position(state, options.out, into, steps=steps, trainer=options.to)
    done = state["position"] if "position" in state else state["sample_in_epoch"]
    out.data = {"checkpoint": checkpoint.name, "out": options.out, "trainer": trainer, "state": dict(state)}
    what = "a file of its own" if into is None else f"a copy of {options.into}"
    out.line(f"Epoch {state['epoch']}, position {done:,}: written to {options.out}, {what}.")
    if into is not None:
        how = "fit(..., ckpt_path=OUT)" if trainer == "lightning" else "Trainer(..., load_path=OUT)"
        out.line(f"The training run continues by {how} with the weights of {options.into}.")
    return ExitCode.OK


def _of_mosaic(position: Position, options: argparse.Namespace, out: Output) -> tuple[dict[str, int], int]:
    """The state of mosaicml-streaming for a position, and the global batches before it."""
    if not options.stream:
        raise ValueError("mosaicml-streaming counts repeated samples, which the data decides: pass --stream URL")
    with scratch_folder() as folder:
        mixture, here, _ = matching_mixture(position, options, folder)
        if mixture is None:
            raise StateError("the data of --stream is not that of the checkpoint. Pass each stream of the training run")
        if mixture.snapshot.num_samples < sum(int(index.shard_sizes.sum()) for index in mixture.reader.indexes):
            raise StateError(
                "mosaicml-streaming reads every sample of a shard, but this training run omits some (deleted or "
                "filtered ones). Continue it with lightning-stream"
            )
        run = order_over(mixture, here, options.forget)
        state, mosaic = mosaic_state(here, run), position.order.mosaic
    assert mosaic is not None
    ranks = (mosaic.initial_physical_nodes or 1) * (mosaic.ranks_per_node or 1)
    settings = {
        "shuffle": position.order.shuffle,
        "shuffle_algo": position.order.algorithm,
        "batch_size": (mosaic.batch_size or position.batch_size) // ranks,
        "partition_algo": mosaic.partition,
        "shuffle_block_size": mosaic.shuffle_block_size,
        "sampling_method": position.order.sampling_method,
        "sampling_granularity": position.order.sampling_granularity,
        "batching_method": position.order.batching_method,
        "epoch_size": position.order.epoch_size,
    }
    named = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not None)
    out.line(
        f"mosaicml-streaming does not record its order. With world size {ranks}, give its StreamingDataset: {named}"
    )
    return state, here.num_steps(run)


@contextmanager
def opened(checkpoint: str, options: Mapping[str, Any] | None) -> Iterator[Checkpoint]:
    """A checkpoint, or the newest in the folder of a training run; what is downloaded is deleted at the end."""
    read_position = lightning_stream.read_position  # imports torch, or raises an error that names the extra
    with scratch_folder() as folder:
        name, path = local_checkpoint(checkpoint.rstrip("/"), options, Path(folder))
        with _named(path, name):
            state = read_position(path)
        yield Checkpoint(name, path, state)


@contextmanager
def _named(path: Path | None, name: str | None) -> Iterator[None]:
    """Raise errors about a file with the name that the user gave, and warn of nothing in a file that is refused."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            yield
    except StateError as error:
        raise StateError(str(error).replace(str(path), str(name))) from error


def local_checkpoint(checkpoint: str, options: Mapping[str, Any] | None, folder: Path) -> tuple[str, Path]:
    """The name and the path of a checkpoint; one in a store is downloaded into the folder."""
    above, _, name = checkpoint.rpartition("/")
    store = open_store(checkpoint, options)
    if isinstance(store, LocalStore):
        path = store.folder
        found = [path / one for one in _OF_A_RUN if (path / one).exists()]
        found = found or _saved_below(path)
        if found or path.is_file() or any((path / one).is_file() for one in ("meta.pt", ".metadata")):
            path = max(found, key=lambda one: one.stat().st_mtime, default=path)
            return str(path), path
    else:
        parent = None if above.endswith("/") else open_store(above, options)
        # A web server may answer for a folder, too, with a page that lists it.
        is_there = parent is not None and parent.exists(name)
        if not is_there or not Path(name).suffix:
            for one in (*_OF_A_RUN, "meta.pt"):
                if store.exists(one):
                    return f"{store.url}/{one}", _downloaded(store, one, folder)
            if store.exists(".metadata"):
                _download_sharded(store, folder)
                return store.url, folder
        if parent is not None and is_there:
            return checkpoint, _downloaded(parent, name, folder)
    raise NotFoundError(
        f"there is no checkpoint at {store.url}, and no {', '.join(_LATEST)} below it. Check the path or URL."
    )


def _saved_below(folder: Path) -> list[Path]:
    """The checkpoints of Lightning in a folder, where it keeps no link to the last one."""
    return [*folder.glob("*.ckpt"), *folder.glob("checkpoints/*.ckpt")]


def _downloaded(store: Store, name: str, folder: Path) -> Path:
    path = folder / f"checkpoint{Path(name).suffix}"
    store.get(name, path)
    return path


def _download_sharded(store: Store, folder: Path) -> None:
    """Of a sharded checkpoint, download the metadata and the one file that holds the position."""
    from lightning_stream.trainers.sharded import METADATA, held_position

    store.get(METADATA, folder / METADATA)
    if held := held_position(folder):
        store.get(held.relative_path, folder / held.relative_path)
