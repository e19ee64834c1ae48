"""A process that writes parts, as its parent asks for them. It ends when its parent does."""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

_TELL_S = 0.3
IN_WORKER = "LIGHTNING_STREAM_CONVERT_WORKER"


def main() -> None:
    """Serve the connection whose number is the first argument."""
    os.environ[IN_WORKER] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends its workers itself
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        _serve(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone


def _serve(pipe: Connection[Any, Any]) -> None:
    try:
        work = unpickled(pipe.recv_bytes())
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


def unpickled(data: bytes) -> Any:
    """What `pool.pickled` packed, from the process that started this one."""
    main, packed = pickle.loads(data)  # noqa: S301 - our own
    if main is not None:
        kind, name = main
        run = runpy.run_module if kind == "module" else runpy.run_path
        module = ModuleType("__mp_main__")  # as multiprocessing does: what is guarded in the script is not run
        module.__dict__.update(run(name, run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    return pickle.loads(packed)  # noqa: S301 - our own


class _Teller:
    """Tells the parent how many rows of a part are written, now and then."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._next = time.monotonic() + _TELL_S
        self._parent = os.getppid()

    def __call__(self, rows: int) -> None:
        if os.getppid() != self._parent:
            raise BrokenPipeError("the process that asked for this part is gone")
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
