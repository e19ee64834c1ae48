"""A batch is written as its rows would be, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lightning_stream.formats import shard_encoder
from lightning_stream.writer import MDSWriter, shard_buffer

ENCODINGS = {
    "int": hnp.arrays(np.int64, 7),
    "uint8": st.lists(st.integers(0, 255), min_size=7, max_size=7),
    "float32": hnp.arrays(np.float32, 7),
    "ndarray:int32:2,3": hnp.arrays(np.int32, (7, 2, 3)),
    "ndarray:float64": hnp.arrays(np.float64, (7, 4)),
    "ndarray": hnp.arrays(np.uint16, (7, 2, 2)),
    "str": st.lists(st.text(max_size=9), min_size=7, max_size=7),
    "bytes": st.lists(st.binary(max_size=9), min_size=7, max_size=7),
    "json": st.lists(st.dictionaries(st.text(max_size=3), st.integers()), min_size=7, max_size=7),
}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_rows(out: Path, columns: dict[str, str], batch: dict[str, Any], **options: Any) -> dict[str, bytes]:
    with MDSWriter(out=out, columns=columns, max_workers=0, **options) as writer:
        for row in zip(*batch.values(), strict=True):
            writer.write(dict(zip(batch, row, strict=True)))
    return files(out)


def write_batch(out: Path, columns: dict[str, str] | None, batch: Any, **options: Any) -> dict[str, bytes]:
    with MDSWriter(out=out, columns=columns, max_workers=0, **options) as writer:
        writer.write_batch(batch)
    return files(out)


@settings(max_examples=40)
@given(st.data(), st.lists(st.sampled_from(sorted(ENCODINGS)), min_size=1, max_size=5, unique=True))
def test_a_batch_gives_the_bytes_of_its_rows(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kinds: list[str]
) -> None:
    columns = {f"c{k}": kind for k, kind in enumerate(kinds)}
    batch = {name: data.draw(ENCODINGS[kind]) for name, kind in columns.items()}
    limit = data.draw(st.sampled_from([1 << 20, 700, 300]))
    folder = tmp_path_factory.mktemp("batch")
    rows = write_rows(folder / "rows", columns, batch, size_limit=limit)
    assert write_batch(folder / "batch", columns, batch, size_limit=limit) == rows


@pytest.mark.parametrize("numbers", [[5, 2**63 + 1], [2**64 - 1, 0]])
def test_numpy_rounds_no_large_numbers_of_a_batch(tmp_path: Path, numbers: list[int]) -> None:
    rows = write_rows(tmp_path / "rows", {"x": "uint64"}, {"x": numbers})
    assert write_batch(tmp_path / "batch", {"x": "uint64"}, {"x": numbers}) == rows


def test_rows_and_batches_mix_in_one_shard(tmp_path: Path) -> None:
    columns = {"x": "int", "t": "str"}
    batch = {"x": np.arange(50), "t": [f"row {k}" for k in range(50)]}
    rows = write_rows(tmp_path / "rows", columns, batch, size_limit=600)
    with MDSWriter(out=tmp_path / "mixed", columns=columns, size_limit=600) as writer:
        writer.write({"x": 0, "t": "row 0"})
        writer.write_batch({name: values[1:20] for name, values in batch.items()})
        for k in range(20, 23):
            writer.write({"x": k, "t": f"row {k}"})
        writer.write_batch({name: values[23:] for name, values in batch.items()})
        assert writer.num_samples == 50
    assert files(tmp_path / "mixed") == rows


def test_an_arrow_batch_gives_the_bytes_of_its_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    batch = {
        "i": np.arange(9, dtype=np.int16),
        "t": [f"é{k}" * k for k in range(9)],
        "b": [b"x" * k for k in range(9)],
        "v": [np.arange(k + 1, dtype=np.float32) for k in range(9)],
        "f": np.arange(18, dtype=np.int32).reshape(9, 2),
    }
    columns = {"i": "int", "t": "str", "b": "bytes", "v": "ndarray:float32", "f": "ndarray:int32:2"}
    rows = write_rows(tmp_path / "rows", columns, batch)
    arrays = {
        "i": pa.array(batch["i"]),
        "t": pa.array(batch["t"]),
        "b": pa.array(batch["b"]),
        "v": pa.array([value.tolist() for value in batch["v"]], pa.list_(pa.float32())),
        "f": pa.FixedSizeListArray.from_arrays(pa.array(batch["f"].reshape(-1)), 2),
    }
    table = pa.table(arrays)
    assert write_batch(tmp_path / "record", columns, pa.record_batch(arrays)) == rows
    assert write_batch(tmp_path / "table", columns, pa.concat_tables([table.slice(0, 4), table.slice(4)])) == rows
    inferred = write_batch(tmp_path / "inferred", None, table)
    assert b'["bytes", "ndarray:int32:2", "int16", "str", "ndarray:float32"]' in inferred["index.json"]


def test_arrow_nulls_are_refused_by_name(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    writer = MDSWriter(out=tmp_path / "out", columns={"t": "str"})
    with pytest.raises(ValueError, match="column 't': 1 values are null"):
        writer.write_batch(pa.table({"t": ["a", None]}))


def test_a_pandas_frame_gives_the_bytes_of_its_rows(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    batch = {"x": np.arange(5), "t": list("abcde"), "f": np.linspace(0, 1, 5)}
    columns = {"x": "int64", "t": "str", "f": "float64"}
    rows = write_rows(tmp_path / "rows", columns, batch)
    assert write_batch(tmp_path / "frame", None, pd.DataFrame(batch)) == rows


@pytest.mark.parametrize(
    ("encoding", "values", "message"),
    [
        ("uint8", np.array([1, 256]), "out of range for uint8"),
        ("int8", np.array([1.5]), "out of range for int8, or not whole numbers"),
        ("float16", np.array([1e6]), "out of range for float16"),
        ("int", np.array([2**63], np.uint64), "out of range"),
        ("int", np.zeros((2, 2), np.int64), "one number per row"),
        ("str", ["a", 3], "str takes str; got int 3"),
        ("ndarray:int32:2", np.zeros((3, 3), np.int32), r"takes shape \(2,\) per row; got \(3,\)"),
        ("ndarray:int32:2", np.zeros((3, 2), np.int64), "takes dtype int32; got dtype int64"),
        ("ndarray:int32:2", [b"1234567"], "takes 8 bytes; got 7 bytes"),
        ("str", "text", "one value per row"),
        ("str", 5, "arrays or sequences"),
    ],
)
def test_a_wrong_column_is_refused_by_name(tmp_path: Path, encoding: str, values: Any, message: str) -> None:
    writer = MDSWriter(out=tmp_path / "out", columns={"col": encoding})
    with pytest.raises((TypeError, ValueError), match=f"column 'col'.*{message}"):
        writer.write_batch({"col": values})


def test_what_is_no_batch_is_refused(tmp_path: Path) -> None:
    writer = MDSWriter(out=tmp_path / "out", columns={"a": "int", "b": "int"})
    with pytest.raises(TypeError, match="a batch must be a mapping"):
        writer.write_batch([1, 2])
    with pytest.raises(ValueError, match="the same length"):
        writer.write_batch({"a": [1], "b": [1, 2]})
    with pytest.raises(ValueError, match="column 'b'"):
        writer.write_batch({"a": [1]})


def test_the_callers_memory_may_change_after_the_call(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.int32).reshape(2, 2)
    with MDSWriter(out=tmp_path / "out") as writer:
        writer.write_batch({"v": values})
        values[:] = -1
    assert np.arange(4, dtype=np.int32).tobytes() in (tmp_path / "out" / "shard.00000.mds").read_bytes()


@pytest.mark.parametrize("piece", [64, 77, 1000])
def test_rows_of_blocks_are_whole_across_pieces_of_memory(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(shard_buffer, "PIECE_BYTES", piece)
    monkeypatch.setattr(shard_encoder, "_CHUNK_BYTES", 200)
    blocks = [np.random.default_rng(k).integers(0, 255, (50, width), np.uint8) for k, width in enumerate((4, 70, 3))]
    held = shard_buffer.ShardBuffer(shard_buffer.Pool(), 0)
    held.add(b"begin")
    for columns in (blocks[:1], blocks):
        for chunk in shard_encoder.EncodedBatch(np.full(50, 77), columns).chunks():
            held.add(chunk)
    assert b"".join(held.parts()) == b"begin" + blocks[0].tobytes() + np.concatenate(blocks, axis=1).tobytes()


def test_a_batch_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    pa, pd = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")
    batches = [
        pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]),
        pd.DataFrame([[1, 2]], columns=["x", "x"]),
        pd.DataFrame({1: [1], "1": [2]}),
    ]
    for number, batch in enumerate(batches):
        with (
            pytest.raises(ValueError, match=r"different names.*Rename"),
            MDSWriter(out=tmp_path / str(number)) as writer,
        ):
            writer.write_batch(batch)


@pytest.mark.parametrize(
    ("encoding", "values"),
    [
        ("int", [np.array(2**53 + 1), np.array(0.0)]),
        ("uint64", [np.array(2**63 + 1, np.uint64), np.array(5, np.int64)]),
        ("ndarray:float64:2", [np.array([2**53 + 1, 1]), np.array([0.0, 1.0])]),
    ],
)
def test_numbers_of_different_types_in_a_batch_are_stored_or_refused_as_one_by_one(
    tmp_path: Path, encoding: str, values: list[Any]
) -> None:
    written = []
    for name in ("one", "many"):
        writer = MDSWriter(out=tmp_path / name, columns={"x": encoding})
        try:
            if name == "many":
                writer.write_batch({"x": values})
            else:
                for value in values:
                    writer.write({"x": value})
        except ValueError as error:
            written.append(str(error))
            continue
        writer.finish()
        written.append((tmp_path / name / "shard.00000.mds").read_bytes())
    assert written[0] == written[1]


class _OnGpu:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.array(3), "one value per row"),
        (np.int64(3), "one value per row"),
        (np.ma.masked_array([1, 2], mask=[True, False]), "1 values are masked"),
        (_OnGpu(), "cannot be made an array: can't convert cuda"),
    ],
)
def test_what_is_no_column_is_refused_by_its_name(tmp_path: Path, values: Any, said: str) -> None:
    with (
        pytest.raises((TypeError, ValueError), match=f"column 'x': .*{said}"),
        MDSWriter(out=tmp_path, columns={"x": "int"}) as writer,
    ):
        writer.write_batch({"x": values})
