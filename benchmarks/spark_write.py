"""Rows per second from Spark to MDS, beside mosaicml-streaming's dataframe_to_mds, in one session over one table.

    python benchmarks/spark_write.py [--rounds 5] [--scale 1.0] [--compression zstd]

Run it where both are installed: pip install "mosaicml-streaming[spark]==0.13.0" "filelock<3.16" "transformers<5"
"numpy<2.2", and this package. Rounds alternate; the ratio is the median of each round's own. The table comes from
Parquet files, so reading them is part of every time; a first conversion by each warms Python's workers up.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from lightning_stream.spark import dataframe_to_mds, local_session

TABLES = {
    "tokens": ("transform(sequence(1, 512), k -> cast(hash(id, k) % 50000 as int)) as tokens", 40_000),
    "ragged tokens": ("transform(sequence(1, 256 + int(id % 512)), k -> cast(hash(id, k) as int)) as tokens", 40_000),
    "numbers": (", ".join(["id", *(f"rand({k}) as x{k}" for k in range(12))]), 400_000),
    "text": ("id, repeat(sha2(cast(id as string), 256), 8) as text", 200_000),
    "files": ("id, cast(repeat(sha2(cast(id as string), 256), 500) as binary) as content", 8_000),
}


def theirs():
    try:
        from streaming.base.converters import dataframe_to_mds as convert
    except ImportError:
        return None
    logging.disable(logging.WARNING)
    return convert


def only_spark(table, **_):
    """What Spark itself takes to read the rows and hand them to Python: no converter can be faster."""

    def count(batches):
        import pyarrow as pa

        rows = sum(batch.num_rows for batch in batches)
        yield pa.RecordBatch.from_arrays([pa.array([rows])], names=["rows"])

    table.mapInArrow(count, "rows long").collect()


def seconds(convert, table, place, compression):
    shutil.rmtree(place, ignore_errors=True)
    begin = time.perf_counter()
    convert(table, mds_kwargs={"out": str(place), "compression": compression})
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--compression", default=None)
    parser.add_argument("--only", choices=sorted(TABLES))
    options = parser.parse_args()
    session = local_session("local[2]", conf={"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"})
    session.sparkContext.setLogLevel("OFF")
    makers = {"ours": dataframe_to_mds, "theirs": theirs(), "spark": only_spark}
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'table':14} {'rows':>8} {'ours rows/s':>12} {'theirs':>9} {'ratio':>6} {'spark alone':>12}  (rounds)")
        for name, (expressions, count) in TABLES.items():
            if options.only not in (None, name):
                continue
            rows = int(count * options.scale)
            source = Path(folder) / name
            session.range(0, rows, 1, 4).selectExpr(*split(expressions)).write.parquet(str(source))
            table = session.read.parquet(str(source))
            times = {maker: [] for maker in makers}
            for k in range(options.rounds + 1):
                for maker, convert in makers.items():
                    if convert is not None:
                        taken = seconds(convert, table, Path(folder) / maker, options.compression)
                        times[maker] += [taken] if k else []
            report(name, rows, times)


def split(expressions):
    """At the commas that are outside of brackets."""
    parts, depth = [""], 0
    for letter in expressions:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def report(name, rows, times):
    ours = rows / statistics.median(times["ours"])
    if not times["theirs"]:
        print(f"{name:14} {rows:>8,} {ours:>12,.0f}  mosaicml-streaming is not installed")
        return
    ratios = [b / a for a, b in zip(times["ours"], times["theirs"], strict=True)]
    alone = rows / statistics.median(times["spark"])
    told = " ".join(f"{ratio:.1f}" for ratio in ratios)
    median = statistics.median(ratios)
    print(
        f"{name:14} {rows:>8,} {ours:>12,.0f} {rows / statistics.median(times['theirs']):>9,.0f}"
        f" {median:>6.1f} {alone:>12,.0f}  {told}"
    )


if __name__ == "__main__":
    main()
