"""Arguments that take a mapping of their parts; arguments that have become such parts warn, and keep working."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

PARTS = {  # by argument: the parts that a value which is no mapping stands for, and all others
    "filter": (("sample",), ("lengths", "exclude_ids")),
    "window": (("shards",), ("quick_start",)),
    "predownload": (("samples",), ("by_range",)),
    "bucket_by": (("lengths",), ("window",)),
    "batch_tokens": (("tokens",), ("multiple",)),
    "on_bad": (("sample", "shard"), ("quarantine",)),
}
FORMER = {  # by argument: the part that each former argument is
    "filter": {"filter_lengths": "lengths", "exclude_ids": "exclude_ids"},
    "window": {"quick_start": "quick_start"},
    "predownload": {"start_by_range": "by_range"},
    "bucket_by": {"bucket_window": "window"},
    "batch_tokens": {"batch_multiple": "multiple"},
    "on_bad": {"on_bad_sample": "sample", "on_bad_shard": "shard", "quarantine": "quarantine"},
    "world": {"data_dimension": "NAMES"},  # beside the mesh, in a pair
}


def parts_of(name: str, value: Any) -> dict[str, Any]:
    """The parts of an argument that takes a mapping of them, or one value; parts that are None are left out.

    Raises:
        ValueError: An unknown part.

    Example: ``parts_of("window", 8)`` is ``{"shards": 8}``.
    """
    usual, others = PARTS[name]
    parts = value if isinstance(value, Mapping) else dict.fromkeys(usual, value)
    known = (*usual, *others)
    if unknown := [part for part in parts if part not in known]:
        raise ValueError(f"{name} has the parts {', '.join(known)}; found {unknown}. Correct them")
    return {part: content for part, content in parts.items() if content is not None}


def taking_former(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function take former arguments, with a FutureWarning that has the new ones.

    Raises:
        TypeError: A former argument beside a new one that says the same, from the decorated function.
    """

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        options: dict[str, Any] = dict(kwargs)
        for name, parts in FORMER.items():
            former = {old: options.pop(old) for old in parts if old in options}
            if not former:
                continue
            for old, value in former.items():
                if value is not None:
                    options[name] = _joined(name, options.get(name), old, value)
            warnings.warn(
                f"{', '.join(former)}: former arguments, now parts of {name}. Pass e.g. "
                f"{_example(name, [parts[old] for old in former], options.get(name))}",
                FutureWarning,
                stacklevel=2,
            )
        return function(*args, **options)

    return checked


def _joined(name: str, value: Any, old: str, former: Any) -> Any:
    """The value of an argument, with what a former one says. TypeError if it says that already."""
    part = FORMER[name][old]
    if name == "world":  # a mesh may also be passed to the loader alone
        return (value, former) if value is None or hasattr(value, "mesh_dim_names") else value
    parts = parts_of(name, value)
    if part in parts:
        raise TypeError(f"pass {name} alone: found {old} beside it. Write e.g. {_example(name, [part], value)}")
    return {**parts, part: former}


def _example(name: str, parts: list[str], value: Any) -> str:
    """How the parts of an argument are passed, with those that it has."""
    if name == "world":
        return f"world=(mesh, {', '.join(parts)})"
    shown = [f'"{part}": ...' for part in dict.fromkeys([*parts_of(name, value), *parts])]
    return f"{name}={{{', '.join(shown)}}}"
