"""The interface of an encoding."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.memory import AddressWindow, Int64s

Bytes2d: TypeAlias = NDArray[np.uint8]
"""uint8[rows, width]: the bytes of one row after another."""
EncodedColumn: TypeAlias = "Bytes2d | Sequence[Any]"
"""The values of a column as bytes: uint8[rows, width], or one bytes-like value per row."""


Stored: TypeAlias = "bytes | memoryview"
"""The bytes of one value."""
DTYPES = {
    f"{kind}{bits}": np.dtype(f"{kind}{bits}").newbyteorder("<")
    for bits in (8, 16, 32, 64)
    for kind in ("uint", "int", "float")
    if (kind, bits) != ("float", 8)
}
"""The numbers of MDS, as they are stored."""


class NumericLayout(NamedTuple):
    """Values of fixed size that are plain numbers: their little-endian ``dtype``, and ``shape`` per sample."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class FlatArrays(NamedTuple):
    """1-d arrays of one dtype as they lie in memory: where the numbers of each begin, and how many there are.

    ``begins`` and ``counts`` are int64[n].
    """

    dtype: np.dtype[Any]
    begins: Int64s
    counts: Int64s


class Encoding:
    """One way to store one value. Subclass it, or use an object with ``encode``, ``decode``, ``size`` and ``safe``.

    `encode` and `decode` are enough. `encode_many` and `decode_many` make whole batches fast, without a Python call per
    value, as in the built-in encodings. Example, complex numbers of 16 bytes::

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
        layout: Set if the bytes are plain numbers. Such columns are gathered without decoding, into the caller's memory
            if it is given.
        ragged: True if the values are, or hold, arrays of different shapes, which are never stacked into a batch.
        stored_type: The type of values that are stored as they are, without `encode`; None if `encode` gets all values.
    """

    size: int | None = None
    safe: bool = True
    layout: NumericLayout | None = None
    ragged: bool = False
    stored_type: type | None = None

    def encode(self, value: Any) -> bytes:
        """Return the value's bytes. TypeError for a wrong type; ValueError for a wrong range, shape or dtype."""
        raise NotImplementedError

    def decode(self, data: Stored) -> Any:
        """Return the value of these bytes. Readers turn any error into a `FormatError` with file, sample and column."""
        raise NotImplementedError

    def decode_view(self, data: memoryview) -> Any:
        """As `decode`, of mapped memory, which the value never refers to."""
        return self.decode(bytes(data))

    def encode_many(self, values: Any) -> EncodedColumn | tuple[Bytes2d, ...] | None:
        """Return the bytes of all values of a batch: the same as those of `encode` for each. Errors as `encode`.

        Args:
            values: An array or a sequence, as the caller gave it to ``write_batch``.

        Returns:
            Blocks, or a list with one bytes-like value per row; they may be views of ``values``. With None, `encode`
            gets the values one by one: return it for values that this method does not know, such as bytes.
        """
        return None if self.layout is None else encode_numbers(self.layout, values)

    def decode_many(
        self, window: AddressWindow, offsets: Int64s, sizes: int | Int64s
    ) -> list[Any] | NDArray[Any] | None:
        """Return the values of a batch, from all shards at once. It is not called if there is a `layout`.

        Args:
            window: The memory: ``window.take(offsets, width)`` and ``take_as`` copy, ``window.view`` does not. Nothing
                that is returned may refer to it.
            offsets: int64[n], where each value begins.
            sizes: Bytes of each value: one number, or int64[n].

        Returns:
            n values, always as a list or always as an array. After None or an error, `decode` gets them one by one.
        """
        return None

    def flat_arrays(self, window: AddressWindow, offsets: Int64s, sizes: int | Int64s) -> FlatArrays | None:
        """Where the numbers lie if all these values are 1-d arrays of one dtype; else None. It copies nothing."""
        return None


class ViewEncoding(Encoding):
    """An encoding with a name, for messages. Its `decode` gets a view of mapped memory, and never keeps it."""

    stored_type: type | None = bytes

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def decode_view(self) -> Callable[[memoryview], Any]:
        """It is `decode`."""
        return self.decode


class CheckedEncoding(ViewEncoding):
    """Bytes are taken as mosaicml-streaming takes them: as a stored value, which they must be."""

    stored_type = None

    def encode(self, value: Any) -> bytes:
        """As `Encoding`; ValueError for bytes that cannot be decoded."""
        if not isinstance(value, bytes):
            return self._encode(value)
        try:
            self._check(value)
        except Exception as error:
            raise ValueError(f"{self.name} takes bytes that are a stored value; got {describe(value)}.") from error
        return value

    def _check(self, data: bytes) -> None:
        """Raise an error for bytes that are no stored value."""
        self.decode(data)

    def _encode(self, value: Any) -> bytes:
        raise NotImplementedError


class AdaptedEncoding(Encoding):
    """An encoding made of any object that has some of its parts."""

    def __init__(self, parts: object) -> None:
        for name in vars(Encoding):
            if not name.startswith("_") and hasattr(parts, name):
                setattr(self, name, getattr(parts, name))


class BinaryColumn(list[Any]):
    """A batch's values as the bytes that ``encoding`` stores, e.g. views of Arrow's memory."""

    encoding = "bytes"
    is_checked = False  # whether text is known to be UTF-8


def type_name(value: object) -> str:
    """Return the name of a value's type, for messages."""
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", "numpy") else f"{kind.__module__}.{kind.__name__}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxstring = 60
_SHORT.maxother = 60
_SHORT.maxlong = 60
_MAX_SHOWN_BITS = 1000  # Python itself refuses to print whole numbers of thousands of digits


def as_float(value: Any) -> float:
    """Return a number as a float. TypeError for text and complex numbers; OverflowError for too large ones."""
    is_text = isinstance(value, (str, bytes, bytearray, memoryview))
    is_complex = isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") == "c"
    if is_text or is_complex or is_masked(value):
        raise TypeError("not a number")
    converted = float(value)
    if math.isinf(converted) and value != converted:  # of a Decimal, or NumPy's long double
        raise OverflowError("too large for a float")
    return converted


def is_masked(value: object) -> bool:
    """Whether a value is, or holds, one that NumPy has masked: as a number it would be 0 or NaN."""
    is_of_masks = isinstance(value, np.ndarray) and isinstance(value, np.ma.MaskedArray)  # np.ma is imported for it
    return is_of_masks and bool(np.ma.is_masked(value))


def describe(value: object) -> str:
    """Return a value's type and a short text, for messages; a large value takes no more time and space."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"{type_name(value)} of {value.bit_length():,} bits"
    return f"{type_name(value)} {_SHORT.repr(value)}"


def encode_numbers(layout: NumericLayout, values: Any) -> Bytes2d | None:
    """Encode a batch's values, if they are numbers in one array or can be stacked into one; else return None.

    ValueError for numbers that the layout cannot store: the same that are refused one by one.
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
    """Return the memory of an array, one row of bytes for each of its rows; a view, wherever each row is in C order."""
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    if array.size and array[0].flags.c_contiguous:
        return array.reshape(len(array), -1).view(np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(len(array), width)


def _stacked(values: Sequence[Any]) -> NDArray[Any] | None:
    """Return a list of numbers, or of arrays of one shape, as one array; None if it is anything else."""
    kind = type(values[0]) if values else None
    if kind not in (int, float, np.ndarray) or any(type(value) is not kind for value in values):
        return None
    if kind is np.ndarray and len({value.dtype for value in values}) > 1:
        return None  # NumPy makes them floats, which may round
    try:
        array = np.array(values)
    except (ValueError, OverflowError):
        return None
    is_rounded = kind is int and array.dtype.kind == "f"  # of small ones and ones from 2**63 on, NumPy makes floats
    return None if is_rounded else array


def _encode_scalars(dtype: np.dtype[Any], array: NDArray[Any]) -> Bytes2d:
    if array.ndim != 1:
        raise ValueError(f"takes one number per row; got an array of shape {array.shape}.")
    return as_bytes(cast_numbers(array, dtype))


def cast_numbers(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return numbers as another dtype, whose floats may round them.

    ValueError for numbers out of its range, and for parts of whole ones if it has none.
    """
    if np.can_cast(array.dtype, dtype, "safe"):
        return array.astype(dtype, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        cast: NDArray[Any] = array.astype(dtype)
    if dtype.kind == "f":
        wrong = bool((np.isinf(cast) & np.isfinite(array)).any())
    else:
        limits = np.iinfo(dtype)
        extremes = [array.min().item(), array.max().item()] if array.size else []
        wrong = any(not limits.min <= value <= limits.max for value in extremes)
        wrong = wrong or (array.dtype.kind == "f" and bool((array != np.floor(array)).any()))
    if wrong:
        name = dtype.name
        raise ValueError(
            f"values are out of range for {name}, or not whole numbers; these of {array.dtype} do not fit {name}."
        )
    return cast
