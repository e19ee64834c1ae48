"""Random numbers for transforms and collate functions that depend on the position in the training run alone.

A user's function draws the same numbers in every process, worker, world and resumed run: it gets a generator of its
own, or the global generators of `random`, `numpy` and `torch` are seeded from (seed, epoch, position)
just before the call. The generators of the surrounding program are restored afterwards.
"""

from __future__ import annotations

import ctypes
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

_MASK = (1 << 64) - 1
# What the seeds of collate functions, and of a dataset's own __getitem__, are mixed with: else these and the transform
# of a sample would draw the same numbers.
_COLLATE, READING = 0x636F6C6C617465, 0x72656164696E67
_OWN_SEEDS = ("set_random_seed", "set_random_state")  # albumentations, MONAI
_OF_DATASETS = "_streaming_"  # begins what a dataset holds to read samples: that seeds what it calls itself
_MT19937_BYTES = 4 * 625  # 624 words and a place among them
_MAX_DEPTH, _MAX_PARTS = 4, 1000  # of objects within objects, and of lists, that are searched for these


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


def _numpy_state() -> Any:
    """What `np.random.set_state` takes, and is to be given, since this draws; `np.random.get_state` takes 25 us."""
    before = _numpy_bytes()
    normal = np.random.standard_normal()  # one that numpy holds back is beside these bytes, and leaves them as they are
    return "MT19937", *_numbers(before), int(_numpy_bytes() == before), normal


def _numpy_bytes() -> bytes:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # it is documented
    if type(generator) is not np.random.MT19937:
        raise ValueError(
            "a sample's random numbers come from global generators that are seeded, as numpy's MT19937 can be; found "
            f"{type(generator).__name__}. Give numpy its own one back (np.random.set_bit_generator)"
        )
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


@lru_cache(maxsize=1)  # they stay the same while the training draws nothing from numpy
def _numbers(memory: bytes) -> tuple[list[int], int]:
    *words, place = memoryview(memory).cast("I").tolist()
    return words, place


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the global CPU generators; takes about 15 us, so once for a batch."""
    numpy, python, torch_cpu = _numpy_state(), random.getstate(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)


class SeededCall:
    """A user's function that is called with random numbers of its position in the run.

    A function with a parameter `rng` gets a `numpy.random.Generator` (15 us a call). For any other the global ones
    are seeded (12 us); call it within `preserved_generators`. Objects with generators of their own that offer
    `set_random_seed` (albumentations) or `set_random_state` (MONAI) are seeded too, where the function is one, holds
    one, or refers to one by name.

    Example:
        >>> augment = SeededCall(lambda sample, rng: sample + rng.random(), seed=1)
        >>> augment(0, epoch=0, position=7) == augment(0, epoch=0, position=7)
        True

    Args:
        function: A transform of one sample, a collate function of a list of samples, or what reads a sample by its id.
        seed: Key of the run.
        collate: Whether it is a collate function: what it draws then differs from what the transform of its first
            sample draws. The position is that of the micro-batch's first sample.
    """

    def __init__(self, function: Callable[..., Any], seed: int, *, collate: bool = False) -> None:
        self.function = function
        self.takes_rng = takes_rng(function)
        self._seed, self._collate = seed, collate
        self._own = _own_generators(function)
        self._draws = False  # whether it was seen to draw from the global generators

    def __reduce__(self) -> tuple[Callable[..., SeededCall], tuple[Any, ...]]:
        return partial(SeededCall, collate=self._collate), (self.function, self._seed)  # a copy has its own generators

    @property
    def can_share_process(self) -> bool:
        """Whether threads may call the function at the same time: it seeds nothing but a generator of its own."""
        return self.takes_rng and not self._own

    def read_unseeded(self, read: Callable[[], list[T]]) -> list[T] | None:
        """What `read` returns, by calls of the function; None if these draw at random: each must be seeded by itself.

        Where they do not, which shows at the generators, nothing has to be seeded. It does not call `read` where it is
        known that they do.
        """
        if self.takes_rng or self._own or self._draws:
            return None
        seed_globals(_COLLATE)
        found = read()
        self._draws = _next_numbers() != _UNTOUCHED
        return None if self._draws else found

    def __call__(self, value: Any, epoch: int, position: int) -> Any:
        """Call the function for a position in the run."""
        mixed = sample_seed(self._seed ^ _COLLATE if self._collate else self._seed, epoch, position)
        for number, reseed in enumerate(self._own):
            reseed(sample_seed(mixed, number, 0) & 0x7FFFFFFF)
        if self.takes_rng:
            return self.function(value, rng=np.random.default_rng(mixed))
        seed_globals(mixed)
        return self.function(value)


def _next_numbers() -> tuple[float, ...]:
    """The next number of each global generator."""
    return random.random(), np.random.random_sample(), float(torch.rand((), generator=torch.default_generator))


with preserved_generators():
    seed_globals(_COLLATE)
    _UNTOUCHED = _next_numbers()


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
    found: list[Callable[[int], object]] = []
    seen: dict[int, Any] = {}

    def search(value: Any, depth: int) -> None:
        if id(value) in seen or depth > _MAX_DEPTH or isinstance(value, (type, ModuleType, BuiltinFunctionType)):
            return
        seen[id(value)] = value
        own = next((getattr(value, name) for name in _OWN_SEEDS if callable(getattr(type(value), name, None))), None)
        if own is not None:
            found.append(own)  # it seeds what it holds
            return
        for part in _parts(value):
            search(part, depth + 1)

    search(function, 0)
    return found


def _parts(value: Any) -> list[Any]:
    """Return the objects that a function, a container or an object of a class of the user's holds."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        names, cells = value.__code__.co_names, value.__closure__ or ()
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
