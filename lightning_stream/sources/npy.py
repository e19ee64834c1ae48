"""Files of NumPy, whose heads one thread at a time reads."""

from __future__ import annotations

import threading
from typing import IO, Any

import numpy as np

# A head is parsed as Python. The parser of Python 3.11 raises a SystemError now and then where two threads parse.
_LOCK = threading.Lock()


def read_head(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]] | None:
    """Shape, whether the order is Fortran's, and dtype; None for a version of the format that others need."""
    version = np.lib.format.read_magic(file)
    reads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in reads:
        return None
    with _LOCK:
        return reads[version](file)


def load(file: Any) -> Any:
    """The array of a file, or a dict of the arrays of an ``.npz``; nothing is unpickled."""
    with _LOCK:
        loaded = np.load(file, allow_pickle=False)
        return {name: loaded[name] for name in loaded.files} if hasattr(loaded, "files") else loaded
