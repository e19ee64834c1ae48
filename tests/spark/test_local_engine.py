"""The same rows by Spark and by the local engine."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.convert import convert
from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import open_shard


def samples_of(place: Path) -> list[dict[str, Any]]:
    index = Index.from_bytes((place / "index.json").read_bytes(), str(place))
    shards = [open_shard(index.entry(number), place) for number in range(len(index))]
    return [shard.sample(k) for shard in shards for k in range(shard.num_samples)]


def test_spark_and_convert_write_the_same_samples_of_one_parquet_folder(spark: Any, tmp_path: Path) -> None:
    from lightning_stream.spark import dataframe_to_mds

    when = dt.datetime(2024, 2, 29, 12, 30, 0, 250)
    rows = [
        (k, k / 3, k % 2 == 0, f"wört {k}", Decimal(k) / 4, bytes([k % 256]), when.date(), when, [k, k + 1], {"a": k},
         [[float(k)] * 2] * 3, (k, "x"))
        for k in range(300)
    ]  # fmt: skip
    schema = (
        "k long, x double, flag boolean, text string, price decimal(10,2), blob binary, day date, moment timestamp, "
        "tokens array<int>, counts map<string,int>, grid array<array<float>>, pair struct<n:int,s:string>"
    )
    spark.createDataFrame(rows, schema).coalesce(1).write.parquet(str(tmp_path / "in"))
    table = spark.read.parquet(str(tmp_path / "in"))

    dataframe_to_mds(table, mds_kwargs={"out": str(tmp_path / "spark"), "compression": None})
    convert(tmp_path / "in", tmp_path / "local", compression=None, num_workers=1)

    theirs, ours = samples_of(tmp_path / "spark"), samples_of(tmp_path / "local")
    assert len(theirs) == len(ours) == 300
    for by_spark, by_us in zip(theirs, ours, strict=True):
        assert by_spark.keys() == by_us.keys()
        for name, value in by_spark.items():
            assert type(value) is type(by_us[name]), name
            np.testing.assert_equal(by_us[name], value)
