"""The promise of an encoding."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.memory import AddressWindow, Int64s

Bytes2d: TypeAlias = NDArray[np.uint8]
"""uint8[rows, width]: the bytes of one row after another."""
EncodedColumn: TypeAlias = "Bytes2d | tuple[Bytes2d, ...] | list[Any]"
"""A batch's values as bytes: blocks of uint8[rows, width] that stand side by side, or one bytes-like value a row."""


class NumericLayout(NamedTuple):
    """Fixed-size bytes that are numbers in memory: little-endian ``dtype``, and ``shape`` per sample."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Encoding:
    """One way to store one value. Subclass it, or give an object with ``encode``, ``decode``, ``size`` and ``safe``.

    `encode` and `decode` are enough. `encode_many` and `decode_many` make a whole batch fast, without a Python call
    for each value; the built-in encodings have no other means. Example, complex numbers of 16 bytes::

        class Complex(Encoding):
            size = 16

            def encode(self, value):
                return np.complex128(value).tobytes()

            def decode(self, data):
                return complex(np.frombuffer(data, np.complex128)[0])

            def encode_many(self, values):
                return np.asarray(values, np.complex128).view(np.uint8).reshape(len(values), 16)

            def decode_many(self, window, offsets, sizes):
                return window.take_as(np.dtype(np.complex128), offsets, 16)


        register_encoding("complex", Complex())

    Attributes:
        size: Bytes of every encoded value, or None if that varies.
        safe: False if decoding hostile bytes could run code.
        layout: Set if the bytes are plain numbers in memory: such columns are gathered without decoding, straight into
            a caller's memory where it gives some.
        accepts_memoryview: True if `decode` copies what it keeps; it then gets a view of mapped memory, else bytes.
        fast_decode: A built-in function that does what `decode` does, without a Python frame; or None.
        ragged: True if the values are arrays, or hold some, that need not have one shape: never stacked into a batch.
        checks_bytes: Bytes given in place of a value are stored as they are; True if `encode` must check them first.
    """

    size: int | None = None
    safe: bool = True
    layout: NumericLayout | None = None
    accepts_memoryview: bool = False
    fast_decode: Callable[[Any], Any] | None = None
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
            Exception: Not bytes of this encoding. Readers make a `FormatError` of it that says where they are.
        """
        raise NotImplementedError

    def encode_many(self, values: Any) -> EncodedColumn | None:
        """The bytes of all values of a batch: the same as those of `encode` for each.

        Args:
            values: An array or a sequence, as the caller gave it to ``write_batch``.

        Returns:
            Blocks, or a list with one bytes-like value a row; they may be views of ``values``. None leaves the values
            to `encode`, one by one: do so for whatever this method does not know, such as values that are bytes.

        Raises:
            TypeError, ValueError: As `encode` does.
        """
        return None if self.layout is None else encode_numbers(self.layout, values)

    def decode_many(
        self, window: AddressWindow, offsets: Int64s, sizes: int | Int64s
    ) -> list[Any] | NDArray[Any] | None:
        """The values of a batch, from all shards at once; not called where there is a `layout`.

        Args:
            window: The memory: ``window.take(offsets, width)`` and ``take_as`` copy, ``window.view`` does not. Nothing
                that is returned may refer to it.
            offsets: int64[n], where each value begins.
            sizes: Bytes of each value: one number, or int64[n].

        Returns:
            n values, always as a list or always as an array. None leaves the bytes to `decode`, one by one.

        Raises:
            Exception: Damaged bytes; `decode` is then tried on each, to find which.
        """
        return None


class ViewEncoding(Encoding):
    """An encoding whose `decode` never keeps the memory that it gets."""

    accepts_memoryview = True


class FamilyMember(NamedTuple):
    """An entry of a module's ENCODINGS: names, and what makes the encoding of a name."""

    names: tuple[str, ...]
    make: Callable[[str], Encoding]
    takes_parameters: bool = False  # it also makes "name:anything"


class BinaryColumn(list[Any]):
    """A batch's values that are bytes already, as views of one buffer; ``encoding`` is ``str`` or ``bytes``."""

    encoding = "bytes"


def type_name(value: object) -> str:
    """A value's type as messages name it."""
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", "numpy") else f"{kind.__module__}.{kind.__name__}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 4, 60, 60, 60
_MAX_SHOWN_BITS = 1000  # Python itself refuses to print whole numbers of thousands of digits


def describe(value: object) -> str:
    """A value as messages show it: its type and a short text, in little time and space however large it is."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"{type_name(value)} of {value.bit_length():,} bits"
    return f"{type_name(value)} {_SHORT.repr(value)}"


def encode_numbers(layout: NumericLayout, values: Any) -> Bytes2d | None:
    """A batch's values as bytes, if they are numbers in one array or can be stacked into one; else None.

    Raises:
        ValueError: Numbers that the layout cannot store; the same that are refused one by one.
    """
    if not isinstance(values, (np.ndarray, list, tuple)):
        return None
    array = values if isinstance(values, np.ndarray) else _stacked(values)
    if array is None or array.dtype.kind not in "iufb":
        return None
    if not layout.shape:
        return _encode_scalars(layout.dtype, array)
    if array.shape[1:] != layout.shape:
        raise ValueError(f"takes shape {layout.shape} per row; got {array.shape[1:]}.")
    if array.dtype.newbyteorder("<") != layout.dtype:
        raise ValueError(f"takes dtype {layout.dtype.name}; got dtype {array.dtype}. Convert it with astype().")
    return as_bytes(array.astype(layout.dtype, copy=False))


def as_bytes(array: NDArray[Any]) -> Bytes2d:
    """The memory of an array, one row of bytes for each of its rows."""
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(len(array), width)


def _stacked(values: Sequence[Any]) -> NDArray[Any] | None:
    """A list of numbers, or of arrays of one shape, as one array; None if it is anything else."""
    kind = type(values[0]) if values else None
    if kind not in (int, float, np.ndarray) or any(type(value) is not kind for value in values):
        return None
    try:
        return np.array(values)
    except (ValueError, OverflowError):
        return None


def _encode_scalars(dtype: np.dtype[Any], array: NDArray[Any]) -> Bytes2d:
    if array.ndim != 1:
        raise ValueError(f"takes one number per row; got an array of shape {array.shape}.")
    if np.can_cast(array.dtype, dtype, "safe"):
        return as_bytes(array.astype(dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    if dtype.kind == "f":
        wrong = bool((np.isinf(cast) & np.isfinite(array)).any())
    else:
        limits = np.iinfo(dtype)
        extremes = [array.min().item(), array.max().item()] if len(array) else []
        wrong = any(not limits.min <= value <= limits.max for value in extremes)
        wrong = wrong or (array.dtype.kind == "f" and bool((array != np.floor(array)).any()))
    if wrong:
        raise ValueError(f"values are out of range for {dtype.name}, or no whole numbers.")
    return as_bytes(cast)
