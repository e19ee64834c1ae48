"""Arrays: ``ndarray`` (any dtype and shape), ``ndarray:<dtype>`` and ``ndarray:<dtype>:<d0>,<d1>,...`` (fixed size).

``tensors`` are named arrays in one value, as the bytes of a safetensors file, which cannot hold code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import json
from numpy.typing import NDArray

from lightning_stream.formats.memory import AddressWindow, Int64s

from .base import (
    DTYPES,
    Bytes2d,
    CheckedEncoding,
    Encoding,
    FlatArrays,
    NumericLayout,
    Stored,
    ViewEncoding,
    as_bytes,
    describe,
    is_masked,
    type_name,
)

_CODES = {name: 8 * dtype.itemsize + "uif".index(dtype.kind) for name, dtype in DTYPES.items()}
_OF_CODE = {code: DTYPES[name] for name, code in _CODES.items()}
_MAX_DIMS = 32
# Words of safetensors; tensors lie in the order of these dtypes.
_TENSOR_CODES = {
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64", "float32": "F32", "uint32": "U32",
    "int32": "I32", "float16": "F16", "uint16": "U16", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_TENSOR_DTYPES = {code: np.dtype(name).newbyteorder("<") for name, code in _TENSOR_CODES.items()}
_TENSOR_ORDER = list(_TENSOR_CODES)
_METADATA = "__metadata__"
_SIZE_BYTES = 8  # of the size of the head, to a multiple of which that is filled


class _AnyArray(CheckedEncoding):
    """An array whose shape is stored with every value, and its dtype too unless it is given."""

    ragged = True

    def __init__(self, name: str, dtype: np.dtype[Any] | None = None) -> None:
        super().__init__(name)
        self.dtype = dtype

    def _encode(self, value: Any) -> bytes:
        """Return head and values."""
        array = as_array(value, self.name)
        code = b""
        if self.dtype is not None:
            check_dtype(array, self.dtype, self.name)
        elif array.dtype.name in _CODES:
            code = bytes((_CODES[array.dtype.name],))
        else:
            raise ValueError(f"{self.name} takes arrays of {', '.join(_CODES)}; got dtype {array.dtype}.")
        shape = array.shape
        if not shape or len(shape) > _MAX_DIMS:
            raise ValueError(
                f"{self.name} takes arrays of 1 to {_MAX_DIMS} dimensions; got shape {shape}. Store a number as a "
                "scalar encoding, and an absent value as 'json' or 'bytes'."
            )
        step = [max(shape) >> bits > 0 for bits in (8, 16, 32)].count(True)
        head = code + bytes(((len(shape) << 2) | step,)) + np.array(shape, f"<u{1 << step}").tobytes()
        return head + little_endian(array).tobytes()

    def decode(self, data: Stored) -> NDArray[Any]:
        """Return a new array."""
        dtype, shape, at = self._read_head(data)
        return np.frombuffer(data, dtype, offset=at).reshape(shape).copy() if at < len(data) else np.empty(shape, dtype)

    def encode_many(self, values: Any) -> tuple[Bytes2d, ...] | None:
        """Encode one array of several rows: every row gets the same head."""
        if not isinstance(values, np.ndarray) or values.ndim < 2 or not len(values) or values.dtype == object:
            return None
        first = np.frombuffer(self.encode(values[0]), np.uint8)
        body = as_bytes(little_endian(values))
        head = first[: len(first) - body.shape[1]]
        return np.broadcast_to(head, (len(values), len(head))), body

    def decode_many(self, window: AddressWindow, offsets: Int64s, sizes: int | Int64s) -> list[Any] | None:
        """Decode arrays of one shape at once; None if the shapes differ."""
        if isinstance(sizes, int) or len(offsets) < 2 or not (sizes == sizes[0]).all():
            return None
        width = int(sizes[0])
        begin = int(offsets[0])
        dtype, shape, head = self._read_head(window.view[begin : begin + width])
        heads = window.take(offsets, head)
        if head == width or not (heads == heads[0]).all():
            return None
        return list(window.take_as(dtype, offsets + head, width - head).reshape(len(offsets), *shape))

    def flat_arrays(self, window: AddressWindow, offsets: Int64s, sizes: int | Int64s) -> FlatArrays | None:
        """Read the heads, all that are alike at once."""
        dtype = self.dtype
        at = offsets
        if dtype is None:
            codes = window.take(at, 1)[:, 0]
            dtype = _OF_CODE.get(int(codes[0]))
            at = at + 1
            if (codes != codes[0]).any():
                return None
        kinds = window.take(at, 1)[:, 0]
        begins = np.empty_like(at)
        counts = np.empty_like(at)
        for kind in np.unique(kinds).tolist():
            here = np.flatnonzero(kinds == kind)
            width = 1 << (kind & 3)
            if kind >> 2 != 1:
                return None
            counts[here] = window.take(at[here] + 1, width).view(f"<u{width}")[:, 0]
            begins[here] = at[here] + 1 + width
        fits = dtype is not None and (begins - offsets + counts * dtype.itemsize == sizes).all()
        return FlatArrays(dtype, begins, counts) if dtype is not None and fits else None

    def _read_head(self, data: Stored) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Return dtype, shape, and where the values begin; ValueError if they do not fit the bytes."""
        dtype = self.dtype
        at = 0
        if dtype is None:
            dtype = _OF_CODE.get(data[0]) if len(data) else None
            at = 1
            if dtype is None:
                raise ValueError(f"unknown dtype code {bytes(data[:1])!r} of an array")
        if len(data) <= at:
            raise ValueError("an array's shape is missing")
        num_dims = data[at] >> 2
        width = 1 << (data[at] & 3)
        begin = at + 1
        at = at + 1 + num_dims * width
        if num_dims > _MAX_DIMS or len(data) < at:
            raise ValueError(f"an array of {num_dims} dimensions does not fit its {len(data)} bytes")
        shape = tuple(int.from_bytes(data[k : k + width], "little") for k in range(begin, at, width))
        if math.prod(shape) * dtype.itemsize != len(data) - at:
            raise ValueError(f"an array of shape {shape} and {dtype} cannot take {len(data) - at} bytes")
        return dtype, shape, at


class _FixedArray(ViewEncoding):
    """An array of one dtype and shape: only its values are stored."""

    def __init__(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        super().__init__(name)
        self.layout: NumericLayout = NumericLayout(dtype, shape)
        self.size = math.prod(shape) * dtype.itemsize

    def encode(self, value: Any) -> bytes:
        if type(value) is not np.ndarray or value.dtype != self.layout.dtype:
            value = as_array(value, self.name)
            check_dtype(value, self.layout.dtype, self.name)
            value = little_endian(value)
        if value.shape != self.layout.shape:
            raise ValueError(f"{self.name} takes shape {self.layout.shape}; got shape {value.shape}.")
        data: bytes = value.tobytes()
        return data

    def decode(self, data: Stored) -> NDArray[Any]:
        values: NDArray[Any] = np.frombuffer(data, self.layout.dtype).reshape(self.layout.shape).copy()
        return values

    def flat_arrays(self, window: AddressWindow, offsets: Int64s, sizes: int | Int64s) -> FlatArrays | None:  # noqa: ARG002
        """All have the same length."""
        dtype, shape = self.layout
        return FlatArrays(dtype, offsets, np.full_like(offsets, shape[0])) if len(shape) == 1 else None


class _Tensors(CheckedEncoding):
    """A dict of arrays, of any shape, 0-d and empty ones included."""

    ragged = True

    def _encode(self, value: Any) -> bytes:
        if not isinstance(value, Mapping) or any(not isinstance(name, str) or name == _METADATA for name in value):
            raise TypeError(f"tensors takes a dict of names and arrays; got {describe(value)}.")
        arrays = {name: as_array(entry, "tensors") for name, entry in value.items()}
        for name, array in arrays.items():
            if array.dtype.name not in _TENSOR_CODES:
                known = ", ".join(_TENSOR_CODES)
                raise ValueError(f"tensors takes arrays of {known}; {name!r} is of {array.dtype}.")
        head: dict[str, Any] = {}
        parts: list[bytes] = []
        at = 0
        for name in sorted(arrays, key=lambda name: (_TENSOR_ORDER.index(arrays[name].dtype.name), name)):
            array = arrays[name]
            parts.append(little_endian(array).tobytes())
            end = at + len(parts[-1])
            head[name] = {
                "dtype": _TENSOR_CODES[array.dtype.name],
                "shape": array.shape,
                "data_offsets": (at, end),
            }
            at = end
        table = json.encode(head)
        table += b" " * (-len(table) % _SIZE_BYTES)
        return b"".join([len(table).to_bytes(_SIZE_BYTES, "little"), table, *parts])

    def decode(self, data: Stored) -> dict[str, NDArray[Any]]:
        begin = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "little")
        if begin > len(data):
            raise ValueError(f"a head of {begin - _SIZE_BYTES:,} bytes does not fit {len(data):,}")
        head = json.decode(data[_SIZE_BYTES:begin])
        head.pop(_METADATA, None)
        tensors: dict[str, NDArray[Any]] = {}
        at = 0
        for name, entry in sorted(head.items(), key=lambda item: item[1]["data_offsets"]):
            dtype = _TENSOR_DTYPES[entry["dtype"]]
            shape = entry["shape"]
            count = math.prod(shape)
            end = at + count * dtype.itemsize
            if entry["data_offsets"] != [at, end] or min(shape, default=0) < 0:
                raise ValueError(f"{name!r} of shape {shape} and {dtype} cannot lie at {entry['data_offsets']}")
            tensors[name] = np.frombuffer(data[begin + at : begin + end], dtype).reshape(shape).copy()
            at = end
        if begin + at != len(data):
            raise ValueError(f"tensors of {at:,} bytes do not fill {len(data) - begin:,}")
        return tensors


def as_array(value: Any, name: str) -> NDArray[Any]:
    """Return a numpy array from one, or from what offers ``__array__``, such as tensors on any device, with gradients.

    TypeError if it is neither, or if numpy lacks its type of numbers.
    """
    if isinstance(value, np.ndarray):
        if is_masked(value):
            raise ValueError(f"{name} takes arrays without masked values. Fill them before writing.")
        return value
    if not hasattr(value, "__array__"):
        raise TypeError(f"{name} takes a numpy array, or what offers __array__; got {describe(value)}.")
    if hasattr(value, "detach"):  # a torch tensor: numpy takes only those without gradients in main memory
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except (TypeError, RuntimeError) as error:
        dtype = getattr(value, "dtype", "?")
        raise TypeError(f"{name} takes numbers of numpy; got {type_name(value)} of {dtype}. Convert it.") from error


def check_dtype(array: NDArray[Any], dtype: np.dtype[Any], name: str) -> None:
    """Raise ValueError unless the array has this dtype, in either byte order."""
    if array.dtype.newbyteorder("<") != dtype:
        raise ValueError(f"{name} takes dtype {dtype.name}; got dtype {array.dtype}. Convert it with astype().")


def little_endian(array: NDArray[Any]) -> NDArray[Any]:
    """Return the same numbers in little-endian memory."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def make_ndarray(name: str) -> Encoding:
    """Return the encoding of ``ndarray``, ``ndarray:<dtype>`` or ``ndarray:<dtype>:<shape>``; ValueError for others."""
    _, *rest = name.split(":")
    if not rest:
        return _AnyArray(name)
    if rest[0] not in _CODES or len(rest) > 2:
        raise ValueError(f"ndarray takes ndarray:<dtype>:<d0>,<d1>,... of {', '.join(_CODES)}; got {name!r}.")
    dtype = DTYPES[rest[0]]
    if len(rest) == 1:
        return _AnyArray(name, dtype)
    dims = rest[1].split(",")
    if not all(dim.isdecimal() and int(dim) >= 1 for dim in dims) or len(dims) > _MAX_DIMS:
        raise ValueError(f"a fixed shape must be numbers of at least 1, with commas between; got {name!r}.")
    shape = tuple(int(dim) for dim in dims)
    if math.prod(shape) * dtype.itemsize >= 1 << 32:
        raise ValueError(f"one sample must stay under 4 GiB; got {name!r}.")
    return _FixedArray(name, dtype, shape)


ENCODINGS = {"ndarray": make_ndarray, "tensors": _Tensors}
