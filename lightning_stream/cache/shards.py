"""A stream's shards, in their own folder or in a cache folder that all processes of a machine share."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lightning_stream.cache.folder import CacheConfig, CacheFolder, default_folder
from lightning_stream.cache.usage_log import CacheEntry
from lightning_stream.counters import Counters
from lightning_stream.errors import DigestError, FormatError, NotFoundError, UnavailableError
from lightning_stream.formats.index import INDEX_NAME, FileEntry, Index, ShardEntry
from lightning_stream.formats.rows import as_mds, write_as_mds
from lightning_stream.shared_files import (
    FULL,
    LOCK_FDS,
    FileLock,
    before_boot,
    run_once_across_processes,
    same_file,
    try_flock,
)
from lightning_stream.stores import RetryingStore, Store
from lightning_stream.stores.local import LocalStore

from .eviction import Evictor
from .fetch import IndexFile, OtherFormat, ShardFetcher, check_size, is_full, is_here, size_of, verify
from .lease import Lease

T = TypeVar("T")
_DELETIONS = 3  # so many times the folder may be deleted while one file is fetched
_log = logging.getLogger(__name__)


class _Deleted(NamedTuple):
    """What failed because the folder was deleted meanwhile."""

    error: Exception


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
    """

    def __init__(
        self,
        store: Store | None,
        folder: Path | str | None = None,
        config: CacheConfig | None = None,
        other: OtherFormat | None = None,
        counters: Counters | None = None,
    ) -> None:
        if store is None and folder is None:
            raise ValueError("a cache needs a store, or a folder that holds the shards, or both; got neither")
        self.store: Store = store if store is not None else LocalStore(str(folder))
        self.config, self.other, self.counters = config or CacheConfig(), other, counters or Counters()
        if isinstance(store, RetryingStore):
            store.counters = self.counters
        chosen = None if folder is None else Path(folder).expanduser().absolute()
        own = self.store.folder if isinstance(self.store, LocalStore) else None
        self.in_place = own is not None and (chosen is None or os.path.realpath(chosen) == os.path.realpath(own))
        self._source = own if self.in_place else None
        identity = self.store.identity + ("" if other is None else other.identity)
        self.folder = default_folder(identity) if chosen is None or self.in_place else chosen
        self._place = CacheFolder(self.folder, self.config.shared)
        self._evictor = Evictor(self._place)
        self._index = IndexFile(self.store, self._place, self._drop, other)
        self._next_use: Callable[[str], float | None] | None = None
        self._checked: set[str] = set()
        self._fetched: set[str] = set()
        self._refetched: set[str] = set()
        self._refused: dict[str, FormatError] = {}  # rows that cannot be read

    def __getstate__(self) -> dict[str, Any]:
        folder = self._source or self.folder
        values = {"store": self.store, "folder": folder, "config": self.config, "other": self.other}
        return {**values, "counters": self.counters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def index(self, name: str = INDEX_NAME, *, refresh: bool = False) -> Index:
        """Return the index, fetched once per folder, or now with `refresh`. CacheError for another dataset's folder.

        If a new index has other bytes for a shard that was fetched, that shard is deleted.
        """
        if self.in_place:
            try:
                return self._index.read(name)
            except (NotFoundError, FormatError) as error:
                if name != INDEX_NAME and self.other is not None and (index := self._index.here(name)) is not None:
                    return index  # a former one, of files in another format
                if not self._index.is_made(name, error):
                    raise
        with self._translate_os_errors():
            here = partial(self._index.here, name)
            if not refresh and (index := here()) is not None:
                return index
            return self._once(name, (lambda: None) if refresh else here, partial(self._fetch_index, name))

    def newest_index(self, name: str = INDEX_NAME) -> Index:
        """Return the index as the store has it now; if the store cannot be reached, the one in the cache."""
        try:
            return self.index(name, refresh=True)
        except UnavailableError as error:
            if self.in_place or not (self.folder / name).is_file():
                raise
            _log.warning("%s is read from the cache alone, as it was when last reached: %s", self.store.url, error)
            return self.index(name)

    def _fetch_index(self, name: str, lock: FileLock) -> Index:
        draft = self._place.draft(name, "raw")
        with self._cleanup_on_error([draft], lock):
            return self._index.fetch(name, draft)

    def side_file(self, file: FileEntry, make: Callable[[Path], object] | None = None) -> Path:
        """Return the verified path of a file that is no shard, e.g. of lengths. Like the index, it is never evicted.

        It is fetched once per folder, or made: ``make`` writes it into the path that it gets.

        Raises:
            NotFoundError, DigestError: The store has no such file; its bytes do not match the index.
        """
        name, where = file.basename, f"{self.store.url}/{file.basename}"
        # Former releases gave such a file one hash, whichever the shards have: it is checked by that.
        wanted = self.config.validate_hash if make is None else None
        hash_name = None if file.hashes and wanted not in file.hashes else wanted
        config = replace(self.config, validate_hash=hash_name)
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

        def fetch(lock: FileLock) -> Path:
            draft = self._place.draft(name, "raw")
            with self._cleanup_on_error([draft], lock):
                if make is None:
                    fetcher = ShardFetcher(self.store, None, config, (), self.counters, lock.is_current)
                    fetcher.fetch(file, None, draft, draft)
                else:
                    make(draft)
                self._place.publish(draft, name, durable=not file.hashes)
            return self.folder / name

        with self._translate_os_errors():
            return here() or self._once(name, here, fetch)

    def present(self, entry: ShardEntry) -> bool:
        """Return whether every raw file of the shard is here, with its size."""
        return self._find(self._held(entry)) is not None

    def arriving(self, entry: ShardEntry) -> Path:
        """Return the path of a raw shard's file while it is being fetched, by any process of the machine.

        It grows in order, but has its final size at once where it comes in parts.
        """
        return self._place.draft(entry.raw.basename, "0.raw")

    def ensure(self, entry: ShardEntry) -> Path:
        """Fetch the shard unless it is here; return its folder. With a limit, hold a `lease` while reading."""
        with self.lease(entry) as lease:
            return lease.folder

    def lease(self, entry: ShardEntry, wait_s: float | None = None, connections: int = 1) -> Lease:
        """Fetch the shard unless it is here; it stays until the lease is closed.

        Args:
            entry, connections: The shard; the number of spare connections, with which a large one is fetched faster.
            wait_s: Longest wait for another process's fetch of it; None for that of the config.

        Raises:
            NotFoundError, AccessError, UnavailableError: The store failed.
            DigestError, FormatError: The bytes do not match the index, also when fetched again.
            CacheFullError: There is no space on the disk, or under the limit.
            LockTimeoutError: Another process was still fetching at the deadline.
        """
        held = self._held(entry)
        if self._source is not None and held is entry and (lease := self._in_place(entry)):
            return lease
        name, pin, fetch = held.raw.basename, partial(self._pin, held), partial(self._fetch, entry, connections)
        with self._translate_os_errors():
            return pin() or self._once(name, pin, fetch, wait_s)

    def fetch_again(self, entry: ShardEntry, lease: Lease | None) -> Lease | None:
        """Fetch a shard again whose files could not be read under `lease`. Only one thread per shard may call this.

        `lease` is None if it was closed since: then the files that were read may not be those that are here now.

        Returns:
            None if that cannot help: the files are the only copy, their bytes match the index, or this process has
            fetched them again before.
        """
        held = self._held(entry)
        name, home = held.raw.basename, self._find(held)
        if home is None or (lease is not None and not lease.is_current()):
            return self.lease(entry)  # deleted, or fetched again by another meanwhile
        if home != self.folder or name in self._refetched:
            return None
        self._refetched.add(name)
        try:
            if all(raw.hashes for raw, _ in held.files):
                for raw, _ in held.files:
                    verify(self.folder / raw.basename, raw, self.config.validate_hash, raw.basename)
                return self.lease(entry) if lease is None else None
        except DigestError as error:
            _log.warning("A shard in the cache %s is damaged, and is fetched again: %s", self.folder, error)
        with self._translate_os_errors():
            done = lambda: None if lease is None or lease.is_current() else self._pin(held)  # noqa: E731
            return self._once(name, done, partial(self._fetch, entry, 1, fresh=True))

    def plan(self, next_use: Callable[[str], float | None] | None) -> None:
        """Set the function from a raw basename to its next use (smaller is sooner; None: not again), for evictions."""
        self._next_use = next_use

    def evict(self, entry: ShardEntry) -> bool:
        """Delete the shard's files; False if it is in use, not here, or was not fetched by a cache."""
        if self.in_place or not self.present(entry):
            return False
        self._place.prepare()
        return self._drop(entry)

    def _drop(self, entry: ShardEntry) -> bool:
        """Delete a shard that this cache has fetched."""
        gone = False
        forms = {held.raw.basename: held for held in (entry, as_mds(entry))}  # former releases held rows as they are
        for held in forms.values():
            name = held.raw.basename
            is_deleted = self._evictor.log.knows(name) and self._evictor.remove(_cache_entry(held, entry))
            self._evictor.log.forget(name, only_verified=not is_deleted)
            gone = gone or is_deleted
        return gone

    def _held(self, entry: ShardEntry) -> ShardEntry:
        """The shard as the cache holds it: rows as MDS."""
        return as_mds(entry, self._mark(entry))

    def _mark(self, entry: ShardEntry) -> str:
        """What distinguishes versions of rows that are read in place: an index may not tell them apart."""
        if self._source is None or entry.format == "mds":
            return ""
        paths = [self._source / file.basename for files in entry.files for file in files if file is not None]
        return " ".join(str(path.stat().st_mtime_ns) for path in paths if path.exists())

    # -- what is here

    def _find(self, entry: ShardEntry) -> Path | None:
        for folder in (self._source, self.folder):
            if folder is not None and all(is_here(folder / raw.basename, raw) for raw, _ in entry.files):
                return folder
        return None

    def _in_place(self, entry: ShardEntry) -> Lease | None:
        """Return a lease on the only copy; None if it is compressed."""
        assert self._source is not None
        for raw, compressed in entry.files:
            path = self._source / raw.basename
            size = size_of(path)
            if size is None and (compressed is not None or raw.origin is not None):
                return None
            if size is None:
                raise NotFoundError(f"no such file: {path}, which {self._source}/index.json lists. Check the folder.")
            check_size(path, raw, str(path))
            if self.config.validate_hash is not None:
                self._verify_once(path, raw)
        return Lease(self._source, None)

    def _pin(self, entry: ShardEntry) -> Lease | None:
        """Return a lease on a shard that is here; None if it is not, or is being evicted."""
        home = self._find(entry)
        if home is None:
            return None
        path = home / entry.raw.basename
        try:
            fd = LOCK_FDS.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with contextlib.ExitStack() as unless_leased:
            unless_leased.callback(LOCK_FDS.close, fd)
            if not (try_flock(fd, path, shared=True) and same_file(fd, path) and self._trusted(home, entry)):
                return None
            for raw, _ in entry.files:
                # It was deleted, or is another user's; its time matters only for evictions.
                with contextlib.suppress(OSError):
                    os.utime(home / raw.basename)
            unless_leased.pop_all()
        self.counters.add("shards_here")
        return Lease(home, fd, entry.raw.basename)

    def _trusted(self, home: Path, entry: ShardEntry) -> bool:
        """Return whether the files may be read.

        Once per process, files are checked if the user named a hash, or if they were here when the machine was started,
        since their last bytes may not have reached the disk. Once per folder, files of somebody else are checked.
        """
        log, name = self._evictor.log, entry.raw.basename
        named = self.config.validate_hash is not None
        foreign = not named and home == self.folder and all(raw.hashes for raw, _ in entry.files)
        foreign = foreign and not log.knows(name, or_verified=True)
        try:
            for raw, _ in entry.files:
                if named or foreign or before_boot(home / raw.basename):
                    self._verify_once(home / raw.basename, raw)
        except (DigestError, FileNotFoundError):
            return False
        if foreign:
            log.set_verified(name)
        return True

    def _verify_once(self, path: Path, file: FileEntry) -> None:
        if str(path) not in self._checked:
            verify(path, file, self.config.validate_hash, str(path))
            self._checked.add(str(path))

    # -- fetching

    @contextlib.contextmanager
    def _translate_os_errors(self) -> Iterator[None]:
        """Translate errors of the folder to ours, which name it."""
        try:
            yield
        except PermissionError as error:
            raise self._place.permission_error(error) from error
        except OSError as error:
            if error.errno in FULL:
                raise self._evictor.disk_full(0) from error
            if error.errno == errno.EMFILE:
                raise  # the folder is not the reason
            if self._is_within(error) or error.errno == errno.EFBIG:
                raise self._place.os_error(error) from error
            raise

    def _once(
        self, name: str, done: Callable[[], T | None], work: Callable[[FileLock], T], wait_s: float | None = None
    ) -> T:
        """Have one process do the work, see `run_once_across_processes`; again if the folder was deleted meanwhile."""
        wait_s = self.config.wait_s if wait_s is None else wait_s
        for left in reversed(range(1 + _DELETIONS)):
            try:
                self._place.prepare()
                lock = self._place.lock(name)
                result = run_once_across_processes(done, partial(self._attempt, work, lock), lock, wait_s)
            except FileNotFoundError as error:
                if not left or not self._is_within(error):
                    raise
                continue
            if not isinstance(result, _Deleted):
                return result
            if not left:
                raise result.error
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, work: Callable[[FileLock], T], lock: FileLock) -> T | _Deleted:
        try:
            return work(lock)
        except Exception as error:
            # The work of one whose lock was deleted, too, may meet that of the process which made a new one.
            if lock.is_current() and not (isinstance(error, FileNotFoundError) and self._is_within(error)):
                raise
            return _Deleted(error)

    def _is_within(self, error: OSError) -> bool:
        """Whether an error is about a file in the folder."""
        return error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(self.folder)

    def _fetch(self, entry: ShardEntry, connections: int, lock: FileLock, *, fresh: bool = False) -> Lease:
        """Fetch, check and publish every file of a shard; under its lock. `fresh`: no file that is here is used."""
        held, kept_zip = self._held(entry), self.config.keep_zip
        name = held.raw.basename
        drafts = [self._place.draft(name, f"{i}.{kind}") for i in range(len(entry.files)) for kind in ("raw", "zip")]
        made = drafts[0] if held is entry else self._place.draft(name, "mds")
        kept = () if fresh else tuple(folder for folder in (self.folder, self._source) if folder is not None)
        make = None if self.other is None else partial(self.other.write, self.store, entry)
        compression, counters = entry.schema.compression, self.counters
        fetcher = ShardFetcher(self.store, compression, self.config, kept, counters, lock.is_current, connections, make)
        reserved = _cache_entry(held, entry)
        with self._cleanup_on_error([*drafts, made], lock, reserved):
            self._make_space(reserved)
            for i, (raw, compressed) in enumerate(entry.files):
                if held is entry or not fetcher.link(raw, drafts[2 * i]):
                    fetcher.fetch(raw, compressed, drafts[2 * i], drafts[2 * i + 1])
                if not kept_zip:
                    drafts[2 * i + 1].unlink(missing_ok=True)
            if held is not entry:
                self._make_of_rows(entry, drafts[::2], made)
            fetched = _cache_entry(held, entry if kept_zip else None)
            if held.raw.origin is not None:  # now its size is known
                fetched = replace(fetched, num_bytes=sum(size_of(path) or 0 for path in (made, *drafts[1::2])))
                self._make_space(fetched)
            if not lock.is_current():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(made))
            raws = drafts[::2] if held is entry else [made]
            files = [(path, raw.basename) for path, (raw, _) in zip(raws, held.files, strict=True)]
            for path, (_, compressed) in zip(drafts[1::2], entry.files, strict=True):
                if compressed is not None and path.exists():
                    files.append((path, compressed.basename))
            lease = self._publish_all(held, files)
            self._evictor.log.settle(fetched)
        self.counters.add("shards_fetched")
        self.counters.add("shards_fetched_again", name in self._fetched)
        self._fetched.add(name)
        return lease

    def _make_space(self, entry: CacheEntry) -> None:
        config = self.config
        evicted = self._evictor.make_space(entry, config.limit_bytes, config.room_wait_s, self._next_use)
        self.counters.add("evictions", evicted)

    def _make_of_rows(self, entry: ShardEntry, files: list[Path], to: Path) -> None:
        name = entry.raw.basename
        if name in self._refused:  # each of its samples would try again
            raise self._refused[name]
        try:
            with self.counters.timed("convert_s"):
                write_as_mds(entry, files, to, self._mark(entry))
        except FormatError as error:
            self._refused[name] = error
            raise
        finally:
            for path in files:
                path.unlink(missing_ok=True)

    def _publish_all(self, held: ShardEntry, files: list[tuple[Path, str]]) -> Lease:
        """Give the drafts their final names, the leased first file of the shard last.

        Waiting for the disk (5 ms and more per file) would cost more than fetching. It is not needed if a hash can find
        the damage of a power cut after the restart.
        """
        durable = not all(raw.hashes or raw.origin is not None for raw, _ in held.files)
        fd = LOCK_FDS.open(files[0][0], os.O_RDONLY)
        with contextlib.ExitStack() as unless_leased:
            unless_leased.callback(LOCK_FDS.close, fd)
            try_flock(fd, files[0][0], shared=True)
            for draft, name in reversed(files):
                self._place.publish(draft, name, durable=durable)
            unless_leased.pop_all()
        return Lease(self.folder, fd, held.raw.basename)

    @contextlib.contextmanager
    def _cleanup_on_error(
        self, drafts: list[Path], lock: FileLock, reserved: CacheEntry | None = None
    ) -> Iterator[None]:
        """After an error, delete the drafts, and the shard's entry in the usage log unless older files of it stay."""
        try:
            yield
        except BaseException as error:
            if lock.is_current():  # else they are another process's
                for draft in drafts:
                    draft.unlink(missing_ok=True)
            if reserved is not None and not any((self.folder / name).exists() for name in reserved.names):
                self._evictor.log.forget(reserved.names[0])
            if is_full(error):
                raise self._evictor.disk_full(0 if reserved is None else reserved.num_bytes) from error
            raise


def _cache_entry(held: ShardEntry, zipped: ShardEntry | None) -> CacheEntry:
    """The files of a shard in the cache, with the compressed ones of an entry of the index."""
    files = [raw for raw, _ in held.files]
    files += [] if zipped is None else [compressed for _, compressed in zipped.files if compressed is not None]
    return CacheEntry(tuple(file.basename for file in files), sum(file.num_bytes for file in files))
