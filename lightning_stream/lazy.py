"""What is made on first use: cached values, the names of a package (PEP 562), and the modules that join trainers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from lightning_stream.errors import missing_extra

Key = TypeVar("Key")
Value = TypeVar("Value")
JOINING: dict[str, str] = {}  # by the package of a trainer: the module of a higher layer that joins it


def cached(cache: dict[Key, Value], key: Key, make: Callable[[Key], Value], count: int) -> Value:
    """The value of a key, made where it is absent. The cache keeps the newest ``count`` values.

    Each step is atomic, so threads that share a cache make a value twice at worst.
    """
    value = cache.get(key)
    if value is None:
        value = cache[key] = make(key)
        for old in list(cache)[:-count]:
            cache.pop(old, None)
    return value


def lazy_names(
    package: str, names_of: Mapping[str, str], extra_of: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of a package.

    `names_of` has the names of each module, separated by spaces; `extra_of` the extra that installs a foreign package.
    """
    home = {name: module for module, names in names_of.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(f"{package}.{home[name]}"), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            if missing not in extra_of:
                raise
            raise missing_extra(missing, extra_of[missing], f"{package}.{name}") from error
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *home})


def joining(trainer: str) -> Any:
    """The module that joins a trainer's package, see `JOINING`; None where the program does not use that trainer."""
    return import_module(JOINING[trainer]) if trainer in sys.modules else None
