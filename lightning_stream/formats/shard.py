"""Opening a shard, and the interface of an open shard of any format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from lightning_stream.formats.mds.layout import Decoders, RecordLayout
from lightning_stream.formats.memory import MappedFile
from lightning_stream.formats.model import Schema, ShardEntry


class Ragged(list[Any]):
    """Values of a column that may have different shapes: arrays of any shape, named tensors, columns with gaps."""


Batch: TypeAlias = "dict[str, NDArray[Any] | list[Any]]"
# Writable memory for columns of fixed size: by name, or new memory of so many bytes (None: there is no more of it).
Buffers: TypeAlias = "Mapping[str, Any] | Callable[[int], Any]"

DECODE_ERRORS = Exception  # also those of a caller's own decoder; `corrupt_error` makes them a `FormatError`


class Mapped(NamedTuple):
    """The samples of a mapped file, to be gathered."""

    layout: RecordLayout
    file: MappedFile
    span: tuple[int, int, int, int]  # addresses of the file, its end and its first sample; number of samples


class Shard(Protocol):
    """An open shard. Reading is thread-safe; its results never refer to the file."""

    schema: Schema
    num_samples: int

    @property
    def mapped(self) -> Mapped | None:
        """The mapped samples, if the format can be gathered in one go; else None."""

    def sample(self, index: int) -> dict[str, Any]:
        """Return one sample; IndexError unless 0 <= index < num_samples, FormatError if it is damaged."""

    def columns(self, indices: NDArray[np.int64]) -> Batch:
        """Return samples as columns: an array (n, *shape) for fixed-size columns, a list of n values for others.

        `indices` is int64[n], each 0 <= index < num_samples, in any order, repeats allowed.
        """

    def close(self) -> None:
        """Release the file. Later reads raise ValueError."""


def corrupt_error(where: str, index: int, column: str, error: BaseException) -> FormatError:
    """Return the error for a value that cannot be decoded. An error about a missing package is raised as it is."""
    if isinstance(error, ImportError):
        raise error
    what = f"cannot be decoded ({type(error).__name__}: {error})"
    return FormatError(f"{where}, sample {index}, column {column!r}: {what}. Fetch the shard again.")


def open_shard(
    entry: ShardEntry,
    folder: Path,
    *,
    allow_unsafe_types: bool = False,
    decoders: Decoders | None = None,
    columns: Collection[str] | None = None,
) -> Shard:
    """Open a shard whose raw files are present below ``folder``, the dataset's local root.

    With ``allow_unsafe_types``, columns are read whose decoding can run code (``pkl``). ``decoders`` has functions from
    bytes, by column name, that replace the column's own decoding (MDS only). ``columns`` are those that are read; None
    for all.

    FormatError if the files do not match the index; ValueError for an encoding that is unknown, or not allowed, or if
    columns are chosen of a format that has to be read whole.
    """
    # imported here, since these modules import this one
    from lightning_stream.formats.mds.shard import MdsShard
    from lightning_stream.formats.rows import RowShard

    if entry.format == "mds":
        return MdsShard(entry, folder, allow_unsafe_types=allow_unsafe_types, decoders=decoders, columns=columns)
    if columns is not None:
        raise ValueError(
            f"columns= takes some columns of MDS shards; {entry.raw.basename} is {entry.format}. Omit columns=, or "
            "convert the dataset."
        )
    return RowShard(entry, folder)
