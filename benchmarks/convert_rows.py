"""Files of rows to MDS: `convert` in one and in two processes, and mosaicml-streaming's writer in a plain loop.

python benchmarks/convert_rows.py [--group tokens]

No compression, shards of 64 MB; `convert` with xxh3_64, the loop without digests. Reading the source is part of every
time; the loop gets columns as arrays from Arrow and writes row by row from there, as its users do it. The loop's Python
needs pyarrow too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from frame import Clock, Group, Job, Result, main

LIMIT = 1 << 26
COLUMNS = {
    "tokens": {"tokens": "ndarray:int32:1024"},
    "lines": {"k": "int64", "text": "str"},
}


def tokens(folder: Path, rows: int) -> None:
    """Parquet, fixed-size lists of 1,024 int32."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = pa.array(np.random.default_rng(0).integers(0, 50_000, rows * 1024, np.int32))
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, 1024)})
    pq.write_table(table, folder / "rows.parquet", row_group_size=4096, compression="none", use_dictionary=False)


def lines(folder: Path, rows: int) -> None:
    """JSON lines of text."""
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(3 * rows):
            file.write(json.dumps({"k": number, "text": "some words " * 40}) + "\n")


SOURCES: dict[str, Callable[[Path, int], None]] = {"tokens": tokens, "lines": lines}


def prepare(job: Job) -> None:
    for name, write in SOURCES.items():
        (job.folder / name).mkdir()
        write(job.folder / name, job.sizes.rows)


def ours(name: str, job: Job, processes: int) -> Result:
    from lightning_stream.convert import convert

    options = {"compression": None, "size_limit": LIMIT, "num_workers": processes}
    clock = Clock()
    return clock.stop(convert(job.folder / name, job.scratch / "out", **options).total)


def mosaic(name: str, job: Job) -> Result:
    from streaming import MDSWriter

    clock = Clock()
    count = 0
    with MDSWriter(out=str(job.scratch / "out"), columns=COLUMNS[name], size_limit=LIMIT) as writer:
        for sample in _samples(name, job.folder / name):
            writer.write(sample)
            count += 1
    return clock.stop(count)


def _samples(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    if name == "lines":
        with (folder / "rows.jsonl").open() as file:
            yield from map(json.loads, file)
    else:
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(folder / "rows.parquet").iter_batches(8192):
            for row in batch.column(0).flatten().to_numpy().reshape(-1, 1024):
                yield {"tokens": row}


if __name__ == "__main__":
    groups = []
    for name in SOURCES:
        cases = {
            "ours, 1 process": partial(ours, name, processes=1),
            "ours, 2 processes": partial(ours, name, processes=2),
            "mosaic": partial(mosaic, name),
        }
        groups.append(Group(name, cases, prepare))
    main(__doc__, groups, rows=(65_536, 640))
