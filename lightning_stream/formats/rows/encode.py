"""One sample to bytes: as MDS, as a JSON line, or as values with separators."""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.encodings.base import told
from lightning_stream.formats.index.schema import Schema

ROW_TYPES = ("str", "int", "float")
"""The column types of row formats."""


class _NoValue:
    """The type of no value."""


_Step: TypeAlias = "tuple[str, str, Any, Callable[[Any], bytes], int | None]"


def _step(name: str, encoding_name: str, size: int | None) -> _Step:
    """What to do for one column; the third is the type of values that are stored as they are."""
    encoding = get_encoding(encoding_name)
    kept = _NoValue if getattr(encoding, "checks_bytes", False) else bytes
    return name, encoding_name, kept, encoding.encode, size


class MdsEncoder:
    """Samples to bytes, for one MDS schema."""

    def __init__(self, schema: Schema) -> None:
        self._steps = [
            _step(name, encoding, size)
            for name, encoding, size in zip(schema.names, schema.encodings, schema.sizes, strict=True)
        ]
        num_variable = sum(size is None for size in schema.sizes)
        self._pack_head = struct.Struct(f"<{num_variable}I").pack if num_variable else None

    def encode(self, sample: Mapping[str, Any]) -> list[bytes]:
        """The sample's parts: its head, if it has one, and a value per column. Keys that are no columns are left out.

        Raises:
            TypeError: A value of a type its column does not take; names the column.
            ValueError: A column is missing, or a value is out of range, or of a wrong shape, dtype or length.
        """
        parts: list[bytes] = []
        sizes: list[int] = []
        name = encoding = ""
        try:
            for name, encoding, kept, encode, size in self._steps:
                value = sample[name]
                data = value if type(value) is kept else encode(value)
                if size is None:
                    sizes.append(len(data))
                elif len(data) != size:
                    raise ValueError(f"{encoding} takes {size} bytes; got {len(data)} bytes.")
                parts.append(data)
        except Exception as error:
            raise _column_error(name, encoding, sample, error) from error
        if self._pack_head is None:
            return parts
        try:
            parts.insert(0, self._pack_head(*sizes))
        except struct.error as error:
            raise ValueError(f"a value must stay under 4 GiB; the sample's sizes are {sizes}.") from error
        return parts


class JsonEncoder:
    """Samples to JSON lines: keys sorted, ASCII."""

    def __init__(self, schema: Schema) -> None:
        self._casts = _casts(schema)
        self._newline = schema.newline or "\n"

    def encode(self, sample: Mapping[str, Any]) -> list[bytes]:
        """The sample's line.

        Raises:
            TypeError: A value of a type its column does not take; names the column.
            ValueError: A column is missing.
        """
        values = _cast_all(self._casts, sample)
        return [(json.dumps(values, sort_keys=True) + self._newline).encode()]


class SeparatedEncoder:
    """Samples to values with separators, unquoted."""

    def __init__(self, schema: Schema) -> None:
        self._casts = _casts(schema)
        self._newline = schema.newline or "\n"
        self._separator = schema.separator or ","
        for name in schema.names:
            self._check(name, name)
        self.header = (self._separator.join(schema.names) + self._newline).encode()

    def encode(self, sample: Mapping[str, Any]) -> list[bytes]:
        """The sample's row.

        Raises:
            TypeError: A value of a type its column does not take; names the column.
            ValueError: A column is missing, or a value holds the separator or the newline.
        """
        texts = {name: str(value) for name, value in _cast_all(self._casts, sample).items()}
        row = self._separator.join(texts.values())
        if row.count(self._separator) != len(texts) - 1 or self._newline in row:
            for name, text in texts.items():
                self._check(name, text)
            raise ValueError("a row's values, joined, must not hold the newline or more separators than columns.")
        return [(row + self._newline).encode()]

    def _check(self, name: str, text: str) -> None:
        for mark, value in (("separator", self._separator), ("newline", self._newline)):
            if value in text:
                raise ValueError(
                    f"column {name!r}: values of this format are not quoted, so none may hold the {mark} {value!r}; "
                    f"got {text!r:.80}. Write JSON or MDS, or choose another {mark}."
                )


def _casts(schema: Schema) -> dict[str, Callable[[Any], Any]]:
    wrong = {name: kind for name, kind in schema.columns.items() if kind not in ROW_TYPES}
    if wrong:
        raise ValueError(f"columns of row formats must be {', '.join(ROW_TYPES)}; got {wrong}. Write MDS for others.")
    return {
        name: {"str": _text, "int": operator.index, "float": _number}[kind] for name, kind in schema.columns.items()
    }


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a str")
    return value


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError("not a number")
    return float(value)


_KINDS: dict[Callable[[Any], Any], str] = {_text: "str", _number: "float"}


def _cast_all(casts: Mapping[str, Callable[[Any], Any]], sample: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    name = ""
    try:
        for name, cast in casts.items():
            values[name] = cast(sample[name])
    except Exception as error:
        kind = _KINDS.get(casts[name], "int")
        if isinstance(sample, Mapping) and name in sample and isinstance(error, (TypeError, ValueError)):
            value = sample[name]
            raise TypeError(f"column {name!r}: {kind} takes {kind}; got {told(value)}.") from error
        raise _column_error(name, kind, sample, error) from error
    return values


def _column_error(name: str, encoding: str, sample: Any, error: Exception) -> Exception:
    if not isinstance(sample, Mapping):
        return TypeError(f"a sample must be a mapping of column names to values; got {type(sample).__name__}.")
    if name not in sample:
        return ValueError(
            f"column {name!r} ({encoding}) is missing in a sample that has {', '.join(map(str, sample))}."
        )
    if isinstance(error, (TypeError, ValueError)):
        kind = TypeError if isinstance(error, TypeError) else ValueError
        return kind(f"column {name!r}: {error}")
    return error
