"""Files of rows to MDS: `convert` in one and in two processes, and mosaicml-streaming's writer in a plain loop.

    python benchmarks/convert_rows.py tokens|numbers|photos|lines [--rounds 3]

tokens: Parquet, fixed-size lists of 1,024 int32. numbers: Parquet, 12 columns of numbers. photos: a folder of JPEG
files (random bytes of 100 kB). lines: JSON lines of text. No compression, shards of 64 MB; `convert` with xxh3_64, the
loop without digests. Reading the source is part of every time; the loop gets columns as arrays from Arrow, and goes on
row by row from there, as its users write it. The loop's Python needs pyarrow too.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
from side_by_side import Clock, main

LIMIT = 1 << 26
COUNT = {"tokens": 65_536, "numbers": 1_000_000, "photos": 2_000, "lines": 200_000}
if len(sys.argv) > 1 and sys.argv[1] in COUNT:
    os.environ["CONVERT_ROWS"] = sys.argv.pop(1)  # for the contenders' processes too
WHAT = os.environ.get("CONVERT_ROWS", "tokens")
COLUMNS = {
    "tokens": {"tokens": "ndarray:int32:1024"},
    "numbers": {f"x{k}": "float64" for k in range(12)},
    "photos": {"image": "jpeg", "label": "int", "name": "str"},
    "lines": {"k": "int64", "text": "str"},
}


def prepare(folder: Path) -> None:
    source = folder / f"source-{WHAT}"
    if source.exists():
        return
    source.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = COUNT[WHAT]
    if WHAT == "photos":
        for k in range(rows):
            path = source / f"class{k % 10}" / f"{k:05}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"\xff\xd8\xff" + rng.bytes(100_000) + b"\xff\xd9")
        return
    if WHAT == "lines":
        with (source / "rows.jsonl").open("w") as file:
            file.writelines(json.dumps({"k": k, "text": "some words " * 40}) + "\n" for k in range(rows))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    if WHAT == "tokens":
        flat = pa.array(rng.integers(0, 50_000, rows * 1024, np.int32))
        table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, 1024)})
    else:
        table = pa.table({f"x{k}": rng.random(rows) for k in range(12)})
    pq.write_table(table, source / "rows.parquet", row_group_size=rows // 16, compression="none", use_dictionary=False)


def ours(folder: Path, processes: int) -> dict:
    from lightning_stream.convert import convert

    shutil.rmtree(folder / "out", ignore_errors=True)
    clock = Clock()
    done = convert(folder / f"source-{WHAT}", folder / "out", compression=None, size_limit=LIMIT, num_workers=processes)
    return clock.stop(done.total)


def mosaic(folder: Path) -> dict:
    from streaming import MDSWriter

    shutil.rmtree(folder / "out", ignore_errors=True)
    clock = Clock()
    count = 0
    with MDSWriter(out=str(folder / "out"), columns=COLUMNS[WHAT], size_limit=LIMIT) as writer:
        for sample in samples(folder / f"source-{WHAT}"):
            writer.write(sample)
            count += 1
    return clock.stop(count)


def samples(source: Path):
    if WHAT == "photos":
        for path in sorted(source.rglob("*.jpg")):
            yield {"image": path.read_bytes(), "label": int(path.parent.name[5:]), "name": path.name}
        return
    if WHAT == "lines":
        with (source / "rows.jsonl").open() as file:
            yield from map(json.loads, file)
        return
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(source / "rows.parquet").iter_batches(8192):
        if WHAT == "tokens":
            for row in batch.column(0).flatten().to_numpy().reshape(-1, 1024):
                yield {"tokens": row}
            continue
        columns = [column.to_numpy() for column in batch.columns]
        for values in zip(*columns, strict=True):
            yield dict(zip(batch.schema.names, values, strict=True))


if __name__ == "__main__":
    main(
        __file__,
        {"ours, 1 process": lambda f: ours(f, 1), "ours, 2 processes": lambda f: ours(f, 2), "mosaic": mosaic},
        prepare,
    )
