"""Which rows are held out: by a hash, so that it never depends on who writes them, or when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

TRAIN, VAL = "train", "val"


@dataclass(frozen=True)
class HeldOut:
    """A share of the rows.

    Attributes:
        share: How large, in (0, 1).
        seed: Chooses other rows.
        key: A column: rows with the same value there stay together, and stay in their split when the source grows. None
            to go by each row's place in the source.
    """

    share: float
    seed: int = 0
    key: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"val_fraction must be a share of the rows, in (0, 1); got {self.share}.")

    def of_rows(self, part: int, row: int, num_rows: int, values: Mapping[str, Any]) -> dict[str, NDArray[np.int64]]:
        """Which rows of a batch go where.

        Args:
            part: The part they are in.
            row: How many rows of the part came before.
            num_rows: Of the batch.
            values: Its columns.
        """
        if self.key is None:
            chosen = mixed(self.seed, part, np.arange(row, row + num_rows, dtype=np.uint64)) < self._below
        else:
            chosen = np.array([self._is_held(value) for value in self._keys(values)])
        return {TRAIN: np.flatnonzero(~chosen), VAL: np.flatnonzero(chosen)}

    def of_sample(self, part: int, row: int, sample: Mapping[str, Any]) -> str:
        """Where one sample goes."""
        if self.key is not None:
            return VAL if self._is_held(self._keys(sample)) else TRAIN
        return VAL if mixed(self.seed, part, np.array([row], np.uint64))[0] < self._below else TRAIN

    @property
    def _below(self) -> np.uint64:
        below: np.uint64 = np.uint64(int(self.share * 2**64))
        return below

    def _keys(self, values: Mapping[str, Any]) -> Any:
        assert self.key is not None
        if self.key not in values:
            raise ValueError(f"group_by names the column {self.key!r}; there are {', '.join(values)}.")
        found = values[self.key]
        return found.tolist() if isinstance(found, np.ndarray) else found

    def _is_held(self, value: Any) -> bool:
        data = bytes(value) if isinstance(value, (bytes, memoryview)) else str(value).encode()
        return xxhash.xxh3_64_intdigest(data, seed=self.seed) < int(self.share * 2**64)


def mixed(seed: int, part: int, rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A random-looking number for each row of a part (the finalizer of splitmix64)."""
    start = xxhash.xxh3_64_intdigest(f"{seed}:{part}".encode())
    with np.errstate(over="ignore"):
        z: NDArray[np.uint64] = np.uint64(start) + (rows + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z
