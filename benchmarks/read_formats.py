"""The same token rows (int32 x 1,024) in several formats, in place: one epoch from an empty cache, and opening.

python benchmarks/read_formats.py [--only open]

An epoch: each case has a new cache, so that every shard is copied or made once, and read once; "again" is rows per
CPU-second of a second epoch. LitData's chunks are written and read where LitData is.
Opening: seconds, requests and bytes until the samples are numbered, from an S3 server of this machine with 20 ms to the
first byte and 60 MB/s on a connection; "again" is with the index in the cache. There, all files are links to one.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import loaders
import numpy as np
from frame import Clock, Group, Job, Result, main
from paced_store import Pace

WIDTH = 1024
PER_SHARD = 2048
BATCH = 256
Writer = Callable[[Path, np.ndarray], None]


def parquet(path: Path, tokens: np.ndarray) -> None:
    import pyarrow.parquet as pq

    pq.write_table(_table(tokens), path, row_group_size=PER_SHARD, compression="zstd")


def arrow(path: Path, tokens: np.ndarray, streamed: bool = False) -> None:
    import pyarrow as pa

    table = _table(tokens)
    kind = pa.ipc.new_stream if streamed else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, kind(file, table.schema) as out:
        out.write_table(table, max_chunksize=1000 if streamed else PER_SHARD)  # streams: as `save_to_disk` writes them


def _table(tokens: np.ndarray) -> Any:
    import pyarrow as pa

    return pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens.reshape(-1)), WIDTH)})


def tar(path: Path, tokens: np.ndarray, rows_each: int = 1) -> None:
    """A member as .npy for so many rows each."""
    with tarfile.open(path, "w") as out:
        for first in range(0, len(tokens), rows_each):
            file = io.BytesIO()
            np.save(file, tokens[first : first + rows_each].reshape(-1))
            member = tarfile.TarInfo(f"{first:06}.npy")
            member.size = file.tell()
            file.seek(0)
            out.addfile(member, file)


def jsonl(path: Path, tokens: np.ndarray) -> None:
    path.write_text("".join(f'{{"tokens": {row.tolist()}}}\n' for row in tokens))


def image(path: Path, _: np.ndarray) -> None:
    path.write_bytes(b"\xff\xd8\xff" + bytes(100_000) + b"\xff\xd9")


READ: dict[str, Writer] = {"parquet": parquet, "arrow": arrow, "tar": tar, "npy": np.save, "jsonl": jsonl}
OPEN: dict[str, tuple[str, int, Writer]] = {  # format: ending, number of files, writer
    "parquet": ("parquet", 1000, parquet),
    "arrow-streams": ("arrow", 200, partial(arrow, streamed=True)),
    "tar-1MB": ("tar", 200, partial(tar, rows_each=256)),
    "tar-100KB": ("tar", 50, partial(tar, rows_each=25)),
    "tar-4KB": ("tar", 20, tar),
    "jsonl": ("jsonl", 8, jsonl),
    "numpy": ("npy", 1000, np.save),
    "images": ("jpg", 10_000, image),
}


def _tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 50_000, (rows, WIDTH), np.int32)


def prepare_epoch(job: Job) -> None:
    from lightning_stream import MDSWriter

    tokens = _tokens(job.sizes.rows)
    columns = {"tokens": f"ndarray:int32:{WIDTH}"}
    with MDSWriter(out=job.folder / "mds", columns=columns, size_limit=4 * PER_SHARD * WIDTH) as writer:
        writer.write_batch({"tokens": tokens})
    for name, write in READ.items():
        (job.folder / name).mkdir()
        rows = PER_SHARD if name == "tar" else 4 * PER_SHARD
        for k, first in enumerate(range(0, len(tokens), rows)):
            write(job.folder / name / f"{k:03}.{name}", tokens[first : first + rows])


def prepare_open(job: Job) -> None:
    tokens = _tokens(job.sizes.file_rows)
    for name, (ending, usual, write) in OPEN.items():
        folder = job.folder / name
        folder.mkdir()
        first = folder / f"00000.{ending}"
        write(first, tokens)
        for k in range(1, max(2, usual * job.sizes.files_percent // 100)):
            (folder / f"{k:05}.{ending}").hardlink_to(first)


def epoch(name: str, job: Job) -> Result:
    from lightning_stream import StreamingDataLoader, StreamingDataset

    clock = Clock()
    dataset = StreamingDataset(str(job.folder / name), local=job.scratch / "cache", shuffle=True)
    loader = StreamingDataLoader(dataset, BATCH)
    first = loaders.read(loader, clock=clock)
    return {**first, "again": loaders.read(loader)["per_cpu_s"]}


def epoch_litdata(read: Callable[[Job], Result], job: Job) -> Result:
    """An epoch of LitData's chunks of the same rows, in LitData's Python."""
    loaders.write_litdata(job, "mds", chunk_size=PER_SHARD)
    return read(job)


def litdata_itself(job: Job) -> Result:
    clock = Clock()
    return loaders.read(loaders.litdata(job, "mds", BATCH), clock=clock)


def opened(name: str, job: Job) -> Result:
    from lightning_stream import StreamingDataset

    remote = f"{loaders.BUCKET}/{name}"
    clock = Clock()
    result = clock.stop(StreamingDataset(remote, local=job.scratch / "cache").size)
    clock = Clock()
    assert StreamingDataset(remote, local=job.scratch / "cache").size == result["samples"]
    stored = sum(path.stat().st_size for path in (job.folder / name).iterdir())
    return {**result, "ready_s": result["wall_s"], "again_s": clock.wall_s, "stored MB": stored / 1e6}


if __name__ == "__main__":
    epochs: dict[str, Callable[[Job], Result]] = {f"ours, {name}": partial(epoch, name) for name in ("mds", *READ)}
    epochs["litdata, read by this package"] = partial(epoch_litdata, partial(epoch, "mds_litdata"))
    epochs["litdata, itself"] = partial(epoch_litdata, litdata_itself)
    opening = {f"ours, {name}": partial(opened, name) for name in OPEN}
    groups = [
        Group("an epoch from an empty cache", epochs, prepare_epoch),
        Group("open", opening, prepare_open, Pace(0.020, 60e6)),
    ]
    main(__doc__, groups, rows=(65_536, 4096), file_rows=(4096, 512), files_percent=(100, 1))
