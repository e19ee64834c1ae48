"""Lengths of samples (tokens, bytes, frames), measured while they are written, and the files that hold them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.encodings import plain_values
from lightning_stream.formats.encodings.base import BinaryColumn, describe
from lightning_stream.formats.hashing import digest_parts, hashes_to_write
from lightning_stream.formats.index import FileEntry
from lightning_stream.formats.model import length_file_stem, to_text

if TYPE_CHECKING:
    from .place import Transaction

LengthFunctions: TypeAlias = "Mapping[str, Callable[[Any], int]]"
Lengths: TypeAlias = "dict[str, NDArray[np.uint32]]"  # of some samples, by name
_MAX = (1 << 32) - 1


def check_functions(functions: Any) -> dict[str, Callable[[Any], int]]:
    """Return the ``lengths`` of a writer; TypeError unless they are functions by name. None stands for no lengths."""
    by_name = {} if functions is None else functions
    is_right = isinstance(by_name, Mapping) and all(
        isinstance(name, str) and name and callable(function) for name, function in by_name.items()
    )
    if not is_right:
        raise TypeError(f"lengths must be functions by name, e.g. {{'tokens': len}}; got {describe(functions)}.")
    to_text([*by_name])  # refuses names that no index can hold
    return dict(by_name)


def check_measurable(functions: LengthFunctions, columns: Collection[str]) -> None:
    """Raise ValueError if ``len`` would get a whole sample, since no column has its name: it would count columns."""
    for name, function in functions.items():
        if function is len and name not in columns:
            raise ValueError(
                f"lengths={{{name!r}: len}} needs a column of that name; the columns are {', '.join(columns)}. Name "
                "one of them, or pass a function of the whole sample."
            )


def measure_sample(functions: LengthFunctions, sample: Mapping[str, Any], columns: Collection[str]) -> dict[str, int]:
    """Return the lengths of one sample: each function gets the column of its name, else the whole sample."""
    return {
        name: _measured(name, function, sample[name] if name in columns else sample)
        for name, function in functions.items()
    }


def measure_batch(
    functions: LengthFunctions, batch: Mapping[str, Any], num_rows: int, columns: Collection[str]
) -> Lengths:
    """Return the lengths of a batch's rows: those that `measure_sample` gives for each row."""
    lengths = {}
    for name, function in functions.items():
        if name in columns:
            lengths[name] = _measured_column(name, function, batch[name], num_rows)
        else:
            rows = zip(*map(plain_values, batch.values()), strict=True)
            numbers = (_measured(name, function, dict(zip(batch, row, strict=True))) for row in rows)
            lengths[name] = np.fromiter(numbers, np.uint32, num_rows)
    return lengths


def put_lengths(place: Transaction, lengths: Lengths, hashes: Sequence[str]) -> dict[str, tuple[FileEntry, ...]]:
    """Put a file for each length of new samples, and return their entries.

    Unlike shards, these files always have a hash: nothing else would show that numbers are wrong.
    """
    there = place.base.lengths if place.base is not None and place.mode == "append" else {}
    files = dict[str, tuple[FileEntry, ...]]()
    for name, numbers in lengths.items():
        data = numbers.astype("<u4", copy=False).view(np.uint8).data
        basename = place.name_of(f"{length_file_stem(name)}.{len(there.get(name, ())):05}.bin", [data])
        files[name] = ()
        if len(numbers):
            place.part(basename, [data])
            digests = digest_parts(hashes or hashes_to_write(None), [data])
            files[name] = (FileEntry(basename, len(data), digests, len(numbers)),)
    return files


def _measured(name: str, function: Callable[[Any], int], value: Any) -> int:
    try:
        result = function(value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"lengths[{name!r}] failed for {describe(value)}: {error}") from error
    try:
        length = operator.index(result)
    except TypeError:
        length = -1
    if not 0 <= length <= _MAX:
        raise ValueError(
            f"lengths[{name!r}] must give a whole number from 0 to {_MAX:,}; got {describe(result)} for "
            f"{describe(value)}."
        )
    return length


def _measured_column(name: str, function: Callable[[Any], int], values: Any, num_rows: int) -> NDArray[np.uint32]:
    if function is len:
        if isinstance(values, np.ndarray) and values.ndim > 1:
            return np.full(num_rows, values.shape[1], np.uint32)
        is_bytes = isinstance(values, BinaryColumn) and values.encoding == "bytes"
        try:
            return np.fromiter(map(len, values if is_bytes else plain_values(values)), np.uint32, num_rows)
        except (TypeError, OverflowError):
            pass  # the error below names the value
    return np.fromiter((_measured(name, function, value) for value in plain_values(values)), np.uint32, num_rows)
