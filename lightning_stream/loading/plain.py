"""The order and position of a dataset that a plain `torch.utils.data.DataLoader` or a ``for`` loop reads.

This is the protocol of mosaicml-streaming's dataset, which Composer speaks, too: the trainer counts samples.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
from torch.utils.data import get_worker_info

from lightning_stream.errors import StateError
from lightning_stream.lazy import joining
from lightning_stream.loading.accelerate import refuse_second_dealing, warn_of_another_order
from lightning_stream.loading.batches import BatchMaker
from lightning_stream.loading.cursor import State
from lightning_stream.loading.iteration import Loader
from lightning_stream.loading.randomness import epoch_of_call
from lightning_stream.loading.resume import order_in, position_in, resumed_at
from lightning_stream.loading.shared_position import SharedPosition, Start, TrainerPosition
from lightning_stream.loading.source import BatchSettings, SampleSource
from lightning_stream.loading.torch_private import iteration_key, samples_at_once
from lightning_stream.order import BatchPlan, Position, RunOrder, Tail, is_mosaic_state
from lightning_stream.order.batches import TAILS, EpochOrder
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.questions import Occurrence
from lightning_stream.reading.bad_samples import readable
from lightning_stream.reading.look_ahead import warm

STATE_KEY = "lightning_stream"
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Iteration:
    """An iteration: where it started, and how many samples of this rank this process has yielded."""

    start: Start | None = None
    num_yielded: int = 0
    is_over: bool = False  # or was dropped


class PlainIterations:
    """Where the iterations over one dataset start, agreed upon by the workers of a plain DataLoader."""

    def __init__(self, source: SampleSource, batch_size: int | None) -> None:
        self._source = source
        self.batch_size = batch_size  # samples per device; DataLoader workers need it
        self._owner: ReferenceType[Loader] | None = None
        self._begun: _Iteration | None = None  # the latest that this process has begun
        self.has_loader = False  # whether a StreamingDataLoader trains on the dataset
        self.handed_out: int | None = None  # the latest epoch of which a loader handed out more than a look
        self._passing: State | None = None  # a loader's state, while the dataset's class may change it
        self.loaded_state: State | None = None
        self._starts = TrainerPosition()
        self._loaded: Position | None = None
        self._is_steered = False  # whether somebody says which epoch begins, or keeps its states

    def __getstate__(self) -> dict[str, Any]:
        begun = None if self._begun is None else replace(self._begun, is_over=True)
        return {**vars(self), "_owner": None, "_begun": begun}

    def belongs_to(self, loader: Loader) -> None:
        """Leave the position to a loader of ours that trains on this dataset; not where a trainer drives another."""
        owner = self.loader
        if owner is loader or (owner is not None and owner.cursor.driver is not None and loader.cursor.driver is None):
            return
        self.loaded_state = self.state_for(loader)
        self._owner = ref(loader)
        cursor = loader.cursor
        if cursor.driver is None and cursor.position is None and cursor.begins_at is None:
            self._warn_of_repeats()

    def _warn_of_repeats(self) -> None:
        """Warn of a new loader that begins the run again after another one has trained on the dataset."""
        order = self._source.order_arguments
        if self.handed_out is not None and (order["shuffle"] or order["epoch_size"]):
            _log.warning(
                "a new loader begins a training run, at epoch 0; found another one of the same dataset, which has come "
                f"to epoch {self.handed_out}: the same samples come again, in the same order. Keep one loader for all "
                f"epochs, or call loader.set_epoch({self.handed_out + 1}) or load_state_dict(), or make a new dataset"
            )

    def state_for(self, loader: Loader) -> State | None:
        """The state that the dataset was given for its next loader; None for those after that one."""
        return self.loaded_state if self._owner is None or self.loader is loader else None

    @property
    def _shared(self) -> SharedPosition:
        return self._starts.of(is_worker=get_worker_info() is not None)

    @property
    def _is_only_for_loader(self) -> bool:
        """Whether the dataset was given a state that it cannot read alone, and no loader of ours has begun with it."""
        return self.batch_size is None and self.loaded_state is not None and self._owner is None

    @property
    def loader(self) -> Loader | None:
        """The loader of ours that reads this dataset; None if there is none."""
        return None if self._owner is None else self._owner()

    def passed(self, state: State, method: Callable[[], Any]) -> Any:
        """A loader's state after it passed through the dataset's `state_dict` or `load_state_dict`.

        A subclass may override these, and they reach the loader again: such an inner call returns its state unchanged.
        """
        if self._passing is not None:
            return state
        self._passing = state
        try:
            returned = method()
            return self._passing if returned is None else returned
        finally:
            self._passing = None

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration begins in, as mosaicml-streaming counts.

        Where a subclass, a transform or a collate function asks, it is the one after the sample's, in any process.
        """
        read_in = epoch_of_call()
        if read_in is not None:
            return read_in + 1
        owner = self.loader
        here = self._shared.upcoming if owner is None else owner.position
        return here.epoch + (owner is not None and here.position > 0)

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        if (owner := self.loader) is not None:
            owner.set_epoch(epoch)
        self._shared.upcoming = Start(epoch)

    def settings(self, state: State | None = None) -> BatchSettings:
        """This rank's batches if no loader of ours reads the dataset."""
        resumed = order_in(state) if state is not None else None if self._loaded is None else self._loaded.order
        tail: Tail = "pad" if state is None or state.get("tail") not in TAILS else state["tail"]
        settings = self._source.settings(self._source.detect_world(), self.batch_size or 1, 1, tail, resumed)
        # The seed and the nodes of a state of mosaicml-streaming need not be those of the arguments.
        return replace(settings, order=resumed) if resumed and state is None else settings

    def order(self) -> RunOrder:
        """The order of the training run."""
        return self._source.order(self.settings().order)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch; a loaded state is kept."""
        refuse_second_dealing(self._source.detect_world(), has_loader=self.has_loader)
        self._is_steered = True
        if self._loaded is None:
            self._shared.upcoming = Start(epoch)

    def iterate(self, source: SampleSource) -> Iterator[Any]:
        """Yield this rank's samples; in a worker of a DataLoader, the samples of that worker's batches."""
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if self._is_only_for_loader:
            raise StateError(
                "a dataset continues from a state with the batches of the run, but this one was given a state and has "
                "no batch size. Pass batch_size= to StreamingDataset, the same as to torch's DataLoader, or train on a "
                "StreamingDataLoader"
            )
        if count > 1 and self.batch_size is None:
            raise ValueError(
                f"{count} DataLoader workers divide the batches, so the dataset must know the batch "
                "size: pass batch_size= to StreamingDataset, the same as to the DataLoader, or use StreamingDataLoader"
            )
        taken = samples_at_once()
        if count > 1 and not index and taken not in (None, self.batch_size):
            warnings.warn(
                f"workers divide the dataset's batches of {self.batch_size} samples, but the DataLoader takes {taken} "
                "at a time: a state would count other samples than those trained on, and a resume lose and repeat "
                "some. Pass the same batch_size to both, or use StreamingDataLoader",
                stacklevel=2,
            )
        if source.is_switched and self.batch_size is None:
            raise ValueError("version= counts optimizer steps, so the dataset needs a batch size: pass batch_size=")
        if source.batch_tokens is not None:
            raise ValueError("batch_tokens makes batches of different sizes: load the dataset by StreamingDataLoader")
        source.reader.require_samples()
        refuse_second_dealing(source.detect_world(), count, has_loader=self.has_loader)
        self._begun = iteration = _Iteration()
        key = iteration_key(worker) if worker is not None else id(iteration)
        settings = self.settings()
        maker = BatchMaker(source)
        iteration.start = start = self._shared.begin(key, index)
        if not self._is_steered:
            warn_of_another_order(start.epoch)
        planned, order = maker.planned(settings, start, index, count)
        try:
            for batch in planned:
                for sample in self._read(source, maker, batch, order):
                    iteration.num_yielded += 1
                    yield sample
            self._shared.end(key, index)
        except Exception as error:
            _log.warning(
                f"an iteration over a dataset ends with its first error, and the next one begins the next epoch; found "
                f"{type(error).__name__} in epoch {start.epoch}. For the samples that are left, load a state, or use "
                "StreamingDataLoader, which continues at the batch that failed"
            )
            raise
        finally:
            iteration.is_over = True
        source.reader.shards.delivered.compare()

    def _read(self, source: SampleSource, maker: BatchMaker, batch: MicroBatch, order: EpochOrder) -> Sequence[Any]:
        """The samples of a batch; in a worker, of verified shards: nobody could compare them later."""
        in_trainer = get_worker_info() is None
        delivered = source.reader.shards.delivered
        delivered.compare_arrived()
        while True:
            samples, _, unverified = readable(source.reader, source.bad_data, batch, order, maker.samples)
            if in_trainer and unverified:
                delivered.add(unverified, batch.label)
            if in_trainer or source.reader.is_right(unverified, wait=True):
                return samples

    def warm(self, steps: int) -> int:
        """Fetch the shards of this rank's first optimizer steps from where the next iteration starts."""
        return warm(self._source.reader, self.settings().plan(self._source, self._shared.upcoming), steps)

    def where(self, sample_id: int, epochs: Iterable[int] | None) -> list[Occurrence]:
        """When and where the training run sees a sample, see `StreamingDataset.where`."""
        if (owner := self.loader) is not None:
            return owner.where(sample_id, epochs)
        if self.batch_size is None and self._source.batch_tokens is None:
            raise ValueError(
                "a sample is in a step of the run, which follows from the batch size; this dataset has none, and no "
                "loader has begun to read it. Call loader.where(), or pass batch_size= to StreamingDataset"
            )
        settings = self.settings()
        position = settings.start(self.order(), self._shared.upcoming.epoch)
        return settings.where(self._source, position, sample_id, epochs)

    def state_dict(self, num_samples: int | None, from_beginning: bool) -> dict[str, Any]:
        """The position after so many samples, see `StreamingDataset.state_dict`."""
        self._is_steered = True
        if self._passing is not None:
            _warn_of_another_count(self._passing.get("position"), num_samples)
            return dict(self._passing)
        owner, trainer_state = self._trained_on()
        if owner is not None:
            counted = None if trainer_state is not None else num_samples
            state = self.passed({}, lambda: owner.state_after(counted))
            if from_beginning and counted is not None:
                _warn_of_another_count(state.get("position") or None, counted)
            return {STATE_KEY: json.dumps(state)} if owner.packs_states else state
        if self.batch_size is None and (trainer_state is not None or self._owner is not None):
            raise StateError(
                "a state holds the batches of the run, which this dataset does not know: no StreamingDataLoader that "
                "trains on it is there, and it has no batch size. Train on a StreamingDataLoader, keep it, and take "
                "its state_dict(); or pass batch_size= to StreamingDataset, the same as to torch's DataLoader"
            )
        if self._is_only_for_loader:
            return dict(self.loaded_state or {})
        upcoming = self._shared.upcoming  # asked first: workers may begin there meanwhile
        latest = self._latest()
        began = self._shared.current if latest is None else latest.start
        if num_samples is None:
            if get_worker_info() is not None or (latest is None and began is not None):
                raise StateError(
                    "a worker of torchdata's StatefulDataLoader, or of torch's DataLoader, sees only its own part of a "
                    "run, and the trainer's process nothing: use StreamingDataLoader, which keeps the position with "
                    "any number of workers, or num_workers=0; or pass the number of samples trained on"
                )
            num_yielded = 0 if latest is None else latest.num_yielded
            num_samples = num_yielded * self._source.detect_world().num_replicas
            from_beginning = False
        self._source.reader.shards.delivered.compare()
        settings = self.settings()
        run = self._source.order(settings.order)
        start = began or upcoming
        order = run.epoch(start.epoch)
        reached = order.order.position_after(num_samples + (0 if from_beginning else _delivered(order, start.position)))
        is_last = not order.exists(reached + settings.global_batch_size)
        _check_counts(settings, trainer_state, num_samples, is_last=is_last)
        position = settings.start(run, start.epoch)
        if began is not None and num_samples == 0 and from_beginning:
            if trainer_state is not None and joining("composer").is_in_batch():
                raise StateError(
                    "over torch's DataLoader, Composer has a position between batches, but a checkpoint was asked for "
                    "in an epoch's first one. Save it at batch_end or epoch_end, or train on a StreamingDataLoader"
                )
            if trainer_state is not None or self._shared.is_over:  # asked between epochs, as Composer does
                return position.next_epoch().to_state()
        if began is None and reached > start.position and self._shared.was_reset:
            raise StateError(
                f"a state counts samples of the iteration that began last; found {num_samples} samples, and the next "
                f"iteration is to begin at epoch {start.epoch}, position {start.position}. Take the state before "
                "set_epoch(), or next_epoch, says where the next iteration begins"
            )
        end = reached if order.exists(reached) else order.num_samples
        _refuse_inside_batch(settings.plan(self._source, start), settings, end)
        return position.advanced(run, end).to_state()

    def _latest(self) -> _Iteration | None:
        """The latest iteration, if it is this process's own; None where it is over and the next start was set since."""
        begun = self._begun
        current = self._shared.current
        if begun is None or begun.start == current or (current is None and not begun.is_over):
            return begun
        return None

    def load_state_dict(self, state: State | None) -> None:
        """Let the next iteration start at a state.

        At the end of an epoch it is the empty rest of that epoch: Composer asks for it before it ends the epoch.
        """
        state = unpacked(state)
        if self._passing is not None and state is not None:
            self._passing = state
            return
        owner, trainer_state = self._trained_on()
        state = state or None  # Composer keeps an empty one of a state whose keys it is to ignore
        if owner is not None:
            self.passed({}, lambda: owner.load_state_dict(state))
            return
        if state is None:
            raise StateError(
                "a training run continues from the data position in its checkpoint, but this one holds none: it was "
                "written without a StreamingDataset, or its keys are ignored. To begin the data from its start, load "
                "the weights only"
            )
        self._owner = None
        self._is_steered = True
        self.loaded_state = state
        self._begun = None
        if self.batch_size is None:
            return  # only a loader of ours can read it
        settings = self.settings(state)
        self._loaded = here = position_in(state, self._source, settings)
        if not settings.world.rank:
            step = here.position // settings.global_batch_size
            num_samples = None if self._source.packing is not None else self._source.order(here.order).num_samples
            _log.info(resumed_at(here, step, num_samples))
        start = Start.of(here)
        reached = int(state["sample_in_epoch"] if is_mosaic_state(state) else state["position"])
        epoch = int(state["epoch"])
        if reached and start.epoch > epoch:
            start = Start(epoch, self.order().epoch(epoch).num_samples)
        self._shared.upcoming = start
        if trainer_state is not None:
            delivered = _delivered(self.order().epoch(start.epoch), start.position)
            num_done = delivered // settings.global_batch_size
            joining("composer").continue_epoch(trainer_state, num_done, self._skip_epoch)

    def _skip_epoch(self) -> None:
        """Leave an empty rest of the epoch that the next iteration begins in."""
        epoch = self._shared.upcoming.epoch
        self._shared.upcoming = Start(epoch, self.order().epoch(epoch).num_samples)

    def _trained_on(self) -> tuple[Loader | None, Any]:
        """The loader of ours whose position a state is, and Composer's state where Composer saves or loads one.

        Composer knows which loader it trains on; other loaders over the dataset have no part in its checkpoints.
        """
        join = joining("composer")
        trainer_state = None if join is None else join.state_that_asks()
        return (self.loader if trainer_state is None else join.loader_of(trainer_state, self)), trainer_state


def _delivered(order: EpochOrder, position: int) -> int:
    """The samples that are delivered before a position: trainers count these, also repeats."""
    return order.order.delivered_before(position) or position


def _refuse_inside_batch(plan: BatchPlan, settings: BatchSettings, reached: int) -> None:
    """Raise StateError where the samples yielded up to here are others than those before this position."""
    k = (reached - plan.start) // plan.batch_size
    if k < 0 or settings.order.mosaic is not None or not plan.has(k):
        return
    begin, end = plan.bounds(k)
    if reached == end:  # of an epoch's last batch, whose samples need not divide by the replicas
        return
    count = (reached - begin) // plan.world.num_replicas
    shares = [replica.places(k).positions[:count] for replica in plan.of_replicas(plan.balance)]
    if not np.array_equal(np.sort(np.concatenate(shares)), np.arange(begin, reached)):
        raise StateError(
            "a state lies between two batches, whose samples each process has in another order; found "
            f"{reached - begin} of {plan.batch_size} samples of a batch. Pass the same batch_size to the dataset and "
            "to torch's DataLoader, and take states after whole batches; or use StreamingDataLoader"
        )


def _check_counts(settings: BatchSettings, trainer_state: Any, num_samples: int, *, is_last: bool) -> None:
    """Compare what Composer's clock counted in its last batch with the samples that the batch has.

    StateError where it has counted those that ranks share more than once. A warning where it counts something else, as
    the rows that a `collate_fn` packs samples into, unless the dataset's class corrects the number.
    """
    before = None if trainer_state is None else trainer_state.previous_timestamp
    if before is None:
        return
    clock = trainer_state.timestamp
    shared_by = settings.world.replication
    size = settings.global_batch_size  # earlier batches of the epoch may have been larger
    counted = int(clock.sample) - int(before.sample)
    if shared_by > 1 and counted > size:
        raise StateError(
            f"each sample counts once, but Composer's clock adds up those of all ranks, and {shared_by} share theirs; "
            f"found {counted} samples in a batch of {size}. Train on data_spec(dataset), or "
            "on a DataSpec whose get_num_samples_in_batch divides by the replication"
        )
    if counted not in (0, size) and not is_last and num_samples == int(clock.sample_in_epoch):
        warnings.warn(
            f"a state holds the number of samples that Composer's clock counts; found {counted} of a batch of {size} "
            "samples, as where a collate_fn packs or leaves out some: a resume would repeat or lose samples. Correct "
            "the number in the dataset's state_dict(), or pass a DataSpec with get_num_samples_in_batch",
            stacklevel=2,
        )


def _warn_of_another_count(counted: int | None, num_samples: int | None) -> None:
    if counted not in (None, num_samples):
        warnings.warn(
            f"a StreamingDataLoader counts samples, not rows of batches; found {counted} samples, which the "
            f"dataset's state_dict corrects to {num_samples}. The state has {counted}: remove the correction",
            stacklevel=2,
        )


def unpacked(state: State | None) -> State | None:
    """A state as it was before it was packed into one string of JSON.

    Raises:
        StateError: It is damaged.
    """
    if state is None or STATE_KEY not in state:
        return state
    try:
        contents: State = json.loads(state[STATE_KEY])
    except (TypeError, ValueError) as error:
        raise StateError(
            f"the data state in a checkpoint is JSON under {STATE_KEY!r}; found {str(state[STATE_KEY])[:60]!r}. "
            "It is damaged: load another checkpoint"
        ) from error
    return contents
