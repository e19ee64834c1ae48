"""Values at the edge of what encodings of text and JSON take: the bytes they have, or the error."""

from __future__ import annotations

import math
import pickle
import re
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.mds.encode import MdsEncoder
from lightning_stream.writer import MDSWriter

_DEEP: list[Any] = []
for _ in range(100_000):
    _DEEP = [_DEEP]
_CIRCLE: list[Any] = []
_CIRCLE.append(_CIRCLE)


class _Named(float):
    def __str__(self) -> str:
        return "two and a half"


@pytest.mark.filterwarnings("ignore:the keys of a JSON object are text")
@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [  # all but those that it refuses (numpy's numbers in json, arrays of one, bools) as mosaicml-streaming stores them
        ("json", float("nan"), b"NaN"),
        ("json", -math.inf, b"-Infinity"),
        ("json", -(10**400), b"-1" + b"0" * 400),
        ("json", "\xe9\u2028\U0001f600\ud800", rb'"\u00e9\u2028\ud83d\ude00\ud800"'),
        ("json", {1: 2, None: 4, 1.5: 6, float("nan"): 7}, b'{"1": 2, "null": 4, "1.5": 6, "NaN": 7}'),
        ("json", {}, b"{}"),
        ("json", "", b'""'),
        ("json", (1, [True, {}]), b"[1, [true, {}]]"),
        ("json", np.float64(0.1), b"0.1"),
        ("json", {"a": np.int64(3), "b": [np.arange(2)]}, b'{"a": 3, "b": [[0, 1]]}'),
        ("str_int", -(10**400), b"-1" + b"0" * 400),
        ("str_int", True, b"1"),
        ("str_int", np.uint8(7), b"7"),
        ("str_float", float("nan"), b"nan"),
        ("str_float", -math.inf, b"-inf"),
        ("str_float", np.float64(0.1), b"0.1"),
        ("str_float", True, b"1.0"),
        ("str_float", 10**30, b"1" + b"0" * 30),
        ("str_float", _Named(2.5), b"2.5"),
        ("str_decimal", Decimal("-Infinity"), b"-Infinity"),
        ("str_decimal", Decimal("1E+5"), b"1E+5"),
    ],
)
def test_unusual_values_are_stored_so(name: str, value: Any, stored: bytes) -> None:
    data = get_encoding(name).encode(value)
    assert data == stored
    get_encoding(name).decode(data)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("json", _DEEP, "json takes a JSON value; got list that is nested too deep"),
        ("json", _CIRCLE, "json takes a JSON value; got list: Circular"),
        ("json", {(1, 2): 3}, "json takes a JSON value; got dict: keys must be str"),
        ("json", {"a": {1}}, "json takes a JSON value; got dict: set is not a JSON value"),
        ("str_int", _DEEP, r"str_int takes a whole number; got list \[\["),
        pytest.param(
            "str_int",
            1 << 20_000,
            "str_int takes a number of fewer digits; got int of 20,001 bits: Exceeds the limit",
            id="str_int of many digits",
        ),
        ("str_float", 10**400, "str_float takes a number that is a float; got int of 1,329 bits: int too large"),
        ("str_float", np.complex64(1 + 2j), "str_float takes a number; got complex64"),
        ("float32", np.complex64(1 + 2j), "float32 takes a number; got complex64"),
        ("float64", np.array(1 + 2j), "float64 takes a number; got ndarray"),
        ("float64", memoryview(b"12"), "float64 takes a number; got memoryview"),
        ("str_float", np.array([1.5]), r"str_float takes a number; got ndarray array\(\[1.5\]\)"),
        pytest.param("int", 1 << 20_000, "int of 20,001 bits is out of range for int", id="int of many digits"),
        ("str", "\ud800", "str takes text that UTF-8 can store; got str"),
        ("str", list(range(1_000_000)), r"str takes str; got list \[0, 1, 2, 3, 4, 5, \.\.\.\]"),
    ],
)
def test_an_error_names_the_column_and_the_type_of_a_value_that_cannot_be_encoded(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match="column 'c': " + message):
        MDSWriter(out=tmp_path / "rows", columns={"c": name}).write({"c": value})
    with pytest.raises((TypeError, ValueError), match="column 'c': .*" + message.split("got")[0]):
        MDSWriter(out=tmp_path / "batch", columns={"c": name}).write_batch({"c": [value]})


@pytest.mark.parametrize(
    ("encoding", "stored", "broken"),
    [
        ("str", b"caf\xc3\xa9", b"caf\xe9"),
        ("json", b'{"a": 1}', b"a"),
        ("str_int", b"12", b"1.5"),
        ("str_float", b"1.5", b"x"),
        ("str_decimal", b"1.50", b"x"),
        ("ndarray", b"\x08\x04\x01\x07", b"\x07"),
        ("ndarray:uint8", b"\x04\x01\x07", b"\x07"),
        ("tensors", b"\x02" + bytes(7) + b"{}", b"{}"),
        ("pkl", pickle.dumps({1}), b"text"),
        ("pkl", pickle.dumps({1}), pickle.dumps({1})[:-1]),
        ("pkl", pickle.dumps({1}), pickle.dumps({1}) + b"."),
        ("pil", struct.pack("<III", 1, 1, 1) + b"L\x07", b"L"),
        ("list[pil]", bytes(8), b"L"),
        ("jpeg_array", bytes(4), struct.pack("<II", 1, 1) + b"L"),
    ],
)
def test_bytes_in_a_column_of_other_values_are_stored_values_or_refused(
    encoding: str, stored: bytes, broken: bytes
) -> None:
    encoder = MdsEncoder({"a": encoding})
    values = list(map(bytes, encoder.encode_batch({"a": [stored]}, 1).rows()))
    assert values == [b"".join(encoder.encode({"a": stored}))]
    assert values[0].endswith(stored)
    refused = re.escape(f"column 'a': {encoding} takes bytes that are a stored value")
    with pytest.raises(ValueError, match=refused):
        encoder.encode({"a": broken})
    with pytest.raises(ValueError, match=refused):
        encoder.encode_batch({"a": [stored, broken]}, 2)


def test_keys_of_json_that_become_equal_are_refused_and_others_that_become_text_are_named() -> None:
    encoding = get_encoding("json")
    with pytest.raises(ValueError, match=r"as text some are equal: \[1, '1'\]"):
        encoding.encode([{"a": {1: "x", "1": "y"}}])
    with pytest.warns(UserWarning, match="so 1 is read as text"):
        assert encoding.decode(encoding.encode({"a": [{1: 2}]})) == {"a": [{"1": 2}]}  # as in mosaicml-streaming


@pytest.mark.parametrize("encoding", ["int", "uint8", "float32", "float64", "str_int", "str_float"])
def test_a_masked_number_is_refused_and_not_stored_as_0_or_nan(encoding: str) -> None:
    numbers = np.ma.masked_array([1, 2], [True, False])
    with pytest.raises(TypeError, match="masked"):
        get_encoding(encoding).encode(numbers[0])
    assert get_encoding(encoding).decode(get_encoding(encoding).encode(numbers[1])) == 2


@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:int64", "ndarray:int64:2"])
def test_an_array_with_masked_values_is_refused(encoding: str) -> None:
    masked = np.ma.masked_array([1, 2], [True, False])
    with pytest.raises(ValueError, match="without masked values"):
        get_encoding(encoding).encode(masked)
    whole = np.ma.masked_array([1, 2])
    assert get_encoding(encoding).encode(whole) == get_encoding(encoding).encode(np.array([1, 2]))
