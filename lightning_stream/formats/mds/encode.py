"""Samples and batches to MDS shards."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_stream.formats.encodings import Encoding, get_encoding, plain_values
from lightning_stream.formats.encodings.base import BinaryColumn, EncodedColumn
from lightning_stream.formats.hashing import digest_parts
from lightning_stream.formats.model import MAX_FILE_BYTES, Schema, to_text
from lightning_stream.formats.shard_encoder import EncodedBatch, check_columns, column_error, offset_table

from .layout import encodings_of

_SMALL_BYTES = 1 << 10
_DIGEST_BYTES = 8
_READ_BYTES = 1 << 18


class MdsEncoder:
    """Samples to the one file of an MDS shard; see `ShardEncoder`. Columns are stored sorted by name."""

    per_sample_overhead = 4

    def __init__(
        self,
        columns: Mapping[str, str],
        compression: str | None = None,
        hashes: tuple[str, ...] = (),
        size_limit: int | None = None,
    ) -> None:
        check_columns(columns)
        names, encodings = zip(*sorted(columns.items()), strict=True)
        sizes = tuple(get_encoding(encoding).size for encoding in encodings)
        schema = Schema("mds", names, encodings, sizes, compression, hashes, size_limit)
        self._set(schema, to_text(schema))

    @classmethod
    def of_rows(cls, schema: Schema, config: bytes) -> Self:
        """Return what encodes rows of a row format, with any bytes in place of the shard's configuration."""
        encoder = cls.__new__(cls)
        encoder._set(schema, config)  # noqa: SLF001 - of this class
        return encoder

    def _set(self, schema: Schema, config: bytes) -> None:
        self.schema = schema
        self._config = config
        self._encodings = encodings_of(schema)
        self.header_bytes = 8 + len(config)
        self._steps: list[tuple[str, str, Any, Callable[[Any], bytes], int | None]] = [
            (name, kind, encoding.stored_type, encoding.encode, encoding.size)
            for name, kind, encoding in zip(schema.names, schema.encodings, self._encodings, strict=True)
        ]
        num_variable = sum(encoding.size is None for encoding in self._encodings)
        self._pack_head = struct.Struct(f"<{num_variable}I").pack if num_variable else None

    def encode(self, sample: Mapping[str, Any]) -> list[bytes]:
        parts: list[bytes] = []
        sizes: list[int] = []
        name = encoding = ""
        try:
            for name, encoding, stored, encode, size in self._steps:
                value = sample[name]
                data = value if type(value) is stored else encode(value)
                if type(data) is not bytes:
                    data = _as_bytes(data)
                if size is None:
                    sizes.append(len(data))
                elif len(data) != size:
                    raise ValueError(f"{encoding} takes {size} bytes; got {len(data)} bytes.")
                parts.append(data)
        except Exception as error:
            raise column_error(name, encoding, sample, error) from error
        if self._pack_head is None:
            return parts
        try:
            parts.insert(0, self._pack_head(*sizes))
        except struct.error as error:
            raise ValueError(f"a value must stay under 4 GiB; the sample's sizes are {sizes}.") from error
        return parts

    def encode_batch(self, columns: dict[str, Any], num_rows: int) -> EncodedBatch:
        encoded: list[EncodedColumn] = []
        sizes = np.zeros(num_rows, np.int64)
        heads: list[NDArray[np.int64]] = []
        for name, kind, encoding in zip(self.schema.names, self.schema.encodings, self._encodings, strict=True):
            try:
                blocks = _encode_column(encoding, kind, columns[name], num_rows)
            except (KeyError, TypeError, ValueError) as error:
                raise column_error(name, kind, columns, error) from error
            encoded += blocks
            lengths = _lengths(blocks, num_rows)
            sizes += lengths
            if encoding.size is None:
                heads.append(lengths)
        if any((lengths >= 1 << 32).any() for lengths in heads):
            raise ValueError("a value must stay under 4 GiB.")
        if heads:
            head = np.array(heads).T.astype("<u4", order="C").view(np.uint8).reshape(num_rows, -1)
            return EncodedBatch(sizes + head.shape[1], [head, *encoded])
        return EncodedBatch(sizes, encoded)

    def files(
        self, sizes: Sequence[int] | NDArray[Any], parts: Sequence[Any], gap_bytes: int = 0
    ) -> tuple[tuple[str, list[Any]], ...]:
        """Return the shard's file; see `ShardEncoder.files`. The first sample begins after a gap."""
        table = offset_table(sizes, self.header_bytes + 4 * len(sizes) + gap_bytes)
        return (("data", [table, self._config, *parts]),)


class ShardDraft:
    """An MDS shard that is written batch by batch, with a digest of its bytes before its first sample.

    Its number of samples is known before; so the samples can be written before their offsets, and need no memory.
    """

    def __init__(self, encoder: MdsEncoder, num_samples: int, path: Path) -> None:
        self._encoder = encoder
        self._first = encoder.header_bytes + 4 * num_samples + _DIGEST_BYTES
        self._sizes = [np.empty(0, np.int64)]
        self._digest = xxhash.xxh3_64()
        self._out = path.open("wb")
        self._out.seek(self._first)

    @property
    def num_samples(self) -> int:
        """The number of samples that were added."""
        return sum(map(len, self._sizes))

    def add(self, columns: dict[str, Any], num_rows: int) -> None:
        """Encode and write some samples; TypeError or ValueError for values that cannot be encoded."""
        encoded = self._encoder.encode_batch(columns, num_rows)
        self._sizes.append(encoded.sizes)
        for chunk in encoded.chunks():
            self._digest.update(chunk)
            self._out.write(chunk)

    def finish(self) -> None:
        """Write the head; ValueError if the shard is too large for its offsets."""
        sizes = np.concatenate(self._sizes)
        if int(sizes.sum()) + self._first > MAX_FILE_BYTES:
            raise ValueError(f"a shard must stay under 4 GiB; found {int(sizes.sum()):,} bytes of samples.")
        (_, (table, config)), *_ = self._encoder.files(sizes, (), _DIGEST_BYTES)
        self._digest.update(table + config)
        self._out.seek(0)
        self._out.write(table + config + self._digest.digest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._out.close()


def is_intact(path: Path) -> bool:
    """Return whether the bytes of a shard that a `ShardDraft` wrote are those of its digest."""
    with path.open("rb", buffering=0) as file:
        count = int.from_bytes(file.read(4), "little")
        at = int.from_bytes(file.read(4), "little") - _DIGEST_BYTES
        if at < 8 + 4 * count or at > path.stat().st_size:
            return False
        file.seek(0)
        head = file.read(at)
        wanted = file.read(_DIGEST_BYTES)
        parts = chain(iter(lambda: file.read(_READ_BYTES), b""), [head])
        return digest_parts(["xxh3_64"], parts)["xxh3_64"] == wanted.hex()


def is_made_from(path: Path, stamp: str) -> bool:
    """Return whether a shard that a `ShardDraft` wrote has this text at the end of its configuration."""
    with path.open("rb", buffering=0) as file:
        first = int.from_bytes(file.read(8)[4:], "little")
        file.seek(max(0, first - _DIGEST_BYTES - len(stamp)))
        return file.read(len(stamp)) == stamp.encode()


def _encode_column(encoding: Encoding, name: str, values: Any, num_rows: int) -> list[EncodedColumn]:
    """Encode a batch's values of one column: blocks side by side, or one list of values of any size."""
    stored = encoding.stored_type
    encode = encoding.encode
    size = encoding.size
    if isinstance(values, BinaryColumn):
        if values.encoding == name or (values.encoding == "bytes" and stored is bytes):
            return [_blocks_if_fixed(values, size, name)]
        values = plain_values(values)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "USOV":
        dtype = values.dtype
        if stored is bytes and dtype.kind == "V" and dtype.names is None and size in (None, dtype.itemsize):
            return [values.reshape(-1, 1).view(np.uint8)]  # bytes of one size
        values = values.tolist()
    column = encoding.encode_many(values)
    if column is None:
        column = [_as_bytes(value if type(value) is stored else encode(value)) for value in values]
    if isinstance(column, list) and len(column) == num_rows:
        return [_blocks_if_fixed(column, size, name)]
    blocks: list[Any] = list(column) if isinstance(column, tuple) else [column]
    is_right = all(
        isinstance(block, np.ndarray) and block.dtype == np.uint8 and block.ndim == 2 and len(block) == num_rows
        for block in blocks
    )
    if not is_right or size not in (None, sum(block.shape[1] for block in blocks)):
        raise ValueError(f"{name}: encode_many must give {num_rows} values of its size: uint8[rows, width], or a list.")
    return blocks


def _as_bytes(data: Any) -> bytes:
    """Return the result of an encoding as bytes: the length of an array is not its number of bytes."""
    if type(data) is bytes:
        return data
    try:
        return bytes(memoryview(data))
    except TypeError as error:
        raise TypeError(f"encode must give bytes; it gave {type(data).__name__}.") from error


def _blocks_if_fixed(values: Sequence[Any], size: int | None, name: str) -> EncodedColumn:
    """Values of one size as a block, if that is the encoding's or copying them costs little; others as they are."""
    sizes = {*map(len, values)}
    if size is None and (len(sizes) != 1 or not 0 < max(sizes) <= _SMALL_BYTES):
        return values
    if size is not None and (wrong := sizes - {size}):
        raise ValueError(f"{name} takes {size} bytes; got {min(wrong)} bytes.")
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), max(sizes, default=0))


def _lengths(blocks: list[EncodedColumn], num_rows: int) -> NDArray[np.int64]:
    """Return the bytes of each value of a column."""
    lengths = np.zeros(num_rows, np.int64)
    for block in blocks:
        lengths += block.shape[1] if isinstance(block, np.ndarray) else np.fromiter(map(len, block), np.int64, num_rows)
    return lengths
