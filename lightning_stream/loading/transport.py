"""Send batches from worker processes to the trainer through slots of shared memory that are used again.

Torch puts every tensor that leaves a worker into a shared file of its own and sends its descriptor over a socket: with
each batch both processes pay for new memory, which costs several times the reading. Here a worker copies a whole batch
into one of its slots, and the trainer gets tensors and arrays over that memory. The slot is free again once nothing
refers to them, so a batch that is kept never changes.
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

_COUNT_BYTES = 8
_ALIGNED = 64  # each array in a slot begins at a multiple
_LEAST_BYTES = 1 << 20  # of a slot, which takes only the memory that batches have used
_MOST_LENT = 3  # slots of a worker that batches in the trainer refer to; what arrives meanwhile is copied
_TOGETHER, _TOGETHER_BYTES = 8, 4 << 20  # batches in a slot at most, and about the bytes that end it
_FREE, _SENT, _LENT, _OUTDATED = range(4)
_numbers = itertools.count()
_created: weakref.WeakValueDictionary[int, SharedSlots] = weakref.WeakValueDictionary()  # in this process, by number
_forks = [0]  # counts the beginnings and ends of forks of this process


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)


class SharedSlots:
    """Slots of shared memory for the batches of a loader's workers; the memory ends with the last process that maps it.

    A batch never waits for a slot: if none is free, torch sends it. Each worker has `num_slots`; `fd` is the descriptor
    of their states, before which is the number of batches that the trainer has handed out of each worker. `number` is
    the name of these slots in the process that created them. A worker makes the memory of a slot when it first needs
    it. It makes other memory for a larger batch, and after a fork, since the forked process may read a batch that the
    trainer no longer has.
    """

    def __init__(self, num_slots: int, fd: int, number: int) -> None:
        self._num_slots, self._fd, self._number = num_slots, fd, number
        shared = mmap.mmap(fd, 0, **MAP_OPTIONS)
        num_workers = len(shared) // (num_slots + _COUNT_BYTES)
        self._delivered: NDArray[np.int64] = np.frombuffer(shared, np.int64, num_workers)
        self._states: NDArray[np.uint8] = np.frombuffer(shared, np.uint8)[num_workers * _COUNT_BYTES :]
        self._memory: dict[int, mmap.mmap] = {}  # of slots that this process has used
        self._new: dict[int, Any] = {}  # how the trainer gets memory that it does not know yet
        self._first = self._used = self._most = 0
        self._slot: int | None = None  # of the batches that a worker makes now, which have used so many bytes of it
        self._num_sent = 0  # batches of this iteration

    def __reduce__(self) -> tuple[Callable[..., SharedSlots], tuple[Any, ...]]:
        return _attach, (self._num_slots, reduction.DupFd(self._fd), self._number)

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        _close(self._fd)

    def begin(self, worker: int) -> None:
        """Begin an iteration, in a worker."""
        self._first, self._slot, self._num_sent = worker * self._num_slots, None, 0

    def restart(self) -> None:
        """Note that the trainer begins an iteration."""
        self._delivered[:] = 0

    def note_delivered(self, worker: int) -> None:
        """Note that the trainer hands out a batch of this worker."""
        self._delivered[worker] += 1

    def takes_another(self, count: int) -> bool:
        """Whether a further batch should be sent with so many: not with the first one, nor where many wait already."""
        if count >= _TOGETHER or not self._num_sent or self._used >= _TOGETHER_BYTES:
            return False
        waiting = self._num_sent + count - int(self._delivered[self._first // self._num_slots])
        return waiting < _TOGETHER * (self._num_slots - _MOST_LENT)

    def empty(self, num_bytes: int) -> memoryview | None:
        """Memory for an array of the next batch, which then need not be copied by `put`; None if there is none."""
        if self._slot is None and not self._take_slot(num_bytes):
            return None
        assert self._slot is not None
        begin, self._used = self._used, self._used + _aligned(num_bytes)
        self._most = max(self._most, self._used)
        found = np.frombuffer(self._memory[self._slot], np.uint8)[begin : begin + num_bytes]
        return found.data if len(found) == num_bytes else None

    def put(self, batch: Any, count: int = 1) -> Any:
        """Copy a batch, or so many of them, into a free slot of this worker, but not arrays that are there already.

        Returns:
            A handle to send once, which is unpickled as the batch; the batch itself if no slot is free.
        """
        self._num_sent += count
        try:
            pickler = _Pickler()
            pickler.dump(batch)
            arrays = [pickler.pickled(), *pickler.arrays]
            if self._slot is None and not self._take_slot(0):
                return batch
            assert self._slot is not None
            begins, end = self._places(arrays)
            if end > len(self._memory[self._slot]):
                if not self._make_memory(self._slot, sum(_aligned(array.nbytes) for array in arrays)):
                    return batch
                begins, end = self._places(arrays)
            return self._sent(self._slot, arrays, begins, end)
        finally:
            self._slot, self._used = None, 0

    def _take_slot(self, num_bytes: int) -> bool:
        """Choose a free slot of this worker for its next batch; returns whether there was one."""
        slots = range(self._first, self._first + self._num_slots)
        free = next((slot for slot in slots if self._states[slot] in (_FREE, _OUTDATED)), None)
        if free is None:
            return False
        is_usable = self._states[free] != _OUTDATED and len(self._memory.get(free, b"")) >= max(1, num_bytes)
        if not is_usable and not self._make_memory(free, num_bytes):
            return False
        self._slot, self._used = free, 0
        return True

    def _make_memory(self, slot: int, num_bytes: int) -> bool:
        """Give a slot other memory; False if there is none. What it had stays mapped for those that refer to it."""
        self._memory.pop(slot, None)
        self._used, self._most = 0, max(self._most, num_bytes, _LEAST_BYTES)
        try:
            fd = memory_file("batch", 1 << self._most.bit_length())
            try:
                self._new[slot], self._memory[slot] = _sendable(fd), mmap.mmap(fd, 0, **MAP_OPTIONS)
            finally:
                os.close(fd)
        except OSError:  # no memory, or no descriptor
            return False
        return True

    def _places(self, arrays: list[NDArray[np.uint8]]) -> tuple[list[int], int]:
        """Where each array is in the slot of this batch, or is to be copied to; and where the last one ends."""
        assert self._slot is not None
        memory = self._memory[self._slot]
        base, end, begins = _address(np.frombuffer(memory, np.uint8)), self._used, []
        for array in arrays:
            begin = _address(array) - base
            if not 0 <= begin <= len(memory) - array.nbytes:
                begin, end = end, end + _aligned(array.nbytes)
            begins.append(begin)
        return begins, end

    def _sent(self, slot: int, arrays: list[NDArray[np.uint8]], begins: list[int], end: int) -> _Handle:
        target = np.frombuffer(self._memory[slot], np.uint8)
        ranges = [(begin, begin + array.nbytes) for array, begin in zip(arrays, begins, strict=True)]
        for array, (begin, stop) in zip(arrays, ranges, strict=True):
            if begin >= self._used:
                target[begin:stop] = array
        self._most, self._states[slot] = max(self._most, end), _SENT
        return _Handle(self._number, slot, ranges, self._new.pop(slot, None))

    def get(self, slot: int, ranges: list[tuple[int, int]], new: Any) -> Any:
        """The batch in a slot, over the slot's memory; over a copy of it where too many slots are in use."""
        if new is not None:
            fd = new.detach()
            try:
                self._memory[slot] = mmap.mmap(fd, 0, **MAP_OPTIONS)
            finally:
                os.close(fd)
        first = slot // self._num_slots * self._num_slots
        lends = np.count_nonzero(self._states[first : first + self._num_slots] == _LENT) < _MOST_LENT
        whole: NDArray[np.uint8] = np.frombuffer(self._memory[slot], np.uint8)  # every view of it keeps it alive
        self._states[slot] = _LENT
        weakref.finalize(whole, _take_back, self._states, slot, _forks[0], os.getpid()).atexit = False
        pickled, *arrays = [whole[begin:end] if lends else whole[begin:end].copy() for begin, end in ranges]
        del whole
        return pickle.loads(pickled.data, buffers=arrays)  # noqa: S301 - our own


class _FileOfProcess:
    """A descriptor that another process opens by its name under /proc, where there is no socket to send it over."""

    def __init__(self, fd: int) -> None:
        self._path = f"/proc/{os.getpid()}/fd/{os.dup(fd)}"

    def detach(self) -> int:
        """Open the file, in the process that received this."""
        return os.open(self._path, os.O_RDWR | os.O_CLOEXEC)


def _sendable(fd: int) -> Any:
    try:
        return reduction.DupFd(fd)
    except OSError:  # the path of a socket in the folder for temporary files may be too long
        return _FileOfProcess(fd)


def _take_back(states: NDArray[np.uint8], slot: int, forks: int, pid: int) -> None:
    """Free a slot to which nothing in the trainer refers any more; forked processes do not own it."""
    if os.getpid() == pid:
        states[slot] = _FREE if forks == _forks[0] else _OUTDATED


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _address(array: NDArray[Any]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


class _Pickler(reduction.ForkingPickler):
    """Pickle a batch as torch's workers do, without the bytes of tensors and arrays, which go into `arrays`.

    Tensors that share memory share it afterwards. Memory that several processes share already is left to torch.
    """

    def __init__(self) -> None:
        self.arrays: list[NDArray[np.uint8]] = []
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL, True, self._collect)

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


def _storage(memory: Any) -> torch.UntypedStorage:
    return torch.from_numpy(memory).untyped_storage()


class _Handle:
    """A batch on its way: unpickled, it is the batch."""

    def __init__(self, number: int, slot: int, ranges: list[tuple[int, int]], new: Any) -> None:
        self._arguments = number, slot, ranges, new

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrive, self._arguments


def _arrive(number: int, slot: int, ranges: list[tuple[int, int]], new: Any) -> Any:
    return _created[number].get(slot, ranges, new)


def _attach(num_slots: int, handle: Any, number: int) -> SharedSlots:
    """Share the slots of the trainer, in a worker that did not inherit them."""
    return SharedSlots(num_slots, handle.detach(), number)


def shared_slots(num_workers: int, num_slots: int) -> SharedSlots | None:
    """Create free slots for workers that each have at most `num_slots` batches on their way.

    None without workers, or on a system without such memory.
    """
    if not num_workers or not hasattr(os, "memfd_create"):
        return None
    number, num_slots = next(_numbers), num_slots + _MOST_LENT
    try:
        fd = memory_file("slots", num_workers * (num_slots + _COUNT_BYTES))
        slots = _created[number] = SharedSlots(num_slots, fd, number)
    except OSError:
        return None
    return slots
