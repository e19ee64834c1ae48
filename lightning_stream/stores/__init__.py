"""Moving bytes: one :class:`Store` protocol over every cloud and every folder."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import fields
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lightning_stream.errors import redact

from .base import BaseStore, ObjectEntry, Store, StoreTraits
from .credentials import Credentials, asked
from .local import LocalStore
from .retry import RetryingStore, RetryPolicy
from .transfer import ObjectStream, Options, by_word, option_of, shown_url

_POLICY = {field.name for field in fields(RetryPolicy)}
ENTRY_POINTS = "lightning_stream.stores"  # other packages name their stores in this group
_STORES = by_word({
    "local:LocalStore": "file",
    "s3:S3Store": "s3 s3a s3n",
    "gcs:GcsStore": "gs gcs",
    "azure:AzureStore": "azure az abfs abfss azure-dl",
    "http:HttpStore": "http https",
    "http:HuggingFaceStore": "hf",
    "unity:UnityStore": "uc dbfs",
})  # fmt: skip
_SHAPES = by_word({
    "://BUCKET/FOLDER": "s3 gs azure abfss oci",
    "://HOST/FOLDER": "http https sftp",
    "://datasets/ORG/NAME": "hf",
    ":///FOLDER": "file",
    "://CATALOG.SCHEMA.TABLE": "uc",
    ":/Volumes/CATALOG/SCHEMA/VOLUME/FOLDER": "dbfs",
})  # fmt: skip


def open_store(url: str | Path, options: Options | None = None) -> Store:
    """Make the store of a URL or path, to read or write. Its first use connects to it.

    ``s3://bucket/folder``, ``gs://bucket/folder``, ``azure://container/folder``,
    ``abfss://container@account.dfs.core.windows.net/folder``,
    ``azure://account.blob.core.windows.net/container/folder``, ``uc://catalog.schema.table``,
    ``uc://catalog/schema/volume/folder``, ``dbfs:/Volumes/catalog/schema/volume/folder``,
    ``hf://datasets/org/name@revision``, ``https://host/folder``, ``sftp://user@host/folder``, ``oci://bucket/folder``,
    ``file:///folder``, a plain path, the schemes of an installed package in the entry-point group
    ``lightning_stream.stores`` (``scheme = "module:Class"``, a :class:`BaseStore`), and all others that fsspec knows.

    Example::

        store = open_store("s3://bucket/train", {"endpoint_url": "https://minio:9000", "retries": 10})
        [entry.name for entry in store.list("shard.")]  # ["shard.00000.mds", ...]

    Args:
        url: The folder of the objects.
        options: Those of the store (`S3Options`, `GcsOptions`, ...; for fsspec, its own), and of :class:`RetryPolicy`.
            The others come from the variables that users of that store already set. And ``credentials``, a function
            that returns keys that end, or its name; else as the variable ``LIGHTNING_STREAM_CREDENTIALS`` names it.

    Raises:
        ValueError: The store does not have such an option, or there is no store for the URL.
    """
    text = str(url)
    store_options = dict(options or {})
    policy = RetryPolicy(**{name: store_options.pop(name) for name in _POLICY & set(store_options)})
    scheme = "dbfs" if text.startswith("dbfs:") else _scheme(text)
    if scheme is None or scheme == "file":
        return LocalStore.from_url(text, store_options)
    ask = asked(store_options.pop("credentials", None), text)
    store = _store_class(scheme, text).from_url(text, {**store_options, "timeout_s": policy.timeout_s})
    if ask is not None:
        store.credentials = Credentials(ask, store.url, store.key_names)
    return RetryingStore(store, policy)


def is_remote(url: str) -> bool:
    """Whether this is the URL of a store, and not a folder."""
    return url.startswith("dbfs:") or ("://" in url and not url.startswith("file://"))


def absolute(place: Any) -> Any:
    """The folder or URL, or each of a pair, as it means the same in every process: the working folder may be another.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(place, (tuple, list)):
        return tuple(map(absolute, place))
    if not place or not isinstance(place, (str, os.PathLike)):
        raise ValueError(f"out must name a folder or a URL; got {place!r}. Pass one.")
    url = os.fspath(place)
    if is_remote(url):
        return url.rstrip("/")
    _scheme(url)  # refuses a mistyped URL: it would be a local folder
    return str(LocalStore.from_url(url, {}).folder)


def _scheme(url: str) -> str | None:
    """Return the scheme of a URL; None for a path. ValueError for a mistyped URL that is no path of a file."""
    scheme, colon, _ = url.partition("://")
    if colon and "/" not in scheme:
        return scheme if "::" in scheme else scheme.lower()
    mistyped = re.match(r"([A-Za-z][A-Za-z0-9+]+)(?::/?(?!/)|//)", url)
    if mistyped and not Path(url).exists() and (meant := _meant(mistyped[1])):
        raise ValueError(f"this is no path of a file that exists, and no URL: {redact(url)!r}.{meant}")
    return None


def _store_class(scheme: str, url: str) -> type[BaseStore]:
    chosen: type[BaseStore]
    # To look through what is installed takes 15 ms of each start.
    for point in entry_points(group=ENTRY_POINTS, name=scheme) if scheme not in _STORES else ():
        chosen = point.load()
        return chosen
    module, _, name = _STORES.get(scheme, "generic:FsspecStore").partition(":")
    if module == "generic":
        from .generic import known_schemes

        if "::" not in scheme and scheme not in known_schemes() and scheme not in _SHAPES:
            raise ValueError(
                f"no store is known for {scheme}://; known are {', '.join(f'{known}://' for known in _SHAPES)}, a "
                f"plain path, and the schemes of fsspec.{_meant(scheme)} Got {redact(url)!r}."
            )
    chosen = getattr(import_module(f".{module}", __name__), name)
    return chosen


def _meant(scheme: str) -> str:
    near = difflib.get_close_matches(scheme.lower(), _SHAPES, 1, 0.5)
    return f" Did you mean {near[0]}{_SHAPES[near[0]]}?" if near else ""


__all__ = [
    "BaseStore", "LocalStore", "ObjectEntry", "ObjectStream", "Options", "RetryPolicy", "RetryingStore", "Store",
    "StoreTraits", "is_remote", "open_store", "option_of", "shown_url",
]  # fmt: skip
