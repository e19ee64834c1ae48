"""Digests of functions and values that are the same in every process, so that a changed one makes another dataset."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import inspect
import io
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import xxhash

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")})


def function_text(function: Callable[..., Any] | None) -> str:
    """Name a function and everything that decides what it does: ``"tokenize 2f0c..."``; empty for None.

    The digest covers the function's source, its defaults, the values that it closes over, the global values that it
    reads, and the functions and classes of the user's modules that it calls, and those that they call in turn, also if
    it imports them when it is called. An object counts by its class and by what pickle would store of it, and one of a
    library that cannot be pickled, e.g. an open file, by its class alone. Libraries count by the names used.
    """
    if function is None:
        return ""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} {_digest(function, strict=False)}"


def value_digest(value: Any) -> str:
    """Return 32 hex digits that depend on all of a value, and on nothing else.

    Raises:
        ValueError: The value has a part without a stable description, e.g. an open file.
    """
    return _digest(value, strict=True)


def _digest(value: Any, *, strict: bool) -> str:
    walk = _Walk(strict)
    walk.add(value)
    return walk.total.hexdigest()


class _Walk:
    """Visits a value and all of its parts, always in the same order."""

    def __init__(self, strict: bool, seen: dict[int, Any] | None = None) -> None:
        self.total = xxhash.xxh3_128()
        self._strict = strict
        self._open: set[int] = set()  # values that contain the current one
        self._seen = dict(seen or {})  # functions and classes by their id: each is visited once

    def add(self, value: Any) -> None:
        if type(value) in _PLAIN:
            self._note(type(value).__name__, repr(value))
        elif isinstance(value, (FunctionType, type)):
            self._definition(value)
        elif id(value) in self._open:
            self._note("a value that contains this one")
        else:
            self._open.add(id(value))
            self._parts(value)
            self._open.discard(id(value))

    def _note(self, *texts: str) -> None:
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            self.total.update(b"%d:" % len(data) + data)

    def _parts(self, value: Any) -> None:
        kind = type(value)
        self._note(kind.__qualname__)
        if isinstance(value, ModuleType):
            self._note(value.__name__)
        elif isinstance(value, MethodType):
            self.add(value.__func__)
            self.add(value.__self__)
        elif isinstance(value, functools.partial):
            self.add([value.func, value.args, value.keywords])
        elif isinstance(value, os.PathLike):
            self.add(os.fspath(value))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._note(str(value.dtype), str(value.shape))
            self.total.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, (list, tuple)):
            self._note(str(len(value)))
            for each in value:
                self.add(each)
        elif isinstance(value, dict):
            self.add(list(value.items()))
        elif isinstance(value, (set, frozenset)):
            self._note(*sorted(map(self._digest_of_member, value)))
        elif callable(value) and hasattr(value, "__wrapped__"):  # functools.cache and the like
            self.add(value.__wrapped__)
        else:
            self._object(value)

    def _digest_of_member(self, value: Any) -> str:
        walk = _Walk(self._strict, self._seen)
        walk.add(value)
        return walk.total.hexdigest()

    def _object(self, value: Any) -> None:
        """An object counts as its class and as what pickle would store of it, without what it cached."""
        if is_dataclass(value):
            self.add(type(value))
            self.add({field.name: getattr(value, field.name) for field in fields(value)})
            return
        if not self._strict and not _is_users(type(value)):  # its parts may be many, and refer to each other
            with contextlib.suppress(Exception):  # it cannot be pickled
                stored = io.BytesIO()
                _Pickler(stored, 4).dump(value)
                self.total.update(stored.getvalue())
            return
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:
            if self._strict:
                raise ValueError(
                    f"each input must have a stable description; a {type(value).__qualname__} has none ({error}). Pass "
                    "paths, numbers or other plain values, and open what they name in the function."
                ) from error
            return
        if isinstance(reduced, str):
            self._note(reduced)
            return
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        cached = {name for name, held in vars(type(value)).items() if isinstance(held, functools.cached_property)}
        if isinstance(state, dict):
            state = {name: held for name, held in state.items() if name not in cached}
        self.add([make, arguments, state, list(items or ()), dict(pairs or ())])

    def _definition(self, value: Any) -> None:
        """A function or class: by name, and of the user's own also by source and by what it uses."""
        self._note("definition", value.__qualname__)
        if not _is_users(value):
            self._note(str(value.__module__))
        if not _is_users(value) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        self._note(_source(value))
        if isinstance(value, FunctionType):
            self._function(value)
            return
        for base in value.__bases__:
            self.add(base)
        for held in vars(value).values():
            inner = getattr(held, "__func__", getattr(held, "fget", getattr(held, "func", held)))
            if isinstance(inner, FunctionType):
                self._note(_source(inner))  # a notebook has the source of functions, but not of classes
                self._function(inner)

    def _function(self, function: FunctionType) -> None:
        self.add([function.__defaults__, function.__kwdefaults__])
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # the cell is empty so far
                self.add(cell.cell_contents)
        names = set(_names(function.__code__))
        for name in sorted(names & function.__globals__.keys()):
            self._global(name, function.__globals__[name], names)
        for module in _imported(function.__code__, function.__globals__):
            self._global(module.__name__, module, names)

    def _global(self, name: str, value: Any, names: set[str]) -> None:
        self._note(name)
        if not isinstance(value, ModuleType):
            if value is not os.environ:  # it differs from one terminal to the next
                self.add(value)
        elif _is_users(value):
            for inner in sorted(names & vars(value).keys()):
                self._global(inner, vars(value)[inner], names - {inner})


class _Pickler(pickle.Pickler):
    """Stores tensors without their addresses, and functions and classes of the user by what they do."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (FunctionType, type)):
            return (str, (function_text(value),)) if _is_users(value) else NotImplemented
        if hasattr(value, "detach") and hasattr(value, "numpy"):
            return np.asarray, (value.detach().cpu().numpy(),)
        return NotImplemented


def _is_users(value: Any) -> bool:
    """Whether a module, class or function is the user's own, and no library's."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    if name == "__main__" or name is None:
        return True
    spec = getattr(sys.modules.get(name), "__spec__", None)
    path = getattr(sys.modules.get(name), "__file__", None)
    return name.partition(".")[0] != "lightning_stream" and (_is_users_file(path) if path else _is_users_spec(spec))


def _is_users_spec(spec: ModuleSpec | None) -> bool:
    folders = [] if spec is None else spec.submodule_search_locations or []  # of a package without a file
    return _is_users_file(spec.origin if spec and spec.has_location else next(iter(folders), None))


def _is_users_file(path: str | None) -> bool:
    if path is None:
        return False
    return "site-packages" not in Path(path).parts and not os.path.realpath(path).startswith(_LIBRARIES)


def _source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        code = getattr(value, "__code__", None)
        return "" if code is None else "".join(map(repr, (code.co_code, code.co_names, *_constants(code))))


def _constants(code: CodeType) -> Iterator[Any]:
    for each in code.co_consts:
        yield from _constants(each) if isinstance(each, CodeType) else (each,)


def _imported(code: CodeType, variables: dict[str, Any]) -> Iterator[ModuleType]:
    """The user's modules that a function imports when it is called, in functions inside it too."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, wanted, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname != "IMPORT_NAME":
            continue
        with contextlib.suppress(ImportError, ValueError):  # it may be imported under a condition only
            spec = None if level.argval else importlib.util.find_spec(step.argval.partition(".")[0])
            if level.argval or _is_users_spec(spec):
                yield __import__(step.argval, variables, None, wanted.argval, level.argval)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _imported(each, variables)


def _names(code: CodeType) -> Iterator[str]:
    """The names of all globals and attributes that a function reads, in functions inside it too."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
