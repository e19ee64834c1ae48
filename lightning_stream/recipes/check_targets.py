"""What a config builds, against the signatures of what is built: unknown, missing and wrongly typed settings."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from hydra.errors import HydraException
from hydra.utils import get_object

from lightning_stream.recipes.nearest import nearest

UNKNOWN = object()
"""Stands where a value could not be found out; what is wrong with it has been told already."""

_HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})


def target_problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the nodes that build something, one sentence each, with its place."""
    return [problem for place, node in _targets(values, "") for problem in _check_target(place, node)]


def _targets(node: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All nodes that build something, each with its place in the config."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield place, dict(node)
        for key, value in node.items():
            yield from _targets(value, f"{place}.{key}" if place else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _targets(value, f"{place}[{index}]")


def _check_target(place: str, node: Mapping[str, Any]) -> list[str]:
    try:
        target: Callable[..., Any] = get_object(str(node["_target_"]))
        parameters = inspect.signature(target).parameters
    except (HydraException, ImportError, ValueError, TypeError) as error:
        return [f"{place}._target_: {node['_target_']!r} cannot be loaded: {str(error).splitlines()[0]}"]
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    given = {key: value for key, value in node.items() if key not in _HYDRA_KEYS}
    hints = _hints(target)
    problems = []
    for key, value in given.items():
        if key not in parameters:
            if not open_ended:
                problems.append(f"{place}.{key}: {target.__name__} has no such setting.{nearest(key, parameters)}")
        elif not fits(value, hints.get(key, Any)):
            problems.append(f"{place}.{key}: must be {told(hints[key])}; found {value!r}.")
    required = [n for n, one in parameters.items() if one.default is one.empty and one.kind is one.KEYWORD_ONLY]
    if node.get("_partial_"):
        required = []
    return problems + [
        f"{place}.{name}: is missing; {target.__name__} needs it." for name in required if name not in node
    ]


def schema_problems(place: str, node: Any, schema: Mapping[str, Any]) -> list[str]:
    """What is wrong with a node that builds nothing.

    Args:
        place: Where it is; empty for the whole config.
        node: Its values.
        schema: The type of each setting.
    """
    if not isinstance(node, Mapping):
        return [f"{place}: must be a group of settings; found {node!r}."]
    problems = []
    for key, value in node.items():
        where = f"{place}.{key}" if place else str(key)
        if key not in schema:
            problems.append(f"{where}: there is no such setting.{nearest(str(key), schema)}")
        elif not fits(value, schema[key]):
            problems.append(f"{where}: must be {told(schema[key])}; found {value!r}.")
    lacking = [f"{place}.{key}" if place else key for key in schema if key not in node]
    return problems + [f"{where}: is missing." for where in lacking]


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):
        return {}  # names that exist for type checkers only: its values go unchecked


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of a config can be of a type; types that configs cannot hold are let through."""
    origin, inner = get_origin(hint), get_args(hint)
    if value is UNKNOWN:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if origin in (list, tuple, Sequence, Iterable):
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value if inner)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    return True


def told(hint: Any) -> str:
    """A type in a user's words."""
    if get_origin(hint) is Literal:
        return " or ".join(repr(one) for one in get_args(hint))
    parts = list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]
    names: dict[Any, str] = {
        type(None): "null",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
    }
    origins: dict[Any, str] = dict.fromkeys((list, tuple, Sequence, Iterable), "a list") | {
        dict: "a group of settings",
        Mapping: "a group of settings",
    }
    return " or ".join(
        names.get(part) or origins.get(get_origin(part)) or str(getattr(part, "__name__", part)) for part in parts
    )
