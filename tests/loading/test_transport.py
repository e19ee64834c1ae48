"""A batch that leaves a worker arrives as it was, in memory of its own."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import threading
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.formats.shard import Ragged  # noqa: E402
from lightning_stream.loading import transport  # noqa: E402
from lightning_stream.loading.transport import SharedSlots, shared_slots  # noqa: E402

pytestmark = pytest.mark.skipif(
    shared_slots(1, 1) is None, reason="the system has no memfd_create (Linux has): batches go torch's own way there"
)


def slots_of(num_workers: int, num_slots: int) -> SharedSlots:
    slots = shared_slots(num_workers, num_slots)
    assert slots is not None
    return slots


def sent(handle: Any) -> Any:
    """As torch's queues send what a worker gives them."""
    return pickle.loads(ForkingPickler.dumps(handle))


def is_handle(value: Any) -> bool:
    return type(value).__module__ == transport.__name__


def a_batch() -> dict[str, Any]:
    tokens = torch.arange(3000, dtype=torch.int32).reshape(3, 1000)
    return {
        "tokens": tokens,
        "again": tokens,
        "shifted": tokens[:, 1:],
        "half": torch.ones(7, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 5),
        "number": torch.tensor(3.5),
        "learned": torch.ones(2, requires_grad=True),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "sparse": torch.eye(3).to_sparse(),
        "array": np.arange(4000.0).reshape(2, 2000),
        "small": np.arange(3, dtype=np.uint8),
        "by_columns": np.asfortranarray(np.arange(4000).reshape(2, 2000)),
        "times": np.arange(3).astype("datetime64[s]"),
        "read_only": np.broadcast_to(np.arange(3.0), (400, 3)),
        "fields": np.zeros(300, [("a", "i4"), ("b", "f8")]),
        "words": np.array(["a", "bc"] * 900),
        "objects": np.array([{}, None] * 900, dtype=object),
        "ragged": Ragged([np.arange(2000), np.arange(3)]),
        "text": ["some", "text" * 1000],
        "raw": [b"bytes", b"\x00" * 5000],
        "nested": {"pair": (torch.ones(2), 5)},
    }


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        assert torch.equal(one.to_dense(), other.to_dense())
        assert one.layout is not torch.strided or one.stride() == other.stride()
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.flags.f_contiguous) == (other.dtype, other.shape, other.flags.f_contiguous)
        assert np.array_equal(one, other)
        assert other.flags.writeable
    elif isinstance(one, (dict, list, tuple)):
        assert len(one) == len(other)
        keys = one if isinstance(one, dict) else range(len(one))
        for key in keys:
            assert_same(one[key], other[key])
    else:
        assert one == other


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own
def test_whatever_is_in_a_batch_arrives_as_it_was() -> None:
    slots = slots_of(2, 1)
    for worker in (0, 1, 1, 0):
        batch = a_batch()
        handle = slots.put(worker, batch)
        assert is_handle(handle)
        assert len(ForkingPickler.dumps(handle)) < 600
        arrived = sent(handle)
        assert_same(batch, arrived)
        assert arrived["again"] is arrived["tokens"]
        arrived["tokens"][0, 5] = -1  # what shared memory before, does so now
        assert arrived["shifted"][0, 4] == -1
        assert not arrived["tokens"].is_shared()


def test_what_arrived_is_untouched_by_what_comes_after_it() -> None:
    slots = slots_of(1, 1)
    first = sent(slots.put(0, {"x": torch.full((5000,), 1), "y": np.full(5000, 1), "z": ["1" * 5000]}))
    second = sent(slots.put(0, {"x": torch.full((5000,), 2), "y": np.full(5000, 2), "z": ["2" * 5000]}))
    for number, batch in ((1, first), (2, second)):
        assert set(batch["x"].tolist()) == set(batch["y"].tolist()) == {number}
        assert batch["z"] == [str(number) * 5000]


def test_without_a_free_slot_or_with_too_much_for_one_a_batch_goes_as_it_is() -> None:
    slots = slots_of(2, 2)
    batches = [{"x": torch.full((100,), number)} for number in range(3)]
    put = [slots.put(0, batch) for batch in batches]
    assert [is_handle(one) for one in put] == [True, True, False]
    assert put[2] is batches[2]
    assert is_handle(slots.put(1, batches[0]))  # another worker has slots of its own
    assert sent(put[1])["x"].tolist() == [1] * 100
    assert is_handle(slots.put(0, batches[2]))
    assert sent(put[0])["x"].tolist() == [0] * 100
    for large in ({"x": torch.ones(1 << 20)}, {"x": [bytes(1 << 22)]}, {"x": list(np.ones((5, 1 << 17)))}):
        assert slots.put(0, large) is large
    assert is_handle(slots.put(0, batches[0]))  # a large batch takes no slot


def test_a_batch_that_cannot_be_sent_raises_and_leaves_the_slot_free() -> None:
    slots = slots_of(1, 1)
    for _ in range(2):
        with pytest.raises((pickle.PicklingError, AttributeError)):
            slots.put(0, {"x": lambda: 1})
    assert is_handle(slots.put(0, {"x": 1}))


def test_memory_that_was_shared_before_stays_shared() -> None:
    slots = slots_of(1, 1)
    shared = torch.zeros(2000).share_memory_()
    arrived = sent(slots.put(0, {"x": shared}))["x"]
    shared[7] = 1
    assert arrived[7] == 1


def write(folder: Path) -> Path:
    columns = {"id": "int", "x": "ndarray:float32:600", "any": "ndarray", "text": "str", "raw": "bytes"}
    with MDSWriter(out=folder, columns=columns, size_limit=1 << 16) as writer:
        for number in range(150):
            wide = np.full((2, 300 + number % 3), number)
            sample = {"id": number, "x": np.full(600, number, np.float32), "any": wide, "text": str(number) * 99}
            writer.write({**sample, "raw": bytes([number]) * 999})
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"},
    ],
    ids=str,
)
def test_workers_deliver_what_this_process_would(tmp_path: Path, options: dict[str, Any]) -> None:
    dataset = StreamingDataset(local=write(tmp_path / "set"), shuffle=True)
    alone, many = StreamingDataLoader(dataset, 16), StreamingDataLoader(dataset, 16, **options)
    for _ in range(2):
        for one, other in zip(alone, many, strict=True):
            assert_same(one, other)
            assert not other["x"].is_shared()  # else it came torch's way


def test_an_iteration_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    dataset = StreamingDataset(local=write(tmp_path / "set"), shuffle=True)

    def after_one(stop: int) -> int:
        for number, _ in enumerate(StreamingDataLoader(dataset, 16, num_workers=2)):
            if number == stop:
                break
        gc.collect()
        # Under load, torch's workers and the threads of its queues may end later than the iteration.
        for process in multiprocessing.active_children():
            process.join(60)
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":
                thread.join(60)
        return len(list(Path("/proc/self/fd").iterdir()))

    dataset[0]
    before = after_one(3)
    assert [after_one(stop) for stop in (100, 0, 3)] == [before] * 3
