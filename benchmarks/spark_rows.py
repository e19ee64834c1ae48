"""DataFrames to MDS, beside mosaicml-streaming's dataframe_to_mds.

python benchmarks/spark_rows.py [--only tokens]      with pyspark and Java

The table comes from Parquet files, so that reading them is part of every time; a first conversion warms the workers up.
"bare Spark" reads the rows, hands them to Python and drops them there: no converter can be faster. Ours writes with its
usual digests, the peer has none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

from frame import Clock, Group, Job, Result, main

TABLES = {  # columns, and the rows of each thousand that --rows asks for
    "tokens": (["transform(sequence(1, 512), k -> cast(hash(id, k) % 50000 as int)) as tokens"], 160),
    "tokens as binary": (["cast(repeat(sha2(cast(id as string), 256), 32) as binary) as tokens"], 160),
    "numbers": (["id", *(f"rand({k}) as x{k}" for k in range(12))], 1000),
    "text": (["id", "repeat(sha2(cast(id as string), 256), 8) as text"], 200),
    "files": (["id", "cast(repeat(sha2(cast(id as string), 256), 500) as binary) as content"], 16),
}
Convert = Callable[..., Any]


def session() -> Any:
    from lightning_stream.spark import local_session

    spark = local_session("local[2]", conf={"spark.log.level": "OFF", "spark.ui.showConsoleProgress": "false"})
    spark.sparkContext.setLogLevel("OFF")
    return spark


def imported(module: str) -> Convert:
    return import_module(module).dataframe_to_mds


def bare_spark() -> Convert:
    def count(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        rows = sum(batch.num_rows for batch in batches)
        yield pa.RecordBatch.from_arrays([pa.array([rows])], names=["rows"])

    return lambda frame, **_: frame.mapInArrow(count, "rows long").collect()


def convert(find: Callable[[], Convert], name: str, job: Job) -> Result:
    expressions, share = TABLES[name]
    spark = session()
    converter = find()
    rows = job.sizes.rows * share // 1000
    source = job.folder / name.replace(" ", "_")
    out = job.scratch / "out"
    if not (source / "_SUCCESS").exists():
        spark.range(0, rows, 1, 4).selectExpr(*expressions).write.parquet(str(source))
    for _ in range(2):  # the first one is not measured
        shutil.rmtree(out, ignore_errors=True)
        frame = spark.read.parquet(str(source))
        clock = Clock()
        converter(frame, mds_kwargs={"out": str(out), "compression": None})
        result = clock.stop(rows)
    return result


if __name__ == "__main__":
    ours = partial(imported, "lightning_stream")
    mosaic = partial(imported, "streaming.base.converters")
    groups = []
    for name in TABLES:
        makers = {"ours": ours, "bare Spark": bare_spark, "mosaic": mosaic}
        groups.append(Group(name, {maker: partial(convert, find, name) for maker, find in makers.items()}))
    main(__doc__, groups, rows=(1_000_000, 2000))
