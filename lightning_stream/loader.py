"""`StreamingDataLoader`: batches in the training run's order, and the position of what was handed out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf
from operator import index
from typing import Any, Literal

from msgspec import structs
from torch.utils.data import DataLoader

from lightning_stream.dataset import StreamingDataset, check_blocks, plain_iterations_of, source_of
from lightning_stream.distributed import WorldLike
from lightning_stream.errors import StateError, checking, refuse_overrides
from lightning_stream.loading.accelerate import Prepared, is_prepared, keeps_state
from lightning_stream.loading.batches import BatchMaker
from lightning_stream.loading.checks import check_run
from lightning_stream.loading.collate import collate_samples
from lightning_stream.loading.cursor import Cursor
from lightning_stream.loading.describe import as_html, described, loading_settings
from lightning_stream.loading.iteration import LoaderIterator, driver_of
from lightning_stream.loading.loader_arguments import check_arguments, device_batch, refuse_order
from lightning_stream.loading.randomness import COLLATING, SeededCall
from lightning_stream.loading.resume import GIVEN_WHILE_TRAINING, order_in, position_after, position_in, resumed_at
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.source import BatchSettings
from lightning_stream.loading.torch_private import template_for
from lightning_stream.loading.workers import MadeBatches, Workers, choose_workers
from lightning_stream.monitoring.meter import Made, Meter
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.monitoring.watch import Watch
from lightning_stream.order import OrderConfig, Position, RunOrder, Schedule, Tail, World
from lightning_stream.order.micro_batches import MicroBatch, MicroBatches
from lightning_stream.questions import Occurrence, explain, trace
from lightning_stream.questions.cache_need import ReadAhead
from lightning_stream.questions.describe import Chain
from lightning_stream.questions.tracing import Explanation, TracedBatch
from lightning_stream.reading.look_ahead import read_ahead_depth, warm

_NEVER_CALLED = {  # methods of a dataset that torch's loader calls
    "__iter__": "change samples in __getitem__ and batches in collate_fn, or use torch.utils.data.DataLoader",
    "__len__": "pass epoch_size= to the dataset, or use torch.utils.data.DataLoader",
}
_log = logging.getLogger(__name__)


class StreamingDataLoader(DataLoader[Any]):
    """Loads a `StreamingDataset` in batches, and owns the position in it.

    Global batch k of an epoch holds the same samples on any number of nodes, ranks and workers; with ``tail="exact"``
    the border between an epoch's last two batches depends on the number of ranks. `state_dict` right after a batch was
    handed out resumes at the next one, in this world or any other.

    Args:
        dataset: The data.
        batch_size: Samples per device and micro-batch. Defaults to the dataset's.
        global_batch_size: Samples of one optimizer step over all replicas, instead of `batch_size`.
        accumulate: Micro-batches of one optimizer step on each device.
        num_workers: How many workers make batches. 0: this process makes each when it is asked for; ``"auto"``: by
            the cores, and by what is done with samples. The batches are always the same.
        workers: ``"processes"`` (by default), or ``"threads"`` of this process, which share one reader. Threads suit
            work that releases the GIL; the transform and `collate_fn` must draw from their parameter ``rng`` alone.
        collate_fn: From a list of samples to a batch, or from ``(samples, rng)``: what it draws at random depends on
            the batch's position in the run alone. The default makes dicts of tensors and lists.
        tail: What happens to an epoch's last partial batch: ``"pad"`` fills it with flagged repeats (training),
            ``"exact"`` lets the last batches differ by a sample (evaluation), ``"drop"`` omits it.
        drop_last: True for ``tail="drop"``.
        evaluation: Always read epoch 0 from its start, with ``tail="exact"`` by default.
        world: Which processes train together; None takes the dataset's, or detects it when first needed.
        pin_memory, pin_memory_device, timeout, worker_init_fn, prefetch_factor, persistent_workers,
            multiprocessing_context: As in `torch.utils.data.DataLoader`.
        on_mismatch: What `load_state_dict` does where data or settings differ: ``"error"`` or ``"warn"``.
        shuffle, sampler, batch_sampler, generator, in_order: Refused, since the dataset has the order and the seed.

    Raises:
        ValueError: Settings that contradict each other.
    """

    @checking
    def __init__(
        self,
        dataset: StreamingDataset,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        accumulate: int = 1,
        num_workers: int | Literal["auto"] = 0,
        workers: Literal["processes", "threads"] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        tail: Tail | None = None,
        drop_last: bool | None = None,
        evaluation: bool = False,
        world: WorldLike = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        on_mismatch: Literal["error", "warn"] = "error",
        shuffle: Literal[False] | None = None,
        sampler: None = None,
        batch_sampler: None = None,
        generator: None = None,
        pin_memory_device: str = "",
        in_order: Literal[True] = True,
    ) -> None:
        for_processes = worker_init_fn or multiprocessing_context
        refuse_order((shuffle, sampler, batch_sampler, generator), in_order, workers, for_processes)
        if not isinstance(dataset, StreamingDataset):
            raise TypeError(
                f"StreamingDataLoader loads a StreamingDataset; found {type(dataset).__name__}. Pass "
                "StreamingDataset(PATH or URL), or load map-style datasets by StatefulDataLoader, others by DataLoader"
            )
        refuse_overrides(type(dataset), StreamingDataset, _NEVER_CALLED)
        refuse_overrides(type(self), DataLoader, {"_get_batch_size": "let the dataset count: remove it"})
        self.streaming = dataset
        self._source = source_of(dataset)
        self._plain = plain_iterations_of(dataset)
        in_dataset = self._plain.batch_size  # a subclass may use the name for its own
        sizes = (batch_size, global_batch_size)
        check_arguments(sizes, in_dataset, self._source.batch_tokens, accumulate, tail, drop_last)
        size = batch_size or in_dataset or 1
        check_blocks(self._source.order_arguments, global_batch_size or size * accumulate, size)
        self._device_batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.accumulate = accumulate
        self.evaluation = evaluation
        self.tail: Tail = tail or ("drop" if drop_last else "exact" if evaluation else "pad")
        self.world = world
        self.on_mismatch = on_mismatch
        is_own = collate_fn is not None and collate_fn is not collate_samples
        self._collate = SeededCall(collate_fn, self._source.seed ^ COLLATING) if is_own else None  # type: ignore[arg-type]
        self.cursor = Cursor()
        self.meter = Meter()
        self._workers = Workers(vars(dataset).get("_streaming_user", dataset), self.meter)
        self.disks: tuple[tuple[int, ...], ...] | None = None  # what nodes held at the start; None: not asked yet
        self._plain.has_loader |= not evaluation
        self.workers, count = choose_workers(self._source, self._collate, self, workers, num_workers)
        if num_workers == "auto" and not count:
            prefetch_factor = None
            persistent_workers = False
        self._checked: BatchSettings | None = None  # the settings that the checks before training were made for
        self.num_substituted = 0  # samples delivered to this rank in place of bad ones so far; all ranks' add up
        extra: dict[str, Any] = {"pin_memory_device": pin_memory_device} if pin_memory_device else {}
        super().__init__(
            dataset,
            batch_size=size,
            num_workers=count if self.workers == "processes" else min(1, count),  # or torch counts processes
            collate_fn=collate_fn or collate_samples,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            **extra,
        )
        # Accelerate and Lightning read arguments off the attributes of their names; torch has filled in its own.
        vars(self).update(batch_size=batch_size, drop_last=self.tail == "drop", num_workers=count)

    is_evaluated = False  # whether a trainer evaluates on it now: its iterations move nothing
    packs_states = False  # whether the dataset gives Composer the state as one string
    _is_accelerate_prepared = True  # for Accelerate: this loader divides its batches itself, and its state is kept
    use_stateful_dataloader = property(keeps_state)

    def __repr__(self) -> str:
        size = self._device_batch_size or self._plain.batch_size
        batch = f"batch_size={size}" if size else f"global_batch_size={self.global_batch_size}"
        batch = f"batch_tokens={self._source.batch_tokens}" if self._source.batch_tokens else batch
        return f"{type(self).__name__}({self.streaming!r}, {batch}, num_workers={self.num_workers}, tail={self.tail!r})"

    # The batches

    @property
    def batch_size(self) -> int | None:
        """Samples per device and micro-batch; with `batch_tokens` that many, and no batch has more samples."""
        if (budget := self._source.batch_tokens) is not None:
            return budget
        if self.global_batch_size is None:
            return self._device_batch_size or self._plain.batch_size
        return device_batch(self.global_batch_size, self.detect_world().num_replicas, self.accumulate)

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """Torch's constructor assigns what follows from other settings: nothing to keep."""

    def detect_world(self) -> World:
        """The world as given to the loader or its dataset, or as detected now."""
        return replace(self._source.detect_world(self.world), disks=self.disks or ())

    def settings(self, resumed: OrderConfig | None = None) -> BatchSettings:
        """How the data is divided here, for a run that continues with these order settings, or else with its own."""
        here = self.cursor.position
        order = None if here is None else here.order
        world = self.detect_world()
        settings = self._source.settings(world, self.batch_size or 1, self.accumulate, self.tail, resumed or order)
        if self.cursor.driver is not None:
            settings = replace(settings, padding=self.cursor.driver.clock.padding)
        return settings if resumed is not None or order is None else replace(settings, order=order)

    def __len__(self) -> int:
        """Micro-batches of this rank in a full epoch; where epochs differ, in the one that the position is in."""
        epoch = self.position.epoch if self.epochs_differ and not self.evaluation else 0
        return StreamingDataLoader.num_batches(self, epoch)  # a loop may keep a number of that name on the loader

    @property
    def epochs_differ(self) -> bool:
        """Whether epochs have different numbers of batches, e.g. where samples are packed, or streams end."""
        return self._source.epochs_differ

    def num_batches(self, epoch: int) -> int:
        """Micro-batches of this rank in one epoch. Where epochs differ, this plans all that no state has counted."""
        return len(self.settings().micro_batches(self._source, Start(epoch, counted_windows=self.position.landmark)))

    def batches_before(self, position: Position) -> int:
        """Micro-batches of this rank that count as done at a position: those of a full epoch less those to come."""
        if self._source.counts_rows:
            return position.num_steps(self._source.order(position.order)) * self.accumulate
        full_epoch = self.micro_batches_from(replace(position, position=0))
        return len(full_epoch) - len(self.micro_batches_from(position))

    def micro_batches_from(self, position: Position) -> MicroBatches:
        """This rank's micro-batches from a position to the end of its epoch, by number."""
        settings = replace(self.settings(position.order), order=position.order)
        return settings.micro_batches(self._source, Start.of(position))

    def warm(self, steps: int) -> int:
        """Fetch, before training, the shards of this rank's first optimizer steps from here; returns their number."""
        return warm(self._source.reader, self.settings().plan(self._source, Start.of(self.position)), steps)

    # Iterating

    def __iter__(self) -> LoaderIterator:  # type: ignore[override]  # torch names its own iterator class
        """Make an iteration from the loaded state, or of the next epoch that was not begun yet."""
        batches: Any = LoaderIterator(self)
        return Prepared(self, batches) if is_prepared(self) else batches  # type: ignore[return-value]

    def look(self) -> LoaderIterator:
        """Make an iteration over a whole epoch that moves nothing, e.g. for statistics before training."""
        return LoaderIterator(self, moves=False)

    def begin_iteration(self, iterator: LoaderIterator) -> tuple[Position, MadeBatches]:
        """Start making an iteration's batches; returns where it begins."""
        is_look = not iterator.moves
        iterator.moves &= not (self.evaluation or self.is_evaluated)
        driver = self.cursor.driver or driver_of(self)
        if driver is None and iterator.moves:
            self._take_loaded()
        start = driver.begin(iterator) if driver is not None and iterator.moves else None
        iterator.moves &= driver is None or start is not None
        settings = self.settings()
        run = self._run(settings)
        if iterator.moves:
            self._plain.belongs_to(self)
            start = start or self.cursor.begin(iterator, run, settings)
        elif driver is not None and not driver.clock.counts and not is_look:
            start = self.normalised(self.position)  # no trainer yet: where a state put it
        else:
            start = replace(self.first_position(), epoch=0 if self.evaluation else self.position.epoch)
        self.check(settings)
        self.meter.rest.settings = loading_settings(self._source, settings, self)
        self.meter.rest.epoch_positions = run.num_samples / run.epoch(start.epoch).order.samples_per_position
        if iterator.limit == 0:
            return start, MadeBatches(iter(()), lambda _: None)
        return start, self.batches_from(start, settings)

    def note_batch(self, iterator: LoaderIterator, asked: float, got: float, made: Made) -> None:
        """Note a batch that is about to be handed out: when it was requested, when it came, and how it was made."""
        batch = iterator.last_batch
        if iterator.is_measured:
            self.meter.note(asked, got, made, batch, iterator.num_batches == 1)
        self.cursor.handed_out(iterator)
        if batch is not None and batch.ends_epoch and iterator.num_batches % self.accumulate:
            self.cursor.short_epoch = min(self.cursor.short_epoch, batch.epoch)
        if iterator.moves and batch is not None and iterator.num_batches > 1:
            self._plain.handed_out = batch.epoch
        if iterator.moves and batch is not None and batch.substitutions:
            self.num_substituted += batch.num_substituted

    def compare_unverified(self, *, wait: bool = True) -> None:
        """Compare samples that were delivered before their shards were verified: where these are here, or all.

        Raises StoreError where a sample had other bytes, or a shard cannot be fetched.
        """
        self._source.reader.shards.delivered.compare(wait=wait)

    def check(self, settings: BatchSettings | None = None) -> None:
        """Refuse settings that cannot be trained with, and log the shuffle's quality; once for each setting."""
        settings = settings or self.settings()
        self._source.reader.require_samples()
        if self._checked != settings:
            self._checked = settings
            check_run(self._source.reader, self._run(settings), settings, self.read_ahead(settings))

    def read_ahead(self, settings: BatchSettings) -> ReadAhead:
        """What the workers of this rank may have begun to fetch before it is trained on."""
        depth = read_ahead_depth(self._source.predownload, settings.device_batch_size)
        num_workers = max(1, self.num_workers)
        finished = self.prefetch_factor or 0
        if self.workers == "threads":  # which look ahead together
            finished *= num_workers
            num_workers = 1
        return ReadAhead(num_workers, depth, finished)

    @property
    def _iterator(self) -> None:
        """Where torch keeps persistent workers. Lightning sets it to None to end them, e.g. after an evaluation."""

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        if value is None and "_workers" in vars(self):
            self._workers.release()

    def close(self) -> None:
        """End the worker processes of this loader, persistent ones too; a later iteration starts new ones."""
        self._workers.close()
        self.compare_unverified()

    # The position

    @property
    def last_batch(self) -> MicroBatch | None:
        """What the batch in training, or else handed out last, is made of; None before any was."""
        return self.cursor.last_batch

    @property
    def substitutes(self) -> bool:
        """Whether samples may be delivered in place of bad ones."""
        return self._source.bad_data.policy.substitutes

    @property
    def num_samples(self) -> int:
        """Samples of an epoch over all replicas, padding excluded; where they are packed into rows, the documents."""
        return self._run(self.settings()).num_samples

    @property
    def position(self) -> Position:
        """Where the training run is, by the batches trained on, or else handed out; at a whole optimizer step.

        After a look at one batch it is where the next iteration begins, until `state_dict` counts that batch.
        """
        return self.cursor.position or self.begins_at or self.first_position()

    @property
    def begins_at(self) -> Position | None:
        """Where a state, also one that the dataset was given, or `set_epoch` made the next training run begin."""
        self._take_loaded()
        return self.cursor.begins_at

    def _take_loaded(self) -> None:
        """Begin where the state stands that the dataset was given, as users of mosaicml-streaming do."""
        loaded = None if self.evaluation else self._plain.state_for(self)
        if loaded is None or self.cursor.begins_at is not None or self.cursor.position is not None:
            return
        resume = self._resume if self._plain.batch_size is None else self.cursor.seek  # else the dataset announced it
        resume(self._plain.passed({}, lambda: self.accept(loaded)))

    def first_position(self) -> Position:
        """The beginning of the training run in this world."""
        settings = self.settings()
        return settings.start(self._run(settings))

    def normalised(self, position: Position) -> Position:
        """A position as this loader sees it: with its batch, and the next epoch if no batch can come in this one."""
        settings = replace(self.settings(position.order), order=position.order)
        size = settings.global_batch_size
        return position.rebased_on(self._run(settings), batch_size=size, tail=settings.tail, world=settings.world)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at this epoch's beginning, or a loaded state in it; none in progress changes."""
        if not self.cursor.keep(index(epoch)):
            self.cursor.choose(replace(self.first_position(), epoch=index(epoch)))

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """The position as plain values: JSON-able, the same on every rank, loadable with ``weights_only=True``.

        Args:
            num_batches: How many batches of this iteration were trained on, where something between the loader and the
                loop takes batches ahead of the training; None for all that were handed out.

        Raises:
            StateError: So many were not handed out, a trainer counts them itself, or several iterations are going.
        """
        if (template := template_for(self)) is not None:
            return template  # type: ignore[no-any-return]
        if num_batches is None and self.cursor.driver is not None:
            return self.cursor.driver.state()
        self.cursor.refuse_two()
        if num_batches is not None:
            return self.state_of(position_after(self, num_batches))
        self.cursor.count_all()
        return self.state_of(self.position)

    def state_of(self, position: Position) -> dict[str, Any]:
        """A position as a state, which passes through the dataset's `state_dict`: a subclass may override that."""
        state = self.proven(position).to_state()
        self.cursor.took(position)
        passed: dict[str, Any] = self._plain.passed(state, lambda: self.streaming.state_dict(position.position, True))
        return passed

    def state_after(self, num_samples: int | None) -> dict[str, Any]:
        """The position after so many samples of the epoch; the caller counts them if no trainer does."""
        driver = self.cursor.driver
        last = self.last_batch
        if num_samples is None or driver is None or driver.clock.counts or last is None:
            return self.state_dict()
        here = replace(self.first_position(), epoch=last.epoch, position=num_samples)
        return self.proven(here if num_samples else here.next_epoch()).to_state()

    def proven(self, position: Position) -> Position:
        """A position with the ledger's expected sum up to it. Costs the samples since it was last asked.

        What was delivered before its shard was verified is compared first, see `compare_unverified`.
        """
        self.compare_unverified()
        return self.cursor.proven(self._source.order(position.order), position)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state: the next iteration starts there.

        Raises:
            StateError: It cannot be continued over this data with these settings; the message names the difference. Or
                a trainer is training that has a state of its own.
        """
        driver = self.cursor.driver
        if driver is None:
            self._resume(self.accept(state))
        elif driver.clock.reads_states:
            raise StateError(GIVEN_WHILE_TRAINING)
        else:
            driver.load(state)

    def _resume(self, position: Position) -> None:
        self.cursor.seek(position)
        self.cursor.short_epoch = inf  # a loop counts from here
        if not self.detect_world().rank:
            _log.info(self.resumed_at(position))

    def resumed_at(self, position: Position) -> str:
        """The sentence that announces a resume at a position."""
        position = self.normalised(position)
        total = None if self._source.packing is not None else self.num_samples
        return resumed_at(position, self.batches_before(position) // self.accumulate, total)

    def accept(self, state: Mapping[str, Any] | None) -> Position:
        """Where `load_state_dict` would continue with this state; the loader does not move."""
        if not isinstance(state, Mapping):
            raise StateError(f"a state is the mapping that state_dict() gave; found {type(state).__name__}")
        passed = self._plain.passed(state, lambda: self.streaming.load_state_dict(state))
        here = position_in(passed, self._source, self.settings(order_in(passed)), self.on_mismatch)
        self._source.reader.shards.delivered.forget()  # the run goes back to before it
        return self.cursor.builds_on(here)

    # A mixture that changes

    @property
    def schedule(self) -> Schedule:
        """The schedule of the mixture, with the changes made so far. Raises ValueError where the dataset has none."""
        schedule: Schedule | None = self.position.order.schedule
        if schedule is None:
            raise ValueError(
                "Only a mixture with a schedule can change, but the dataset has none. Pass "
                "StreamingDataset(schedule=[(0, {name: weight})]) from the start of the run."
            )
        return structs.replace(schedule)  # a copy, whose mappings are the caller's to change

    def change_mixture(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        skip: Mapping[str, int] | None = None,
        after_steps: int = 0,
    ) -> int:
        """Change the weights of the streams, or skip samples, from the first batch that was not handed out on.

        Where samples are packed into rows, the window that this batch begins in keeps its rows: the change holds from
        the next window on. Workers that have read ahead begin again there. Call it on all ranks after the same step
        with the same values: they take effect at the same global batch. States record the change; a resumed run keeps
        it. With the changes of its last state (``Schedule.from_state(state["order"]["schedule"])``) a run repeats.

        Args:
            weights: The weights by stream names, for the rest of the run: they replace what the schedule had. A stream
                with weight 0, or without one, is dropped; one that had none so far is added.
            skip: How many of its next samples each of these streams omits; rounded up to whole batches or device blocks
                where the batching method keeps these together.
            after_steps: Optimizer steps from the last one trained on that the change waits for at least. A trainer may
                hold a batch that it has not trained on, which a resumed run has not: with 2, both change alike.

        Returns:
            The global sample number, counted through all epochs, from which on the change holds. Where all streams have
            ended before, nothing changes, and a warning says so.

        Raises:
            ValueError: The dataset has no schedule, or the weights do not suit it.

        Example::

            loader.change_mixture({"web": 0.2, "code": 0.8}, skip={"web": 10_000})
        """
        here: Position = self.position
        order = here.order
        schedule = order.schedule or self.schedule
        iteration = self.cursor.leading
        if after_steps < 0:
            raise ValueError(f"after_steps counts steps from the last one trained on, from 0; found {after_steps}")
        run = self._source.order(order)
        counted = here.order_in(run).counted_windows(here.position)  # the change keeps them: they need no new count
        seen = [here, replace(here, position=here.position + after_steps * self.settings().global_batch_size)]
        seen += [iteration.upcoming] if iteration is not None and iteration.upcoming else []
        at = run.next_change((place.epoch, place.position) for place in seen)
        order = structs.replace(order, schedule=schedule.changed(at, weights, skip))
        if (end := run.mixture.end) is not None and at >= end:  # an epoch, or a window, that is over would get more
            _log.warning(
                "The mixture does not change: its streams have ended, at global sample %s (where samples are packed or "
                "sorted by length, it can change until the last window begins). Begin a new run with another schedule",
                f"{end:,}",
            )
            return end
        if iteration is not None:
            iteration.reorder(order, counted)
        if self.cursor.driver is not None:
            self.cursor.driver.reorder(order)
        elif iteration is None:
            self.cursor.seek(replace(here, order=order, landmark=counted))
        return at

    def batches_from(self, start: Position, settings: BatchSettings | None = None) -> MadeBatches:
        """Start making the batches from a position to the end of its epoch."""
        maker = BatchMaker(self._source, self._collate)
        return self._workers.batches(maker, settings or self.settings(), Start.of(start), self)

    # Questions about the run
    _repr_html_ = as_html

    def describe(self, count_rows: bool | None = None) -> Chain:
        """The chain from the streams to this rank's batches, in the current epoch; see `StreamingDataset.describe`.

        Example: ``print(loader.describe())``.
        """
        epoch = 0 if self.evaluation else self.position.epoch
        return described(self._source, self.settings(), epoch, count_rows)

    def stats(self) -> LoaderStats:
        """Where the time of the training loop has gone so far: waiting, by cause, and training.

        The numbers are those of this process, its workers included. Costs no step anything.

        Example: ``print(loader.stats())`` after training prints a table, and what to change.
        """
        return self.meter.stats(self._source.reader.counters)

    def aside(self, what: Literal["validation", "checkpoint"]) -> AbstractContextManager[None]:
        """Measure a block of your own training loop as a validation, or as writing a checkpoint, not as training.

        A block inside another one is a part of that. Raises ValueError where `what` is something else.

        Example::

            with loader.aside("checkpoint"):
                torch.save({"model": model.state_dict(), "data": loader.state_dict()}, "run.pt")
        """
        return self.meter.pausing(what)

    def watch(self, after_s: float = 120.0, say: Callable[[str], object] = print) -> Watch:
        """Report, from a thread, while the first shards arrive, and where everything stands if no batch comes.

        Args:
            after_s: Seconds without a batch after which the stacks of all threads, those of the workers, and the
                requests in flight are written to stderr, once for each wait.
            say: Shows the user a sentence.

        Example: ``with loader.watch(after_s=60): train(loader)``
        """
        return Watch(self, after_s, say)

    def explain(self, position: Position | None = None) -> Explanation:
        """The next epoch, batch and sample ids, from here or from a position."""
        return explain(self._run(settings := self.settings()), position or self.position, world=settings.world)

    def trace(self, step: int, position: Position | None = None) -> TracedBatch:
        """The samples of one step of the epoch (from 0), done or to come: of all replicas, in position order."""
        return trace(self._run(settings := self.settings()), position or self.position, step, world=settings.world)

    def where(self, sample_id: int, epochs: Iterable[int] | None = None) -> list[Occurrence]:
        """When and where the run sees a sample: in this epoch, or in `epochs`; see `StreamingDataset.where`."""
        return self.settings().where(self._source, self.position, sample_id, epochs)

    def _run(self, settings: BatchSettings) -> RunOrder:
        return self._source.order(settings.order)
