"""Unity Catalog: tables and volumes where they are stored, with the keys that the catalog hands out for them."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_stream.errors import AccessError, NotFoundError, StoreError, UnavailableError, redact
from lightning_stream.threads import Lock

from .base import AnswerError, ListingPage, Store, StoreTraits
from .credentials import SharedFolder
from .databricks import DatabricksOptions, DatabricksStore
from .transfer import ObjectStream, Options, PerProcess, read_options, refuse_query, shown_url

_API = "/api/2.1/unity-catalog/"
_TABLE = re.compile(r"uc://([^/.]+\.[^/.]+\.[^/.]+)(?:/(.*))?")
_VOLUME = re.compile(r"(uc://|dbfs:/*Volumes/)([^/.]+/[^/.]+/[^/]+)(?:/(.*))?")
_FORMATS = ("DELTA", "PARQUET")
_STORED = re.compile(r"(s3[an]?|gs|abfss?)://.+|(file:.*)?/.+")
_OPERATIONS = {"table": ("READ", "READ_WRITE"), "volume": ("READ_VOLUME", "WRITE_VOLUME")}
_log = logging.getLogger("lightning_stream.stores")


@dataclass(frozen=True, repr=False)  # some of them are secrets
class UnityOptions(DatabricksOptions):
    """Options for ``uc://`` and ``dbfs:/Volumes/``; the others come from ``DATABRICKS_*`` or ``~/.databrickscfg``.

    Attributes:
        host, token, profile, timeout_s: Of the catalog: a workspace of Databricks, or another server.
        storage: Options of the store in which the files are, e.g. ``{"endpoint_url": ...}``.
    """

    storage: Options = field(default_factory=dict)


class UnityStore(Store):
    """The files of a table or volume, in the storage that the catalog names, or by the Files interface of Databricks.

    That is the fallback of volumes, where the catalog hands out no keys. Its first use asks the catalog.
    """

    key_names = DatabricksStore.key_names

    def __init__(self, url: str, kind: str, name: str, path: str, options: UnityOptions) -> None:
        self.url = url.rstrip("/")
        self._kind = kind
        self._name = name
        self._path = path.strip("/")
        self._options = options
        self._catalog = _Catalog(self.url, kind, name, options)
        self._files: DatabricksStore | None = None
        if kind == "volume":
            self._files = DatabricksStore(f"/Volumes/{name.replace('.', '/', 2)}/{self._path}", options)
            self._files.url = self.url
        self._is_dbfs = url.startswith("dbfs:")
        self._folder: SharedFolder | None = None
        self._stores: dict[bool, Store] = {}  # to read, and to write
        self._finding = PerProcess(Lock)

    @classmethod
    def from_url(cls, url: str, options: Options) -> UnityStore:
        """Make the store of a URL; ValueError for an incomplete URL, or an option that this store does not have."""
        refuse_query(url)
        settings = read_options(UnityOptions, options, f"{url.partition(':')[0]}:/")
        if match := _TABLE.fullmatch(url):
            return cls(url, "table", match[1], match[2] or "", settings)
        if match := _VOLUME.fullmatch(url):
            path = match[3] or ""
            shown = f"dbfs:/Volumes/{match[2]}/{path}" if match[1].startswith("dbfs:") else url
            return cls(shown, "volume", match[2].replace("/", "."), path, settings)
        raise ValueError(
            "the URL of a table is uc://CATALOG.SCHEMA.TABLE, that of a volume uc://CATALOG/SCHEMA/VOLUME/FOLDER or "
            f"dbfs:/Volumes/CATALOG/SCHEMA/VOLUME/FOLDER; got {redact(url)!r}. Move files of the old DBFS to a volume; "
            "in a workspace, DBFS is the folder /dbfs, too."
        )

    @property
    def identity(self) -> str:
        return self._catalog.identity

    @property
    def traits(self) -> StoreTraits:  # type: ignore[override]
        traits = self._place().traits
        # A listing of dbfs: has no versions, see `list_page`.
        return StoreTraits(ranges=traits.ranges) if self._is_dbfs else traits

    def share_keys(self, folder: SharedFolder) -> None:
        self._folder = folder
        for store in (self._catalog, *self._stores.values()):
            store.share_keys(folder)

    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        return self._place().open(name, begin, end)

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        self._place(writes=True).put(name, source, if_absent=if_absent, if_version=if_version)

    def list_page(self, prefix: str = "", token: str | None = None) -> ListingPage:
        place = self._place()
        if self._is_dbfs and self._files is not None:
            place = self._files  # with its dates, which states of files in other formats hold
        return place.list_page(prefix, token)

    def delete(self, name: str) -> None:
        self._place(writes=True).delete(name)

    def _place(self, writes: bool = False) -> Store:
        with self._finding():
            if writes not in self._stores:
                self._stores[writes] = self._find(writes)
            return self._stores[writes]

    def _find(self, writes: bool) -> Store:
        """The store in which the files are; or that of Databricks' own interface for files."""
        self._catalog.credentials = self.credentials
        if self._files is not None:
            self._files.credentials = self.credentials
        if self._folder is not None:
            self._catalog.share_keys(self._folder)
        self._catalog.log_in()
        try:
            return self._storage(writes)
        except UnavailableError:
            raise
        except StoreError as error:
            if self._files is None:
                raise
            _log.warning("%s Until then, its files come by the Files interface of the workspace, more slowly.", error)
        self._stores[False] = self._files  # a writer compares with the versions that it has read there
        return self._files

    def _storage(self, writes: bool) -> Store:
        from . import RetryingStore, open_store

        details = self._catalog.ask("GET", f"{self._kind}s/{self._name}")
        location = details.get("storage_location") or ""
        form = details.get("data_source_format", "PARQUET")
        if not _STORED.fullmatch(location) or form not in _FORMATS:
            kind = " ".join(filter(None, map(details.get, ("table_type", "data_source_format")))) or self._kind
            raise StoreError(
                f"{self.url}: volumes and {' and '.join(_FORMATS)} tables in S3, Azure and Google are read; this is a "
                f"{kind} at {shown_url(location) or 'no place'}. Write its rows into one: CREATE TABLE ... AS "
                f"SELECT * FROM {self._name}."
            )
        url = f"{location.rstrip('/')}/{self._path}".rstrip("/")
        if url.startswith(("file:", "/")):  # of a catalog on this machine
            return open_store(url)
        asked = {f"{self._kind}_id": details[f"{self._kind}_id"], "operation": _OPERATIONS[self._kind][writes]}
        keys = _Vended(self._catalog, json.dumps(asked))
        opened = open_store(url, {"timeout_s": self._options.timeout_s, **self._options.storage, "credentials": keys})
        assert isinstance(opened, RetryingStore)
        store = opened.store  # this one's own user tries again
        if self._folder is not None:
            store.share_keys(self._folder)
        assert store.credentials is not None
        store.credentials.get()  # an error here, not at the first file
        return store


class _Catalog(DatabricksStore):
    """The catalog's interface for one table or volume."""

    listing = "the answer of a catalog. Check DATABRICKS_HOST"
    access_remedy = DatabricksStore.access_remedy.removesuffix(" The user needs READ VOLUME there.")

    def __init__(self, url: str, kind: str, name: str, options: UnityOptions) -> None:
        super().__init__("", options)
        self.url = url
        self.kind = kind
        self._name = name

    def log_in(self) -> None:
        """Raise an error where host or token are missing."""
        self._attempt("", self._workspace)

    def ask(self, method: str, path: str, body: str = "") -> dict[str, Any]:
        """Return what the catalog says."""

        def call() -> dict[str, Any]:
            headers = {"Content-Type": "application/json" if body else None}
            answer = self._request(method, self._call(_API, path), headers, body.encode() or None)
            return self._parsed(answer, json.loads)

        return self._attempt("", call)

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        if not isinstance(error, AnswerError) or error.code not in (400, 403, 404):
            return super()._special_error(error, where)
        catalog, schema, _ = self._name.split(".", 2)
        right = "SELECT (MODIFY to write)" if self.kind == "table" else "READ VOLUME (WRITE VOLUME to write)"
        grants = (
            f"It takes USE CATALOG on {catalog}, USE SCHEMA and EXTERNAL USE SCHEMA on {catalog}.{schema}, {right} on "
            f"{self._name}, and external access enabled in the metastore."
        )
        if error.code == 404:
            return NotFoundError(
                f"{self.url}: the catalog knows no such {self.kind} ({error}). A table is uc://CATALOG.SCHEMA"
                f".TABLE, a volume uc://CATALOG/SCHEMA/VOLUME. {grants}"
            )
        return AccessError(f"{self.url}: the catalog refused ({error}). {grants}")


@dataclass(frozen=True, repr=False)
class _Vended:
    """What asks a catalog for the keys of a table or volume."""

    catalog: _Catalog
    body: str

    def __call__(self) -> dict[str, Any]:
        answer = self.catalog.ask("POST", f"temporary-{self.catalog.kind}-credentials", self.body)
        keys = answer.get("aws_temp_credentials") or answer.get("azure_user_delegation_sas") or {}
        keys = {name: value for name, value in keys.items() if name != "access_point"}
        if token := (answer.get("gcp_oauth_token") or {}).get("oauth_token"):
            keys = {"token": token}
        ends = answer.get("expiration_time")
        return {**keys, "expires_at": ends and ends / 1000}
