"""``explain`` and ``simulate``: what a checkpoint says of the data, and what an order would do with a dataset."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_stream.cli.places import add_options, add_place, datasets_at, readable, store_options
from lightning_stream.errors import NotFoundError
from lightning_stream.formats.index import Index
from lightning_stream.order import OrderConfig, Position, RunOrder, Snapshot, StreamWeights, World, explain
from lightning_stream.order.downloads import plan_downloads
from lightning_stream.order.quality import measure


def add_commands(commands: Any) -> None:
    """Add both to a parser's subcommands."""
    told = commands.add_parser("explain", help="what a checkpoint says of the data: epoch, batch, the samples next")
    told.add_argument("checkpoint", metavar="CKPT", help="a checkpoint of any of the trainers, or the folder of a run")
    told.add_argument(
        "--data", metavar="PATH|URL", help="the dataset it was trained on, to name the samples that follow"
    )
    add_options(told)
    told.set_defaults(command=_explain)
    tried = commands.add_parser(
        "simulate", help="what an order would do with a dataset: how well it shuffles, what each node would fetch"
    )
    add_place(tried)
    tried.add_argument("--batch", type=int, required=True, metavar="N", help="samples of one optimizer step")
    tried.add_argument("--nodes", type=int, default=1)
    tried.add_argument("--devices", type=int, default=1, help="of each node")
    tried.add_argument("--canonical-nodes", type=int, help="default: derived from the batch")
    tried.add_argument("--window", type=int, help="shards active at once in each canonical node")
    tried.add_argument("--seed", type=int, default=1)
    tried.add_argument("--no-shuffle", action="store_true")
    tried.set_defaults(command=_simulate)


# explain


def _explain(options: argparse.Namespace) -> int:
    from lightning_stream.trainers.checkpoints import read_position  # brings torch

    path = _checkpoint_at(Path(options.checkpoint).expanduser())
    position = Position.from_state(read_position(path))
    batches = -(-position.position // position.batch_size)
    print(f"{path}")
    lines = {
        "epoch": str(position.epoch),
        "position": f"{position.position:,} of about {position.snapshot.num_samples:,} samples: global batch {batches}",
        "global batch": f"{position.batch_size} samples, the rest of an epoch: {position.tail}",
        "data": f"{position.snapshot.num_samples:,} samples in {position.snapshot.num_shards:,} shards, "
        f"digest {position.snapshot.digest}",
        "order": _told(position.order),
    }
    for name, text in lines.items():
        print(f"  {name:<13} {text}")
    if options.data is None:
        print("  (--data=PATH|URL names the samples that come next)")
        return 0
    return _print_upcoming(position, options)


def _checkpoint_at(path: Path) -> Path:
    """A checkpoint, or the newest of a run's folder."""
    if path.is_dir():
        names = ("last.ckpt", "checkpoints/last.ckpt", "last.pt", "torch/last.pt", "composer/latest-rank0.pt")
        found = [path / name for name in names if (path / name).exists()]
        if found:
            return max(found, key=lambda one: one.stat().st_mtime)
    if not path.is_file() and not (path / ".metadata").is_file():
        raise NotFoundError(f"there is no checkpoint at {path.absolute()}, nor in a run's folder there")
    return path


def _told(order: OrderConfig) -> str:
    shown = {name: value for name, value in asdict(order).items() if value is not None}
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def _print_upcoming(position: Position, options: argparse.Namespace) -> int:
    found = datasets_at(options.data, store_options(options.option))
    indexes = {name: index for name, (_, index) in found.items()}
    for name, index in indexes.items():
        snapshot = _snapshot(index)
        if snapshot.digest == position.snapshot.digest:
            run = RunOrder(snapshot, (StreamWeights(),), position.order)
            print(str(explain(run, position)))
            return 0
        where = f"{options.data}/{name}" if name else options.data
        print(f"{where} is not the data of this checkpoint: its digest is {snapshot.digest}")
    print("A mixture's streams cannot be named here: loader.explain() does it in the run's own code.")
    return 1


def _snapshot(index: Index) -> Snapshot:
    return Snapshot.of([index.shard_sizes], names=[index.where], stream_digests=[index.digest])


# simulate


def _simulate(options: argparse.Namespace) -> int:
    world = World(0, options.nodes * options.devices, options.devices)
    for store, index in datasets_at(options.place, store_options(options.option)).values():
        config = OrderConfig.resolve(
            batch_size=options.batch,
            shuffle=not options.no_shuffle,
            seed=options.seed,
            canonical_nodes=options.canonical_nodes,
            window=options.window,
            device_batch_size=max(1, options.batch // world.num_ranks),
            world=world,
        )
        run = RunOrder(_snapshot(index), (StreamWeights(),), config)
        print(f"{store.url}: {index.num_samples:,} samples in {index.num_shards:,} shards")
        print(f"  order      {_told(config)}")
        print(f"  shuffle    {measure(run, batch_size=options.batch, shard_bytes=index.raw_bytes)}")
        plan = plan_downloads(run, epoch=0, batch_size=options.batch, world=world, shard_bytes=index.stored_bytes)
        per_node = ", ".join(readable(int(one)) for one in plan.num_bytes)
        print(f"  fetched    {per_node} by node in an epoch, {plan.factor:.2f} times the data")
        if plan.warning:
            print(f"  {plan.warning}")
    return 0
