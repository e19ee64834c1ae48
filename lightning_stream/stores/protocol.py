"""The protocol through which bytes move: what every store promises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

if TYPE_CHECKING:
    from .transfer import ObjectStream


@dataclass(frozen=True)
class ObjectEntry:
    """One object of a listing; `name` is relative to the store's URL."""

    name: str
    num_bytes: int


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
        """What separates this store's content from any other's: URL and, where it matters, endpoint or account."""

    @property
    def traits(self) -> StoreTraits:
        """What its server can do."""

    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        """Stream the bytes ``[begin, end)`` of an object (to its end: None)."""

    def get(self, name: str, to: Path | BinaryIO, num_bytes: int | None = None, connections: int = 1) -> int:
        """Write a whole object into `to`, streamed, and return the number of bytes. A path is overwritten in place.

        Args:
            name: The object.
            to: A path, or a file open for writing.
            num_bytes: The promised size, where the caller knows one. Nothing larger is downloaded (DigestError), and a
                large object comes as several ranges at once.
            connections: How many the caller has to spare, so that smaller objects may come as several ranges too.
        """

    def read(self, name: str) -> bytes:
        """Return a whole object, for small ones."""

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes ``[begin, end)`` of an object; fewer only where the object ends before."""

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """Store an object, whole or not at all; an older one of that name is replaced.

        With `if_absent` only where there is no object of that name (else :class:`AlreadyExistsError`). With
        `if_version` only where the object still is the one whose :attr:`ObjectStream.version` that was (else
        :class:`ConflictError`). Of several that try at once, one succeeds.
        """

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """List all objects whose names begin with `prefix`, at any depth, sorted by name. No such objects: empty."""

    def list_page(self, prefix: str = "", token: str | None = None) -> ListingPage:
        """Return the entries of one page as the server orders them, and the token of the next page (None: the last)."""

    def delete(self, name: str) -> None:
        """Remove an object; one that is absent already is no error."""

    def exists(self, name: str) -> bool:
        """Tell whether there is an object of that name."""
