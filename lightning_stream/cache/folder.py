"""The settings of a cache, and its folder: the default path, the permissions, the errors, and its control folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pwd
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_64_digest

from lightning_stream.errors import CacheError, CacheFullError
from lightning_stream.formats.hashing import check_hashes
from lightning_stream.shared_files import (
    FULL,
    PRIVATE,
    FileLock,
    Modes,
    backoff,
    give_mode,
    make_folder,
    named_errors,
    no_locks,
    open_with_mode,
    publish,
    publish_bytes,
    run_once_across_processes,
    sweep_drafts,
)

T = TypeVar("T")
CONTROL = ".lightning_stream"
_FEW_INODES = 16  # the drafts of a write that failed are deleted already
# A folder is deleted in many steps, of which several can meet one fetch: so its attempts are not counted.
_LONGEST_DELETION_S = 60.0
_DIGEST_BYTES = 8  # of a result
_BLOCK_BYTES = 4096  # a disk with less than a block free is full


@dataclass(frozen=True)
class CacheConfig:
    """The settings of a cache.

    Attributes:
        limit_bytes: Limit of a folder, or of those that count together, over all processes and jobs that use them;
            None: no limit.
        validate_hash: None: a fetched file is checked by the fastest hash that the index has of it, and a file that
            somebody else put here is checked once. A hash, which the index must have: it checks these, and every file
            that is here once per process.
        keep_zip: Keep compressed files after decompression.
        shared: Files get the folder's own permissions; else they are private to the user.
        wait_s: Longest wait for another process's fetch of a shard.
        room_wait_s: Longest wait for others to release shards, if the limit leaves no room.
        refetches: How often a file with wrong bytes is fetched again before it is an error.
    """

    limit_bytes: int | None = None
    validate_hash: str | None = None
    keep_zip: bool = False
    shared: bool = False
    wait_s: float = 660.0
    room_wait_s: float = 60.0
    refetches: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.limit_bytes is not None and self.limit_bytes <= 0:
            problems.append(f"limit_bytes is a positive number of bytes, or None for no limit; got {self.limit_bytes}")
        if min(self.wait_s, self.room_wait_s) <= 0:
            problems.append(f"waits are positive seconds; got {self.wait_s} and {self.room_wait_s}")
        if self.refetches < 0:
            problems.append(f"refetches is 0 or more; got {self.refetches}")
        if problems:
            raise ValueError("; ".join(problems))
        if self.validate_hash is not None:
            check_hashes([self.validate_hash])


def default_folder(identity: str) -> Path:
    """Return the default cache folder of a store, private to the user.

    It is below ``$LIGHTNING_STREAM_CACHE``, ``$XDG_CACHE_HOME/lightning_stream`` or ``~/.cache/lightning_stream``; for
    a user without a home, below ``lightning_stream-<uid>`` in the folder for temporary files.
    """
    tail = re.sub(r"[^A-Za-z0-9._-]+", "-", identity.split("://")[-1]).strip("-.")[-40:]
    return cache_root() / f"{tail}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def cache_root() -> Path:
    """Return the folder that holds the default caches, one for each store."""
    if path := os.environ.get("LIGHTNING_STREAM_CACHE"):
        return Path(path).expanduser().absolute()
    if path := os.environ.get("XDG_CACHE_HOME"):
        return Path(path).absolute() / "lightning_stream"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 (Path.home() raises if there is none)
    if home.is_absolute() and os.access(home, os.W_OK):
        return home / ".cache" / "lightning_stream"
    return _temporary_base()


def _temporary_base() -> Path:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:  # none that this user may write to: an error where the cache has no other place
        folder = "/tmp"
    return Path(folder) / f"lightning_stream-{os.getuid()}"


class CacheFolder:
    """A cache's folder with its control folder: locks, drafts, markers of the shards that it holds.

    Its files are private to the user, or `shared`: then they get the folder's own permissions.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        self.path = path
        self.control = path / CONTROL
        self.markers = self.control / "held"
        self._drafts = self.control / "drafts"
        self._locks = self.control / "locks"
        self._shared = shared
        self._ready_in = 0

    @property
    def modes(self) -> Modes:
        """The permissions of new files and folders."""
        if not self._shared:
            return PRIVATE
        try:
            bits = stat.S_IMODE(self.path.stat().st_mode)
        except FileNotFoundError:
            bits = 0o2770
        return Modes(file=bits & 0o666 | 0o600, folder=bits & 0o2777 | 0o700)

    def source(self) -> str | None:
        """Return the label of the store whose data this is; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return (self.control / "source").read_text(errors="replace")
        return None

    def prepare(self) -> None:
        """Make the folders, check that locks work, and remove the drafts of killed processes.

        It does so once per process, and again after the folders were deleted. CacheError if the folder's file system
        has no locks, or a link leads out of it.
        """
        if self._ready_in == os.getpid() and self._drafts.is_dir() and self.markers.is_dir():
            return
        if self.path.is_relative_to(base := _temporary_base()):
            make_folder(base)
            status = base.lstat()  # all users may write into the folder for temporary files
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise CacheError(
                    f"the default cache {base} must be a folder that only user {_user(os.getuid())} may write to; "
                    f"it {_owner(base)}. Set LIGHTNING_STREAM_CACHE to another folder, or pass `local`."
                )
        make_folder(self.path, self.modes)
        for folder in (self.control, self._locks, self._drafts, self.markers):
            if folder.is_symlink():
                raise _link_error(folder)
            make_folder(folder, self.modes)
        self._probe_locks()
        self._sweep()
        self._ready_in = os.getpid()

    def lock(self, name: str) -> FileLock:
        """Return the lock of a shard."""
        return FileLock(self._locks / f"{key_of(name)}.lock", modes=self.modes)

    def run_once(self, name: str, done: Callable[[], T | None], work: Callable[[FileLock], T], wait_s: float) -> T:
        """Have one process do the work under the lock of a name, see `run_once_across_processes`.

        Again while the folder is being deleted. Errors are raised as they are: the work may be a function of the user.
        """
        if (value := done()) is not None:  # without a look at the folders
            return value
        for _ in backoff(_LONGEST_DELETION_S):
            try:
                self.prepare()
                lock = self.lock(name)
                return run_once_across_processes(done, partial(work, lock), lock, wait_s)
            except FileNotFoundError as error:
                if not self.has(error):
                    raise
                deleted = error
        raise deleted

    def result(self, name: str) -> bytes | None:
        """Return what was computed from the dataset under this name, once per machine; None if nothing whole is here.

        Such small files have a hash of their content at their end.
        """
        with self.translated_errors(), contextlib.suppress(FileNotFoundError):
            stored = self._result(name).read_bytes()
            content = stored[:-_DIGEST_BYTES]
            digest = stored[-_DIGEST_BYTES:]
            return content if xxh3_64_digest(content) == digest else None
        return None

    def keep_result(self, name: str, content: bytes, parts: Iterable[str] = ()) -> None:
        """Keep a result under a name; then delete the partial results that it was made of."""
        with self.translated_errors():
            self.prepare()
            publish_bytes(content + xxh3_64_digest(content), self._result(name), self.modes)
            for part in parts:
                self._result(part).unlink(missing_ok=True)

    def _result(self, name: str) -> Path:
        return self.control / f"{name}.result"

    def draft(self, name: str, part: str) -> Path:
        """Return the path of a draft for a file of a shard; only for the holder of the shard's lock."""
        return self._drafts / f"{key_of(name)}.{part}"

    def delete_drafts(self, name: str) -> None:
        """Delete all drafts of a shard; only for the holder of its lock."""
        prefix = f"{key_of(name)}."
        with contextlib.suppress(FileNotFoundError):  # the folder was deleted
            for draft in self._drafts.iterdir():  # a glob would compile its pattern for each shard
                if draft.name.startswith(prefix):
                    draft.unlink(missing_ok=True)

    def publish(self, draft: Path, name: str, *, durable: bool = True) -> None:
        """Give a finished draft its final name, as `shared_files.publish` does."""
        give_mode(draft, self.modes.file)
        final = self._below(name)
        make_folder(final.parent, self.modes)
        publish(draft, final, durable=durable)

    def unlink(self, name: str) -> None:
        """Delete a file below the folder, if it is there."""
        self._below(name).unlink(missing_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        """Write a small file of the control folder, never through a link; readers may see a part of it."""
        mode = self.modes.file
        with (
            named_errors(path),
            open(path, "wb", opener=lambda path, flags: open_with_mode(Path(path), flags, mode)) as file,
        ):
            file.write(content)

    def free_bytes(self) -> int:
        """Return the bytes that this user may still write to the folder's disk."""
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    @contextlib.contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Raise the system's errors about the folder as CacheError, which names it."""
        try:
            yield
        except PermissionError as error:
            raise CacheError(
                f"user {_user(os.getuid())} may not use the cache {self.path} ({error.strerror}: {error.filename}): it "
                f"{_owner(self.path)}. Caches are private by default: choose another `local`, or have its owner share "
                "it (`shared_cache=True`, with a folder whose group may write: chmod 2770)."
            ) from error
        except OSError as error:
            if error.errno in FULL:
                raise self.disk_full(0) from error
            if error.errno == errno.EFBIG:
                raise CacheError(
                    f"the cache {self.path} cannot be used ({error.strerror}): a shard is one file, and this process "
                    "may write none of that size. Raise the limit (`ulimit -f`), or write smaller shards."
                ) from error
            if error.errno == errno.EMFILE or not self.has(error):  # of too many open files, it is not the reason
                raise
            where = error.filename2 or error.filename or "a file of a shard"
            raise CacheError(
                f"the cache {self.path} cannot be used ({error.strerror}: {where}). A cache is a folder on a writable "
                "disk, in which no other files or folders have the names of shards. Move these away, or choose another "
                "`local`."
            ) from error

    def has(self, error: OSError) -> bool:
        """Return whether an error is about a file in the folder, or about one that the folder is in."""
        if error.filename is None:
            return False
        path = Path(os.fsdecode(error.filename))
        return path.is_relative_to(self.path) or self.path.is_relative_to(path)

    def disk_full(self, need_bytes: int) -> CacheFullError:
        """Return the error for a full disk. All files that were there are unchanged."""
        free = self.free_bytes()
        disk = os.statvfs(self.path)
        if max(need_bytes, _BLOCK_BYTES) <= free and disk.f_files and disk.f_favail < _FEW_INODES:
            return CacheFullError(
                f"the disk of the cache {self.path} is full, though {free:,} bytes are free on it: all its "
                "inodes may be used (df -i). Delete files, or put `local` on another disk."
            )
        needed = f"{need_bytes:,} bytes are needed, " if need_bytes else ""
        return CacheFullError(
            f"the disk of the cache {self.path} is full: {needed}{free:,} are free. Its files are unchanged. "
            "Free some space (or raise your quota), put `local` on a larger disk, or set cache_limit below its size."
        )

    def _below(self, name: str) -> Path:
        """Return the path of a file below the folder. CacheError if a sub-folder is a link: it may lead elsewhere."""
        path = self.path / name
        if path.parent != self.path and path.parent.resolve() != self.path.resolve() / Path(name).parent:
            raise _link_error(path.parent)
        return path

    def _probe_locks(self) -> None:
        path = self._locks / f".probe-{secrets.token_hex(8)}"
        first, second = (FileLock(path, modes=self.modes) for _ in range(2))
        try:
            # Where somebody has deleted the folder in between, the second one has a file of its own.
            if not first.try_acquire() or (second.try_acquire() and first.is_current()):
                raise no_locks(path)
        finally:
            first.release()
            second.release()

    def _sweep(self) -> None:
        """Delete the drafts of dead processes: those whose lock is free."""
        for folder in (self.control, self._locks):
            sweep_drafts(folder)
        for draft in self._drafts.iterdir():
            lock = FileLock(self._locks / f"{draft.name.split('.')[0]}.lock", modes=self.modes)
            if lock.try_acquire():
                try:
                    draft.unlink(missing_ok=True)
                finally:
                    lock.release()


def key_of(name: str) -> str:
    """Return what stands for a shard in the names of its lock and drafts, whose length is limited."""
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _link_error(path: Path) -> CacheError:
    target = os.path.realpath(path)
    return CacheError(f"a cache must not hold links to other folders; {path} is a link to {target}. Remove it.")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _owner(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "cannot be read"
    return f"belongs to {_user(status.st_uid)} (mode {stat.S_IMODE(status.st_mode):o})"
