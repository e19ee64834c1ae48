"""What every process of a conversion gets: where the dataset goes, and how its shards are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_stream.stores import Store
from lightning_stream.writer.place import DatasetPlace


@dataclass(frozen=True)
class Job:
    """One dataset that is being made.

    Attributes:
        out: Where to, as a writer takes it.
        keep_local: As a writer takes it.
        store_options: As a writer takes it.
        columns: Encoding by column name.
        writer: The writer's other settings.
        fingerprint: What tells this conversion from others.
    """

    out: Any
    keep_local: bool
    store_options: Mapping[str, Any] | None
    columns: Mapping[str, str]
    writer: Mapping[str, Any]
    fingerprint: str

    @property
    def kept_at(self) -> str:
        """Where the dataset stays: the remote of a pair."""
        return str(self.out[-1] if isinstance(self.out, (tuple, list)) else self.out)

    @cached_property
    def place(self) -> DatasetPlace:
        """Where the files go."""
        return DatasetPlace(self.out, self.keep_local, self.store_options)

    @property
    def store(self) -> Store:
        """The store where the dataset stays."""
        return self.place.store
