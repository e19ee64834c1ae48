"""Opening a shard, and what every open shard offers, whatever its format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from lightning_stream.formats.index.schema import Schema, ShardEntry
from lightning_stream.formats.mds.layout import RecordLayout
from lightning_stream.formats.memory import MappedFile


class Ragged(list[Any]):
    """A column's values that need not have one shape, even if those of this batch do.

    Arrays of any shape, named tensors, and columns that only a part of the data has.
    """


Batch: TypeAlias = "dict[str, NDArray[Any] | list[Any]]"
Buffers: TypeAlias = "Mapping[str, Any]"

DECODE_ERRORS = Exception
"""What decoding damaged bytes, or a caller's own decoder, may raise; `corrupt_error` makes a `FormatError` of it."""


class Mapped(NamedTuple):
    """Samples in a mapped file: where `columns.gather` finds them."""

    layout: RecordLayout
    file: MappedFile
    span: tuple[int, int, int, int]  # address of the file, of its end, of the first sample; number of samples


class Shard(Protocol):
    """An open shard. Reading is thread-safe; what it gives never refers to the file."""

    schema: Schema
    num_samples: int
    nbytes: int

    @property
    def mapped(self) -> Mapped | None:
        """Where the samples are mapped, for formats that can be gathered in one go; None for the others."""

    def sample(self, index: int) -> dict[str, Any]:
        """The sample at ``index``, 0 <= index < num_samples.

        Raises:
            IndexError: Out of range.
            FormatError: Its bytes are damaged; says which column.
        """

    def columns(self, indices: NDArray[np.int64], out: Buffers | None = None) -> Batch:
        """Samples as columns: an array (n, *shape) for fixed-size columns, a list of n values for the others.

        Args:
            indices: int64[n], each 0 <= index < num_samples, in any order, repeats allowed.
            out: For fixed-size columns, writable C-contiguous memory of n values, to be filled and given back.
        """

    def close(self) -> None:
        """Release the file. It may be called twice; later reads raise ValueError."""


def corrupt_error(where: str, index: int, column: str, error: BaseException) -> FormatError:
    """The error for one value that cannot be decoded; a missing package is not the data's fault: raised as is."""
    if isinstance(error, ImportError):
        raise error
    return FormatError(
        f"{where}, sample {index}, column {column!r}: cannot be decoded ({type(error).__name__}: {error}). "
        "Fetch the shard again; if it stays so, it was written wrong."
    )


def closed_error(where: str) -> ValueError:
    """The error for reading a shard after `Shard.close`."""
    return ValueError(f"{where}: the shard is closed.")


def open_shard(
    entry: ShardEntry,
    folder: Path,
    *,
    allow_unsafe_types: bool = False,
    decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
) -> Shard:
    """Open a shard whose raw files are present below ``folder``.

    Args:
        entry: The shard, as the index describes it.
        folder: The dataset's local root.
        allow_unsafe_types: Read columns whose decoding can run code (``pkl``).
        decoders: By column name, functions from bytes that replace the column's own decoding (MDS only).

    Raises:
        FormatError: The files are not what the index says.
        ValueError: An encoding that is unknown, or unsafe and not allowed.
    """
    # each format's module imports this one
    from lightning_stream.formats.mds.shard import MdsShard
    from lightning_stream.formats.rows.shard import RowShard

    if entry.format == "mds":
        return MdsShard(entry, folder, allow_unsafe_types=allow_unsafe_types, decoders=decoders)
    return RowShard(entry, folder)
