"""``position``: where a training run is in its data, which samples come, and where two runs differ."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import Mixture, add_reading, add_rules, add_store_options, add_streams, mixtures_of
from lightning_stream.cli.checkpoints import Checkpoint, opened
from lightning_stream.cli.output import ExitCode, Output, separated
from lightning_stream.cli.sample_page import checked_path, write_page
from lightning_stream.errors import FormatError, NotFoundError, StateError
from lightning_stream.order import (
    EpochOrder,
    OrderConfig,
    Position,
    RunOrder,
    batches_of,
    explain,
    is_mosaic_state,
    mosaic_state,
    trace,
)
from lightning_stream.order.chain import PUBLIC_NAMES, Chain, stage_of_batches, stages_of_order, summarized
from lightning_stream.order.tracing import TracedBatch
from lightning_stream.reading.data_stages import stages_of_reader
from lightning_stream.reading.reader import SampleReader
from lightning_stream.shared_files import scratch_folder

EXAMPLES = """exit codes: 0; 1 if the data is not that of the checkpoint, or two runs differ

examples:
  lightning-stream position runs/flowers
  lightning-stream position runs/flowers --next 2
  lightning-stream position runs/flowers --step 1234 --page step.html
  lightning-stream position ep1-ba400.pt --stream s3://bucket/code=0.3 --stream s3://bucket/text=0.7
  lightning-stream position runs/flowers runs/seed7

The data is what the run recorded in data_log.jsonl in its folder; else pass --stream for each stream of the run.
A checkpoint of Lightning, Composer, Transformers or a plain loop; start_at(read_position(CHECKPOINT), data) continues
from it under any of these in Python.
"""
_SHOWN = 8
_ROWS_AT_ONCE = 1 << 14
_OTHER_DATA = "The data of --stream is not that of the checkpoint. Pass each stream of the training run, in order."
_OTHER_SAMPLES = (
    "The training run read other samples of --stream: pass its --filter-lengths and --exclude-ids. Where a function or "
    "subset chose them, its next samples are not known here: use loader.explain() in its script."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``position``."""
    text = "a checkpoint, or the folder of a training run; two of them are compared"
    parser.add_argument("checkpoints", metavar="RUN|CHECKPOINT", nargs="+", help=text)
    parser.add_argument("--next", type=int, metavar="N", help="show the samples of the next N global batches")
    parser.add_argument("--step", type=int, metavar="N", help="show the samples of a step of its epoch, from 0")
    parser.add_argument("--page", metavar="FILE", help="write these samples as one page of HTML")
    add_streams(parser)
    add_reading(parser)
    add_rules(parser)
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Show a position, or compare two."""
    asks_for_samples = options.step is not None or options.next is not None
    if options.page is not None:
        checked_path(options.page)
        if not asks_for_samples:
            raise ValueError("--page shows samples: pass --step N or --next N")
    if len(options.checkpoints) > 2:
        raise ValueError(f"position takes one checkpoint, or two to compare; found {len(options.checkpoints)}")
    with ExitStack() as stack:
        found = [stack.enter_context(opened(text, options.store_options)) for text in options.checkpoints]
        if len(found) == 2:
            return _compare(found, options, out)
        if is_mosaic_state(found[0].state):
            _ = found[0].position if asks_for_samples or options.stream else None  # which raises the reason
            out.data = {"checkpoint": found[0].name, "library": "mosaicml-streaming", **found[0].state}
            out.show(out.data)
            return ExitCode.OK
        return _show(found[0], options, asks_for_samples, out)


def _show(checkpoint: Checkpoint, options: argparse.Namespace, asks_for_samples: bool, out: Output) -> int:
    """Print what a checkpoint records of its data; over that data, also which samples come or came."""
    position, mixture = checkpoint.position, None
    streams = options.stream or (checkpoint.streams if asks_for_samples else [])
    if asks_for_samples and not streams:
        raise ValueError("samples are computed from the data: pass --stream URL for each stream of the training run")
    with scratch_folder() as folder:
        batches: list[TracedBatch] = []
        trained: dict[str, Any] = {}
        chain, problem = _recorded_chain(position), ""
        if streams:
            mixture, position, problem = _matching(position, streams, options, folder)
            trained["matches_stream"] = mixture is not None
        if mixture is not None:
            order = _order_over(mixture, position, options.forget)
            chain = Chain((*_stages(mixture, position, order), *chain.stages[-1:]))
            trained |= _trained(mixture, position, order)
            batches = _batches(position, order, options)
        about = {"checkpoint": checkpoint.name, **_recorded(position), **trained}
        out.show({name: value for name, value in about.items() if name not in ("global_batch_size", "tail")})
        out.lines(str(chain))
        about["batches"] = [_described(batch, position, order) for batch in batches] if mixture else []
        for batch in about["batches"]:
            out.show({f"global_batch_{batch['global_batch']}": separated(batch)})
        if mixture and options.page:
            _write(options.page, batches, mixture, out)
    data = {"samples": position.snapshot.num_samples, "shards": position.snapshot.num_shards}
    out.data = {**about, "data": data, "order": settings_of(position.order), "chain": chain.to_json()}
    if problem:
        out.line(f"  {problem}")
    return ExitCode.NO if problem else ExitCode.OK


def _recorded(position: Position) -> dict[str, Any]:
    """Where a training run is, as its checkpoint records it."""
    what = "samples" if position.order.packing is None else "rows"
    about: dict[str, Any] = {
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


def _recorded_chain(position: Position) -> Chain:
    """The chain from streams to batches, as far as a checkpoint records it."""
    last = stage_of_batches(position.order, position.batch_size, position.tail)
    return Chain((summarized(position.snapshot), *stages_of_order(position.order), last))


def settings_of(order: OrderConfig) -> dict[str, Any]:
    """The order settings that are set, as in a state."""
    schedule = None if order.schedule is None else order.schedule.to_state()
    found = {**asdict(order), "schedule": schedule, "quick_start": order.quick_start or None}
    return {name: value for name, value in found.items() if value not in (None, ())}


def _matching(
    position: Position, streams: Sequence[str], options: argparse.Namespace, folder: str
) -> tuple[Mixture | None, Position, str]:
    """The mixture that a position is over, and the position there; None with the reason where it is over other data."""
    mixtures = mixtures_of(streams, options, folder)
    for mixture in mixtures:
        here = position.converted(mixture.snapshot)
        if here.snapshot.digest == mixture.snapshot.digest:
            return mixture, here, ""
    has_others = any(position.snapshot.has_streams_of(mixture.snapshot) for mixture in mixtures)
    return None, position, _OTHER_SAMPLES if has_others else _OTHER_DATA


def _order_over(mixture: Mixture, position: Position, forget: str | None) -> RunOrder:
    """The order of a training run over the data of its checkpoint. Raises StateError where something is missing."""
    forgotten = mixture.forgotten(forget)
    digest = None if forgotten is None else forgotten.digest
    if position.order.forgotten != digest:
        given = "none" if forgotten is None else f"{len(forgotten.ids):,} other ones"
        raise StateError(
            f"--forget must name the samples that the training run forgets (digest {position.order.forgotten or 'none'}"
            f"); found {given}. Pass the file of their ids, or omit --forget if there are none."
        )
    order = mixture.order(position.order, _lengths_of(position.order, mixture.reader), forget)
    if differences := position.check(order, on_mismatch="warn"):
        raise StateError(f"{' '.join(differences)} Give every --stream its weight of the training run: URL=WEIGHT.")
    return order


def _lengths_of(order: OrderConfig, reader: SampleReader) -> str | None:
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


def _stages(mixture: Mixture, position: Position, order: RunOrder) -> list[Any]:
    lengths = _lengths_of(position.order, mixture.reader)
    stages = stages_of_reader(mixture.reader, [] if lengths is None else [lengths], order)
    return stages + stages_of_order(position.order, order, epoch=position.epoch, count_rows=True)


def _trained(mixture: Mixture, position: Position, order: RunOrder) -> dict[str, Any]:
    """What the data says of a position: what was trained on, what is left, and its state for mosaicml-streaming."""
    about: dict[str, Any] = {"global_batches": position.num_steps(order)}
    if position.order.packing is not None:
        documents, tokens = _held(order.epoch(position.epoch), 0, position.position)
        about |= {"documents_begun": documents, "tokens_trained_on": tokens}
    explanation = explain(order, position)
    what = "samples" if position.order.packing is None else "rows"
    about |= {f"epoch_{what}": explanation.num_samples, "global_batches_left": explanation.steps_left}
    num_written = sum(int(index.shard_sizes.sum()) for index in mixture.reader.indexes)
    if position.order.mosaic is not None and mixture.snapshot.num_samples == num_written:
        with suppress(StateError):
            about["mosaicml_streaming_state"] = mosaic_state(position, order)
    return about


def _batches(position: Position, order: RunOrder, options: argparse.Namespace) -> list[TracedBatch]:
    """The global batches that the user asks for; the next one if nothing is asked."""
    found = [] if options.step is None else [trace(order, position, options.step)]
    upcoming = explain(order, position).upcoming
    count = (options.step is None) if options.next is None else options.next
    if upcoming is None or not count:
        return found
    here = position.normalised(order, batch_size=position.batch_size, tail=position.tail, world=None)
    steps = range(upcoming.step, upcoming.step + min(count, explain(order, position).steps_left))
    return found + [trace(order, here, step) for step in steps]


def _described(batch: TracedBatch, position: Position, order: RunOrder) -> dict[str, Any]:
    about: dict[str, Any] = {"epoch": batch.epoch, "global_batch": batch.step}
    for name in ("streams", "shards"):
        about[name] = sorted(set(getattr(batch, name).tolist()))
    about["ids"] = batch.ids.tolist()
    if position.order.packing is not None:
        documents, tokens = _held(order.epoch(batch.epoch), batch.begin, batch.end)
        about |= {"rows": batch.end - batch.begin, "documents_begun": documents, "tokens": tokens}
    return about


def _held(order: EpochOrder, begin: int, end: int) -> tuple[int, int]:
    """How many documents begin in the rows at positions [begin, end), and their tokens."""
    documents = tokens = 0
    for first in range(begin, end, _ROWS_AT_ONCE):
        rows = order.rows(first, min(first + _ROWS_AT_ONCE, end))
        assert rows is not None
        documents += int(np.count_nonzero(rows.first == 0))
        tokens += int(rows.num_tokens.sum())
    return documents, tokens


def _write(page: str, batches: Sequence[TracedBatch], mixture: Mixture, out: Output) -> None:
    samples = {number: mixture.reader.sample(number) for batch in batches for number in batch.ids.tolist()}
    title = f"Epoch {batches[0].epoch}, global batches {', '.join(str(batch.step) for batch in batches)}"
    about = f"{len(samples):,} samples of {', '.join(mixture.snapshot.stream_names)}"
    write_page(checked_path(page), title, about, samples)
    out.line(f"  {len(samples):,} samples in {page}")


def _compare(pair: Sequence[Checkpoint], options: argparse.Namespace, out: Output) -> int:
    """Compare the orders of two training runs; where they stand in these is no difference."""
    positions = [checkpoint.position for checkpoint in pair]
    first, second = map(_settings, positions)
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    differences = {name: [first.get(name), second.get(name)] for name in names}
    out.data = {"checkpoints": [checkpoint.name for checkpoint in pair], "differences": differences}
    out.line(f"DIFFERENT: {', '.join(names)}" if names else "EQUAL: the order of both runs is the same")
    for name, values in differences.items():
        out.line(f"  {name}: {_short(values[0])} and {_short(values[1])}")
    for checkpoint, position in zip(pair, positions, strict=True):
        out.line(f"  {checkpoint.name} stands at epoch {position.epoch}, position {position.position:,}")
    streams = options.stream or pair[0].streams
    if differences and streams:
        out.data["first_batch"] = _first_batch(positions, streams, options, out)
    elif differences:
        out.line("  Pass --stream URL to see the first global batch that differs.")
    return ExitCode.NO if differences else ExitCode.OK


def _settings(position: Position) -> dict[str, Any]:
    """All that decides the global batches of a run, by the names of the library's arguments."""
    snapshot = position.snapshot
    data = f"{snapshot.num_samples:,} samples in {snapshot.num_shards:,} shards, digest {snapshot.digest[:16]}"
    found: dict[str, Any] = {
        "data": data,
        "weights of the streams": f"digest {position.weights[:16]}",
        "global_batch_size": position.batch_size,
        "tail": position.tail,
    }
    if position.batch_changes:
        found["global_batch_size changes"] = [f"{size} from position {at}" for at, size in position.batch_changes]
    for name, value in settings_of(position.order).items():
        public = PUBLIC_NAMES.get(name, name)
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        found |= {f"{public}.{key}" if key else public: part for key, part in inner if part is not None}
    return found


def _first_batch(
    positions: Sequence[Position], streams: Sequence[str], options: argparse.Namespace, out: Output
) -> dict[str, Any] | None:
    """The first global batch that differs; None if there is none up to the later run's epoch."""
    with scratch_folder() as folder:
        runs = []
        for number, position in enumerate(positions):
            mixture, here, problem = _matching(position, streams, options, f"{folder}/{number}")
            if mixture is None:
                out.line(f"  {problem}")
                return None
            runs.append((_order_over(mixture, here, options.forget), here))
        last = max(position.epoch for position in positions)
        for epoch in range(last + 1):
            both = zip_longest(*(batches_of(order, here, epoch) for order, here in runs))
            for step, batches in enumerate(both):
                out.progress(f"epoch {epoch}, batch {step:,}")
                ids = [None if batch is None else batch.tolist() for batch in batches]
                if ids[0] is None or ids[1] is None or sorted(ids[0]) != sorted(ids[1]):
                    out.line(f"  The first global batch that differs is number {step:,} of epoch {epoch}:")
                    out.line(f"    ids {_short(ids[0])}")
                    out.line(f"    ids {_short(ids[1])}")
                    return {"epoch": epoch, "batch": step, "ids": ids}
    out.line(f"  No global batch differs in epochs 0 to {last}.")
    return None


def _short(value: Any) -> str:
    if isinstance(value, list):
        more = f", ... ({len(value):,})" if len(value) > _SHOWN else ""
        return ", ".join(map(str, value[:_SHOWN])) + more
    return "none" if value is None else str(value)
