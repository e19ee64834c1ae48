"""Bytes, text, numbers as text, JSON and pickle."""

from __future__ import annotations

import json
import operator
import pickle
import pickletools
import warnings
from decimal import Decimal
from functools import partial
from typing import Any

import msgspec
import numpy as np

from lightning_stream.formats.memory import AddressWindow, Int64s

from .base import CheckedEncoding, Stored, ViewEncoding, as_float, describe, type_name

_decode_json = msgspec.json.Decoder().decode


class _Bytes(ViewEncoding):
    """Bytes as they are."""

    decode = bytes  # type: ignore[assignment]  # without a Python frame

    def encode(self, value: Any) -> bytes:
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value)
        raise TypeError(f"bytes takes bytes; got {describe(value)}.")


class _Str(CheckedEncoding):
    """UTF-8."""

    decode = staticmethod(partial(str, encoding="utf-8"))

    def _encode(self, value: Any) -> bytes:
        if isinstance(value, str):
            try:
                return value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"str takes text that UTF-8 can store; got {describe(value)}: {error}") from error
        raise TypeError(f"str takes str; got {describe(value)}.")

    def encode_many(self, values: Any) -> list[bytes] | None:
        """Encode all texts; None if a value is not text, or cannot be stored in UTF-8."""
        if set(map(type, values)) != {str}:
            return None
        try:
            return list(map(str.encode, values))
        except UnicodeEncodeError:
            return None  # `encode` finds the value


class RowText(_Str):
    """Text of a row: JSON can hold halves of pairs of code units, which UTF-8 cannot."""

    decode = staticmethod(partial(str, encoding="utf-8", errors="surrogatepass"))

    def encode(self, value: Any) -> bytes:
        """Return the bytes of any text."""
        return str(value).encode(errors="surrogatepass")


class RowFault(RowText):
    """Why a row could not be read, as text; reading it is that error. Other rows have no bytes here, and no value."""

    def decode(self, data: Stored) -> None:  # type: ignore[override]
        """Raise the error, if there is one."""
        if data:
            raise ValueError(super().decode(data))

    def decode_many(self, window: AddressWindow, offsets: Int64s, sizes: int | Int64s) -> list[Any] | None:  # noqa: ARG002
        """Return no values; None if a row could not be read."""
        return None if np.any(sizes) else [None] * len(offsets)


class _StrInt(CheckedEncoding):
    """A whole number as decimal text, of any size that Python prints (`sys.set_int_max_str_digits`)."""

    def _encode(self, value: Any) -> bytes:
        try:
            # str(value), as in mosaicml-streaming, would write "True", which cannot be read as a number
            return b"%d" % operator.index(value)
        except ValueError as error:
            raise ValueError(f"str_int takes a number of fewer digits; got {describe(value)}: {error}") from error
        except TypeError as error:
            raise TypeError(f"str_int takes a whole number; got {describe(value)}.") from error

    def decode(self, data: Stored) -> int:
        return int(bytes(data))


class _StrFloat(CheckedEncoding):
    """A float as the shortest text that is read as the same float."""

    def _encode(self, value: Any) -> bytes:
        if getattr(value, "ndim", 0):
            raise TypeError(f"str_float takes a number; got {describe(value)}.")
        try:
            converted = as_float(value)
        except TypeError as error:
            raise TypeError(f"str_float takes a number; got {describe(value)}.") from error
        except (OverflowError, ValueError) as error:
            raise ValueError(f"str_float takes a number that is a float; got {describe(value)}: {error}") from error
        # whole numbers and numpy's numbers keep their own text; that of a class of the user's may be anything
        has_text = type(value) in (int, float) or isinstance(value, np.number)
        return str(value if has_text else converted).encode()

    def decode(self, data: Stored) -> float:
        return float(bytes(data))


class _StrDecimal(CheckedEncoding):
    """A decimal number, exactly."""

    def _encode(self, value: Any) -> bytes:
        if not isinstance(value, Decimal):
            raise TypeError(f"str_decimal takes decimal.Decimal; got {describe(value)}.")
        return str(value).encode()

    def decode(self, data: Stored) -> Decimal:
        return Decimal(str(data, "utf-8"))


class _Json(CheckedEncoding):
    """Any JSON value; numpy arrays and numbers inside become lists and numbers."""

    def _encode(self, value: Any) -> bytes:
        try:
            text = json.dumps(value, default=_json_default)
            if "{" in text and isinstance(value, (dict, list, tuple)):
                _check_keys(value)
            return text.encode()
        except RecursionError as error:
            raise ValueError(f"json takes a JSON value; got {type_name(value)} that is nested too deep.") from error
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"json takes a JSON value; got {type_name(value)}: {error}") from error

    def decode(self, data: Stored) -> Any:
        try:
            return _decode_json(data)
        except msgspec.MsgspecError:  # NaN, numbers beyond a float, half of a surrogate pair; or damaged
            return json.loads(str(data, "utf-8"))


def _check_keys(value: Any) -> None:
    """Raise ValueError for keys that JSON cannot tell apart, such as 1 and "1"; warn of others that become text."""
    if isinstance(value, dict):
        if not {str}.issuperset(map(type, value)):
            _check_other_keys(value)
        value = value.values()
    for inner in value:
        if isinstance(inner, (dict, list, tuple)):
            _check_keys(inner)


def _check_other_keys(value: dict[Any, Any]) -> None:
    if len(json.loads(json.dumps(dict.fromkeys(value)))) < len(value):
        raise ValueError(f"the keys of a JSON object are text, and as text some are equal: {[*value]!s:.80}")
    other = next((key for key in value if not isinstance(key, str)), "")
    if not isinstance(other, str):
        warnings.warn(
            f"the keys of a JSON object are text, so {other!r} is read as text. A list of pairs keeps it.",
            stacklevel=2,
        )


def _json_default(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type_name(value)} is not a JSON value")


class _Pickle(CheckedEncoding):
    """Any Python object. Reading can run code, so it must be allowed."""

    safe = False

    def _encode(self, value: Any) -> bytes:
        return pickle.dumps(value, protocol=4)

    def _check(self, data: bytes) -> None:
        *_, (_, _, last) = pickletools.genops(data)  # parsed, never run
        if last is None or last + 1 < len(data):
            raise ValueError("bytes follow the end of the pickle")

    def decode(self, data: Stored) -> Any:
        return pickle.loads(data)  # noqa: S301 - only reached after allow_unsafe_types=True


ENCODINGS = {
    "bytes": _Bytes, "str": _Str, "str_int": _StrInt, "str_float": _StrFloat, "str_decimal": _StrDecimal,
    "json": _Json, "pkl": _Pickle,
}  # fmt: skip
