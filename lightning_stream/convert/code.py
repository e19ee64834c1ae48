"""What tells a function from another."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


def source_text(function: Callable[..., Any] | None) -> str:
    """The function's source, or else its code; of a partial one, with its arguments."""
    if function is None:
        return ""
    if isinstance(function, partial):
        return f"{source_text(function.func)} {function.args!r} {sorted(function.keywords.items())!r}"
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return repr(type(function)) if code is None else repr((code.co_code, code.co_consts, code.co_names))
