"""What every process of a conversion is told: where to, and how the shards are written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_stream.stores import Store, open_store


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
    def place(self) -> str:
        """Where the dataset stays: the remote of a pair."""
        return str(self.out[-1] if isinstance(self.out, (tuple, list)) else self.out)

    @property
    def options(self) -> Mapping[str, Any] | None:
        """Those for the store at `place`: a local folder has none."""
        return self.store_options if is_remote(self.place) else None

    @property
    def store(self) -> Store:
        """The store at `place`."""
        return open_store(self.place, self.options)

    @property
    def stores(self) -> list[Store]:
        """Every place that gets the files; the one that is kept for good is last."""
        places = list(self.out) if isinstance(self.out, (tuple, list)) else [self.out]
        urls = [os.fspath(place) for place in places]
        urls = urls if self.keep_local or len(urls) == 1 else urls[1:]
        return [open_store(url, self.store_options if is_remote(url) else None) for url in urls]


def is_remote(place: str) -> bool:
    """Whether it is a URL of a store, not a folder."""
    return place.startswith("dbfs:") or ("://" in place and not place.startswith("file://"))
