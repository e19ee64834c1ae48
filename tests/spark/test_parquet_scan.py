"""Rows of plain Parquet files are read by the tasks themselves: the same files come of it as of Spark's own reading."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_stream import spark as room
from lightning_stream.spark.parquet_scan import ParquetScan

from .test_convert import plain, samples_of, shards_of

EVERYTHING = (
    "id",
    "cast(id % 128 as byte) as b",
    "cast(id - 200 as short) as s",
    "cast(id as int) as i",
    "rand(1) as d",
    "cast(rand(2) as float) as f",
    "id % 3 = 0 as flag",
    "concat('naïve ', id) as text",
    "cast(cast(id as string) as binary) as blob",
    "transform(sequence(1, 1 + int(id % 5)), k -> cast(k * id as int)) as tokens",
    "array(array(id, id), array(id, 1)) as grid",
    "array('a', cast(id as string)) as words",
)


@pytest.fixture
def table(spark: Any, tmp_path: Path) -> Any:
    """Two files of several row groups, which Spark cuts into more partitions than files."""
    source = tmp_path / "in"
    frame = spark.range(0, 4000, 1, 2).selectExpr(*EVERYTHING)
    frame.write.option("parquet.block.size", 1 << 14).option("parquet.page.row.count.limit", 100).parquet(str(source))
    spark.conf.set("spark.sql.files.maxPartitionBytes", "40000")
    yield spark.read.parquet(str(source))
    spark.conf.unset("spark.sql.files.maxPartitionBytes")


def by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParquetScan, "of", classmethod(lambda *_: None))


def test_the_same_files_come_of_it(table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = ParquetScan.of(table)
    assert scan is not None
    groups = [pq.ParquetFile(path).metadata.num_row_groups for path in (tmp_path / "in").glob("*.parquet")]
    assert len(scan.partitions) > len(groups) == 2
    assert min(groups) > 1

    room.dataframe_to_mds(table, mds_kwargs=plain(tmp_path / "scanned"))
    by_spark(monkeypatch)
    room.dataframe_to_mds(table, mds_kwargs=plain(tmp_path / "handed over"))

    assert shards_of(tmp_path / "scanned") == shards_of(tmp_path / "handed over")
    assert sorted(sample["id"] for sample in samples_of(tmp_path / "scanned")) == list(range(4000))


def test_only_the_columns_that_were_chosen_are_read(table: Any, tmp_path: Path) -> None:
    chosen = table.select("tokens", "id")
    scan = ParquetScan.of(chosen)
    assert scan is not None
    assert list(scan.types) == ["tokens", "id"]
    room.dataframe_to_mds(chosen, mds_kwargs=plain(tmp_path / "out"))
    assert sorted(samples_of(tmp_path / "out")[0]) == ["id", "tokens"]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.filter("id > 5"),
        lambda t: t.limit(7),
        lambda t: t.repartition(3),
        lambda t: t.sample(0.5, 3),
        lambda t: t.selectExpr("id + 1 as id"),
        lambda t: t.selectExpr("id as number"),
        lambda t: t.selectExpr("id", "input_file_name() as file"),
        lambda t: t.orderBy("id"),
        lambda t: t.union(t),
        lambda t: t.selectExpr("cast(id as decimal(9, 2)) as price"),
        lambda t: t.select("id").withColumnRenamed("id", "a.b"),
    ],
)
def test_any_other_plan_is_sparks(table: Any, change: Callable[[Any], Any]) -> None:
    assert ParquetScan.of(change(table)) is None


def test_partitioned_folders_and_options_are_sparks(spark: Any, tmp_path: Path) -> None:
    spark.range(10).selectExpr("id", "id % 2 as side").write.partitionBy("side").parquet(str(tmp_path / "sides"))
    assert ParquetScan.of(spark.read.parquet(str(tmp_path / "sides"))) is None
    spark.range(10).write.parquet(str(tmp_path / "plain"))
    assert ParquetScan.of(spark.read.parquet(str(tmp_path / "plain"))) is not None
    assert ParquetScan.of(spark.read.option("mergeSchema", "true").parquet(str(tmp_path / "plain"))) is None
    spark.range(10).write.json(str(tmp_path / "json"))
    assert ParquetScan.of(spark.read.json(str(tmp_path / "json"))) is None


def test_cached_rows_are_sparks(table: Any) -> None:
    chosen = table.select("id")
    chosen.cache()
    try:
        assert ParquetScan.of(chosen) is None
    finally:
        chosen.unpersist()


@pytest.mark.parametrize(
    ("columns", "fits"),
    [
        ({"x": pa.array([1, 2], pa.int32()), "y": pa.array(["a", "b"])}, True),
        ({"x": pa.array([1, 2], pa.int32()), "y": pa.array(["a", "b"], pa.large_string())}, True),
        ({"x": pa.array([1, 2], pa.int32()), "y": pa.array([b"a", b"b"])}, False),
        ({"x": pa.array([1, 2], pa.int16()), "y": pa.array(["a", "b"])}, False),
        ({"X": pa.array([1, 2], pa.int32()), "y": pa.array(["a", "b"])}, False),
        ({"y": pa.array(["a", "b"])}, False),
    ],
)
def test_a_file_unlike_the_dataframe_is_sparks(
    spark: Any, tmp_path: Path, columns: dict[str, pa.Array], fits: bool
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"x": pa.array([3], pa.int32()), "y": ["c"]}), tmp_path / "in" / "a.parquet")
    pq.write_table(pa.table(columns), tmp_path / "in" / "b.parquet")
    frame = spark.read.schema("x int, y string").parquet(str(tmp_path / "in"))
    assert (ParquetScan.of(frame) is not None) == fits


def test_nulls_are_reported_as_ever(spark: Any, tmp_path: Path) -> None:
    spark.createDataFrame([([1, None],), ([3],)], "tokens array<int>").write.parquet(str(tmp_path / "in"))
    frame = spark.read.parquet(str(tmp_path / "in"))
    assert ParquetScan.of(frame) is not None
    with pytest.raises(ValueError, match=r"tokens \(elements of arrays\).*1"):
        room.dataframe_to_mds(frame, mds_kwargs=plain(tmp_path / "out"))


def test_a_damaged_page_is_an_error_and_leaves_no_index(spark: Any, tmp_path: Path) -> None:
    place = tmp_path / "in"
    spark.range(0, 5000, 1, 1).selectExpr("id * 7919 % 10007 as x").write.option("compression", "none").parquet(
        str(place)
    )
    (file,) = place.glob("*.parquet")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(data)
    for checksum in place.glob(".*.crc"):
        checksum.unlink()
    frame = spark.read.schema("x long").parquet(str(place))
    logging.disable(logging.ERROR)
    try:
        with pytest.raises(Exception, match=r"cannot be read as Parquet"):
            room.dataframe_to_mds(frame, mds_kwargs=plain(tmp_path / "out"))
    finally:
        logging.disable(logging.NOTSET)
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_file_that_changed_is_an_error(spark: Any, tmp_path: Path) -> None:
    spark.range(0, 100, 1, 1).write.parquet(str(tmp_path / "in"))
    scan = ParquetScan.of(spark.read.parquet(str(tmp_path / "in")))
    assert scan is not None
    (file,) = (tmp_path / "in").glob("*.parquet")
    assert sum(batch.num_rows for batch in scan.read(0, 7)) == 100
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(Exception, match=r"has changed since"):
        list(scan.read(0, None))
