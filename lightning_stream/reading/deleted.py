"""The samples that versions of the streams have deleted: they stay in their shards, and are never read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache import ShardCache
from lightning_stream.errors import FormatError
from lightning_stream.formats.index import Index
from lightning_stream.order.bitmap import Bitmap


def undeleted_samples(caches: Sequence[ShardCache], indexes: Sequence[Index]) -> Bitmap | None:
    """The samples of all streams that are not deleted, among those in their shards; None if no stream has deleted any.

    Raises:
        NotFoundError, DigestError, FormatError: A file of deleted samples is absent or damaged.
    """
    if all(index.deleted is None for index in indexes):
        return None
    mask = np.ones(sum(index.num_samples for index in indexes), np.bool_)
    begin = 0
    for cache, index in zip(caches, indexes, strict=True):
        mask[begin + deleted_samples(cache, index)] = False
        begin += index.num_samples
    return Bitmap.of_mask(mask)


def deleted_samples(cache: ShardCache, index: Index) -> NDArray[np.int64]:
    """The numbers of a stream's deleted samples, in ascending order: int64[n]."""
    if index.deleted is None:
        return np.empty(0, np.int64)
    deleted = np.fromfile(cache.side_file(index.deleted), "<i8").astype(np.int64, copy=False)
    is_right = len(deleted) == index.num_deleted and (np.diff(deleted, prepend=-1) > 0).all()
    if not is_right or (deleted >= index.num_samples).any():
        raise FormatError(
            f"{cache.store.url}/{index.deleted.basename}: deleted samples must be different numbers below "
            f"{index.num_samples:,}, in ascending order. Restore the file."
        )
    return deleted
