"""Short batches leave a worker together; the trainer gets each in its turn, and none is kept back."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.loading import groups  # noqa: E402
from lightning_stream.loading.groups import grouped, in_order  # noqa: E402
from lightning_stream.loading.meter import Made  # noqa: E402
from lightning_stream.loading.transport import _TOGETHER, _TOGETHER_BYTES, SharedSlots, shared_slots  # noqa: E402

needs_slots = pytest.mark.skipif(
    shared_slots(1, 1) is None, reason="the system has no memfd_create (Linux has): each batch is a message there"
)


def make(number: int, slots: SharedSlots | None = None, num_bytes: int = 0, seconds: float = 0.0) -> Any:
    """A batch that holds its number."""
    began = time.perf_counter()
    time.sleep(seconds)
    memory = slots.empty(num_bytes) if slots is not None and num_bytes else None
    array = np.zeros(num_bytes, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
    array[:] = number
    now = time.perf_counter()
    return {"number": number, "array": torch.from_numpy(array)}, None, Made(began, now, (0.0,) * 5, 0.0, 0.0)


def planned(numbers: list[int], to_make: Callable[[int], Any] = make) -> Iterator[Any]:
    for number in numbers:
        yield SimpleNamespace(sample_ids=number), lambda one=number: to_make(one)


def sent(message: Any) -> Any:
    return pickle.loads(ForkingPickler.dumps(message))


def numbers_of(messages: Iterator[Any]) -> list[list[int]]:
    return [[batch["number"] for batch, _, _ in sent(message)[1]] for message in messages]


def slots_of(num_workers: int = 1, prefetched: int = 2) -> SharedSlots:
    slots = shared_slots(num_workers, prefetched)
    assert slots is not None
    return slots


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes no batch for a slow one."""
    monkeypatch.setattr(groups, "_SHORT_S", 60.0)


@needs_slots
@pytest.mark.usefixtures("unhurried")
def test_short_batches_leave_together_and_the_first_one_alone() -> None:
    assert numbers_of(grouped(planned(list(range(12))), 0, slots_of(), lambda _: True)) == [
        [0],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [9, 10, 11],
    ]


@needs_slots
@pytest.mark.usefixtures("unhurried")
def test_a_batch_is_not_kept_back_while_the_next_one_waits_for_its_shard() -> None:
    found = numbers_of(grouped(planned(list(range(6))), 0, slots_of(), lambda number: number != 3))
    assert found == [[0], [1, 2], [3, 4, 5]]


@needs_slots
def test_batches_that_take_long_or_are_large_leave_one_by_one() -> None:
    slow = planned(list(range(5)), lambda number: make(number, seconds=0.003))
    assert numbers_of(grouped(slow, 0, slots_of(), lambda _: True)) == [[0], [1], [2], [3], [4]]
    slots = slots_of()
    large = planned(list(range(5)), lambda number: make(number, slots, _TOGETHER_BYTES))
    assert numbers_of(grouped(large, 0, slots, lambda _: True)) == [[0], [1], [2], [3], [4]]


@needs_slots
@pytest.mark.usefixtures("unhurried")
def test_a_worker_that_is_far_ahead_of_the_trainer_sends_single_batches_until_that_takes_them() -> None:
    slots = slots_of(prefetched=2)
    messages = grouped(planned(list(range(80))), 0, slots, lambda _: True)
    kept, sizes = [], []
    for _ in range(8):
        kept.append(sent(next(messages)))
        sizes.append(len(kept[-1][1]))
    assert sizes[0] == 1
    assert max(sizes) == _TOGETHER
    assert sizes[-3:] == [1, 1, 1]
    for _ in range(sum(sizes)):
        slots.note_delivered(0)
    assert len(sent(next(messages))[1]) == _TOGETHER


@needs_slots
@pytest.mark.usefixtures("unhurried")
def test_the_memory_of_a_message_is_free_once_its_last_batch_is_dropped() -> None:
    slots = slots_of()
    to_make = planned(list(range(9)), lambda number: make(number, slots, 1000))
    arrived = in_order((sent(one) for one in grouped(to_make, 0, slots, lambda _: True)), 1, slots)
    first, kept = next(arrived)[0], next(arrived)[0]
    for later in arrived:
        assert set(later[0]["array"].tolist()) == {later[0]["number"]}
    del later
    gc.collect()
    assert np.count_nonzero(slots._states) == 2  # those of the two batches that are kept
    assert set(first["array"].tolist()) == {0}
    assert set(kept["array"].tolist()) == {1}
    del first, kept
    gc.collect()
    assert not np.count_nonzero(slots._states)


@needs_slots
@pytest.mark.usefixtures("unhurried")
def test_what_was_made_before_an_error_arrives_before_it() -> None:
    def fail_at_4(number: int) -> Any:
        if number == 4:
            raise ValueError("no such sample")
        return make(number)

    messages, found = grouped(planned(list(range(9)), fail_at_4), 0, slots_of(), lambda _: True), []
    for _ in range(2):
        found += [batch["number"] for batch, _, _ in sent(next(messages))[1]]
    assert found == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no such sample"):
        next(messages)


@needs_slots
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_batch_that_is_done_arrives_while_the_transform_of_the_next_one_waits(
    tmp_path: Path, num_workers: int
) -> None:
    with MDSWriter(out=tmp_path / "data", columns={"x": "int"}) as writer:
        for number in range(64):
            writer.write({"x": number})

    def waits_for_the_trainer(sample: Any) -> Any:
        batch = sample["x"] // 4
        last_of_worker = tmp_path / f"{batch - num_workers}"
        for _ in range(6000 if batch % 3 == 2 else 0):  # the others are fast
            if batch < num_workers or last_of_worker.exists():
                return sample
            time.sleep(0.01)
        if batch % 3 == 2:
            raise TimeoutError(f"the trainer has not got batch {batch - num_workers}")
        return sample

    dataset = StreamingDataset(tmp_path / "data", transform=waits_for_the_trainer)
    for number, batch in enumerate(StreamingDataLoader(dataset, 4, num_workers=num_workers)):
        assert batch["x"].tolist() == list(range(4 * number, 4 * number + 4))
        (tmp_path / f"{number}").touch()


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("num_batches", [0, 1, 2, 5, 24, 40])
def test_messages_of_any_sizes_are_put_in_order(num_workers: int, num_batches: int) -> None:
    for seed in range(20):
        draw, queues = np.random.default_rng(seed), []
        for worker in range(num_workers):
            own, messages = list(range(worker, num_batches, num_workers)), []
            while own:
                size = int(draw.integers(1, 6))
                messages.append((worker, [make(number) for number in own[:size]]))
                own = own[size:]
            queues.append(messages)

        def in_turn(queues: list[list[Any]]) -> Iterator[Any]:
            while any(queues):
                for queue in queues:
                    if queue:
                        yield queue.pop(0)

        arrived = in_order(in_turn(queues), num_workers, None)
        assert [batch["number"] for batch, _, _ in arrived] == list(range(num_batches))


@needs_slots
@pytest.mark.parametrize("num_workers", [1, 3])
def test_epochs_of_persistent_workers_are_those_of_one_process_also_after_one_that_was_left(
    tmp_path: Path, num_workers: int
) -> None:
    with MDSWriter(out=tmp_path, columns={"x": "int32"}, size_limit=2000) as writer:
        writer.write_batch({"x": np.arange(3000, dtype=np.int32)})

    def loader(workers: int) -> StreamingDataLoader:
        dataset = StreamingDataset(local=str(tmp_path), shuffle=True)
        return StreamingDataLoader(dataset, 8, num_workers=workers, persistent_workers=workers > 0)

    one, many = loader(0), loader(num_workers)
    for limit in (None, 50, None, None):
        for number, (here, there) in enumerate(zip(one, many, strict=True), 1):
            assert torch.equal(here["x"], there["x"])
            if number == limit:
                break
        assert one.state_dict() == many.state_dict()
    many.close()
