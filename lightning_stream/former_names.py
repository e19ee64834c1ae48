"""Names of arguments that have gone: they warn, name the new one, and keep working."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def taking_former(name: str, parts: Mapping[str, str], example: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take former arguments that are entries of one mapping now, with a FutureWarning.

    Args:
        name: The argument that takes the mapping.
        parts: The key of each former argument in the mapping, by its name.
        example: The new call, for the warning.

    Example: ``@taking_former("on_bad", {"quarantine": "quarantine"}, 'on_bad={"quarantine": "bad.jsonl"}')``

    Raises:
        TypeError: A former argument beside the new one, from the decorated function.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            options: dict[str, Any] = dict(kwargs)
            former = [old for old in parts if old in options]
            if not former:
                return function(*args, **kwargs)
            warnings.warn(
                f"{', '.join(former)}: former arguments, now parts of {name}. Pass e.g. {example}",
                FutureWarning,
                stacklevel=2,
            )
            if name in options:
                raise TypeError(f"pass {name} alone: found {', '.join(former)} beside it. Write e.g. {example}")
            values = {parts[old]: options.pop(old) for old in former}
            if any(value is not None for value in values.values()):
                options[name] = {key: value for key, value in values.items() if value is not None}
            return function(*args, **options)

        return checked

    return decorated
