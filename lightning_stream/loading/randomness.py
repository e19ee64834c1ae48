"""Random numbers for transforms and collate functions that depend on the position in the training run alone.

A user's function draws the same numbers in every process, worker, world and resumed run: it gets a generator of its
own, or the global generators of `random`, `numpy` and `torch` are seeded from (seed, epoch, position)
just before the call. The generators of the surrounding program are restored afterwards.
"""

from __future__ import annotations

import _random
import ctypes
import inspect
import logging
import os
import random
import struct
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import islice
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

from lightning_stream.threads import Lock

T = TypeVar("T")

_MASK = (1 << 64) - 1
# What the seeds of collate functions, and of a dataset's own __getitem__, are mixed with: else these and the transform
# of a sample would draw the same numbers.
COLLATING = 0x636F6C6C617465
READING = 0x72656164696E67
_OWN_SEEDS = ("set_random_seed", "set_random_state")  # albumentations, MONAI
_OF_DATASETS = "_streaming_"  # begins what a dataset holds to read samples: that seeds what it calls itself
_WORDS_BYTES = 4 * 625  # of an MT19937: 624 words, and a place among them
_MARK_BYTES = 32
_LOCK_S = 10.0
_log = logging.getLogger(__name__)
# Of objects within objects, and of lists, that are searched for these
_MAX_DEPTH = 4
_MAX_PARTS = 1000


def sample_seed(seed: int, epoch: int, position: int) -> int:
    """Mix three integers into 63 bits (the finaliser of SplitMix64, Steele et al. 2014, applied in turn)."""
    state = 0
    for word in (seed, epoch, position):
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_globals(mixed: int) -> None:
    """Seed the global generators of `random`, numpy and torch."""
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    # torch.manual_seed would also reach for the GPUs, which a worker must not touch.
    torch.default_generator.manual_seed(mixed)


def _memory(address: int, num_bytes: int) -> Any:
    """Bytes in memory, as the attribute `raw`."""
    return (ctypes.c_char * num_bytes).from_address(address)


def _numpy_memory() -> tuple[Any, Any]:
    """The state of numpy's generator, and the end of it: the last words, and its place."""
    return _memory_of(np.random.get_bit_generator())  # type: ignore[attr-defined]  # it is documented


@lru_cache(1)
def _memory_of(generator: Any) -> tuple[Any, Any]:
    if type(generator) is not np.random.MT19937:
        raise ValueError(
            "a sample's random numbers come from global generators that are seeded, as numpy's MT19937 can be; found "
            f"{type(generator).__name__}. Give numpy its own one back (np.random.set_bit_generator)"
        )
    address = generator.ctypes.state_address
    return _memory(address, _WORDS_BYTES), _memory(address + _WORDS_BYTES - _MARK_BYTES, _MARK_BYTES)


class _Generators:
    """The global CPU generators.

    Much of them is read from memory, where that is as expected: to ask for numpy's state takes 50 us, for torch's 5 us.

    Attributes:
        lock: Held by the thread whose functions draw from them.
        wait_s: How long another thread waits for it.
    """

    def __init__(self) -> None:
        self._python: Any = random.random.__self__  # type: ignore[attr-defined]  # of a method
        self._torch = torch.default_generator
        address: int = self._torch._cdata  # type: ignore[attr-defined]  # noqa: SLF001 - it has no other one
        numpy: Any = np.random.rand.__self__  # type: ignore[attr-defined]
        probe: Any = np.random.RandomState(0)
        probe.standard_normal()
        _, (*words, place), _ = self._python.getstate()
        of_torch = self._torch.get_state()
        first_words = of_torch[24:152].numpy().view(np.uint64).astype(np.uint32)
        contents = [
            (id(self._python), _random.Random.__basicsize__, struct.pack("625I", place, *words)),
            # The normal number that it holds back, and before it whether it does.
            (id(probe), type(probe).__basicsize__, struct.pack("=qd", 1, probe.get_state()[4])),
            (address, 512, first_words.tobytes()),
        ]
        begins = [ctypes.string_at(begin, num_bytes).find(content) for begin, num_bytes, content in contents]
        at = address + begins[2]
        self._held = _memory(id(numpy) + begins[1], 16)
        self._marked = [
            _memory(id(self._python) + begins[0], _MARK_BYTES),
            self._held,
            _memory(at - 4, _MARK_BYTES),
            *(_memory(at + 4 * 624 + behind, 1) for behind in (8, 20)),  # whether torch holds back a float, or a double
        ]
        self._is_readable = min(begins) >= 4 and type(numpy) is type(probe)
        marks = []
        for _ in range(3):  # torch draws, and then what it held back, which changes no word
            marks.append(self.mark())
            torch.randn(1)
        self._is_readable &= marks[0] != marks[1] != marks[2]
        self._torch.set_state(of_torch)
        self._latest: tuple[Any, Any] = (None, None)  # a mark, and the state then
        self.wait_s = _LOCK_S
        self.renew_lock()
        os.register_at_fork(after_in_child=self.renew_lock)

    def renew_lock(self) -> None:
        """Make a lock that nobody holds: a forked process lacks the thread that held the former one."""
        self.lock = Lock()

    def marked(self) -> tuple[Any, Any]:
        """A mark, and the state now."""
        mark = self.mark()
        if self._latest[0] != mark:
            self._latest = mark, self.state()
        return self._latest

    def mark(self) -> Any:
        """Some of their bytes: where two marks are equal, nothing was drawn, but for a chance of 2**-96."""
        if self._is_readable:
            _, words = _numpy_memory()
            return b"".join((*self._marked, words)), self._python.gauss_next
        python, numpy, of_torch = self.state()
        return python, numpy[1].tobytes(), numpy[2:], of_torch.numpy().tobytes()

    def state(self) -> Any:
        """All of them, for `restore`."""
        words, _ = _numpy_memory()
        numpy = (words.raw, self._held.raw) if self._is_readable else np.random.get_state()
        return self._python.getstate(), numpy, self._torch.get_state()

    def restore(self, state: Any) -> None:
        """Go back to a state."""
        python, numpy, of_torch = state
        self._python.setstate(python)
        self._torch.set_state(of_torch)
        if self._is_readable:
            words, _ = _numpy_memory()
            words.raw, self._held.raw = numpy
        else:
            np.random.set_state(numpy)


_GENERATORS = _Generators()


class PreservedGenerators:
    """Restores the global CPU generators at the end of a block, if anything was drawn; takes about 2 us.

    One thread at a time is in such a block: another one would draw what a function here has seeded, or put it back.
    Where functions wait for another thread's loader, both would wait for ever: from then on none waits any more.
    """

    def __enter__(self) -> None:
        self._lock = _GENERATORS.lock
        self._has_lock = self._lock.acquire(timeout=_GENERATORS.wait_s)
        if not self._has_lock and _GENERATORS.wait_s:
            _log.warning(
                "A thread makes batches while another one has been in a transform, collate_fn or __getitem__ for %s s: "
                "they may wait for each other, so both go on, and what they draw from global generators is not "
                "repeatable. Let functions draw from a parameter rng, or pass num_workers=1",
                _GENERATORS.wait_s,
            )
            _GENERATORS.wait_s = 0.0
        try:
            self._before = _GENERATORS.marked()
        except BaseException:
            self._release()
            raise

    def __exit__(self, *_: object) -> None:
        mark, state = self._before
        try:
            if _GENERATORS.mark() != mark:
                _GENERATORS.restore(state)
        finally:
            self._release()

    def _release(self) -> None:
        if self._has_lock:
            self._lock.release()


class _Call(threading.local):
    """What a user's function is called for, in each thread."""

    epoch: int | None = None


_CALL = _Call()


def epoch_of_call() -> int | None:
    """The epoch that a user's function is called for in this thread; None where none is called."""
    return _CALL.epoch


class SeededCall:
    """A user's function that is called with random numbers of its position in the run.

    A function with a parameter `rng` gets a `numpy.random.Generator` (15 us a call). For any other the global ones
    are seeded (12 us); call it within `PreservedGenerators()`. Objects with generators of their own that offer
    `set_random_seed` (albumentations) or `set_random_state` (MONAI) are seeded too, where the function is one, holds
    one, or refers to one by name.

    Example:
        >>> augment = SeededCall(lambda sample, rng: sample + rng.random(), seed=1)
        >>> augment(0, epoch=0, position=7) == augment(0, epoch=0, position=7)
        True

    Args:
        function: A transform of one sample, a collate function of a list of samples, or what reads a sample by its id.
        seed: Key of the run; of a collate function mixed with `COLLATING`, of what reads a sample with `READING`.
    """

    def __init__(self, function: Callable[..., Any], seed: int) -> None:
        if not callable(function):
            raise TypeError(f"transform and collate_fn are functions; got {type(function).__name__}. Pass a function")
        self.function = function
        self.takes_rng = takes_rng(function)
        self._seed = seed
        self._reseeds = _own_generators(function)
        self._draws = self.takes_rng or bool(self._reseeds)  # or was seen to draw from the global generators

    def __reduce__(self) -> tuple[Callable[..., SeededCall], tuple[Any, ...]]:
        return SeededCall, (self.function, self._seed)  # a copy has its own generators

    @property
    def can_share_process(self) -> bool:
        """Whether threads may call the function at the same time: it seeds nothing but a generator of its own."""
        return self.takes_rng and not self._reseeds

    def read_unseeded(self, read: Callable[[], list[T]]) -> list[T] | None:
        """What `read` returns, by calls of the function; None if these draw at random: each must be seeded by itself.

        Where they do not, which shows at the generators, nothing has to be seeded. It does not call `read` where it is
        known that they do.
        """
        if self._draws:
            return None
        mark = _GENERATORS.mark()
        values = read()
        self._draws = _GENERATORS.mark() != mark
        return None if self._draws else values

    def __call__(self, value: Any, epoch: int, position: int) -> Any:
        """Call the function for a position in the run."""
        outer = _CALL.epoch  # of a function that reads another dataset
        _CALL.epoch = epoch
        try:
            return self._seeded(value, epoch, position)
        finally:
            _CALL.epoch = outer

    def _seeded(self, value: Any, epoch: int, position: int) -> Any:
        mixed = sample_seed(self._seed, epoch, position)
        for index, reseed in enumerate(self._reseeds):
            reseed(sample_seed(mixed, index, 0) & 0x7FFFFFFF)
        if self.takes_rng:
            return self.function(value, rng=np.random.default_rng(mixed))
        seed_globals(mixed)
        return self.function(value)


def takes_rng(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `rng`, which the caller has not bound already."""
    if isinstance(function, partial) and "rng" in function.keywords:
        return False
    try:
        parameter = inspect.signature(function).parameters.get("rng")
    except (TypeError, ValueError):  # a builtin that does not say its parameters
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _own_generators(function: Any) -> list[Callable[[int], object]]:
    """Find the methods that seed what a function, or the objects in it, draws from generators of its own."""
    reseeds: list[Callable[[int], object]] = []
    seen: dict[int, Any] = {}

    def search(value: Any, depth: int) -> None:
        if id(value) in seen or depth > _MAX_DEPTH or isinstance(value, (type, ModuleType, BuiltinFunctionType)):
            return
        seen[id(value)] = value
        reseed = next((getattr(value, name) for name in _OWN_SEEDS if callable(getattr(type(value), name, None))), None)
        if reseed is not None:
            reseeds.append(reseed)  # it seeds what it holds
            return
        for part in _parts(value):
            search(part, depth + 1)

    search(function, 0)
    return reseeds


def _parts(value: Any) -> list[Any]:
    """Return the objects that a function, a container or an object of a class of the user's holds."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        names = value.__code__.co_names
        cells = value.__closure__ or ()
        by_name = [value.__globals__[name] for name in names if name in value.__globals__]
        return by_name + [cell.cell_contents for cell in cells if cell != CellType()]
    if isinstance(value, (list, tuple)):
        return list(value[:_MAX_PARTS])
    if isinstance(value, dict):
        return list(islice(value.values(), _MAX_PARTS))
    if not hasattr(value, "__dict__"):
        return []
    attributes = [part for name, part in vars(value).items() if not name.startswith(_OF_DATASETS)]
    return [*attributes, type(value).__call__]
