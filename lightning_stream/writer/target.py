"""Where a writer's files go: a local folder, a remote store, or both."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from lightning_stream.formats.index import INDEX_NAME
from lightning_stream.storage import Store, open_store


class Target:
    """One or two stores that get the same files.

    Args:
        out: A path or URL, or (local path, URL). Of a pair, the local folder is only written with ``keep_local``:
            shards go from memory to the remote store.
        keep_local: Keep the local copies of a pair.
        store_options: For the remote store, e.g. ``endpoint_url``.

    Raises:
        ValueError: Not a path, a URL, or a pair of both.
    """

    def __init__(self, out: Any, keep_local: bool, store_options: Mapping[str, Any] | None) -> None:
        self._options = store_options
        places = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if not 1 <= len(places) <= 2 or not all(isinstance(place, (str, os.PathLike)) for place in places):
            raise ValueError(f"out must be a path, a URL, or (local path, URL); got {out!r}.")
        urls = [os.fspath(place) for place in places]
        self._urls = urls if len(urls) == 1 or keep_local else urls[1:]
        self._stores: list[Store] = []
        self._lock = threading.Lock()
        self.put_names: list[str] = []

    def prepare(self, exist_ok: bool) -> None:
        """Open the stores.

        Raises:
            FileExistsError: One holds files already, and ``exist_ok`` is False.
        """
        self._stores = [open_store(url, self._options if "://" in url else None) for url in self._urls]
        for store in self._stores:
            first = None if exist_ok else next(iter(store.list("")), None)
            if first is not None:
                raise FileExistsError(
                    f"{store.url} is not empty: it holds {first.name!r}. Write to a new place, or pass exist_ok=True."
                )

    def put(self, name: str, data: bytes) -> None:
        """Put one file to every store. Thread-safe."""
        for store in self._stores:
            store.put(name, data)
        with self._lock:
            self.put_names.append(name)

    def read(self, name: str) -> bytes:
        """A small file, from the place that is kept for good: the remote of a pair."""
        return self._stores[-1].read(name)

    def exists(self, name: str = INDEX_NAME) -> bool:
        """Whether that place has the file."""
        return self._stores[-1].exists(name)

    def __str__(self) -> str:
        return " and ".join(store.url for store in self._stores) or "the writer's folder"
