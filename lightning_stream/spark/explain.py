"""The error of an executor, made again from its text: a driver gets nothing else from Spark."""

from __future__ import annotations

import re

from lightning_stream import errors
from lightning_stream.errors import LightningStreamError, MissingExtraError

_OURS = re.compile(r"^\s*lightning_stream\.errors\.(\w+): (.+)$", re.MULTILINE)
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def explained(failure: Exception) -> Exception | None:
    """The error of this package that a task ended with, or what a missing module means; None for any other failure."""
    text = str(failure)
    if (ours := _OURS.search(text)) is not None:
        kind = getattr(errors, ours[1], None)
        if isinstance(kind, type) and issubclass(kind, (LightningStreamError, MissingExtraError)):
            return kind(f"{ours[2].strip()} (In one of Spark's executors.)")
    if (missing := _MISSING.search(text)) is not None:
        return MissingExtraError(
            f"the Python of Spark's executors has no module {missing[1]!r}. Install it on every machine of the cluster "
            "(a cluster library, or %pip in a notebook), or set PYSPARK_PYTHON, before the session starts, to a Python "
            "that has it on every machine."
        )
    return None
