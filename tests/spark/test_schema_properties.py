"""Any schema, any values: what is written comes back as its type is documented, or is refused by name and count."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightning_stream import LocalDataset
from lightning_stream import spark as room

UTC = dt.UTC
EPOCH = dt.datetime(1970, 1, 1)
MOMENTS = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1))
DAYS = st.dates(dt.date(1900, 1, 1), dt.date(2200, 1, 1))
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
FLOAT = st.floats(width=32, allow_nan=False)
PRICE = st.decimals(-999_999, 999_999, places=2)
SMALL = st.integers(-(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Kind:
    """A Spark type, values for it, and what a sample holds for a value."""

    ddl: str
    values: st.SearchStrategy[Any]
    expected: Callable[[Any], Any]


def micros(span: dt.timedelta) -> np.int64:
    return np.int64(span // dt.timedelta(microseconds=1))


def in_utc(when: dt.datetime) -> dt.datetime:
    return when.replace(tzinfo=UTC)


def whole(bits: int) -> Kind:
    name = {8: "tinyint", 16: "smallint", 32: "int", 64: "bigint"}[bits]
    return Kind(name, st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), np.dtype(f"i{bits // 8}").type)


def array(dtype: str) -> Callable[[Any], Any]:
    return lambda value: np.array(value, dtype)


def boxes(shape: tuple[int, int]) -> st.SearchStrategy[Any]:
    row = st.lists(FLOAT, min_size=shape[1], max_size=shape[1])
    return st.lists(row, min_size=shape[0], max_size=shape[0])


JSON_ROW = st.none() | st.tuples(
    st.none() | DAYS, st.none() | PRICE, st.none() | st.lists(st.none() | SMALL, max_size=3)
)


def json_row(value: Any) -> Any:
    if value is None:
        return None
    day, price, numbers = value
    return {"d": day and day.isoformat(), "p": None if price is None else str(price), "n": numbers}


KINDS = {
    "tinyint": whole(8),
    "smallint": whole(16),
    "int": whole(32),
    "bigint": whole(64),
    "float": Kind("float", FLOAT, np.float32),
    "double": Kind("double", st.floats(allow_nan=False), np.float64),
    "boolean": Kind("boolean", st.booleans(), np.uint8),
    "decimal": Kind("decimal(10,2)", PRICE, lambda value: value),
    "string": Kind("string", TEXT, lambda value: value),
    "binary": Kind("binary", st.binary(max_size=12).map(bytearray), bytes),
    "date": Kind("date", DAYS, lambda day: np.int32(day.toordinal() - EPOCH.toordinal())),
    "timestamp": Kind("timestamp", MOMENTS.map(in_utc), lambda when: micros(when.replace(tzinfo=None) - EPOCH)),
    "timestamp_ntz": Kind("timestamp_ntz", MOMENTS, lambda when: micros(when - EPOCH)),
    "interval": Kind("interval day to second", st.timedeltas(dt.timedelta(-999), dt.timedelta(999)), micros),
    "ragged": Kind("array<int>", st.lists(SMALL, min_size=1, max_size=5), array("i4")),
    "flags": Kind("array<boolean>", st.lists(st.booleans(), min_size=1, max_size=5), array("u1")),
    "grid": Kind("array<array<float>>", boxes((2, 3)) | boxes((1, 2)), array("f4")),
    "words": Kind("array<string>", st.none() | st.lists(st.none() | TEXT, max_size=3), lambda value: value),
    "struct": Kind("struct<d: date, p: decimal(10,2), n: array<int>>", JSON_ROW, json_row),
    "map": Kind("map<string, bigint>", st.none() | st.dictionaries(TEXT, SMALL, max_size=3), lambda value: value),
}  # fmt: skip
NULL_IS_A_VALUE = {"words", "struct", "map"}
NAMES = st.text(string.ascii_letters + " _", min_size=1, max_size=8)
FEW = settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
MANY = settings(FEW, max_examples=40, phases=[Phase.explicit, Phase.generate, Phase.shrink])


@st.composite
def tables(draw: Any, kinds: Mapping[str, Kind] = KINDS) -> tuple[dict[str, Kind], list[tuple[Any, ...]]]:
    """Columns by name, and some rows."""
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=len(kinds), unique=True))
    names = draw(st.lists(NAMES, min_size=len(chosen), max_size=len(chosen), unique_by=str.casefold))
    columns = {name: kinds[kind] for name, kind in zip(names, chosen, strict=True)}
    rows = draw(st.lists(st.tuples(*(kind.values for kind in columns.values())), min_size=1, max_size=6))
    return columns, rows


def frame(spark: Any, columns: Mapping[str, Kind], rows: list[tuple[Any, ...]]) -> Any:
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    schema = ", ".join(f"`{name}` {kind.ddl}" for name, kind in columns.items())
    return spark.createDataFrame(rows, schema).coalesce(1)


def check(spark: Any, place: Path, columns: Mapping[str, Kind], rows: list[tuple[Any, ...]]) -> None:
    shutil.rmtree(place, ignore_errors=True)
    room.dataframe_to_mds(frame(spark, columns, rows), mds_kwargs={"out": str(place), "compression": None})
    dataset = LocalDataset(place)
    assert len(dataset) == len(rows)
    for sample, row in zip((dataset[k] for k in range(len(rows))), rows, strict=True):
        assert set(sample) == set(columns)
        for (name, kind), value in zip(columns.items(), row, strict=True):
            expected = kind.expected(value)
            assert type(sample[name]) is type(expected), (name, kind.ddl)
            if isinstance(expected, np.ndarray):
                np.testing.assert_array_equal(sample[name], expected, strict=True)
            else:
                assert sample[name] == expected, (name, kind.ddl)


def test_a_table_of_every_type_comes_back(spark: Any, tmp_path: Path) -> None:
    @settings(FEW, max_examples=2)
    @given(rows=st.lists(st.tuples(*(kind.values for kind in KINDS.values())), min_size=1, max_size=6))
    def law(rows: list[tuple[Any, ...]]) -> None:
        check(spark, tmp_path / "out", KINDS, rows)

    law()


@pytest.mark.nightly
def test_any_schema_comes_back(spark: Any, tmp_path: Path) -> None:
    @MANY
    @given(table=tables())
    def law(table: tuple[dict[str, Kind], list[tuple[Any, ...]]]) -> None:
        check(spark, tmp_path / "out", *table)

    law()


def nulls_told(error: ValueError) -> dict[str, int]:
    listed = str(error).partition("by column: ")[2].partition(". Nothing")[0]
    return {name: int(count.replace(",", "")) for name, count in re.findall(r"([^:]+): ([\d,]+)(?:, |$)", listed)}


def refusal(spark: Any, place: Path, holes: Mapping[str, list[bool]]) -> None:
    """Put null where a hole is; the error must tell each column with its count, and no index must be there."""
    columns = {kind: KINDS[kind] for kind in holes}
    some = {"tinyint": 1, "string": "x", "date": dt.date(2024, 1, 1), "decimal": Decimal("1.00"), "ragged": [1, 2]}
    count = len(next(iter(holes.values())))
    rows = [tuple(None if holes[kind][k] else some[kind] for kind in columns) for k in range(count)]
    shutil.rmtree(place, ignore_errors=True)
    wanted = {kind: sum(where) for kind, where in holes.items() if any(where)}
    table = frame(spark, columns, rows).repartition(2)
    if not wanted:
        room.dataframe_to_mds(table, mds_kwargs={"out": str(place)})
        return
    with pytest.raises(ValueError, match="by column") as caught:
        room.dataframe_to_mds(table, mds_kwargs={"out": str(place)})
    assert nulls_told(caught.value) == wanted
    assert not (place / "index.json").exists()


def test_nulls_are_reported_by_column_and_count(spark: Any, tmp_path: Path) -> None:
    @settings(FEW, max_examples=3)
    @given(data=st.data())
    def law(data: Any) -> None:
        count = data.draw(st.integers(1, 9))
        where = st.lists(st.booleans(), min_size=count, max_size=count)
        kinds = ("tinyint", "string", "date", "decimal", "ragged")
        refusal(spark, tmp_path / "out", {kind: data.draw(where) for kind in kinds})

    law()


def test_an_empty_array_is_written(spark: Any, tmp_path: Path) -> None:
    rows = spark.createDataFrame([([1],), ([],)], "a array<int>")
    room.dataframe_to_mds(rows, mds_kwargs={"out": str(tmp_path / "out")})
    assert sorted(LocalDataset(tmp_path / "out")[k]["a"].tolist() for k in range(2)) == [[], [1]]


def test_vectors_dense_and_sparse_are_arrays(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense([k, 1.5, 0.0]),) if k % 2 else (Vectors.sparse(3, {1: float(k)}),) for k in range(6)]
    room.dataframe_to_mds(spark.createDataFrame(rows, ["v"]).coalesce(1), mds_kwargs={"out": str(tmp_path / "out")})
    dataset = LocalDataset(tmp_path / "out")
    for k in range(6):
        np.testing.assert_array_equal(dataset[k]["v"], rows[k][0].toArray(), strict=True)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["columns"] == {"v": "ndarray:float64"}
