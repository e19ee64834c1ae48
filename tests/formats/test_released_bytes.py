"""Shards that a release wrote are read, and written again, byte for byte: every encoding, codec and row format."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("torch", reason="LocalDataset needs torch: uv sync")

from lightning_stream import LocalDataset
from lightning_stream.formats.encodings import encoding_names
from lightning_stream.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter

RELEASED = Path(__file__).parent / "released"
_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_PHOTO = bytes.fromhex(
    "ffd8ffe000104a46494600010100000100010000ffdb004300100b0c0e0c0a100e0d0e1211101318281a181616183123251d283a333d3c3933"
    "383740485c4e404457453738506d51575f626768673e4d71797064785c656763ffc0000b080001000101011100ffc40014000100000000000000"
    "000000000000000000ffc40014100100000000000000000000000000000000ffda0008010100003f0037ffd9"
)
_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c6378000000be00bd53eaa8b80000"
    "000049454e44ae426082"
)


def _encoded(row: int) -> dict[str, tuple[str, Any]]:
    """By column, its encoding and the value of a row."""
    floats = np.linspace(-1, row, 6, dtype=np.float32)
    image = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3) + row)
    values: dict[str, tuple[str, Any]] = {
        "bytes": ("bytes", b"\0" * row), "str": ("str", "grüße " * row), "int": ("int", row - 2**62),
        "str_int": ("str_int", -(10**30) * row), "str_float": ("str_float", row / 3),
        "str_decimal": ("str_decimal", Decimal(row) / 8), "json": ("json", {"a": [None, row, "ü"]}),
        "pkl": ("pkl", (row, "x")), "array": ("ndarray", np.arange(row * 2, dtype=np.int16).reshape(row, 2)),
        "wide": ("ndarray", np.zeros((300, 1), np.uint8)), "typed": ("ndarray:float32", floats[: row + 1]),
        "fixed": ("ndarray:float32:2,3", floats.reshape(2, 3)),
        "big": ("ndarray:int32", np.arange(row + 1, dtype=">i4")),
        "tensors": ("tensors", {"b": floats, "a": np.array(row)}),
        "video": ("video", b"\0\0\0\x14ftypmp42" + bytes(row)),
        "audio": ("audio", b"RIFF\0\0\0\0WAVE" + bytes(row)), "pil": ("pil", image), "jpeg": ("jpeg", _PHOTO),
        "png": ("png", _PNG), "photos": ("jpeg_array", [_PHOTO] * row), "photos2": ("jpegarray", [_PHOTO] * row),
        "pils": ("list[pil]", [image] * row), "jpegs": ("list[jpeg]", [_PHOTO] * row), "pngs": ("list[png]", [_PNG]),
    }  # fmt: skip
    limits = {name: np.finfo(name).max if "float" in name else np.iinfo(name).min + row for name in _NUMBERS}
    return values | {name: (name, np.dtype(name).type(limits[name])) for name in _NUMBERS}


def _row(row: int) -> dict[str, Any]:
    odd = (0.0, -0.0, 0.1, 1e300, 5e-324, math.nan, math.inf, -math.inf)
    return {"text": f'"ü" \\ {row}\u2028', "number": (-1) ** row * 2 ** (9 * row) - row, "part": odd[row]}


CODECS = ("br", "br:0", "bz2", "bz2:1", "gz", "gz:0", "snappy", "zstd", "zstd:19", "lz4")
ROWS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "json": (JSONWriter, {}), "csv": (CSVWriter, {}), "tsv": (TSVWriter, {}), "xsv": (XSVWriter, {"separator": " :: "}),
    "json_crlf": (JSONWriter, {"newline": "\r\n"}), "csv_zstd": (CSVWriter, {"compression": "zstd"}),
}  # fmt: skip
ROW_COLUMNS = {"text": "str", "number": "int", "part": "float"}


def write_all(root: Path) -> None:
    """Write every dataset of this file below a folder."""
    columns = {name: encoding for name, (encoding, _) in _encoded(0).items()}
    samples = [{name: value for name, (_, value) in _encoded(row).items()} for row in range(4)]
    with MDSWriter(out=root / "encodings", columns=columns, hashes=["xxh3_64", "sha1"], size_limit=6000) as writer:
        for sample in samples:
            writer.write(sample)
    for codec in CODECS:
        out = root / codec.replace(":", "_")
        with MDSWriter(out=out, columns={"n": "int", "t": "str"}, compression=codec) as writer:
            writer.write_batch({"n": np.arange(50), "t": [f"text {k % 7}" for k in range(50)]})
    for name, (kind, options) in ROWS.items():
        with kind(out=root / name, columns=ROW_COLUMNS, size_limit=200, **options) as writer:
            for row in range(7):
                writer.write(_row(row))


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, (list, tuple)):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    if isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(_same(value[name], wanted[name]) for name in wanted)
    if isinstance(wanted, bytes) and not isinstance(value, bytes):  # images and media; both photos are of one pixel
        return bytes(value) == wanted if hasattr(value, "data") else value.size == (1, 1)
    if isinstance(wanted, (np.ndarray, Image.Image)):
        found, wanted = np.asarray(value), np.asarray(wanted)
        return found.dtype == wanted.dtype.newbyteorder("=") and np.array_equal(found, wanted)
    return type(value) is type(wanted) and repr(value) == repr(wanted)


def test_every_encoding_is_read() -> None:
    stored = {encoding.partition(":")[0] for encoding, _ in _encoded(0).values()}
    assert stored == set(encoding_names())
    data = LocalDataset(RELEASED / "encodings", allow_unsafe_types=True)
    assert len(data) == 4
    for row in range(4):
        sample = data[row]
        for name, (_, value) in _encoded(row).items():
            assert _same(sample[name], value), (row, name)


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_is_read(codec: str) -> None:
    data = LocalDataset(RELEASED / codec.replace(":", "_"))
    assert [data[k] for k in range(len(data))] == [{"n": k, "t": f"text {k % 7}"} for k in range(50)]


@pytest.mark.parametrize("name", ROWS)
def test_values_of_rows_are_the_same_to_the_bit_and_of_plain_types(name: str) -> None:
    data = LocalDataset(RELEASED / name)
    for row in range(len(data)):
        sample, wanted = data[row], _row(row)
        assert list(sample) == sorted(wanted)
        assert all(_same(sample[column], value) for column, value in wanted.items()), (row, sample)


def test_writing_the_same_samples_gives_the_same_bytes(tmp_path: Path) -> None:
    write_all(tmp_path)
    released = {path.relative_to(RELEASED): path for path in RELEASED.rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()} == set(released)
    for name, path in released.items():
        if name.parts[0].partition("_")[0] not in ("br", "bz2", "gz", "zstd") and name.parts[0] != "csv_zstd":
            assert (tmp_path / name).read_bytes() == path.read_bytes(), name  # a codec's releases differ
