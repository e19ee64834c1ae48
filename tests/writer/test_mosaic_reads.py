"""mosaicml-streaming itself reads what we write, where an environment that has it is named.

LIGHTNING_STREAM_MOSAIC_PYTHON=/path/to/python pytest tests/writer/test_mosaic_reads.py
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_stream.formats.encodings import get_encoding
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
    dataset = StreamingDataset(local=str(folder), batch_size=1, allow_unsafe_types=True)
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
    return [
        {
            "bytes": b"\0" * k, "str": "é" * k, "int": -k, "uint8": k, "float16": 0.5, "float64": k / 3,
            "str_int": 10**30, "str_float": k / 7, "str_decimal": Decimal("1.50"), "json": {"k": [k, None]},
            "pkl": (1, k), "pil": image, "png": image, "ndarray": np.arange(k + 1, dtype=">i4"),
            "ndarray:float32": np.ones((k + 1, 2), np.float32), "ndarray:int16:2,3": np.full((2, 3), k, np.int16),
            "list[pil]": [image] * k, "list[png]": [],
        }
        for k in range(count)
    ]  # fmt: skip


def test_mosaicml_streaming_reads_what_we_write(tmp_path: Path) -> None:
    python = os.environ.get("LIGHTNING_STREAM_MOSAIC_PYTHON")
    if not python:
        pytest.skip("LIGHTNING_STREAM_MOSAIC_PYTHON names no python that has mosaicml-streaming")
    wanted: dict[str, list[Any]] = {}
    rows = samples(12)
    columns = {name: name for name in rows[0]}
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
    result = subprocess.run([python, "-c", READER, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    read = json.loads(result.stdout.splitlines()[-1])
    expected = {
        name: [{key: plain(value) for key, value in row.items()} for row in rows] for name, rows in wanted.items()
    }
    assert read == json.loads(json.dumps(expected))
