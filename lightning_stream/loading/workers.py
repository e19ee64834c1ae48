"""Who makes a loader's batches: this process, or worker processes of torch's, which may outlive an iteration."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_stream.formats.encodings import get_encoding
from lightning_stream.loading.pipeline import BatchSource
from lightning_stream.loading.settings import BatchSettings
from lightning_stream.loading.shared_position import SharedPosition, Start
from lightning_stream.loading.transport import conveyor_for
from lightning_stream.order.micro_batches import BatchInfo


@dataclass(frozen=True)
class WorkerOptions:
    """A loader's options of these names, as they are when an iteration begins; see `torch.utils.data.DataLoader`."""

    num_workers: int
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    prefetch_factor: int | None
    persistent_workers: bool
    multiprocessing_context: Any


class Workers:
    """Makes the batches of one loader; keeps persistent worker processes between its iterations.

    Args:
        seed: Key of the seeds that torch gives its workers.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: tuple[BatchSettings, SharedPosition, DataLoader[Any]] | None = None
        self._kept_is_in_use = False
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()  # torch's iterators that may have workers

    def __reduce__(self) -> tuple[type[Workers], tuple[int]]:
        """A copy has workers of its own."""
        return Workers, (self._seed,)

    @contextmanager
    def batches(self, source: BatchSource, options: WorkerOptions) -> Iterator[Iterator[tuple[Any, BatchInfo]]]:
        """The batches of a source, for the time of one iteration."""
        if not (options.num_workers or options.pin_memory or options.timeout):
            yield iter(source)  # as torch would, at a tenth of the cost
            return
        # An iteration inside another one has workers of its own.
        keeps = options.persistent_workers and not self._kept_is_in_use
        loader = self._kept_loader(source, options) if keeps else self._torch_loader(source, source.start, options)
        self._kept_is_in_use |= keeps
        try:
            batches = iter(loader)
            self._live.add(batches)
            yield batches
        finally:
            self._kept_is_in_use &= not keeps

    def close(self) -> None:
        """End the worker processes, persistent ones too; a later iteration starts new ones."""
        for batches in list(self._live):
            if isinstance(batches, _MultiProcessingDataLoaderIter):
                batches._shutdown_workers()  # noqa: SLF001 - what its destructor calls; torch has nothing public
        self._kept, self._kept_is_in_use = None, False

    def _kept_loader(self, source: BatchSource, options: WorkerOptions) -> DataLoader[Any]:
        """The loader of persistent workers, told to begin where the source does."""
        start = source.start
        assert isinstance(start, Start)
        if self._kept is None or self._kept[0] != source.settings:
            shared = SharedPosition(start)
            self._kept = source.settings, shared, self._torch_loader(source, shared, options)
        _, shared, loader = self._kept
        shared.upcoming = start
        return loader

    def _torch_loader(
        self, source: BatchSource, start: Start | SharedPosition, options: WorkerOptions
    ) -> DataLoader[Any]:
        """Torch's own loader over whole batches. It draws from a generator of its own, not the training's."""
        if options.num_workers:
            _import_for_workers()
        # A worker has so many batches to make or under way, and the slot of one is free before it is asked for more.
        conveyor = conveyor_for(options.num_workers, max(1, options.prefetch_factor or 0))
        return DataLoader(
            BatchSource(source.dataset, source.settings, start, source.collate, conveyor),
            batch_size=None,
            collate_fn=_as_it_is,
            generator=torch.Generator().manual_seed(self._seed),
            **vars(options),
        )


def _import_for_workers() -> None:
    """What every forked worker would import with its first batch, some 30 ms in each: it is there already then."""
    get_encoding("int")
    with suppress(ImportError):  # torch asks for it where it pickles a tensor; a torch without it does not
        import_module("torch.nested._internal.nested_tensor")


def _as_it_is(batch: Any) -> Any:
    return batch
