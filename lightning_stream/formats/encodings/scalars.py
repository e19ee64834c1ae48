"""Numbers of fixed size: ``int``, and the eleven numpy scalars."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .base import Encoding, NumericLayout, ViewEncoding, describe

_CODES = {
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q",
    "int8": "b", "int16": "h", "int32": "i", "int64": "q",
    "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip


class _Number(ViewEncoding):
    """A number of a numpy dtype, read as a numpy scalar."""

    def __init__(self, name: str, dtype: str | None = None) -> None:
        super().__init__(name)
        dtype = dtype or name
        self.layout = NumericLayout(np.dtype(dtype).newbyteorder("<"), ())
        self.size = self.layout.dtype.itemsize
        packer = struct.Struct("<" + _CODES[dtype])
        self._pack, self._unpack = packer.pack, packer.unpack
        self._is_float = dtype.startswith("float")
        self._type: Callable[[Any], Any] = np.dtype(dtype).type

    def encode(self, value: Any) -> bytes:
        try:
            return self._pack(value)
        except OverflowError as error:
            raise ValueError(f"{describe(value)} is out of range for {self.name}.") from error
        except (struct.error, TypeError):
            return self._encode_other(value)

    def _encode_other(self, value: Any) -> bytes:
        try:
            number = _as_number(value, self._is_float)
        except OverflowError as error:
            raise ValueError(f"a number of {value.bit_length()} bits is out of range for {self.name}.") from error
        if number is None:
            kind = "a number" if self._is_float else "a whole number"
            raise TypeError(f"{self.name} takes {kind}; got {describe(value)}.")
        try:
            return self._pack(number)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{describe(number)} is out of range for {self.name}.") from error

    def decode(self, data: bytes | memoryview) -> Any:
        if self._is_float:
            # through memory, so that a NaN keeps its bits
            return np.frombuffer(data, self.layout.dtype)[0]  # type: ignore[union-attr]
        return self._type(self._unpack(data)[0])


class PlainNumber(_Number):
    """``int``: stored as int64, read as a Python int. Floats of rows are Python floats likewise."""

    def decode(self, data: bytes | memoryview) -> Any:
        """Return a Python number."""
        return self._unpack(data)[0]


def _as_number(value: Any, is_float: bool) -> int | float | None:
    """Return a plain number from a numpy scalar or a tensor, and from a whole float for integer types; else None."""
    if isinstance(value, (str, bytes, bytearray, complex)):
        return None
    try:
        return float(value) if is_float else operator.index(value)
    except (TypeError, ValueError):
        pass
    array = np.asarray(value) if hasattr(value, "__array__") or isinstance(value, float) else None
    if array is None or array.shape != () or array.dtype.kind not in "fiub":
        return None
    number = array.item()
    return number if is_float else int(number) if number == number // 1 else None


ENCODINGS: dict[str, Callable[[str], Encoding]] = {
    "int": partial(PlainNumber, dtype="int64"),
    **dict.fromkeys(_CODES, _Number),
}
