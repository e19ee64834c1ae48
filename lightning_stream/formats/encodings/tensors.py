"""Named arrays in one value (``tensors``), in the layout of safetensors files: no code can hide in it.

``[uint64 size of head][head: JSON][values]``; the head maps each name to dtype, shape and where its values lie.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.encodings.arrays import as_array, little_endian
from lightning_stream.formats.encodings.base import Encoding, ViewEncoding, told

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
_CODES = {name: code for code, name in _DTYPES.items()}
_METADATA = "__metadata__"


class _Tensors(ViewEncoding):
    """A dict of arrays, of any shape, 0-d and empty ones included."""

    ragged = True

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value) or _METADATA in value:
            raise TypeError(f"tensors takes a dict of names and arrays; got {told(value)}.")
        head: dict[str, Any] = {}
        parts: list[bytes] = []
        at = 0
        for name in sorted(value):
            array = little_endian(as_array(value[name], "tensors"))
            if array.dtype.name not in _CODES:
                raise ValueError(f"tensors takes arrays of {', '.join(_CODES)}; {name!r} is of {array.dtype}.")
            parts.append(array.tobytes())
            span = [at, at + len(parts[-1])]
            head[name] = {"dtype": _CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
            at = span[1]
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return b"".join((len(text).to_bytes(8, "little"), text, *parts))

    def decode(self, data: bytes | memoryview) -> dict[str, NDArray[Any]]:
        head_bytes = int.from_bytes(data[:8], "little")
        if len(data) < 8 or head_bytes > len(data) - 8:
            raise ValueError(f"named tensors with a head of {head_bytes} bytes do not fit {len(data)} bytes")
        head = _read_head(str(data[8 : 8 + head_bytes], "utf-8"))
        values = data[8 + head_bytes :]
        return {name: _read(values, about, name) for name, about in head.items() if name != _METADATA}


def _read_head(text: str) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except RecursionError as error:
        raise ValueError("the head of named tensors is nested too deep") from error
    if not isinstance(head, dict):
        raise ValueError("the head of named tensors must be an object")
    return head


def _read(values: bytes | memoryview, about: Any, name: str) -> NDArray[Any]:
    begin, end = about["data_offsets"]
    shape = tuple(about["shape"])
    if about["dtype"] not in _DTYPES:
        raise ValueError(f"tensor {name!r} is of {about['dtype']}, which numpy lacks")
    dtype = np.dtype(_DTYPES[about["dtype"]]).newbyteorder("<")
    numbers = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
    if not numbers or end > len(values) or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"tensor {name!r} of shape {shape} and {dtype} cannot lie at [{begin}, {end})")
    array: NDArray[Any] = np.frombuffer(bytes(values[begin:end]), dtype).reshape(shape).copy()
    return array


FAMILIES: tuple[tuple[tuple[str, ...], Callable[[str], Encoding], bool], ...] = (
    (("tensors",), lambda _: _Tensors(), False),
)
