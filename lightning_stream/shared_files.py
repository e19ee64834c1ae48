"""Files that are whole or absent, and locks that die with their owner: all that processes of a machine share."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import random
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lightning_stream import errors
from lightning_stream.errors import (
    AccessError,
    CacheError,
    CacheFullError,
    LightningStreamError,
    LockTimeoutError,
    summarize,
)
from lightning_stream.threads import Lock

try:
    import fcntl
except ImportError as error:
    raise ImportError(
        f"lightning_stream needs POSIX file locks, as Linux and macOS have them; this is {sys.platform}. "
        "On Windows, use WSL."
    ) from error

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T")
DRAFT = ".draft-"
FULL = (errno.ENOSPC, errno.EDQUOT)
# Of one process: others have other keys, limits and shards in use; a ValueError is about its settings.
_OWN_ERRORS = (AccessError, CacheFullError)
_LOCKLESS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP)
_LONGEST_PAUSE_S = 0.05
_SETTLING_S = 0.2
_SKEW_S = 60.0  # of the clocks of machines that share a folder
_SCRATCH = "lightning-stream-"
# Not the global generator: fetching threads must not disturb what a sample's transform draws.
jitter = random.SystemRandom()


@dataclass(frozen=True)
class Modes:
    """The permissions of what we create: private unless asked otherwise."""

    file: int = 0o600
    folder: int = 0o700


PRIVATE = Modes()


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is removed at the end of a block, or most of it if a thread still fetches into it then.

    After an error, such a thread is not waited for, and its file must not hide the error.
    """
    return tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=_spark_folder(), ignore_cleanup_errors=True)


@functools.cache
def scratch_here(folder: str) -> str:
    """The scratch folder of a process for another; on another machine, one that Spark removes with its executor."""
    return folder if Path(folder).exists() else tempfile.mkdtemp(prefix=_SCRATCH, dir=_spark_folder())


def _spark_folder() -> str | None:
    """In an executor of Spark, its folder for temporary files, which it removes at its end."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or None


def publish(draft: Path, final: Path, *, durable: bool = True) -> None:
    """Give a finished draft its final name; the name appears at once, with all of the bytes.

    `durable`: the bytes are on the disk first, so that this holds through a power cut too. Without, it holds for
    whatever happens to processes; :func:`before_boot` finds files that a crash of the machine may have damaged.
    """
    if durable:
        sync(draft)
    draft.replace(final)
    if durable:
        sync(final.parent)


@functools.cache
def boot_time() -> float:
    """When this machine started, in seconds since the epoch."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.time() - time.clock_gettime(clock)


def before_boot(path: Path) -> bool:
    """Whether the file may be of a time before this machine started: bytes in flight then may be missing.

    It is, too, if it was last published or touched in the future: the clock was set back since then.
    """
    return not boot_time() <= path.stat().st_ctime <= time.time() + _SKEW_S


def publish_bytes(content: bytes, final: Path, modes: Modes = PRIVATE, *, durable: bool = True) -> None:
    """Write a small file, whole or not at all."""
    with locked_draft(final) as draft:
        give_mode(draft, modes.file)
        draft.write_bytes(content)
        publish(draft, final, durable=durable)


@contextlib.contextmanager
def locked_draft(final: Path) -> Iterator[Path]:
    """Yield an empty draft beside `final`, locked by this process; it is removed at the end if it is still there.

    The lock is only for `sweep_drafts`. In a file system without locks, nothing is swept.
    """
    while True:
        draft = final.with_name(f"{DRAFT}{secrets.token_hex(16)}")
        fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a sweep came first
                continue
            except OSError:  # a file system without locks
                pass
            if same_file(fd, draft):
                yield draft
                return
        finally:
            draft.unlink(missing_ok=True)
            os.close(fd)


def sweep_drafts(folder: Path) -> bool:
    """Remove the drafts of dead writers in a folder, except those of other users; return whether there were any."""
    swept = False
    for draft in folder.glob(f"{DRAFT}*"):
        try:
            fd = os.open(draft, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it was published meanwhile, or is another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink(missing_ok=True)
            swept = True
        except OSError:  # its writer is alive, or the file system has no locks
            continue
        finally:
            os.close(fd)
    return swept


def sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with named_errors(path):
            os.fsync(fd)
    except OSError as error:
        # Some file systems, as that of Windows shares, keep a folder's names themselves, and answer so.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Have the system's errors about an open file, which name none, name this path."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or isinstance(error, LightningStreamError):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def make_folder(folder: Path, modes: Modes = PRIVATE) -> None:
    """Create a folder with these modes; parents that are missing too get the same."""
    if folder.is_dir():
        return
    if not folder.parent.is_dir():
        make_folder(folder.parent, modes)
    try:
        folder.mkdir()
        give_mode(folder, modes.folder)
    except FileExistsError as error:
        if not os.path.lexists(folder):  # made and deleted again by others
            raise deleted(folder) from error
        if not folder.is_dir():
            raise


def give_mode(made: Path | int, mode: int) -> None:
    """Give these permissions to a path or an open file that this process has just made.

    A file system without permissions of its own, as Windows disks and mounts of them, may refuse that: it says itself
    who may read.
    """
    try:
        os.chmod(made, mode)  # noqa: PTH101 - it may be a descriptor
    except OSError as error:
        if error.errno not in (errno.EPERM, *_LOCKLESS):
            raise


def deleted(path: Path) -> FileNotFoundError:
    """The system's error for a file or folder that is there no more."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def backoff(wait_s: float) -> Iterator[None]:
    """Yield at once, then after short, growing, jittered pauses, until the deadline; nothing else here waits."""
    deadline = time.monotonic() + wait_s
    pause_s = 0.001
    yield
    while (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(left_s, pause_s * jitter.uniform(0.5, 1.0)))
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        yield


def open_with_mode(path: Path, flags: int, mode: int) -> int:
    """Open a file, for writing never through a link; one that is created here has exactly this mode."""
    links = os.O_NOFOLLOW if flags & (os.O_RDWR | os.O_WRONLY) else 0
    fd = os.open(path, flags | os.O_CLOEXEC | links, mode)
    if flags & os.O_CREAT and mode & 0o077:
        status = os.fstat(fd)
        if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) != mode:
            give_mode(fd, mode)
    return fd


class _LockDescriptors:
    """Descriptors that carry a kernel lock of this process.

    A forked child inherits copies, which would keep a lock alive after its owner is killed: the child closes them.
    """

    def __init__(self) -> None:
        self._fds: set[int] = set()
        self._guard = Lock()  # the garbage collector may close one while another is being opened
        os.register_at_fork(
            before=self._guard.acquire, after_in_parent=self._guard.release, after_in_child=self._drop_inherited
        )

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open a file that will be locked."""
        with self._guard:
            fd = open_with_mode(path, flags, mode)
            self._fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        """Close it, which gives its lock back."""
        with self._guard:
            self._fds.discard(fd)
            os.close(fd)

    def _drop_inherited(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._guard.release()


LOCK_FDS = _LockDescriptors()


def try_flock(fd: int, path: Path, *, shared: bool = False) -> bool:
    """Take the kernel's lock on an open file, without waiting; False where another holds it.

    Raises:
        CacheError: The file system has no locks.
    """
    try:
        with named_errors(path):
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _LOCKLESS:
            raise no_locks(path) from error
        raise
    return True


def no_locks(path: Path) -> CacheError:
    """The error for a file system on which processes cannot exclude each other."""
    return CacheError(
        f"the file system of {path.parent} has no working file locks ({file_system(path)}), and processes that share a "
        "cache need them. Put `local` on a disk of this machine (or set LIGHTNING_STREAM_CACHE to one); "
        "for NFS or Lustre, mount with locks (`local_lock=flock`, `-o flock`)."
    )


def file_system(path: Path) -> str:
    """The type of the file system that holds a path, as the kernel names it; "unknown" where it does not say."""
    best = ""
    kind = "unknown"
    try:
        mounts = Path("/proc/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return kind
    real = path.resolve()
    for line in mounts:
        _, point, name, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and real.is_relative_to(point):
            best = point
            kind = name
    return kind


class FileLock:
    """An exclusive lock between processes, and between threads, that the kernel ends with its owner.

    The lock's file exists only while it is held, or stays where it has a `value`. Use as a context manager, which waits
    up to `wait_s` and then raises :class:`LockTimeoutError`, or by `try_acquire` and `release`. `modes` are for the
    file, and its folder if absent.
    """

    def __init__(self, path: Path, wait_s: float = 60.0, modes: Modes = PRIVATE, *, has_value: bool = False) -> None:
        self.path = path
        self._wait_s = wait_s
        self.modes = modes
        self._has_value = has_value
        self._fd: int | None = None
        self._pid = 0

    def try_acquire(self) -> bool:
        """Take the lock if it is free."""
        while True:
            fd = self._open()
            try:
                taken = try_flock(fd, self.path)
                # The former owner removed the file when it released it: a lock on that inode excludes no one.
                current = taken and same_file(fd, self.path)
            except BaseException:
                LOCK_FDS.close(fd)
                raise
            if current:
                self._fd = fd
                self._pid = os.getpid()
                # On a full disk that fails; the lock is ours all the same, and only `holder` knows less.
                with contextlib.suppress(OSError):
                    if not self._has_value:
                        os.pwrite(fd, f"{self._pid} {socket.gethostname()}\n".encode(), 0)
                return True
            LOCK_FDS.close(fd)
            if not taken:
                return False

    def release(self) -> None:
        """Release the lock. In a forked child, which never held it, this does nothing."""
        is_ours = self.is_current()
        fd = self._fd
        self._fd = None
        if fd is not None and self._pid == os.getpid():
            if is_ours and not self._has_value:
                self.path.unlink(missing_ok=True)
            LOCK_FDS.close(fd)

    @property
    def fd(self) -> int:
        """The open file of a lock that is held, with the value that its last holder has left."""
        assert self._fd is not None
        return self._fd

    def is_current(self) -> bool:
        """Whether it is held, and its file was not deleted since: else another process may have made a new one."""
        return self._fd is not None and self._pid == os.getpid() and same_file(self._fd, self.path)

    def holder(self) -> str:
        """The process that holds it, for messages."""
        try:
            pid, host = self.path.read_text().split()
        except (OSError, ValueError):
            return "another process"
        return f"process {pid} on {host}"

    def _open(self) -> int:
        opened = functools.partial(LOCK_FDS.open, self.path, os.O_RDWR | os.O_CREAT, self.modes.file)
        for _ in backoff(_SETTLING_S):
            try:
                return opened()
            except FileNotFoundError:
                make_folder(self.path.parent, self.modes)
            except PermissionError:
                # In a shared folder another user may have made it an instant ago, and not opened it to us yet.
                continue
        return opened()

    def __enter__(self) -> Self:
        for _ in backoff(self._wait_s):
            if self.try_acquire():
                return self
        raise self.timeout(self._wait_s)

    def __exit__(self, *exc: object) -> None:
        self.release()

    def timeout(self, wait_s: float) -> LockTimeoutError:
        """The error for a wait that came to its deadline."""
        return LockTimeoutError(
            f"waited {wait_s:g} s for the lock {self.path}, held by {self.holder()}. See whether that process still "
            "makes progress (end it if not: its lock ends with it), or allow a longer wait."
        )


def same_file(fd: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


def run_once_across_processes(done: Callable[[], T | None], work: Callable[[], T], lock: FileLock, wait_s: float) -> T:
    """Have one of all processes and threads do the work, while the others wait for its result.

    An owner that fails leaves its reason beside the lock before it releases it, and all that waited raise it at once; a
    later call clears it and tries again. An owner that is killed leaves nothing, nor does one that failed at its own
    limits, rights, settings, memory or files: the next in line takes over.

    Args:
        done: What the work gives, where it has been done already (a stat, cheap); else None.
        work: Does it, and publishes files so that `done` sees them.
        lock: The lock that stands for this work.
        wait_s: How long to wait for another's work.

    Raises:
        LockTimeoutError: Another process still held the lock at the deadline.
        FileNotFoundError: The lock, or other files of the work, were deleted meanwhile.
        LightningStreamError: What the work raised, here or in the process that this one waited for.
    """
    reason = lock.path.with_suffix(".failed")
    before = _read_failure(reason).get("token")
    for _ in backoff(wait_s):
        is_ours = lock.try_acquire()
        try:
            if (value := done()) is not None:
                return value
            _raise_new_failure(reason, before)
            if is_ours:
                reason.unlink(missing_ok=True)
                return _run_as_owner(work, lock, reason)
        finally:
            if is_ours:
                lock.release()
    raise lock.timeout(wait_s)


def _run_as_owner(work: Callable[[], T], lock: FileLock, reason: Path) -> T:
    """Do the work under the lock, and leave the reason if it fails."""
    try:
        return work()
    except Exception as error:
        if not lock.is_current():  # another process may have made a new one, and do the same work
            raise deleted(lock.path) from error
        is_known = isinstance(error, LightningStreamError)
        own_errors = _OWN_ERRORS if is_known else (OSError, MemoryError, ValueError)
        if not isinstance(error, own_errors):
            _write_failure(reason, error, lock.modes)
        raise


def _write_failure(reason: Path, error: Exception, modes: Modes) -> None:
    known = isinstance(error, LightningStreamError)
    kind, message = (type(error).__name__, str(error)) if known else ("CacheError", summarize(error))
    failure = {"token": secrets.token_hex(8), "kind": kind, "message": message, "pid": os.getpid()}
    # On a full disk that fails: a process that waits gets the lock instead, and sees the same error itself.
    with contextlib.suppress(OSError):
        publish_bytes(json.dumps(failure).encode(), reason, modes)


def _read_failure(reason: Path) -> dict[str, object]:
    try:
        failure = json.loads(reason.read_bytes())
    except (OSError, ValueError):
        return {}
    return failure if isinstance(failure, dict) else {}


def _raise_new_failure(reason: Path, before: object) -> None:
    failure = _read_failure(reason)
    if failure and failure.get("token") != before:
        # The file is another process's, in a shared cache another user's: it names an error of ours, or none.
        kind = getattr(errors, str(failure.get("kind")), None)
        kind = kind if isinstance(kind, type) and issubclass(kind, LightningStreamError) else CacheError
        raise kind(
            f"{failure.get('message')} (raised in process {failure.get('pid')}, which did this for all that wait)"
        )
