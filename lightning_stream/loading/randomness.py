"""Random numbers for transforms and collate functions that depend on the position in the training run alone.

A user's function draws the same numbers in every process, worker, world and resumed run: it gets a generator of its
own, or the global generators of `random`, `numpy` and `torch` are seeded from (seed, epoch, position)
just before the call. The generators of the surrounding program are restored afterwards.
"""

from __future__ import annotations

import _random
import ctypes
import inspect
import random
import struct
from collections.abc import Callable
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
_COLLATE = 0x636F6C6C617465
READING = 0x72656164696E67
_OWN_SEEDS = ("set_random_seed", "set_random_state")  # albumentations, MONAI
_OF_DATASETS = "_streaming_"  # begins what a dataset holds to read samples: that seeds what it calls itself
_Words = ctypes.c_char * (4 * 625)  # of an MT19937: 624, and a place among them
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


def _place_in(owner: object, kind: type, content: bytes) -> int:
    """Where an object, as far as it is of this kind, has these bytes in memory; below 0 where it does not."""
    return ctypes.string_at(id(owner), kind.__basicsize__).find(content)


class _PythonState:
    """The state of `random`'s generator: its bytes in memory where CPython has them as expected; `getstate` is slow."""

    def __init__(self) -> None:
        self._generator: Any = random.random.__self__  # type: ignore[attr-defined]  # of a method
        _, (*words, place), _ = self._generator.getstate()
        begin = _place_in(self._generator, _random.Random, struct.pack("625I", place, *words))
        self._is_readable = begin >= 0
        self._words = _Words.from_address(id(self._generator) + begin)

    def state(self) -> Any:
        """The state, for `restore`; two are equal where nothing was drawn between them."""
        return (self._words.raw, self._generator.gauss_next) if self._is_readable else self._generator.getstate()

    def restore(self, state: Any) -> None:
        if self._is_readable:
            self._words.raw, self._generator.gauss_next = state
        else:
            self._generator.setstate(state)


class _NumpyState:
    """The same of numpy's, whose `get_state` is slower still."""

    def __init__(self) -> None:
        generator: Any = np.random.rand.__self__  # type: ignore[attr-defined]  # of a method
        probe: Any = np.random.RandomState(0)
        probe.standard_normal()
        # The normal number that it holds back, and before it whether it does.
        begin = _place_in(probe, np.random.RandomState, struct.pack("=qd", 1, probe.get_state()[4]))
        self._is_readable = begin >= 0 and type(generator) is np.random.RandomState
        self._held = (ctypes.c_char * 16).from_address(id(generator) + begin)

    def state(self) -> Any:
        words = _numpy_words(np.random.get_bit_generator())  # type: ignore[attr-defined]  # it is documented
        if self._is_readable:
            return words.raw, self._held.raw
        state: Any = np.random.get_state()
        return state[0], state[1].tolist(), *state[2:]

    def restore(self, state: Any) -> None:
        if self._is_readable:
            words = _numpy_words(np.random.get_bit_generator())  # type: ignore[attr-defined]
            words.raw, self._held.raw = state
        else:
            np.random.set_state(state)


@lru_cache(1)
def _numpy_words(generator: Any) -> Any:
    if type(generator) is not np.random.MT19937:
        raise ValueError(
            "a sample's random numbers come from global generators that are seeded, as numpy's MT19937 can be; found "
            f"{type(generator).__name__}. Give numpy its own one back (np.random.set_bit_generator)"
        )
    return _Words.from_address(generator.ctypes.state_address)


_PYTHON = _PythonState()
_NUMPY = _NumpyState()


def _states() -> tuple[Any, Any, torch.Tensor]:
    """The states of the global CPU generators."""
    return _PYTHON.state(), _NUMPY.state(), torch.default_generator.get_state()


def _restore(states: tuple[Any, Any, torch.Tensor]) -> None:
    _PYTHON.restore(states[0])
    _NUMPY.restore(states[1])
    torch.default_generator.set_state(states[2])


class PreservedGenerators:
    """Restores the global CPU generators at the end of a block; takes about 3 us, so once for a batch."""

    def __enter__(self) -> None:
        self._states = _states()

    def __exit__(self, *_: object) -> None:
        _restore(self._states)


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
        seed: Key of the run.
        collate: Whether it is a collate function: what it draws then differs from what the transform of its first
            sample draws. The position is that of the micro-batch's first sample.
    """

    def __init__(self, function: Callable[..., Any], seed: int, *, collate: bool = False) -> None:
        self.function = function
        self.takes_rng = takes_rng(function)
        self._seed = seed
        self._collate = collate
        self._reseeds = _own_generators(function)
        self._draws = False  # whether it was seen to draw from the global generators

    def __reduce__(self) -> tuple[Callable[..., SeededCall], tuple[Any, ...]]:
        return partial(SeededCall, collate=self._collate), (self.function, self._seed)  # a copy has its own generators

    @property
    def can_share_process(self) -> bool:
        """Whether threads may call the function at the same time: it seeds nothing but a generator of its own."""
        return self.takes_rng and not self._reseeds

    def read_unseeded(self, read: Callable[[], list[T]]) -> list[T] | None:
        """What `read` returns, by calls of the function; None if these draw at random: each must be seeded by itself.

        Where they do not, which shows at the generators, nothing has to be seeded. It does not call `read` where it is
        known that they do.
        """
        if self.takes_rng or self._reseeds or self._draws:
            return None
        _restore(_SEEDED)
        values = read()
        python, numpy, of_torch = _states()
        self._draws = (python, numpy, of_torch.numpy().tobytes()) != _SEEDED_BYTES
        return None if self._draws else values

    def __call__(self, value: Any, epoch: int, position: int) -> Any:
        """Call the function for a position in the run."""
        mixed = sample_seed(self._seed ^ _COLLATE if self._collate else self._seed, epoch, position)
        for index, reseed in enumerate(self._reseeds):
            reseed(sample_seed(mixed, index, 0) & 0x7FFFFFFF)
        if self.takes_rng:
            return self.function(value, rng=np.random.default_rng(mixed))
        seed_globals(mixed)
        return self.function(value)


with PreservedGenerators():
    seed_globals(_COLLATE)
    _SEEDED = _states()
    _SEEDED_BYTES = *_SEEDED[:2], _SEEDED[2].numpy().tobytes()


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
