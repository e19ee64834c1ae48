"""Drafts: files that are written beside their final name. The lock of a draft shows that its writer is alive."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from lightning_stream.errors import StoreError
from lightning_stream.shared_files import FileLock, Modes, publish, same_file, sync

from .base import already_exists

DRAFT, LOCK = ".draft-", ".lock-"
_OPEN_TO_ALL = Modes(0o666, 0o777)  # a lock's file: all who may write into the folder may lock
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@contextlib.contextmanager
def locked_draft(final: Path) -> Iterator[Path]:
    """Yield an empty draft beside `final`, locked by this process; it is removed at the end if it is still there.

    The lock is only for `sweep_drafts`. In a file system without locks, nothing is swept.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StoreError(f"{final.parent} must be a folder; it is a file, or below one. Use another folder.") from None
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


def publish_new(draft: Path, final: Path) -> None:
    """Give a finished draft its final name; AlreadyExistsError if there is a file of that name."""
    sync(draft)
    try:
        os.link(draft, final)
    except FileExistsError as error:
        raise already_exists(final) from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with name_lock(final):
            if final.exists():
                raise already_exists(final) from None
            publish(draft, final)
        return
    sync(final.parent)


def name_lock(final: Path) -> FileLock:
    """Return the lock for comparing and replacing a file of this name."""
    return FileLock(final.with_name(f"{LOCK}{final.name}"), modes=_OPEN_TO_ALL)
