"""`StreamingDataLoader`: batches in the run's order, and the position of what was handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch.utils.data import DataLoader

from lightning_stream.dataset import StreamingDataset
from lightning_stream.loading.checks import ReadAhead, tell
from lightning_stream.loading.distributed import WorldLike, detect_world
from lightning_stream.loading.pipeline import BatchSource
from lightning_stream.loading.progress import Progress
from lightning_stream.loading.resume import order_in, position_in
from lightning_stream.loading.settings import BatchSettings
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.workers import WorkerOptions, Workers
from lightning_stream.order import OrderConfig, Position, RunOrder, Tail, World, explain, trace
from lightning_stream.order.micro_batches import BatchInfo, count_micro_batches
from lightning_stream.order.tracing import Explanation, TracedBatch
from lightning_stream.reading.look_ahead import read_ahead_depth, warm


class StreamingDataLoader(DataLoader[Any]):
    """Loads a `StreamingDataset` in batches, and owns the position in it.

    Global batch k of an epoch holds the same samples on any number of nodes, ranks and workers. `state_dict` right
    after a batch was handed out resumes at the next one, in this world or any other.

    Args:
        dataset: What to load.
        batch_size: Samples per device and micro-batch. Defaults to the dataset's.
        global_batch_size: Samples of one optimizer step over all replicas, instead of `batch_size`.
        accumulate: Micro-batches of one optimizer step on each device.
        num_workers: Worker processes; 0 reads in this one.
        collate_fn: From a list of samples to a batch. The default makes dicts of tensors and lists.
        tail: What happens to an epoch's rest: ``"pad"`` fills it up with flagged repeats (training), ``"exact"``
            repeats nothing and lets the last batches differ by a sample (evaluation), ``"drop"`` leaves it out.
        drop_last: True for ``tail="drop"``, False for ``"pad"``.
        evaluation: Always read epoch 0 from its beginning, with ``tail="exact"`` by default.
        world: Which processes train together; None takes the dataset's, or detects it when first needed.
        pin_memory, timeout, worker_init_fn, prefetch_factor, persistent_workers, multiprocessing_context: As in
            `torch.utils.data.DataLoader`.
        on_mismatch: What `load_state_dict` does where data or settings differ: ``"error"`` or ``"warn"``.
        shuffle, sampler, batch_sampler: To be left out, since the dataset has the order; Lightning passes None for
            the latter two where it makes a loader once more, to predict.

    Raises:
        ValueError: Settings that contradict each other.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        accumulate: int = 1,
        num_workers: int = 0,
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
    ) -> None:
        if shuffle or sampler is not None or batch_sampler is not None:
            raise ValueError(
                "the order is the dataset's: leave out shuffle, sampler and batch_sampler of its loader. To shuffle, "
                "pass shuffle=True to the StreamingDataset"
            )
        _check_arguments(dataset, batch_size, global_batch_size, accumulate, tail, drop_last)
        self._device_batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.accumulate = accumulate
        self.evaluation = evaluation
        self.tail: Tail = tail or ("drop" if drop_last else "exact" if evaluation else "pad")
        self.world = world
        self.on_mismatch = on_mismatch
        self._collate = collate_fn
        self._progress = Progress()
        self._workers = Workers(dataset.shuffle_seed)
        self._told: BatchSettings | None = None  # the settings whose forecast was told
        self.num_substituted = 0  # samples delivered to this rank in place of bad ones so far; all ranks' add up
        self._on_batch: Callable[[BatchInfo], object] | None = None
        self._trained: Callable[[], Position] | None = None
        super().__init__(
            dataset,
            batch_size=batch_size or dataset.batch_size or 1,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
        )
        # Lightning reads the constructor's arguments off the attributes of their names; torch has filled in its own.
        vars(self).update(batch_size=batch_size, drop_last=None, collate_fn=collate_fn)

    # What the batches are

    @property
    def batch_size(self) -> int | None:
        """Samples per device and micro-batch."""
        if self.global_batch_size is None:
            return self._device_batch_size or self._streaming.batch_size
        replicas = self.detect_world().num_replicas
        if self.global_batch_size % (replicas * self.accumulate):
            raise ValueError(
                f"a global batch divides over replicas and accumulation: {self.global_batch_size} samples do not "
                f"divide by {replicas} replicas x {self.accumulate} accumulated micro-batches. Choose a "
                f"global_batch_size that is a multiple of {replicas * self.accumulate}, or another number of devices"
            )
        return self.global_batch_size // (replicas * self.accumulate)

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """Torch's constructor assigns what we derive: nothing to keep."""

    @property
    def _streaming(self) -> StreamingDataset:
        dataset = self.dataset
        assert isinstance(dataset, StreamingDataset)
        return dataset

    def detect_world(self) -> World:
        """The world as given to the loader or its dataset, or as detected now."""
        if self.world is not None:
            return detect_world(self.world, self._streaming.replication or 1)
        return self._streaming.detect_world()

    def settings(self, resumed: OrderConfig | None = None) -> BatchSettings:
        """What the batches are in this world, for a run that continues under these order settings.

        They default to those of the loader's own position.
        """
        size = self.batch_size
        assert size is not None
        own = None if self._progress.position is None else self._progress.position.order
        settings = self._streaming.batch_settings(self.detect_world(), size, self.accumulate, self.tail, resumed or own)
        return settings if resumed is not None or own is None else replace(settings, order=own)

    def _run(self, settings: BatchSettings) -> RunOrder:
        return self._streaming.order(settings.order)

    def __len__(self) -> int:
        """Micro-batches of this rank in a full epoch, whatever was consumed of it already."""
        return self._micro_batches_from(Start())

    def batches_before(self, position: Position) -> int:
        """Micro-batches of this rank that count as done at a position: what a full epoch has less what is to come."""
        return len(self) - self._micro_batches_from(Start.of(position))

    def _micro_batches_from(self, start: Start) -> int:
        settings = self.settings()
        return count_micro_batches(settings.plan(self._streaming, start), settings.device_batch_size)

    def warm(self, steps: int) -> int:
        """Fetch, before training, the shards of this rank's first optimizer steps from here; returns their number."""
        return warm(self._streaming.reader, self.settings().plan(self._streaming, Start.of(self.position)), steps)

    # Iterating

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        """Yield the batches from the loaded state, or of the next epoch that was not begun yet."""
        settings = self.settings()
        start = self._begin(settings)
        self._streaming.read_by_loader = True
        source = BatchSource(self._streaming, settings, Start.of(start), self._collate)
        with self._workers.batches(source, self._worker_options()) as batches:
            for batch, info in batches:
                if not self.evaluation:
                    self._progress.hand_out(start, info)
                self._progress.last = info
                if info.substitutions:
                    self.num_substituted += info.num_substituted
                if self._on_batch is not None:
                    self._on_batch(info)
                yield batch

    def _begin(self, settings: BatchSettings) -> Position:
        run = self._run(settings)
        position = self._first_of(settings) if self.evaluation else self._progress.begin(run, settings)
        if self._told != settings:
            self._told = settings
            tell(self._streaming.reader, run, settings, self._reads_ahead(settings))
            self._refuse_nothing(settings)
        return position

    def _reads_ahead(self, settings: BatchSettings) -> ReadAhead:
        depth = read_ahead_depth(self._streaming.predownload, settings.device_batch_size)
        return ReadAhead(max(1, self.num_workers), depth, self.prefetch_factor or 0)

    def _refuse_nothing(self, settings: BatchSettings) -> None:
        self._streaming.reader.require_samples()
        if settings.plan(self._streaming, Start()).num_batches == 0:
            raise ValueError(
                f"an epoch must have a batch, but tail={settings.tail!r} leaves none of "
                f"{self._run(settings).num_samples} samples in global batches of {settings.global_batch_size}. "
                "Choose a smaller batch, or tail='pad' or 'exact'"
            )

    def _worker_options(self) -> WorkerOptions:
        return WorkerOptions(
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            multiprocessing_context=self.multiprocessing_context,
        )

    def close(self) -> None:
        """End the worker processes of this loader, persistent ones too; a later iteration starts new ones."""
        self._workers.close()

    # The position

    @property
    def last_batch(self) -> BatchInfo | None:
        """What the batch handed out last is made of; None before any was."""
        return self._progress.last

    @property
    def position(self) -> Position:
        """Where the run is, by the batches handed out; mid-accumulation: at the last whole optimizer step."""
        return self._progress.position or self.first_position()

    def first_position(self) -> Position:
        """The beginning of the run in this world."""
        return self._first_of(self.settings())

    def _first_of(self, settings: BatchSettings) -> Position:
        return Position.start(self._run(settings), batch_size=settings.global_batch_size, tail=settings.tail)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch; a state loaded in the middle of it is kept."""
        if self._progress.begins_in(epoch):
            return
        here, run = self.position, self._run(self.settings())
        self.continue_from(Position.start(run, batch_size=here.batch_size, tail=here.tail, epoch=epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values: JSON-able, the same on every rank, loadable with ``weights_only=True``."""
        return self.proven(self.position if self._trained is None else self._trained()).to_state()

    def proven(self, position: Position) -> Position:
        """A position with the ledger's expected sum up to it. Costs the samples since it was last asked."""
        return self._progress.proven(self._run(self.settings()), position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: the next iteration starts there.

        Raises:
            StateError: It cannot be continued over this data under these settings; says what differs.
        """
        if self._trained is None:  # else who follows knows better where to continue
            self.continue_from(self.accept(state))

    def followed_by(self, on_batch: Callable[[BatchInfo], object], trained: Callable[[], Position]) -> None:
        """Let a trainer's callback say what was trained on, since a loader only sees what it hands out.

        Args:
            on_batch: Called with every batch's info as it is handed out.
            trained: The position of the optimizer's last step. From now on it is what `state_dict` gives, and
                `load_state_dict` leaves the position to the follower, who sets it with `continue_from`.
        """
        self._on_batch, self._trained = on_batch, trained

    def continue_from(self, position: Position) -> None:
        """Start the next iteration at a position."""
        self._progress.go_to(position)

    def accept(self, state: Mapping[str, Any]) -> Position:
        """As `load_state_dict`, but only say where the state would continue, without moving there."""
        settings = self.settings(order_in(state))
        return self.builds_on(position_in(state, self._streaming, settings, self.on_mismatch))

    def builds_on(self, proven: Position) -> Position:
        """Go on with the ledger's sum of this position, instead of summing what came before anew."""
        return self._progress.builds_on(proven)

    def explain(self, position: Position | None = None) -> Explanation:
        """Which epoch, batch and sample ids come next, here or after a position."""
        settings = self.settings()
        return explain(self._run(settings), position or self.position, world=settings.world)

    def trace(self, step: int, position: Position | None = None) -> TracedBatch:
        """Which samples an optimizer step of the epoch is made of, done or to come; `step` counts from its start.

        Its ids are in position order and those of all replicas: a batch has this rank's share of them, grouped by
        canonical node.
        """
        settings = self.settings()
        return trace(self._run(settings), position or self.position, step, world=settings.world)


def _check_arguments(
    dataset: Any,
    batch_size: int | None,
    global_batch_size: int | None,
    accumulate: int,
    tail: str | None,
    drop_last: bool | None,
) -> None:
    if not isinstance(dataset, StreamingDataset):
        raise TypeError(
            f"StreamingDataLoader loads a StreamingDataset; found {type(dataset).__name__}. "
            f"Use torch.utils.data.DataLoader for other datasets"
        )
    problems = []
    if tail is not None and drop_last is not None:
        problems.append(f"pass tail= or drop_last=, not both: found tail={tail!r}, drop_last={drop_last!r}.")
    if tail not in (None, "pad", "drop", "exact"):
        problems.append(f"tail is 'pad', 'drop' or 'exact'; found {tail!r}.")
    if batch_size is not None and global_batch_size is not None:
        problems.append("pass batch_size= (per device) or global_batch_size= (of an optimizer step), not both.")
    if batch_size is None and global_batch_size is None and dataset.batch_size is None:
        problems.append("pass batch_size= (per device) or global_batch_size= (of an optimizer step).")
    if batch_size is not None and dataset.batch_size not in (None, batch_size):
        problems.append(
            f"batch_size is {batch_size} for the loader and {dataset.batch_size} for its dataset: make them one."
        )
    for name, value in (
        ("batch_size", batch_size),
        ("global_batch_size", global_batch_size),
        ("accumulate", accumulate),
    ):
        if value is not None and (not isinstance(value, int) or value < 1):
            problems.append(f"{name} is a whole number of at least 1; found {value!r}.")
    if problems:
        raise ValueError(" ".join(problems))
