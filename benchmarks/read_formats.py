"""The same token rows (int32 x 1,024) in several formats, read in place: one shuffled epoch with an empty cache.

    python benchmarks/read_formats.py [--rounds 3]

Each contender has a new cache, so every shard is copied or made once, and read once. "again" is a second epoch, from
the cache. The peers read the same files: LitData its chunks and the Parquet files, Hugging Face's `datasets`,
streaming, the Parquet files with a shuffle buffer of 10,000 rows (LIGHTNING_STREAM_HF_PYTHON).
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from side_by_side import PYTHONS, Clock, main

ROWS, LENGTH, PER_SHARD, BATCH = 65_536, 1024, 2048, 256
PYTHONS["hf"] = "LIGHTNING_STREAM_HF_PYTHON"
_LITDATA = """
import sys, numpy as np
from litdata.streaming import Cache
tokens = np.load(sys.argv[1])
writer = Cache(sys.argv[2], chunk_size={per})
for k, row in enumerate(tokens):
    writer[k] = {{"tokens": row}}
writer.done(); writer.merge()
"""


def prepare(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from lightning_stream import MDSWriter

    tokens = np.random.default_rng(0).integers(0, 50_000, (ROWS, LENGTH)).astype(np.int32)
    np.save(folder / "tokens.npy", tokens)
    column = pa.FixedSizeListArray.from_arrays(pa.array(tokens.reshape(-1)), LENGTH)
    table = pa.table({"tokens": column})
    for name in ("parquet", "arrow", "tar", "numpy"):
        (folder / name).mkdir()
    for number, first in enumerate(range(0, ROWS, 4 * PER_SHARD)):
        np.save(folder / "numpy" / f"{number:03}.npy", tokens[first : first + 4 * PER_SHARD])
        part = table.slice(first, 4 * PER_SHARD)
        pq.write_table(part, folder / "parquet" / f"{number:03}.parquet", row_group_size=PER_SHARD, compression="zstd")
        with (
            pa.OSFile(str(folder / "arrow" / f"{number:03}.arrow"), "wb") as file,
            pa.ipc.new_file(file, table.schema) as out,
        ):
            out.write_table(part, max_chunksize=PER_SHARD)
    for number, first in enumerate(range(0, ROWS, PER_SHARD)):
        with tarfile.open(folder / "tar" / f"{number:03}.tar", "w") as out:
            for k in range(first, first + PER_SHARD):
                data = io.BytesIO()
                np.save(data, tokens[k])
                member = tarfile.TarInfo(f"{k:06}.npy")
                member.size = data.tell()
                data.seek(0)
                out.addfile(member, data)
    with MDSWriter(
        out=folder / "mds", columns={"tokens": f"ndarray:int32:{LENGTH}"}, size_limit=PER_SHARD * LENGTH * 4
    ) as writer:
        writer.write_batch({"tokens": tokens})
    if python := os.environ.get(PYTHONS["litdata"]):
        command = [
            python,
            "-c",
            _LITDATA.format(per=PER_SHARD),
            str(folder / "tokens.npy"),
            str(folder / "litdata_chunks"),
        ]
        subprocess.run(command, check=True, capture_output=True)


def in_place(name: str) -> Callable[[Path], dict]:
    def contender(folder: Path) -> dict:
        from lightning_stream import StreamingDataLoader, StreamingDataset

        with tempfile.TemporaryDirectory() as cache:
            clock = Clock()
            dataset = StreamingDataset(str(folder / name), local=cache, shuffle=True)
            loader, column = (
                StreamingDataLoader(dataset, batch_size=BATCH),
                {"tar": "npy", "numpy": "array"}.get(name, "tokens"),
            )
            first = clock.stop(sum(len(batch[column]) for batch in loader))
            clock = Clock()
            again = clock.stop(sum(len(batch[column]) for batch in loader))
        return {**first, "again": round(again["samples"] / again["cpu"])}

    return contender


def litdata_reads(name: str) -> Callable[[Path], dict]:
    def contender(folder: Path) -> dict:
        import litdata

        options = {}
        if name == "parquet":
            litdata.index_parquet_dataset(str(folder / name))
            options["item_loader"] = litdata.streaming.item_loader.ParquetLoader()
        with tempfile.TemporaryDirectory() as cache:
            clock = Clock()
            dataset = litdata.StreamingDataset(
                str(folder / name), cache_dir=cache, shuffle=True, drop_last=False, **options
            )
            loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH)
            return clock.stop(
                sum(_num_rows(batch["tokens"] if isinstance(batch, dict) else batch[0]) for batch in loader)
            )

    return contender


def _num_rows(tokens: object) -> int:
    return len(tokens[0]) if isinstance(tokens, list) else len(tokens)  # lists are collated as one tensor per position


def hf(folder: Path) -> dict:
    import datasets
    from torch.utils.data import DataLoader

    clock = Clock()
    files = sorted(map(str, (folder / "parquet").glob("*.parquet")))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    loader = DataLoader(rows.shuffle(seed=0, buffer_size=10_000).with_format("torch"), batch_size=BATCH)
    return clock.stop(sum(_num_rows(batch["tokens"]) for batch in loader))


if __name__ == "__main__":
    ours = {f"ours, {name}": in_place(name) for name in ("mds", "parquet", "arrow", "tar", "numpy")}
    peers = {f"litdata, {name}": litdata_reads(name) for name in ("litdata_chunks", "parquet")}
    main(__file__, {**ours, "ours, litdata": in_place("litdata_chunks"), **peers, "hf": hf}, prepare)
