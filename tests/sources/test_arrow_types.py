"""Every type of Arrow in place: as Arrow's own values, in all files of a dataset, with or without its extensions."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
import pyarrow.feather as feather  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from lightning_stream import Stream, StreamingDataset  # noqa: E402
from lightning_stream.convert import convert  # noqa: E402
from lightning_stream.errors import FormatError  # noqa: E402

PYARROW = int(pa.__version__.partition(".")[0])
writes_times_before_1970 = pytest.mark.skipif(PYARROW < 23, reason="pyarrow before 23 writes INT96 before 1970 wrong")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


def write(path: Path, *columns: Any) -> str:
    """One file for each of some tables or columns."""
    path.mkdir(exist_ok=True)
    for number, column in enumerate(columns):
        table = column if isinstance(column, pa.Table) else pa.table({"x": column})
        feather.write_feather(table, str(path / f"{number}.arrow"), compression="uncompressed")
    return str(path)


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def read(uri: str, columns: Any = None, name: str = "x") -> list[Any]:
    dataset = StreamingDataset(streams=[Stream(remote=uri, columns=columns)])
    return [plain(dataset[k][name]) for k in range(dataset.size)]


class Pairs(pa.ExtensionType):  # type: ignore[misc]
    """An extension type of a user."""

    def __init__(self) -> None:
        super().__init__(pa.list_(pa.int32()), "lightning_stream.pairs")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, data: bytes) -> Pairs:
        return cls()


@pytest.fixture
def pairs() -> Iterator[Any]:
    kind = Pairs()
    pa.register_extension_type(kind)
    yield pa.ExtensionArray.from_storage(kind, pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32())))
    try:
        pa.unregister_extension_type(kind.extension_name)
    except KeyError:
        return  # a test did it


def test_an_extension_reads_the_same_where_it_is_known_and_where_not(tmp_path: Path, pairs: Any) -> None:
    inner = pa.ListArray.from_arrays([0, 1, 3, 3], pairs)
    rows = pa.table({"x": pairs, "inner": inner, "word": pa.array(["a", "b", "a"]).dictionary_encode()})
    uris = [write(tmp_path / "arrow", rows), str(tmp_path / "a.parquet")]
    pq.write_table(rows, uris[1])
    known = [(read(uri), read(uri, name="inner")) for uri in uris]
    pa.unregister_extension_type(Pairs().extension_name)
    (tmp_path / "cache").rename(tmp_path / "other")
    assert known == [(read(uri), read(uri, name="inner")) for uri in uris]
    assert known[0][0] == pairs.storage.to_pylist()


TYPES: dict[str, Any] = {
    "runs": lambda: pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"]),
    "text view": lambda: pa.array(["a", "é", ""], pa.string_view()),
    "bytes view": lambda: pa.array([b"a", b"", b"c"], pa.binary_view()),
    "words in lists": lambda: pa.ListArray.from_arrays([0, 1, 1, 3], pa.array(["a", "b", "a"]).dictionary_encode()),
    "tensor": lambda: pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(6).reshape(3, 2)),
    "struct with a null": lambda: pa.array([{"a": 1, "b": None}] * 3, pa.struct([("a", pa.int64()), ("b", pa.null())])),
    "nulls": lambda: pa.nulls(3),
    "empty lists": lambda: pa.array([[], [], []], pa.list_(pa.null())),
}


def test_columns_of_views_are_read_or_the_error_names_the_version_of_pyarrow_that_reads_them(tmp_path: Path) -> None:
    uri = write(tmp_path / "in", TYPES["text view"]())
    if PYARROW < 24:
        with pytest.raises(FormatError, match="Columns of views need pyarrow 24 or later"):
            read(uri)
    else:
        assert read(uri) == TYPES["text view"]().to_pylist()


@pytest.mark.parametrize("name", [name for name in TYPES if PYARROW >= 24 or "view" not in name])
def test_a_type_reads_as_arrows_own_values(name: str, tmp_path: Path) -> None:
    column = TYPES[name]()
    uri = write(tmp_path / "in", column)
    wanted = column.to_pylist()
    assert read(uri) == wanted
    convert(uri, tmp_path / "out", num_workers=1)
    assert read(str(tmp_path / "out")) == wanted


@writes_times_before_1970
def test_times_that_spark_wrote_are_exact_in_any_year(tmp_path: Path) -> None:
    times = [dt.datetime(1, 1, 1), dt.datetime(1969, 12, 31, 23, 59, 59, 999999), dt.datetime(9999, 12, 31)]
    table = pa.table({"x": times, "null": [None, *times[1:]]})  # of which no footer knows
    path = tmp_path / "a.parquet"
    by_spark = table.replace_schema_metadata({"org.apache.spark.version": "3.5.0"})
    pq.write_table(by_spark, path, use_deprecated_int96_timestamps=True)
    epoch = dt.datetime(1970, 1, 1)
    assert read(str(path), ["x"]) == [(time - epoch) // dt.timedelta(microseconds=1) for time in times]
    assert read(str(path), {"null": "json"}, "null") == [None, *(time.isoformat() for time in times[1:])]


@writes_times_before_1970
@pytest.mark.parametrize("name", ["x", "list", "map", "null"])
def test_a_time_of_another_writer_that_no_number_of_nanoseconds_has_is_an_error(tmp_path: Path, name: str) -> None:
    fitting, beyond = dt.datetime(1969, 12, 31, 23, 59, 59, 999999), dt.datetime(9999, 12, 31)
    pairs, lists = pa.map_(pa.string(), pa.timestamp("us")), pa.list_(pa.struct([("t", pa.timestamp("us"))]))
    for last in (fitting, beyond):
        times = [fitting, last]
        table = pa.table({
            "x": times, "list": pa.array([[{"t": time}] for time in times], lists),
            "map": pa.array([[("t", time)] for time in times], pairs), "null": [None, last],
        })  # fmt: skip
        path = tmp_path / f"{last.year}.parquet"
        pq.write_table(table, path, use_deprecated_int96_timestamps=True, store_schema=False)
    asked: Any = [name] if name == "x" else {name: "json"}
    assert len(read(str(tmp_path / "1969.parquet"), asked, name)) == 2
    with pytest.raises(FormatError, match=r"out of bounds timestamp.*Write its times as microseconds"):
        read(str(path), asked, name)


def test_a_time_that_json_cannot_show_is_an_error_that_names_the_column(tmp_path: Path) -> None:
    uri = write(tmp_path / "in", pa.array([1 << 62, None], pa.timestamp("us")))
    with pytest.raises(FormatError, match=r"rows 0 to 2.*: column 'x': date value out of range"):
        read(uri)


FINER: dict[str, Any] = {
    "nanoseconds in json": lambda: pa.array([1, None], pa.time64("ns")),
    "nanoseconds in a struct": lambda: pa.array([{"a": 1001}], pa.struct([("a", pa.time64("ns"))])),
    "a span in a list": lambda: pa.array([[1001]], pa.list_(pa.duration("ns"))),
    "part of a day in a list": lambda: pa.array([[86_400_001]], pa.list_(pa.date64())),
    "part of a day": lambda: pa.array([86_400_001], pa.date64()),
}


@pytest.mark.parametrize("name", list(FINER))
def test_what_no_value_of_python_holds_is_refused_with_its_column_at_any_depth(name: str, tmp_path: Path) -> None:
    uri = write(tmp_path / "in", FINER[name]())
    calls = [lambda: read(uri), lambda: convert(uri, tmp_path / "out", num_workers=1)]
    for call in [*calls, lambda: convert(uri, tmp_path / "out", num_workers=1, transform=dict)]:
        with pytest.raises((ValueError, FormatError), match=r"in/0.arrow: column 'x': .*would lose data.*microseconds"):
            call()


def test_times_and_days_of_other_units_are_those_of_python(tmp_path: Path) -> None:
    times = pa.array([[1_000], [86_399_000_000_000]], pa.list_(pa.time64("ns")))
    assert read(write(tmp_path / "times", times)) == [["00:00:00.000001"], ["23:59:59"]]
    assert read(write(tmp_path / "days", pa.array([86_400_000, None], pa.date64()))) == ["1970-01-02", None]
    assert read(write(tmp_path / "clock", pa.array([5, 7], pa.time32("ms")))) == [5_000, 7_000]


@pytest.mark.parametrize(
    ("inner", "full"),
    [
        (pa.list_(pa.bool_()), [[True, False]]),
        (pa.list_(pa.int32(), 3), [[1, 2, 3]]),
        (pa.large_list(pa.list_(pa.int8())), [[[1], [2]]]),
    ],
)
def test_an_empty_list_of_lists_has_one_shape_beside_any_neighbours(inner: Any, full: Any, tmp_path: Path) -> None:
    datasets = [
        StreamingDataset(remote=write(tmp_path / str(k), pa.array(rows, pa.list_(inner))))
        for k, rows in enumerate(([[]], [[], full], [[], full * 2, full]))
    ]
    shapes = {dataset[0]["x"].shape for dataset in datasets}
    assert len(shapes) == 1
    assert {dataset[dataset.size - 1]["x"].ndim for dataset in datasets} == {len(shapes.pop())}


@pytest.mark.parametrize("other", [pa.date32(), pa.int64(), pa.duration("us"), pa.time64("us")])
def test_numbers_that_are_asked_for_count_one_unit_in_all_files(other: Any, tmp_path: Path) -> None:
    moments = pa.array([7], pa.timestamp("us"))
    uri = write(
        tmp_path / "in", moments, moments, pa.array([9], pa.int32() if other == pa.date32() else pa.int64()).cast(other)
    )
    for call in (lambda: read(uri, {"x": "int64"}), lambda: convert(uri, tmp_path / "out", columns={"x": "int64"})):
        with pytest.raises(
            FormatError, match=r"column 'x' of .*in/2.arrow does not: .* count other units; 'json' takes"
        ):
            call()
    assert len(read(uri, {"x": "json"})) == 3
    assert read(write(tmp_path / "null", moments, pa.table({"x": pa.nulls(0)})), {"x": "int64"}) == [7]


def test_damage_that_only_the_checksum_of_a_page_shows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    plain_pages = {"compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"x": range(1000)}), path, write_page_checksum=True, **plain_pages)
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"a.parquet cannot be read: .*CRC.*fetch it again"):
        read(str(path))


def test_streams_one_behind_another_are_refused(tmp_path: Path) -> None:
    table = pa.table({"x": [1, 2]})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table)
    assert read(str(path)) == [1, 2]
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(FormatError, match="found bytes behind the end of its stream"):
        read(str(path))


def test_a_column_of_nulls_is_json_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(write(tmp_path / "in", pa.nulls(2))) == [None, None]
    assert "x can only be null, and becomes json" in caplog.text


WIDER: dict[str, tuple[Any, Any, str]] = {
    "int32, then int64": (pa.array([1], pa.int32()), pa.array([2**40]), "int64"),
    "int32, then double": (pa.array([1], pa.int32()), pa.array([0.5]), "float64"),
    "uint8, then int8": (pa.array([255], pa.uint8()), pa.array([-1], pa.int8()), "int16"),
    "half, then int8": (pa.array([np.float16(0.5)]), pa.array([-1], pa.int8()), "float16"),
    "lists": (pa.array([[1]], pa.list_(pa.int32())), pa.array([[2**40]]), "ndarray:int64"),
    "fixed lists": (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), pa.array([[3]]), "ndarray:int64"),
    "lists of float, then double": (pa.array([[0.5]], pa.list_(pa.float32())), pa.array([[0.1]]), "ndarray:float64"),
    "lists of nothing": (pa.array([[]], pa.list_(pa.null())), pa.array([[3]]), "ndarray:int64"),
    "lists, then texts": (pa.array([[1]]), pa.array([["a"]]), "json"),
    "a column, then nulls": (pa.array(["a"]), pa.nulls(1), "json"),
    "words, then texts": (pa.array(["a"]).dictionary_encode(), pa.array(["b"], pa.large_string()), "str"),
    "moments": (pa.array([5], pa.timestamp("ms")), pa.array([7000], pa.timestamp("us", "UTC")), "int64"),
}


@pytest.mark.parametrize("name", list(WIDER))
def test_files_with_other_types_get_one_that_holds_all_values(name: str, tmp_path: Path) -> None:
    first, second, encoding = WIDER[name]
    uri = write(tmp_path / "in", first, second, first)
    assert convert(uri, tmp_path / "out", num_workers=1).columns == {"x": encoding}
    wanted = [5000, 7000, 5000] if name == "moments" else [column[0].as_py() for column in (first, second, first)]
    assert read(uri) == read(str(tmp_path / "out")) == wanted


APART: dict[str, tuple[Any, Any, str]] = {
    "int64, then double": (pa.array([2**60]), pa.array([0.5]), "no type holds all numbers of int64 and double exactly"),
    "int64, then uint64": (pa.array([-1]), pa.array([2**64 - 1], pa.uint64()), "int64 and uint64 exactly"),
    "number, then moment": (pa.array([1]), pa.array([1], pa.timestamp("us")), "have no common type"),
    "date, then moment": (pa.array([dt.date(2024, 1, 1)]), pa.array([1], pa.timestamp("us")), "date32"),
    "lists": (pa.array([[2**60]]), pa.array([[0.5]]), "int64 and double exactly"),
}


@pytest.mark.parametrize("name", list(APART))
def test_types_that_no_encoding_holds_are_refused_at_opening_with_file_and_column(name: str, tmp_path: Path) -> None:
    first, second, message = APART[name]
    uri = write(tmp_path / "in", first, first, second)
    for call in (lambda: read(uri), lambda: convert(uri, tmp_path / "out", num_workers=1)):
        with pytest.raises(FormatError, match=rf"column 'x' of .*in/2.arrow does not: .*{message}"):
            call()
    assert not (tmp_path / "out").exists()


def test_three_files_of_which_two_fit_the_first_but_not_each_other_are_refused(tmp_path: Path) -> None:
    uri = write(tmp_path / "in", pa.array([1], pa.int32()), pa.array([2**60]), pa.array([0.5]))
    with pytest.raises(ValueError, match="column 'x': no type holds all numbers of int64 and double exactly"):
        read(uri)
    with pytest.raises(ValueError, match="column 'x'"):
        convert(uri, tmp_path / "out", num_workers=1)
    assert read(uri, {"x": "float64"}) == [1.0, float(2**60), 0.5]


def test_nulls_that_headers_know_and_the_encoding_lacks_are_refused_at_opening(tmp_path: Path) -> None:
    for uri, columns in (
        (write(tmp_path / "bytes", pa.array([b"a"]), pa.array([b"b", None])), None),
        (write(tmp_path / "asked", pa.array([1]), pa.array([None, 1])), {"x": "int64"}),
    ):
        with pytest.raises(FormatError, match=r"1.arrow: only json columns .* found x: 1 of 2 shards have some"):
            StreamingDataset(streams=[Stream(remote=uri, columns=columns)]).size  # noqa: B018 - it opens the index


def test_columns_in_another_order_and_decimals_of_another_scale_are_the_same_columns(tmp_path: Path) -> None:
    first = pa.table({"x": pa.array([Decimal("1.50")], pa.decimal128(5, 2)), "y": [1]})
    second = pa.table({"y": [2], "x": pa.array([Decimal("2.125")], pa.decimal128(9, 3))})
    uri = write(tmp_path / "in", first, second)
    assert read(uri) == [Decimal("1.50"), Decimal("2.125")]
    assert read(uri, ["y"], "y") == [1, 2]


def test_keys_of_maps_that_have_parts_are_json(tmp_path: Path) -> None:
    keys = pa.map_(pa.struct([("a", pa.int64()), ("t", pa.string())]), pa.int64())
    uri = write(tmp_path / "in", pa.array([[({"a": 1, "t": "x"}, 5)]], keys))
    assert read(uri, {"x": "json"}) == [{'{"a": 1, "t": "x"}': 5}]


@pytest.mark.parametrize("asked", ["float64", "float32", "str_float", "ndarray:float64"])
def test_whole_numbers_that_floats_would_round_are_refused(tmp_path: Path, asked: str) -> None:
    for name, number in [("exact", 2**53), ("large", -(2**53) - 1)]:
        uri = write(tmp_path / name, pa.array([[number]] if ":" in asked else [number], None))
        if name == "exact":
            assert np.asarray(read(uri, {"x": asked})[0]).item() == number
        else:
            with pytest.raises((FormatError, ValueError), match=r"round whole numbers beyond 2\*\*53"):
                read(uri, {"x": asked})
