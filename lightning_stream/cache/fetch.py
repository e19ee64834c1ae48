"""A file from its store, and whether it is what the index promises."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lightning_stream.counters import Counters
from lightning_stream.errors import DigestError, NotFoundError
from lightning_stream.formats.hashing import FASTEST_FIRST, digest_file
from lightning_stream.formats.index import FileEntry
from lightning_stream.formats.mds.encode import is_intact, is_made_from
from lightning_stream.formats.rows import ROWS
from lightning_stream.shared_files import FULL, deleted
from lightning_stream.stores import RetryingStore, Store
from lightning_stream.stores.base import REMEDY


def download(store: Store, file: FileEntry, to: Path, counters: Counters, connections: int = 1) -> None:
    """Fetch a file that the index lists. FileNotFoundError if its folder here is deleted meanwhile."""
    to.unlink(missing_ok=True)
    try:
        with counters.timed("download_s"):
            num_bytes = store.get(file.basename, to, file.num_bytes, connections)
    except NotFoundError as error:
        raise NotFoundError(f"{error} The index lists this file: the dataset there is not whole.") from error
    if not isinstance(store, RetryingStore):  # which counts bytes as they arrive
        counters.add("fetched_bytes", num_bytes)
    elif size_of(to) is None:  # with its folder
        raise deleted(to)


def check_size(path: Path, file: FileEntry, where: str) -> None:
    """Raise DigestError unless a file has the size in its index; `where` names it in the message."""
    if not is_here(path, file):
        size = size_of(path) or 0
        raise DigestError(f"{where}: the index promises {file.num_bytes:,} bytes; there are {size:,}. {REMEDY}")


def verify(path: Path, file: FileEntry, validate_hash: str | None, where: str) -> None:
    """Raise DigestError unless a file has the size and the hash in its index: `validate_hash`, or the fastest one."""
    check_size(path, file, where)
    if file.origin is not None:
        if not is_intact(path):
            raise DigestError(f"{where}: its bytes are not those that were written. {REMEDY}")
        return
    if validate_hash is not None and validate_hash not in file.hashes:
        has = ", ".join(sorted(file.hashes)) or "none"
        raise ValueError(
            f"validate_hash={validate_hash!r} asks for a hash that the index must have; for {file.basename} it has "
            f"{has}. Choose one of these, or None."
        )
    name = validate_hash or next((name for name in FASTEST_FIRST if name in file.hashes), None)
    if name is not None and (digest := digest_file([name], path)[name]) != file.hashes[name]:
        raise DigestError(f"{where}: the index promises {name} {file.hashes[name]}; the bytes have {digest}. {REMEDY}")


def is_here(path: Path, file: FileEntry) -> bool:
    """Return whether there is a file with the size in its index; any size if that is an estimate."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # also if it is evicted meanwhile
        size = path.stat().st_size
        if file.origin is None:
            return size == file.num_bytes
        return file.origin.kind != ROWS or is_made_from(path, file.origin.stamp)
    return False


def size_of(path: Path) -> int | None:
    """Return a file's size in bytes; None if there is no such file."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_full(error: BaseException | None) -> bool:
    """Return whether this error, or its cause, is about a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__
    return False
