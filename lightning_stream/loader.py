"""`StreamingDataLoader`: batches in the training run's order, and the position of what was handed out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import index
from typing import Any, Literal

from torch.utils.data import DataLoader

from lightning_stream.dataset import StreamingDataset, plain_iterations_of, source_of
from lightning_stream.distributed import WorldLike, detect_world
from lightning_stream.errors import StateError, suggesting
from lightning_stream.formats.sizes import whole
from lightning_stream.loading.accelerate import Prepared, is_prepared
from lightning_stream.loading.checks import check_run
from lightning_stream.loading.collate import collate_samples
from lightning_stream.loading.dataset_arguments import check_blocks
from lightning_stream.loading.iteration import Driver, LoaderIterator, Progress, driver_of
from lightning_stream.loading.loader_arguments import check_arguments, check_classes, device_batch, refuse_order
from lightning_stream.loading.mixing import MixtureChanges
from lightning_stream.loading.questions import LoaderQuestions
from lightning_stream.loading.randomness import SeededCall
from lightning_stream.loading.resume import order_in, position_in, resumed_at
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.source import BatchSettings
from lightning_stream.loading.workers import MadeBatches, Workers, choose_workers
from lightning_stream.monitoring.meter import Made
from lightning_stream.order import OrderConfig, Position, Tail, World
from lightning_stream.order.micro_batches import MicroBatch, MicroBatches
from lightning_stream.questions.cache_need import ReadAhead
from lightning_stream.reading.look_ahead import read_ahead_depth, warm

_log = logging.getLogger(__name__)


class StreamingDataLoader(MixtureChanges, LoaderQuestions, DataLoader[Any]):
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

    @suggesting
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
        batch_size, global_batch_size = whole(batch_size), whole(global_batch_size)
        check_classes(self, dataset, StreamingDataset)
        self.streaming, self._source = dataset, source_of(dataset)
        in_dataset = plain_iterations_of(dataset).batch_size  # a subclass may use the name for its own
        sizes = (batch_size, global_batch_size)
        check_arguments(sizes, in_dataset, self._source.batch_tokens, accumulate, tail, drop_last)
        each = batch_size or in_dataset or 1
        check_blocks(self._source.order_arguments, global_batch_size or each * accumulate, each)
        self._device_batch_size, self.global_batch_size = batch_size, global_batch_size
        self.accumulate, self.evaluation = accumulate, evaluation
        self.tail: Tail = tail or ("drop" if drop_last else "exact" if evaluation else "pad")
        self.world, self.on_mismatch = world, on_mismatch
        is_own = collate_fn is not None and collate_fn is not collate_samples
        self._collate = SeededCall(collate_fn, self._source.seed, collate=True) if is_own else None  # type: ignore[arg-type]
        self._progress = Progress()
        plain_iterations_of(dataset).has_loader |= not evaluation
        self._workers = Workers(dataset)
        self.workers, count = choose_workers(self._source, self._collate, self, workers, num_workers)
        if num_workers == "auto" and not count:
            prefetch_factor, persistent_workers = None, False
        self._checked: BatchSettings | None = None  # the settings that the checks before training were made for
        self._last: MicroBatch | None = None
        self._driver: Driver | None = None
        self._begins_at: Position | None = None  # where a state, or `set_epoch`, made the next training run begin
        self.num_substituted = 0  # samples delivered to this rank in place of bad ones so far; all ranks' add up
        extra: dict[str, Any] = {"pin_memory_device": pin_memory_device} if pin_memory_device else {}
        super().__init__(
            dataset,
            batch_size=batch_size or in_dataset or 1,
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

    packs_states = False  # whether the dataset gives Composer the state as one string

    # For Accelerate: this loader divides its batches itself, and its state is kept.
    _is_accelerate_prepared = use_stateful_dataloader = True

    def __repr__(self) -> str:
        size = self._device_batch_size or plain_iterations_of(self.streaming).batch_size
        batch = f"batch_size={size}" if size else f"global_batch_size={self.global_batch_size}"
        batch = f"batch_tokens={self._source.batch_tokens}" if self._source.batch_tokens else batch
        return f"{type(self).__name__}({self.streaming!r}, {batch}, num_workers={self.num_workers}, tail={self.tail!r})"

    # The batches

    @property
    def batch_size(self) -> int | None:
        """Samples per device and micro-batch."""
        if self.global_batch_size is None:
            return self._device_batch_size or plain_iterations_of(self.streaming).batch_size
        return device_batch(self.global_batch_size, self.detect_world().num_replicas, self.accumulate)

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """Torch's constructor assigns what follows from other settings: nothing to keep."""

    def detect_world(self) -> World:
        """The world as given to the loader or its dataset, or as detected now."""
        source = self._source
        given = source.world if self.world is None else self.world
        return detect_world(given, source.replication or 1, source.data_dimension)

    def settings(self, resumed: OrderConfig | None = None) -> BatchSettings:
        """How the data is divided here, for a run that continues with these order settings, or else with its own."""
        here = self._progress.position if self._driver is None else self._driver.known
        own = None if here is None else here.order
        settings = self._source.settings(
            self.detect_world(), self.batch_size or 1, self.accumulate, self.tail, resumed or own
        )
        if self._driver is not None:
            settings = replace(settings, padding=self._driver.padding)
        return settings if resumed is not None or own is None else replace(settings, order=own)

    def __len__(self) -> int:
        """Micro-batches of this rank in a full epoch; where epochs differ, in the one that the position is in."""
        return self.num_batches(self.position.epoch if self.epochs_differ and not self.evaluation else 0)

    @property
    def epochs_differ(self) -> bool:
        """Whether epochs have different numbers of batches: with packed rows, and with a budget of tokens."""
        return self._source.epochs_differ

    def num_batches(self, epoch: int) -> int:
        """Micro-batches of this rank in one epoch. Where epochs differ, this plans all of its batches."""
        return len(self.settings().micro_batches(self._source, Start(epoch)))

    def batches_before(self, position: Position) -> int:
        """Micro-batches of this rank that count as done at a position: those of a full epoch less those to come."""
        if not self.epochs_differ:
            whole = self.micro_batches_from(replace(position, position=0))  # a mixture's last epoch may be shorter
            return len(whole) - len(self.micro_batches_from(position))
        return position.num_steps(self._source.order(position.order)) * self.accumulate

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
        plain, is_look = plain_iterations_of(self.streaming), not iterator.moves
        iterator.moves &= not self.evaluation
        driver = self._driver or driver_of(self)
        if driver is None and iterator.moves:
            self._take_loaded()
        own = driver.begin(iterator) if driver is not None and iterator.moves else None
        settings = self.settings()
        run = self._run(settings)
        iterator.moves &= driver is None or own is not None
        if iterator.moves:
            plain.belongs_to(self)
        if own is not None:
            start = own
        elif iterator.moves:
            start = self._progress.begin(iterator, run, settings)
        elif driver is not None and not driver.counts and not is_look:
            start = self.normalised(self.position)  # no trainer yet: where a state put it
        else:
            start = replace(self.first_position(), epoch=0 if self.evaluation else self.position.epoch)
        self.check()
        each = run.epoch(start.epoch).order.samples_per_position if self.epochs_differ else 1
        self.meter.total.settings = self.loading_settings()
        self.meter.total.epoch_positions = run.num_samples / each
        if iterator.limit == 0:
            return start, MadeBatches(iter(()), lambda _: None)
        return start, self.batches_from(start, settings)

    def note_batch(self, iterator: LoaderIterator, asked: float, got: float, made: Made) -> None:
        """Note a batch that is about to be handed out: when it was requested, when it came, and how it was made."""
        self._last = iterator.last_batch
        if made.early and self._last is not None:
            self._source.reader.delivered.add(made.early, self._last.label)
        if iterator.is_measured:
            self.meter.note(asked, got, made, self._last, iterator.num_batches == 1)
        if self._driver is not None:
            self._driver.note_batch(iterator)
        if iterator.moves:
            if self._last is not None and self._last.substitutions:
                self.num_substituted += self._last.num_substituted
            if self._driver is None:
                self._progress.moved(iterator)

    def note_end(self, iterator: LoaderIterator) -> None:
        """Note the end of an iteration."""
        if iterator.moves and self._driver is None:
            self._progress.ended(iterator)

    def compare_arrived(self) -> None:
        """Compare those of these samples whose shards have come since."""
        self._source.reader.delivered.compare_arrived()

    def compare_early(self, *, wait: bool = True) -> None:
        """Compare samples that were delivered before their shards were verified: where these are here, or all.

        Raises:
            StoreError: A sample had other bytes; or a shard cannot be fetched.
        """
        self._source.reader.delivered.compare(wait=wait)

    def check(self) -> None:
        """Refuse settings that cannot be trained with, and log the shuffle's quality; once for each setting."""
        settings = self.settings()
        if self._checked != settings:
            self._checked = settings
            check_run(self._source.reader, self._run(settings), settings, self.read_ahead(settings))

    def read_ahead(self, settings: BatchSettings) -> ReadAhead:
        """What the workers of this rank may have begun to fetch before it is trained on."""
        depth = read_ahead_depth(self._source.predownload, settings.device_batch_size)
        num_workers, finished = max(1, self.num_workers), self.prefetch_factor or 0
        if self.workers == "threads":  # which look ahead together
            num_workers, finished = 1, num_workers * finished
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
        self.compare_early()

    # The position

    @property
    def last_batch(self) -> MicroBatch | None:
        """What the batch in training, or else handed out last, is made of; None before any was."""
        current = None if self._driver is None else self._driver.current
        return self._last if current is None else current

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
        here = self._progress.position if self._driver is None else self._driver.known
        return here or self.begins_at or self.first_position()

    @property
    def begins_at(self) -> Position | None:
        """Where a state, also one that the dataset was given, or `set_epoch` made the next training run begin."""
        self._take_loaded()
        return self._begins_at

    def _take_loaded(self) -> None:
        """Begin where the state stands that the dataset was given, as users of mosaicml-streaming do."""
        plain = plain_iterations_of(self.streaming)
        loaded = None if self.evaluation else plain.state_for(self)
        if loaded is None or self._begins_at is not None or self._progress.position is not None:
            return
        resume = self._resume if plain.batch_size is None else self.continue_from  # else the dataset announced it
        resume(plain.passed({}, lambda: self.accept(loaded)))

    def first_position(self) -> Position:
        """The beginning of the training run in this world."""
        settings = self.settings()
        return Position.start(self._run(settings), batch_size=settings.global_batch_size, tail=settings.tail)

    def normalised(self, position: Position) -> Position:
        """A position as this loader sees it: with its batch, and the next epoch if no batch can come in this one."""
        settings = replace(self.settings(position.order), order=position.order)
        size, tail = settings.global_batch_size, settings.tail
        return position.rebased_on(self._run(settings), batch_size=size, tail=tail, world=settings.world)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch; a state loaded in the middle of it is kept."""
        if not self._progress.begins_in(epoch):
            self.continue_from(replace(self.first_position(), epoch=index(epoch)))

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values: JSON-able, the same on every rank, loadable with ``weights_only=True``."""
        if self._driver is not None:
            return self._driver.state()
        self._progress.asked()
        return self.state_of(self.position)

    def state_of(self, position: Position) -> dict[str, Any]:
        """A position as a state, which passes through the dataset's `state_dict`: a subclass may override that."""
        state, plain = self.proven(position).to_state(), plain_iterations_of(self.streaming)
        self._progress.took(position)
        found: dict[str, Any] = plain.passed(state, lambda: self.streaming.state_dict(position.position, True))
        return found

    def state_after(self, num_samples: int | None) -> dict[str, Any]:
        """The position after so many samples of the epoch; the caller counts them if no trainer does."""
        if num_samples is None or self._driver is None or self._driver.counts or self._last is None:
            return self.state_dict()
        here = replace(self.first_position(), epoch=self._last.epoch, position=num_samples)
        return self.proven(here if num_samples else here.next_epoch()).to_state()

    def proven(self, position: Position) -> Position:
        """A position with the ledger's expected sum up to it. Costs the samples since it was last asked.

        What was delivered before its shard was verified is compared first, see `compare_early`.
        """
        self.compare_early()
        return self._progress.proven(self._source.order(position.order), position)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state: the next iteration starts there.

        Raises:
            StateError: It cannot be continued over this data with these settings; the message names the difference.
        """
        if self._driver is None:
            self._resume(self.accept(state))
        elif self._driver.takes_states:  # else the trainer reads the same checkpoint itself
            self._driver.load(state)

    @property
    def is_driven(self) -> bool:
        """Whether a trainer reports what was trained on, see `driven_by`."""
        return self._driver is not None

    def driven_by(self, driver: Driver) -> None:
        """Let a trainer report what was trained on: a loader only knows what it hands out."""
        self._driver = driver

    def released(self) -> None:
        """End `driven_by`: the loader keeps the position at which the training run ended."""
        if self._driver is not None:
            self._progress.go_to(self.position)
        self._driver = self._begins_at = None

    def _resume(self, position: Position) -> None:
        self.continue_from(position)
        if not self.detect_world().rank:
            _log.info(self.resumed_at(position))

    def resumed_at(self, position: Position) -> str:
        """The sentence that announces a resume at a position."""
        position = self.normalised(position)
        total = None if self._source.packing is not None else self.num_samples
        return resumed_at(position, self.batches_before(position) // self.accumulate, total)

    def continue_from(self, position: Position) -> None:
        """Start the next iteration at a position."""
        self._begins_at = position
        self._progress.go_to(position)

    def accept(self, state: Mapping[str, Any] | None) -> Position:
        """Where `load_state_dict` would continue with this state; the loader does not move."""
        if not isinstance(state, Mapping):
            raise StateError(f"a state is the mapping that state_dict() gave; found {type(state).__name__}")
        given, plain = state, plain_iterations_of(self.streaming)
        state = plain.passed(given, lambda: self.streaming.load_state_dict(given))
        here = position_in(state, self._source, self.settings(order_in(state)), self.on_mismatch)
        self._source.reader.delivered.forget()  # the run goes back to before it
        return self.builds_on(here)

    def builds_on(self, proven: Position) -> Position:
        """Continue with the ledger's sum of this position, instead of summing again what came before."""
        return self._progress.builds_on(proven)
