"""One file from its store to a draft: get, verify, decompress, verify."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_stream.errors import DigestError, FormatError, NotFoundError
from lightning_stream.formats.codecs import decompress_file
from lightning_stream.formats.hashing import FASTEST_FIRST, digest_file
from lightning_stream.formats.index import FileEntry
from lightning_stream.shared_files import FULL
from lightning_stream.stores import Store
from lightning_stream.stores.base import REMEDY

from .config import CacheConfig


@dataclass(frozen=True)
class ShardFetcher:
    """Downloads, verifies and decompresses the files of one shard. `kept` folders may hold compressed files."""

    store: Store
    compression: str | None
    config: CacheConfig
    kept: tuple[Path, ...]
    connections: int = 1

    def fetch(self, raw: FileEntry, compressed: FileEntry | None, draft: Path, packed: Path) -> None:
        """Put the verified bytes of the raw file into `draft`; a compressed file that was fetched stays in `packed`."""
        here = None
        if compressed is not None:
            paths = (folder / compressed.basename for folder in self.kept)
            here = next((path for path in paths if size_of(path) == compressed.num_bytes), None)
        for left in reversed(range(self.config.refetches + 1)):
            try:
                self._once(raw, compressed, draft, packed, here)
                return
            except FormatError as error:  # noqa: PERF203 (the loop is over retries)
                if not left or is_full(error):
                    raise
                here = None

    def _once(self, raw: FileEntry, compressed: FileEntry | None, draft: Path, packed: Path, here: Path | None) -> None:
        where = f"{self.store.url}/{raw.basename}"
        if compressed is None or self.compression is None:
            self._get(raw, draft)
        else:
            if here is None:
                self._get(compressed, packed)
            source = here or packed
            verify(source, compressed, self.config.validate_hash, f"{self.store.url}/{compressed.basename}")
            decompress_file(self.compression, source, draft, raw.num_bytes)
            where = f"{where} (from {compressed.basename})"
        verify(draft, raw, self.config.validate_hash, where)

    def _get(self, file: FileEntry, draft: Path) -> None:
        draft.unlink(missing_ok=True)
        try:
            self.store.get(file.basename, draft, file.num_bytes, self.connections)
        except NotFoundError as error:
            raise NotFoundError(f"{error} The index lists this file: the dataset there is not whole.") from error


def check_size(path: Path, file: FileEntry, where: str) -> None:
    """Raise DigestError unless a file has the size in its index; `where` names it in the message."""
    size = size_of(path)
    if size != file.num_bytes:
        raise DigestError(f"{where}: the index promises {file.num_bytes:,} bytes; there are {size or 0:,}. {REMEDY}")


def verify(path: Path, file: FileEntry, validate_hash: str | None, where: str) -> None:
    """Raise DigestError unless a file has the size and the hash in its index: `validate_hash`, or the fastest one."""
    check_size(path, file, where)
    if validate_hash is not None and validate_hash not in file.hashes:
        has = ", ".join(sorted(file.hashes)) or "none"
        raise ValueError(
            f"validate_hash={validate_hash!r} asks for a hash that the index must have; for {file.basename} it has "
            f"{has}. Choose one of these, or None."
        )
    name = validate_hash or next((name for name in FASTEST_FIRST if name in file.hashes), None)
    if name is not None and (found := digest_file([name], path)[name]) != file.hashes[name]:
        raise DigestError(f"{where}: the index promises {name} {file.hashes[name]}; the bytes have {found}. {REMEDY}")


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
