"""What keeps a shard from being evicted while it is read."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_stream.storage.files import HELD

if TYPE_CHECKING:
    from typing_extensions import Self


class Lease:
    """A shard that is here and stays: it cannot be evicted before `close`, or before this process ends.

    A lease that nobody refers to any more is closed: a dataset that was dropped keeps no shard from being evicted.
    """

    def __init__(self, folder: Path, fd: int | None) -> None:
        self.folder = folder
        self._give_back = weakref.finalize(self, _give_back, fd, os.getpid())
        self._give_back.atexit = False  # the kernel does it

    def close(self) -> None:
        """Let the shard go; again is no error."""
        self._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _give_back(fd: int | None, pid: int) -> None:
    """Close a lease's descriptor; in a forked child it is closed already, and the number may be another's."""
    if fd is not None and pid == os.getpid():
        HELD.close(fd)
