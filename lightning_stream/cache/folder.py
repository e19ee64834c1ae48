"""The folder that a cache lives in: where it is by default, whose it is, and the control folder inside it."""

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
from pathlib import Path, PurePosixPath

from lightning_stream.errors import CacheError
from lightning_stream.shared_files import (
    LOCK_FDS,
    PRIVATE,
    FileLock,
    Modes,
    make_folder,
    no_locks,
    publish_bytes,
    sync,
    try_flock,
)

CONTROL = ".lightning_stream"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def default_folder(identity: str) -> Path:
    """Where a store is cached when the user does not say: private to the user, one folder per store.

    Below ``$LIGHTNING_STREAM_CACHE``, or ``$XDG_CACHE_HOME/lightning_stream``, or ``~/.cache/lightning_stream``; where
    the user has no home, ``lightning_stream-<uid>`` in the folder for temporary files.
    """
    tail = re.sub(r"[^A-Za-z0-9._-]+", "-", identity.split("://")[-1]).strip("-.")[-40:]
    return _base() / f"{tail}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _base() -> Path:
    if given := os.environ.get("LIGHTNING_STREAM_CACHE"):
        return Path(given).expanduser().absolute()
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given).absolute() / "lightning_stream"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 (Path.home() raises where there is none)
    if home.is_absolute() and os.access(home, os.W_OK):
        return home / ".cache" / "lightning_stream"
    return _temporary_base()


def _temporary_base() -> Path:
    return Path(tempfile.gettempdir()) / f"lightning_stream-{os.getuid()}"


class CacheFolder:
    """A cache's folder with its control folder: locks, drafts, usage log.

    Args:
        path: The folder.
        shared: False: what we create is for this user only. True: it takes the folder's own permissions, so that the
            group or the users whom its owner lets in can share it.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        self.path = path
        self.control = path / CONTROL
        self._shared = shared
        self._ready_in = 0

    @property
    def modes(self) -> Modes:
        """Permissions of what is created here."""
        if not self._shared:
            return PRIVATE
        try:
            bits = stat.S_IMODE(self.path.stat().st_mode)
        except FileNotFoundError:
            bits = 0o2770
        return Modes(file=bits & 0o666 | 0o600, folder=bits & 0o2777 | 0o700)

    def source(self) -> str | None:
        """Whose data is kept here, as `set_source` said; None if nothing did."""
        try:
            return (self.control / "source").read_text()
        except FileNotFoundError:
            return None

    def set_source(self, label: str) -> None:
        """Note whose data is kept here."""
        publish_bytes(label.encode(), self.control / "source", self.modes)

    def prepare(self) -> None:
        """Make the folders, see that locks work, and remove what killed processes left.

        Done once per process, and again after somebody has deleted the folders.

        Raises:
            CacheError: It is another user's, its file system has no locks, or a link leads out of it.
        """
        if self._ready_in == os.getpid() and (self.control / "drafts").is_dir():
            return
        try:
            if self.path.is_relative_to(base := _temporary_base()):
                make_folder(base)
                _check_ours(base)
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
        """The lock of one shard."""
        return FileLock(self.control / "locks" / f"{_key(name)}.lock", wait_s, self.modes)

    def draft(self, name: str, part: str) -> Path:
        """Where a file of this shard is prepared; only the holder of the shard's lock may."""
        return self.control / "drafts" / f"{_key(name)}.{part}"

    def publish(self, draft: Path, name: str, *, durable: bool = True) -> None:
        """Give a finished draft its final name below the folder, as `shared_files.publish` does."""
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
        """The open folder of a file, and the file's name in it.

        Each sub-folder is opened from the one above, and never through a link: another user of a shared cache could
        have put one there, and we would delete or replace files elsewhere.
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
        """The error for a cache folder that this user may not use."""
        return CacheError(
            f"user {_user(os.getuid())} may not use the cache {self.path} ({error.strerror}: {error.filename}): it "
            f"{_owner(self.path)}. Caches are private by default: choose another `local`, or have its owner share it "
            "(`shared_cache=True`, with a folder whose group may write: chmod 2770)."
        )

    def os_error(self, error: OSError) -> CacheError:
        """The error for a folder in which something cannot be made, read or replaced."""
        where = error.filename2 or error.filename or "a file of a shard"
        return CacheError(
            f"the cache {self.path} cannot be used ({error.strerror}: {where}). A cache is a folder on a disk that can "
            "be written to, in which no one else's files or folders have the names of shards. Move away what is in the "
            "way, or choose another `local`."
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
        """Unlink the drafts of processes that are gone: those whose lock is free."""
        drafts = os.open(self.control / "drafts", _FOLDER_FLAGS | os.O_NOFOLLOW)
        try:
            for name in sorted(os.listdir(drafts)):  # noqa: PTH208 (by descriptor)
                lock = FileLock(self.control / "locks" / f"{name.split('.')[0]}.lock", modes=self.modes)
                if lock.try_acquire():
                    _unlink_and_release(name, drafts, lock)
        finally:
            os.close(drafts)


def _unlink_and_release(name: str, folder: int, lock: FileLock) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    finally:
        lock.release()


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _check_ours(base: Path) -> None:
    """A folder for temporary files is open to all users: one of them may have made our cache's folder before us."""
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CacheError(
            f"the default cache {base} must be a folder that only user {_user(os.getuid())} may write to; it "
            f"{_owner(base)}. Set LIGHTNING_STREAM_CACHE to a folder of yours, or pass `local`."
        )


def _link_error(path: Path) -> CacheError:
    return CacheError(
        f"a cache writes and deletes only below its own folder; {path} is a link to {os.path.realpath(path)}. "
        "Remove the link, or choose another `local`."
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _owner(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "cannot be looked into"
    return f"belongs to {_user(found.st_uid)} (mode {stat.S_IMODE(found.st_mode):o})"
