"""How a worker's batches reach the trainer: through memory that both have mapped, in slots that are used again.

Torch gives every tensor that leaves a worker a shared file of its own and hands its descriptor over a socket, and all
else goes through a pipe: together that costs several times the reading. Here a whole batch goes into one slot, is
copied out where it arrives, and the slot is free again. What the trainer gets is memory of its own, as without workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import context, reduction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_stream.formats.memory import MAP_OPTIONS

_SPAN = 1 << 32  # bytes of the file that each slot may take; only what is used takes memory
_MOST_SLOTS = 256  # a slot is named by one byte
_ALIGNED = 64
_SMALL_BYTES = 1 << 10  # arrays below it are pickled as they are
_numbers = itertools.count()
_made_here: weakref.WeakValueDictionary[int, Conveyor] = weakref.WeakValueDictionary()
_arriving = threading.local()  # address of the slot that is being emptied, and the storages found in it by offset


class Conveyor:
    """Slots of shared memory in a file without a name: it ends with the last process that has it open.

    Nobody waits for a slot: where none is free, a batch goes torch's own way.

    Args:
        slots: Of each worker.
        free: For each worker a pipe, with the numbers of its slots that are free: its two ends.
        file: Descriptor of the memory.
        number: Names the conveyor in the process that made it.
    """

    def __init__(self, slots: int, free: Sequence[tuple[int, int]], file: int, number: int) -> None:
        self._slots, self._free, self._file, self._number = slots, free, file, number
        self._mapped: dict[tuple[int, int], tuple[mmap.mmap, int]] = {}
        weakref.finalize(self, _close_all, [file, *itertools.chain.from_iterable(free)], os.getpid())

    @classmethod
    def made(cls, num_workers: int, slots: int) -> Conveyor:
        """A new one, with so many slots for each worker.

        Raises:
            OSError: The system gives no such memory.
        """
        slots = min(slots, _MOST_SLOTS)
        file = os.memfd_create("batches")
        conveyor = cls(slots, [os.pipe() for _ in range(num_workers)], file, next(_numbers))
        os.ftruncate(file, num_workers * slots * _SPAN)
        for reading, writing in conveyor._free:
            os.set_blocking(reading, False)
            os.write(writing, bytes(range(slots)))
        _made_here[conveyor._number] = conveyor
        return conveyor

    def __reduce__(self) -> tuple[Callable[..., Conveyor | None], tuple[Any, ...]]:
        if context.get_spawning_popen() is None:  # a copy that is on its way to no worker
            return _none, ()
        ends = [(reduction.DupFd(reading), reduction.DupFd(writing)) for reading, writing in self._free]
        return _attached, (self._slots, ends, reduction.DupFd(self._file), self._number)

    def load(self, worker: int, batch: Any) -> Any:
        """In a worker: put a batch into a slot.

        Returns:
            What is to be sent once in its place; the batch itself where no slot is free, or it is too large.
        """
        try:
            (slot,) = os.read(self._free[worker][0], 1)
        except BlockingIOError:
            return batch
        parcel = None
        try:
            packer = _Packer()
            packer.dump(batch)
            if packer.num_bytes <= _SPAN:
                address = self._address(worker, slot, packer.num_bytes)
                parcel = _Parcel(self._number, worker, slot, *packer.put(address))
        finally:
            if parcel is None:
                self._give_back(worker, slot)
        return batch if parcel is None else parcel

    def unload(self, worker: int, slot: int, begin: int, end: int) -> Any:
        """Where a batch arrives: take it out of its slot, which is free again then.

        Args:
            worker, slot: Where it is.
            begin, end: Where in the slot the pickled rest lies.
        """
        try:
            address = self._address(worker, slot, end)
            _arriving.address, _arriving.storages = address, {}
            return pickle.loads((ctypes.c_ubyte * (end - begin)).from_address(address + begin))  # noqa: S301 - our own
        finally:
            _arriving.storages = {}
            self._give_back(worker, slot)

    def _give_back(self, worker: int, slot: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # the worker has ended
            os.write(self._free[worker][1], bytes([slot]))

    def _address(self, worker: int, slot: int, num_bytes: int) -> int:
        """Where so much of a slot is mapped in this process."""
        mapped, address = self._mapped.get((worker, slot), (b"", 0))
        if len(mapped) < num_bytes:
            length = max(mmap.ALLOCATIONGRANULARITY, 1 << (num_bytes - 1).bit_length())
            new = mmap.mmap(self._file, length, offset=(worker * self._slots + slot) * _SPAN, **MAP_OPTIONS)
            address = ctypes.addressof(ctypes.c_ubyte.from_buffer(new))
            self._mapped[worker, slot] = new, address
        return address


class _Packer(reduction.ForkingPickler):
    """Pickles as torch's workers do, but leaves out the bytes of tensors and arrays, and says where they are to go.

    Tensors that share memory share it afterwards. Memory that several processes share already is left to torch: whoever
    shared it may count on that.
    """

    def __init__(self) -> None:
        self._rest = io.BytesIO()
        super().__init__(self._rest, pickle.HIGHEST_PROTOCOL)
        self._end = 0
        self._storages: dict[tuple[int, int], tuple[int, torch.UntypedStorage]] = {}
        self._arrays: list[tuple[int, NDArray[Any]]] = []

    def reducer_override(self, value: Any) -> Any:
        """How a value is pickled, where it is the memory of tensors, or an array."""
        if type(value) is torch.UntypedStorage:
            if value.device.type == "cpu" and not value.is_shared() and value.nbytes():
                return _storage_at, (self._place(value), value.nbytes())
        elif type(value) is np.ndarray and _is_plain(value):
            self._arrays.append((self._next(value.nbytes), value))
            return _array_at, (self._arrays[-1][0], value.dtype, value.shape)
        return NotImplemented

    def _place(self, storage: torch.UntypedStorage) -> int:
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            self._storages[key] = self._next(storage.nbytes()), storage
        return self._storages[key][0]

    def _next(self, num_bytes: int) -> int:
        begin = self._end
        self._end += -(-num_bytes // _ALIGNED) * _ALIGNED
        return begin

    @property
    def num_bytes(self) -> int:
        """All that is to go into a slot."""
        return self._end + self._rest.tell()

    def put(self, address: int) -> tuple[int, int]:
        """Copy it there; returns where the pickled rest begins and ends."""
        for offset, storage in self._storages.values():
            ctypes.memmove(address + offset, storage.data_ptr(), storage.nbytes())
        for offset, array in self._arrays:
            ctypes.memmove(address + offset, _begin(array), array.nbytes)
        rest = self._rest.getvalue()
        ctypes.memmove(address + self._end, rest, len(rest))
        return self._end, self._end + len(rest)


def _is_plain(array: NDArray[Any]) -> bool:
    return array.nbytes >= _SMALL_BYTES and array.flags.c_contiguous and not array.dtype.hasobject


def _begin(array: NDArray[Any]) -> int:
    """Its address; `array.ctypes` takes several times as long."""
    address: int = array.__array_interface__["data"][0]
    return address


class _Parcel:
    """A batch on its way: unpickled, it is the batch."""

    def __init__(self, *place: int) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int, ...]]:
        return _arrived, self._place


def _arrived(conveyor: int, *place: int) -> Any:
    return _made_here[conveyor].unload(*place)


def _storage_at(offset: int, num_bytes: int) -> torch.UntypedStorage:
    """A copy of the memory of tensors in the slot that is being emptied; the same one each time."""
    found: dict[int, torch.UntypedStorage] = _arriving.storages
    if offset not in found:
        found[offset] = torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
        ctypes.memmove(found[offset].data_ptr(), _arriving.address + offset, num_bytes)
    return found[offset]


def _array_at(offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """A copy of an array in the slot that is being emptied."""
    array = np.empty(shape, dtype)
    ctypes.memmove(_begin(array), _arriving.address + offset, array.nbytes)
    return array


def _attached(slots: int, ends: list[tuple[Any, Any]], file: Any, number: int) -> Conveyor:
    """The conveyor in a worker that was started anew."""
    return Conveyor(slots, [(reading.detach(), writing.detach()) for reading, writing in ends], file.detach(), number)


def _none() -> None:
    return None


def _close_all(descriptors: list[int], pid: int) -> None:
    if pid == os.getpid():  # a forked worker has them until it ends
        for descriptor in descriptors:
            os.close(descriptor)


def conveyor_for(num_workers: int, slots: int) -> Conveyor | None:
    """A conveyor for the workers of a loader; None where there are none, or the system lacks what it takes."""
    if not num_workers or not hasattr(os, "memfd_create"):
        return None
    try:
        return Conveyor.made(num_workers, slots)
    except OSError:
        return None
