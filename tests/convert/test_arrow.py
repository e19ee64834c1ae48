"""Arrow's types are written as they are documented, from Parquet as from any other Arrow file."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: uv sync --extra convert")
pq = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")

from lightning_stream.convert import convert  # noqa: E402
from lightning_stream.errors import FormatError  # noqa: E402
from lightning_stream.writer.batch import arrow_numbers  # noqa: E402

PLAIN: dict[str, Any] = {"compression": None, "num_workers": 1}
WHEN = dt.datetime(2024, 2, 29, 12, 30, 0, 250)
MICROS = int(WHEN.replace(tzinfo=dt.UTC).timestamp()) * 10**6 + 250
COLUMNS: list[tuple[str, Any, Any, str, Any]] = [
    ("i8", pa.int8(), -3, "int8", np.int8(-3)),
    ("u64", pa.uint64(), 2**64 - 1, "uint64", np.uint64(2**64 - 1)),
    ("half", pa.float16(), np.float16(1.5), "float16", np.float16(1.5)),
    ("double", pa.float64(), 0.1, "float64", np.float64(0.1)),
    ("flag", pa.bool_(), True, "uint8", np.uint8(1)),
    ("price", pa.decimal128(10, 2), Decimal("12.50"), "str_decimal", Decimal("12.50")),
    ("text", pa.string(), "naïve", "str", "naïve"),
    ("large", pa.large_string(), "naïve", "str", "naïve"),
    ("word", pa.dictionary(pa.int8(), pa.string()), "red", "str", "red"),
    ("blob", pa.binary(), b"\0\xff", "bytes", b"\0\xff"),
    ("hash", pa.binary(4), b"abcd", "bytes", b"abcd"),
    ("day", pa.date32(), WHEN.date(), "int32", np.int32(WHEN.date().toordinal() - 719163)),
    ("moment", pa.timestamp("ns", "UTC"), WHEN, "int64", np.int64(MICROS)),
    ("wall", pa.timestamp("us"), WHEN, "int64", np.int64(MICROS)),
    ("clock", pa.time64("us"), WHEN.time(), "int64", np.int64(45_000 * 10**6 + 250)),
    ("span", pa.duration("ms"), dt.timedelta(seconds=90), "int64", np.int64(90 * 10**6)),
    ("tokens", pa.list_(pa.int32()), [1, 2, 3], "ndarray:int32", np.array([1, 2, 3], np.int32)),
    ("large_list", pa.large_list(pa.int16()), [1], "ndarray:int16", np.array([1], np.int16)),
    ("fixed", pa.list_(pa.float32(), 2), [1.0, 2.0], "ndarray:float32:2", np.array([1, 2], np.float32)),
    ("grid", pa.list_(pa.list_(pa.uint8(), 2), 2), [[1, 2], [3, 4]], "ndarray:uint8:2,2", np.uint8([[1, 2], [3, 4]])),
    ("words", pa.list_(pa.string()), ["a", None], "json", ["a", None]),
    ("nested", pa.struct([("d", pa.date32()), ("b", pa.binary())]), {"d": WHEN.date(), "b": b"a"}, "json",
     {"d": "2024-02-29", "b": "YQ=="}),
]  # fmt: skip


def table_of(count: int) -> Any:
    return pa.table({name: pa.array([value] * count, kind) for name, kind, value, _, _ in COLUMNS})


def test_every_type_comes_back_as_documented(tmp_path: Path, samples_of: Any) -> None:
    pq.write_table(table_of(5), tmp_path / "in.parquet")
    done = convert(tmp_path / "in.parquet", tmp_path / "out", **PLAIN)
    assert done.columns == {name: encoding for name, _, _, encoding, _ in COLUMNS}
    sample = samples_of(tmp_path / "out")[4]
    for name, _, _, _, expected in COLUMNS:
        if isinstance(expected, np.ndarray):
            np.testing.assert_array_equal(sample[name], expected, strict=True)
        else:
            assert (sample[name], type(sample[name])) == (expected, type(expected)), name


def test_a_file_is_cut_between_row_groups_and_rows_keep_their_order(tmp_path: Path, samples_of: Any) -> None:
    (tmp_path / "in").mkdir()
    for part in range(2):
        table = pa.table({"k": list(range(part * 1000, part * 1000 + 1000))})
        pq.write_table(table, tmp_path / "in" / f"{part}.parquet", row_group_size=100, compression="none")
    (tmp_path / "in" / "_SUCCESS").write_text("")
    done = convert(tmp_path / "in", tmp_path / "out", **PLAIN, partition_bytes=1500)
    assert [sample["k"] for sample in samples_of(tmp_path / "out")] == list(range(2000))
    assert done.num_shards[""] > 4


def test_nulls_of_arrow_columns_are_counted_filled_or_dropped(tmp_path: Path, samples_of: Any) -> None:
    table = pa.table({"k": list(range(9)), "t": ["a", None, "c"] * 3, "v": [[1.0], [1.0], [None]] * 3})
    pq.write_table(table, tmp_path / "in.parquet")
    columns = {"k": "int8", "t": "str", "v": "ndarray:float64"}
    with pytest.raises(ValueError, match=r"t: 3, v \(elements of arrays\): 3"):
        convert(tmp_path / "in.parquet", tmp_path / "out", **PLAIN, columns=columns)
    chosen = {"columns": {"k": "int8", "t": "str"}, **PLAIN}
    convert(tmp_path / "in.parquet", tmp_path / "filled", **chosen, fill_nulls={"t": ""})
    assert [(s["k"], s["t"]) for s in samples_of(tmp_path / "filled")][:3] == [(0, "a"), (1, ""), (2, "c")]
    convert(tmp_path / "in.parquet", tmp_path / "dropped", **chosen, drop_nulls=True)
    assert [s["k"] for s in samples_of(tmp_path / "dropped")] == [0, 2, 3, 5, 6, 8]


@pytest.mark.parametrize(("kind", "value"), [("int64", 1.5), ("list<int64>", [1.5])])
def test_nulls_of_whole_numbers_are_not_filled_with_others(tmp_path: Path, kind: str, value: Any) -> None:
    types = {"int64": pa.int64(), "list<int64>": pa.list_(pa.int64())}
    pq.write_table(pa.table({"k": pa.array([None], types[kind])}), tmp_path / "in.parquet")
    with pytest.raises(ValueError, match=r"fill_nulls of column 'k' must be of its type .*; got \[?1\.5"):
        convert(tmp_path / "in.parquet", tmp_path / "out", **PLAIN, fill_nulls={"k": value})


def test_arrays_take_another_dtype_only_if_their_values_fit(tmp_path: Path, samples_of: Any) -> None:
    pq.write_table(pa.table({"t": [[1, 2], [300]]}), tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "out", **PLAIN, columns={"t": "ndarray:uint16"})
    assert samples_of(tmp_path / "out")[1]["t"].tolist() == [300]
    with pytest.raises(ValueError, match=r"'t'.*do not fit uint8"):
        convert(tmp_path / "in.parquet", tmp_path / "out2", **PLAIN, columns={"t": "ndarray:uint8"})


@pytest.mark.parametrize("file", ["in.parquet", "in.jsonl"])
@pytest.mark.parametrize("encoding", ["ndarray:float16", "ndarray:float16:1"])
def test_a_finite_number_of_an_array_never_becomes_infinite(tmp_path: Path, file: str, encoding: str) -> None:
    if file == "in.jsonl":
        (tmp_path / file).write_text('{"t": [70000.0]}\n')
    else:
        pq.write_table(pa.table({"t": [[70000.0]]}), tmp_path / file)
    with pytest.raises(ValueError, match=r"'t'.*do not fit float16"):
        convert(tmp_path / file, tmp_path / "out", **PLAIN, columns={"t": encoding})


def test_columns_that_cannot_be_written_are_named_together(tmp_path: Path) -> None:
    spans = pa.array([None] * 3, pa.month_day_nano_interval())
    feather.write_feather(pa.table({"n": spans, "t": ["a"] * 3}), str(tmp_path / "in.feather"))
    with pytest.raises(ValueError, match=r"'n'.*no encoding for Arrow's type month_day_nano_interval"):
        convert(tmp_path / "in.feather", tmp_path / "out", **PLAIN)
    with pytest.raises(ValueError, match=r"'t'.*not written as 'int'.*'x' is not a column"):
        convert(tmp_path / "in.feather", tmp_path / "out", **PLAIN, columns={"t": "int", "x": "str"})


def test_images_and_classes_as_datasets_notes_them(tmp_path: Path, samples_of: Any) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 3), (9, 9, 9)).save(tmp_path / "a.jpg")
    data = (tmp_path / "a.jpg").read_bytes()
    features = {
        "img": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": ["no", "yes"]},
        "grid": {"_type": "Array2D", "shape": [1, 2], "dtype": "int8"},
    }
    grids = pa.list_(pa.list_(pa.int8()))
    schema = pa.schema(
        [("img", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64()), ("grid", grids)],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    images = [{"bytes": data, "path": None}, {"bytes": None, "path": str(tmp_path / "a.jpg")}]
    table = pa.table({"img": images, "label": [0, 1], "grid": [[[1, 2]]] * 2}, schema=schema)
    pq.write_table(table, tmp_path / "in.parquet")
    done = convert(tmp_path / "in.parquet", tmp_path / "out", **PLAIN, source_options={"media_root": tmp_path})
    assert done.columns == {"img": "jpeg", "label": "int64", "grid": "ndarray:int8:1,2"}
    assert samples_of(tmp_path / "out")[1]["img"].size == (4, 3)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["classes"] == {"label": ["no", "yes"]}


@pytest.mark.parametrize("make", ["new_file", "new_stream"])
def test_arrow_files_and_streams_give_the_same_rows(tmp_path: Path, samples_of: Any, make: str) -> None:
    table = pa.table({"k": list(range(1000)), "t": [f"t{k}" for k in range(1000)]})
    with getattr(pa.ipc, make)(str(tmp_path / "in.arrow"), table.schema) as out:
        out.write_table(table, max_chunksize=64)
    done = convert(tmp_path / "in.arrow", tmp_path / "out", **PLAIN, partition_bytes=4000)
    assert [(s["k"], s["t"]) for s in samples_of(tmp_path / "out")] == [(k, f"t{k}") for k in range(1000)]
    assert done.num_shards[""] > 2


def test_what_datasets_saved_to_disk_is_read_in_its_order(tmp_path: Path, samples_of: Any) -> None:
    saved = tmp_path / "saved"
    for split in ("train", "test"):
        (saved / split).mkdir(parents=True)
        for k, name in enumerate(("b.arrow", "a.arrow", "cache-of-a-map.arrow")):
            table = pa.table({"k": list(range(k * 10, k * 10 + 10))})
            with pa.ipc.new_stream(str(saved / split / name), table.schema) as out:
                out.write_table(table)
        state = {"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}
        (saved / split / "state.json").write_text(json.dumps(state))
        (saved / split / "dataset_info.json").write_text("{}")
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    convert(saved / "train", tmp_path / "one", **PLAIN)
    assert [s["k"] for s in samples_of(tmp_path / "one")] == list(range(20))
    assert convert(saved, tmp_path / "out", **PLAIN).num_samples == {"train": 20, "test": 20}
    assert [s["k"] for s in samples_of(tmp_path / "out" / "test")] == list(range(20))


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
def test_files_that_are_no_arrow_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no table at all, and long enough to be one")
    with pytest.raises(FormatError, match=name):
        convert(tmp_path / name, tmp_path / "out", **PLAIN)


@pytest.mark.parametrize("kind", [*["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"], "?"])
def test_numbers_are_those_that_arrow_itself_gives(kind: str) -> None:
    values = np.arange(20).astype(kind)
    for column in (pa.array(values), pa.array(values)[3:11], pa.array(values)[5:5]):
        found, given = arrow_numbers(column), column.to_numpy(zero_copy_only=False)
        assert (found.dtype, found.tolist()) == (given.dtype, given.tolist())


CONVERT = """
import sys
from lightning_stream.convert import convert

convert(sys.argv[1], sys.argv[2], compression=None, num_workers=1)
print("pandas" in sys.modules)
"""


def test_arrows_numbers_and_lists_are_converted_without_pandas(tmp_path: Path) -> None:
    table = {"x": [1, 2], "flag": [True, False], "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))}
    pq.write_table(pa.table({**table, "tokens": [[1], [2, 3]], "text": ["a", "b"]}), tmp_path / "rows.parquet")
    command = [sys.executable, "-c", CONVERT, str(tmp_path / "rows.parquet"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (pa.map_(pa.string(), pa.int32()), [("a", 1), ("b", 2), ("a", 3)], r"a map has a key twice.*\['a', 'b', 'a'\]"),
        (pa.struct([("span", pa.duration("ns"))]), {"span": 1_500}, ".*microseconds"),
    ],
)
def test_nested_values_that_json_would_lose_are_refused(tmp_path: Path, kind: Any, value: Any, message: str) -> None:
    pq.write_table(pa.table({"x": pa.array([value], kind)}), tmp_path / "in.parquet")
    with pytest.raises(ValueError, match=f"column 'x': {message}"):
        convert(tmp_path / "in.parquet", tmp_path / "out", **PLAIN)


def test_a_nested_span_of_centuries_keeps_its_microseconds(tmp_path: Path, samples_of: Any) -> None:
    microseconds = 400 * 365 * 86_400 * 10**6 + 1  # as seconds, no float is exactly this
    spans = pa.array([{"span": microseconds}], pa.struct([("span", pa.duration("us"))]))
    pq.write_table(pa.table({"x": spans}), tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "out", **PLAIN)
    assert samples_of(tmp_path / "out") == [{"x": {"span": microseconds}}]
