"""``diff`` of two training runs: which settings differ, and the first global batch that does."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cli.arguments import add_reading, add_rules, add_store_options, add_streams
from lightning_stream.cli.checkpoint import is_checkpoint, matching_mixture, opened, order_over, settings_of
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.errors import redact
from lightning_stream.order import Position, RunOrder, batches_of
from lightning_stream.order.chain import PUBLIC_NAMES
from lightning_stream.shared_files import scratch_folder

HELP = "compare the order of two training runs"
EXAMPLES = """exit codes: 0 if the runs have one order; 1 if not

examples:
  lightning-stream diff runs/a runs/b/checkpoints/last.ckpt --stream s3://bucket/train
"""
_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``diff``."""
    for name in ("first", "second"):
        parser.add_argument(name, metavar="PATH|URL", help="a checkpoint, or the folder of a training run")
    add_streams(parser)
    add_reading(parser)
    add_rules(parser)
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Compare the orders of two training runs; where they stand in these is no difference."""
    for given in (options.first, options.second):
        if not is_checkpoint(given, options.store_options):
            raise ValueError(f"diff compares two training runs or their checkpoints; {redact(given)} is neither")
    with ExitStack() as stack:
        pair = [stack.enter_context(opened(one, options.store_options)) for one in (options.first, options.second)]
        positions = [one.position for one in pair]
    one, other = map(_settings, positions)
    differences = {
        name: [one.get(name), other.get(name)] for name in {**one, **other} if one.get(name) != other.get(name)
    }
    out.data = {"checkpoints": [checkpoint.name for checkpoint in pair], "differences": differences}
    out.line(f"DIFFERENT: {', '.join(differences)}" if differences else "EQUAL: the order of both runs is the same")
    for name, (mine, theirs) in differences.items():
        out.line(f"  {name}: {_shown(mine)} and {_shown(theirs)}")
    for checkpoint, position in zip(pair, positions, strict=True):
        out.line(f"  {checkpoint.name} stands at epoch {position.epoch}, position {position.position:,}")
    if differences and options.stream:
        out.data["first_batch"] = _first_batch(positions, options, out)
    elif differences:
        out.line("  Pass --stream URL to see the first global batch that differs.")
    return ExitCode.NO if differences else ExitCode.OK


def _settings(position: Position) -> dict[str, Any]:
    """All that decides the global batches of a run, by the names of the library's arguments."""
    found: dict[str, Any] = {
        "data": f"{position.snapshot.num_samples:,} samples in {position.snapshot.num_shards:,} shards, digest "
        f"{position.snapshot.digest[:16]}",
        "weights of the streams": f"digest {position.weights[:16]}",
        "global_batch_size": position.batch_size,
        "tail": position.tail,
    }
    if position.batch_changes:
        found["global_batch_size changes"] = [f"{size} from position {at}" for at, size in position.batch_changes]
    for name, value in settings_of(position.order).items():
        public = PUBLIC_NAMES.get(name, name)
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        found |= {f"{public}.{key}" if key else public: one for key, one in inner if one is not None}
    return found


def _first_batch(positions: list[Position], options: argparse.Namespace, out: Output) -> dict[str, Any] | None:
    """The first global batch that differs; None if there is none up to the later run's epoch."""
    with scratch_folder() as folder:
        runs = []
        for number, position in enumerate(positions):
            mixture, here, _ = matching_mixture(position, options, f"{folder}/{number}")
            if mixture is None:
                out.line("  The data of --stream is not that of both runs, so their batches cannot be compared.")
                return None
            runs.append((order_over(mixture, here, options.forget), here))
        last = max(position.epoch for position in positions)
        for epoch in range(last + 1):
            for step, ids in enumerate(_side_by_side(runs, epoch)):
                out.progress(f"epoch {epoch}, batch {step:,}")
                if ids[0] is None or ids[1] is None or not np.array_equal(np.sort(ids[0]), np.sort(ids[1])):
                    found = [None if one is None else one.tolist() for one in ids]
                    texts = ["none" if one is None else _shown(one) for one in found]
                    out.line(f"  The first global batch that differs is number {step:,} of epoch {epoch}:")
                    out.line(f"    ids {texts[0]}")
                    out.line(f"    ids {texts[1]}")
                    return {"epoch": epoch, "batch": step, "ids": found}
    out.line(f"  No global batch differs in epochs 0 to {last}.")
    return None


def _side_by_side(
    runs: list[tuple[RunOrder, Position]], epoch: int
) -> Iterator[tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]]:
    one, other = (batches_of(run, position, epoch) for run, position in runs)
    return zip_longest(one, other)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        more = f", ... ({len(value):,})" if len(value) > _SHOWN else ""
        return ", ".join(map(str, value[:_SHOWN])) + more
    return "none" if value is None else str(value)
