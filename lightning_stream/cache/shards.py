"""A stream's shards, in their own folder or in a cache folder that all processes of a machine share."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

from lightning_stream.cache.folder import CacheConfig, CacheFolder, default_folder
from lightning_stream.counters import Counters
from lightning_stream.errors import CacheFullError, DigestError, FormatError, NotFoundError, UnavailableError
from lightning_stream.formats.codecs import decompress_file
from lightning_stream.formats.index import INDEX_NAME, FileEntry, Index, ShardEntry
from lightning_stream.formats.rows import as_mds, write_as_mds
from lightning_stream.shared_files import (
    LOCK_FDS,
    FileLock,
    backoff,
    before_boot,
    deleted,
    same_file,
    try_flock,
)
from lightning_stream.stores import RetryingStore, Store
from lightning_stream.stores.local import LocalStore
from lightning_stream.threads import Lock

from .fetch import check_size, download, is_full, is_here, size_of, verify
from .index import IndexFile, OtherFormat
from .space import CacheEntry, InUseError, Space, Spaces

T = TypeVar("T")
_log = logging.getLogger(__name__)


@final
class Lease:
    """A shard in `folder` that cannot be evicted before `close`, or before this process ends.

    A lease without references is closed, so a dataset that was dropped keeps no shard from being evicted. `fd` is the
    shard's first file, `name`, under a shared lock; None if nothing is ever evicted. `is_held` until it is closed.
    """

    # No weakref.finalize: fetching threads would change its registry while the interpreter's exit walks it.

    def __init__(self, folder: Path, fd: int | None, name: str = "") -> None:
        self.folder = folder
        self._path = folder / name
        self._fd = fd
        self._pid = os.getpid()
        self.is_held = True
        self._closing = Lock()  # a thread may close the lease while another one uses its descriptor

    @classmethod
    def take(cls, folder: Path, name: str, draft: Path | None = None) -> Lease | None:
        """Lease a file that is here, or the draft of it; None if it is not, or is being evicted."""
        path = draft or folder / name
        try:
            fd = LOCK_FDS.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        lease = cls(folder, fd, name)
        return lease if try_flock(fd, path, shared=True) and same_file(fd, path) else None

    def is_current(self) -> bool:
        """Return whether the shard's first file was neither deleted nor fetched again since; True if it is closed."""
        with self._closing:
            return self._fd is None or same_file(self._fd, self._path)

    def close(self) -> None:
        """Release the shard; a second call does nothing."""
        if self._pid != os.getpid():
            return  # the descriptors of leases are closed in a forked child
        with self._closing:
            fd = self._fd
            self._fd = None
            self.is_held = False
            if fd is not None:
                LOCK_FDS.close(fd)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ends():  # modules are gone then, and the kernel closes it
            self.close()


class ShardCache:
    """One stream's shards, from their store in a local folder.

    It is thread-safe, safe under fork, and can be pickled. It makes no file before the first call.

    Args:
        store: The store of the shards. None: `folder` holds the only copy.
        folder: The cache; None for :func:`default_folder`. With the store's own folder, or None and a local store,
            shards are read in place and nothing there is changed; those that are only there compressed are decompressed
            into :func:`default_folder`.
        config: The settings.
        other: What makes the index and the shards of a dataset in another format; None if there is none.
        counters: Where to count what is fetched; None for counters of its own.
        together: The folders that the limit counts together; None for this one alone.
    """

    def __init__(
        self,
        store: Store | None,
        folder: Path | str | None = None,
        config: CacheConfig | None = None,
        other: OtherFormat | None = None,
        counters: Counters | None = None,
        together: Spaces | None = None,
    ) -> None:
        if store is None and folder is None:
            raise ValueError("a cache needs a store, or a folder that holds the shards, or both; got neither")
        self.store: Store = store if store is not None else LocalStore(str(folder))
        self.config = config or CacheConfig()
        self.other = other
        self.counters = counters or Counters()
        chosen = None if folder is None else Path(folder).expanduser().absolute()
        store_folder = self.store.folder if isinstance(self.store, LocalStore) else None
        self.in_place = store_folder is not None and (
            chosen is None or os.path.realpath(chosen) == os.path.realpath(store_folder)
        )
        self._source = store_folder if self.in_place else None
        identity = self.store.identity + ("" if other is None else other.identity)
        self.folder = default_folder(identity) if chosen is None or self.in_place else chosen
        self._place = CacheFolder(self.folder, self.config.shared)
        if isinstance(store, RetryingStore):
            store.counters = self.counters
            store.share_keys(self._place)
        self._folders = list(filter(None, (self._source, self.folder)))
        self._together = together
        self._space = Space(self._place, together)
        self._index = IndexFile(self.store, self._place, self._drop, other)
        self._checked: set[str] = set()
        self._fetched: set[str] = set()
        self._refetched: set[str] = set()
        self._refused: dict[str, FormatError] = {}  # rows that cannot be read

    def __reduce__(self) -> tuple[Any, ...]:
        folder = self._source or self.folder
        return type(self), (self.store, folder, self.config, self.other, self.counters, self._together)

    def index(self, name: str = INDEX_NAME, *, refresh: bool = False) -> Index:
        """Return the index, fetched once per folder, or now with `refresh`. CacheError for another dataset's folder.

        If a new index has other bytes for a shard that was fetched, that shard is deleted.
        """
        here = partial(self._index.here, name)
        if self.in_place:
            try:
                return self._index.read(name)
            except (NotFoundError, FormatError) as error:
                if name != INDEX_NAME and self.other is not None and (index := here()) is not None:
                    return index  # a former one, of files in another format
                if not self._index.is_made(name, error):
                    raise
        known = (lambda: None) if refresh else here
        return self._once(name, known, lambda draft, _: self._index.fetch(name, draft))

    def newest_index(self, name: str = INDEX_NAME) -> Index:
        """Return the index as the store has it now; if the store cannot be reached, the one in the cache."""
        try:
            return self.index(name, refresh=True)
        except UnavailableError as error:
            if self.in_place or not (self.folder / name).is_file():
                raise
            _log.warning("%s is read from the cache alone, as it was when last reached: %s", self.store.url, error)
            return self.index(name)

    def _once(self, name: str, done: Callable[[], T | None], get: Callable[[Path, FileLock], T]) -> T:
        """Have one process get and publish a file, unless it is here; `get` has a draft for it, under its lock."""

        def work(lock: FileLock) -> T:
            with self._drafts_of(name, lock):
                return get(self._place.draft(name, "raw"), lock)

        return self._run_once(name, done, work)

    def _run_once(
        self, name: str, done: Callable[[], T | None], work: Callable[[FileLock], T], wait_s: float | None = None
    ) -> T:
        with self._place.translated_errors():
            return self._place.run_once(name, done, work, self.config.wait_s if wait_s is None else wait_s)

    def side_file(self, file: FileEntry, make: Callable[[Path], object] | None = None) -> Path:
        """Return the verified path of a file that is no shard, e.g. of lengths. Like the index, it is never evicted.

        It is fetched once per folder, or made: ``make`` writes it into the path that it gets.

        Raises:
            NotFoundError, DigestError: The store has no such file; its bytes do not match the index.
        """
        name = file.basename
        where = f"{self.store.url}/{name}"
        # Former releases gave such a file one hash, whichever the shards have: it is checked by that.
        wanted = self.config.validate_hash if make is None else None
        hash_name = None if file.hashes and wanted not in file.hashes else wanted
        if self._source is not None and make is None:
            if size_of(path := self._source / name) is None:
                raise NotFoundError(f"no such file: {where}, which the index lists. Check the folder.")
            verify(path, file, hash_name, where)
            return path

        def here() -> Path | None:
            try:
                verify(self.folder / name, file, hash_name, where)
            except DigestError:
                return None
            return self.folder / name

        def get(draft: Path, lock: FileLock) -> Path:
            if make is None:
                self._until_right(lambda: self._download(file, draft, hash_name), lock)
            else:
                make(draft)
            self._place.publish(draft, name, durable=not file.hashes)
            return self.folder / name

        return self._once(name, here, get)

    def present(self, entry: ShardEntry) -> bool:
        """Return whether every raw file of the shard is here, with its size."""
        return self._find(self._cached_entry(entry).raw) is not None

    def arriving(self, entry: ShardEntry) -> Path:
        """Return the path of a shard's file while it is being fetched, by any process of the machine.

        It grows in order, but has its final size at once where it comes in parts.
        """
        return self._place.draft(entry.raw.basename, "0.raw" if entry.compressed is None else "0.zip")

    def ensure(self, entry: ShardEntry) -> Path:
        """Fetch the shard unless it is here; return its folder. With a limit, hold a `lease` while reading."""
        with self.lease(entry) as lease:
            return lease.folder

    def lease(
        self,
        entry: ShardEntry,
        wait_s: float | None = None,
        connections: int = 1,
        room_wait_s: float | None = None,
    ) -> Lease:
        """Fetch the shard unless it is here; it stays until the lease is closed.

        Args:
            entry, connections: The shard; the number of spare connections, with which a large one is fetched faster.
            wait_s: Longest wait for another process's fetch of it; None for that of the config.
            room_wait_s: Longest wait for others to release shards; None for that of the config or, where another's
                fetch is not waited for, none.

        Raises:
            NotFoundError, AccessError, UnavailableError: The store failed.
            DigestError, FormatError: The bytes do not match the index, also when fetched again.
            CacheFullError: There is no space on the disk, or under the limit; `InUseError` if there may be later.
            LockTimeoutError: Another process was still fetching at the deadline.
        """
        cached = self._cached_entry(entry)
        if self._source is not None and cached is entry and (lease := self._in_place(entry)):
            return lease
        pin = partial(self._pin, cached.raw)
        fetch = partial(self._fetch, entry, connections)
        # Room is not waited for under the shard's lock: who holds the shards in use may wait for that.
        if room_wait_s is None:
            room_wait_s = self.config.room_wait_s if wait_s is None else 0.0
        for _ in backoff(room_wait_s):
            with contextlib.suppress(InUseError):
                return self._run_once(cached.raw.basename, pin, fetch, wait_s)
        return self._run_once(cached.raw.basename, pin, fetch, wait_s)

    def rooms(self, entries: Sequence[ShardEntry]) -> list[tuple[int, int | None]]:
        """Return the bytes of each shard at least, and what is added while it is fetched: None if it is here."""
        ours = {cached.names[0]: cached.num_bytes for cached in self._space.entries()}
        rooms: list[tuple[int, int | None]] = []
        for entry in entries:
            raw = self._cached_entry(entry).raw
            if self._find(raw) is not None:
                rooms.append((ours.get(raw.basename, 0), None))  # a user's takes no room
                continue
            packed = [file for _, file in entry.files if file is not None and self._find(file) is None]
            packed_bytes = sum(file.num_bytes for file in packed)
            kept_bytes = packed_bytes if self.config.keep_zip else 0
            raw_bytes = raw.num_bytes if raw.origin is None else 0  # else it is an estimate
            rooms.append((raw_bytes + kept_bytes, packed_bytes - kept_bytes))
        return rooms

    def fetch_again(self, entry: ShardEntry, lease: Lease | None) -> Lease | None:
        """Fetch a shard again whose files could not be read under `lease`. Only one thread per shard may call this.

        `lease` is None if it was closed since: then the files that were read may not be those that are here now.

        Returns:
            None if that cannot help: the files are the only copy, their bytes match the index, or this process has
            fetched them again before.
        """
        raw = self._cached_entry(entry).raw
        name = raw.basename
        home = self._find(raw)
        if home is None or (lease is not None and not lease.is_current()):
            return self.lease(entry)  # deleted, or fetched again by another meanwhile
        if home != self.folder or name in self._refetched:
            return None
        self._refetched.add(name)
        if raw.hashes:
            try:
                verify(self.folder / name, raw, self.config.validate_hash, name)
                return self.lease(entry) if lease is None else None
            except DigestError as error:
                _log.warning("A shard in the cache %s is damaged, and is fetched again: %s", self.folder, error)
        done = lambda: None if lease is None or lease.is_current() else self._pin(raw)  # noqa: E731
        return self._run_once(name, done, partial(self._fetch, entry, 1, fresh=True))

    def plan(self, next_use: Callable[[str], float | None] | None) -> None:
        """Set the function from a raw basename to its next use, for evictions.

        Smaller is sooner, infinite is not again, and None is not known.
        """
        self._space.next_use = next_use

    def last_used(self, basename: str) -> float:
        """Return when a shard was last read here, in seconds since the epoch; 0.0 if it is not here."""
        return self._space.last_used(CacheEntry((basename,), 0))

    def evict(self, entry: ShardEntry) -> bool:
        """Delete the shard's files; False if it is in use, not here, or was not fetched by a cache."""
        if self.in_place or not self.present(entry):
            return False
        self._place.prepare()
        removed = [self._space.remove(cached) for cached in self._marked([entry])]
        return any(removed)

    def _marked(self, entries: Iterable[ShardEntry]) -> list[CacheEntry]:
        """What this cache has fetched of the shards. Former releases held rows as they are."""
        names = {form.raw.basename for entry in entries for form in (entry, as_mds(entry))}
        return [cached for cached in self._space.entries() if cached.names[0] in names]

    def _drop(self, entries: Sequence[ShardEntry], even_in_use: bool) -> None:
        """Delete the shards of a former index; those in use too, where they could be taken for others."""
        for cached in self._marked(entries):
            self._space.remove(cached, even_in_use=even_in_use)

    def _cached_entry(self, entry: ShardEntry) -> ShardEntry:
        """The shard as the cache holds it, in one file: rows as MDS."""
        return as_mds(entry, self._mark(entry))

    def _mark(self, entry: ShardEntry) -> str:
        """What distinguishes versions of rows that are read in place: an index may not tell them apart."""
        if self._source is None or entry.format == "mds":
            return ""
        paths = [self._source / file.basename for files in entry.files for file in files if file is not None]
        return " ".join(str(path.stat().st_mtime_ns) for path in paths if path.exists())

    # -- what is here

    def _find(self, raw: FileEntry) -> Path | None:
        return next((folder for folder in self._folders if is_here(folder / raw.basename, raw)), None)

    def _in_place(self, entry: ShardEntry) -> Lease | None:
        """Return a lease on the only copy; None if it is compressed."""
        assert self._source is not None
        raw = entry.raw
        path = self._source / raw.basename
        if size_of(path) is None:
            if entry.compressed is not None or raw.origin is not None:
                return None
            raise NotFoundError(f"no such file: {path}, which {self._source}/index.json lists. Check the folder.")
        check_size(path, raw, str(path))
        if self.config.validate_hash is not None:
            self._verify_once(path, raw)
        return Lease(self._source, None)

    def _pin(self, raw: FileEntry) -> Lease | None:
        """Return a lease on a shard that is here; None if it is not, or is being evicted."""
        home = self._find(raw)
        if home is None:
            return None
        lease = Lease.take(home, raw.basename)
        if lease is None or not self._trusted(home, raw, lease):
            return None
        # It was deleted, or is another user's; its time matters only for evictions.
        with contextlib.suppress(OSError):
            os.utime(home / raw.basename)
        self.counters.add("shards_here")
        return lease

    def _trusted(self, home: Path, raw: FileEntry, lease: Lease) -> bool:
        """Return whether the file may be read.

        Once per process, it is checked if the user named a hash, or if it was here when the machine was started, since
        its last bytes may not have reached the disk. A file of somebody else, or one that was fetched by another index,
        is checked until that is noted.
        """
        path = home / raw.basename
        is_known = home != self.folder or not raw.hashes or self._space.knows(raw)
        try:
            if not is_known:
                verify(path, raw, self.config.validate_hash, str(path))
            elif self.config.validate_hash is not None or before_boot(path):
                self._verify_once(path, raw)
        except (DigestError, FileNotFoundError):
            return False
        if not is_known:
            self._place.prepare()
            self._space.keep_note(raw)
            if not lease.is_current():  # the note may be about a file that was fetched meanwhile
                self._space.note(raw.basename).unlink(missing_ok=True)
                return False
        return True

    def _verify_once(self, path: Path, file: FileEntry) -> None:
        check = f"{path} {file.hashes}"  # a fresh index may have others
        if check not in self._checked:
            verify(path, file, self.config.validate_hash, str(path))
            self._checked.add(check)

    # -- fetching

    def _fetch(self, entry: ShardEntry, connections: int, lock: FileLock, *, fresh: bool = False) -> Lease:
        """Fetch, check and publish every file of a shard; under its lock. `fresh`: no file that is here is used."""
        raw = self._cached_entry(entry).raw
        place = self._place
        name = raw.basename
        reserved = _reserved(raw, entry)
        with self._drafts_of(name, lock, reserved):
            if not fresh:
                # What has this name is not the shard. Left here, it would be taken for it if this process is killed.
                place.unlink(name)
            self._make_space(reserved, 0.0)
            drafts = [(place.draft(name, f"{i}.raw"), place.draft(name, f"{i}.zip")) for i in range(len(entry.files))]
            get = partial(self._get, entry, connections, lock, fresh)
            paths = list(map(get, entry.files, drafts))
            made = paths[0] if entry.format == "mds" else self._make_of_rows(entry, paths, place.draft(name, "mds"))
            files = [(made, name)]
            for (_, packed), (_, draft) in zip(entry.files, drafts, strict=True):
                if self.config.keep_zip and packed is not None and draft.exists():
                    files.append((draft, packed.basename))
            fetched = CacheEntry(tuple(final for _, final in files), sum(path.stat().st_size for path, _ in files))
            if fetched != reserved:  # no compressed files, or now the size is known
                self._make_space(fetched, self.config.room_wait_s, reserved)
            lease = Lease.take(self.folder, name, made)
            if lease is None or not lock.is_current():
                raise deleted(made)
            # Waiting for the disk (5 ms and more per file) would cost more than fetching. It is not needed if a hash
            # can find the damage of a power cut after the restart.
            durable = not (raw.hashes or raw.origin is not None)
            for draft, final in reversed(files):  # the one that is leased last
                place.publish(draft, final, durable=durable)
            if raw.hashes:
                self._space.keep_note(raw)
        self.counters.add("shards_fetched")
        self.counters.add("shards_fetched_again", name in self._fetched)
        self._fetched.add(name)
        return lease

    def _make_space(self, entry: CacheEntry, wait_s: float, former: CacheEntry | None = None) -> None:
        evicted = self._space.make_space(entry, self.config.limit_bytes, wait_s, former)
        self.counters.add("evictions", evicted)

    def _get(
        self,
        entry: ShardEntry,
        connections: int,
        lock: FileLock,
        fresh: bool,
        files: tuple[FileEntry, FileEntry | None],
        drafts: tuple[Path, Path],
    ) -> Path:
        """Return where the verified bytes of a file of a shard are: in its draft or, of rows, in a file that is here.

        A compressed file that was fetched stays in a draft of its own.
        """
        (raw, packed), (draft, packed_draft) = files, drafts
        compression = entry.compression
        hash_name = self.config.validate_hash
        counters = self.counters
        if raw.origin is not None and self.other is not None:
            with counters.timed("convert_s"):
                self.other.write(self.store, entry, draft)
            return draft
        folders = [] if fresh else self._folders
        for folder in folders if entry.format != "mds" else ():
            with contextlib.suppress(DigestError, FileNotFoundError):
                verify(folder / raw.basename, raw, hash_name, raw.basename)
                return folder / raw.basename
        if packed is None or compression is None:
            self._until_right(lambda: self._download(raw, draft, hash_name, connections), lock)
            return draft
        paths = [folder / packed.basename for folder in folders]
        here = [path for path in paths if size_of(path) == packed.num_bytes][:1]

        def unpack() -> None:
            source = here.pop() if here else packed_draft
            if source is packed_draft:
                download(self.store, packed, packed_draft, counters, connections)
            self._verify_timed(source, packed, hash_name)
            with counters.timed("decompress_s"):
                decompress_file(compression, source, draft, raw.num_bytes)
            self._verify_timed(draft, raw, hash_name, f" (from {packed.basename})")

        self._until_right(unpack, lock)
        return draft

    def _download(self, file: FileEntry, draft: Path, hash_name: str | None, connections: int = 1) -> None:
        download(self.store, file, draft, self.counters, connections)
        self._verify_timed(draft, file, hash_name)

    def _verify_timed(self, path: Path, file: FileEntry, hash_name: str | None, how: str = "") -> None:
        with self.counters.timed("verify_s"):
            verify(path, file, hash_name, f"{self.store.url}/{file.basename}{how}")

    def _until_right(self, get: Callable[[], object], lock: FileLock) -> None:
        """Get a file again if its bytes are wrong, `refetches` times."""
        for left in reversed(range(self.config.refetches + 1)):
            try:
                get()
                return
            except FormatError as error:
                if not left or is_full(error) or not lock.is_current():
                    raise
                self.counters.add("retries")
                self.counters.add("corrupt")

    def _make_of_rows(self, entry: ShardEntry, files: list[Path], to: Path) -> Path:
        name = entry.raw.basename
        if name in self._refused:  # each of its samples would try again
            raise self._refused[name]
        try:
            with self.counters.timed("convert_s"):
                write_as_mds(entry, files, to, self._mark(entry))
        except FormatError as error:
            self._refused[name] = error
            raise
        return to

    @contextlib.contextmanager
    def _drafts_of(self, name: str, lock: FileLock, reserved: CacheEntry | None = None) -> Iterator[None]:
        """Delete the drafts of a file at the end; after an error, the shard's marker too, unless older files stay."""
        try:
            try:
                yield
            finally:
                if is_ours := lock.is_current():  # else they are another process's
                    self._place.delete_drafts(name)
        except BaseException as error:
            if is_ours and reserved is not None and not any((self.folder / name).exists() for name in reserved.names):
                self._space.forget(name)
            if is_full(error):
                raise self._place.disk_full(0 if reserved is None else reserved.num_bytes) from error
            raise


def _reserved(raw: FileEntry, entry: ShardEntry) -> CacheEntry:
    """The file of a shard in the cache, with the compressed ones of its entry in the index."""
    files = [raw, *(packed for _, packed in entry.files if packed is not None)]
    return CacheEntry(tuple(file.basename for file in files), sum(file.num_bytes for file in files))


def check_limit(wanted: Iterable[tuple[ShardCache, ShardEntry]]) -> None:
    """Raise CacheFullError if these shards never fit at once under the limit of their caches, by their sizes."""
    by_cache: dict[ShardCache, list[ShardEntry]] = {}
    most = 0
    for cache, entry in wanted:
        if not cache.in_place:
            by_cache.setdefault(cache, []).append(entry)
            most += _reserved(as_mds(entry).raw, entry).num_bytes
    limit = next((cache.config.limit_bytes for cache in by_cache), None)
    if limit is None or most <= limit:
        return
    rooms = [room for cache, entries in by_cache.items() for room in cache.rooms(entries)]
    # Compressed files that are not kept are deleted one by one, but the last one is here with all raw files.
    fetched = [packed for _, packed in rooms if packed is not None]
    need = sum(stays for stays, _ in rooms) + min(fetched, default=0)
    if fetched and need > limit:
        raise CacheFullError(
            f"cache_limit is {limit:,} bytes; the {len(rooms)} shards of a batch need {need:,} at once. Raise it, "
            "or read from fewer shards at once: a smaller batch or window"
        )
