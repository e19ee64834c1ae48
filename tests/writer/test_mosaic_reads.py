"""mosaicml-streaming itself reads what we write, where an environment that has it is named.

LIGHTNING_STREAM_MOSAIC_PYTHON=/path/to/python pytest tests/writer/test_mosaic_reads.py
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightning_stream import versions
from lightning_stream.formats.codecs import COMPRESSIONS
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.hashing import FASTEST_FIRST
from lightning_stream.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter, merge_index

# Reads every dataset of a folder and says what each value is, in a way that both environments agree on.
READER = """
import hashlib, json, sys
from pathlib import Path
import numpy as np
from streaming import StreamingDataset

def plain(value):
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, np.generic):
        return [str(value.dtype), value.tobytes().hex()]
    if hasattr(value, "tobytes"):
        return [value.mode, list(value.size), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value if isinstance(value, (str, dict)) else repr(value)

result = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    where = {"local": str(folder)}
    if folder.name.startswith("hash-"):  # fetched, so that it is checked
        where = {"remote": str(folder), "local": f"{sys.argv[2]}/{folder.name}"}
        where["validate_hash"] = folder.name.split("-")[1]
    dataset = StreamingDataset(**where, batch_size=1, allow_unsafe_types=True)
    rows = [{name: plain(value) for name, value in dataset[i].items()} for i in range(len(dataset))]
    result[folder.name] = rows
print(json.dumps(result))
"""


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, np.generic):
        return [str(value.dtype), value.tobytes().hex()]
    if isinstance(value, Image.Image):
        return [value.mode, list(value.size), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value if isinstance(value, (str, dict)) else repr(value)


def samples(count: int) -> list[dict[str, Any]]:
    image = Image.effect_noise((9, 7), 50).convert("RGB")
    plain_image = Image.new("RGB", (16, 8), (90, 90, 90))  # every JPEG library decodes it to the same pixels
    jpeg = BytesIO()
    plain_image.save(jpeg, "jpeg")
    return [
        {
            "bytes": b"\0" * k, "str": "é" * k, "int": -k, "uint8": k, "float16": 0.5, "float64": k / 3,
            "str_int": 10**30, "str_float": k / 7, "str_decimal": Decimal("1.50"), "json": {"k": [k, None]},
            "pkl": (1, k), "pil": image, "png": image, "ndarray": np.arange(k + 1, dtype=">i4"),
            "ndarray:float32": np.ones((k + 1, 2), np.float32), "ndarray:int16:2,3": np.full((2, 3), k, np.int16),
            "list[pil]": [image] * k, "list[png]": [image] * (k % 2), "list[jpeg]": [plain_image] * k,
            "jpeg": plain_image, "jpeg_array": [jpeg.getvalue()] * (k + 1), "jpegarray": [jpeg.getvalue()],
            "uint16": 2**16 - k - 1, "uint32": 2**32 - k - 1, "uint64": 2**64 - k - 1, "int8": -k, "int16": -k,
            "int32": -k, "int64": -k, "float32": k / 3,
        }
        for k in range(count)
    ]  # fmt: skip


def read_by_mosaic(python: str, folder: Path, cache: Path) -> dict[str, list[Any]]:
    command = [python, "-W", "ignore", "-c", READER, str(folder), str(cache)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_mosaicml_streaming_reads_every_compression_and_checks_every_hash(mosaic_python: str, tmp_path: Path) -> None:
    rows = [{"id": k, "text": f"row {k}"} for k in range(40)]
    for compression in (*COMPRESSIONS, "zstd:seekable", "zstd:seekable:1"):
        name = compression.replace(":", "-")
        with MDSWriter(out=tmp_path / "in" / name, compression=compression, size_limit=500) as writer:
            for row in rows:
                writer.write(row)
    chosen: dict[str, list[str] | None] = {f"hash-{name}": [name] for name in FASTEST_FIRST}
    for name, hashes in {**chosen, "hash-xxh3_64-default": None}.items():
        with MDSWriter(out=tmp_path / "in" / name, compression="zstd", hashes=hashes) as writer:
            for row in rows:
                writer.write(row)
    read = read_by_mosaic(mosaic_python, tmp_path / "in", tmp_path / "cache")
    assert len(read) == 58 + 2 + 17 + 1
    expected = [{"id": repr(row["id"]), "text": row["text"]} for row in rows]
    assert [name for name, found in read.items() if found != expected] == []


def test_mosaicml_streaming_reads_what_we_write(mosaic_python: str, tmp_path: Path) -> None:
    wanted: dict[str, list[Any]] = {}
    rows = samples(12)
    columns = {name: name for name in rows[0]}
    families = {name.split(":")[0] for name in columns}
    names = (
        "from lightning_stream.formats.encodings import encoding_names; print(*encoding_names())"  # none of a test's
    )
    known = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True).stdout.split()
    assert families == set(known) - {"tensors", "video", "audio"}  # those are ours alone
    for compression in (None, "zstd:5", "br:3", "gz", "bz2:1", "snappy"):
        name = f"mds-{compression}".replace(":", "-")
        with MDSWriter(
            out=tmp_path / name, columns=columns, compression=compression, hashes=["xxh3_64", "sha1"], size_limit=3000
        ) as writer:
            for row in rows:
                writer.write(row)
        wanted[name] = [
            {key: get_encoding(key).decode(get_encoding(key).encode(value)) for key, value in row.items()}
            for row in rows
        ]
    table = {"id": np.arange(30), "text": [f"row {k}" for k in range(30)], "x": np.linspace(0, 1, 30)}
    row_columns = {"id": "int", "text": "str", "x": "float"}
    as_rows = [{"id": k, "text": f"row {k}", "x": float(table["x"][k])} for k in range(30)]
    for kind, options in ((JSONWriter, {}), (CSVWriter, {}), (TSVWriter, {}), (XSVWriter, {"separator": " | "})):
        with kind(
            out=tmp_path / kind.__name__, columns=row_columns, size_limit=300, compression="zstd", **options
        ) as rows_writer:
            rows_writer.write_batch(table)
        wanted[kind.__name__] = as_rows
    for part in ("a/part0", "a/part1"):
        with MDSWriter(out=tmp_path / "merged" / part, columns={"id": "int"}) as writer:
            writer.write_batch({"id": np.arange(5)})
    merge_index(tmp_path / "merged")
    wanted["merged"] = [{"id": k} for k in (*range(5), *range(5))]
    for append in (False, True):
        with MDSWriter(out=tmp_path / "appended", columns={"id": "int"}, append=append) as writer:
            writer.write_batch({"id": np.arange(5)})
    wanted["appended"] = wanted["merged"]
    read = read_by_mosaic(mosaic_python, tmp_path, tmp_path)
    expected = {
        name: [{key: plain(value) for key, value in row.items()} for row in rows] for name, rows in wanted.items()
    }
    assert read == json.loads(json.dumps(expected))


def test_mosaicml_streaming_reads_the_columns_that_a_dataset_was_written_with_and_added_ones_after_compact(
    mosaic_python: str, tmp_path: Path
) -> None:
    for name in ("added", "compacted"):
        with MDSWriter(out=tmp_path / "in" / name, columns={"id": "int"}, size_limit=300) as writer:
            writer.write_batch({"id": np.arange(60)})
        versions.add_column(tmp_path / "in" / name, "text", "str", lambda sample: f"row {sample['id']}")
    versions.compact(tmp_path / "in" / "compacted")
    read = read_by_mosaic(mosaic_python, tmp_path / "in", tmp_path / "cache")
    assert read["added"] == [{"id": repr(k)} for k in range(60)]
    assert read["compacted"] == [{"id": repr(k), "text": f"row {k}"} for k in range(60)]
