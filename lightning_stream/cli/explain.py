"""``explain``: where a checkpoint is in its data, and which samples come next."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.cli.arguments import Mixture, add_reading, add_rules, add_store_options, add_streams
from lightning_stream.cli.checkpoint import (
    described,
    lengths_of,
    matching_mixture,
    opened,
    order_over,
    print_position,
    recorded_chain,
    settings_of,
    show,
)
from lightning_stream.cli.output import ExitCode, Output, separated
from lightning_stream.cli.preview import preview_path, write_preview
from lightning_stream.order import EpochOrder, Position, RunOrder, explain, trace
from lightning_stream.order.chain import Chain, Stage, stages_of_order
from lightning_stream.reading.data_stages import stages_of_reader
from lightning_stream.shared_files import scratch_folder

HELP = "show the position of a checkpoint, and the next samples"
EXAMPLES = """examples:
  lightning-stream explain runs/flowers
  lightning-stream explain runs/flowers --stream shards/train --step 1234 --preview step.html
  lightning-stream explain s3://bucket/run/last.ckpt --stream s3://bucket/train
  lightning-stream explain ep1-ba400.pt --stream s3://bucket/code=0.3 --stream s3://bucket/text=0.7
"""
_ROWS_AT_ONCE = 1 << 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``explain``."""
    parser.add_argument(
        "checkpoint",
        metavar="PATH|URL",
        help="a checkpoint of Lightning, Composer or plain PyTorch, or the folder of a training run",
    )
    add_streams(parser)
    parser.add_argument("--step", type=int, metavar="N", help="show a step of its epoch, from 0; needs --stream")
    parser.add_argument("--preview", metavar="FILE", help="write the samples of --step as a page (.html) or .png")
    add_reading(parser)
    add_rules(parser)
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Explain a checkpoint over the data that it was trained on; without ``--stream``, show it as `checkpoint` does."""
    path = _preview_of(options)
    with opened(options.checkpoint, options.store_options) as checkpoint:
        if not options.stream:
            return show(checkpoint, out)
        name, position = checkpoint.name, checkpoint.position
    upcoming, step = dict[str, Any](), dict[str, Any]()
    with scratch_folder() as folder:
        matching, position, chosen = matching_mixture(position, options, folder)
        about, chain = described(name, position), recorded_chain(position)
        if matching:
            stages, run, trained = _over(matching, position, options.forget)
            chain = Chain((*stages, *chain.stages[-1:]))
            upcoming = _next(position, run)
            about |= trained
            if options.step is not None:
                step = _step(matching, position, run, options.step, path)
    print_position({**about, "matches_stream": matching is not None}, chain, out)
    for title, found in (("next", upcoming), (f"step {options.step}", step)):
        if found:
            out.show({title: separated(found)})
            about[title.split()[0]] = found
    data = {"samples": position.snapshot.num_samples, "shards": position.snapshot.num_shards}
    data["matches_stream"] = matching is not None
    out.data = {**about, "data": data, "order": settings_of(position.order), "chain": chain.to_json()}
    if not matching:
        out.line(
            "  The training run read other samples of --stream: pass its --filter-lengths and --exclude-ids. Where a "
            "function or subset chose them, its next samples are not known here: use loader.explain() in its script."
            if chosen
            else "  The data of --stream is not that of the checkpoint. Pass each stream of the training run, in order."
        )
    return ExitCode.OK if matching else ExitCode.NO


def _preview_of(options: argparse.Namespace) -> Path | None:
    """The file for the samples of a step; ValueError where the step or its data is not named."""
    if options.step is not None and not options.stream:
        raise ValueError("--step reads the order over the data: pass --stream URL for each stream of the training run")
    if options.preview is not None and options.step is None:
        raise ValueError("--preview shows the samples of a step: pass --step N")
    return None if options.preview is None else preview_path(options.preview, "--preview")


def _over(mixture: Mixture, position: Position, forget: str | None) -> tuple[list[Stage], RunOrder, dict[str, Any]]:
    """Over the checkpoint's data: the stages of its chain, its order, and what was trained on."""
    run, lengths = order_over(mixture, position, forget), lengths_of(position.order, mixture.reader)
    stages = stages_of_reader(mixture.reader, [] if lengths is None else [lengths], run)
    stages += stages_of_order(position.order, run, epoch=position.epoch, count_rows=True)
    trained = {"global_batches": position.num_steps(run)}
    if position.order.packing is not None:
        documents, tokens = _held(run.epoch(position.epoch), 0, position.position)
        trained |= {"documents_begun": documents, "tokens_trained_on": tokens}
    return stages, run, trained


def _held(order: EpochOrder, begin: int, end: int) -> tuple[int, int]:
    """How many documents begin in the rows at positions [begin, end), and their tokens."""
    documents = tokens = 0
    for first in range(begin, end, _ROWS_AT_ONCE):
        rows = order.rows(first, min(first + _ROWS_AT_ONCE, end))
        assert rows is not None
        documents += int(np.count_nonzero(rows.first == 0))
        tokens += int(rows.num_tokens.sum())
    return documents, tokens


def _next(position: Position, run: RunOrder) -> dict[str, Any]:
    """The samples that come next."""
    about, is_packed = explain(run, position), position.order.packing is not None
    found: dict[str, Any] = {"epoch": about.epoch}
    found["epoch_rows" if is_packed else "epoch_samples"] = about.num_samples
    found["global_batches_left"] = about.steps_left
    if batch := about.upcoming:
        streams, shards = sorted(set(batch.streams.tolist())), sorted(set(batch.shards.tolist()))
        found |= {"global_batch": batch.step, "streams": streams, "shards": shards, "ids": batch.ids.tolist()}
        if is_packed:
            documents, tokens = _held(run.epoch(batch.epoch), batch.begin, batch.end)
            found |= {"rows": batch.end - batch.begin, "documents_begun": documents, "tokens": tokens}
    return found


def _step(mixture: Mixture, position: Position, run: RunOrder, step: int, path: Path | None) -> dict[str, Any]:
    """The samples of a step of the checkpoint's epoch, done or to come; with a path, also as a preview."""
    batch = trace(run, position, step)
    found = {"shards": sorted(set(batch.shards.tolist())), "ids": batch.ids.tolist()}
    if path is not None:
        samples = {number: mixture.reader.sample(number) for number in found["ids"]}
        title = f"Epoch {batch.epoch}, step {step}"
        write_preview(path, title, f"{len(samples):,} samples of {', '.join(mixture.snapshot.stream_names)}", samples)
        found["preview"] = str(path)
    return found
