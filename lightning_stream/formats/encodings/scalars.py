"""Numbers of fixed size: ``int``, and the eleven numpy scalars."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .base import DTYPES, Encoding, NumericLayout, Stored, ViewEncoding, as_float, describe, is_masked

# These need no `as_float`, which takes time.
_PLAIN = {int, float, np.float16, np.float32, np.float64}
_LONG = {"L": "Q", "l": "q"}  # NumPy's own characters for the types that have 8 bytes


class _Number(ViewEncoding):
    """A number of a numpy dtype, read as a numpy scalar."""

    def __init__(self, name: str, dtype: str | None = None) -> None:
        super().__init__(name)
        stored = DTYPES[dtype or name]
        self.layout = NumericLayout(stored, ())
        self.size = stored.itemsize
        self._dtype = stored
        self._is_float = stored.kind == "f"
        self._type = stored.type
        packer = struct.Struct("<" + _LONG.get(stored.char, stored.char))
        self._pack = packer.pack
        self._unpack = packer.unpack

    def encode(self, value: Any) -> bytes:
        if self._is_float and type(value) not in _PLAIN:
            return self._encode_other(value)
        try:
            return self._pack(value)
        except (struct.error, TypeError, OverflowError):
            return self._encode_other(value)

    def _encode_other(self, value: Any) -> bytes:
        """Encode a number of NumPy or torch, or a whole float; TypeError or ValueError for what is none."""
        try:
            scalar = _as_number(value, self._is_float)
            if scalar is not None:
                return self._pack(scalar)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{describe(value)} is out of range for {self.name}.") from error
        kind = "a number" if self._is_float else "a whole number"
        raise TypeError(f"{self.name} takes {kind}; got {describe(value)}.")

    def decode(self, data: Stored) -> Any:
        # floats through memory, so that a NaN keeps its bits
        return np.frombuffer(data, self._dtype)[0] if self._is_float else self._type(self._unpack(data)[0])


class PlainNumber(_Number):
    """``int``: stored as int64, read as a Python int. Floats of rows are Python floats likewise."""

    def decode(self, data: Stored) -> Any:
        """Return a Python number."""
        return self._unpack(data)[0]


def _as_number(value: Any, is_float: bool) -> int | float | None:
    """Return a plain number from a numpy scalar or a tensor, and from a whole float for integer types; else None."""
    try:
        return as_float(value) if is_float else operator.index(value)
    except (TypeError, ValueError):
        pass
    array = np.asarray(value) if hasattr(value, "__array__") or isinstance(value, float) else None
    if array is None or is_masked(value) or array.shape != () or array.dtype.kind not in "fiub":
        return None
    scalar = array.item()
    if is_float:
        return as_float(scalar)
    return int(scalar) if scalar == scalar // 1 else None


ENCODINGS: dict[str, Callable[[str], Encoding]] = {
    "int": partial(PlainNumber, dtype="int64"),
    **dict.fromkeys(DTYPES, _Number),
}
