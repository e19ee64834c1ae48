"""What keeps a shard from being evicted while it is read."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_stream.shared_files import LOCK_FDS, same_file

if TYPE_CHECKING:
    from typing_extensions import Self


class Lease:
    """A shard that is here and stays: it cannot be evicted before `close`, or before this process ends.

    A lease that nobody refers to any more is closed: a dataset that was dropped keeps no shard from being evicted.

    Args:
        folder: Where the shard's files are; an attribute too.
        fd: The shard's first file, under a shared lock; None where nothing is ever evicted.
        name: The first file's name.
    """

    # No weakref.finalize: fetching threads would change its registry while the interpreter's exit walks it.

    def __init__(self, folder: Path, fd: int | None, name: str = "") -> None:
        self.folder = folder
        self._path, self._fd, self._pid = folder / name, fd, os.getpid()
        self._closing = threading.Lock()  # another thread may close the lease while one looks at its descriptor

    def is_current(self) -> bool:
        """Whether the shard's first file is still the one that was leased: not deleted, nor fetched again since."""
        with self._closing:
            return self._fd is None or same_file(self._fd, self._path)

    def close(self) -> None:
        """Let the shard go; again is no error."""
        if self._pid != os.getpid():
            return  # a forked child has no lease: its copy is closed already
        with self._closing:
            fd, self._fd = self._fd, None
            if fd is not None:
                LOCK_FDS.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ends():  # modules are gone then, and the kernel closes it
            self.close()
