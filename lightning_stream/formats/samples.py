"""What samples and batches are in memory, and the error for bytes that are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from numpy.typing import NDArray

from lightning_stream.errors import FormatError


class Ragged(list[Any]):
    """Values of a column that may have different shapes: arrays of any shape, named tensors, columns with gaps."""


Batch: TypeAlias = "dict[str, NDArray[Any] | list[Any]]"
# Writable memory for columns of fixed size: by name, or new memory of so many bytes (None: there is no more of it).
Buffers: TypeAlias = "Mapping[str, Any] | Callable[[int], Any]"

DECODE_ERRORS = Exception  # also those of a caller's own decoder; `corrupt_error` makes them a `FormatError`


def corrupt_error(where: str, index: int, column: str, error: BaseException) -> FormatError:
    """Return the error for a value that cannot be decoded. An error about a missing package is raised as it is."""
    if isinstance(error, ImportError):
        raise error
    what = f"cannot be decoded ({type(error).__name__}: {error})"
    return FormatError(f"{where}, sample {index}, column {column!r}: {what}. Fetch the shard again.")
