"""Where a writer's files go: a local folder, a remote store, or both."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_stream.errors import NotFoundError
from lightning_stream.formats.index import INDEX_NAME
from lightning_stream.stores import LocalStore, Store, open_store
from lightning_stream.writer.append import Appended
from lightning_stream.writer.config import WriterConfig
from lightning_stream.writer.local_file import write_file


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

    def __init__(self, out: Any, keep_local: bool, store_options: Mapping[str, Any] | None = None) -> None:
        self._options = store_options
        places = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if not 1 <= len(places) <= 2 or not all(isinstance(place, (str, os.PathLike)) for place in places):
            raise ValueError(f"out must be a path, a URL, or (local path, URL); got {out!r}.")
        urls = [os.path.expanduser(place) for place in places]  # noqa: PTH111 - may be URLs
        self.local = next((url for url in urls if not _is_remote(url)), None)
        self.remote = next((url for url in urls[::-1] if len(urls) == 2 or _is_remote(url)), None)
        self.keep_local = keep_local
        self._urls = urls if len(urls) == 1 or keep_local else urls[1:]
        self._stores: list[Store] = []
        self._anew = False
        self._lock = threading.Lock()
        self.put_names: list[str] = []

    @property
    def is_local(self) -> bool:
        """Whether all files go to local folders."""
        return not any(map(_is_remote, self._urls))

    def open(self) -> Store:
        """Open the stores; give the one that is kept for good: the remote of a pair."""
        self._stores = [open_store(url, self._options if _is_remote(url) else None) for url in self._urls]
        return self._stores[-1]

    def prepare(self, config: WriterConfig) -> Appended:
        """Open the stores, and find what is there.

        Raises:
            FileExistsError: A store holds files already, and neither ``exist_ok`` nor ``append`` is set.
            ValueError: There is no dataset to append to.
        """
        store = self.open()
        if config.append:
            self._anew = not config.exist_ok
            try:
                return Appended.to(store.read(INDEX_NAME), f"{store.url}/{INDEX_NAME}")
            except NotFoundError as error:
                raise ValueError(f"append=True needs a dataset; {store.url} has no {INDEX_NAME}.") from error
        for store in () if config.exist_ok else self._stores:
            first = next(iter(store.list("")), None)
            if first is not None:
                raise FileExistsError(
                    f"{store.url} is not empty: it holds {first.name!r}. Write to a new place, or pass exist_ok=True "
                    "to replace files, or append=True to add shards to the dataset."
                )
        return Appended.nothing()

    def put(self, name: str, parts: Sequence[Any], *, anew: bool = False) -> None:
        """Put one file, given in parts, to every store. Thread-safe.

        Raises:
            FileExistsError: With ``anew``, or when appending, a file of that name that no index lists.
        """
        for store in self._stores:
            if anew and self._anew and store.exists(name):
                raise FileExistsError(
                    f"{store.url} holds {name!r}, which its index does not list: another writer is appending, or one "
                    "failed. If none is at work, pass exist_ok=True to replace it."
                )
            if isinstance(store, LocalStore):
                write_file(store.folder / name, parts)
            else:
                store.put(name, b"".join(parts))
        with self._lock:
            self.put_names.append(name)

    def read(self, name: str) -> bytes:
        """A small file, from the place that is kept for good."""
        return self._stores[-1].read(name)

    def __str__(self) -> str:
        return " and ".join(store.url for store in self._stores) or "the writer's folder"


def with_retries(options: Mapping[str, Any] | None, retries: int | None) -> Mapping[str, Any] | None:
    """A store's options, with the number of retries among them unless None."""
    return options if retries is None else {"retries": retries, **(options or {})}


def _is_remote(url: str) -> bool:
    return url.startswith("dbfs:") or ("://" in url and not url.startswith("file://"))
