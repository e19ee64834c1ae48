"""`LocalDataset`: a dataset on this disk as a plain map-style dataset."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import Dataset

from lightning_stream.dataset import StreamingDataset
from lightning_stream.errors import suggesting
from lightning_stream.loading.indexed import IndexedSamples, refuse_overrides


class LocalDataset(IndexedSamples, Dataset[Any]):
    """Random access to a dataset in a local folder: no order, no cache, nothing to resume.

    A subclass may override ``get_item`` or ``__getitem__``.

    Args:
        local: The folder that holds index.json.
        split: Sub-folder of it.
        allow_unsafe_types: Whether to decode the ``pkl`` encoding, which runs code that the data names.

    Example::

        sample = LocalDataset("data/train")[7]
    """

    @suggesting
    def __init__(
        self, local: str | os.PathLike[str], split: str | None = None, allow_unsafe_types: bool = False
    ) -> None:
        refuse_overrides(type(self))
        self.local, self.split = os.fspath(local), split or ""
        dataset = StreamingDataset(local=local, split=split, allow_unsafe_types=allow_unsafe_types)
        self._streaming_source = dataset._streaming_source  # noqa: SLF001 - the same reader

    def __len__(self) -> int:
        return self._streaming_source.snapshot.num_samples

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.local!r}, split={self.split!r})"
