"""A local folder and a remote store that hold one dataset, as one store."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lightning_stream.errors import AlreadyExistsError, ConflictError, NotFoundError
from lightning_stream.stores import ObjectEntry, ObjectStream, Store


def seen(store: Store, name: str) -> tuple[bytes | None, str | None]:
    """Read an object, and its version; None for both if there is no object."""
    with contextlib.suppress(NotFoundError), store.open(name) as body:
        return b"".join(body), body.version
    return None, None


class Pair(Store):
    """Two stores of the same objects: the main one, which is read, and a copy. Both are changed, the main one first.

    The condition of a put holds for the copy as it was when the object was opened here the last time. A refused put is
    no error where the store has these bytes: the answer to the first attempt was lost, or another rank put the same.
    ConflictError if only the copy refuses; its message says so.
    """

    def __init__(self, main: Store, copy: Store) -> None:
        self.url = f"{main.url} and {copy.url}"
        self._main = main
        self._copy = copy
        self._copies = dict[str, str | None]()  # versions in the copy, by name

    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        _, self._copies[name] = seen(self._copy, name)
        return self._main.open(name, begin, end)

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        is_conditional = if_absent or if_version is not None
        copy = self._copies.get(name) if is_conditional else None
        for store, absent, there in (
            (self._main, if_absent, if_version),
            (self._copy, is_conditional and not copy, copy),
        ):
            try:
                store.put(name, source, if_absent=absent, if_version=there)
            except (AlreadyExistsError, ConflictError) as error:
                if seen(store, name)[0] == source:
                    continue
                if store is self._main:
                    raise
                raise ConflictError(
                    f"{store.url}/{name} changed since this writer began, but {self._main.url} was changed before, "
                    "and holds the dataset of this writer. Decide which of the two datasets to keep, and copy it to "
                    "the other place"
                ) from error

    def list_page(self, prefix: str = "", token: str | None = None) -> tuple[list[ObjectEntry], None]:  # noqa: ARG002
        """Return the objects of both; one that a store lacks, or has in another size, has -1 bytes."""
        main, copy = (
            {entry.name: entry.num_bytes for entry in store.list(prefix)} for store in (self._main, self._copy)
        )
        return [ObjectEntry(name, main[name] if main.get(name) == copy.get(name) else -1) for name in main | copy], None

    def delete(self, name: str) -> None:
        self._main.delete(name)
        self._copy.delete(name)
