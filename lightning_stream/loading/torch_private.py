"""All private names of torch and of `multiprocessing` that are used; `test_torch_private` tests each of them."""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver, get_context
from typing import Any

from torch.utils.data._utils.worker import WorkerInfo
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_stream.processes import job_signals_wait, start_resource_tracker


def end_workers(batches: Any) -> None:
    """End the worker processes of torch's iterator, as its destructor does; torch has no public name for it."""
    if isinstance(batches, _MultiProcessingDataLoaderIter):
        batches._shutdown_workers()  # noqa: SLF001


def start_servers(context: Any) -> None:
    """Start the processes of multiprocessing that workers need, so that the signals of the job spare them.

    A forkserver imports torch and this package before it forks the first worker, not in each worker. One for which the
    program has chosen modules itself is left alone.
    """
    chosen = get_context(context) if context is None or isinstance(context, str) else context
    if chosen.get_start_method() != "fork":
        start_resource_tracker()
    server = getattr(forkserver, "_forkserver", None)
    if chosen.get_start_method() != "forkserver" or getattr(server, "_preload_modules", None) != ["__main__"]:
        return
    chosen.set_forkserver_preload(["__main__", "lightning_stream.loading.in_forkserver", "lightning_stream.loader"])
    with job_signals_wait():  # until the module in which it leaves them to its parent
        forkserver.ensure_running()


def worker_processes(batches: Any) -> list[Any]:
    """The worker processes of torch's iterator; none where this process makes the batches."""
    return list(batches._workers) if isinstance(batches, _MultiProcessingDataLoaderIter) else []  # noqa: SLF001


def iteration_key(worker: WorkerInfo) -> int:
    """A number that all workers of one iteration of torch's DataLoader share, and no other iteration has.

    The pipe of their results tells iterations apart: torch's base seed is the same again after ``torch.manual_seed``.
    """
    frame = inspect.currentframe()
    while frame is not None and "data_queue" not in frame.f_locals:
        frame = frame.f_back
    results = None if frame is None else frame.f_locals["data_queue"]._reader  # noqa: SLF001
    pipe = 0 if results is None else os.fstat(results.fileno()).st_ino
    return hash((pipe, worker.seed - worker.id))


def set_worker_dataset(info: Any, dataset: Any) -> None:
    """Replace ``get_worker_info().dataset``, which torch only sets once."""
    object.__setattr__(info, "dataset", dataset)


def import_nested_tensors() -> None:
    """Import what torch imports where it pickles a tensor; a torch without it does not."""
    with suppress(ImportError):
        import_module("torch.nested._internal.nested_tensor")
