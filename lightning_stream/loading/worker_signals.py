"""How worker processes handle the signals that a whole job gets, and the end of their trainer."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial

from lightning_stream.monitoring.watch import REPORT
from lightning_stream.processes import JOB_SIGNALS, do_nothing, leave_job_signals_to_the_parent
from lightning_stream.stores.retry import requests_in_flight

_GRACE_S = 1.0  # for a batch in progress, once the trainer is gone or wants no more
_OWN_SIGNALS = () if REPORT is None else (REPORT,)
_watching: list[int] = []  # this process, once it watches its trainer


def leave_signals_to_the_trainer(pipe: int) -> None:
    """Let a worker outlive the signals of a whole job: Ctrl-C, and what `timeout` and schedulers send.

    The trainer takes them to mean: finish the step, save, end. It needs its workers for that. A worker ends soon after
    its pipe from the trainer has ended, of which it has this descriptor. Processes that it starts have the default
    signal handlers.
    """
    _watching[:] = [os.getpid()]
    received, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)  # each signal's number, also while no Python code runs
    for signum in _OWN_SIGNALS:
        signal.signal(signum, do_nothing)
        signal.siginterrupt(signum, False)
    leave_job_signals_to_the_parent()
    restore_in_forks((*JOB_SIGNALS, *_OWN_SIGNALS))
    if REPORT is not None and sys.__stderr__ is not None:
        # The stacks come also where no Python code can run; then the handler above is called.
        faulthandler.register(REPORT, file=sys.__stderr__, all_threads=True, chain=True)
    threading.Thread(target=_end_with, args=(pipe, received), name="trainer-watch", daemon=True).start()


def can_report() -> bool:
    """Whether `REPORT` lets this process write its stacks and requests in flight to stderr."""
    return os.getpid() in _watching and REPORT is not None and sys.__stderr__ is not None


def restore_in_forks(numbers: Sequence[int]) -> None:
    """Give processes that this one forks the default handlers; these signals to them wait until they have them."""
    block, unblock = (partial(signal.pthread_sigmask, how, numbers) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK))
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=partial(_restore, numbers))


def _restore(signums: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    for signum in JOB_SIGNALS:
        if signal.getsignal(signum) is do_nothing:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signums)


def _end_with(pipe: int, received: int) -> None:
    """Report where this process stands when it is asked, and end it when the pipe has ended."""
    events = select.poll()
    events.register(received, select.POLLIN)
    events.register(pipe, 0)  # its end is reported always
    while pipe not in (ready := dict(events.poll())):
        numbers = os.read(received, 1024) if received in ready else b""
        if REPORT is not None and REPORT in numbers:
            requests = requests_in_flight() or ["none"]
            print(f"Requests in flight in worker {os.getpid()}:", *requests, sep="\n  ", file=sys.stderr, flush=True)
    time.sleep(_GRACE_S)
    os._exit(0)
