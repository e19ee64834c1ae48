"""Opening a shard of any format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_stream.formats.index.schema import ShardEntry
from lightning_stream.formats.mds.shard import MdsShard
from lightning_stream.formats.rows.shard import RowShard
from lightning_stream.formats.shard_base import Shard

__all__ = ["Shard", "open_shard"]


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
    if entry.format == "mds":
        return MdsShard(entry, folder, allow_unsafe_types=allow_unsafe_types, decoders=decoders)
    return RowShard(entry, folder)
