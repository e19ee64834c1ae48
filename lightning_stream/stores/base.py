"""What every store promises, and the base class it is made from: names checked, errors translated in one place."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from lightning_stream.errors import (
    AccessError,
    AlreadyExistsError,
    ConflictError,
    DigestError,
    LightningStreamError,
    MissingExtraError,
    NotFoundError,
    StoreError,
    UnavailableError,
    redact,
    summarize,
)

from .claims import PreconditionError, claimed
from .transfer import ObjectStream, check_name, source_file, write_all


class PastTheEndError(StoreError):
    """A range begins at or after the object's end. Raised and caught within the stores."""


class AnswerError(Exception):
    """An HTTP answer that is no success, to stores that speak HTTP themselves."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {' '.join(reason.split())}")
        self.code = code


@dataclass(frozen=True)
class ObjectEntry:
    """One object of a listing.

    Attributes:
        name: Relative to the store's URL.
        num_bytes: Its size.
        version: Changes with the content: an ETag, generation or time of change. Empty where listings have none.
    """

    name: str
    num_bytes: int
    version: str = field(default="", compare=False)


# The entries of one page of a listing, and the token of the next page: None for the last.
ListingPage = tuple[Sequence[ObjectEntry], str | None]


@dataclass(frozen=True)
class StoreTraits:
    """What a store's server can do.

    Attributes:
        ranges: A range costs only its own bytes and one request. A web server may send the whole file instead.
        sorted_listing: The server lists in the order of the names' bytes. Else :meth:`BaseStore.list` sorts.
        exclusive_put: The server can create an object only where there is none.
        conditional_put: The server can do that, and replace an object only where it is a given version.
    """

    ranges: bool = False
    sorted_listing: bool = False
    exclusive_put: bool = False
    conditional_put: bool = False


class Store(ABC):
    """A remote (or local) folder of named objects.

    Names are relative to the store's URL and separated by ``/``. A store is picklable (by recipe, never with open
    connections), may be used from many threads, and makes its client on first use, once per process.

    Every method raises :class:`NotFoundError` for an absent object or bucket, :class:`AccessError` for credentials that
    are missing, wrong or lack a right, :class:`UnavailableError` for trouble that may pass, and plain
    :class:`StoreError` for anything else the store refuses. No message holds a secret.

    Attributes:
        url: The folder, for messages: no secrets in it.
        traits: What its server can do.
    """

    url: str
    traits: StoreTraits = StoreTraits()

    @property
    def identity(self) -> str:
        """What separates this store's content from any other's: URL and, where it matters, endpoint or account."""
        return self.url

    @abstractmethod
    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        """Stream the bytes ``[begin, end)`` of an object (to its end: None)."""

    @abstractmethod
    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """Store an object, whole or not at all; an older one of that name is replaced.

        With `if_absent` only where there is no object of that name (else :class:`AlreadyExistsError`). With
        `if_version` only where the object still is the one whose :attr:`ObjectStream.version` that was (else
        :class:`ConflictError`). Of several that try at once, one succeeds.
        """

    @abstractmethod
    def list_page(self, prefix: str = "", token: str | None = None) -> ListingPage:
        """Return the entries of one page as the server orders them, and the token of the next page (None: the last)."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; one that is absent already is no error."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Tell whether there is an object of that name."""

    def get(self, name: str, to: Path | BinaryIO, num_bytes: int | None = None, connections: int = 1) -> int:  # noqa: ARG002
        """Write a whole object into `to`, streamed, and return the number of bytes. A path is overwritten in place.

        Args:
            name: The object.
            to: A path, or a file open for writing.
            num_bytes: The promised size, where the caller knows one. Nothing larger is downloaded (DigestError), and a
                large object comes as several ranges at once.
            connections: How many the caller has to spare, so that smaller objects may come as several ranges too.
        """
        if isinstance(to, Path):
            with to.open("wb", buffering=0) as file:
                return Store.get(self, name, file, num_bytes)
        written = 0
        with self.open(name) as stream:
            refuse_larger(stream.num_bytes, num_bytes, f"{self.url}/{name}")
            for chunk in stream:
                written += len(chunk)
                refuse_larger(written, num_bytes, f"{self.url}/{name}")
                write_all(to, chunk)
        return written

    def read(self, name: str) -> bytes:
        """Return a whole object, for small ones."""
        return self._read(name, 0, None)

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes ``[begin, end)`` of an object; fewer only where the object ends before."""
        if not 0 <= begin <= end:
            raise ValueError(f"a range is 0 <= begin <= end; got [{begin}, {end})")
        return self._read(name, begin, end) if begin < end else b""

    def _read(self, name: str, begin: int, end: int | None) -> bytes:
        with self.open(name, begin, end) as stream:
            return b"".join(stream)

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """List all objects whose names begin with `prefix`, at any depth, sorted by name. No such objects: empty."""
        entries = self._entries(prefix)
        return entries if self.traits.sorted_listing else iter(sorted(entries, key=lambda entry: entry.name))

    def _entries(self, prefix: str) -> Iterator[ObjectEntry]:
        page, token = self.list_page(prefix)
        yield from page
        while token is not None:
            page, token = self.list_page(prefix, token)
            yield from page

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class BaseStore(Store):
    """A store over one client library: five methods to write, and class attributes that explain the client's errors.

    Public methods check names and translate errors; `_open`, `_put`, `_list` (or `_list_page`), `_delete` and, where
    the server has something cheaper than opening, `_exists` do the work and let the client's errors pass. See
    docs/storage.md for a complete example.

    Attributes:
        access_remedy: What to do about refused credentials, as sentences.
        missing: What to say of an absent object.
        network_errors: Names of exception classes (or of their bases) that stand for a broken connection.
        client_errors: Names of those that stand for anything else that the client library reports.
    """

    access_remedy: ClassVar[str] = "Check the credentials and their rights."
    missing: ClassVar[str] = "no such object. Check the URL."
    network_errors: ClassVar[frozenset[str]] = frozenset({"OSError", "HTTPError"})
    client_errors: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any]) -> BaseStore:
        """Make the store of a URL. `options` are the user's, with ``timeout_s``, the longest silence on a connection.

        Raises:
            ValueError: An option that this store does not have, or an incomplete URL.
        """
        raise NotImplementedError(f"{cls.__name__}.from_url")

    @abstractmethod
    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        """Stream a range. :class:`PastTheEndError`, or status 416, says that it begins at or after the end."""

    @abstractmethod
    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        """Store what is left of a file, whole or not at all.

        A condition is only given where the traits have it; :class:`PreconditionError`, or status 412, says that it
        does not hold.
        """

    @abstractmethod
    def _delete(self, name: str) -> None:
        """Remove an object; :class:`NotFoundError`, or status 404, is no error."""

    def _list(self, prefix: str) -> Iterator[ObjectEntry]:
        """List in any order. `prefix` may end in the middle of a name."""
        raise StoreError(f"{self.url}/{prefix}: {type(self).__name__} cannot list.")

    def _list_page(self, prefix: str, token: str | None) -> ListingPage:  # noqa: ARG002
        return list(self._list(prefix)), None

    def _exists(self, name: str) -> bool:
        self._open(name, 0, 1).close()
        return True

    def _status(self, error: Exception) -> int:
        """The HTTP status that an error of the client stands for; 0 where it stands for none."""
        status = getattr(error, "status_code", None) or getattr(error, "code", None)
        return status if isinstance(status, int) else 0

    def _special_error(self, error: Exception, where: str) -> Exception | None:  # noqa: ARG002
        """An error of ours for what the table in `_translated` does not know, or knows less well."""
        return None

    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        where = f"{self.url}/{check_name(name)}"
        try:
            with self.translate_errors(name):
                stream = self._open(name, begin, end)
        except PastTheEndError:
            return ObjectStream(iter(()), 0, where=where, past_end=True)
        stream.where = where
        if not self.traits.conditional_put:
            stream.version = None  # but the digest of the content, which `put` can compare
        stream.chunks = self._guarded(name, stream.chunks)
        return stream

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        check_name(name)
        if if_absent and if_version is not None:
            raise ValueError(f"put({name!r}) takes if_absent or if_version, not both")
        conditional = if_absent or if_version is not None
        native = self.traits.conditional_put or (if_absent and self.traits.exclusive_put)
        where = f"{self.url}/{name}"
        try:
            with self.translate_errors(name), contextlib.ExitStack() as stack:
                file, num_bytes = stack.enter_context(source_file(source))
                if conditional and not native:
                    stack.enter_context(claimed(self, name, if_version))
                self._put(name, file, num_bytes, if_absent and native, if_version if native else None)
        except (PreconditionError, NotFoundError) as error:
            if if_version is not None:
                raise ConflictError(
                    f"{where}: it is not the version that was read any more: another process replaced or deleted it. "
                    "Read it again."
                ) from None
            if isinstance(error, NotFoundError):
                raise
            raise already_exists(where) from None

    def list_page(self, prefix: str = "", token: str | None = None) -> ListingPage:
        with self.translate_errors(prefix):
            return self._list_page(prefix, token)

    def delete(self, name: str) -> None:
        check_name(name)
        with contextlib.suppress(NotFoundError), self.translate_errors(name):
            self._delete(name)

    def exists(self, name: str) -> bool:
        check_name(name)
        try:
            with self.translate_errors(name):
                return self._exists(name)
        except NotFoundError:
            return False
        except PastTheEndError:
            return True

    def translate_errors(self, name: str) -> _Translation:
        """Raise the client library's errors as ours, in a ``with`` statement."""
        return _Translation(self, name)

    def _translated(self, error: Exception, where: str) -> Exception | None:
        if (found := self._special_error(error, where)) is not None:
            return found
        status = self._status(error)
        reason = redact(str(error)) if isinstance(error, AnswerError) else summarize(error)
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if status in (404, 410):
            return NotFoundError(f"{where}: {self.missing}")
        if status in (401, 403, 407):
            return AccessError(f"{where}: refused ({reason}). {self.access_remedy}")
        if status in (408, 425, 429) or status >= 500:
            return UnavailableError(f"{where}: {reason}. The store is overloaded or in trouble; ask for less at once.")
        if status == 412:
            return PreconditionError(f"{where}: the condition does not hold")
        if status == 416:
            return PastTheEndError(f"{where}: past its end")
        if status < 300 and kinds & self.network_errors:
            return UnavailableError(f"{where}: {reason}. Look at the network and the server.")
        if status >= 300 or kinds & self.client_errors:
            return StoreError(f"{where}: {reason}. Check the URL and the options.")
        return None

    def _guarded(self, name: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
        with self.translate_errors(name):
            yield from chunks


@dataclass
class _Translation:
    """Raises a client's error as ours, without any link to the client's.

    That may hold a signed URL or a token, which tracebacks would print, and connections, which it would keep open.
    """

    store: BaseStore
    name: str

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, (LightningStreamError, MissingExtraError)):
            return
        found = self.store._translated(error, f"{self.store.url}/{self.name}")  # noqa: SLF001 - one class in two
        del error, trace  # or this frame, part of the new traceback, would keep them
        if found is not None:
            try:
                raise found from None
            finally:
                found.__context__ = None
                del found


def already_exists(where: str | Path) -> AlreadyExistsError:
    """The error of a put of a name that is taken."""
    return AlreadyExistsError(f"{where}: there is an object of that name already. Choose another name.")


def refuse_larger(found: int | None, promised: int | None, where: str) -> None:
    """Raise DigestError for an object that is larger than its index promises, before more of it is downloaded."""
    if promised is not None and found is not None and found > promised:
        raise DigestError(
            f"{where}: the index promises {promised:,} bytes; there are {found:,} or more. Compare it with the "
            "dataset's source; upload that shard and its index again if it is damaged there."
        )
