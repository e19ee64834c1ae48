"""Moving bytes: one ``Store`` protocol over every cloud and every folder, and the files that processes share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Body, ObjectEntry, Store
from .local import LocalStore


def open_store(url: str | Path, options: Mapping[str, Any] | None = None) -> Store:
    """The store of a URL or path. Nothing is connected to before it is used."""
    text = str(url)
    scheme, colon, rest = text.partition("://")
    if not colon:
        return LocalStore(text)
    if scheme == "file":
        return LocalStore("/" + rest.partition("/")[2])
    raise ValueError(f"no store for {scheme}://")


__all__ = ["Body", "LocalStore", "ObjectEntry", "Store", "open_store"]
