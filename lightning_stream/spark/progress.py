"""A line on stderr that counts the partitions of a conversion as their receipts arrive."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

from lightning_stream.convert.partition import OutputSpec
from lightning_stream.convert.receipt import CONTROL, is_receipt
from lightning_stream.errors import StoreError

_PERIOD_S = 2.0


class Progress:
    """Counts the receipts in a thread, from ``__enter__`` to ``__exit__``."""

    def __init__(self, job: OutputSpec) -> None:
        self._job = job
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, name="conversion-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._show()
        sys.stderr.write("\n")

    def _count(self) -> None:
        while not self._over.wait(_PERIOD_S):
            self._show()

    def _show(self) -> None:
        store = self._job.store
        try:
            names = [entry.name for entry in store.list(f"{CONTROL}/{self._job.fingerprint}/")]
        except StoreError:
            return
        count = sum(is_receipt(name, self._job.fingerprint) for name in names)
        sys.stderr.write(f"\r{count:,} partitions written to {store.url}")
        sys.stderr.flush()
