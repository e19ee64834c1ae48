"""A loader's batches, made in this process, in threads of it, or in processes, which may outlive an iteration."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from dataclasses import replace
from inspect import GEN_RUNNING, getgeneratorstate
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_stream.errors import StateError
from lightning_stream.loading.batches import BatchMaker, Delivery, clocks_of_processor
from lightning_stream.loading.randomness import SeededCall, sample_seed
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.source import BatchSettings, SampleSource
from lightning_stream.loading.worker_pool import WorkerPool, WorkerTask, late_batch
from lightning_stream.monitoring.meter import Meter
from lightning_stream.processes import num_cores
from lightning_stream.threads import DaemonPool, wait_briefly

_PREFETCHED = 2  # batches that a worker may have on their way, as torch has it
_EXIT_S = 5
_MOST_CHOSEN = 8  # workers; more only help where a batch takes longer than eight steps
_DECODERS = "decoders"
_IMAGES = re.compile("pil|jpeg|png")  # in the names of their encodings
_OWN_READING = "the dataset's own get_item or __getitem__"
_log = logging.getLogger(__name__)

_unfinished: set[futures.Future[Delivery]] = set()  # batches that threads of this process make, or are to make


def _finish_batches() -> None:
    """Let threads finish their batches before the interpreter ends, which would end them inside torch: a crash."""
    futures.wait([batch for batch in list(_unfinished) if not batch.cancel()], timeout=_EXIT_S)


atexit.register(_finish_batches)
os.register_at_fork(after_in_child=_unfinished.clear)


class MadeBatches:
    """The batches of one iteration; `close` ends what makes them, and so does the interpreter's exit.

    `end` is called once, with whether an error ended the iteration; not in processes that this one forks. With
    `has_workers`, these get no batches: they lack the threads and pipes.
    """

    def __init__(self, batches: Iterator[Delivery], end: Callable[[bool], None], *, has_workers: bool = False) -> None:
        self._batches: Iterator[Delivery] | None = batches
        self._pid = os.getpid() if has_workers else None
        self._end = weakref.finalize(self, _end_in, os.getpid(), end)

    def __next__(self) -> Delivery:
        if self._batches is None:
            raise StateError(
                "an iteration ends with the workers of its loader, but a batch was asked for after close(). Iterate "
                "over the loader again: its state_dict() says where"
            )
        if self._pid is not None and self._pid != os.getpid():
            raise StateError(
                "the workers of an iteration make batches for the process that began it, and this one was forked from "
                "that. Iterate over the loader again here"
            )
        return next(self._batches)

    def close(self, failed: bool = False) -> None:
        """End the iteration: its workers, its announcements to the reader, and its use of shards."""
        self._batches = None
        if (ending := self._end.detach()) is not None:
            ending[1](*ending[2], failed)  # type: ignore[call-arg]  # the last one, which has a default


def _end_in(pid: int, end: Callable[[bool], None], failed: bool = False) -> None:
    if os.getpid() == pid:
        end(failed)


class Workers:
    """Makes the batches of one loader; keeps persistent worker processes between its iterations."""

    def __init__(self, dataset: Any, meter: Meter) -> None:
        self._dataset = dataset  # the value of ``get_worker_info().dataset`` in workers
        self._meter = meter
        self._persistent: WorkerPool | None = None
        self._persistent_is_in_use = False
        self._live: weakref.WeakSet[MadeBatches] = weakref.WeakSet()  # those that may have workers

    def __reduce__(self) -> tuple[type[Workers], tuple[Any, Meter]]:
        return Workers, (self._dataset, self._meter)  # a copy has workers of its own

    def batches(self, maker: BatchMaker, settings: BatchSettings, start: Start, loader: Any) -> MadeBatches:
        """Begin one iteration, with the options that a `StreamingDataLoader` has now."""
        if loader.timeout and not loader.num_workers:
            raise ValueError(
                f"timeout= is how long to wait for a batch of a worker; found timeout={loader.timeout} and no workers. "
                "Omit it, or pass num_workers=1 or more"
            )
        end_workers: Callable[[bool], None] | None = None
        if loader.workers == "threads" and loader.num_workers:
            ahead = loader.num_workers * (loader.prefetch_factor or _PREFETCHED)
            batches = _in_threads(maker, settings, start, loader.num_workers, ahead, loader.timeout)
        elif loader.num_workers:
            pool, end_workers = self._pool(maker, settings, start, loader)
            batches = pool.batches(start)
        else:
            batches = maker.batches(settings, start)
        received = batches
        if loader.pin_memory:
            batches = _pinned(batches, loader, ahead=_PREFETCHED if end_workers else 0)

        def end(failed: bool) -> None:
            if getgeneratorstate(batches) == GEN_RUNNING:  # in a daemon thread, while the interpreter exits
                return
            batches.close()
            if end_workers is not None:  # a thread that still waits for a batch would take one of the next iteration
                end_workers(failed or getgeneratorstate(received) == GEN_RUNNING)

        has_workers = bool(loader.num_workers or loader.pin_memory)
        made = MadeBatches(maker.verified(settings, batches), end, has_workers=has_workers)
        if has_workers:
            self._live.add(made)
        return made

    def _pool(
        self, maker: BatchMaker, settings: BatchSettings, start: Start, loader: Any
    ) -> tuple[WorkerPool, Callable[[bool], None]]:
        """Worker processes, and what ends one iteration over them; an iteration inside another one has its own."""
        keeps = loader.persistent_workers and not self._persistent_is_in_use
        if keeps and self._persistent is not None and self._persistent.settings != settings:
            self.release()
        pool = self._persistent if keeps else None
        if pool is None:
            pool = self._started(maker, settings, start, loader)
        if keeps:
            self._persistent = pool
            self._persistent_is_in_use = True

        def end(failed: bool) -> None:
            if self._persistent is pool:
                self._persistent_is_in_use = False
                if not failed:
                    pool.stop()
                    return
                self._persistent = None
            self._end(pool)

        return pool, end

    def _started(self, maker: BatchMaker, settings: BatchSettings, start: Start, loader: Any) -> WorkerPool:
        of_start = sample_seed(maker.source.seed, start.epoch, start.position)
        generator = torch.Generator().manual_seed(sample_seed(of_start, settings.world.rank, 0))
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))  # as torch's loader draws it
        task = WorkerTask(
            maker,
            settings,
            loader.num_workers,
            loader.prefetch_factor or _PREFETCHED,
            seed,
            self._dataset,
            loader.worker_init_fn,
        )
        pool = WorkerPool(task, loader.multiprocessing_context, loader.timeout)
        self._meter.attach(pool.arenas)
        return pool

    def _end(self, pool: WorkerPool) -> None:
        pool.close()
        self._meter.detach(pool.arenas)

    def release(self) -> None:
        """End persistent workers, those in use when their iteration ends; a later iteration starts new ones."""
        pool = self._persistent
        is_in_use = self._persistent_is_in_use
        self._persistent = None
        self._persistent_is_in_use = False
        if pool is not None and not is_in_use:
            self._end(pool)

    def close(self) -> None:
        """End all worker processes, and the iterations that use them; a later iteration starts new ones."""
        self.release()
        for made in list(self._live):
            made.close()


def _in_threads(
    maker: BatchMaker, settings: BatchSettings, start: Start, num_threads: int, ahead: int, timeout_s: float
) -> Generator[Delivery]:
    """Batches in their order, while threads of this process make those that follow, so many at most."""
    pending: deque[futures.Future[Delivery]] = deque()
    with DaemonPool(num_threads, "make") as pool:
        maker = replace(maker, in_threads=True)
        planned, order = maker.planned(settings, start, in_progress=1 + ahead)
        began = perf_counter()
        for batch in planned:
            pending.append(
                pool.submit(maker.make, batch, order, perf_counter() - began, clocks_of_processor(num_threads))
            )
            _unfinished.add(pending[-1])
            pending[-1].add_done_callback(_unfinished.discard)
            if len(pending) > ahead:
                yield _result(pending.popleft(), timeout_s)
            began = perf_counter()
        while pending:
            yield _result(pending.popleft(), timeout_s)


def _result(batch: futures.Future[Delivery], timeout_s: float) -> Delivery:
    if not batch.done() and not wait_briefly(lambda wait_s: futures.wait([batch], wait_s).done, timeout_s):
        raise late_batch(timeout_s)
    return batch.result()


class _Stream(IterableDataset[Delivery]):
    """Batches, for torch's loader."""

    def __init__(self, batches: Iterator[Delivery]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Delivery]:
        return self._batches


def _pinned(batches: Iterator[Delivery], loader: Any, ahead: int) -> Generator[Delivery]:
    """Batches in pinned memory, into which torch copies them; in a thread where so many are pinned ahead."""
    extra = {"pin_memory_device": loader.pin_memory_device} if loader.pin_memory_device else {}
    generator = torch.Generator()  # not the training's
    pinning = DataLoader(
        _Stream(batches), batch_size=None, collate_fn=lambda batch: batch, pin_memory=True, generator=generator, **extra
    )
    if not ahead:
        yield from pinning
        return
    pinned = iter(pinning)
    with DaemonPool(1, "pin") as pool:
        pending = deque(pool.submit(next, pinned, None) for _ in range(ahead))
        try:
            while (delivery := _result(pending.popleft(), 0)) is not None:
                pending.append(pool.submit(next, pinned, None))
                yield delivery
                del delivery
        finally:
            pool.close()
            futures.wait([future for future in pending if not future.cancelled()], _EXIT_S)


def choose_workers(
    source: SampleSource, collate: SeededCall | None, loader: Any, workers: str | None, num_workers: int | str
) -> tuple[str, int]:
    """Return what makes a loader's batches, ``"processes"`` or ``"threads"``, and how many of them.

    For ``"auto"``: none where batches are gathered from columns, which takes less time than to hand them over. Where
    functions of the user see each sample, or images are decoded: a worker for each core that this rank may use, except
    one for the training.
    These are threads where no lock of the interpreter keeps them from working at the same time, and processes
    elsewhere.

    Raises:
        ValueError: There is no such kind of workers, or threads cannot do what they are to do.
    """
    if not isinstance(num_workers, str) and num_workers < 0:
        raise ValueError(f"num_workers is a number of at least 0, or 'auto'; found {num_workers!r}")
    if isinstance(num_workers, str):
        world = loader.detect_world()
        functions = _functions(source, collate)
        cores = max(1, num_cores() // world.ranks_per_node)
        num_workers = min(_MOST_CHOSEN, max(1, cores - 1)) if functions else 0
        has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
        has_lock = has_lock and functions != [_DECODERS]  # which seldom hold it
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
    """What is called for samples: the user's functions, and decoders of images."""
    encodings = [encoding for index in source.reader.indexes for encoding in index.columns.values()]
    called = {
        _DECODERS: source.reader.shards.config.decoders or any(map(_IMAGES.search, encodings)),
        "the transform": source.transform,
        "collate_fn": collate,
        _OWN_READING: source.read_one,
    }
    return [name for name, is_called in called.items() if is_called]


def _unfit_for_threads(source: SampleSource, collate: SeededCall | None) -> list[str]:
    called = {"the transform": source.transform, "collate_fn": collate}
    unfit = [name for name, function in called.items() if function is not None and not function.can_share_process]
    return unfit + ([] if source.read_one is None else [_OWN_READING])
