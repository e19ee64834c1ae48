"""What tells a function from another: its source, and the values that it carries along."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def source_text(function: Callable[..., Any] | None) -> str:
    """The function's source, or else its code, with its defaults and the values it closes over; of an object that is
    called, its class's source and its attributes. Global variables that it reads are not seen.
    """
    if function is None:
        return ""
    if isinstance(function, type) or inspect.isbuiltin(function):
        return f"{function!r} {_source(function) if isinstance(function, type) else ''}"
    if isinstance(function, partial):
        return f"{source_text(function.func)} {_told(function.args)} {_told(sorted(function.keywords.items()))}"
    if inspect.ismethod(function):
        return f"{source_text(function.__func__)} {_carried(function.__self__)}"
    if not hasattr(function, "__code__"):
        return f"{_source(type(function))} {_carried(function)}"
    carried = [function.__defaults__, function.__kwdefaults__, *inspect.getclosurevars(function).nonlocals.values()]
    return f"{_source(function)} {' '.join(map(_told, carried))}"


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
        return repr(thing) if code is None else repr((code.co_code, code.co_consts, code.co_names))


def _carried(owner: Any) -> str:
    """The values of an object: of a dataclass its fields, so that what it cached meanwhile makes no difference."""
    return _told(owner) if is_dataclass(owner) else _told(getattr(owner, "__dict__", owner))


def _told(value: Any) -> str:
    """A value as text that is the same in another process. Of functions the source alone: they may name each other."""
    return _source(value) if inspect.isfunction(value) else _ADDRESS.sub("", repr(value))
