"""A stream's shards: in place, or in a cache folder that all processes of a machine share."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from lightning_stream.cache.folder import CacheFolder, default_folder
from lightning_stream.cache.usage_log import Holding
from lightning_stream.errors import CacheError, DigestError, FormatError, NotFoundError, UnavailableError
from lightning_stream.formats.index import FileEntry, Index, ShardEntry
from lightning_stream.shared_files import FULL, HELD, before_boot, publish, publish_once, same_file, try_flock
from lightning_stream.stores import Store
from lightning_stream.stores.local import LocalStore
from lightning_stream.threads import DaemonPool

from .config import CacheConfig
from .fetch import Bringer, is_full, size_of, verify
from .lease import Lease
from .room import Room, disk_full

T = TypeVar("T")
_log = logging.getLogger(__name__)


class ShardCache:
    """One stream's shards, from their store in a local folder.

    Thread-safe, picklable, and safe under fork. Nothing is touched before the first call.

    Args:
        store: Where the shards are. None: `folder` holds the only copy.
        folder: The cache. None: :func:`default_folder`. The store's own folder, or None with a local store: shards are
            read in place and nothing there is ever changed; those stored only compressed are unpacked into
            :func:`default_folder`.
        config: How it behaves.
    """

    def __init__(
        self, store: Store | None, folder: Path | str | None = None, config: CacheConfig | None = None
    ) -> None:
        if store is None and folder is None:
            raise ValueError("a cache needs a store, or a folder that holds the shards, or both; got neither")
        self.store: Store = store if store is not None else LocalStore(str(folder))
        self.config = config or CacheConfig()
        chosen = None if folder is None else Path(folder).expanduser().absolute()
        own = self.store.folder if isinstance(self.store, LocalStore) else None
        self.in_place = own is not None and (chosen is None or os.path.realpath(chosen) == os.path.realpath(own))
        self._source = own if self.in_place else None
        self.folder = default_folder(self.store.identity) if chosen is None or self.in_place else chosen
        self._place = CacheFolder(self.folder, self.config.shared)
        self._room = Room(self._place)
        self._next_use: Callable[[str], float | None] | None = None
        self._checked: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "folder": self._source or self.folder, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def index(self, name: str = "index.json", *, refresh: bool = False) -> bytes:
        """The index's bytes, fetched once per folder, or anew where asked.

        Where a fresh index tells other bytes of a shard that is here, that shard is dropped.

        Raises:
            NotFoundError: There is no dataset.
        """
        try:
            if self.in_place:
                return self.store.read(name)
            with self._explained():
                return self._index(name, refresh)
        except NotFoundError as error:
            raise NotFoundError(
                f"{error} A dataset is a folder with {name}, which its writer puts there last."
            ) from error

    def newest_index(self) -> bytes:
        """The index as the store has it now; the one that is here only where the store cannot be reached."""
        try:
            return self.index(refresh=True)
        except UnavailableError as error:
            if self.in_place or not (self.folder / "index.json").is_file():
                raise
            _log.warning("Reading %s from the cache alone, as it was when last reached: %s", self.store.url, error)
            return self.index()

    def _index(self, name: str, refresh: bool) -> bytes:
        path = self.folder / name

        def here() -> bytes | None:
            return path.read_bytes() if path.is_file() and self._place.source() in (None, self._label) else None

        def fetch() -> bytes:
            draft = self._place.draft(name, "raw")
            with self._tidy([draft], name, 0):
                self.store.get(name, draft)
                old, new = path.read_bytes() if path.is_file() else None, draft.read_bytes()
                if old is not None and old != new:  # parsing costs a second for 100,000 shards
                    self._refuse_another(old, new)
                    self._drop_changed(old, new)
                self._publish(draft, name)
                self._place.set_source(self._label)
            return path.read_bytes()

        if refresh:
            return self._once(name, lambda: None, fetch)
        return here() or self._once(name, here, fetch)

    @property
    def _label(self) -> str:
        """Tells the store whose data this is, and shows its URL; no secrets."""
        return f"{hashlib.sha256(self.store.identity.encode()).hexdigest()[:32]} {self.store.url}"

    def _refuse_another(self, old: bytes, new: bytes) -> None:
        """One folder holds one dataset: another's shards have the same names."""
        source = self._place.source()
        if source in (None, self._label) or Index.from_bytes(old, "").digest == Index.from_bytes(new, "").digest:
            return
        raise CacheError(
            f"a cache folder holds one dataset: {self.folder} holds that of {source.partition(' ')[2]}, and "
            f"{self.store.url} is another. Pass a local= of its own, or delete the folder."
        )

    def _drop_changed(self, old: bytes, new: bytes) -> None:
        try:
            before = Index.from_bytes(old, str(self.folder / "index.json"))
        except FormatError as error:
            raise CacheError(
                f"a cache folder's index.json is the dataset's; that of {self.folder} is none, and not ours to replace "
                f"({error}). Delete it, or choose another `local`."
            ) from error
        after = Index.from_bytes(new, self.store.url)
        if before.digest == after.digest:
            return
        raws = (after.entry(number).raw for number in range(after.num_shards))
        now = {raw.basename: raw for raw in raws}
        for entry in map(before.entry, range(before.num_shards)):
            name = entry.raw.basename
            if now.get(name) != entry.raw:
                self._drop(entry)

    def present(self, entry: ShardEntry) -> bool:
        """Whether every raw file of the shard is here, whole."""
        return self._home(entry) is not None

    def ensure(self, entry: ShardEntry) -> Path:
        """The folder in which every raw file of the shard is, fetched now where it was not.

        With a limit, another fetch may evict the shard again at once: then hold a `lease` while reading.
        """
        with self.lease(entry) as lease:
            return lease.folder

    def lease(self, entry: ShardEntry, wait_s: float | None = None, connections: int = 1) -> Lease:
        """The same, and the shard stays until the lease is closed.

        Args:
            entry: The shard.
            wait_s: Longest wait for another process's fetch of it; None for the config's.
            connections: How many there are to spare for it: where one is slow, a shard of many MB is here sooner.

        Raises:
            NotFoundError, AccessError, UnavailableError: The store could not give it.
            DigestError, FormatError: Its bytes are not what the index says, also when fetched again.
            CacheFullError: No room on the disk, or under the limit.
            LockTimeoutError: Another process was still fetching at the deadline.
        """
        if self._source is not None and (lease := self._in_place(entry)):
            return lease
        name = entry.raw.basename
        with self._explained():
            return self._pin(entry) or self._once(
                name, lambda: self._pin(entry), lambda: self._fetch(entry, connections), wait_s
            )

    def prefetch(self, entries: Iterable[ShardEntry], *, workers: int = 4) -> Iterator[tuple[ShardEntry, Path]]:
        """Fetch shards, several at once; yields them in the given order, and raises the first failure in that order."""
        waiting: deque[tuple[ShardEntry, Future[Path]]] = deque()
        pool = DaemonPool(workers, "fetch")
        try:
            for entry in entries:
                waiting.append((entry, pool.submit(self.ensure, entry)))
                if len(waiting) >= 2 * workers:
                    first, folder = waiting.popleft()
                    yield first, folder.result()
            while waiting:
                first, folder = waiting.popleft()
                yield first, folder.result()
        finally:
            pool.close()

    def plan(self, next_use: Callable[[str], float | None] | None) -> None:
        """Say what this process will need: a raw basename to when (smaller is sooner), None for not again.

        Evictions by this process then begin with what is not needed again, and end with what is needed next.
        """
        self._next_use = next_use

    def expect(self, entries: Iterable[ShardEntry]) -> None:
        """Say that these are needed soon: no other job on this folder evicts them before what is not."""
        for entry in entries:
            # Not what is still to be checked after a restart: its time says so.
            with contextlib.suppress(FileNotFoundError):
                if not any(before_boot(self.folder / raw.basename) for raw, _ in entry.files):
                    self._touch(self.folder, entry)

    def evict(self, entry: ShardEntry) -> bool:
        """Delete the shard's files; False where it is in use, not here, or not ours to delete."""
        if self.in_place or not self.present(entry):
            return False
        self._place.prepare()
        return self._drop(entry)

    def _drop(self, entry: ShardEntry) -> bool:
        """Delete what this cache itself has fetched."""
        name = entry.raw.basename
        gone = self._room.ledger.knows(name) and self._room.remove(_holding(entry, with_zip=True))
        if gone:
            self._room.ledger.forget(name)
        return gone

    # -- what is here

    def _home(self, entry: ShardEntry) -> Path | None:
        for folder in (self._source, self.folder):
            if folder is not None and all(size_of(folder / raw.basename) == raw.num_bytes for raw, _ in entry.files):
                return folder
        return None

    def _in_place(self, entry: ShardEntry) -> Lease | None:
        """A lease on the only copy; None where it is there only compressed."""
        assert self._source is not None
        for raw, compressed in entry.files:
            path = self._source / raw.basename
            size = size_of(path)
            if size is None and compressed is not None:
                return None
            if size is None:
                raise NotFoundError(f"no such file: {path}, which {self._source}/index.json lists. Check the folder.")
            named = self.config.validate_hash not in (None, "auto")
            self._check_once(path, raw, self.config.validate_hash if named else None)
        return Lease(self._source, None)

    def _pin(self, entry: ShardEntry) -> Lease | None:
        """A lease on a shard that is here; None where it is not, or is just being evicted."""
        home = self._home(entry)
        if home is None:
            return None
        path = home / entry.raw.basename
        try:
            fd = HELD.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if try_flock(fd, path, shared=True) and same_file(fd, path) and self._trusted(home, entry):
                self._touch(home, entry)
                return Lease(home, fd)
        except BaseException:
            HELD.close(fd)
            raise
        HELD.close(fd)
        return None

    def _trusted(self, home: Path, entry: ShardEntry) -> bool:
        """Whether what is here may be read as it is.

        Checked first, once: what was here when the machine went down, since its last bytes may not have reached the
        disk; and, where the user named a hash, what another put here.
        """
        how = self.config.validate_hash
        foreign = how not in (None, "auto") and not self._room.ledger.knows(entry.raw.basename)
        try:
            for raw, _ in entry.files:
                if foreign or before_boot(home / raw.basename):
                    self._check_once(home / raw.basename, raw, how)
        except (DigestError, FileNotFoundError):
            return False
        return True

    def _check_once(self, path: Path, file: FileEntry, how: str | None) -> None:
        if str(path) not in self._checked:
            verify(path, file, how, str(path))
            self._checked.add(str(path))

    def _touch(self, home: Path, entry: ShardEntry) -> None:
        for raw, _ in entry.files:
            # Gone meanwhile, or another user's: its time says only what goes first.
            with contextlib.suppress(OSError):
                os.utime(home / raw.basename)

    # -- fetching

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What the folder refuses, said in our words."""
        try:
            yield
        except PermissionError as error:
            raise self._place.refused(error) from error
        except OSError as error:
            if error.errno in FULL:
                raise disk_full(self.folder, 1) from error
            if error.errno == errno.EMFILE:
                raise  # nothing of the folder's
            within = error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(self.folder)
            if within or error.errno == errno.EFBIG:
                raise self._place.unusable(error) from error
            raise

    def _once(self, name: str, done: Callable[[], T | None], work: Callable[[], T], wait_s: float | None = None) -> T:
        self._place.prepare()
        return publish_once(done, work, self._place.lock(name), self.config.wait_s if wait_s is None else wait_s)

    def _fetch(self, entry: ShardEntry, connections: int) -> Lease:
        """Bring, check and publish every file of a shard; under its lock."""
        name = entry.raw.basename
        drafts = [self._place.draft(name, f"{i}.{kind}") for i in range(len(entry.files)) for kind in ("raw", "zip")]
        kept = (self.folder,) if self._source is None else (self.folder, self._source)
        how = self.config
        bringer = Bringer(self.store, entry.compression, how.validate_hash, how.refetches, kept, connections)
        reserved = _holding(entry, with_zip=True)
        with self._tidy(drafts, name, reserved.num_bytes):
            self._room.reserve(reserved, self.config.limit_bytes, self.config.room_wait_s, self._next_use)
            for i, (raw, compressed) in enumerate(entry.files):
                bringer.bring(raw, compressed, drafts[2 * i], drafts[2 * i + 1])
                if not self.config.keep_zip:
                    drafts[2 * i + 1].unlink(missing_ok=True)
            lease = self._publish_all(entry, drafts)
            self._room.ledger.settle(_holding(entry, with_zip=self.config.keep_zip))
        return lease

    def _publish_all(self, entry: ShardEntry, drafts: list[Path]) -> Lease:
        """Give the drafts their names, the shard's first file last, and held from before anyone can evict it.

        Waiting for the disk (5 ms and more a file) would cost more than fetching; where a hash can tell after a
        restart what a power cut spoiled, it is not waited for.
        """
        durable = self.config.validate_hash is None or not all(raw.hashes for raw, _ in entry.files)
        fd = HELD.open(drafts[0], os.O_RDONLY)
        try:
            try_flock(fd, drafts[0], shared=True)
            for i, (raw, compressed) in reversed(list(enumerate(entry.files))):
                if compressed is not None and drafts[2 * i + 1].exists():
                    self._publish(drafts[2 * i + 1], compressed.basename, durable)
                self._publish(drafts[2 * i], raw.basename, durable)
        except BaseException:
            HELD.close(fd)
            raise
        return Lease(self.folder, fd)

    def _publish(self, draft: Path, name: str, durable: bool = True) -> None:
        final = self.folder / name
        self._place.make_parent(final)
        draft.chmod(self._place.modes.file)
        publish(draft, final, durable=durable)

    @contextlib.contextmanager
    def _tidy(self, drafts: list[Path], name: str, need_bytes: int) -> Iterator[None]:
        """Whatever goes wrong in here leaves no drafts, and the books as if it had not been tried."""
        try:
            yield
        except BaseException as error:
            for draft in drafts:
                draft.unlink(missing_ok=True)
            if need_bytes:
                self._room.ledger.forget(name)
            if is_full(error):
                raise disk_full(self.folder, need_bytes) from error
            raise


def _holding(entry: ShardEntry, *, with_zip: bool) -> Holding:
    files = [file for raw, compressed in entry.files for file in (raw, compressed if with_zip else None) if file]
    return Holding(tuple(file.basename for file in files), sum(file.num_bytes for file in files))
