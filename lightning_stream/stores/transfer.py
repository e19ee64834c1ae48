"""What the stores have in common: streams, ranges, names, and clients made once per process."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, final
from xml.etree import ElementTree as ET

from lightning_stream.errors import AccessError, UnavailableError, redact
from lightning_stream.threads import Lock

T = TypeVar("T")
R = TypeVar("R")
Options = Mapping[str, Any]  # of a store, by name, as a user passes them
NETWORK_ERRORS = frozenset({  # of the libraries for logins, and of those that users' functions may use
    "ConnectionError", "TimeoutError", "URLError", "HTTPError", "RequestException", "HTTPClientError",
    "TransportError", "ServiceRequestError", "ServiceResponseError", "MetadataRetrievalError",
})  # fmt: skip
CHUNK_BYTES = 1 << 20
_CHAIN = re.compile(r"::(?=[A-Za-z][\w+.-]*://)")
_QUERY = re.compile(r"\?[^/?#=&]*=.*$", re.DOTALL)


@final
@dataclass(eq=False)
class ObjectStream:
    """The bytes of an object, or of a range of it, as they arrive: iterate once, then close.

    Iterating raises :class:`UnavailableError` if the connection breaks, or ends before `num_bytes`.

    Attributes:
        chunks: The bytes, in pieces of any size.
        num_bytes: The number of bytes; None if the server does not say it.
        version: Identifies this content of the object, for ``put(if_version=...)``. If the server has no versions, it
            is the digest of the content, known after the whole object was read.
        close, where: Gives the connection back; the object, for messages.
        tag: It must be the same when the stream is resumed: the version, or something weaker (a date); or None.
        total: The size of the whole object, or the end of this range, if the answer proves that the server sends
            ranges; else None.
        past_end, digest: The range begins at or after the object's end; make the version from the content.
    """

    chunks: Iterator[bytes]
    num_bytes: int | None
    version: str | None = None
    close: Callable[[], object] = lambda: None
    where: str = "the object"
    _: KW_ONLY
    tag: str | None = None
    total: int | None = None
    past_end: bool = False
    digest: bool = False

    def __post_init__(self) -> None:
        self.tag = self.tag or self.version

    def __iter__(self) -> Iterator[bytes]:
        seen = 0
        digest = hashlib.sha1(usedforsecurity=False) if self.digest else None
        for chunk in self.chunks:
            seen += len(chunk)
            if digest is not None:
                digest.update(chunk)
            yield chunk
        if self.num_bytes is not None and seen != self.num_bytes:
            raise UnavailableError(
                f"{self.where}: the connection ended after {seen:,} of {self.num_bytes:,} bytes. Check the network."
            )
        if digest is not None:
            self.version = f"sha1-{digest.hexdigest()}"

    def __enter__(self) -> ObjectStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def content_version(content: bytes) -> str:
    """Return the version of an object on a server without versions."""
    return "sha1-" + hashlib.sha1(content, usedforsecurity=False).hexdigest()


def xml_of(text: bytes, name: str) -> ET.Element:
    """Parse a page of XML; ValueError unless it is one of this name."""
    page = ET.fromstring(text)
    if page.tag.rpartition("}")[2] != name:
        raise ValueError(f"it is no {name}")
    return page


def content_md5(file: BinaryIO) -> str:
    """Return the MD5 digest of a file, for the server to compare; the file is at its beginning again."""
    digest = hashlib.md5(usedforsecurity=False)
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    file.seek(0)
    return base64.b64encode(digest.digest()).decode()


def file_chunks(file: Any, num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the next `num_bytes` bytes of a file."""
    while num_bytes > 0 and (chunk := file.read(min(chunk_bytes, num_bytes))):
        num_bytes -= len(chunk)
        yield chunk


def slice_stream(chunks: Iterator[bytes], begin: int, end: int | None) -> Iterator[bytes]:
    """Yield the bytes ``[begin, end)`` of a stream whose server ignored the requested range."""
    position = 0
    for chunk in chunks:
        wanted = chunk[max(0, begin - position) : None if end is None else max(0, end - position)]
        position += len(chunk)
        if wanted:
            yield wanted
        if end is not None and position >= end:
            return


def range_header(begin: int, end: int | None) -> dict[str, str]:
    """Return the HTTP header for ``[begin, end)``; none for the whole object."""
    if begin == 0 and end is None:
        return {}
    return {"Range": f"bytes={begin}-" if end is None else f"bytes={begin}-{end - 1}"}


def check_name(name: str) -> str:
    """Return the name itself, or raise ValueError for one that could leave the store's folder."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"an object's name is a relative path without '..' or empty parts; got {name!r}")
    return name


def shown_url(url: str) -> str:
    """The URL of a store as messages, labels and identities have it: without a password, and without a query."""
    if "://" not in url:
        return url
    return "::".join(map(_shown_link, links_of(_QUERY.sub("", url))))


def links_of(url: str) -> list[str]:
    """The URLs that a URL of fsspec chains, as in ``zip://a.csv::sftp://host/b.zip``; usually one."""
    return _CHAIN.split(url)


def _shown_link(url: str) -> str:
    scheme, colon, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    user, at, place = host.rpartition("@")
    return f"{scheme}{colon}{place if ':' in user else user + at + place}{slash}{path}"


def refuse_query(url: str) -> None:
    """Raise ValueError for a query (a signature) in the URL of a store that would take it for a part of a name."""
    if _QUERY.search(url):
        raise ValueError(
            f"the URL of a bucket takes no query, such as a signature; one for {redact(url)} has some. Set the "
            "variables of the credentials instead, e.g. AZURE_STORAGE_SAS_TOKEN; a signed web address is https://."
        )


def split_url(url: str) -> tuple[str, str]:
    """The bucket (container, host) of a URL and the prefix in it.

    ValueError without a bucket, or with a password or a query.
    """
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not bucket:
        raise ValueError(f"a URL names a bucket or container after '://'; got {redact(url)!r}")
    refuse_query(url)
    if ":" in bucket and "@" in url and not bucket.startswith("arn:"):  # a password may have a slash
        raise ValueError(
            f"the URL of a bucket takes no user and password; one for {redact(url)} has some. Set the variables of the "
            "credentials instead."
        )
    return bucket, prefix.strip("/")


def read_options(kind: type[T], options: Options, scheme: str) -> T:
    """Make the given dataclass of the options; one error names all unknown options."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"unknown options for {scheme}: {', '.join(unknown)}. Known are {', '.join(known)}.")
    return kind(**options)


def by_word(table: Mapping[T, str]) -> dict[str, T]:
    """The key of a table for each word of its texts."""
    return {word: key for key, words in table.items() for word in words.split()}


def option_of(text: str) -> Any:
    """An option of a store from text: the number, the list or the truth value that it shows, or the text itself."""
    with contextlib.suppress(ValueError):
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    return text


def is_named(error: BaseException, names: Collection[str]) -> bool:
    """Whether the class of an error, or a base of it, has one of these names: its library may not be there."""
    return any(kind.__name__ in names for kind in type(error).__mro__)


def first_set(*names: str) -> str | None:
    """Return the first of these environment variables that is set and not empty."""
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


@contextlib.contextmanager
def source_file(source: Path | bytes) -> Iterator[tuple[BinaryIO, int]]:
    """Yield the source of a put as a file, and its size."""
    if isinstance(source, bytes):
        yield io.BytesIO(source), len(source)
    else:
        with source.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size


_LOGIN_S = 60.0  # a login that is refused is not made again any earlier
# One lock per process: at a fork, a thread of the parent may hold it, which does not exist in the child.
_making: dict[int, Any] = {}


# What the logins of a process have in common, by what it depends on, and when it was made.
_shared: dict[Any, tuple[float, Any]] = {}
_MOST_SHARED = 64


def shared(make: Callable[[], T], *key: object) -> T:
    """Return what the logins of this process share that have this key: made once a minute, and after a refusal.

    A run may have 1,000 streams. To read the files of an account takes 20 ms; a service that gives keys is slower, and
    refuses whom it hears too often.
    """
    key = (os.getpid(), frozenset(os.environ.items()), *key)
    made_at, made = _shared.get(key, (-math.inf, None))
    if time.monotonic() - made_at < _LOGIN_S:
        known: T = made
        return known
    if len(_shared) >= _MOST_SHARED:
        _shared.clear()
    result = make()
    _shared[key] = (time.monotonic(), result)
    return result


class PerProcess(Generic[T]):
    """What is made on first use, once per process, such as a login; it is never pickled.

    A forked child keeps the parent's, since closing that could end the parent's sessions.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}
        self._made_at = 0.0

    def __call__(self) -> T:
        """Return what this process has made."""
        pid = os.getpid()
        with contextlib.suppress(KeyError):  # in one step: another thread may forget it
            return self._made[pid]
        with _making.setdefault(pid, Lock()):
            if pid not in self._made:
                self._made[pid] = self._make()
                self._made_at = time.monotonic()
            return self._made[pid]

    def attempt(self, call: Callable[[], R]) -> R:
        """Call; where a login that is not new is refused (AccessError), once more: its keys may be others by now."""
        pid = os.getpid()
        login = self._made.get(pid)
        try:
            return call()
        except AccessError:
            with _making.setdefault(pid, Lock()):
                _shared.clear()
                is_same = self._made.get(pid) is login
                if login is None or (is_same and time.monotonic() - self._made_at < _LOGIN_S):
                    raise
                if is_same:
                    self._made.pop(pid, None)  # not what a forked child has of its parent
        return call()

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_made": {}, "_made_at": 0.0}
