"""What a worker process does when the whole job is told to stop: go on, until its trainer has no more use for it."""

from __future__ import annotations

import os
import signal
import threading
import time

_GRACE_S = 30


def leave_signals_to_the_trainer() -> None:
    """Let a worker outlive Ctrl-C and SIGTERM, which terminals, `timeout` and schedulers send to the whole job.

    The trainer takes them to mean: finish the step, save, leave. It needs its workers for that; they end with it, at
    once when it is the trainer who asks. A worker asked by others, and not by its trainer within a grace period, ends
    by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # handlers can only be set from the main thread, where torch runs its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, "sigtimedwait") or signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return  # a system that does not say who sends; or an iteration before has done this
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_asked, args=(os.getppid(),), daemon=True).start()


def _end_when_asked(trainer: int) -> None:
    """Wait for SIGTERM in a thread, since only a waiter is told who sent it."""
    asked: signal.struct_siginfo | None = signal.sigwaitinfo({signal.SIGTERM})
    end = time.monotonic() + _GRACE_S
    while asked is not None and asked.si_pid != trainer:
        asked = signal.sigtimedwait({signal.SIGTERM}, max(0.0, end - time.monotonic()))
    os._exit(0)
