"""Send batches from worker processes to the trainer through slots of shared memory that are used again.

Torch puts every tensor that leaves a worker into a shared file of its own and sends its descriptor over a socket. For a
small batch that costs several times the reading. Here a whole batch is copied into a slot and out of it again, after
which the slot is free. The trainer gets memory of its own, as it does without workers. Torch itself sends
a large batch, without a copy.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_stream.formats.memory import MAP_OPTIONS
from lightning_stream.loading.shared_position import memory_file

# CPU of the trainer per batch, by a slot / torch: 0.5 MB 0.2 / 0.7 ms, 2 MB 0.4 / 1.1, 8 MB 1.4 / 1.3, 38 MB 9 / 1.2.
_SLOT_BYTES = 4 << 20
_ALIGNED = 64  # each array in a slot begins at a multiple; the slot's first byte says whether it is in use
_numbers = itertools.count()
_created: weakref.WeakValueDictionary[int, SharedSlots] = weakref.WeakValueDictionary()  # in this process, by number


class SharedSlots:
    """Slots of shared memory for the batches of a loader's workers; the memory ends with the last process that maps it.

    A batch never waits for a slot: if none is free, torch sends it. Each worker has `num_slots`; `fd` is the descriptor
    of the memory, and `number` the name of these slots in the process that created them.
    """

    def __init__(self, num_slots: int, fd: int, number: int) -> None:
        self._num_slots, self._fd, self._number = num_slots, fd, number
        self._memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, 0, **MAP_OPTIONS), np.uint8)

    def __reduce__(self) -> tuple[Callable[..., SharedSlots], tuple[Any, ...]]:
        return _attach, (self._num_slots, reduction.DupFd(self._fd), self._number)

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        _close(self._fd)

    def put(self, worker: int, batch: Any) -> Any:
        """Copy a batch into a free slot of a worker, in that worker.

        Returns:
            A handle to send once, which is unpickled as the batch; the batch itself if no slot is free, or it is large.
        """
        first = worker * self._num_slots
        begins = (slot * _SLOT_BYTES for slot in range(first, first + self._num_slots))
        begin = next((begin for begin in begins if not self._memory[begin]), None)
        if begin is None:
            return batch
        pickler = _Pickler()
        try:
            pickler.dump(batch)
        except _TooLargeError:
            return batch
        arrays = [pickler.pickled(), *pickler.arrays]
        sizes = [array.nbytes for array in arrays]
        for array, (first, last) in zip(arrays, _ranges(begin, sizes), strict=True):
            self._memory[first:last] = array
        self._memory[begin] = 1
        return _Handle(self._number, begin, sizes)

    def get(self, begin: int, sizes: list[int]) -> Any:
        """Copy a batch out of the slot that begins there, which is free then."""
        try:
            pickled, *arrays = [self._memory[first:last].copy() for first, last in _ranges(begin, sizes)]
        finally:
            self._memory[begin] = 0
        return pickle.loads(pickled, buffers=arrays)  # noqa: S301 - our own


def _ranges(begin: int, sizes: list[int]) -> list[tuple[int, int]]:
    """The ranges of arrays of these sizes in the slot that begins there."""
    ends = itertools.accumulate((_aligned(size) for size in sizes), initial=begin + _ALIGNED)
    return [(first, first + size) for first, size in zip(ends, sizes, strict=False)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


class _TooLargeError(Exception):
    """A batch does not fit into a slot."""


class _Pickler(reduction.ForkingPickler):
    """Pickle a batch as torch's workers do, without the bytes of tensors and arrays, which go into `arrays`.

    Tensors that share memory share it afterwards. Memory that several processes share already is left to torch.
    """

    def __init__(self) -> None:
        self.arrays: list[NDArray[np.uint8]] = []
        self._num_bytes = _ALIGNED
        self._file = io.BytesIO()
        super().__init__(self, pickle.HIGHEST_PROTOCOL, True, self._collect)

    def write(self, pickled: Any) -> None:
        """Take pickled bytes."""
        self._count(len(pickled))
        self._file.write(pickled)

    def pickled(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._file.getbuffer(), np.uint8)

    def reducer_override(self, value: Any) -> Any:
        """Reduce the memory of tensors to a buffer."""
        if type(value) is not torch.UntypedStorage or value.device.type != "cpu" or value.is_shared():
            return NotImplemented
        memory: Any = torch.empty(0, dtype=torch.uint8).set_(value).numpy()
        return _storage, (pickle.PickleBuffer(memory),)

    def _collect(self, buffer: pickle.PickleBuffer) -> None:
        self.arrays.append(np.frombuffer(buffer.raw(), np.uint8))
        self._count(self.arrays[-1].nbytes)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += _aligned(num_bytes)
        if self._num_bytes > _SLOT_BYTES:
            raise _TooLargeError


def _storage(memory: Any) -> torch.UntypedStorage:
    return torch.from_numpy(memory).untyped_storage()


class _Handle:
    """A batch on its way: unpickled, it is the batch."""

    def __init__(self, number: int, begin: int, sizes: list[int]) -> None:
        self._arguments = number, begin, sizes

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrive, self._arguments


def _arrive(number: int, begin: int, sizes: list[int]) -> Any:
    return _created[number].get(begin, sizes)


def _attach(num_slots: int, handle: Any, number: int) -> SharedSlots:
    """Share the slots of the trainer, in a worker that did not inherit them."""
    return SharedSlots(num_slots, handle.detach(), number)


def shared_slots(num_workers: int, num_slots: int) -> SharedSlots | None:
    """Create free slots, `num_slots` for each worker; None without workers, or on a system without such memory."""
    if not num_workers or not hasattr(os, "memfd_create"):
        return None
    number = next(_numbers)
    try:
        fd = memory_file("batches", num_workers * num_slots * _SLOT_BYTES)
        slots = _created[number] = SharedSlots(num_slots, fd, number)
    except OSError:
        return None
    return slots
