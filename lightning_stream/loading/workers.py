"""A loader's batches, made in this process, in threads of it, or in torch's workers, which may outlive an iteration."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stream.errors import StateError
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.loading import torch_private
from lightning_stream.loading.groups import Delivery, grouped, in_order
from lightning_stream.loading.meter import Made, Meter, SharedCounters
from lightning_stream.loading.randomness import SeededCall, sample_seed
from lightning_stream.loading.shared_position import SharedPosition, Start
from lightning_stream.loading.source import BatchSettings, SampleSource
from lightning_stream.loading.transport import SharedSlots, shared_slots
from lightning_stream.loading.worker_signals import (
    can_report,
    leave_signals_to_the_trainer,
    let_terminate_end_at_once,
)
from lightning_stream.order.batches import EpochOrder
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.processes import job_signals_wait, num_cores
from lightning_stream.reading.bad_samples import readable
from lightning_stream.reading.look_ahead import read_ahead
from lightning_stream.reading.proofs import verdicts
from lightning_stream.threads import DaemonPool

# A loader's options that torch's loader over whole batches gets too, as they are when an iteration begins.
_OPTIONS = ("num_workers", "pin_memory", "timeout", "prefetch_factor", "persistent_workers", "multiprocessing_context")
_PREFETCHED = 2  # batches that a worker may have on their way, as torch has it
_SHORT_S, _UNMEASURED = 0.001, 15  # after the measured one of the batches that take less time

_EXIT_S = 5
_MOST_CHOSEN = 8  # workers; more only help where a batch takes longer than eight steps
_OWN_READING = "the dataset's own get_item or __getitem__"
_log = logging.getLogger(__name__)

_unfinished: set[futures.Future[Delivery]] = set()  # batches that threads of this process make, or are to make


def _finish_batches() -> None:
    """Let threads finish their batches before the interpreter ends, which would end them inside torch: a crash."""
    futures.wait([batch for batch in list(_unfinished) if not batch.cancel()], timeout=_EXIT_S)


atexit.register(_finish_batches)
os.register_at_fork(after_in_child=_unfinished.clear)


class Pipeline(IterableDataset[Delivery]):
    """Reads ahead and delivers one worker's collated batches, each with its `MicroBatch` and its times.

    Args:
        source: The samples.
        settings: How the data is divided into batches.
        start: Where an iteration starts; a shared position where the workers outlive an iteration.
        collate: From samples to a batch; None for the default.
    """

    def __init__(
        self, source: SampleSource, settings: BatchSettings, start: Start | SharedPosition, collate: SeededCall | None
    ) -> None:
        self.source, self.settings, self.start, self.collate = source, settings, start, collate
        self.slots: SharedSlots | None = None  # how batches leave worker processes; None for torch's own way
        self.counters: SharedCounters | None = None  # of worker processes; None without them
        self.num_threads = self.in_progress = 0  # threads that make batches; how many batches they are ahead at most
        self.timeout: float = 0  # seconds to wait for a batch of theirs; 0 for ever

    def use_threads(self, num_threads: int, prefetch_factor: int | None, timeout: float) -> None:
        """Make the batches in threads of this process, each at most `prefetch_factor` batches ahead."""
        self.source, self.num_threads, self.timeout = replace(self.source, in_threads=True), num_threads, timeout
        self.in_progress = num_threads * (prefetch_factor or _PREFETCHED)

    def __iter__(self) -> Iterator[Any]:
        """The batches; in a worker of `Workers` its messages, see `groups`."""
        worker = get_worker_info()
        if worker is None:
            return self._batches(0, 1)
        gc.freeze()  # each collection would visit the trainer's objects, and so copy a forked worker's memory
        if self.counters is None:
            return self._batches(worker.id, worker.num_workers)
        counters = self.source.reader.counters
        counters.values, counters.live_settings = self.counters.values[worker.id], self.counters.live_settings
        self.counters.pids[worker.id] = os.getpid() if can_report() else 0
        to_make = self._to_make(worker.id, worker.num_workers)
        is_quick = _never if _functions(self.source, self.collate) else self.source.reader.has_open
        return grouped(to_make, worker.id, self.slots, is_quick)

    def _batches(self, index: int, count: int) -> Iterator[Delivery]:
        if self.in_progress:
            yield from self._by_threads(index, count)
            return
        for _, make in self._to_make(index, count):
            yield make()

    def _to_make(self, index: int, count: int) -> Iterator[tuple[MicroBatch, Callable[[], Delivery]]]:
        """One worker's batches, which are to be made in this order, each before the next one is asked for."""
        start = self.start.upcoming if isinstance(self.start, SharedPosition) else self.start
        source, size, in_progress = self.source, self.settings.device_batch_size, self.in_progress
        batches = self.settings.micro_batches(source, start)
        look_ahead = source.predownload, size, count, 1 + in_progress
        ahead = read_ahead(source.reader, batches.plan, batches.walk(index, count), *look_ahead)
        order, processor, began = batches.plan.order, _Processor(), perf_counter()
        for planned in ahead:
            clock = _Processor(self.num_threads) if in_progress else processor
            yield planned, partial(self._make, planned, order, perf_counter() - began, clock)
            began = perf_counter()

    def _make(self, planned: MicroBatch, order: EpochOrder, planning_s: float, processor: _Processor) -> Delivery:
        """Make one batch, whose planning took so long."""
        source, spent = self.source, self.source.reader.counters.spent
        out = None if self.slots is None or get_worker_info() is None else self.slots.empty  # the trainer uses none
        processor.begin()
        began = perf_counter()
        waited_s, transform_s, collate_s = spent.waited_s, spent.transform_s, spent.collate_s
        spent.early = []
        batch, info = readable(source, planned, order, lambda made: source.batch(made, self.collate, out))
        early, spent.early = tuple(spent.early), None
        ended, waited_s = perf_counter(), spent.waited_s - waited_s
        transform_s, collate_s = spent.transform_s - transform_s, spent.collate_s - collate_s
        read_s = ended - began - waited_s - transform_s - collate_s
        stages = (planning_s, waited_s, read_s, transform_s, collate_s)
        thread_s, process_s, queued_s = processor.used(ended - began - waited_s)
        made = Made(began - planning_s, ended, stages, planning_s + thread_s, planning_s + process_s, queued_s, early)
        return batch, info, made

    def proven(self, delivery: Delivery) -> Delivery:
        """A batch that is about to be handed out; made again if its shards have come since and have other bytes."""
        _, info, made = delivery
        while made.early and not all(verdicts(self.source.reader, made.early, wait=False).values()):
            _log.warning("The batch at %s was read early and wrong: it is made again.", info.label)
            order = self.source.order(self.settings.order).epoch(info.epoch)
            delivery = self._make(info, order, 0.0, _Processor())
            _, info, made = delivery
        return delivery

    def _by_threads(self, index: int, count: int) -> Iterator[Delivery]:
        """Batches in their order, while threads make those that follow."""
        pending: deque[futures.Future[Delivery]] = deque()
        with DaemonPool(self.num_threads, "make") as pool:
            for _, make in self._to_make(index, count):
                pending.append(pool.submit(make))
                _unfinished.add(pending[-1])
                pending[-1].add_done_callback(_unfinished.discard)
                if len(pending) > self.in_progress:
                    yield self._made(pending.popleft())
            while pending:
                yield self._made(pending.popleft())

    def _made(self, batch: futures.Future[Delivery]) -> Delivery:
        try:
            return batch.result(self.timeout or None)
        except futures.TimeoutError as error:
            if batch.done():
                raise  # an error of the user's own
            raise RuntimeError(
                f"no batch came within timeout={self.timeout} s: a shard or the transform is slow"
            ) from error


class _Processor:
    """The processor time of the thread that makes batches, and of its whole process; the time it waited for a core.

    Reading them takes 20 us, a tenth of a batch of 256 token rows: of short batches, one in 16 is measured.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._num_unmeasured, self._shares, self._num_threads = 0, (0.0, 0.0, 0.0), num_threads

    def begin(self) -> None:
        """Note that a batch is begun."""
        if not self._num_unmeasured:
            self._thread_s, self._process_s, self._queued_s = thread_time(), process_time(), _queued_s()

    def used(self, computing_s: float) -> tuple[float, float, float]:
        """These times of the batch that was begun, whose making took so long without waiting for shards."""
        if self._num_unmeasured:
            self._num_unmeasured -= 1
            thread, process, queued = self._shares
            return thread * computing_s, process * computing_s, queued * computing_s
        thread_s, process_s = thread_time() - self._thread_s, (process_time() - self._process_s) / self._num_threads
        queued_s = _queued_s() - self._queued_s
        if computing_s < _SHORT_S:
            self._shares = thread_s / computing_s, process_s / computing_s, queued_s / computing_s
            self._num_unmeasured = _UNMEASURED
        return thread_s, process_s, queued_s


def _queued_s() -> float:
    """Seconds that this thread could have computed so far, but waited for a core; 0 where the system does not tell."""
    try:
        with Path("/proc/thread-self/schedstat").open("rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


class MadeBatches:
    """The batches of one iteration; `close` ends what makes them, and so do the last batch and the interpreter's exit.

    `end` is called once, with whether an error ended the iteration; not in processes that this one forks. `proven` is
    that of the `Pipeline`.
    """

    def __init__(
        self,
        batches: Iterator[Delivery],
        end: Callable[[bool], None],
        proven: Callable[[Delivery], Delivery] = lambda delivery: delivery,
    ) -> None:
        self._proven = proven
        self._batches: Iterator[Delivery] | None = batches
        self._end = weakref.finalize(self, _end_in, os.getpid(), end)

    def __next__(self) -> Delivery:
        if self._batches is None:
            raise StateError(
                "an iteration ends with the workers of its loader, but a batch was asked for after close(). Iterate "
                "over the loader again: its state_dict() says where"
            )
        try:
            return self._proven(next(self._batches))
        except BaseException as error:
            self.close(failed=not isinstance(error, StopIteration))
            raise

    def close(self, failed: bool = False) -> None:
        """End the iteration: its workers, its announcements to the reader, and its use of shards."""
        self._batches = None
        if ending := self._end.detach():
            _, _, (pid, end), _ = ending
            _end_in(pid, end, failed)


def _end_in(pid: int, end: Callable[[bool], None], failed: bool = False) -> None:
    if os.getpid() == pid:
        end(failed)


class Workers:
    """Makes the batches of one loader; keeps persistent worker processes between its iterations."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset  # the value of ``get_worker_info().dataset`` in workers
        self.meter = Meter()
        self._kept: tuple[BatchSettings, SharedPosition, DataLoader[Any]] | None = None
        self._kept_is_in_use = False
        self._live: weakref.WeakSet[MadeBatches] = weakref.WeakSet()  # those that may have workers

    def __getstate__(self) -> dict[str, Any]:
        """A copy has workers of its own."""
        return {"_dataset": self._dataset}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_dataset"])  # type: ignore[misc]

    def batches(self, pipeline: Pipeline, loader: Any) -> MadeBatches:
        """Begin one iteration, with the options that a `StreamingDataLoader` has now."""
        options = {name: getattr(loader, name) for name in _OPTIONS}
        if loader.workers == "threads" and loader.num_workers:
            pipeline.use_threads(loader.num_workers, loader.prefetch_factor, loader.timeout)
            options = {"num_workers": 0, "pin_memory": loader.pin_memory, "persistent_workers": False, "timeout": 0}
        return self._batches(pipeline, options, loader.worker_init_fn)

    def _batches(self, pipeline: Pipeline, options: dict[str, Any], init: Callable[[int], None] | None) -> MadeBatches:
        if not (options["num_workers"] or options["pin_memory"] or options["timeout"]):
            here = iter(pipeline)  # as torch would, at a tenth of the cost
            made = MadeBatches(here, lambda _: here.close(), pipeline.proven)  # type: ignore[attr-defined]
            if pipeline.num_threads:
                self._live.add(made)
            return made
        # An iteration inside another one has workers of its own.
        keeps = options["persistent_workers"] and options["num_workers"] > 0 and not self._kept_is_in_use
        made_by = self._kept_loader if keeps else self._torch_loader
        loader = made_by(pipeline, options, init)
        num_workers, slots = options["num_workers"], loader.dataset.slots  # type: ignore[attr-defined]  # a Pipeline
        if slots is not None:
            slots.restart()
        with job_signals_wait():
            batches = iter(loader)
        let_terminate_end_at_once(torch_private.worker_processes(batches))
        self._kept_is_in_use |= keeps

        def end(failed: bool) -> None:
            is_kept = self._kept is not None and self._kept[2] is loader
            if is_kept:
                self._kept_is_in_use = False
            if is_kept and failed:
                self._kept = None  # a worker died: torch's iterator stays broken
            if failed or not is_kept:
                torch_private.end_workers(batches)
                self.meter.detach(loader.dataset.counters)  # type: ignore[attr-defined]  # a Pipeline

        made = MadeBatches(in_order(batches, num_workers, slots) if num_workers else batches, end, pipeline.proven)
        self._live.add(made)
        return made

    def release(self) -> None:
        """End persistent workers, those in use when their iteration ends; a later iteration starts new ones."""
        if self._kept is not None and not self._kept_is_in_use:
            self.meter.detach(self._kept[2].dataset.counters)  # type: ignore[attr-defined]  # a Pipeline
        self._kept, self._kept_is_in_use = None, False  # torch's iterator ends its workers when it is dropped

    def close(self) -> None:
        """End all worker processes, and the iterations that use them; a later iteration starts new ones."""
        self.release()
        for made in list(self._live):
            made.close()

    def _kept_loader(self, pipeline: Pipeline, options: dict[str, Any], init: Any) -> DataLoader[Any]:
        """The loader of persistent workers, set to begin where the pipeline does."""
        start = pipeline.start
        assert isinstance(start, Start)
        if self._kept is None or self._kept[0] != pipeline.settings:
            self.release()
            shared = SharedPosition(start)
            moved = Pipeline(pipeline.source, pipeline.settings, shared, pipeline.collate)
            self._kept = pipeline.settings, shared, self._torch_loader(moved, options, init)
        _, shared, loader = self._kept
        shared.upcoming = start
        return loader

    def _torch_loader(self, pipeline: Pipeline, options: dict[str, Any], init: Any) -> DataLoader[Any]:
        """Torch's own loader over whole batches. It draws from a generator of its own, not the training's."""
        start = pipeline.start if isinstance(pipeline.start, Start) else pipeline.start.upcoming
        if num_workers := options["num_workers"]:
            # What every forked worker would import with its first batch, which takes some 30 ms in each.
            get_encoding("int")
            torch_private.import_nested_tensors()
            torch_private.start_servers(options["multiprocessing_context"])
            # A worker has at most so many batches in progress, and the slot of one is free before it makes another.
            pipeline.counters = self.meter.attach(num_workers)
            pipeline.slots = shared_slots(num_workers, options["prefetch_factor"] or _PREFETCHED)
        of_start = sample_seed(pipeline.source.seed, start.epoch, start.position)
        seed = sample_seed(of_start, pipeline.settings.world.rank, 0)
        return DataLoader(
            pipeline,
            batch_size=None,
            collate_fn=_as_it_is,
            generator=torch.Generator().manual_seed(seed),
            worker_init_fn=_WorkerInit(self._dataset, init, os.getpid()) if num_workers else None,
            **options,
        )


def choose_workers(
    source: SampleSource, collate: SeededCall | None, loader: Any, workers: str | None, num_workers: int | str
) -> tuple[str, int]:
    """Return what makes a loader's batches, ``"processes"`` or ``"threads"``, and how many of them.

    For ``"auto"``: none where batches are gathered from columns, which takes less time than to hand them over. Where
    functions of the user see each sample: a worker for each core that this rank may use, except one for the training.
    These are threads where no lock of the interpreter keeps them from working at the same time, and processes
    elsewhere.

    Raises:
        ValueError: There is no such kind of workers, or threads cannot do what they are to do.
    """
    if workers not in (None, "processes", "threads"):
        raise ValueError(f"workers is 'processes' or 'threads'; found {workers!r}")
    if isinstance(num_workers, str):
        if num_workers != "auto":
            raise ValueError(f"num_workers is a number or 'auto'; found {num_workers!r}")
        world, functions = loader.detect_world(), _functions(source, collate)
        cores = max(1, num_cores() // world.ranks_per_node)
        num_workers = min(_MOST_CHOSEN, max(1, cores - 1)) if functions else 0
        has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
        has_lock = has_lock and functions != ["decoders"]  # which seldom hold it
        workers = workers or ("processes" if has_lock or _unfit_for_threads(source, collate) else "threads")
        if not world.rank:
            why = " and ".join(functions) or "no function to call for a sample"
            _log.info("num_workers='auto': %d %s, with %d cores per rank and %s.", num_workers, workers, cores, why)
    if workers == "threads" and (unfit := _unfit_for_threads(source, collate)):
        raise ValueError(
            "threads share the global random generators with the training, so the functions they call draw from a "
            f"parameter rng alone; {' and '.join(unfit)} may draw otherwise. Add a parameter rng (a numpy Generator; a "
            "function that draws nothing ignores it), or pass workers='processes'"
        )
    return workers or "processes", num_workers


def _functions(source: SampleSource, collate: SeededCall | None) -> list[str]:
    """The user's functions that are called for samples."""
    found = {"decoders": source.reader.config.decoders, "the transform": source.transform, "collate_fn": collate}
    return [name for name, one in {**found, _OWN_READING: source.read_one}.items() if one]


def _unfit_for_threads(source: SampleSource, collate: SeededCall | None) -> list[str]:
    called = {"the transform": source.seeded, "collate_fn": collate}
    found = [name for name, one in called.items() if one is not None and not one.can_share_process]
    return found + ([] if source.read_one is None else [_OWN_READING])


@dataclass(frozen=True)
class _WorkerInit:
    """Leaves signals to the trainer, sets ``get_worker_info().dataset``, and calls the user's function."""

    dataset: Any
    then: Callable[[int], None] | None
    trainer_pid: int

    def __call__(self, worker: int) -> None:
        # Now, and not with the first batch: the trainer may be gone before that. Handlers of the user's function stay.
        leave_signals_to_the_trainer(self.trainer_pid)
        torch_private.set_worker_dataset(get_worker_info(), self.dataset)
        if self.then is not None:
            self.then(worker)


def _never(_: Any) -> bool:
    return False


def _as_it_is(batch: Any) -> Any:
    return batch
