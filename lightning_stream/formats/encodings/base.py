"""The promise of an encoding."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Layout(NamedTuple):
    """Fixed-size bytes that are numbers in memory: little-endian ``dtype``, and ``shape`` per sample."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Encoding:
    """One way to store one value. Subclass it, or give an object with the same four names.

    Attributes:
        size: Bytes of every encoded value, or None if that varies.
        safe: False if decoding hostile bytes could run code.
        layout: Set if the bytes are plain numbers in memory: such columns are gathered without decoding.
        takes_view: True if `decode` copies whatever it keeps; then it is handed a view of mapped memory, else bytes.
        ragged: True if the values are arrays, or hold some, that need not have one shape: never stacked into a batch.
        checks_bytes: Bytes given in place of a value are stored as they are; True if `encode` is to look at them first.
    """

    size: int | None = None
    safe: bool = True
    layout: Layout | None = None
    takes_view: bool = False
    ragged: bool = False
    checks_bytes: bool = False

    def encode(self, value: Any) -> bytes:
        """The value's bytes.

        Raises:
            TypeError: Not a type that this encoding takes.
            ValueError: The right type, but out of range, or of a wrong shape or dtype.
        """
        raise NotImplementedError

    def decode(self, data: bytes | memoryview) -> Any:
        """The value of these bytes.

        Raises:
            ValueError: Not bytes of this encoding.
        """
        raise NotImplementedError


class ViewEncoding(Encoding):
    """An encoding whose `decode` never keeps the memory it is handed.

    Attributes:
        quick_decode: A built-in that does what `decode` does, without a Python frame; None if there is none.
    """

    takes_view = True
    quick_decode: Callable[[Any], Any] | None = None


def type_name(value: object) -> str:
    """A value's type as messages name it."""
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", "numpy") else f"{kind.__module__}.{kind.__name__}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 4, 60, 60, 60
_MAX_SHOWN_BITS = 1000  # Python itself refuses to print whole numbers of thousands of digits


def told(value: object) -> str:
    """A value as messages tell it: its type and what it is, in little time and space however large or deep it is."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"{type_name(value)} of {value.bit_length():,} bits"
    return f"{type_name(value)} {_SHORT.repr(value)}"
