"""``position``: where a training run is in its data, which samples come, and where two runs differ."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from lightning_stream.cli.arguments import add_flags, add_mixture, readers_of
from lightning_stream.cli.checkpoints import Checkpoint, read_checkpoint
from lightning_stream.cli.output import ExitCode, Facts, Output
from lightning_stream.cli.samples import write_page
from lightning_stream.errors import FormatError, NotFoundError, StateError
from lightning_stream.order import EpochOrder, OrderConfig, Position, RunOrder, is_mosaic_state, mosaic_state
from lightning_stream.order.forget import Forgotten
from lightning_stream.questions import explain, trace
from lightning_stream.questions.describe import PUBLIC_NAMES, Chain, stage_of_batches, stages_of_order, summarized
from lightning_stream.questions.tracing import TracedBatch, steps_done
from lightning_stream.reading.data_stages import stages_of_reader
from lightning_stream.reading.filters import ids_of
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import weights_of
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
_ROWS_AT_ONCE = 1 << 14
_OTHER_DATA = "The data of --stream is not that of the checkpoint. Pass each stream of the training run, in order."
_OTHER_SAMPLES = (
    "The training run read other samples of --stream: pass its --filter-lengths and --exclude-ids. Where a function or "
    "subset chose them, its next samples are not known here: use loader.explain() in its script."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``position``."""
    text = "a checkpoint, or the folder of a training run; two of them are compared"
    parser.add_argument("checkpoints", metavar="RUN|CHECKPOINT", nargs="+", help=text)
    add_flags(parser, {
        "--next N": "show the samples of the next N global batches",
        "--step I": "show the samples of a step of its epoch, from 0",
        "--page FILE.html": "write these samples as one page of HTML",
        "--lengths EXPRESSION": "what the run packed or sorted its samples by, where it is no name of lengths",
    })  # fmt: skip
    add_mixture(parser)


def run(options: Namespace, out: Output) -> int:
    """Show a position, or compare two."""
    wants_samples = options.step is not None or options.next is not None
    if options.page and not wants_samples:
        raise ValueError("--page shows samples: pass --step N or --next N")
    if len(options.checkpoints) > 2:
        raise ValueError(f"position takes one checkpoint, or two to compare; found {len(options.checkpoints)}")
    if len(options.checkpoints) > 1 and (wants_samples or options.stream):
        raise ValueError(
            "two runs are compared by their checkpoints alone: omit --next, --step and --stream, or one run"
        )
    first, *others = [read_checkpoint(text, options.store_options) for text in options.checkpoints]
    if others:
        return _compare([first, *others], out)
    streams = options.stream or (first.streams if wants_samples else [])
    if is_mosaic_state(first.state) and not streams:
        out.data = {"checkpoint": first.name, "library": "mosaicml-streaming", **first.state}
        out.show(out.data)
        return ExitCode.OK
    if wants_samples and not streams:
        raise ValueError(
            "samples are computed from the data: pass --stream URL for each stream of the run. Those of a map-style "
            "dataset are shown by loader.explain() and loader.trace(step) in its script"
        )
    return _show(first.name, first.position, streams, options, out)


def _show(name: str, position: Position, streams: list[str], options: Namespace, out: Output) -> int:
    """Print what a checkpoint records of its data; over that data, also which samples come or came."""
    last = stage_of_batches(position.order, position.batch_size, position.tail)
    chain = Chain((summarized(position.snapshot), *stages_of_order(position.order), last))
    facts = {"checkpoint": name, **_recorded(position)}
    problem = ""
    batches: list[Facts] = []
    with scratch_folder() as folder:
        if streams:
            reader, position, problem = _matching(position, streams, options, folder)
            facts["matches_stream"] = reader is not None
        if streams and reader is not None:
            order, lengths = _order_over(reader, position, options)
            stages = stages_of_reader(reader, [lengths] if lengths else [], order)
            stages += stages_of_order(position.order, order, epoch=position.epoch, count_rows=True)
            chain = Chain((*stages, last))
            facts |= _computed(reader, position, order)
            batches = _batches(position, order, options)
        out.show({key: value for key, value in facts.items() if key not in ("global_batch_size", "tail")})
        out.lines(str(chain))
        for batch in batches:
            named = {name: value for name, value in batch.items() if name != "global_batch"}
            out.show({f"global_batch_{batch['global_batch']}": named})
        if options.page and reader is not None:
            ids = [sample_id for batch in batches for sample_id in batch["ids"]]
            samples = {sample_id: reader.sample(sample_id) for sample_id in ids}
            title = f"{name}, epoch {position.epoch}, global batches: {len(batches)}"
            write_page(options.page, title, f"{len(ids):,} samples of {', '.join(streams)}", samples)
            out.line(f"  {len(ids):,} samples in {options.page}")
    data = {"samples": position.snapshot.num_samples, "shards": position.snapshot.num_shards}
    out.data = {**facts, "batches": batches, "data": data, "order": _settings(position), "chain": chain.to_json()}
    out.lines(problem)
    return ExitCode.NO if problem else ExitCode.OK


def _recorded(position: Position) -> Facts:
    """Where a training run is, as its checkpoint records it."""
    what = "samples" if position.order.packing is None else "rows"
    facts: Facts = {
        "epoch": position.epoch,
        f"{what}_trained_on": position.position,
        "global_batch_size": position.batch_size,
        "tail": position.tail,
    }
    if position.batch_changes:
        facts["batch_size_changes"] = [f"{size} from {at}" for at, size in position.batch_changes]
    if position.order.buckets is None or position.order.buckets.batch_tokens is None:
        facts["global_batches"] = position.num_steps(None)
    return facts


def _settings(position: Position) -> Facts:
    """The settings of the order that are set, as in a state."""
    return {name: value for name, value in position.order.to_state().items() if value not in (None, (), [])}


def _matching(
    position: Position, streams: Sequence[str], options: Namespace, folder: str
) -> tuple[SampleReader | None, Position, str]:
    """The data that a position is over, and the position there; None with the reason where it is over other data."""
    readers = readers_of(streams, options, folder)
    for reader in readers:
        here = position.converted(reader.snapshot)
        if here.snapshot.digest == reader.snapshot.digest:
            return reader, here, ""
    has_others = any(position.snapshot.has_streams_of(reader.snapshot) for reader in readers)
    return None, position, _OTHER_SAMPLES if has_others else _OTHER_DATA


def _order_over(reader: SampleReader, position: Position, options: Namespace) -> tuple[RunOrder, str | None]:
    """The order of a run over the data of its checkpoint, and its lengths. StateError where something is missing."""
    forgotten = None if options.forget is None else Forgotten.of(reader.snapshot, ids_of(options.forget))
    if position.order.forgotten != (None if forgotten is None else forgotten.digest):
        passed = "none" if forgotten is None else f"{len(forgotten.ids):,} other ones"
        raise StateError(
            f"--forget must name the samples that the training run forgets (digest {position.order.forgotten or 'none'}"
            f"); found {passed}. Pass the file of their ids, or omit --forget if there are none."
        )
    name = _lengths_of(position.order, reader, options.lengths)
    lengths = None if name is None else reader.lengths(name)
    weights = [weights_of(stream) for stream in reader.streams]
    even = position.order.even_rows
    amounts = partial(reader.amounts, even) if isinstance(even, str) else None
    order = RunOrder(reader.snapshot, weights, position.order, lengths, forgotten=forgotten, amounts=amounts)
    if differences := position.check(order, on_mismatch="warn"):
        raise StateError(f"{' '.join(differences)} Give every --stream its weight of the training run: URL=WEIGHT.")
    return order, name


def _lengths_of(order: OrderConfig, reader: SampleReader, expression: str | None) -> str | None:
    """The name of the lengths that a state's order depends on; None if there are none."""
    if (sized := order.packing or order.buckets) is None:
        return None
    stored = [name for index in reader.indexes for name in (*index.lengths, *index.columns)]
    for name in stored if expression is None else [expression]:
        with suppress(NotFoundError, FormatError):
            if reader.lengths_digest(name) == sized.lengths:
                return name
    raise StateError(
        f"The batches of the checkpoint were planned by lengths with digest {sized.lengths}, which --stream does "
        "not have. Pass the dataset with the lengths that it had in the training run, and --lengths EXPRESSION where "
        "an expression of them planned the run."
    )


def _computed(reader: SampleReader, position: Position, order: RunOrder) -> Facts:
    """What the data says of a position: what was trained on, what is left, and its state for mosaicml-streaming."""
    explanation = explain(order, position)
    what = "samples"
    facts: Facts = {"global_batches": steps_done(order, position)}
    if position.order.packing is not None:
        what = "rows"
        facts |= _packed(order.epoch(position.epoch), 0, position.position)
    facts |= {f"epoch_{what}": explanation.num_samples, "global_batches_left": explanation.steps_left}
    num_written = sum(int(index.shard_sizes.sum()) for index in reader.indexes)
    if position.order.mosaic is not None and reader.snapshot.num_samples == num_written:
        with suppress(StateError):
            facts["mosaicml_streaming_state"] = mosaic_state(position, order)
    return facts


def _packed(order: EpochOrder, begin: int, end: int) -> dict[str, int]:
    """How many documents begin in the rows at positions [begin, end), and their tokens."""
    documents = tokens = 0
    for first in range(begin, end, _ROWS_AT_ONCE):
        rows = order.rows(first, min(first + _ROWS_AT_ONCE, end))
        assert rows is not None
        documents += int(np.count_nonzero(rows.first == 0))
        tokens += int(rows.num_tokens.sum())
    return {"rows": end - begin, "documents_begun": documents, "tokens": tokens}


def _batches(position: Position, order: RunOrder, options: Namespace) -> list[Facts]:
    """The global batches that the user asks for; the next one if nothing is asked."""
    traced = [] if options.step is None else [trace(order, position, options.step)]
    explanation = explain(order, position)
    count = options.next or int(not traced)
    if explanation.upcoming is not None:
        here = position.rebased_on(order, batch_size=position.batch_size, tail=position.tail)
        first = explanation.upcoming.step
        traced += [trace(order, here, step) for step in range(first, first + min(count, explanation.steps_left))]
    return [_described(batch, position, order) for batch in traced]


def _described(batch: TracedBatch, position: Position, order: RunOrder) -> Facts:
    facts: Facts = {"global_batch": batch.step, "epoch": batch.epoch}
    facts |= {name: np.unique(getattr(batch, name)).tolist() for name in ("streams", "shards")}
    facts["ids"] = batch.ids.tolist()
    return (
        facts if position.order.packing is None else facts | _packed(order.epoch(batch.epoch), batch.begin, batch.end)
    )


def _compare(pair: Sequence[Checkpoint], out: Output) -> int:
    """Compare the orders of two training runs; where they stand in these is no difference."""
    positions = [checkpoint.position for checkpoint in pair]
    first, second = map(_deciding, positions)
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    differences = {PUBLIC_NAMES.get(name, name): [first.get(name), second.get(name)] for name in names}
    out.line(f"DIFFERENT: {', '.join(differences)}" if names else "EQUAL: the order of both runs is the same")
    for checkpoint, position in zip(pair, positions, strict=True):
        out.add(
            "runs", {"checkpoint": checkpoint.name, "epoch": position.epoch, "samples_trained_on": position.position}
        )
    out.show({"differences": differences} if names else {})
    out.data["differences"] = differences
    return ExitCode.NO if names else ExitCode.OK


def _deciding(position: Position) -> Facts:
    """All that decides the global batches of a run."""
    data = {"data": f"{position.snapshot.num_samples:,} samples, digest {position.snapshot.digest[:16]}"}
    batches = {"global_batch_size": position.batch_size, "tail": position.tail}
    changes = {"changes of it": [list(change) for change in position.batch_changes]}
    return {**data, "weights of the streams": position.weights[:16], **batches, **changes, **_settings(position)}
