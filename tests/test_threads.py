"""Threads that move bytes: bounded, in order, and never what a process waits for at its end."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path

import pytest

from lightning_stream.counters import Counters
from lightning_stream.processes import job_signals_wait
from lightning_stream.threads import DaemonPool, Lock, lock_over_forks, wait_briefly


def test_calls_run_in_order_in_so_many_threads_and_no_more() -> None:
    gate, seen = threading.Event(), set()

    def call(number: int) -> int:
        seen.add(threading.current_thread().name)
        gate.wait(10)
        return number

    with DaemonPool(3, "few") as pool:
        futures = [pool.submit(call, number) for number in range(20)]
        gate.set()
        assert [future.result(10) for future in futures] == list(range(20))
    assert len(seen) <= 3


def test_a_pool_that_grows_begins_the_calls_that_wait() -> None:
    met = threading.Barrier(6)
    with DaemonPool(2, "test") as pool:
        calls = [pool.submit(met.wait, 20) for _ in range(5)]
        pool.grow(5)
        met.wait(20)
        assert len({call.result() for call in calls}) == 5


@pytest.mark.parametrize("granted", [0, 2])
def test_where_the_system_starts_no_more_threads_those_that_run_do_all_and_none_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, granted: int
) -> None:
    start, left = threading.Thread.start, [granted]

    def start_few(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    with DaemonPool(4, "test") as pool:
        for _ in range(0 if granted else 2):
            with pytest.raises(RuntimeError, match=r"the system starts none .*ulimit -u"):
                pool.submit(int)
        left[0] += not granted
        calls = [pool.submit(int, number) for number in range(200)]
        assert [call.result(10) for call in calls] == list(range(200))


def test_a_busy_pool_that_grows_runs_as_many_calls_as_it_may() -> None:
    gate, met = threading.Semaphore(0), threading.Barrier(17)
    with DaemonPool(4, "test") as pool:
        busy = [pool.submit(gate.acquire) for _ in range(40)]  # ten times as many as threads
        for _ in range(40):
            gate.release()
        assert all(call.result(20) for call in busy)
        calls = [pool.submit(met.wait, 20) for _ in range(16)]
        pool.grow(16)
        met.wait(20)
        assert len({call.result(20) for call in calls}) == 16


def test_closing_a_pool_that_was_to_rest_ends_its_threads_after_the_calls_in_progress() -> None:
    gate, begun = threading.Event(), threading.Barrier(3)

    def stuck() -> bool:
        begun.wait(10)
        return gate.wait(10)

    pool = DaemonPool(2, "rests")
    running = [pool.submit(stuck) for _ in range(2)]
    begun.wait(10)
    pool.rest()
    pool.close()
    gate.set()
    assert [call.result(10) for call in running] == [True, True]
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("rests-")]
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[int, Callable[[], object]], None]]:
    """Gives what calls a function again and again, until a Ctrl-C comes somewhere in it; a number varies when."""
    came: list[int] = []

    def interrupt(*_: object) -> None:
        came.append(signal.SIGVTALRM)
        raise KeyboardInterrupt

    def call_until_interrupted(number: int, function: Callable[[], object]) -> None:
        came.clear()
        with contextlib.suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005 + number % 10 * 0.0001)
            while True:  # in Python 3.12 and 3.13, `while not came` would jump back outside of the block
                if came:
                    break
                function()

    former = signal.signal(signal.SIGVTALRM, interrupt)
    gc.disable()  # in whose callbacks an interrupt would be lost
    try:
        yield call_until_interrupted
    finally:
        gc.enable()
        signal.signal(signal.SIGVTALRM, former)


def test_a_lock_that_ctrl_c_interrupts_anywhere_is_free_for_others() -> None:
    lock = Lock()

    def take() -> None:
        with lock, lock:
            pass

    with interrupts() as call_until_interrupted, DaemonPool(1, "other") as pool:
        for number in range(200):
            call_until_interrupted(number, take)
            pool.submit(take).result(10)


def test_an_interrupt_leaves_no_signal_of_the_job_blocked() -> None:
    def start() -> None:
        with job_signals_wait():
            pass

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with interrupts() as call_until_interrupted:
        for number in range(400):
            call_until_interrupted(number, start)
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_pool_that_ctrl_c_interrupts_anywhere_can_be_closed_and_ends_its_threads() -> None:
    with interrupts() as call_until_interrupted:
        for number in range(400):
            pool, met = DaemonPool(2, "interrupted"), threading.Barrier(3)
            for _ in range(2):
                pool.submit(met.wait, 60)
            met.wait(60)  # both threads have begun
            call_until_interrupted(number, partial(pool.submit, int))
            pool.close()
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("interrupted") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_error_is_the_futures() -> None:
    with DaemonPool(1, "few") as pool, pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(10)


def test_closing_cancels_what_has_not_begun_and_waits_for_nothing() -> None:
    gate, begun = threading.Event(), threading.Event()

    def stuck() -> str:
        begun.set()
        return "done" if gate.wait(10) else "late"

    pool = DaemonPool(1, "few")
    running, waiting = pool.submit(stuck), pool.submit(stuck)
    begun.wait(10)
    pool.close()
    with pytest.raises(CancelledError):
        waiting.result(10)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(stuck)
    gate.set()
    assert running.result(10) == "done"


def test_a_pool_that_is_forgotten_ends_its_threads() -> None:
    pool = DaemonPool(2, "forgotten")
    pool.submit(int).result(10)
    del pool
    gc.collect()
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("forgotten") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_forked_child_forgets_a_pool_whose_lock_another_thread_held() -> None:
    pool = DaemonPool(1, "parent")
    pool.submit(int).result(10)
    with pool._guard:
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            pool.__del__()
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool.submit(int).result(10) == 0


TESTS = Path(__file__).resolve().parent
FETCH = """
import sys
import numpy as np
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import Stream
from lightning_stream.reading.stream_shards import StreamShards
stream = Stream(remote=sys.argv[1], local=sys.argv[2], options={"timeout_s": 60.0})
reader = SampleReader(StreamShards([stream]))
from servers.shards import make_dataset
from pathlib import Path
reader.shards.indexes = [make_dataset(Path(sys.argv[2]) / "unused", 8)]
reader.read_ahead(np.arange(80))
import socket
socket.create_connection(("127.0.0.1", int(sys.argv[3]))).recv(1)  # until the fetch is on its way
"""


def test_a_process_ends_at_once_though_a_store_does_not_answer(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("exit")
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as peer:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        port = str(peer.getsockname()[1])
        silent.settimeout(60)
        peer.settimeout(60)
        process = subprocess.Popen([sys.executable, "-c", FETCH, address, str(folder), port], cwd=TESTS)
        connection, _ = peer.accept()
        request, _ = silent.accept()
        begun = time.monotonic()
        connection.close()
        assert process.wait(30) == 0
        assert time.monotonic() - begun < 10
        request.close()


def test_a_fork_waits_for_a_lock_so_that_its_copy_is_free() -> None:
    lock = lock_over_forks()
    held = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    if (pid := os.fork()) == 0:
        os._exit(0 if lock.acquire(timeout=60) else 1)
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert lock.acquire(timeout=60)
    lock.release()


def test_no_count_is_lost_where_threads_count_at_the_same_time() -> None:
    counters = Counters()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        counting = [threading.Thread(target=lambda: [counters.add("requests") for _ in range(5000)]) for _ in range(4)]
        for thread in counting:
            thread.start()
        for thread in counting:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert counters.values.sum() == 20_000


def test_ctrl_c_anywhere_in_a_count_keeps_no_other_thread_from_counting() -> None:
    counters = Counters()
    with interrupts() as call_until_interrupted:
        for number in range(400):
            call_until_interrupted(number, partial(counters.add, "requests"))
            other = threading.Thread(target=counters.add, args=("retries",), daemon=True)
            other.start()
            other.join(60)
            assert not other.is_alive()


def test_a_wait_is_made_of_short_ones_until_something_comes_or_the_time_is_over() -> None:
    answers, waits = iter([0, 0, 7]), []

    def wait(seconds: float) -> int:
        waits.append(seconds)
        return next(answers)

    assert wait_briefly(wait, 0) == 7
    assert len(waits) == 3
    assert all(0 < seconds <= 1 for seconds in waits)
    assert wait_briefly(lambda seconds: 0, 0.01) == 0


_WRITE_AND_READ = """
import sys
import numpy as np
from lightning_stream import MDSWriter
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import Stream
from lightning_stream.reading.stream_shards import StreamShards

columns = {"id": "int", "text": "str", "x": "ndarray", "more": "tensors"}
with MDSWriter(out=sys.argv[1], columns=columns, compression="zstd", hashes=["xxh3_64"]) as writer:
    writer.write({"id": 1, "text": "one", "x": np.ones(2), "more": {"y": np.ones(2)}})
reader = SampleReader(StreamShards([Stream(remote=sys.argv[1], local=sys.argv[1] + "-cache")]))
assert reader.sample(0)["text"] == "one"
assert not sys._is_gil_enabled()
"""


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="it takes python3.14t, see .ci/README.md")
def test_writing_and_reading_leave_the_gil_off(tmp_path: Path) -> None:
    """The modules of other packages that are loaded for it declare that they do without."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    subprocess.run([sys.executable, "-c", _WRITE_AND_READ, tmp_path / "data"], check=True, env=environment)
