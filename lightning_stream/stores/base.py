"""The one protocol through which bytes move, and what every store shares."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, Protocol, TypeVar

from lightning_stream.errors import (
    AlreadyExistsError,
    ConflictError,
    LightningStreamError,
    NotFoundError,
    StoreError,
    UnavailableError,
)
from lightning_stream.shared_files import backoff

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ObjectEntry:
    """One object of a listing; ``name`` is relative to the store's URL."""

    name: str
    num_bytes: int


class Body:
    """The bytes of an object, or of a range of it, as they arrive: iterate once, then close.

    Iterating raises :class:`UnavailableError` where the connection breaks, and where it ends before `num_bytes`.

    Args:
        chunks: The bytes, in order.
        num_bytes: How many there will be; None where the server does not say.
        version: What tells this content from a later one under the same name (an ETag, a generation); None if unknown.
        close: Gives the connection back.
        where: The object, for messages.
    """

    def __init__(
        self,
        chunks: Iterator[bytes],
        num_bytes: int | None,
        version: str | None = None,
        close: Callable[[], object] | None = None,
        where: str = "the object",
    ) -> None:
        self.num_bytes = num_bytes
        self.version = version
        self.started = False
        self._chunks = chunks
        self._close = close
        self._where = where

    def __iter__(self) -> Iterator[bytes]:
        seen = 0
        self.started = True
        digest = None if self.version is not None else hashlib.sha1(usedforsecurity=False)
        for chunk in self._chunks:
            seen += len(chunk)
            if digest is not None:
                digest.update(chunk)
            yield chunk
        if self.num_bytes is not None and seen != self.num_bytes:
            raise UnavailableError(
                f"{self._where}: the connection ended after {seen:,} of {self.num_bytes:,} bytes. "
                "Try again; if it persists, look at the proxy or load balancer in between."
            )
        if digest is not None:
            self.version = f"sha1-{digest.hexdigest()}"

    def close(self) -> None:
        """Give the connection back; bytes not yet read are lost."""
        if self._close is not None:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Store(Protocol):
    """A remote (or local) folder of named objects.

    Names are relative to the store's URL and separated by ``/``. A store is picklable (by recipe, never with open
    connections), may be used from many threads, and makes its client on first use, once per process.

    Every method raises :class:`NotFoundError` for an absent object or bucket, :class:`AccessError` for credentials that
    are missing, wrong or lack a right, :class:`UnavailableError` for trouble that may pass, and plain
    :class:`StoreError` for anything else the store refuses. No message holds a secret.
    """

    @property
    def url(self) -> str:
        """The folder, for messages: no secrets in it."""

    @property
    def identity(self) -> str:
        """What tells this store's content from any other's: URL and, where it matters, endpoint."""

    def open(self, name: str, begin: int = 0, end: int | None = None) -> Body:
        """The bytes ``[begin, end)`` of an object (to its end: None), streamed."""

    @property
    def cuts_ranges(self) -> bool:
        """Whether a range costs only its own bytes and one request: not where a server may send the whole for each."""

    def get(self, name: str, to: Path | BinaryIO, num_bytes: int | None = None, connections: int = 1) -> int:
        """Write a whole object into `to`, streamed; give the number of bytes. A path is overwritten in place.

        `num_bytes`, where the caller knows it, lets large objects come as several ranges at once; `connections` says
        how many the caller has to spare for that, so that smaller ones may too.
        """

    def read(self, name: str) -> bytes:
        """A whole object, for small ones."""

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        """The bytes ``[begin, end)`` of an object; fewer only where the object ends before."""

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """Store an object, whole or not at all; an older one of that name is replaced.

        With `if_absent` only where there is no object of that name (else :class:`AlreadyExistsError`); with
        `if_version` only where the object is the one whose `Body.version` that is (else :class:`ConflictError`). Of
        several that try at once, one succeeds.
        """

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All objects whose names begin with `prefix`, at any depth, sorted by name. No such objects: empty."""

    def delete(self, name: str) -> None:
        """Remove an object; one that is absent already is no error."""

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name."""


class BodyStore(ABC):
    """What a store gets for free once it can open a body."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The folder, for messages."""

    @property
    def identity(self) -> str:
        """What tells this store's content from any other's."""
        return self.url

    @property
    def cuts_ranges(self) -> bool:
        """Whether a range costs only its own bytes and one request."""
        return False

    @abstractmethod
    def open(self, name: str, begin: int = 0, end: int | None = None) -> Body:
        """The bytes ``[begin, end)`` of an object, streamed."""

    @abstractmethod
    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """Store an object, whole or not at all."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All objects whose names begin with `prefix`, sorted by name."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is an object of that name."""

    def get(
        self,
        name: str,
        to: Path | BinaryIO,
        num_bytes: int | None = None,  # noqa: ARG002
        connections: int = 1,  # noqa: ARG002
    ) -> int:
        """Write a whole object into `to`; give the number of bytes."""
        if isinstance(to, Path):
            with to.open("wb", buffering=0) as file:
                return self.get(name, file)
        written = 0
        with self.open(name) as body:
            for chunk in body:
                write_all(to, chunk)
                written += len(chunk)
        return written

    def read(self, name: str) -> bytes:
        """A whole object, for small ones."""
        with self.open(name) as body:
            return b"".join(body)

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        """The bytes ``[begin, end)`` of an object; fewer only where the object ends before."""
        if not 0 <= begin <= end:
            raise ValueError(f"a range is 0 <= begin <= end; got [{begin}, {end})")
        if begin == end:
            return b""
        with self.open(name, begin, end) as body:
            return b"".join(body)

    def _version_of(self, name: str) -> str | None:
        """The digest of an object's content, None where there is none: the version where a server has no better."""
        try:
            return content_version(self.read(name))
        except NotFoundError:
            return None

    @contextlib.contextmanager
    def _claimed(self, name: str, if_absent: bool, if_version: str | None) -> Iterator[None]:
        """Hold the object's name against other conditional puts, for servers that have none.

        Everyone writes a claim of their own, then looks for others; who sees one withdraws and tries again. Of two,
        the one that looks last sees both. A claim whose owner was killed counts for ten minutes.
        """
        if not check_conditions(name, if_absent, if_version):
            yield
            return
        for _ in backoff(60.0):
            claim = f"{name}.claim-{int(time.time())}-{uuid.uuid4().hex}"
            self.put(claim, b"")
            try:
                since = time.time() - 600
                names = (entry.name for entry in self.list(f"{name}.claim-") if entry.name != claim)
                if any(int(other.split(".claim-")[1].partition("-")[0]) > since for other in names):
                    continue
                found = self._version_of(name)
                if found != if_version:
                    raise refused_put(f"{self.url}/{name}", if_absent)
                yield
                return
            finally:
                self.delete(claim)
        raise UnavailableError(f"{self.url}/{name}: others write it all the time. Have one process write it.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class PerProcess(Generic[T]):
    """A client made on first use, once per process: a fork or a pickle carries the recipe, never the client.

    The parent's client is kept (not closed) in a child, since closing it there could end the parent's sessions.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    def __call__(self) -> T:
        """The client of this process."""
        pid = os.getpid()
        if pid not in self._made:
            with _making:
                if pid not in self._made:
                    with _without_collection():
                        self._made[pid] = self._make()
        return self._made[pid]

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_made": {}}


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Making a client allocates a hundred thousand objects that all stay. A collection finds nothing among them, but
    looks through all that torch has loaded too, which takes twice as long as making the client."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_making = threading.RLock()


def _renew_lock() -> None:
    # Another thread of the parent may have held it at the fork; that thread does not exist here.
    global _making
    _making = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def attempt(call: Callable[[], T], explain: Callable[[Exception], Exception | None]) -> T:
    """Run `call`; an error of a client library becomes one of ours.

    Ours is raised outside of the handler: a client's own exception may hold a signed URL or a token, and as a cause
    or context it would be printed with every traceback. `explain` gives None for an error that is not the client's.
    """
    try:
        return call()
    except LightningStreamError:
        raise
    except Exception as error:
        trouble = explain(error)
        if trouble is None:
            raise
    raise trouble


def explained_chunks(chunks: Iterator[bytes], explain: Callable[[Exception], Exception | None]) -> Iterator[bytes]:
    """The same bytes; an error of the client library on the way becomes one of ours."""
    while chunk := attempt(lambda: next(chunks, b""), explain):
        yield chunk


def check_conditions(name: str, if_absent: bool, if_version: str | None) -> bool:
    """Whether a put has a condition; ValueError where it has two."""
    if if_absent and if_version is not None:
        raise ValueError(f"put({name!r}) takes if_absent or if_version, not both")
    return if_absent or if_version is not None


def content_version(content: bytes) -> str:
    """The version of an object where the server has none."""
    return "sha1-" + hashlib.sha1(content, usedforsecurity=False).hexdigest()


def refused_put(where: str, if_absent: bool) -> StoreError:
    """The error of a conditional put whose condition does not hold."""
    if if_absent:
        return AlreadyExistsError(f"{where}: there is an object of that name already. Choose another name.")
    return ConflictError(f"{where}: it is not the version that was read any more: another process replaced it.")


def check_name(name: str) -> str:
    """The name itself, or ValueError for one that could leave the store's folder."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"an object's name is a relative path without '..' or empty parts; got {name!r}")
    return name


def join(prefix: str, name: str) -> str:
    """The key of a name under a prefix."""
    return f"{prefix}/{name}" if prefix else name


def relative(key: str, prefix: str) -> str:
    """The name of a key under a prefix."""
    return key[len(prefix) + 1 :] if prefix else key


def range_header(begin: int, end: int | None) -> str | None:
    """The HTTP ``Range`` value for ``[begin, end)``; None where it is the whole object."""
    if begin == 0 and end is None:
        return None
    return f"bytes={begin}-" if end is None else f"bytes={begin}-{end - 1}"


def write_all(file: BinaryIO, chunk: bytes) -> None:
    """Write every byte of the chunk, also to an unbuffered file."""
    written = file.write(chunk)
    while written is not None and written < len(chunk):
        chunk = chunk[written:]
        written = file.write(chunk)


def cut(chunks: Iterator[bytes], begin: int, end: int | None) -> Iterator[bytes]:
    """The bytes ``[begin, end)`` of a stream whose server ignored the range that it was asked for."""
    position = 0
    for chunk in chunks:
        wanted = chunk[max(0, begin - position) : None if end is None else max(0, end - position)]
        position += len(chunk)
        if wanted:
            yield wanted
        if end is not None and position >= end:
            return


def read_options(kind: type[T], options: Mapping[str, Any], scheme: str) -> T:
    """The options as a frozen value of the given dataclass; all unknown names are reported together."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"unknown options for {scheme}: {', '.join(unknown)}. Known are {', '.join(known)}.")
    return kind(**options)


@contextlib.contextmanager
def source_file(source: Path | bytes) -> Iterator[BinaryIO]:
    """What is to be put, as a file."""
    import io

    if isinstance(source, bytes):
        yield io.BytesIO(source)
    else:
        with source.open("rb") as file:
            yield file
