"""Rules for the values of settings and states. `broken` reports all problems together, one sentence for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

MAX_NUMBER = 2**63  # seeds and epochs stay below: two 32-bit words each, and an int64 in every other tool


class Rule(NamedTuple):
    """What a value must be."""

    text: str  # the rule in words, after "must be"
    holds: Callable[[object], bool]  # whether a value of any type keeps the rule; never raises


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


TEXT = Rule("a string", lambda value: isinstance(value, str))
AMOUNT = Rule(
    "a number of at least 0",
    lambda value: (
        isinstance(value, int | float | np.number)
        and not isinstance(value, bool)
        and bool(math.isfinite(value) and value >= 0)
    ),
)


def broken(values: Mapping[str, object], rules: Mapping[str, Rule]) -> list[str]:
    """One sentence for every value that breaks its rule; a missing value counts as None.

    Example: ``broken({"seed": 0}, {"seed": count(1, 9)})`` is ``['seed must be an integer from 1 to 9, not 0.']``.
    """
    found = [(name, rule, values.get(name)) for name, rule in rules.items()]
    return [f"{name} must be {rule.text}, not {short(value)}." for name, rule, value in found if not rule.holds(value)]


def short(value: object) -> str:
    """The repr of a value, in 60 letters at most."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
