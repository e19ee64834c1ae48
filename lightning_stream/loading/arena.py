"""Memory that a worker process shares with its trainer: what it has counted, and the batches that it makes.

A queue of torch puts every tensor into a shared file of its own: with each batch both processes pay for new memory,
which costs several times the reading. Here a worker makes or copies a batch in a slot of this memory, and the trainer
gets tensors and arrays over it. The slot is free again once nothing refers to them, so a batch that is kept never
changes. The memory is one sparse file without a name, mapped before the worker starts: addresses for large batches cost
nothing until they are used.
"""

from __future__ import annotations

import contextlib
import io
import marshal
import mmap
import os
import pickle
import select
import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_stream.counters import NAMES
from lightning_stream.formats.memory import MAP_OPTIONS
from lightning_stream.loading.shared_position import MemoryFile, memory_file

_ALIGNED = 64  # each array in a slot begins at a multiple
_SLOT_BYTES = 8 << 30  # of addresses
_LEAST_SLOT_BYTES = 16 << 20  # where a process may not map more
_SPARE_BYTES = 1 << 30  # of addresses, which stay free where they are limited: for shards, threads and other workers
_MOST_LENT = 3  # slots that batches in the trainer refer to; what arrives meanwhile is copied
_SPARE = 12  # slots for the time in which forked processes may read others
_NUM_NUMBERS = len(NAMES) + 1  # the last one is the process id
_FREE, _SENT, _LENT, _FORKED = range(4)
_IN_SLOT = b"s"
_WHOLE = b"w"
_LEAST_BYTES = 16 << 10  # of an array that goes into a slot
_MOST_IN_PIPE = 32 << 10  # of a message, so that a pipe holds one

Bytes = NDArray[np.uint8]


class _Opened(threading.local):
    """What a thread opens."""

    memory: Bytes | None = None  # of the slot


_opened = _Opened()


class Arena:
    """The memory of one worker; it ends with the last process that maps it.

    Args:
        num_waiting: Batches that may wait for the trainer at a time.

    Attributes:
        counters: float64[len(NAMES)], which the worker counts.
        pid: float64[1]: the process id of a worker that can report where it stands, else 0.

    Example::

        arena = Arena(num_waiting=2)  # in the trainer, before the worker starts
        results.send_bytes(arena.seal(batch))  # in the worker
        batch = arena.open(results.recv_bytes())  # in the trainer
    """

    def __init__(self, num_waiting: int, slot_bytes: int = _SLOT_BYTES, file: MemoryFile | None = None) -> None:
        self._num_waiting = num_waiting
        self._slot_bytes = slot_bytes
        num_slots = num_waiting + _MOST_LENT + _SPARE
        self._first = -(-(8 * _NUM_NUMBERS + num_slots) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file = file or memory_file("worker", self._first)
        self._memory = self._mapped(num_slots, is_in_worker=file is not None)
        self._address = _address(np.frombuffer(self._memory, np.uint8, 1))
        numbers = np.frombuffer(self._memory, np.float64, _NUM_NUMBERS)
        self.counters = numbers[: len(NAMES)]
        self.pid = numbers[-1:]
        # The state of each slot. To look for one, `bytes` of these few take a tenth of numpy's time.
        self._states = np.frombuffer(self._memory, np.uint8, num_slots, 8 * _NUM_NUMBERS)
        self._readers: list[list[_Fork]] = [[] for _ in range(num_slots)]  # processes that may read a slot
        self._slot = -1  # of the batch that is being made, which has used so many bytes of it; -1 where it has none
        self._used = 0
        _arenas.add(self)

    def __reduce__(self) -> tuple[type[Arena], tuple[Any, ...]]:
        return Arena, (self._num_waiting, self._slot_bytes, self._file)  # in a worker that did not inherit it

    def _mapped(self, num_slots: int, *, is_in_worker: bool) -> mmap.mmap:
        """The memory, with as large slots as this process may map beside all else, or without: then the pipe has all.

        In a worker the slots are those of its trainer, or none.
        """
        while self._slot_bytes:
            num_bytes = self._first + num_slots * self._slot_bytes
            try:
                if not is_in_worker:
                    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                    mmap.mmap(-1, num_bytes + _SPARE_BYTES, flags=flags, prot=mmap.PROT_READ).close()
                    os.ftruncate(self._file.fd, num_bytes)
                return mmap.mmap(self._file.fd, num_bytes, **MAP_OPTIONS)
            except OSError:
                smaller = self._slot_bytes // 4
                self._slot_bytes = 0 if is_in_worker or smaller < _LEAST_SLOT_BYTES else smaller
        return mmap.mmap(self._file.fd, self._first, **MAP_OPTIONS)

    # In the worker

    def empty(self, num_bytes: int) -> memoryview | None:
        """Memory for an array of the next batch, which `seal` then need not copy; None without room."""
        if self._slot < 0:
            self._slot = self._states.tobytes().find(_FREE)
        if self._slot < 0 or self._used + num_bytes > self._slot_bytes:
            return None
        begin = self._used
        self._used += _aligned(num_bytes)
        return self._slice(self._slot, begin, begin + num_bytes).data

    def seal(self, batch: Any) -> bytes:
        """The message of a batch. Long arrays are in a slot, if there is room; all others in the message."""
        try:
            stream, ranges = self._pickler.pickled(batch)
            if len(stream) > _MOST_IN_PIPE and (place := self._placed(np.frombuffer(stream, np.uint8))):
                ranges.append(place)
                stream = b""
            if not self._used:
                return _WHOLE + stream
            self._states[self._slot] = _SENT
            return _IN_SLOT + marshal.dumps((self._slot, self._used, ranges, stream))
        finally:
            self._slot = -1
            self._used = 0

    @cached_property
    def _pickler(self) -> _Pickler:
        return _Pickler(self._place_of, self._placed)

    def _place_of(self, address: int) -> int | None:
        """Where in the slot an address of this process is, which `empty` gave; None where it is elsewhere."""
        begin = address - self._address - self._first - self._slot * self._slot_bytes
        return begin if 0 <= begin < self._used else None

    def _placed(self, array: Bytes) -> tuple[int, int] | None:
        """Where in the slot an array begins and ends: one that was not made there is copied; None without room."""
        begin = self._place_of(_address(array))
        if begin is None:
            memory = self.empty(array.nbytes)
            if memory is None:
                return None
            memory[:] = array.data
            begin = self._used - _aligned(array.nbytes)
        return begin, begin + array.nbytes

    def _slice(self, slot: int, begin: int, end: int) -> Bytes:
        return np.frombuffer(self._memory, np.uint8, end - begin, self._first + slot * self._slot_bytes + begin)

    # In the trainer

    def open(self, message: bytes) -> Any:
        """The batch of a message, over the memory of its slot; over a copy of it where too many slots are in use."""
        if message[:1] == _WHOLE:
            return pickle.loads(memoryview(message)[1:])  # noqa: S301 - our own
        slot, used, ranges, stream = marshal.loads(memoryview(message)[1:])
        states = self._states.tobytes()
        memory = self._slice(slot, 0, used)  # every view of it keeps it alive
        self._states[slot] = _LENT
        weakref.finalize(memory, _take_back, self._states, slot, self._readers[slot], os.getpid()).atexit = False
        if states.count(_LENT) >= _MOST_LENT:
            memory = memory.copy()
        if _FORKED in states:
            self._free_unread()
        arrays = [memory[begin:end] for begin, end in ranges]
        outer = _opened.memory  # where a value of a batch takes one of another loader when it is made again
        _opened.memory = memory
        try:
            return pickle.loads(stream or arrays.pop().data, buffers=arrays)  # noqa: S301 - our own
        finally:
            _opened.memory = outer

    def discard(self, message: bytes) -> None:
        """Free the slot of a message that is not opened."""
        if message[:1] == _IN_SLOT:
            self._states[marshal.loads(message[1:])[0]] = _FREE

    def note_fork(self, fork: _Fork) -> None:
        """Keep the slots that the forked process may read until it has ended."""
        for slot in np.flatnonzero(self._states == _LENT).tolist():
            self._living_readers(slot).append(fork)

    def _free_unread(self) -> None:
        for slot in np.flatnonzero(self._states == _FORKED).tolist():
            if not self._living_readers(slot):
                self._states[slot] = _FREE

    def _living_readers(self, slot: int) -> list[_Fork]:
        """The processes that may read a slot; the descriptors of those that have ended are closed."""
        readers = self._readers[slot]
        readers[:] = [fork for fork in readers if not fork.has_ended()]
        return readers


def _take_back(states: Bytes, slot: int, readers: list[_Fork], pid: int) -> None:
    """Free a slot to which nothing in the trainer refers any more; forked processes do not own it."""
    if os.getpid() == pid:
        states[slot] = _FORKED if readers else _FREE


class _Fork:
    """A process that was forked from this one, or one of its own: as long as any lives, it may read what it inherited.

    Each of them has the writing end of a pipe, which ends with the last one. Without a pipe, they may live for ever.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def has_ended(self) -> bool:
        """Whether all of these processes have ended."""
        if self._fd is None:
            return False
        events = select.poll()  # another one each time: threads with loaders of their own may ask at once
        events.register(self._fd, 0)  # the end of a pipe is reported always
        return bool(events.poll(0))

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        if self._fd is not None:
            _close(self._fd)


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
_pipes: list[tuple[int, ...]] = []  # of the forks in progress; empty where no descriptor was left, or none is needed


def _before_fork() -> None:
    pipe: tuple[int, ...] = ()
    with contextlib.suppress(OSError):  # none can be opened
        pipe = os.pipe() if len(_arenas) else ()
    _pipes.append(pipe)


def _after_fork_in_parent() -> None:
    reading, writing = _pipes.pop() or (None, None)
    if writing is not None:
        os.close(writing)
    fork = _Fork(reading)
    for arena in list(_arenas):
        arena.note_fork(fork)


def _after_fork_in_child() -> None:
    for reading in _pipes.pop()[:1]:
        os.close(reading)  # the other end stays open as long as this process


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class _Pickler(pickle.Pickler):
    """Pickles batches without the bytes of their long tensors and arrays, which are given beside.

    Tensors that share memory share it afterwards. Memory that several processes share already is left to torch.

    Args:
        place_of: Returns where in the slot of the batch an address is; None where it is elsewhere.
        placed: Copies bytes to the slot, if they are not there; returns where they are, or None without room.
    """

    def __init__(
        self, place_of: Callable[[int], int | None], placed: Callable[[Bytes], tuple[int, int] | None]
    ) -> None:
        self._place_of = place_of
        self._placed = placed
        self._ranges: list[tuple[int, int]] = []
        self._file = io.BytesIO()
        # How this process pickles values for other processes, but arrays and tensors as buffers. A dict: a pickler that
        # asks a method for each value takes twice as long.
        self._torchs = dict(reduction.ForkingPickler(io.BytesIO()).dispatch_table)
        reducers = {torch.Tensor: self._of_tensor, torch.UntypedStorage: self._of_storage, np.ndarray: _of_array}
        self.dispatch_table = {**self._torchs, **reducers}
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL, buffer_callback=self._stays)

    def pickled(self, batch: Any) -> tuple[bytes, list[tuple[int, int]]]:
        """The bytes of a batch, and where in its slot the buffers are that these lack."""
        self._ranges = []
        self._file.seek(0)
        self._file.truncate()
        try:
            self.dump(batch)
        finally:  # or it would keep the batch
            self.clear_memo()
        return self._file.getvalue(), self._ranges

    def _stays(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a long array is pickled with its bytes, for lack of room."""
        place = self._placed(np.frombuffer(buffer.raw(), np.uint8))
        if place is not None:
            self._ranges.append(place)
        return place is None

    def _of_tensor(self, value: torch.Tensor) -> Any:
        is_plain = value.layout is torch.strided and value.is_cpu and not value.requires_grad
        if not is_plain or value.is_quantized or value.is_conj() or value.is_neg():
            return self._torchs[torch.Tensor](value)
        if value.is_contiguous():
            # Most tensors. Their storages take torch 60 us more after a gather, which has filled the cache.
            begin = self._place_of(value.data_ptr())
            if begin is not None:
                return _view, (begin, str(value.dtype).removeprefix("torch."), value.numel(), tuple(value.shape))
        arguments = value.dtype, value.storage_offset(), value.shape, value.stride()
        return _tensor, (value.untyped_storage(), *arguments)

    def _of_storage(self, value: Any) -> Any:
        if value.device.type != "cpu" or value.is_shared():
            return self._torchs[torch.UntypedStorage](value)
        memory: Any = torch.empty(0, dtype=torch.uint8).set_(value).numpy()
        is_made_there = self._place_of(value.data_ptr()) is not None
        return _storage, (pickle.PickleBuffer(memory) if is_made_there else _content(memory),)


def _content(array: Any) -> Any:
    """What is pickled of an array: a short one as its bytes, which takes less time than to ask whether it stays."""
    return bytearray(array.tobytes()) if array.nbytes < _LEAST_BYTES else pickle.PickleBuffer(array)


def _view(begin: int, name: str, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in the slot whose batch this thread opens."""
    memory: Any = _opened.memory
    return torch.frombuffer(memory, dtype=getattr(torch, name), count=count, offset=begin).view(shape)


def _tensor(storage: Any, dtype: Any, offset: int, shape: Any, stride: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def _storage(memory: Any) -> torch.UntypedStorage:
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).untyped_storage()


def _of_array(array: Any) -> Any:
    flags = array.flags
    if array.dtype.hasobject or array.dtype.kind in "mM" or not flags.forc:  # no buffer has these
        return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    dtype = array.dtype if array.dtype.kind == "V" else array.dtype.str
    if flags.c_contiguous:
        return _array, (_content(array), array.shape, dtype, "C")
    return _array, (_content(array.T), array.shape, dtype, "F")  # pickle writes no long buffer by columns


def _array(memory: Any, shape: tuple[int, ...], dtype: Any, order: Any) -> NDArray[Any]:
    array: NDArray[Any] = np.ndarray(shape, dtype, memory, order=order)
    return array if array.flags.writeable else array.copy(order)
