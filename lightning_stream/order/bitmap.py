"""A set of sample ids in one bit each: small enough for 10^9 samples in every process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arrays import Bools, Integers, Ints, segment_of, starts_of

_WORD = 64
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)  # in each byte


def as_ids(ids: Iterable[int] | Integers, name: str) -> Integers:
    """The ids that a user gave under this name, as an array. Raises TypeError for others, such as a mask."""
    array = ids if isinstance(ids, np.ndarray) else np.array(list(ids))
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} are whole numbers; found {array.dtype} values like {array.ravel()[0]!r}")
    return array


def ids_below(ids: Integers, size: int, name: str) -> Ints:
    """The ids that a user gave under this name, if they are those of so many samples; else ValueError."""
    if (unknown := ids[(ids < 0) | (ids >= size)]).size:
        raise ValueError(
            f"{name} are those of samples, 0 to {size - 1}; found {unknown.size:,} others, e.g. "
            f"{unknown[:3].tolist()}. Check which data they were noted for."
        )
    return ids.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Bitmap:
    """Which of the ids [0, size) are members: 2 bits an id, with the number of members before each 64 ids.

    ``bitmap[i]`` is the i-th smallest member, and `select` finds many (0.5 us each).

    Example::

        long_enough = Bitmap.of_mask(lengths >= 64)
        len(long_enough), long_enough[0], long_enough.select(np.arange(10))
    """

    size: int
    bits: NDArray[np.uint8]  # the lowest bit of a byte is its first id; whole words, with 0 for ids beyond `size`

    @classmethod
    def of_mask(cls, mask: Bools) -> Bitmap:
        """The ids at which a bool array is True."""
        bits = np.packbits(mask, bitorder="little")
        return cls(len(mask), np.pad(bits, (0, (len(mask) // _WORD + 1) * 8 - len(bits))))

    @classmethod
    def of_ids(cls, ids: ArrayLike, size: int) -> Bitmap:
        """A bitmap of these ids. Raises ValueError for one that is repeated, or not in [0, size)."""
        members = np.asarray(ids, np.int64)
        low, high = (members.min(), members.max()) if members.size else (0, -1)
        mask = np.zeros(size, np.bool_)
        if low >= 0 and high < size:
            mask[members] = True
            if mask.sum() == members.size:
                return cls.of_mask(mask)
        raise ValueError(
            f"A subset takes each sample at most once, of ids 0 to {size - 1}, but {members.size} ids were given, "
            f"{len(np.unique(members))} of them different, from {low} to {high}."
        )

    @property
    def mask(self) -> Bools:
        """bool[size]: whether each id is a member."""
        return np.unpackbits(self.bits, count=self.size, bitorder="little").view(np.bool_)

    @cached_property
    def _before(self) -> Ints:
        """int64[num_words + 1]: the members before each word, and all."""
        return starts_of(_ONES[self.bits].reshape(-1, 8).sum(axis=1, dtype=np.int64))

    def __len__(self) -> int:
        return int(self._before[-1])

    def has(self, ids: Ints) -> Bools:
        """Whether each of these ids is a member."""
        are_members: Bools = (self.bits[ids >> 3] >> (ids & 7).astype(np.uint8) & 1).astype(np.bool_)
        return are_members

    def count_before(self, ids: Ints) -> Ints:
        """How many members are less than each of these ids, which are in [0, size]."""
        words, within = np.divmod(ids, _WORD)
        members = self._unpacked(words) & (np.arange(_WORD) < within[:, None])
        counts: Ints = self._before[words] + members.sum(axis=1, dtype=np.int64)
        return counts

    def select(self, indices: Ints) -> Ints:
        """The members of these indices, in [0, len): they count the members in ascending order."""
        words = segment_of(self._before, indices)
        members = self._unpacked(words).cumsum(axis=1, dtype=np.uint8)
        within = (members > (indices - self._before[words])[:, None]).argmax(axis=1)
        ids: Ints = words * _WORD + within
        return ids

    def __getitem__(self, index: int) -> int:
        """As `select`, for one index; a small part of its time, which each read of a single sample takes."""
        word = int(self._before.searchsorted(index, side="right")) - 1
        bits = int.from_bytes(self.bits[8 * word : 8 * word + 8].tobytes(), "little")
        for _ in range(index - int(self._before[word])):
            bits &= bits - 1  # without the lowest member
        return word * _WORD + (bits & -bits).bit_length() - 1

    def _unpacked(self, words: Ints) -> NDArray[np.uint8]:
        return np.unpackbits(self.bits.reshape(-1, 8)[words], axis=1, bitorder="little")
