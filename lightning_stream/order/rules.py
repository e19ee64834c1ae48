"""Rules for the values of settings and states. `violations` reports all problems together, one sentence for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

MAX_NUMBER = 2**63  # seeds and epochs stay below: two 32-bit words each, and an int64 in every other tool


class Rule(NamedTuple):
    """What a value must be."""

    text: str  # the rule in words, after "must be"
    accepts: Callable[[object], bool]  # whether a value of any type keeps the rule; never raises


def count(least: int = 0, most: int = MAX_NUMBER - 1, *, optional: bool = False) -> Rule:
    """An integer (no bool) from ``least`` to ``most``; or None, if ``optional``."""
    text = f"from {least} to {most}" if most < MAX_NUMBER - 1 else f"of at least {least} and below 2**63"
    text = f"{'None or ' if optional else ''}an integer {text}"
    return Rule(text, lambda value: is_count(value, least, most) or (optional and value is None))


def is_count(value: object, least: int, most: int = MAX_NUMBER - 1) -> bool:
    """Whether this is an integer (no bool) from ``least`` to ``most``."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def one_of(*values: str | bool) -> Rule:
    """One of a few values."""
    names = ", ".join(map(str, values))
    return Rule(f"one of {names}", lambda value: isinstance(value, str | int | np.bool_) and bool(value in values))


def shaped(text: str, kind: Any) -> Rule:
    """What msgspec reads as this type; ``text`` says it in words."""

    def accepts(value: object) -> bool:
        try:
            msgspec.convert(value, kind)
        except (msgspec.ValidationError, RecursionError):
            return False
        return True

    return Rule(text, accepts)


def plain(model: Struct) -> dict[str, Any]:
    """A model as JSON reads it: ints, strings, lists, dicts and None."""
    state: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(model))
    return state


TEXT = Rule("a string", lambda value: isinstance(value, str))
MAYBE_TEXT = Rule("None or a string", lambda value: value is None or isinstance(value, str))
AMOUNT = Rule(
    "a number of at least 0",
    lambda value: (
        isinstance(value, int | float | np.number)
        and not isinstance(value, bool)
        and bool(math.isfinite(value) and value >= 0)
    ),
)


def violations(
    values: Mapping[str, object], rules: Mapping[str, Rule], names: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """One sentence for every value that breaks its rule; a missing value counts as None, and `names` has other names.

    Example: ``violations({"seed": 0}, {"seed": count(1, 9)})`` is ``['seed must be an integer from 1 to 9, not 0.']``.
    """
    wrong = [(name, rule) for name, rule in rules.items() if not rule.accepts(values.get(name))]
    return [f"{names.get(name, name)} must be {rule.text}, not {short(values.get(name))}." for name, rule in wrong]


def short(value: object) -> str:
    """The repr of a value, in 60 letters at most."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
