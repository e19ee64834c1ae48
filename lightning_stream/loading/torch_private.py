"""All private names of torch and of `multiprocessing` that are used; `test_torch_private` tests each of them."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import collate, worker

from lightning_stream.loading.randomness import seed_globals
from lightning_stream.processes import job_signals_wait, start_resource_tracker

Making = Callable[[list[Any]], torch.Tensor | None]  # a tensor of values of one type


def start_servers(context: Any) -> None:
    """Start the processes of multiprocessing that workers need, so that the signals of the job spare them.

    A forkserver imports torch and this package before it forks the first worker, not in each worker. One for which the
    program has chosen modules itself is left alone.
    """
    method = context.get_start_method()
    if method != "fork":
        start_resource_tracker()
    server = getattr(forkserver, "_forkserver", None)
    if method != "forkserver" or getattr(server, "_preload_modules", None) != ["__main__"]:
        return
    context.set_forkserver_preload(["__main__", "lightning_stream.loading.in_forkserver", "lightning_stream.loader"])
    with job_signals_wait():  # until the module in which it leaves them to its parent
        forkserver.ensure_running()


def iteration_key(info: worker.WorkerInfo) -> int:
    """A number that all workers of one iteration of torch's DataLoader share, and no other iteration has.

    The pipe of their results tells iterations apart: torch's base seed is the same again after ``torch.manual_seed``.
    """
    frame = inspect.currentframe()
    while frame is not None and "data_queue" not in frame.f_locals:
        frame = frame.f_back
    results = None if frame is None else frame.f_locals["data_queue"]._reader  # noqa: SLF001
    pipe = 0 if results is None else os.fstat(results.fileno()).st_ino
    return hash((pipe, info.seed - info.id))


def samples_at_once() -> int | None:
    """How many samples torch's loader takes at once from the iterator that asks; None where another one takes them."""
    # A function that names its own frame keeps those of its callers, and what they hold, until garbage is collected.
    values = sys._getframe(2).f_locals  # noqa: SLF001
    if "possibly_batched_index" not in values:
        return None
    taken = values["possibly_batched_index"]
    return 1 if taken is None else len(taken)  # None with batch_size=None


def template_for(stateful: Any) -> Any:
    """The state of this object in a sharded checkpoint that torch is about to load, with None for values; else None.

    `torch.distributed.checkpoint` asks the object for its state and reads the keys of that alone, but a state may have
    others: a change of the mixture, or windows that were counted.
    """
    caller = sys._getframe(2)  # noqa: SLF001 - as above
    if caller.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict_loader":
        return None
    values = caller.f_locals
    if values.get("elem") is not stateful or "storage_reader" not in values:
        return None
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    metadata = values["storage_reader"].read_metadata()
    paths = {name: path for name, path in (metadata.planner_data or {}).items() if path[0] == values["key"]}
    return unflatten_state_dict(dict.fromkeys(paths), paths).get(values["key"])


def become_worker(index: int, count: int, seed: int, dataset: Any) -> None:
    """Let this process be a worker as torch's are: by its seed, threads, and ``get_worker_info()``."""
    seed_globals(seed + index)  # and torch.initial_seed() is that of the worker's info
    torch.set_num_threads(1)
    info = worker.WorkerInfo(id=index, num_workers=count, seed=seed + index, dataset=dataset)
    worker._worker_info = info  # noqa: SLF001


def collating_with(tensors: Making, arrays: Making, numbers: Making) -> Callable[[list[Any]], Any]:
    """Torch's `default_collate`, but by functions of ours; they return None for what they leave to torch's."""
    instead: dict[Any, Making] = {
        collate.collate_tensor_fn: tensors,
        collate.collate_numpy_array_fn: arrays,
        collate.collate_numpy_scalar_fn: numbers,
        collate.collate_float_fn: numbers,
        collate.collate_int_fn: numbers,
    }
    ways = collate.default_collate_fn_map  # a program may have added its own
    ways = {kind: partial(_made, instead[way], way) if way in instead else way for kind, way in ways.items()}
    return partial(collate.collate, collate_fn_map=ways)


def _made(make: Making, usual: Callable[..., Any], batch: list[Any], *, collate_fn_map: Any) -> Any:
    made = make(batch)
    return usual(batch, collate_fn_map=collate_fn_map) if made is None else made


def pickled_error(error: Exception, index: int) -> bytes:
    """An error of a worker with its traceback, for the trainer: a RuntimeError where its class cannot be pickled."""
    wrapper: Any = ExceptionWrapper
    wrapped = wrapper((type(error), error, error.__traceback__), where=f"in DataLoader worker process {index}")
    try:
        return bytes(ForkingPickler.dumps(wrapped))
    except Exception:  # noqa: BLE001 - a class of the user's may refuse in any way
        wrapped.exc_type = RuntimeError
        return bytes(ForkingPickler.dumps(wrapped))


def raise_error(error: bytes) -> None:
    """Raise what `pickled_error` has made."""
    pickle.loads(error).reraise()  # noqa: S301 - our own


def import_nested_tensors() -> None:
    """Import what torch imports where it pickles a tensor; a torch without it does not."""
    with suppress(ImportError):
        import_module("torch.nested._internal.nested_tensor")
