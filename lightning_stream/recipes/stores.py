"""A run's store: its settings as the variables that stores read, set while the run lasts, for its workers too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def reaching(store: Mapping[str, Any] | None) -> Iterator[None]:
    """Set what ``store.environment`` names, where it is not null; put back what was there before.

    Variables, not arguments: whichever process reads or writes for this run, whoever started it, inherits them.

    Args:
        store: The ``store`` group of a config, resolved.
    """
    wanted = {name: str(value) for name, value in ((store or {}).get("environment") or {}).items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
