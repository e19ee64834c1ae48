"""What a dataset and a loader answer about their run, without reading samples: its chain, its batches, its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from time import perf_counter
from typing import Any, Literal

from lightning_stream.errors import LightningStreamError
from lightning_stream.loading.plain import PlainIterations
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.source import BatchSettings, SampleSource
from lightning_stream.loading.workers import Workers
from lightning_stream.monitoring.meter import Mark, Meter
from lightning_stream.monitoring.stats import LoaderStats, LoadingSettings
from lightning_stream.monitoring.watch import Watch
from lightning_stream.order import Position, RunOrder
from lightning_stream.order.forget import Replay
from lightning_stream.processes import num_cores
from lightning_stream.questions import Occurrence, explain, trace
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
from lightning_stream.questions.tracing import Explanation, TracedBatch
from lightning_stream.reading.data_stages import stages_of_reader
from lightning_stream.reading.look_ahead import furthest_ahead


def _as_html(shown: Any) -> str:
    """How a notebook shows a dataset or a loader: its settings and its chain, or why its indexes cannot be read."""
    try:
        chain = str(shown.describe(count_rows=False))
    except (LightningStreamError, ValueError) as error:
        chain = str(error)
    text = escape(f"{shown!r}\n\n{chain}")
    return f'<pre style="white-space: pre-wrap">{text}</pre>'


class DatasetQuestions:
    """The part of a `StreamingDataset` that answers questions about its run."""

    _streaming_source: SampleSource
    _streaming_plain: PlainIterations
    _repr_html_ = _as_html

    def describe(self, count_rows: bool | None = None) -> Chain:
        """The chain from the streams to this rank's batches: settings, counts and a digest of every stage.

        `print` shows it on one screen. Of a dataset that a `StreamingDataLoader` reads, it is that of the loader;
        without one, and without a `batch_size`, the chain ends before the batches. It reads the indexes, and evaluates
        the filters.

        Args:
            count_rows: Whether to plan the epoch where documents are packed or batches have a budget of tokens, about 3
                million documents per second, which counts rows, batches and padding; None for up to a million.

        Example::

            print(dataset.describe())
            dataset.describe()["streams"].counts["samples"]
        """
        loader = self._streaming_plain.loader
        if loader is not None:
            return loader.describe(count_rows)
        source, plain = self._streaming_source, self._streaming_plain
        settings, epoch = plain.settings(source), plain.next_epoch
        if plain.batch_size is not None or source.batch_tokens is not None:
            return described(source, settings, epoch, count_rows)
        found = _stages(source, source.order(settings.order), epoch, count_rows=False)
        note = "a StreamingDataLoader has the batch size: see its describe()"
        return Chain((*(_before_batch_size(stage, source) for stage in found), Stage("batches", note=note)))

    def where(self, sample_id: int, epochs: Iterable[int] | None = None) -> list[Occurrence]:
        """When and where the training run sees a sample, done or to come: ``(epoch, step, rank, micro_batch, row)``.

        It is computed, not recorded: for this world and batch size, and the changes of the batch size in the current
        epoch, which is what `epochs` defaults to. Padding does not count.

        Example: ``dataset.where(7, epochs=range(3))`` is ``[Occurrence(epoch=0, step=12, rank=3, ...), ...]``.
        """
        return self._streaming_plain.where(self._streaming_source, sample_id, epochs)

    def plan_replay(self, ids: Iterable[int], states: Sequence[Mapping[str, Any]]) -> Replay:
        """What it takes that a run has never seen some samples: the newest of its states that is before all of them.

        Continue from it with ``forget=ids``: the run is then the same as if it had begun so. Samples delivered in place
        of bad ones are not searched.

        Example: ``states[dataset.plan_replay([7], states).checkpoint]``
        """
        return self._streaming_source.plan_replay(ids, states)


class LoaderQuestions:
    """The part of a `StreamingDataLoader` that answers questions about its run."""

    _source: SampleSource
    position: Any
    settings: Any
    accumulate: int
    evaluation: bool
    _workers: Workers
    num_workers: int
    workers: str
    persistent_workers: bool
    detect_world: Any
    _repr_html_ = _as_html

    def describe(self, count_rows: bool | None = None) -> Chain:
        """The chain from the streams to this rank's batches, in the current epoch; see `StreamingDataset.describe`.

        Example: ``print(loader.describe())``.
        """
        epoch = 0 if self.evaluation else self.position.epoch
        return described(self._source, self.settings(), epoch, count_rows, self.accumulate)

    @property
    def meter(self) -> Meter:
        """What this process measures at the loader."""
        return self._workers.meter

    def stats(self) -> LoaderStats:
        """Where the time of the training loop has gone so far: waiting, by cause, and training.

        The numbers are those of this process, its workers included. Costs no step anything.

        Example: ``print(loader.stats())`` after training prints a table, and what to change.
        """
        return self.meter.stats(self._source.reader.counters)

    @contextmanager
    def aside(self, what: Literal["validation", "checkpoint"]) -> Iterator[None]:
        """Measure a block of your own training loop as a validation, or as writing a checkpoint, not as training.

        A block inside another one is a part of that.

        Raises:
            ValueError: `what` is something else.

        Example::

            with loader.aside("checkpoint"):
                torch.save({"model": model.state_dict(), "data": loader.state_dict()}, "run.pt")
        """
        if what not in ("validation", "checkpoint"):
            raise ValueError(f'aside() measures a "validation" or a "checkpoint"; found {what!r}')
        meter, since = self.meter, Mark.of(perf_counter())
        is_inside, meter.is_aside = meter.is_aside, True
        try:
            yield
        finally:
            meter.is_aside = is_inside
            if not is_inside:
                meter.spent(what, since, perf_counter())

    def watch(self, after_s: float = 120.0, say: Callable[[str], object] = print) -> Watch:
        """Report, from a thread, while the first shards arrive, and where everything stands if no batch comes.

        Args:
            after_s: Seconds without a batch after which the stacks of all threads, those of the workers, and the
                requests in flight are written to stderr, once for each wait.
            say: Shows the user a sentence.

        Example::

            with loader.watch(after_s=60):
                train(loader)
        """
        return Watch(self, after_s, say)

    def loading_settings(self) -> LoadingSettings:
        """The settings that decide how fast the loader is."""
        source, settings, world = self._source, self.settings(), self.detect_world()
        size, reader = settings.device_batch_size, source.reader
        limit_bytes = reader.defaults.config.limit_bytes
        return LoadingSettings(
            batch_size=size,
            num_workers=self.num_workers,
            workers=self.workers,
            num_cores=max(1, num_cores() // world.ranks_per_node),
            fetch_threads=reader.config.fetch_threads,
            persistent_workers=self.persistent_workers or self.workers == "threads",
            predownload=size * furthest_ahead(source.predownload, size, is_limited=limit_bytes is not None),
            cache_limit=limit_bytes,
            dataset_bytes=sum(int(index.raw_bytes.sum()) for index in reader.indexes),
        )

    def explain(self, position: Position | None = None) -> Explanation:
        """The next epoch, batch and sample ids, from here or from a position."""
        return explain(self._run(settings := self.settings()), position or self.position, world=settings.world)

    def trace(self, step: int, position: Position | None = None) -> TracedBatch:
        """The samples of one step of the epoch (from 0), done or to come: of all replicas, in position order."""
        return trace(self._run(settings := self.settings()), position or self.position, step, world=settings.world)

    def where(self, sample_id: int, epochs: Iterable[int] | None = None) -> list[Occurrence]:
        """When and where the run sees a sample: in this epoch, or in `epochs`; see `StreamingDataset.where`."""
        found: list[Occurrence] = self.settings().where(self._source, self.position, sample_id, epochs)
        return found

    def _run(self, settings: BatchSettings) -> RunOrder:
        return self._source.order(settings.order)


def described(
    source: SampleSource, settings: BatchSettings, epoch: int, count_rows: bool | None, accumulate: int = 1
) -> Chain:
    """The chain of a run whose batches are known."""
    run = source.order(settings.order)
    stages = _stages(source, run, epoch, count_rows)
    what, world = "samples" if source.packing is None else "rows", settings.world
    size, divided = settings.global_batch_size, {"replicas": world.num_replicas, "accumulate": accumulate}
    count, note = None, "num_batches(epoch) of the loader plans the epoch and counts its batches"
    if not source.epochs_differ or counts_rows(run, count_rows):
        count, note = settings.plan(source, Start(epoch)).num_batches, f"in epoch {epoch}"
    stages.append(stage_of_batches(run.config, size, settings.tail, num_batches=count, note=note, **divided))
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
    names += [] if source.balance is None else [source.balanced_by]
    found = stages_of_reader(source.reader, dict.fromkeys(names), run)
    return found + stages_of_order(run.config, run, epoch=epoch, count_rows=count_rows)


def _before_batch_size(stage: Stage, source: SampleSource) -> Stage:
    """What is known of a stage before the batch size is, which some settings follow from."""
    if stage.name == "pack":
        return replace(stage, note="the batch size decides the rows")
    if stage.name != "shuffle":
        return stage
    given, names = source.order_arguments, ("canonical_nodes", "window", "device_block")
    later = [PUBLIC_NAMES.get(name, name) for name in names if given.get(name) is None]
    later = [name for name in later if name in stage.settings and given["mosaic"] is None]
    settings = {name: value for name, value in stage.settings.items() if name not in later}
    return Stage("shuffle", settings, note=f"the batch size decides {' and '.join(later)}" if later else "")


def _delivered(source: SampleSource) -> Stage:
    """What becomes of the samples of a batch: the columns that are read, and what is done with them."""
    columns = {name: encoding for index in source.reader.indexes for name, encoding in index.columns.items()}
    if (pack := source.packing) is not None:
        kept = dict.fromkeys((pack.column, *pack.columns))
        columns = {name: columns[name] for name in kept if name in columns}
    policy, limit = source.bad_data.policy, source.reader.defaults.config.limit_bytes
    chosen = {
        "transform": source.transform,
        "on_bad_sample": policy.on_bad_sample if policy.on_bad_sample != "raise" else None,
        "on_bad_shard": policy.on_bad_shard if policy.on_bad_shard != "raise" else None,
        "cache_limit": None if limit is None else readable(limit),
    }
    settings = {name: value for name, value in chosen.items() if value is not None}
    return Stage("samples", {"columns": tuple(f"{name} {kind}" for name, kind in columns.items()), **settings})
