"""Columns of plain numbers: their layout in memory, and a whole batch of them to bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes2d: TypeAlias = NDArray[np.uint8]
"""uint8[rows, width]: the bytes of one row after another."""


class NumericLayout(NamedTuple):
    """Fixed-size bytes that are numbers in memory: little-endian ``dtype``, and ``shape`` per sample."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


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
