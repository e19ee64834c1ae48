"""Files of NumPy, whose heads one thread at a time reads."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from lightning_stream.threads import Lock

# A head is parsed as Python. The parser of Python 3.11 raises a SystemError now and then where two threads parse.
_LOCK = Lock()


def read_head(data: bytes | memoryview) -> tuple[int, tuple[int, ...], np.dtype[Any]] | None:
    """Where the numbers of a file begin, their shape and dtype; None where they do not lie in C's order.

    None also for objects, for a version of the format that others need, and for a head that is longer than the data.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    reads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in reads:
        return None
    try:
        with _LOCK:
            shape, is_fortran, dtype = reads[version](file)
    except ValueError:
        return None
    return None if dtype.hasobject or (is_fortran and len(shape) > 1) else (file.tell(), shape, dtype)


def load(file: Any) -> Any:
    """The array of a file, or a dict of the arrays of an ``.npz``; nothing is unpickled.

    ValueError for bytes behind the array, as where `numpy.save` is called twice.
    """
    with _LOCK:
        loaded = np.load(file, allow_pickle=False)
        if hasattr(loaded, "files"):
            return {name: loaded[name] for name in loaded.files}
        if file.read(1):
            raise ValueError("bytes follow its array; write each array into a file of its own")
        return loaded
