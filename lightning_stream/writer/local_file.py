"""Writing one local file, whole or not at all, from parts that are never joined in memory.

A large file goes to the disk past the page cache, which would copy each page once more (a writer of token rows takes
1.4 to 1.9 times the CPU through it) and push other files out of memory. Its bytes must be on the disk before it gets
its name, so this costs no further wait.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_stream.shared_files import file_system
from lightning_stream.stores.local import draft_beside, publish_new

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_DIRECT_FILE_SYSTEMS = ("ext4", "xfs", "overlay")  # others lack it, or do better with a cache of their own
_MIN_DIRECT_BYTES = 1 << 22
_STAGE_BYTES = 1 << 20
_BLOCK_BYTES = 4096  # no disk asks for more


def write_file(path: Path, parts: Sequence[Any]) -> None:
    """Write a new file from its parts; AlreadyExistsError if there is one. A missing folder is created."""
    views = [memoryview(part).cast("B") for part in parts]
    with draft_beside(path) as draft:
        with draft.open("wb") as file:
            if sum(map(len, views)) >= _MIN_DIRECT_BYTES and _set_direct(file.fileno(), draft.parent):
                _write_direct(file.fileno(), views)
            else:
                file.writelines(views)
        publish_new(draft, path)


def _write_direct(fd: int, views: Iterable[memoryview]) -> None:
    """Write whole blocks past the page cache, from memory that begins at a page; the last part of a block as usual."""
    stage = memoryview(mmap.mmap(-1, _STAGE_BYTES))
    filled = 0
    for view in views:
        begin = 0
        while begin < len(view):
            count = min(len(view) - begin, len(stage) - filled)
            stage[filled : filled + count] = view[begin : begin + count]
            filled = filled + count
            begin = begin + count
            if filled == len(stage):
                _write_all(fd, stage)
                filled = 0
    aligned = filled - filled % _BLOCK_BYTES
    _write_all(fd, stage[:aligned])
    if aligned < filled:
        _clear_direct(fd)
        _write_all(fd, stage[aligned:filled])


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        try:
            view = view[os.writev(fd, [view]) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _clear_direct(fd):
                raise  # else a disk with other rules: the rest goes through the page cache


def _set_direct(fd: int, folder: Path) -> bool:
    """Let writes go past the page cache, if the file system is known to do that well."""
    if not _O_DIRECT or _file_system(folder) not in _DIRECT_FILE_SYSTEMS:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _O_DIRECT)
    except OSError:  # an overlay over a file system without it
        return False
    return True


def _clear_direct(fd: int) -> bool:
    """Let writes go through the page cache; False if they already did."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
    return bool(flags & _O_DIRECT)


_file_system = functools.lru_cache(maxsize=64)(file_system)
