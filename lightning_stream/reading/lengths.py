"""The lengths of a stream's samples, before any sample is read.

They are in files that the index lists. If there are none, the lengths of the only column of variable size follow from
the offset tables at the beginning of the shards: one range of bytes of each shard. Those of data in another format are
measured when its shards are made: all are read once per machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import ShardCache
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.hashing import digest
from lightning_stream.formats.index import FileEntry, Index, Schema, ShardEntry
from lightning_stream.formats.memory import Int64s, MappedFile
from lightning_stream.formats.model import length_file_stem
from lightning_stream.formats.shard import open_shard
from lightning_stream.reading.partial import offsets_of, read_range, table_bytes
from lightning_stream.reading.stream import DownloadHook
from lightning_stream.sources.in_place import is_made
from lightning_stream.threads import DaemonPool
from lightning_stream.writer.lengths import measure_batch

_THREADS = 16
_ROWS = 1024  # of a shard that are measured at once
Lengths = NDArray[np.uint32]


def read_lengths(caches: Sequence[ShardCache], indexes: Sequence[Index], name: str) -> Lengths:
    """Return the lengths of this name of all streams' samples, one stream after another: uint32[num_samples].

    Raises:
        NotFoundError: A stream has no such lengths, and they do not follow from its shards; names what would help.
        FormatError: They do not fit the index.
    """
    pairs = zip(caches, indexes, strict=True)
    streams = [(cache, index) for cache, index in pairs if index.num_samples]
    problems = [problem for cache, index in streams if (problem := _problem(cache, index, name))]
    if problems:
        known = sorted(set().union(*(index.lengths for _, index in streams)))
        raise NotFoundError(
            f"every stream must have the lengths {name!r}: {'; '.join(problems)}. Add them with `lightning-stream "
            f"convert PATH --lengths {name}`, or write the dataset with lengths={{{name!r}: len}}. Known "
            f"lengths: {', '.join(known) or 'none'}."
        )
    parts = [part for cache, index in streams for part in _of_stream(cache, index, name)]
    lengths = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint32), *parts])
    lengths.setflags(write=False)
    return lengths


def summary(lengths: NDArray[np.integer]) -> dict[str, Any]:
    """Describe the lengths of samples by their sum, mean and maximum."""
    total = int(lengths.sum(dtype=np.uint64))
    return {"sum": total, "mean": total / max(1, len(lengths)), "max": int(lengths.max(initial=0))}


def _of_stream(cache: ShardCache, index: Index, name: str) -> list[Lengths]:
    files: Sequence[FileEntry] | None = index.lengths.get(name)
    if files is not None:
        with DaemonPool(_THREADS, "lengths") as pool:
            return pool.map(lambda file: _mapped(cache.side_file(file), file), files)
    is_free = cache.in_place and not is_made(index)
    is_free = is_free or all(_fixed_length(schema, name) is not None for schema in index.schemas)
    # Without hashes, other shards may have the same index, so a file in the cache could be that of other data.
    if is_free or not (is_made(index) or all(schema.hashes for schema in index.schemas)):
        return [_from_shards(cache, index, name)]
    made_of = index.digest[:16]
    if is_made(index):  # its digest says nothing of the encodings
        made_of = digest("xxh3_64", f"{index.digest} {index.columns[name]}".encode())
    made = FileEntry(f"{length_file_stem(name)}.{made_of}.bin", 4 * index.num_samples, {}, index.num_samples)

    def write(draft: Path) -> None:
        draft.write_bytes(_from_shards(cache, index, name).astype("<u4").tobytes())

    return [_mapped(cache.side_file(made, write), made)]


def _mapped(path: Path, file: FileEntry) -> Lengths:
    return MappedFile(path, file.num_bytes).array.view("<u4")


def _problem(cache: ShardCache, index: Index, name: str) -> str:
    """Return why the lengths of a stream are not known; empty if they are."""
    if name in index.lengths or (is_made(index) and name in index.columns):
        return ""
    return next((f"{cache.store.url} {why}" for schema in index.schemas if (why := _why_not(cache, schema, name))), "")


def _why_not(cache: ShardCache, schema: Schema, name: str) -> str:
    if _fixed_length(schema, name) is not None:
        return ""
    if name not in schema.names:
        return f"has no lengths and no column of this name, but {', '.join(schema.names)}"
    if schema.compression is not None:
        return "has none, and its compressed shards would have to be read whole"
    others = [other for other, size in zip(schema.names, schema.sizes, strict=True) if size is None and other != name]
    encoding = schema.columns[name]
    if schema.format != "mds" or others or _item_bytes(encoding) is None or isinstance(cache.store, DownloadHook):
        return (
            "has none, and they follow from the offsets in its shards only for the one column of variable size, of "
            f"bytes, str or ndarray:<dtype>, in MDS shards of a store that reads ranges; {name!r} is {encoding}"
            + (f" beside {', '.join(others)}" if others else "")
        )
    return ""


def _item_bytes(encoding: str) -> int | None:
    """Return the bytes of an item of a variable column: a byte of bytes and text, an element of an array."""
    if encoding in ("bytes", "str"):
        return 1
    kind, _, dtype = encoding.partition(":")
    return np.dtype(dtype).itemsize if kind == "ndarray" and dtype and ":" not in dtype else None


def _fixed_length(schema: Schema, name: str) -> int | None:
    """Return the length that all arrays of a column have by its encoding; None if there is none."""
    encoding = schema.columns.get(name, "")
    if schema.format != "mds" or not encoding.startswith("ndarray:") or encoding.count(":") != 2:
        return None
    layout = get_encoding(encoding).layout
    return None if layout is None else layout.shape[0]


def _from_shards(cache: ShardCache, index: Index, name: str) -> Lengths:
    with DaemonPool(_THREADS, "lengths") as pool:
        return np.concatenate(pool.map(lambda shard: _of_shard(cache, index.entry(shard), name), range(len(index))))


def _of_shard(cache: ShardCache, entry: ShardEntry, name: str) -> Lengths:
    schema = entry.schema
    if (length := _fixed_length(schema, name)) is not None:
        return np.full(entry.num_samples, length, np.uint32)
    if not entry.num_samples:
        return np.empty(0, np.uint32)
    if entry.raw.origin is not None:
        return _of_made_shard(cache, entry, name)
    try:
        offsets = _fetch_offsets(cache, entry)
    except FormatError:  # one wrong answer is asked for again
        offsets = _fetch_offsets(cache, entry)
    # A sample begins with the size of its only column of variable size; the other columns have fixed sizes.
    num_bytes = np.diff(offsets).astype(np.int64) - 4 - schema.fixed_bytes
    encoding = schema.columns[name]
    lengths = num_bytes
    if encoding.startswith("ndarray"):
        first = int(offsets[0]) + 4 + schema.choose(schema.names[: schema.names.index(name)]).fixed_bytes
        num_dims = read_range(cache, entry, first, first + 1)[0][0] >> 2
        lengths = _num_items(num_bytes, _item_bytes(encoding) or 1) if num_dims == 1 else np.full(1, -1)
    if (lengths < 0).any():
        raise FormatError(
            f"{cache.store.url}/{entry.raw.basename}: the offsets of its samples are not those of {encoding} of one "
            f"dimension, so the lengths {name!r} do not follow from them. Add them: lightning-stream convert PATH "
            f"--lengths {name}."
        )
    return lengths.astype(np.uint32)


def _fetch_offsets(cache: ShardCache, entry: ShardEntry) -> NDArray[np.uint32]:
    table = read_range(cache, entry, 0, table_bytes(entry))[0]
    return offsets_of(table, entry, f"{cache.store.url}/{entry.raw.basename}")


def _of_made_shard(cache: ShardCache, entry: ShardEntry, name: str) -> Lengths:
    """The lengths as `convert` would write them with ``lengths={name: len}``."""
    parts = []
    with cache.lease(entry) as lease, closing(open_shard(entry, lease.folder)) as shard:
        for begin in range(0, entry.num_samples, _ROWS):
            rows = np.arange(begin, min(begin + _ROWS, entry.num_samples))
            columns = {name: shard.columns(rows)[name]}
            parts.append(measure_batch({name: len}, columns, len(rows), (name,))[name])
    return np.concatenate(parts)


def _num_items(num_bytes: Int64s, item_bytes: int) -> Int64s:
    """Return the items of arrays of one dimension, from the bytes of each; -1 if there is no such array.

    Before the items are a byte, and the number of items in 1, 2 or 4 bytes.
    """
    widths = np.where(num_bytes < 2 + (item_bytes << 8), 1, np.where(num_bytes < 3 + (item_bytes << 16), 2, 4))
    items, rest = np.divmod(num_bytes - 1 - widths, item_bytes)
    least = np.select([widths == 2, widths == 4], [1 << 8, 1 << 16])
    return np.where((rest == 0) & (items >= least), items, -1)
