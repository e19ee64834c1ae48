"""A process that writes parts, as its parent asks for them. It ends when its parent does."""

from __future__ import annotations

import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

_TELL_S = 0.3


def main() -> None:
    """Serve the connection whose number is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends its workers itself
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        _serve(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone


def _serve(pipe: Connection[Any, Any]) -> None:
    try:
        work = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from the process that started this one
    except Exception as error:  # noqa: BLE001 - told to the parent
        pipe.send(("failed", _portable(error)))
        return
    while True:
        part = pipe.recv()
        try:
            receipts = work.run(part, _Teller(pipe))
        except Exception as error:  # noqa: BLE001 - raised in the parent
            pipe.send(("failed", _portable(error)))
        else:
            pipe.send(("done", {split: receipt.to_bytes() for split, receipt in receipts.items()}))


class _Teller:
    """Tells the parent how many rows of a part are written, now and then."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._next = time.monotonic() + _TELL_S

    def __call__(self, rows: int) -> None:
        if time.monotonic() >= self._next:
            self._pipe.send(("rows", rows))
            self._next = time.monotonic() + _TELL_S


def _portable(error: Exception) -> tuple[bytes | None, str]:
    """The error as the parent can raise it, if it can be pickled, and its traceback as text."""
    told = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - any class may refuse; then its text stays
        return None, told
    return data, told
