"""A shard in the cache that cannot be evicted while it is held."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import final

from lightning_stream.shared_files import LOCK_FDS, same_file


@final
class Lease:
    """A shard in `folder` that cannot be evicted before `close`, or before this process ends.

    A lease without references is closed, so a dataset that was dropped keeps no shard from being evicted. `fd` is the
    shard's first file, `name`, under a shared lock; None if nothing is ever evicted. `is_held` until it is closed.
    """

    # No weakref.finalize: fetching threads would change its registry while the interpreter's exit walks it.

    def __init__(self, folder: Path, fd: int | None, name: str = "") -> None:
        self.folder = folder
        self._path, self._fd, self._pid = folder / name, fd, os.getpid()
        self.is_held = True
        self._closing = threading.Lock()  # a thread may close the lease while another one uses its descriptor

    def is_current(self) -> bool:
        """Return whether the shard's first file was neither deleted nor fetched again since; True if it is closed."""
        with self._closing:
            return self._fd is None or same_file(self._fd, self._path)

    def close(self) -> None:
        """Release the shard; a second call does nothing."""
        if self._pid != os.getpid():
            return  # the descriptors of leases are closed in a forked child
        with self._closing:
            fd, self._fd, self.is_held = self._fd, None, False
            if fd is not None:
                LOCK_FDS.close(fd)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ends():  # modules are gone then, and the kernel closes it
            self.close()
