"""`LocalDataset`: a dataset on this disk as a plain map-style dataset."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import Dataset

from lightning_stream.dataset import StreamingDataset


class LocalDataset(Dataset[Any]):
    """Random access to a dataset in a local folder: no order, no cache, nothing to resume.

    Args:
        local: The folder that holds index.json.
        split: Sub-folder of it.
        allow_unsafe_types: Whether to decode the ``pkl`` encoding, which runs code that the data names.
    """

    def __init__(
        self, local: str | os.PathLike[str], split: str | None = None, allow_unsafe_types: bool = False
    ) -> None:
        self._dataset = StreamingDataset(local=local, split=split, allow_unsafe_types=allow_unsafe_types)

    @property
    def size(self) -> int:
        """Samples in all shards."""
        return self._dataset.size

    def __len__(self) -> int:
        return self._dataset.size

    def __getitem__(self, index: Any) -> Any:
        """One sample for an int (negative ones from the end), a list for a slice, list or array."""
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self._dataset[index] for index in indices]
