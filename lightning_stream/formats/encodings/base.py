"""The promise of an encoding."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from lightning_stream.formats.encodings.numeric import Bytes2d, NumericLayout, encode_numbers
from lightning_stream.formats.memory import AddressWindow, Int64s

EncodedColumn: TypeAlias = "Bytes2d | tuple[Bytes2d, ...] | list[Any]"
"""A batch's values as bytes: blocks of uint8[rows, width] that stand side by side, or one bytes-like value a row."""


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
        fast_decode: A built-in function that does what `decode` does, without a Python frame; None if there is none.
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
            ValueError: Not bytes of this encoding.
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
