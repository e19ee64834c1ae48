"""The folder that a cache lives in: where it is by default, whose it is, and the control folder inside it."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import secrets
import stat
import tempfile
from pathlib import Path

from lightning_stream.errors import CacheError
from lightning_stream.shared_files import (
    HELD,
    PRIVATE,
    FileLock,
    Modes,
    make_folder,
    no_locks,
    publish_bytes,
    try_flock,
)

CONTROL = ".lightning_stream"


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
    return Path(tempfile.gettempdir()) / f"lightning_stream-{os.getuid()}"


class CacheFolder:
    """A cache's folder with its control folder: locks, drafts, ledger.

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
        """Make the folders, see that locks work, and clear what killed processes left; once per process, and anew where
        somebody has deleted them since.

        Raises:
            CacheError: It is another user's, or its file system has no locks.
        """
        if self._ready_in == os.getpid() and (self.control / "drafts").is_dir():
            return
        try:
            make_folder(self.path, self.modes)
            for name in ("locks", "drafts"):
                make_folder(self.control / name, self.modes)
            self._probe_locks()
            self._sweep()
        except PermissionError as error:
            raise self.refused(error) from error
        self._ready_in = os.getpid()

    def lock(self, name: str, wait_s: float = 60.0) -> FileLock:
        """The lock of one shard."""
        return FileLock(self.control / "locks" / f"{_key(name)}.lock", wait_s, self.modes)

    def draft(self, name: str, part: str) -> Path:
        """Where a file of this shard is prepared; only the holder of the shard's lock may."""
        return self.control / "drafts" / f"{_key(name)}.{part}"

    def make_parent(self, path: Path) -> None:
        """Make the sub-folder that a file's name asks for."""
        make_folder(path.parent, self.modes)

    def refused(self, error: PermissionError) -> CacheError:
        """The error for a cache folder that this user may not use."""
        return CacheError(
            f"user {_user(os.getuid())} may not use the cache {self.path} ({error.strerror}: {error.filename}): it "
            f"{_owner(self.path)}. Caches are private by default: choose another `local`, or have its owner share it "
            "(`shared_cache=True`, with a folder whose group may write: chmod 2770)."
        )

    def unusable(self, error: OSError) -> CacheError:
        """The error for a folder in which something cannot be made, read or replaced."""
        where = error.filename2 or error.filename or "a file of a shard"
        return CacheError(
            f"the cache {self.path} cannot be used ({error.strerror}: {where}). A cache is a folder on a disk that can "
            "be written to, in which no one else's files or folders have the names of shards. Move away what is in the "
            "way, or choose another `local`."
        )

    def _probe_locks(self) -> None:
        path = self.control / "locks" / f".probe-{secrets.token_hex(8)}"
        first = HELD.open(path, os.O_RDWR | os.O_CREAT)
        second = HELD.open(path, os.O_RDWR)
        try:
            if not try_flock(first, path) or try_flock(second, path):
                raise no_locks(path)
        finally:
            HELD.close(first)
            HELD.close(second)
            path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Unlink the drafts of processes that are gone: those whose lock is free."""
        for draft in sorted((self.control / "drafts").iterdir()):
            lock = FileLock(self.control / "locks" / f"{draft.name.split('.')[0]}.lock", modes=self.modes)
            if lock.try_acquire():
                try:
                    draft.unlink(missing_ok=True)
                finally:
                    lock.release()


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:24]


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
