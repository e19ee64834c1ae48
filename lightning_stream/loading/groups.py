"""Short batches leave a worker several at a time, and the trainer takes them apart again.

A message between processes costs both of them some 0.4 ms of processor time, for threads, queues and locks of torch's:
as much as gathering 2 MB. So a worker sends what it makes within a short time at once. It never keeps a batch back
while it makes one that may take longer: after batches that took long, and where the next one waits for a shard or calls
functions of the user, which may be fast for one sample and slow for another. It is never so far ahead that batches
would gather in the trainer: torch asks the workers in turn, each for a message. Under a cache limit each batch is a
message, so that all workers need the same shards at about the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from lightning_stream.loading.meter import Made
from lightning_stream.loading.transport import SharedSlots
from lightning_stream.order.micro_batches import MicroBatch

_SHORT_S = 0.002  # of making a batch before another one in a message, and of all between its first and its last one

_COMPARED = 2  # batches of a worker, of which the quicker one tells how long the next one takes

Delivery = tuple[Any, MicroBatch, Made]  # a batch, its samples, and the times of its making
Message = tuple[int, list[Delivery]]  # the worker, and the next of its batches


def grouped(
    to_make: Iterator[tuple[MicroBatch, Callable[[], Delivery]]],
    worker: int,
    slots: SharedSlots | None,
    is_quick: Callable[[NDArray[Any]], bool],
) -> Iterator[Any]:
    """Make the batches of a worker, and yield its messages, over memory of `slots` where there is some.

    ``is_quick`` is whether the making of a batch of these samples takes about as long as that of the one before.
    """
    group: list[Delivery] = []
    took_s: deque[float] = deque(maxlen=_COMPARED)  # a busy core may make any single one slow
    if slots is not None:
        slots.begin(worker)

    def message() -> Any:
        nonlocal group
        found: Message = worker, group
        group = []
        return found if slots is None else slots.put(found, len(found[1]))

    try:
        for planned, make in to_make:
            if group and not (
                slots is not None
                and min(took_s) < _SHORT_S
                and perf_counter() - group[0][2].ended < _SHORT_S
                and slots.takes_another(len(group))
                and is_quick(planned.sample_ids)
            ):
                yield message()
            group.append(make())
            took_s.append(group[-1][2].ended - group[-1][2].began)
    except Exception:
        if group:  # the trainer gets these before the error
            yield message()
        raise
    if group:
        yield message()


def in_order(messages: Iterator[Message], num_workers: int, slots: SharedSlots | None) -> Iterator[Delivery]:
    """The batches of all workers, of which each makes one in turn."""
    arrived: list[deque[Delivery]] = [deque() for _ in range(num_workers)]
    number = 0
    for worker, batches in messages:
        arrived[worker].extend(batches)
        del batches  # or the memory of a batch would stay in use while the next ones are made
        while waiting := arrived[number % num_workers]:
            if slots is not None:
                slots.note_delivered(number % num_workers)
            number += 1
            yield waiting.popleft()
