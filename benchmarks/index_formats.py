"""What it costs to open datasets in other formats: seconds, requests and bytes until their samples are numbered.

    python benchmarks/index_formats.py [--only parquet tar] [--endpoint URL]

From an S3 server of this machine with 20 ms to the first byte and 60 MB/s on a connection, into an empty cache; or from
the server of --endpoint (with the usual AWS variables), where the bucket "formats" gets the files, and no request is
counted. Each format has some files, which are linked to many names: a dataset of gigabytes takes megabytes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
from paced_store import Pace, serve

LENGTH, ROWS = 1024, 4096  # a file of 16 MiB of tokens
TOKENS = np.random.default_rng(0).integers(0, 50_000, (ROWS, LENGTH)).astype(np.int32)


def parquet(path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table(), path, row_group_size=ROWS // 2, compression="zstd")


def arrow(path: Path) -> None:
    """As Hugging Face's ``save_to_disk`` writes: batches of 1,000 rows."""
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table().schema) as out:
        out.write_table(table(), max_chunksize=1000)


def table():
    import pyarrow as pa

    return pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(TOKENS.reshape(-1)), LENGTH)})


def tar(path: Path, member_bytes: int) -> None:
    with tarfile.open(path, "w") as out:
        for number in range(TOKENS.nbytes // member_bytes):
            for ending, data in (("bin", bytes(member_bytes)), ("cls", b"7")):
                member = tarfile.TarInfo(f"{number:06}.{ending}")
                member.size = len(data)
                out.addfile(member, io.BytesIO(data))


def jsonl(path: Path) -> None:
    path.write_text("".join(f'{{"tokens": {row.tolist()}}}\n' for row in TOKENS))


def litdata(path: Path) -> None:
    items = [np.uint32(row.nbytes).tobytes() + row.tobytes() for row in TOKENS]
    ends = np.cumsum([8 + 4 * ROWS, *map(len, items)]).astype("<u4")
    path.write_bytes(np.uint32(ROWS).tobytes() + ends.tobytes() + b"".join(items))


def image(path: Path) -> None:
    path.write_bytes(b"\xff\xd8\xff" + bytes(100_000) + b"\xff\xd9")


# The number of files, their ending, and what writes the file that all of them are.
FORMATS: dict[str, tuple[int, str, Callable[[Path], None]]] = {
    "parquet": (1000, "parquet", parquet),
    "arrow": (200, "arrow", arrow),
    "litdata": (1000, "bin", litdata),
    "tar of 1 MB": (200, "tar", lambda path: tar(path, 1_000_000)),
    "tar of 100 KB": (50, "tar", lambda path: tar(path, 100_000)),
    "tar of 4 KB": (20, "tar", lambda path: tar(path, 4_000)),
    "jsonl": (8, "jsonl", jsonl),
    "numpy": (1000, "npy", lambda path: np.save(path, TOKENS)),
    "images": (10_000, "jpg", image),
}


def prepare(folder: Path, name: str) -> None:
    count, ending, write = FORMATS[name]
    first = folder / f"00000.{ending}"
    folder.mkdir()
    write(first)
    for number in range(1, count):
        (folder / f"{number:05}.{ending}").hardlink_to(first)
    if name == "litdata":
        chunks = [{"chunk_size": ROWS, "filename": path.name} for path in sorted(folder.iterdir())]
        leaf = {"type": None, "context": None, "children_spec": []}
        spec = {"type": "builtins.dict", "context": '["tokens"]', "children_spec": [leaf]}
        config = {"compression": None, "data_format": ["no_header_numpy:2"], "data_spec": json.dumps([1, spec])}
        (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))


def measure(name: str, folder: Path, endpoint: str, counts: Callable[[], dict[str, int]]) -> str:
    from lightning_stream import Stream, StreamingDataset

    stored = sum(path.stat().st_size for path in folder.iterdir())
    options, remote = {"endpoint_url": endpoint}, f"s3://formats/{folder.name}"
    with tempfile.TemporaryDirectory() as cache:
        counts()
        begun, used = time.perf_counter(), time.process_time()
        size = StreamingDataset(streams=[Stream(remote, local=cache, options=options)]).size
        wall, cpu, asked = time.perf_counter() - begun, time.process_time() - used, counts()
        again = time.perf_counter()
        StreamingDataset(streams=[Stream(remote, local=cache, options=options)]).size  # noqa: B018 - it reads the index
        again = time.perf_counter() - again
    share = f"{100 * asked['bytes'] / stored:.3f} %" if asked else "?"
    files = f"{FORMATS[name][0]:,} | {stored / 1e9:.1f} GB | {size:,}"
    return f"| {name} | {files} | {wall:.1f} s | {cpu:.1f} s | {asked.get('gets', '?')} | {share} | {again:.1f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--endpoint")
    args = parser.parse_args()
    print("| format | files | bytes | rows | ready | CPU | requests | bytes read | again |\n" + "| --- " * 9 + "|")
    with tempfile.TemporaryDirectory() as data:
        for name in args.only:
            folder = Path(data, name.replace(" ", "_"))
            prepare(folder, name)
            if args.endpoint:
                upload(args.endpoint, folder)
                print(measure(name, folder, args.endpoint, dict), flush=True)
                continue
            with serve(Path(data), Pace(0.020, 60e6)) as endpoint:
                os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
                url = f"{endpoint}/_counts"
                print(
                    measure(name, folder, endpoint, lambda url=url: json.load(urllib.request.urlopen(url))), flush=True
                )
    sys.stdout.flush()


def upload(endpoint: str, folder: Path) -> None:
    from lightning_stream.stores import open_store
    from lightning_stream.threads import DaemonPool

    store = open_store(f"s3://formats/{folder.name}", {"endpoint_url": endpoint})
    with DaemonPool(8, "upload") as pool:
        for put in [pool.submit(store.put, path.name, path) for path in folder.iterdir()]:
            put.result()


if __name__ == "__main__":
    main()
