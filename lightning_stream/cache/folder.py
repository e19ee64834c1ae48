"""The settings of a cache, and its folder: the default path, the permissions, and the control folder in it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lightning_stream.errors import CacheError
from lightning_stream.formats.hashing import check_hashes
from lightning_stream.shared_files import (
    LOCK_FDS,
    PRIVATE,
    FileLock,
    Modes,
    make_folder,
    no_locks,
    sync,
    try_flock,
)

CONTROL = ".lightning_stream"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class CacheConfig:
    """The settings of a cache.

    Attributes:
        limit_bytes: Limit of a folder, over all processes and jobs that use it; None: no limit.
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
    if given := os.environ.get("LIGHTNING_STREAM_CACHE"):
        return Path(given).expanduser().absolute()
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given).absolute() / "lightning_stream"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 (Path.home() raises if there is none)
    if home.is_absolute() and os.access(home, os.W_OK):
        return home / ".cache" / "lightning_stream"
    return _temporary_base()


def _temporary_base() -> Path:
    return Path(tempfile.gettempdir()) / f"lightning_stream-{os.getuid()}"


class CacheFolder:
    """A cache's folder with its control folder: locks, drafts, usage log.

    Its files are private to the user, or `shared`: then they get the folder's own permissions.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        self.path = path
        self.control = path / CONTROL
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
            return (self.control / "source").read_text()
        return None

    def prepare(self) -> None:
        """Make the folders, check that locks work, and remove the drafts of killed processes.

        It does so once per process, and again after the folders were deleted. CacheError if the folder is another
        user's, its file system has no locks, or a link leads out of it.
        """
        if self._ready_in == os.getpid() and (self.control / "drafts").is_dir():
            return
        try:
            if self.path.is_relative_to(base := _temporary_base()):
                make_folder(base)
                found = base.lstat()  # all users may write into the folder for temporary files
                if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                    raise CacheError(
                        f"the default cache {base} must be a folder that only user {_user(os.getuid())} may write to; "
                        f"it {_owner(base)}. Set LIGHTNING_STREAM_CACHE to another folder, or pass `local`."
                    )
            make_folder(self.path, self.modes)
            for folder in (self.control, self.control / "locks", self.control / "drafts"):
                if folder.is_symlink():
                    raise _link_error(folder)
                make_folder(folder, self.modes)
            self._probe_locks()
            self._sweep()
        except PermissionError as error:
            raise self.permission_error(error) from error
        self._ready_in = os.getpid()

    def lock(self, name: str, wait_s: float = 60.0) -> FileLock:
        """Return the lock of a shard."""
        return FileLock(self.control / "locks" / f"{_key(name)}.lock", wait_s, self.modes)

    def draft(self, name: str, part: str) -> Path:
        """Return the path of a draft for a file of a shard; only for the holder of the shard's lock."""
        return self.control / "drafts" / f"{_key(name)}.{part}"

    def publish(self, draft: Path, name: str, *, durable: bool = True) -> None:
        """Give a finished draft its final name, as `shared_files.publish` does."""
        draft.chmod(self.modes.file)
        if durable:
            sync(draft)
        with self._parent_of(name, make=True) as (parent, base):
            os.replace(draft, base, dst_dir_fd=parent)
            if durable:
                os.fsync(parent)

    def unlink(self, name: str) -> None:
        """Delete a file below the folder, if it is there."""
        with contextlib.suppress(FileNotFoundError), self._parent_of(name) as (parent, base):
            os.unlink(base, dir_fd=parent)

    @contextlib.contextmanager
    def _parent_of(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of a file; yield it and the file's name in it.

        Sub-folders are never opened through a link: another user of a shared cache could make us delete or replace
        files elsewhere by one.
        """
        *folders, base = PurePosixPath(name).parts
        fd, at = os.open(self.path, _FOLDER_FLAGS), self.path
        try:
            for part in folders:
                at = at / part
                if make:
                    make_folder(at, self.modes)
                if at.is_symlink():
                    raise _link_error(at)
                inner = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd, base
        finally:
            os.close(fd)

    def permission_error(self, error: PermissionError) -> CacheError:
        """Return the error for a cache folder that this user may not use."""
        return CacheError(
            f"user {_user(os.getuid())} may not use the cache {self.path} ({error.strerror}: {error.filename}): it "
            f"{_owner(self.path)}. Caches are private by default: choose another `local`, or have its owner share it "
            "(`shared_cache=True`, with a folder whose group may write: chmod 2770)."
        )

    def os_error(self, error: OSError) -> CacheError:
        """Return the error for a file or folder that cannot be made, read or replaced."""
        where = error.filename2 or error.filename or "a file of a shard"
        return CacheError(
            f"the cache {self.path} cannot be used ({error.strerror}: {where}). A cache is a folder on a writable "
            "disk, in which no other files or folders have the names of shards. Move these away, or choose another "
            "`local`."
        )

    def _probe_locks(self) -> None:
        path = self.control / "locks" / f".probe-{secrets.token_hex(8)}"
        first = LOCK_FDS.open(path, os.O_RDWR | os.O_CREAT)
        second = LOCK_FDS.open(path, os.O_RDWR)
        try:
            if not try_flock(first, path) or try_flock(second, path):
                raise no_locks(path)
        finally:
            LOCK_FDS.close(first)
            LOCK_FDS.close(second)
            path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Delete the drafts of dead processes: those whose lock is free."""
        drafts = os.open(self.control / "drafts", _FOLDER_FLAGS | os.O_NOFOLLOW)
        try:
            for name in sorted(os.listdir(drafts)):  # noqa: PTH208 (by descriptor)
                lock = FileLock(self.control / "locks" / f"{name.split('.')[0]}.lock", modes=self.modes)
                if lock.try_acquire():
                    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
                        stack.callback(lock.release)
                        os.unlink(name, dir_fd=drafts)
        finally:
            os.close(drafts)


def _key(name: str) -> str:
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
        found = path.stat()
    except OSError:
        return "cannot be read"
    return f"belongs to {_user(found.st_uid)} (mode {stat.S_IMODE(found.st_mode):o})"
