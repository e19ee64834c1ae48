"""Rows per second from Spark to MDS, beside mosaicml-streaming's dataframe_to_mds, in one session over one table.

    python benchmarks/spark_write.py [--rounds 5] [--scale 1.0] [--compression zstd] [--only "tokens, binary"]

Run it where both are installed: pip install "mosaicml-streaming[spark]==0.13.0" "filelock<3.16" "transformers<5"
"numpy<2.2", and this package. Rounds alternate; a ratio is the median of each round's own: of seconds, and of
CPU-seconds of Java and of Python's workers together. The table comes from Parquet files, so reading them is part of
every time; a first conversion by each warms Python's workers up. "Spark alone" reads the rows, hands them to Python,
and drops them there: the last column is the ratio that a converter would have that did its own work in no time at all.
Ours writes with its default digests, theirs has none.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from lightning_stream.spark import dataframe_to_mds, local_session

TOKENS = "transform(sequence(1, 512), k -> cast(hash(id, k) % 50000 as int))"
TABLES = {
    "tokens": (f"{TOKENS} as tokens", 160_000),
    "tokens, binary": ("cast(repeat(sha2(cast(id as string), 256), 32) as binary) as tokens", 160_000),
    "ragged tokens": ("transform(sequence(1, 256 + int(id % 512)), k -> cast(hash(id, k) as int)) as tokens", 80_000),
    "numbers": (", ".join(["id", *(f"rand({k}) as x{k}" for k in range(12))]), 1_000_000),
    "text": ("id, repeat(sha2(cast(id as string), 256), 8) as text", 200_000),
    "files": ("id, cast(repeat(sha2(cast(id as string), 256), 500) as binary) as content", 16_000),
}


HEADS = (("ours", 9), ("theirs", 9), ("Spark alone", 13), ("", 7), ("ours", 11), ("theirs", 9), ("Spark alone", 13))


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
    """Of the clock, and of all processors."""
    shutil.rmtree(place, ignore_errors=True)
    begin, used = time.perf_counter(), cpu_seconds()
    convert(table, mds_kwargs={"out": str(place), "compression": compression})
    return time.perf_counter() - begin, cpu_seconds() - used


def cpu_seconds():
    """What this process used and all that came of it: Java, and Python's workers."""
    parents, used = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(stat[1])
        used[int(folder.name)] = sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    ours = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= found
    return sum(used[pid] for pid in ours)


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
        print(f"{'':15}{'rows per s':>31}{'ratio':>7}{'rows per CPU-s':>33}{'ratio':>7}{'at most':>9}")
        print(f"{'table':15}" + "".join(f"{head:>{n}}" for head, n in HEADS))
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
    line = [f"{name:15}"]
    if not times["theirs"]:
        print(
            name,
            *(
                f"{maker}: {rows / statistics.median(t[0] for t in taken):,.0f}/s"
                for maker, taken in times.items()
                if taken
            ),
        )
        return
    for k, room in ((0, 9), (1, 11)):
        taken = {maker: [both[k] for both in times[maker]] for maker in times}
        speed = {maker: f"{rows / statistics.median(taken[maker]):,.0f}" for maker in taken}
        line.append(f"{speed['ours']:>{room}}{speed['theirs']:>9}{speed['spark']:>13}")
        line.append(f"{statistics.median(map(ratio, taken['ours'], taken['theirs'])):7.1f}")
    line.append(f"{statistics.median(map(ratio, taken['spark'], taken['theirs'])):9.1f}")
    print("".join(line), flush=True)


def ratio(ours, theirs):
    return theirs / ours


if __name__ == "__main__":
    main()
