"""Moving bytes: one ``Store`` protocol over every cloud and every folder, and the files that processes share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .base import Body, ObjectEntry, Store, read_options
from .local import LocalStore
from .retry import RetryingStore, RetryPolicy
from .schemes import check_scheme

_POLICY = {field.name for field in fields(RetryPolicy)}


def open_store(url: str | Path, options: Mapping[str, Any] | None = None) -> Store:
    """The store of a URL or path, the same form for reading and writing. Nothing is connected to before it is used.

    ``s3://bucket/folder``, ``gs://bucket/folder``, ``azure://container/folder``,
    ``abfss://container@account.dfs.core.windows.net/folder``, ``dbfs:/Volumes/catalog/schema/volume/folder``,
    ``hf://datasets/org/name@revision``, ``https://host/folder``, ``sftp://user@host/folder``, ``oci://bucket/folder``,
    ``file:///folder``, a plain path, and whatever else fsspec knows.

    Args:
        url: Where the objects are.
        options: Those of the store (:class:`S3Options`, :class:`GcsOptions`, ...; for fsspec, its own), and of
            :class:`RetryPolicy`. What is not given comes from the variables that users of that store already set.

    Raises:
        ValueError: An option that this store does not have, or a URL of no store.
    """
    text = str(url)
    given = dict(options or {})
    check_scheme(text)
    policy = RetryPolicy(**{name: given.pop(name) for name in _POLICY & set(given)})
    if text.startswith("dbfs:"):
        return RetryingStore(
            _databricks("dbfs", text[len("dbfs:") :], {**given, "timeout_s": policy.timeout_s}), policy
        )
    scheme, colon, rest = text.partition("://")
    scheme = scheme.lower() if colon else scheme
    if not colon or scheme == "file":
        if given:
            raise ValueError(f"a local folder has no options; got {', '.join(sorted(given))}")
        return LocalStore("/" + rest.partition("/")[2] if colon else text)
    make = _MAKERS.get(scheme, _fsspec)
    return RetryingStore(make(scheme, rest, {**given, "timeout_s": policy.timeout_s}), policy)


def _s3(_: str, rest: str, options: Mapping[str, Any]) -> Store:
    from .s3 import S3Options, S3Store

    return S3Store(*_split(rest), read_options(S3Options, options, "s3://"))


def _gcs(_: str, rest: str, options: Mapping[str, Any]) -> Store:
    from .gcs import GcsOptions, gcs_store

    return gcs_store(*_split(rest), read_options(GcsOptions, options, "gs://"))


def _azure(scheme: str, rest: str, options: Mapping[str, Any]) -> Store:
    from .azure import AzureOptions, AzureStore

    shown = f"{scheme}://{rest.rstrip('/')}"
    place, prefix = _split(rest)
    container, at, host = place.partition("@")
    found = re.fullmatch(r"([a-z0-9]+)\.(?:dfs|blob)(\..+)", host)
    if at and found is None:
        raise ValueError(f"an ADLS URL is abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER; got {shown}")
    if found is not None:
        options = {"account": found[1], "endpoint_url": f"https://{found[1]}.blob{found[2]}", **options}
    return AzureStore(container, prefix, read_options(AzureOptions, options, f"{scheme}://"), shown)


def _databricks(_: str, path: str, options: Mapping[str, Any]) -> Store:
    from .databricks import DatabricksOptions, DatabricksStore

    return DatabricksStore(path, read_options(DatabricksOptions, options, "dbfs:/"))


def _http(scheme: str, rest: str, options: Mapping[str, Any]) -> Store:
    from .http import HttpOptions, HttpStore

    return HttpStore(f"{scheme}://{rest}", read_options(HttpOptions, options, f"{scheme}://"))


def _hugging_face(_: str, rest: str, options: Mapping[str, Any]) -> Store:
    from .http import HttpOptions, HuggingFaceStore

    return HuggingFaceStore(rest, read_options(HttpOptions, options, "hf://"))


def _fsspec(scheme: str, rest: str, options: Mapping[str, Any]) -> Store:
    from .generic import FsspecStore

    own = {name: value for name, value in options.items() if name != "timeout_s"}
    return FsspecStore(f"{scheme}://{rest}", own, options["timeout_s"])


_MAKERS: dict[str, Callable[[str, str, Mapping[str, Any]], Store]] = {
    **dict.fromkeys(("s3", "s3a", "s3n"), _s3),
    **dict.fromkeys(("gs", "gcs"), _gcs),
    **dict.fromkeys(("azure", "az", "abfs", "abfss"), _azure),
    **dict.fromkeys(("http", "https"), _http),
    "hf": _hugging_face,
}


def _split(rest: str) -> tuple[str, str]:
    place, _, prefix = rest.partition("/")
    if not place:
        raise ValueError(f"a URL names a bucket or container after '://'; got {rest!r}")
    return place, prefix.strip("/")


__all__ = ["Body", "LocalStore", "ObjectEntry", "RetryPolicy", "RetryingStore", "Store", "open_store"]
