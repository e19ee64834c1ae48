"""How worker processes handle the signals that a whole job gets, and the end of their trainer."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from lightning_stream.processes import JOB_SIGNALS, do_nothing, leave_job_signals_to_the_parent
from lightning_stream.stores.retry import requests_in_flight

_GRACE_S = 30
_POLL_MS = 1000  # between looks at a trainer on a system without pidfd_open
_END = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # no terminal and no scheduler sends it
REPORT = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else None  # asks a worker where it stands
_OWN_SIGNALS = (_END, *(() if REPORT is None else (REPORT,)))
_SIGNALS = (*JOB_SIGNALS, *_OWN_SIGNALS)
_watching: list[int] = []  # this process, once it watches its trainer


def leave_signals_to_the_trainer(trainer_pid: int) -> None:
    """Let a worker outlive the signals of a whole job: Ctrl-C, and what `timeout` and schedulers send.

    The trainer takes them to mean: finish the step, save, end. It needs its workers for that. A worker ends at once
    when its trainer is gone or asks it to (see `let_terminate_end_at_once`), and `_GRACE_S` after a SIGTERM of others.
    Processes that it starts have the default signal handlers.
    """
    if threading.current_thread() is not threading.main_thread() or os.getpid() in _watching:
        return  # handlers can only be set from the main thread, where torch runs its workers
    _watching[:] = [os.getpid()]
    received, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)  # each signal's number, also while no Python code runs
    for number in _OWN_SIGNALS:
        signal.signal(number, do_nothing)
        signal.siginterrupt(number, False)
    leave_job_signals_to_the_parent()
    restore_in_forks(_SIGNALS)
    if REPORT is not None and sys.__stderr__ is not None:
        # The stacks come also where no Python code can run; then the handler above is called.
        faulthandler.register(REPORT, file=sys.__stderr__, all_threads=True, chain=True)
    threading.Thread(target=_end_in_time, args=(trainer_pid, received), name="trainer-watch", daemon=True).start()


def can_report() -> bool:
    """Whether `REPORT` lets this process write its stacks and requests in flight to stderr."""
    return os.getpid() in _watching and REPORT is not None and sys.__stderr__ is not None


def let_terminate_end_at_once(workers: Iterable[Any]) -> None:
    """Let `terminate()` of the trainer's worker processes, also at the interpreter's exit, end them without grace.

    A worker cannot see in Python who sent a SIGTERM, so the trainer sends a second signal that no other program sends.
    """
    for worker in workers:
        process = worker._popen  # noqa: SLF001 - the interpreter's exit calls its terminate(), and nothing public
        process.terminate = partial(_terminate, weakref.proxy(process))


def _terminate(process: Any) -> None:
    for number in (signal.SIGTERM, _END):  # the first is for a worker that has just been started
        process._send_signal(number)  # noqa: SLF001


def restore_in_forks(numbers: Sequence[int]) -> None:
    """Give processes that this one forks the default handlers; these signals to them wait until they have them."""
    block, unblock = (partial(signal.pthread_sigmask, how, numbers) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK))
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=partial(_restore, numbers))


def _restore(numbers: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in JOB_SIGNALS:
        if signal.getsignal(number) is do_nothing:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _end_in_time(trainer_pid: int, received: int) -> None:
    """End this process when its trainer asks or is gone, or a grace period after a SIGTERM of others."""
    events = select.poll()
    events.register(received, select.POLLIN)
    timeout_ms = _watch(trainer_pid, events)
    end = float("inf")
    while time.monotonic() < end:
        left_ms = min(timeout_ms, (end - time.monotonic()) * 1000)
        ready = events.poll(None if left_ms == float("inf") else max(0, left_ms))
        numbers = os.read(received, 1024) if any(fd == received for fd, _ in ready) else b""
        gone = any(fd != received for fd, _ in ready) or (not ready and not _exists(trainer_pid))
        if gone or _END in numbers:
            break
        if REPORT is not None and REPORT in numbers:
            requests = requests_in_flight() or ["none"]
            print(f"Requests in flight in worker {os.getpid()}:", *requests, sep="\n  ", file=sys.stderr, flush=True)
        if signal.SIGTERM in numbers:
            end = min(end, time.monotonic() + _GRACE_S)
    os._exit(0)


def _watch(trainer_pid: int, events: select.poll) -> float:
    """Let `events` report the trainer's end; returns how often to look for it besides, in milliseconds."""
    try:
        events.register(os.pidfd_open(trainer_pid), select.POLLIN)
    except ProcessLookupError:
        os._exit(0)
    except (AttributeError, OSError):  # not Linux, an old one, or not allowed
        return _POLL_MS
    return float("inf")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
