"""The base class that a store is made from: names checked and errors translated in one place."""

from __future__ import annotations

import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

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
from lightning_stream.shared_files import backoff

from .protocol import ListingPage, ObjectEntry, Store, StoreTraits
from .transfer import ObjectStream, check_name, content_version, source_file, write_all

if TYPE_CHECKING:
    from typing_extensions import Self

_CLAIM_LIFETIME_S = 600


class PreconditionError(StoreError):
    """The condition of a put does not hold. Raised and caught within the stores."""


class PastTheEndError(StoreError):
    """A range begins at or after the object's end. Raised and caught within the stores."""


class AnswerError(Exception):
    """An HTTP answer that is no success, to stores that speak HTTP themselves."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {' '.join(reason.split())}")
        self.code = code


class StoreMethods(ABC):
    """What follows from `open` and `list_page`, for a store and for one that wraps a store."""

    url: str
    traits: StoreTraits

    @property
    def identity(self) -> str:
        """What separates this store's content from any other's."""
        return self.url

    @abstractmethod
    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        """Stream the bytes ``[begin, end)`` of an object."""

    @abstractmethod
    def list_page(self, prefix: str = "", token: str | None = None) -> ListingPage:
        """Return one page of a listing and the token of the next."""

    def get(
        self,
        name: str,
        to: Path | BinaryIO,
        num_bytes: int | None = None,
        connections: int = 1,  # noqa: ARG002
    ) -> int:
        """Write a whole object into `to`, and return the number of bytes."""
        if isinstance(to, Path):
            with to.open("wb", buffering=0) as file:
                return StoreMethods.get(self, name, file, num_bytes)
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
        with self.open(name) as stream:
            return b"".join(stream)

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes ``[begin, end)`` of an object; fewer only where the object ends before."""
        if not 0 <= begin <= end:
            raise ValueError(f"a range is 0 <= begin <= end; got [{begin}, {end})")
        if begin == end:
            return b""
        with self.open(name, begin, end) as stream:
            return b"".join(stream)

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """List all objects whose names begin with `prefix`, sorted by name."""
        pages = self._pages(prefix)
        if not self.traits.sorted_listing:
            return iter(sorted((entry for page in pages for entry in page), key=lambda entry: entry.name))
        return (entry for page in pages for entry in page)

    def _pages(self, prefix: str) -> Iterator[Sequence[ObjectEntry]]:
        page, token = self.list_page(prefix)
        yield page
        while token is not None:
            page, token = self.list_page(prefix, token)
            yield page

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class BaseStore(StoreMethods):
    """A store over one client library: five methods to write, and class attributes that explain the client's errors.

    Public methods check names and translate errors; `_open`, `_put`, `_list` (or `_list_page`), `_delete` and, where
    the server has something cheaper than opening, `_exists` do the work and let the client's errors pass. See
    docs/storage.md for a complete example.

    Attributes:
        traits: What the server can do.
        access_remedy: What to do about refused credentials, as sentences.
        missing: What to say of an absent object.
        network_errors: Names of exception classes (or of their bases) that stand for a broken connection.
        client_errors: Names of those that stand for anything else that the client library reports.
    """

    traits: StoreTraits = StoreTraits()
    access_remedy: ClassVar[str] = "Check the credentials and their rights."
    missing: ClassVar[str] = "no such object. Check the URL."
    network_errors: ClassVar[frozenset[str]] = frozenset({"OSError", "HTTPError"})
    client_errors: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, Any]) -> Self:
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
        """Stream the bytes ``[begin, end)`` of an object."""
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
        """Store an object, whole or not at all; with a condition, only where that holds."""
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
                    stack.enter_context(self._claimed(name, if_version))
                self._put(name, file, num_bytes, if_absent and native, if_version if native else None)
        except (PreconditionError, NotFoundError) as error:
            if if_version is not None:
                raise ConflictError(
                    f"{where}: it is not the version that was read any more: another process replaced or deleted it. "
                    "Read it again."
                ) from None
            if isinstance(error, NotFoundError):
                raise
            raise AlreadyExistsError(
                f"{where}: there is an object of that name already. Choose another name."
            ) from None

    def list_page(self, prefix: str = "", token: str | None = None) -> ListingPage:
        """Return one page of a listing and the token of the next."""
        with self.translate_errors(prefix):
            return self._list_page(prefix, token)

    def delete(self, name: str) -> None:
        """Remove an object; one that is absent already is no error."""
        check_name(name)
        with contextlib.suppress(NotFoundError), self.translate_errors(name):
            self._delete(name)

    def exists(self, name: str) -> bool:
        """Tell whether there is an object of that name."""
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
        reason = redact(str(error)) if isinstance(error, AnswerError) else summarize(error)
        found = status_error(self._status(error), where, reason, self.missing, self.access_remedy)
        if found is not None:
            return found
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & self.network_errors:
            return UnavailableError(f"{where}: {summarize(error)}. Look at the network and the server.")
        if kinds & self.client_errors:
            return StoreError(f"{where}: {summarize(error)}. Check the URL and the options.")
        return None

    def _guarded(self, name: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
        with self.translate_errors(name):
            yield from chunks

    @contextlib.contextmanager
    def _claimed(self, name: str, if_version: str | None) -> Iterator[None]:
        """Exclude other conditional puts of a name, for a server that has none, and see that the condition holds.

        Each process writes a claim of its own, then looks for others; one that sees another's withdraws and tries
        again. Of two, the one that looks last sees both. The claim of a killed process counts for ten minutes.
        """
        for _ in backoff(60.0):
            claim = f"{name}.claim-{int(time.time())}-{uuid.uuid4().hex}"
            self.put(claim, b"")
            try:
                if self._is_contested(name, claim):
                    continue
                if self._content_version(name) != if_version:
                    raise PreconditionError(name)
                yield
                return
            finally:
                self.delete(claim)
        raise UnavailableError(f"{self.url}/{name}: other processes write it all the time. Let one process write it.")

    def _is_contested(self, name: str, claim: str) -> bool:
        oldest = time.time() - _CLAIM_LIFETIME_S
        others = [entry.name for entry in self.list(f"{name}.claim-") if entry.name != claim]
        return any(int(other.rsplit("-", 2)[1]) > oldest for other in others)

    def _content_version(self, name: str) -> str | None:
        try:
            return content_version(self.read(name))
        except NotFoundError:
            return None


class _Translation:
    """Raises a client's error as ours, without any link to the client's.

    That may hold a signed URL or a token, which tracebacks would print, and connections, which it would keep open.
    """

    def __init__(self, store: BaseStore, name: str) -> None:
        self._store = store
        self._name = name

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, (LightningStreamError, MissingExtraError)):
            return
        found = self._store._translated(error, f"{self._store.url}/{self._name}")  # noqa: SLF001 - one class in two
        del error, trace  # or this frame, part of the new traceback, would keep them
        if found is not None:
            try:
                raise found from None
            finally:
                found.__context__ = None
                del found


def status_error(status: int, where: str, reason: str, missing: str, access_remedy: str) -> StoreError | None:
    """The error that stands for an HTTP status; None for one that is no failure."""
    if status in (404, 410):
        return NotFoundError(f"{where}: {missing}")
    if status in (401, 403, 407):
        return AccessError(f"{where}: refused ({reason}). {access_remedy}")
    if status in (408, 425, 429) or status >= 500:
        return UnavailableError(f"{where}: {reason}. The store is overloaded or in trouble; ask for less at once.")
    if status == 412:
        return PreconditionError(f"{where}: the condition does not hold")
    if status == 416:
        return PastTheEndError(f"{where}: past its end")
    if status >= 300:
        return StoreError(f"{where}: {reason}. Check the URL and the options.")
    return None


def refuse_larger(found: int | None, promised: int | None, where: str) -> None:
    """Raise DigestError for an object that is larger than its index promises, before more of it is downloaded."""
    if promised is not None and found is not None and found > promised:
        raise DigestError(
            f"{where}: the index promises {promised:,} bytes; there are {found:,} or more. Compare it with the "
            "dataset's source; upload that shard and its index again if it is damaged there."
        )


__all__ = ["BaseStore", "ListingPage", "ObjectEntry", "ObjectStream", "Store", "StoreTraits"]
