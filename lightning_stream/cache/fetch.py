"""The index and the files of a shard, from their store: get, verify, decompress, verify."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from lightning_stream.cache.folder import CacheConfig, CacheFolder
from lightning_stream.counters import Counters
from lightning_stream.errors import CacheError, DigestError, FormatError, NotFoundError, StoreError, UnavailableError
from lightning_stream.formats.codecs import decompress_file
from lightning_stream.formats.hashing import FASTEST_FIRST, digest, digest_file
from lightning_stream.formats.index import INDEX_NAME, FileEntry, Index, ShardEntry, version_name
from lightning_stream.formats.mds.encode import is_intact
from lightning_stream.formats.rows import ROWS, is_made_from
from lightning_stream.shared_files import FULL, publish_bytes
from lightning_stream.stores import RetryingStore, Store
from lightning_stream.stores.base import REMEDY
from lightning_stream.version_log import Known, read_index, read_newest

_LARGE_INDEX_BYTES = 1 << 20


class OtherFormat(Protocol):
    """Makes the index and the shards of a dataset in another format."""

    @property
    def identity(self) -> str:
        """What distinguishes its shards from those of other settings."""

    @property
    def names(self) -> str:
        """What names its files, so that no index.json beside them is read; empty for a whole folder."""

    def recognises(self, index: bytes) -> bool:
        """Return whether the bytes of an index.json are those of another format."""

    def index(self, store: Store, before: bytes | None) -> bytes:
        """Return the text of the index of what a store holds; NotFoundError if it is of no known format.

        ``before`` was made of the same store; it is returned if it still holds.
        """

    def write(self, store: Store, entry: ShardEntry, to: Path) -> None:
        """Make a shard in the file `to`."""

    def has_samples(self, store: Store, entry: ShardEntry) -> bool:
        """Return whether `samples` costs less than the shard."""

    def samples(self, store: Store, entry: ShardEntry, numbers: Sequence[int]) -> list[bytes]:
        """Return the bytes of some samples of a shard that is not made."""


@dataclass(frozen=True)
class ShardFetcher:
    """Downloads, verifies and decompresses the files of one shard. `kept` folders may hold compressed files.

    A shard with an origin is made by `make` instead. ``is_ours`` is whether the drafts are still those of this process.
    """

    store: Store
    compression: str | None
    config: CacheConfig
    kept: tuple[Path, ...]
    counters: Counters
    is_ours: Callable[[], bool]
    connections: int = 1
    make: Callable[[Path], object] | None = None

    def fetch(self, raw: FileEntry, compressed: FileEntry | None, draft: Path, packed: Path) -> None:
        """Put the verified bytes of the raw file into `draft`; a compressed file that was fetched stays in `packed`."""
        if raw.origin is not None and self.make is not None:
            with self.counters.timed("convert_s"):
                self.make(draft)
            return
        here = None
        if compressed is not None:
            paths = (folder / compressed.basename for folder in self.kept)
            here = next((path for path in paths if size_of(path) == compressed.num_bytes), None)
        for left in reversed(range(self.config.refetches + 1)):
            try:
                self._once(raw, compressed, draft, packed, here)
                return
            except FormatError as error:  # noqa: PERF203 (the loop is over retries)
                if not left or is_full(error) or not self.is_ours():
                    raise
                self.counters.add("retries")
                self.counters.add("corrupt")
                here = None

    def link(self, raw: FileEntry, draft: Path) -> bool:
        """Put a raw file that is here, and verified, into `draft`; return whether there is one."""
        for folder in self.kept:
            with contextlib.suppress(DigestError, FileNotFoundError):
                verify(folder / raw.basename, raw, self.config.validate_hash, raw.basename)
                draft.unlink(missing_ok=True)
                draft.symlink_to((folder / raw.basename).absolute())
                return True
        return False

    def _once(self, raw: FileEntry, compressed: FileEntry | None, draft: Path, packed: Path, here: Path | None) -> None:
        where = f"{self.store.url}/{raw.basename}"
        if compressed is None or self.compression is None:
            self._get(raw, draft)
        else:
            if here is None:
                self._get(compressed, packed)
            source = here or packed
            with self.counters.timed("verify_s"):
                verify(source, compressed, self.config.validate_hash, f"{self.store.url}/{compressed.basename}")
            with self.counters.timed("decompress_s"):
                decompress_file(self.compression, source, draft, raw.num_bytes)
            where = f"{where} (from {compressed.basename})"
        with self.counters.timed("verify_s"):
            verify(draft, raw, self.config.validate_hash, where)

    def _get(self, file: FileEntry, draft: Path) -> None:
        draft.unlink(missing_ok=True)
        try:
            with self.counters.timed("download_s"):
                self.store.get(file.basename, draft, file.num_bytes, self.connections)
            if not isinstance(self.store, RetryingStore):  # which counts bytes as they arrive
                self.counters.add("fetched_bytes", size_of(draft) or 0)
        except NotFoundError as error:
            raise NotFoundError(f"{error} The index lists this file: the dataset there is not whole.") from error
        if isinstance(self.store, RetryingStore) and size_of(draft) is None:  # with its folder
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(draft))


def check_size(path: Path, file: FileEntry, where: str) -> None:
    """Raise DigestError unless a file has the size in its index; `where` names it in the message."""
    if not is_here(path, file):
        size = size_of(path)
        raise DigestError(f"{where}: the index promises {file.num_bytes:,} bytes; there are {size or 0:,}. {REMEDY}")


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
    if name is not None and (found := digest_file([name], path)[name]) != file.hashes[name]:
        raise DigestError(f"{where}: the index promises {name} {file.hashes[name]}; the bytes have {found}. {REMEDY}")


def is_here(path: Path, file: FileEntry) -> bool:
    """Return whether there is a file with the size in its index; any size if that is an estimate."""
    size = size_of(path)
    if size is None or file.origin is None:
        return size == file.num_bytes
    return file.origin.kind != ROWS or is_made_from(path, file.origin)


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


class IndexFile:
    """Fetches the index into its folder, which holds one dataset: the shards of another one have the same names.

    If a new index has other bytes for a shard that the cache has fetched, `drop` deletes that shard.
    """

    def __init__(
        self, store: Store, folder: CacheFolder, drop: Callable[[ShardEntry], object], other: OtherFormat | None = None
    ) -> None:
        self._store, self._other = store, other
        self._folder = folder
        self._drop = drop

    def here(self, name: str) -> Index | None:
        """Return the index in the folder; None if there is none, or another dataset's."""
        path = self._folder.path / name
        if not path.is_file() or self._folder.source() not in (None, self._label):
            return None
        try:
            return Index.from_bytes(path.read_bytes(), str(path))
        except FileNotFoundError:  # it was deleted meanwhile
            return None

    def read(self, name: str, draft: Path | None = None, known: Known | None = None) -> Index:
        """Read an index from the store. A user's own download gets it as it was published last, into a draft."""
        store: Any = self._store  # or a user's own, which has `get` alone
        try:
            if name == INDEX_NAME and self._other is not None and self._other.names:
                raise NotFoundError(f"{store.url}/{self._other.names} names files.")
            if draft is None or isinstance(store, Store):
                return read_newest(store, known).index if name == INDEX_NAME else read_index(store, name)
            store.get(name, draft)
            return Index.from_bytes(draft.read_bytes(), f"{self._store.url}/{name}")
        except NotFoundError as error:
            if name != INDEX_NAME:
                raise
            if self._other is not None and self._other.names:
                raise
            raise NotFoundError(f"{error} A dataset is a folder with {name}, which its writer puts last.") from error

    def is_made(self, name: str, error: Exception) -> bool:
        """Return whether an index that cannot be read is to be made, since the dataset is in another format."""
        if self._other is None or name != INDEX_NAME:
            return False
        return isinstance(error, NotFoundError) or self._other.recognises(self._store.read(name))

    def _made(self, old: bytes | None, error: Exception) -> Index:
        """Make the index of a dataset in another format; ``error`` is why it has none."""
        assert self._other is not None
        before = old if self._folder.source() == self._label else None
        try:
            text = self._other.index(self._store, before)
        except UnavailableError:
            raise
        except NotFoundError as found:
            raise NotFoundError(f"{error} {found}") from error
        except StoreError as found:  # it cannot be listed
            raise error from found
        return Index.from_bytes(text, f"{self._store.url}/{INDEX_NAME}")

    def fetch(self, name: str, draft: Path) -> Index:
        """Fetch the index into a draft and publish it; under its lock. CacheError if there is another dataset."""
        path = self._folder.path / name
        old = path.read_bytes() if path.is_file() else None
        is_ours, is_made = old is not None and self._folder.source() == self._label, False
        published = _Published(self._folder, old if is_ours and name == INDEX_NAME else None)
        try:
            index = self.read(name, draft, published)
        except (NotFoundError, FormatError) as error:
            if not (is_made := self.is_made(name, error)):
                raise
            index = self._made(old, error)
        new = index.data
        former = index if old == new else self._former(path, old)
        self._refuse_another(former, index)
        if former is not None and (former.digest, former.schemas) != (index.digest, index.schemas):
            if old is not None and is_made:  # no store keeps it: a resume compares the files
                publish_bytes(old, self._folder.path / version_name(former.digest), self._folder.modes)
            now = {entry.raw.basename: entry.raw for shard in range(len(index)) for entry in index.entries(shard)}
            for entry in chain.from_iterable(map(former.entries, range(len(former)))):
                if now.get(entry.raw.basename) != entry.raw:
                    self._drop(entry)
        # It was parsed before: a file that is not an index would make every later run fail.
        # In this order: if it is killed in between, the folder is known to hold no other dataset.
        if not is_ours or old != new:
            publish_bytes(self._label.encode(), self._folder.control / "source", self._folder.modes)
            draft.write_bytes(new)
            self._folder.publish(draft, name)
        else:
            draft.unlink(missing_ok=True)
        published.keep(index)
        return index

    @property
    def _label(self) -> str:
        """Identifies the store, and shows its URL without secrets."""
        return f"{hashlib.sha256(self._store.identity.encode()).hexdigest()[:32]} {self._store.url}"

    def _former(self, path: Path, text: bytes | None) -> Index | None:
        """Parse the index in the folder; None if there is none, or one of ours that is damaged."""
        try:
            return None if text is None else Index.from_bytes(text, str(path))
        except FormatError as error:
            if self._folder.source() == self._label:
                return None
            raise CacheError(
                f"a cache folder's index.json is the dataset's; the one in {self._folder.path} cannot be read "
                f"({error}), and this cache did not put it there. Delete it, or choose another `local`."
            ) from error

    def _refuse_another(self, before: Index | None, index: Index) -> None:
        """Raise CacheError if the folder's shards may be another dataset's.

        Only hashes can show that two stores hold the same shards, or that an index fits the shards beside it, if
        somebody else put them here: names, sizes and counts are often equal, e.g. for tokens.
        """
        source = self._folder.source()
        same = before is not None and before.digest == index.digest
        if source == self._label or (source is None and (before is None or same)):
            return
        if before is not None and (source is None or same) and _all_hashed(index) and _all_hashed(before):
            return
        holder = "an index.json of another" if source is None else f"that of {source.partition(' ')[2]}"
        why = " (their shards have no hashes to compare)" if same or source is None else ""
        raise CacheError(
            f"a cache folder holds one dataset: {self._folder.path} holds {holder}, and "
            f"{self._store.url} is another{why}. Pass another local=, or delete the folder."
        )


class _Published:
    """Which version of the store's index.json the index in a folder was made of: a large one is not read twice."""

    def __init__(self, folder: CacheFolder, index: bytes | None) -> None:
        self._path, self._modes, self._index = folder.control / "published", folder.modes, index
        self._where = str(folder.path / INDEX_NAME)
        self._version: str | None = None

    def __call__(self, version: str | None) -> Index | None:
        """Return the folder's index if it was made of this version. To read a small one keeps the connection."""
        self._version = version
        with contextlib.suppress(FileNotFoundError):
            if self._index is not None and len(self._index) >= _LARGE_INDEX_BYTES and version is not None:
                label, _, kept = self._path.read_bytes().partition(b"\n")
                if label == self._label(self._index):
                    return Index.from_bytes(self._index, self._where, kept)
        return None

    def keep(self, index: Index) -> None:
        """Note that the folder's index, which is this one, was made of the version that was asked for."""
        if self._version is None or len(index.data) < _LARGE_INDEX_BYTES:
            return
        content = self._label(index.data) + b"\n" + index.to_keep()
        if not self._path.is_file() or self._path.read_bytes() != content:
            publish_bytes(content, self._path, self._modes, durable=False)

    def _label(self, index: bytes) -> bytes:
        return f"{digest('xxh3_128', index)} {self._version}".encode()


def _all_hashed(index: Index) -> bool:
    entries = chain.from_iterable(map(index.entries, range(len(index))))
    return all(raw.hashes for entry in entries for raw, _ in entry.files)
