"""Open shards: any schema comes back, batches equal samples, and damaged files are errors, never crashes."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lightning_stream.errors import FormatError
from lightning_stream.formats.index import Index
from lightning_stream.formats.model import FileEntry, Schema, ShardEntry
from lightning_stream.formats.shard import Shard, gather, open_shard
from lightning_stream.writer import JSONWriter, MDSWriter

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "uint8": st.integers(0, 255),
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "str": st.text(max_size=20),
    "bytes": st.binary(max_size=20),
    "str_int": st.integers(),
    "json": st.lists(st.integers(), max_size=3),
    "ndarray": hnp.arrays(np.int16, hnp.array_shapes(max_dims=3, max_side=4)),
    "ndarray:float32": hnp.arrays(np.float32, (3,), elements=st.floats(width=32, allow_nan=False)),
    "ndarray:uint8:2,2": hnp.arrays(np.uint8, (2, 2)),
    "ndarray:int64:5": hnp.arrays(np.int64, (5,)),
}


def write(
    out: Path, columns: dict[str, str], samples: list[dict[str, Any]], size_limit: int | None = 1 << 20
) -> list[Shard]:
    with MDSWriter(out=out, columns=columns, size_limit=size_limit, max_workers=0) as writer:
        for sample in samples:
            writer.write(sample)
    return open_all(out)


def open_all(out: Path, **options: Any) -> list[Shard]:
    index = Index.from_file(out / "index.json")
    return [open_shard(index.entry(k), out, **options) for k in range(len(index))]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


@settings(max_examples=60)
@given(st.data())
def test_any_samples_come_back_as_samples_and_as_batches(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=6))
    columns = {f"c{k}": kind for k, kind in enumerate(kinds)}
    rows = st.fixed_dictionaries({name: VALUES[kind] for name, kind in columns.items()})
    samples = data.draw(st.lists(rows, min_size=1, max_size=12))
    shards = write(tmp_path_factory.mktemp("any"), columns, samples, data.draw(st.sampled_from([300, 1000, None])))
    where = [(s, i) for s, shard in enumerate(shards) for i in range(shard.num_samples)]
    assert len(where) == len(samples)
    for (s, i), sample in zip(where, samples, strict=True):
        assert all(
            same(shards[s].sample(i)[name], np.asarray(v) if isinstance(v, np.ndarray) else v)
            for name, v in sample.items()
        )
    picks = data.draw(st.lists(st.integers(0, len(where) - 1), max_size=20))
    which, indices = np.array([where[p][0] for p in picks], int), np.array([where[p][1] for p in picks], int)
    batch = gather(shards, which, indices)
    assert list(batch) == sorted(columns)
    for name, column in batch.items():
        assert len(column) == len(picks)
        assert all(same(column[k], samples[pick][name]) for k, pick in enumerate(picks))
        assert not isinstance(column, np.ndarray) or column.flags.writeable


def tokens(out: Path, num_samples: int = 100, extra: bool = False) -> tuple[list[Shard], np.ndarray[Any, Any]]:
    values = np.arange(num_samples * 16, dtype=np.int32).reshape(num_samples, 16)
    columns = {"t": "ndarray:int32:16", **({"id": "int"} if extra else {})}
    with MDSWriter(out=out, columns=columns, size_limit=1000) as writer:
        writer.write_batch({"t": values, **({"id": np.arange(num_samples)} if extra else {})})
    return open_all(out), values


@pytest.mark.parametrize("extra", [False, True])
def test_fixed_columns_go_straight_to_the_callers_memory(tmp_path: Path, extra: bool) -> None:
    shards, values = tokens(tmp_path / "out", extra=extra)
    picks = np.random.default_rng(0).permutation(100)
    starts = np.cumsum([0] + [shard.num_samples for shard in shards])
    which = np.searchsorted(starts, picks, side="right") - 1
    for memory in (np.empty((100, 16), np.int32), bytearray(100 * 64), memoryview(bytearray(9999))):
        batch = gather(shards, which, picks - starts[which], {"t": memory})
        assert np.array_equal(batch["t"], values[picks])
        assert np.shares_memory(np.frombuffer(memory, np.uint8), batch["t"])
        if extra:
            assert np.array_equal(batch["id"], picks)


def test_memory_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    shards, _ = tokens(tmp_path / "out")
    one, two = np.zeros(1, int), np.array([0, 1])
    read_only = np.empty((2, 16), np.int32)
    read_only.flags.writeable = False
    for wrong in (
        np.empty((2, 16), np.int64), np.empty((3, 16), np.int32), np.empty((2, 17), np.int32), bytearray(10), read_only,
        np.empty((2, 32), np.int32)[:, ::2], bytes(2 * 64),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="out: column 't' takes writable"):
            gather(shards[:1], np.zeros(2, int), two, {"t": wrong})
    with pytest.raises(ValueError, match="out: no column 'x'"):
        gather(shards[:1], one, one, {"x": bytearray(64)})
    varied = write(tmp_path / "varied", {"s": "str"}, [{"s": "a"}])
    with pytest.raises(ValueError, match="column 's' has no fixed size"):
        gather(varied[:1], one, one, {"s": bytearray(8)})


def test_wide_columns_and_empty_batches(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, (6, 40_000), np.uint8)
    with MDSWriter(out=tmp_path / "out", size_limit=100_000) as writer:
        writer.write_batch({"v": values, "k": np.arange(6)})
    shards = open_all(tmp_path / "out")
    which, indices = np.array([2, 0, 1]), np.array([1, 0, 1])
    assert np.array_equal(gather(shards, which, indices)["v"], values[[5, 0, 3]])
    target = np.empty((3, 40_000), np.uint8)
    gather(shards, which, indices, {"v": target})
    assert np.array_equal(target, values[[5, 0, 3]])
    empty = gather(shards, np.array([], int), np.array([], int))
    assert (empty["v"].shape, empty["k"].shape) == ((0, 40_000), (0,))  # type: ignore[union-attr]


def test_indices_out_of_range_are_index_errors(tmp_path: Path) -> None:
    shards, _ = tokens(tmp_path / "out")
    count = shards[0].num_samples
    for wrong in (-1, count, 2**40):
        with pytest.raises(IndexError, match="out of range"):
            shards[0].sample(wrong)
        with pytest.raises(IndexError, match=f"sample {wrong} is out of range"):
            shards[0].columns(np.array([0, wrong]))
    with pytest.raises(IndexError, match="shard 99 is out of range"):
        gather(shards, np.array([99]), np.array([0]))
    with pytest.raises(ValueError, match="of one length"):
        gather(shards, np.array([0]), np.array([0, 1]))
    with pytest.raises(ValueError, match="at least one shard"):
        gather([], np.array([]), np.array([]))


def test_what_was_read_outlives_the_shard(tmp_path: Path) -> None:
    columns = {"a": "ndarray:int32:4", "b": "ndarray", "s": "str", "r": "bytes"}
    sample = {"a": np.arange(4, dtype=np.int32), "b": np.ones(3), "s": "text", "r": b"raw"}
    (shard,) = write(tmp_path / "out", columns, [sample, sample])
    one, batch = shard.sample(0), shard.columns(np.array([1, 0]))
    shard.close()
    shard.close()
    del shard
    gc.collect()
    assert all(same(one[name], value) and same(batch[name][0], value) for name, value in sample.items())


def test_a_closed_shard_says_so(tmp_path: Path) -> None:
    shards, _ = tokens(tmp_path / "out")
    with JSONWriter(out=tmp_path / "rows", columns={"x": "int"}) as writer:
        writer.write({"x": 1})
    for shard in (shards[0], *open_all(tmp_path / "rows")):
        shard.close()
        for action in (lambda s=shard: s.sample(0), lambda s=shard: s.columns(np.array([0]))):
            with pytest.raises(ValueError, match="the shard is closed"):
                action()


def test_closing_gives_memory_and_descriptors_back(tmp_path: Path) -> None:
    _, _ = tokens(tmp_path / "out")
    index = Index.from_file(tmp_path / "out" / "index.json")

    def held() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())) + Path("/proc/self/maps").read_text().count(str(tmp_path))

    before = held()
    for _ in range(50):
        shard = open_shard(index.entry(0), tmp_path / "out")
        shard.sample(0)
        shard.columns(np.array([0]))
        shard.close()
    assert held() == before


def test_row_formats_are_gathered_too(tmp_path: Path) -> None:
    with JSONWriter(out=tmp_path / "out", size_limit=120) as writer:
        for k in range(20):
            writer.write({"x": k, "f": k / 2, "s": str(k)})
    shards = open_all(tmp_path / "out")
    starts = np.cumsum([0] + [shard.num_samples for shard in shards])
    picks = np.array([3, 19, 0, 3, 11])
    which = np.searchsorted(starts, picks, side="right") - 1
    memory = np.empty(5, np.int64)
    batch = gather(shards, which, picks - starts[which], {"x": memory})
    assert batch["x"] is memory
    assert memory.tolist() == picks.tolist()
    assert batch["s"] == [str(k) for k in picks]
    assert batch["f"].tolist() == (picks / 2).tolist()  # type: ignore[union-attr]


def test_shards_of_other_columns_are_not_gathered_together(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"x": "int"}, [{"x": 1}])
    two = write(tmp_path / "two", {"y": "int"}, [{"y": 1}])
    with pytest.raises(ValueError, match="shards of the same columns"):
        gather([*one, *two], np.array([0, 1]), np.array([0, 0]))


def test_pickle_is_refused_unless_allowed(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "out", columns={"p": "pkl"}) as writer:
        writer.write({"p": {1, 2}})
    with pytest.raises(ValueError, match=r"column 'p' is stored as 'pkl'.*allow_unsafe_types=True"):
        open_all(tmp_path / "out")
    assert open_all(tmp_path / "out", allow_unsafe_types=True)[0].sample(0) == {"p": {1, 2}}
    assert isinstance(open_all(tmp_path / "out", decoders={"p": bytes})[0].sample(0)["p"], bytes)


def test_decoders_replace_a_columns_own(tmp_path: Path) -> None:
    write(tmp_path / "out", {"j": "json", "n": "int"}, [{"j": [1], "n": 5}] * 2)
    (shard,) = open_all(tmp_path / "out", decoders={"j": len, "n": bytes})
    assert shard.sample(0) == {"j": 3, "n": (5).to_bytes(8, "little")}
    assert shard.columns(np.array([0, 1])) == {"j": [3, 3], "n": [(5).to_bytes(8, "little")] * 2}
    with pytest.raises(ValueError, match="decoders: no column 'x'"):
        open_all(tmp_path / "out", decoders={"x": len})


def mds_entry(data: bytes, num_samples: int, encodings: dict[str, int | None]) -> ShardEntry:
    schema = Schema("mds", tuple(encodings), tuple(encodings), tuple(encodings.values()))
    return schema.shard(num_samples, FileEntry("s.mds", len(data), {}))


def test_shards_of_no_samples_are_read(tmp_path: Path) -> None:
    data = bytes(4) + (10).to_bytes(4, "little") + b"{}"
    (tmp_path / "s.mds").write_bytes(data)
    for encodings in ({"int": 8}, {"str": None}):
        shard = open_shard(mds_entry(data, 0, encodings), tmp_path)
        with pytest.raises(IndexError):
            shard.sample(0)
        assert [len(column) for column in shard.columns(np.array([], int)).values()] == [0]


def test_a_damaged_value_says_which(tmp_path: Path) -> None:
    columns = {"j": "json", "n": "int"}
    write(tmp_path / "out", columns, [{"j": [k], "n": k} for k in range(4)])
    path = tmp_path / "out" / "shard.00000.mds"
    path.write_bytes(path.read_bytes().replace(b"[2]", b"[2["))
    (shard,) = open_all(tmp_path / "out")
    for action in (lambda: shard.sample(2), lambda: shard.columns(np.array([0, 2, 1]))):
        with pytest.raises(FormatError, match=r"shard\.00000\.mds, sample 2, column 'j': cannot be decoded"):
            action()
    assert shard.sample(1) == {"j": [1], "n": 1}


@pytest.mark.parametrize(
    ("index", "value"),
    [(0, 0), (0, 2**32 - 1), (0, 5), (4, 0), (4, 2**32 - 1), (8, 3), (8, 2**31), (20, 0), (20, 2**32 - 1)],
)
@pytest.mark.parametrize("columns", [{"n": "int"}, {"n": "int", "s": "str"}], ids=["fixed", "varied"])
def test_hostile_headers_are_refused_on_opening(
    tmp_path: Path, columns: dict[str, str], index: int, value: int
) -> None:
    write(tmp_path / "out", columns, [{name: {"n": k, "s": "abc"}[name] for name in columns} for k in range(4)])
    path = tmp_path / "out" / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    data[index : index + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"shard\.00000\.mds"):
        open_all(tmp_path / "out")


@pytest.mark.parametrize("value", [0, 3, 2**31, 2**32 - 1])
def test_a_file_changed_after_opening_leads_nowhere(tmp_path: Path, value: int) -> None:
    (shard,) = write(tmp_path / "out", {"s": "str"}, [{"s": "abc"}] * 4)
    with (tmp_path / "out" / "shard.00000.mds").open("r+b") as file:
        file.seek(8)
        file.write(value.to_bytes(4, "little"))
    for action in (lambda: shard.sample(0), lambda: shard.columns(np.array([0, 3]))):
        with pytest.raises(FormatError, match="sample 0"):
            action()


@pytest.mark.parametrize("columns", [{"n": "int"}, {"n": "int", "s": "str"}], ids=["fixed", "varied"])
def test_a_file_that_was_emptied_after_opening_is_a_format_error(tmp_path: Path, columns: dict[str, str]) -> None:
    (shard,) = write(
        tmp_path / "out", columns, [{name: {"n": 1, "s": "abc"}[name] for name in columns} for _ in range(4)]
    )
    path = tmp_path / "out" / "shard.00000.mds"
    for filling in (b"\0", b"\xff"):
        with path.open("r+b") as file:
            file.write(filling * path.stat().st_size)
        with pytest.raises(FormatError, match="sample 2"):
            shard.sample(2)
    if "s" in columns:
        with pytest.raises(FormatError, match="sample 2"):
            shard.columns(np.array([2]))


def test_the_offsets_of_rows_take_no_memory_of_their_own(tmp_path: Path) -> None:
    with JSONWriter(out=tmp_path, columns={"n": "int"}) as writer:
        writer.write_batch({"n": np.arange(50_000)})
    entry = Index.from_file(tmp_path / "index.json").entry(0)
    open_shard(entry, tmp_path).close()
    tracemalloc.start()
    shard = open_shard(entry, tmp_path)
    assert tracemalloc.get_traced_memory()[0] < 50_000
    tracemalloc.stop()
    assert shard.columns(np.array([49_999, 0]))["n"].tolist() == [49_999, 0]  # type: ignore[union-attr]


def test_files_of_another_size_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "out", {"n": "int"}, [{"n": 1}])
    path = tmp_path / "out" / "shard.00000.mds"
    good = path.read_bytes()
    for data in (b"", good[:-1], good + b"x"):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=r"its index says .* bytes; it has"):
            open_all(tmp_path / "out")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        open_all(tmp_path / "out")


def test_fixed_sizes_must_be_those_of_the_encoding(tmp_path: Path) -> None:
    (tmp_path / "s.mds").write_bytes(bytes(8))
    for wrong in ({"int": 4}, {"int": None}, {"str": 4}):
        with pytest.raises(FormatError, match=r"the index says .* bytes, but"):
            open_shard(mds_entry(bytes(8), 0, wrong), tmp_path)


@settings(max_examples=150)
@given(st.data())
def test_altered_shards_give_samples_or_format_errors_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    columns = {
        "a": "ndarray",
        "i": "int",
        "j": "json",
        "p": "pil",
        "s": "str",
        "v": "ndarray:int16",
        "f": "ndarray:int8:3",
    }
    pixel = bytes.fromhex("0100000001000000010000004c07")
    blank = {"a": np.ones((2, 2)), "i": 1, "j": {"k": [1]}, "p": pixel, "s": "é", "v": np.arange(3, dtype=np.int16)}
    blank["f"] = np.zeros(3, np.int8)
    write(folder, columns, [blank] * 5)
    path = folder / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
    path.write_bytes(content)
    try:
        (shard,) = open_all(folder)
    except FormatError:
        return
    for k in range(5):
        try:
            sample = shard.sample(k)
        except FormatError:
            sample = None
        try:
            batch = shard.columns(np.array([k, k]))
        except FormatError:
            assert sample is None
        else:
            assert sample is not None
            assert all(np.array_equal(batch["v"][0], sample["v"]) for _ in (0,))


@given(st.binary(max_size=60), st.integers(0, 5))
def test_random_bytes_are_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, num_samples: int
) -> None:
    folder = tmp_path_factory.mktemp("random")
    (folder / "s.mds").write_bytes(data)
    (folder / "s.json").write_bytes(data)
    (folder / "s.json.meta").write_bytes(data)
    rows = Schema("json", ("x",), ("int",), (None,), newline="\n")
    raw, meta = FileEntry("s.json", len(data), {}), FileEntry("s.json.meta", len(data), {})
    row_entry = rows.shard(num_samples, raw, None, meta)
    for entry in (mds_entry(data, num_samples, {"int": 8}), mds_entry(data, num_samples, {"str": None}), row_entry):
        with contextlib.suppress(FormatError):
            shard = open_shard(entry, folder)
            for k in range(num_samples):
                shard.sample(k)
