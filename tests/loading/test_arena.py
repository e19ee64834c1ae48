"""A batch that leaves a worker arrives as it was, and never changes while anything refers to it."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.formats.shard import Ragged  # noqa: E402
from lightning_stream.loading import arena as arenas  # noqa: E402
from lightning_stream.loading.arena import Arena  # noqa: E402


def is_in_slot(message: bytes) -> bool:
    return message[:1] == arenas._IN_SLOT


def sent(arena: Arena, batch: Any) -> Any:
    return arena.open(arena.seal(batch))


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
        "many_by_columns": np.asfortranarray(np.arange(40_000).reshape(2, 20_000)),
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
    arena = Arena(1)
    for _ in range(3):
        batch = a_batch()
        message = arena.seal(batch)
        assert is_in_slot(message)
        arrived = arena.open(message)
        assert_same(batch, arrived)
        assert arrived["again"] is arrived["tokens"]
        arrived["tokens"][0, 5] = -1  # what shared memory before, does so now
        assert arrived["shifted"][0, 4] == -1
        assert not arrived["tokens"].is_shared()


def full(value: int, size: int = 5000) -> dict[str, Any]:
    return {"x": torch.full((size,), value), "y": np.full(size, value), "z": [str(value) * size]}


def assert_full(batch: dict[str, Any], value: int) -> None:
    assert set(batch["x"].tolist()) == set(batch["y"].tolist()) == {value}
    assert batch["z"] == [str(value) * len(batch["x"])]


def test_batches_that_are_kept_never_change_and_never_fill_the_slots() -> None:
    arena = Arena(2)
    kept = [sent(arena, full(number, 5000 + number * 100_000 % 300_000)) for number in range(40)]
    for number, batch in enumerate(kept):
        assert_full(batch, number)


def test_a_view_of_a_part_of_a_batch_keeps_its_slot() -> None:
    arena = Arena(1)
    views = [
        sent(arena, full(0))["x"][7:9].view(2, 1),
        torch.from_numpy(sent(arena, full(1))["x"].numpy()[::2]),
        torch.from_dlpack(sent(arena, full(2))["x"]),
        sent(arena, full(3))["y"][None, ::-1],
        sent(arena, full(4))["x"].share_memory_(),
    ]
    for number in range(5, 15):
        assert_full(sent(arena, full(number)), number)
    assert [set(view.ravel().tolist()) for view in views] == [{number} for number in range(5)]


def test_a_slot_is_used_again_when_its_batch_is_gone() -> None:
    arena = Arena(1)
    places = {sent(arena, full(number))["x"].data_ptr() for number in range(10)}
    assert len(places) == 1
    held = [sent(arena, full(number)) for number in range(6)]
    copies = [batch["x"].data_ptr() for batch in held]
    del held
    assert sent(arena, full(7))["x"].data_ptr() in places
    assert len(set(copies)) == 6


def test_without_a_free_slot_all_of_a_batch_is_in_its_message() -> None:
    arena = Arena(2)
    arena._states[2:] = arenas._SENT
    batches = [full(number) for number in range(3)]
    messages = [arena.seal(batch) for batch in batches]
    assert [is_in_slot(message) for message in messages] == [True, True, False]
    for number in (1, 2, 0):
        assert_full(arena.open(messages[number]), number)
    assert_same(a_batch(), sent(arena, a_batch()))
    assert is_in_slot(arena.seal(batches[0]))


def test_without_a_free_slot_whatever_is_in_a_batch_arrives_too() -> None:
    arena = Arena(1)
    arena._states[:] = arenas._SENT
    assert arena.empty(8) is None
    batch, arrived = a_batch(), sent(arena, a_batch())
    assert_same(batch, arrived)
    arrived["tokens"][0, 5] = -1
    assert arrived["shifted"][0, 4] == -1


def test_a_batch_that_is_not_opened_frees_its_slot() -> None:
    arena = Arena(1)
    for number in range(30):
        message = arena.seal(full(number))
        assert is_in_slot(message)
        arena.discard(message)
    arena.discard(arena.seal({"x": 1}))


def test_arrays_that_are_made_in_a_slot_are_not_copied() -> None:
    arena = Arena(1)
    for _ in range(2):
        made = [np.frombuffer(arena.empty(size) or bytearray(size), np.int64) for size in (1 << 17, 8 << 20, 1 << 15)]
        for number, array in enumerate(made):
            array[:] = number
        batch = {"made": [torch.from_numpy(array) for array in made], "other": torch.full((3,), 3)}
        places = [array.__array_interface__["data"][0] for array in made]
        arrived = sent(arena, batch)
        assert [set(one.tolist()) for one in arrived["made"]] == [{0}, {1}, {2}]
        assert arrived["other"].tolist() == [3] * 3
        assert [one.data_ptr() for one in arrived["made"]] == places  # both sides are this process
        del batch, made


def test_where_few_addresses_may_be_mapped_slots_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = arenas.mmap.mmap

    def refuse_many(fd: int, num_bytes: int, **options: Any) -> Any:
        if num_bytes > 1 << 32:
            raise OSError(12, "Cannot allocate memory")
        return mapped(fd, num_bytes, **options)

    monkeypatch.setattr(arenas.mmap, "mmap", refuse_many)
    arena = Arena(1)
    assert arena._slot_bytes == 128 << 20
    large = {"x": torch.ones(40 << 20)}  # 160 MB
    assert torch.equal(sent(arena, large)["x"], large["x"])
    assert arena.empty(160 << 20) is None
    assert_full(sent(arena, full(1)), 1)


def test_where_hardly_any_addresses_are_left_batches_come_over_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = arenas.mmap.mmap
    most = 1 << 30

    def refuse(fd: int, num_bytes: int, *flags: Any, **options: Any) -> Any:
        if num_bytes > most:
            raise OSError(12, "Cannot allocate memory")
        return mapped(fd, num_bytes, *flags, **options)

    monkeypatch.setattr(arenas.mmap, "mmap", refuse)
    arena = Arena(1)  # the least slots would leave none to all else
    assert arena.empty(1) is None
    for number in range(40):
        assert_full(sent(arena, full(number)), number)
    most = 1 << 62
    arena = Arena(1)
    most = 1 << 30
    make, arguments = arena.__reduce__()
    worker = make(*arguments)  # which has fewer addresses than its trainer
    assert worker.empty(1) is None
    for number in range(40):
        assert_full(arena.open(worker.seal(full(number))), number)
    assert os.fstat(arena._file.fd).st_size > 1 << 30


def test_a_forked_process_reads_what_its_parent_had_at_the_fork() -> None:
    arena = Arena(1)
    held = [sent(arena, full(1))]
    go, done = multiprocessing.Pipe(), multiprocessing.Pipe()

    def read() -> None:
        go[1].recv()
        done[0].send((set(held[0]["x"].tolist()), set(held[0]["y"].tolist())))

    child = multiprocessing.get_context("fork").Process(target=read)
    child.start()
    held.clear()
    for number in range(2, 9):
        assert_full(sent(arena, full(number)), number)
    kept = sent(arena, full(9))
    go[0].send(None)
    assert done[1].recv() == ({1}, {1})
    child.join(60)
    assert child.exitcode == 0
    for number in range(10, 15):
        assert_full(sent(arena, full(number)), number)
    assert_full(kept, 9)


def test_so_does_one_that_was_forked_without_a_free_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1)
    held = [sent(arena, full(1))]
    reading, writing = os.pipe()

    def refused() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", refused)
        pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        os._exit(set(held[0]["x"].tolist()) != {1})
    held.clear()
    for number in range(2, 25):
        assert_full(sent(arena, full(number)), number)
    os.write(writing, b"!")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(reading)
    os.close(writing)


def test_threads_with_workers_of_their_own_ask_for_the_end_of_a_forked_process_at_once() -> None:
    loaders = [Arena(1) for _ in range(4)]
    held = [sent(arena, full(1)) for arena in loaders]
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        os._exit(0)

    def read(arena: Arena) -> None:
        for _ in range(5000):
            arena._living_readers(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(loaders)) as threads:
            list(threads.map(read, loaders))
    finally:
        sys.setswitchinterval(interval)
        os.write(writing, b"!")
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
    assert [set(batch["x"].tolist()) for batch in held] == [{1}] * 4


def test_a_forked_process_that_drops_a_batch_does_not_free_its_slot() -> None:
    arena = Arena(1)
    held = [sent(arena, full(1))]
    child = multiprocessing.get_context("fork").Process(target=held.clear)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    for number in range(2, 9):
        assert_full(sent(arena, full(number)), number)
    assert_full(held[0], 1)


def test_a_batch_that_is_kept_holds_no_descriptor_of_forked_processes_that_have_ended() -> None:
    arena = Arena(1)
    kept = sent(arena, full(1))
    counts = []
    gc.collect()  # what other tests have left closes now
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts == counts[:1] * 3
    assert_full(kept, 1)


def test_a_batch_that_cannot_be_sent_raises_and_leaves_the_slot_free() -> None:
    arena = Arena(1)
    for _ in range(2):
        with pytest.raises((pickle.PicklingError, AttributeError)):
            arena.seal({"x": lambda: 1, "y": np.zeros(1 << 20)})
    assert is_in_slot(arena.seal(full(1)))


class TakesAnother:
    """A value that opens a batch of another worker when it arrives."""

    arena: Arena

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _take_another, ()


def _take_another() -> int:
    return int(sent(TakesAnother.arena, {"x": made_in(TakesAnother.arena, 7)})["x"][0])


def made_in(arena: Arena, value: int) -> Any:
    memory = arena.empty(80_000)
    assert memory is not None
    return torch.frombuffer(memory, dtype=torch.int64).fill_(value)


def test_a_batch_may_open_another_one_where_it_arrives() -> None:
    arena = Arena(1)
    TakesAnother.arena = Arena(1)
    first = made_in(arena, 3)
    arrived = sent(arena, [first, TakesAnother(), first[:4], made_in(arena, 5)])
    assert [int(arrived[0][0]), arrived[1], int(arrived[2][0]), int(arrived[3][0])] == [3, 7, 3, 5]


def test_memory_that_was_shared_before_stays_shared() -> None:
    arena = Arena(1)
    shared = torch.zeros(2000).share_memory_()
    arrived = sent(arena, {"x": shared})["x"]
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
        {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "forkserver"},
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
    kept = [list(many), list(many)]
    for batches in kept:
        for one, other in zip(alone, batches, strict=True):
            assert_same(one, other)


def test_an_iteration_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    dataset = StreamingDataset(local=write(tmp_path / "set"), shuffle=True)

    def after_one(stop: int) -> int:
        for number, _batch in enumerate(StreamingDataLoader(dataset, 16, num_workers=2)):
            if number == stop:
                break
        del _batch  # its memory has one
        gc.collect()
        assert not multiprocessing.active_children()
        return len(list(Path("/proc/self/fd").iterdir()))

    dataset[0]
    after_one(3)  # meanwhile, what tests before this one have left is closed
    before = after_one(3)
    assert [after_one(stop) for stop in (100, 0, 3)] == [before] * 3


LONG = """
import sys
from lightning_stream import StreamingDataLoader, StreamingDataset

if __name__ == "__main__":
    batches = list(StreamingDataLoader(StreamingDataset(local=sys.argv[1]), 16, num_workers=2))
    print(sum(len(batch["id"]) for batch in batches), int(sum(batch["x"].sum() for batch in batches)))
"""


def test_the_folder_for_temporary_files_may_have_a_long_name(tmp_path: Path) -> None:
    data, folder = write(tmp_path / "set"), tmp_path / ("long" * 30)
    folder.mkdir()
    script = tmp_path / "script.py"
    script.write_text(LONG)
    command, env = [sys.executable, script, data], {**os.environ, "TMPDIR": str(folder), "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert (ended.returncode, ended.stdout) == (0, f"150 {600 * sum(range(150))}\n"), ended.stderr
