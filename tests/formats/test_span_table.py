"""A batch over mapped shards, found by their numbers, is the batch gathered from the shards themselves."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from lightning_stream.formats.index import Index
from lightning_stream.formats.mds.gather import SpanTable, gather_rows
from lightning_stream.formats.memory import AddressWindow, Int64s, MappedFile
from lightning_stream.formats.shard import Batch, Buffers, Shard, gather, open_shard
from lightning_stream.writer import JSONWriter, MDSWriter

NUM_SAMPLES = 40


def written(folder: Path, columns: dict[str, str]) -> list[Shard]:
    with MDSWriter(out=folder, columns=columns, size_limit=300) as writer:
        for number in range(NUM_SAMPLES):
            sample = {"n": number, "t": "x" * (number % 7)}
            writer.write({name: sample[name] for name in columns})
    index = Index.from_file(folder / "index.json")
    return [open_shard(index.entry(k), folder) for k in range(len(index))]


def gathered(table: SpanTable, numbers: Int64s, indices: Int64s, out: Buffers | None = None) -> Batch | None:
    rows = table.find(numbers, indices)
    return None if rows is None else gather_rows(rows, out)


def table_of(shards: list[Shard]) -> SpanTable:
    table = SpanTable(len(shards))
    for number, shard in enumerate(shards):
        table.add(number, shard.mapped)
    return table


@pytest.mark.parametrize("columns", [{"n": "int", "t": "str"}, {"n": "int32"}], ids=["varying", "fixed"])
def test_a_batch_by_numbers_is_the_batch_of_the_shards(tmp_path: Path, columns: dict[str, str]) -> None:
    shards = written(tmp_path, columns)
    starts = np.cumsum([0] + [shard.num_samples for shard in shards])
    table = table_of(shards)
    picks = np.array([39, 0, 17, 17, 4])
    which = np.searchsorted(starts, picks, side="right") - 1
    batch, wanted = gathered(table, which, picks - starts[which]), gather(shards, which, picks - starts[which])
    assert len(shards) > 2
    assert batch is not None
    assert list(batch["n"]) == list(wanted["n"]) == picks.tolist()
    assert batch.get("t") == wanted.get("t")
    target = np.empty(5, wanted["n"].dtype)  # type: ignore[union-attr]
    filled = gathered(table, which, picks - starts[which], {"n": target})
    assert filled is not None
    assert filled["n"] is target
    assert target.tolist() == picks.tolist()


def test_samples_that_are_not_there_are_never_read(tmp_path: Path) -> None:
    shards = written(tmp_path, {"n": "int", "t": "str"})
    table = table_of(shards)
    first, count = np.array([0, 0]), shards[0].num_samples
    for wrong in (-1, count, 2**40, -(2**63)):
        assert gathered(table, first, np.array([0, wrong])) is None
    assert gathered(table, first, np.array([0, count - 1])) is not None
    table.remove(0)
    table.remove(0)
    assert gathered(table, first, np.array([0, 0])) is None
    assert gathered(table, np.array([1, 1]), np.array([0, 1])) is not None


def test_shards_of_other_columns_or_formats_are_left_to_others(tmp_path: Path) -> None:
    (one, *_), (other, *_) = written(tmp_path / "a", {"n": "int", "t": "str"}), written(tmp_path / "b", {"n": "int32"})
    with JSONWriter(out=tmp_path / "rows", columns={"n": "int"}) as writer:
        writer.write({"n": 1})
    rows = open_shard(Index.from_file(tmp_path / "rows" / "index.json").entry(0), tmp_path / "rows")
    table = table_of([one, other, rows])
    assert gathered(table, np.array([0]), np.array([0])) is not None
    for number in (1, 2):
        assert gathered(table, np.array([0, number]), np.array([0, 0])) is None
    table.remove(0)  # now that none is here, any plan may come
    table.add(1, other.mapped)
    assert gathered(table, np.array([1]), np.array([0])) is not None


def test_batches_are_right_or_absent_while_shards_come_and_go(tmp_path: Path) -> None:
    shards = written(tmp_path, {"n": "int", "t": "str"})
    table, is_done = table_of(shards), threading.Event()

    def change() -> None:
        while not is_done.is_set():
            for number, shard in enumerate(shards):
                table.remove(number)
                table.add(number, shard.mapped)

    thread = threading.Thread(target=change)
    thread.start()
    which, results = np.arange(len(shards)), set()
    try:
        for _ in range(300):
            batch = gathered(table, which, np.zeros_like(which))
            results.add(None if batch is None else tuple(batch["n"]))
    finally:
        is_done.set()
        thread.join()
    assert results <= {None, tuple(gather(shards, which, np.zeros_like(which))["n"])}


def test_rows_that_were_found_stay_mapped_when_their_shard_is_removed(tmp_path: Path) -> None:
    shards = written(tmp_path, {"n": "int", "t": "str"})
    table = table_of(shards)
    found = table.find(np.array([0]), np.array([0]))
    wanted = shards[0].sample(0)["n"]
    table.remove(0)
    for shard in shards:
        shard.close()
    del shards
    gc.collect()
    assert found is not None
    assert gather_rows(found, None)["n"] == [wanted]


def test_no_two_readers_of_mapped_memory_slice_one_view(tmp_path: Path) -> None:
    """Without a GIL, CPython 3.14 counts the slices of one view wrongly where threads make them at the same time."""
    (tmp_path / "file").write_bytes(bytes(range(100)))
    file = MappedFile(tmp_path / "file", None)
    window = AddressWindow(file.address + 10, file.address + 90)
    for memory, expected in ((file, range(100)), (window, range(10, 90))):
        views = [memory.view, memory.view]
        (one,), (other,) = map(gc.get_referents, views)  # what counts them
        assert one is not other
        assert [view[: len(expected)].tolist() for view in views] == [list(expected)] * 2
