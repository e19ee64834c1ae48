"""What a loader does, for people: its chain, stage by stage, how a notebook shows it, and what its speed depends on."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import Any

from lightning_stream.errors import LightningStreamError
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.source import BatchSettings, SampleSource
from lightning_stream.monitoring.measured import LoadingSettings
from lightning_stream.order import RunOrder
from lightning_stream.processes import num_cores
from lightning_stream.questions.describe import (
    PUBLIC_NAMES,
    Chain,
    Stage,
    counts_rows,
    readable,
    stage_of_batches,
    stages_of_order,
)
from lightning_stream.questions.imbalance import can_balance
from lightning_stream.reading.data_stages import stages_of_reader
from lightning_stream.reading.look_ahead import furthest_ahead


def as_html(shown: Any) -> str:
    """How a notebook shows a dataset or a loader: its settings and its chain, or why its indexes cannot be read."""
    try:
        chain = str(shown.describe(count_rows=False))
    except (LightningStreamError, ValueError) as error:
        chain = str(error)
    text = escape(f"{shown!r}\n\n{chain}")
    return f'<pre style="white-space: pre-wrap">{text}</pre>'


def described(source: SampleSource, settings: BatchSettings, epoch: int, count_rows: bool | None) -> Chain:
    """The chain of a run whose batches are known."""
    run = source.order(settings.order)
    stages = _stages(source, run, epoch, count_rows)
    what = "samples" if source.packing is None else "rows"
    world = settings.world
    size = settings.global_batch_size
    count = None
    note = "num_batches(epoch) of the loader plans the epoch and counts its batches"
    if not source.counts_rows or counts_rows(run, count_rows):
        count = settings.plan(source, Start(epoch)).num_batches
        note = f"in epoch {epoch}"
    stages.append(
        stage_of_batches(
            run.config,
            size,
            settings.tail,
            num_batches=count,
            note=note,
            replicas=world.num_replicas,
            accumulate=settings.accumulate,
        )
    )
    if source.balance is not None:
        note = "" if can_balance(run, world) else "every machine has one replica here, so there is nothing to balance"
        stages.append(Stage("balance", {"balance": source.balance, "lengths": source.balanced_by}, note=note))
    share = {"rank": f"{world.rank} of {world.num_ranks}", "nodes": world.num_nodes}
    share |= {} if world.replication == 1 else {"replication": world.replication}
    counts = {f"{what} per step": size // world.num_replicas, f"{what} per micro-batch": settings.device_batch_size}
    stages.append(Stage("share", share, counts if source.batch_tokens is None else {}))
    return Chain((*stages, _delivered(source)))


def _stages(source: SampleSource, run: RunOrder, epoch: int, count_rows: bool | None) -> list[Stage]:
    names = [] if source.lengths_name is None else [source.lengths_name]
    names += [] if source.balance is None else source.reader.stored_lengths(source.balanced_by)
    stages = stages_of_reader(source.reader, dict.fromkeys(names), run)
    return stages + stages_of_order(run.config, run, epoch=epoch, count_rows=count_rows)


def described_without_batches(source: SampleSource, settings: BatchSettings, epoch: int) -> Chain:
    """The chain where no batch size is known, which some settings follow from."""
    stages = _stages(source, source.order(settings.order), epoch, count_rows=False)
    note = "a StreamingDataLoader has the batch size: see its describe()"
    return Chain((*(_before_batch_size(stage, source) for stage in stages), Stage("batches", note=note)))


def _before_batch_size(stage: Stage, source: SampleSource) -> Stage:
    """What is known of a stage before the batch size is, which some settings follow from."""
    if stage.name == "pack":
        return replace(stage, note="the batch size decides the rows")
    if stage.name != "shuffle":
        return stage
    arguments = source.order_arguments
    names = ("canonical_nodes", "window", "device_block")
    later = [PUBLIC_NAMES.get(name, name) for name in names if arguments.get(name) is None]
    later = [name for name in later if name in stage.settings and arguments["mosaic"] is None]
    settings = {name: value for name, value in stage.settings.items() if name not in later}
    return Stage("shuffle", settings, note=f"the batch size decides {' and '.join(later)}" if later else "")


def _delivered(source: SampleSource) -> Stage:
    """What becomes of the samples of a batch: the columns that are read, and what is done with them."""
    columns = dict.fromkeys(column for index in source.reader.indexes for column in index.columns.items())
    if (pack := source.packing) is not None and pack.column is not None:
        used = (pack.column, *pack.columns)
        columns = dict.fromkeys(column for name in used for column in columns if column[0] == name)
    policy = source.bad_data.policy
    limit = source.reader.shards.defaults.config.limit_bytes
    chosen = {
        "transform": source.transform and source.transform.function,
        "on_bad sample": policy.sample if policy.sample != "raise" else None,
        "on_bad shard": policy.shard if policy.shard != "raise" else None,
        "cache_limit": None if limit is None else readable(limit),
    }
    settings = {name: value for name, value in chosen.items() if value is not None}
    return Stage("samples", {"columns": tuple(f"{name} {kind}" for name, kind in columns), **settings})


def loading_settings(source: SampleSource, settings: BatchSettings, loader: Any) -> LoadingSettings:
    """The settings that decide how fast a loader is."""
    size = settings.device_batch_size
    limit_bytes = source.reader.shards.defaults.config.limit_bytes
    return LoadingSettings(
        batch_size=size,
        num_workers=loader.num_workers,
        workers=loader.workers,
        num_cores=max(1, num_cores() // settings.world.ranks_per_node),
        fetch_threads=source.reader.shards.config.fetch_threads,
        persistent_workers=loader.persistent_workers or loader.workers == "threads",
        predownload=size * furthest_ahead(source.predownload, size, is_limited=limit_bytes is not None),
        cache_limit=limit_bytes,
        dataset_bytes=sum(int(index.raw_bytes.sum()) for index in source.reader.indexes),
    )
