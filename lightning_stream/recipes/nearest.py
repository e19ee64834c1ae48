"""A hint at what was meant, for names that there are not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint at the valid name that is most like this one; empty if none is."""
    found = close(name, valid)
    return f" Did you mean {found[0]!r}?" if found else ""


def close(name: str, valid: Iterable[str]) -> list[str]:
    """The valid name that is most like this one, if one is."""
    return difflib.get_close_matches(name, list(valid), n=1, cutoff=0.55)
