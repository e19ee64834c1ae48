"""The interface of a store, and the base class of all stores, which checks names and translates errors."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

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

from .credentials import Credentials, SharedFolder
from .transfer import (
    NETWORK_ERRORS,
    ObjectStream,
    Options,
    PerProcess,
    by_word,
    check_name,
    content_version,
    is_named,
    shown_url,
    source_file,
)

T = TypeVar("T")
_CLAIM = re.compile(r"\.claim-([0-9]+)-[0-9a-f]{32}$")
_CLAIM_VALID_S = 600
_CLAIM_WAIT_S = 60.0
_CLAIM_WATCHED_S = 30.0
_CLOCKS_DIFFER_S = 86_400  # at most, of machines that write to one store
REMEDY = "Compare it with the dataset's source; if it is damaged there, upload that shard and its index again."


# The status that an error should have by its name: not all servers send it with that one.
_STATUS = by_word({
    404: "NoSuchKey NotFound",
    403: "AccessDenied AllAccessDisabled AuthorizationHeaderMalformed ExpiredToken TokenRefreshRequired Forbidden "
    "InvalidAccessKeyId InvalidSecurity InvalidToken RequestTimeTooSkewed SignatureDoesNotMatch",
    503: "BadDigest Md5Mismatch RequestTimeout SlowDown Throttling ThrottlingException TooManyRequests InternalError "
    "ConditionalRequestConflict",
    412: "PreconditionFailed BlobAlreadyExists ALREADY_EXISTS",
    416: "InvalidRange",
})  # fmt: skip


class PastTheEndError(StoreError):
    """A range begins at or after the object's end. It is raised and caught within the stores."""


class PreconditionError(StoreError):
    """The condition of a put does not hold. It is raised and caught within the stores."""


class AnswerError(Exception):
    """An answer that is a refusal.

    Attributes:
        code: Its HTTP status, or a better one where the server names the error.
        name: The server's name of the error.
        region: Where a bucket is, if the server says that.
        wait_s: For how long the server asks to wait.
    """

    wait_s = 0

    def __init__(self, code: int, reason: str, name: str = "", region: str | None = None) -> None:
        super().__init__(redact(f"{code} {' '.join(reason.split())}"))
        self.code = _STATUS.get(name, code)
        self.name = name
        self.region = region


@dataclass(frozen=True)
class ObjectEntry:
    """One object of a listing.

    Attributes:
        name: Relative to the store's URL.
        num_bytes: Its size.
        version: Changes with the content: an ETag, generation or time of change. Empty where listings have none.
        mark: Of a local file: its `change_mark`.
    """

    name: str
    num_bytes: int
    version: str = field(default="", compare=False)
    mark: str = field(default="", compare=False)


# The entries of a page of a listing, and the token of the next page (None: this is the last page).
ListingPage = tuple[Sequence[ObjectEntry], str | None]


@dataclass(frozen=True)
class StoreTraits:
    """The abilities of a store's server.

    Attributes:
        ranges: A range costs only its own bytes and one request. A web server may send the whole file instead.
        sorted_listing: The server lists in the order of the names' bytes. Else :meth:`Store.list` sorts.
        exclusive_put: The server can create an object only if there is none of that name.
        conditional_put: The server can also replace an object only if it has a given version.
    """

    ranges: bool = False
    sorted_listing: bool = False
    exclusive_put: bool = False
    conditional_put: bool = False


class Store(ABC):
    """A remote (or local) folder of named objects.

    Names are relative to the store's URL and separated by ``/``. A store can be pickled (without its connections) and
    used from many threads. Its client is made on first use, once per process.

    Every method raises :class:`NotFoundError` for an absent object or bucket, :class:`AccessError` for credentials that
    are missing, wrong or lack a right, :class:`UnavailableError` for trouble that may pass, and plain
    :class:`StoreError` for any other refusal. No message, and no `url`, holds a secret.

    Attributes:
        key_names: What keys that end may be; empty: any options.
        credentials: What returns keys that end; None: the store finds its own.
    """

    url: str
    traits: StoreTraits = StoreTraits()
    key_names: ClassVar[frozenset[str]] = frozenset()
    credentials: Credentials | None = None

    @property
    def identity(self) -> str:
        """A text that no other store's content has: the URL and, if it matters, the endpoint or account."""
        return self.url

    @abstractmethod
    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        """Stream the bytes ``[begin, end)`` of an object (None: to its end)."""

    @abstractmethod
    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """Store an object, whole or not at all; an older one of that name is replaced.

        With `if_absent`, :class:`AlreadyExistsError` if there is an object of that name. With `if_version`,
        :class:`ConflictError` unless the object still has this :attr:`ObjectStream.version`. If several processes try
        at once, one succeeds.
        """

    @abstractmethod
    def list_page(self, prefix: str = "", token: str | None = None) -> ListingPage:
        """Return the entries of one page as the server orders them, and the token of the next page (None: the last)."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; one that is absent already is no error."""

    def exists(self, name: str) -> bool:
        """Return whether there is an object of that name."""
        with contextlib.suppress(NotFoundError):
            self.open(name, 0, 1).close()
            return True
        return False

    def get(self, name: str, to: Path, num_bytes: int | None = None, connections: int = 1) -> int:  # noqa: ARG002
        """Download a whole object into the file `to`, which is overwritten, and return the number of bytes.

        Args:
            name: The object.
            to: The file.
            num_bytes: The promised size, if it is known. A larger object is refused (DigestError) and not downloaded;
                a large one is downloaded as several ranges at once.
            connections: The number of spare connections: with several, smaller objects are downloaded as ranges too.
        """
        file = Download(to, num_bytes)
        with self.open(name) as stream:
            file.receive(stream, 0)
        return file.num_bytes

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes ``[begin, end)`` of a (small) object; fewer if it ends before."""
        return b"" if begin == end else self._read(name, begin, end)

    def _read(self, name: str, begin: int, end: int | None) -> bytes:
        with self.open(name, begin, end) as stream:
            return b"".join(stream)

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """List all objects whose names begin with `prefix`, at any depth, sorted by name; marks of folders are none."""
        entries = self._entries(prefix)
        return entries if self.traits.sorted_listing else iter(sorted(entries, key=lambda entry: entry.name))

    def _entries(self, prefix: str) -> Iterator[ObjectEntry]:
        token: str | None = None
        while True:
            page, following = self.list_page(prefix, token)
            for entry in page:
                is_folder = not entry.name or entry.name.endswith("/")
                if entry.num_bytes or not is_folder:  # empty objects mark folders that were made in a console
                    yield entry
            if following is None:
                return
            if following == token:
                raise StoreError(f"{self.url}/{prefix}: the server lists the same page again and again. Check the URL.")
            token = following

    def share_keys(self, folder: SharedFolder) -> None:  # noqa: B027 - most stores have none
        """Let the processes that use a cache's folder share the keys that end; without, each process has its own."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class BaseStore(Store):
    """A store over one client library: four methods to write, and class attributes that explain the client's errors.

    Public methods check names and translate errors; `_open`, `_put`, `_list` (or `_list_page`) and `_delete` do the
    work and do not catch the client's errors. See docs/storage.md for an example.

    Attributes:
        access_remedy: What a user can do about refused credentials, as sentences.
        missing: The message about an absent object.
        network_errors: Names of exception classes (or of their bases) for a broken connection.
        client_errors: Names of exception classes for any other error of the client library.
        largest_put: The bytes that the service takes in one request.
    """

    access_remedy: ClassVar[str] = "Check the credentials and their rights."
    missing: ClassVar[str] = "no such object. Check the URL."
    network_errors: ClassVar[frozenset[str]] = NETWORK_ERRORS | {"OSError"}
    client_errors: ClassVar[frozenset[str]] = frozenset()
    largest_put = math.inf
    _shown_url = ""

    @property
    def url(self) -> str:
        """The URL, for messages. What a store sets is kept without a password and without a query."""
        return self._shown_url

    @url.setter
    def url(self, url: str) -> None:
        self._shown_url = shown_url(url)

    @classmethod
    def from_url(cls, url: str, options: Options) -> BaseStore:
        """Make the store of a URL; ValueError for an incomplete URL, or an option that this store does not have.

        `options` are those of the user, and ``timeout_s``, the longest silence on a connection.
        """
        raise NotImplementedError(f"{cls.__name__}.from_url")

    @abstractmethod
    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        """Stream a range; :class:`PastTheEndError`, or status 416, if it begins at or after the end."""

    @abstractmethod
    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        """Store the rest of a file, whole or not at all; :class:`PreconditionError`, or status 412, for a condition.

        A condition is only given if the traits have it.
        """

    @abstractmethod
    def _delete(self, name: str) -> None:
        """Remove an object; it may raise :class:`NotFoundError`, or an error with status 404."""

    def _list(self, prefix: str) -> Iterator[ObjectEntry]:
        """List in any order. `prefix` may end in the middle of a name."""
        raise StoreError(
            f"{self.url}/{prefix}: a web server's files cannot be listed, so it can hold "
            "only datasets with an index.json. Copy the files to a folder or bucket, or use a bucket's own URL."
        )

    def _list_page(self, prefix: str, token: str | None) -> ListingPage:  # noqa: ARG002
        return list(self._list(prefix)), None

    def _status(self, error: Exception) -> int:
        """Return the HTTP status of a client's error; 0 if it has none."""
        status = getattr(error, "status_code", None) or getattr(error, "code", None)
        return status if isinstance(status, int) else 0

    def _special_error(self, error: Exception, where: str) -> Exception | None:
        """Return the error for a client's error that `_translated` does not know, or knows less about."""
        return NotFoundError(f"{where}: {self.missing}") if isinstance(error, FileNotFoundError) else None

    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        where = f"{self.url}/{check_name(name)}"
        try:
            stream = self._attempt(name, lambda: self._open(name, begin, end))
        except PastTheEndError:
            return ObjectStream(iter(()), 0, where=where, past_end=True)
        stream.where = where
        if not self.traits.conditional_put:
            stream.version = None  # the digest of the content takes its place: `claimed` compares it
        chunks = stream.chunks
        stream.chunks = iter(lambda: self.translated(name, next, chunks, b""), b"")
        return stream

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        check_name(name)
        if if_absent and if_version is not None:
            raise ValueError(f"put({name!r}) takes if_absent or if_version, not both")
        conditional = if_absent or if_version is not None
        native = self.traits.conditional_put or (if_absent and self.traits.exclusive_put)
        where = f"{self.url}/{name}"

        def put(file: BinaryIO, num_bytes: int) -> None:
            file.seek(0)  # an attempt with former keys may have read it
            with claimed(self, name) if conditional and not native else contextlib.nullcontext(if_version) as version:
                if num_bytes > self.largest_put:
                    raise StoreError(
                        f"{where}: this service takes files of {self.largest_put:,} bytes at most in a request; it has "
                        f"{num_bytes:,}. Divide the dataset."
                    )
                if version != if_version:
                    raise PreconditionError(name)
                self._put(name, file, num_bytes, if_absent and native, if_version if native else None)

        try:
            with source_file(source) as (file, num_bytes):
                self._attempt(name, lambda: put(file, num_bytes))
        except (PreconditionError, NotFoundError) as error:
            if if_version is not None:
                raise ConflictError(f"{where}: another process has replaced or deleted it. Read it again.") from None
            if isinstance(error, NotFoundError):
                raise
            raise already_exists(where) from None

    def list_page(self, prefix: str = "", token: str | None = None) -> ListingPage:
        return self._attempt(prefix, lambda: self._list_page(prefix, token))

    def delete(self, name: str) -> None:
        check_name(name)
        with contextlib.suppress(NotFoundError):
            self._attempt(name, lambda: self._delete(name))

    def share_keys(self, folder: SharedFolder) -> None:
        if self.credentials is not None:
            self.credentials.folder = folder

    @property
    def _keys(self) -> Credentials | PerProcess[Any] | None:
        return self.credentials

    def _attempt(self, name: str, call: Callable[[], T]) -> T:
        """Call, with errors translated; once more with new keys where those that it has are refused."""
        if (keys := self._keys) is None:
            return self.translated(name, call)
        return keys.attempt(lambda: self.translated(name, call))

    def translated(self, name: str, call: Callable[..., T], *args: Any) -> T:
        """Call; a client's error becomes one of ours, without a link to it.

        It may hold a signed URL or a token, which tracebacks would print, and connections, which it would keep open.
        """
        try:
            return call(*args)
        except (LightningStreamError, MissingExtraError):
            raise
        except Exception as error:
            store_error = self._translated(error, f"{self.url}/{name}")
            if store_error is None:
                raise
        try:
            raise store_error
        finally:
            store_error.__context__ = None  # what the caller was handling
            del store_error

    def _translated(self, error: Exception, where: str) -> Exception | None:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return None  # the store is not the reason
        if (special := self._special_error(error, where)) is not None:
            return special
        status = self._status(error)
        reason = str(error) if isinstance(error, AnswerError) else summarize(error)
        if status in (404, 410):
            return NotFoundError(f"{where}: {self.missing}")
        if status == 407 or "connection failed: 407" in reason:
            return AccessError(
                f"{where}: the proxy refused ({reason}). Put its user and password in the variable that names it: "
                "HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT, or HTTP_PROXY."
            )
        if status in (401, 403):
            return AccessError(f"{where}: refused ({reason}). {self.access_remedy}")
        if status in (408, 425, 429) or status >= 500:
            unavailable = UnavailableError(
                f"{where}: {reason}. The store is overloaded or in trouble; ask for less at once."
            )
            unavailable.is_throttled = status in (429, 503)
            unavailable.wait_s = getattr(error, "wait_s", 0)
            return unavailable
        if status == 412:
            return PreconditionError(f"{where}: the condition does not hold")
        if status == 416:
            return PastTheEndError(f"{where}: past its end")
        if status < 300 and is_named(error, self.network_errors):
            return UnavailableError(f"{where}: {reason}. Check the network and the server.")
        if status >= 300 or is_named(error, self.client_errors):
            return StoreError(f"{where}: {reason}. Check the URL and the options.")
        return None


def already_exists(where: str | Path) -> AlreadyExistsError:
    """Return the error for a put of an existing name."""
    return AlreadyExistsError(f"{where}: there is an object of that name already. Choose another name.")


class Download:
    """The file that an object, or ranges of it, are written to. It is open as long as a thread may still write one.

    Attributes:
        parts: The size of each range that was written, and the object's tag at that time.
    """

    def __init__(self, to: Path, promised_bytes: int | None) -> None:
        self.parts: list[tuple[int, str | None]] = []
        self._fd = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._promised_bytes = promised_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that were written."""
        return sum(num_bytes for num_bytes, _ in self.parts)

    def resize(self, num_bytes: int) -> None:
        """Give the file a size: its final one from the start where it comes in parts, so that nobody reads it early."""
        os.ftruncate(self._fd, num_bytes)

    def receive(self, stream: ObjectStream, begin: int) -> None:
        """Write a range of an object at its position."""
        full_size = stream.total
        if full_size is None and stream.num_bytes is not None:
            full_size = begin + stream.num_bytes
        self._refuse_larger(full_size, stream)
        position = begin
        for chunk in stream:
            self._refuse_larger(position + len(chunk), stream)
            view = memoryview(chunk)
            while view:
                written = os.pwrite(self._fd, view, position)
                position += written
                view = view[written:]
        self.parts.append((position - begin, stream.tag))

    def _refuse_larger(self, num_bytes: int | None, stream: ObjectStream) -> None:
        """Raise DigestError for an object that is larger than its index promises, before more is downloaded."""
        promised = self._promised_bytes
        if promised is not None and num_bytes is not None and num_bytes > promised:
            raise DigestError(
                f"{stream.where}: the index promises {promised:,} bytes; there are {num_bytes:,} or more. {REMEDY}"
            )

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # at exit modules are gone
        if hasattr(self, "_fd"):
            _close(self._fd)


_withdrawn = set[str]()  # claims of this process that are still to be deleted


@contextlib.contextmanager
def claimed(store: Store, name: str) -> Iterator[str | None]:
    """Exclude other conditional puts of a name; yield the object's version, None if there is no object.

    Each process puts a claim beside the object, then looks for other claims; if it sees one, it withdraws and tries
    again. Of two processes, the one that looks last sees both claims. The claim of a killed process is valid for ten
    minutes; then a process that has seen it for half a minute deletes it, since clocks may differ: a put takes seconds.
    So it is with one that is dated in the future.
    """
    seen_at: dict[str, float] = {}
    for _ in backoff(_CLAIM_WAIT_S):
        claim = f"{name}.claim-{int(time.time())}-{uuid.uuid4().hex}"
        try:
            store.put(claim, b"")  # it may arrive although the answer is lost
            claims = [_CLAIM.search(entry.name) for entry in store.list(f"{name}.claim-") if entry.name != claim]
            now = time.monotonic()
            is_alone = True
            for match in filter(None, claims):
                was_watched = now - seen_at.setdefault(match.string, now) >= _CLAIM_WATCHED_S
                age_s = time.time() - int(match[1])
                is_dead = abs(age_s) > _CLAIM_VALID_S if was_watched else age_s > _CLOCKS_DIFFER_S
                if match.string in _withdrawn or is_dead:
                    store.delete(match.string)
                else:
                    is_alone = False
            if not is_alone:
                continue
            version = None
            with contextlib.suppress(NotFoundError):
                version = content_version(store.read(name))
            yield version
            return
        finally:
            _withdrawn.add(claim)  # if it cannot be deleted now, the next attempt does not wait for it
            store.delete(claim)
            _withdrawn.discard(claim)
    raise UnavailableError(f"{store.url}/{name}: other processes keep writing it. Let one process write it.")
