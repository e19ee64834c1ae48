"""Several processes that write parts. One that dies is replaced, and its part is written again."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Protocol

from lightning_stream.convert.receipt import Receipt
from lightning_stream.errors import LightningStreamError

_MOST_TRIES = 3
_PERIOD_S = 0.5
_CODE = "from lightning_stream.convert.worker import main; main()"


class Piece(Protocol):
    """What is written at a time: a part, or a bucket. Picklable, and its text names it."""

    @property
    def number(self) -> int:
        """Which it is."""


class Task(Protocol):
    """What is done with each piece. Picklable."""

    def run(self, part: Any, tell: Callable[[int], None], /) -> dict[str, Receipt]:
        """Write a piece, telling of its rows; give its receipts by split."""


Seen = Callable[[Any, int, "dict[str, Receipt] | None"], None]


def run_parts(work: Task, parts: Sequence[Piece], num_workers: int, seen: Seen) -> None:
    """Write all parts, in this process if one is enough.

    Args:
        work: What is done with each.
        parts: All that are missing.
        num_workers: Processes at most.
        seen: Called here with a part, its rows so far, and its receipts once it is written.

    Raises:
        LightningStreamError: A worker died several times over one part.
        Exception: What a worker raised; the others are then ended.
    """
    count = min(num_workers, len(parts))
    if count <= 1:
        for part in parts:
            receipts = work.run(part, lambda rows, part=part: seen(part, rows, None))  # type: ignore[misc]
            seen(part, 0, receipts)
        return
    data = pickled(work)
    queue, tries = deque(parts), dict.fromkeys((part.number for part in parts), 0)
    workers: list[_Worker] = []
    try:
        while queue or workers:
            while queue and len(workers) < count:
                workers.append(_Worker.start(data, queue.popleft()))
            ready = wait([worker.pipe for worker in workers], _PERIOD_S)
            for worker in [each for each in workers if each.pipe in ready]:
                if not worker.hear(seen):
                    workers.remove(worker)
                    _count_death(worker, tries)
                    queue.appendleft(worker.part)
                elif worker.is_idle and not (queue and worker.give(queue)):
                    workers.remove(worker)
                    worker.end()
    finally:
        for worker in workers:
            worker.end()


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection[Any, Any]
    part: Piece
    is_idle: bool = False
    _tail: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, data: bytes, part: Piece) -> _Worker:
        ours, theirs = Pipe()
        # Not multiprocessing's spawn: that would import the user's script again, which need not be guarded for it.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", _CODE, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL)
        theirs.close()
        worker = cls(process, ours, part)
        try:
            ours.send_bytes(data)
            ours.send(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died at once, which is heard of next
        return worker

    def hear(self, seen: Seen) -> bool:
        """Take what it says; False if it is dead."""
        try:
            kind, said = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return False
        if kind == "failed":
            _raise(*said)
        elif kind == "rows":
            seen(self.part, said, None)
        else:
            self.is_idle = True
            seen(self.part, 0, {split: Receipt.from_bytes(data) for split, data in said.items()})
        return True

    def give(self, queue: deque[Piece]) -> bool:
        """Give it the next part; False if it is dead."""
        try:
            self.pipe.send(queue[0])
        except (BrokenPipeError, ConnectionResetError):
            return False
        self.part, self.is_idle = queue.popleft(), False
        return True

    def end(self) -> int:
        """End it, if it has not ended; its exit status."""
        self.pipe.close()
        if not self.is_idle:
            self.process.kill()
        return self.process.wait()


def _count_death(worker: _Worker, tries: dict[int, int]) -> None:
    status = worker.end()
    tries[worker.part.number] += 1
    if tries[worker.part.number] == _MOST_TRIES:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise LightningStreamError(
            f"a worker must live until its part is written; {_MOST_TRIES} died ({how}) over {worker.part}. If memory "
            "ran out, use fewer num_workers or a smaller size_limit; num_workers=1 shows what happens in this process. "
            "The parts that are written stay: the same call again goes on from there."
        )


def _raise(error: bytes | None, told: str) -> None:
    if error is None:
        raise LightningStreamError(f"a worker failed:\n{told}")
    raised = pickle.loads(error)  # noqa: S301 - from our own worker
    raise raised from LightningStreamError(f"in a worker:\n{told}")


def pickled(work: Task) -> bytes:
    """The work as bytes that `worker.unpickled` understands, with where to find functions of the user's script.

    Raises:
        ValueError: A function is of a notebook, or made on the way, and there is no cloudpickle.
    """
    try:
        data = pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return _by_value(work, error)
    if b"__main__" not in data:
        return pickle.dumps((None, data))
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return pickle.dumps((("module", spec.name), data))
    path = getattr(main, "__file__", None)
    if path is not None and Path(path).is_file():
        return pickle.dumps((("script", str(Path(path).absolute())), data))
    return _by_value(work, None)


def _by_value(work: Task, error: Exception | None) -> bytes:
    try:
        import cloudpickle  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ValueError(
            "with several processes, functions must be such as they can import: put yours into a module of its own "
            "(not into a notebook, another function, or a lambda), or install cloudpickle, or pass num_workers=1."
        ) from error
    return pickle.dumps((None, cloudpickle.dumps(work)))
