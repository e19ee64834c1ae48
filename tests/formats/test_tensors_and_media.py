"""Encodings of ours beyond MDS: named tensors, video and audio."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lightning_stream.errors import MissingExtraError
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.index import Index
from lightning_stream.formats.media import Media
from lightning_stream.formats.shard import open_shard
from lightning_stream.formats.shard_base import DECODE_ERRORS
from lightning_stream.writer import MDSWriter

DTYPES = st.sampled_from(["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", ">i4", ">f8"]).map(
    np.dtype
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


@given(st.dictionaries(st.text(max_size=5).filter(lambda name: name != "__metadata__"), ARRAYS, max_size=4))
def test_any_named_tensors_come_back(value: dict[str, np.ndarray[Any, Any]]) -> None:
    back = get_encoding("tensors").decode(get_encoding("tensors").encode(value))
    assert set(back) == set(value)
    for name, array in value.items():
        assert (back[name].shape, back[name].dtype) == (array.shape, array.dtype.newbyteorder("<"))
        assert back[name].tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()
        assert back[name].flags.writeable


def test_named_tensors_are_a_safetensors_file() -> None:
    data = get_encoding("tensors").encode({"w": np.arange(3, dtype=np.float32), "b": np.zeros((), np.int64)})
    head_bytes = int.from_bytes(data[:8], "little")
    assert head_bytes % 8 == 0
    assert json.loads(data[8 : 8 + head_bytes]) == {
        "b": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
        "w": {"dtype": "F32", "shape": [3], "data_offsets": [8, 20]},
    }


def head_of(dtype: str, shape: list[int], span: list[int]) -> str:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": span}})


@pytest.mark.parametrize(
    "head",
    [
        "[]", "{", '{"w": {}}', '{"w": 3}', "[" * 50_000, head_of("BF16", [1], [0, 2]), head_of("U8", [9], [0, 9]),
        head_of("U8", [-1], [0, -1]), head_of("U8", [4], [-4, 0]), head_of("U8", [1 << 40, 1 << 40], [0, 4]),
    ],
)  # fmt: skip
def test_hostile_tensors_are_refused(head: str) -> None:
    for size in (len(head), 1 << 60):
        with pytest.raises(DECODE_ERRORS):
            get_encoding("tensors").decode(size.to_bytes(8, "little") + head.encode() + b"1234")


@pytest.mark.parametrize(
    "value", [[1], {"a": "text"}, {3: np.zeros(1)}, {"a": np.array(["x"])}, {"__metadata__": np.zeros(1)}]
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="tensors takes"):
        get_encoding("tensors").encode(value)


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_media_are_bytes_until_they_are_opened(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with MDSWriter(out=tmp_path / "out", columns={"m": kind}) as writer:
        writer.write({"m": b"RIFFxxxx"})
        writer.write({"m": Media(b"OggS")})
    shard = open_shard(Index.from_file(tmp_path / "out" / "index.json").entry(0), tmp_path / "out")
    one, two = shard.columns(np.array([0, 1]))["m"]
    assert (one, bytes(two), len(two)) == (Media(b"RIFFxxxx"), b"OggS", 4)
    assert pickle.loads(pickle.dumps(one)) == one
    assert {one, Media(b"RIFFxxxx")} == {one}
    with pytest.raises(TypeError, match=f"{kind} takes the bytes of a media file"):
        get_encoding(kind).encode("movie.mp4")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"lightning-stream\[media\]"):
        one.open()
