"""Encodings of ours beyond MDS: named tensors, video and audio."""

from __future__ import annotations

import json
import pickle
import sys
import wave
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lightning_stream.errors import MissingExtraError
from lightning_stream.formats.encodings import get_encoding
from lightning_stream.formats.encodings.media import Media
from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import DECODE_ERRORS, open_shard
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


@given(st.dictionaries(st.text(max_size=5).filter(lambda name: name != "__metadata__"), ARRAYS, max_size=6))
def test_named_tensors_are_the_bytes_that_safetensors_writes_and_reads(value: dict[str, Any]) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="pip install safetensors")
    data = get_encoding("tensors").encode(value)
    assert data == safetensors.save({name: np.asarray(array, order="C") for name, array in value.items()})
    described = safetensors.save(value, metadata={"of": "others"}) if value else data
    for name, array in get_encoding("tensors").decode(described).items():
        np.testing.assert_array_equal(array, safetensors.load(described)[name])


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


def test_a_clip_is_decoded_frame_by_frame(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="pip install 'lightning-stream[media]'")
    frames = np.zeros((6, 32, 48, 3), np.uint8)
    for k in range(6):
        frames[k, :, 8 * k :] = 255
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=6)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    tone = (np.sin(np.arange(8000) / 20) * 20_000).astype(np.int16)
    sound = BytesIO()
    with wave.open(sound, "wb") as out:
        out.setparams((1, 2, 8000, 0, "NONE", ""))
        out.writeframes(tone.tobytes())
    with MDSWriter(out=tmp_path / "out", columns={"clip": "video", "sound": "audio"}) as writer:
        writer.write({"clip": file.getvalue(), "sound": sound.getvalue()})
    sample = open_shard(Index.from_file(tmp_path / "out" / "index.json").entry(0), tmp_path / "out").sample(0)
    with sample["clip"].open() as container:
        seen = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert seen.shape == frames.shape
    assert np.abs(seen.astype(int) - frames).mean() < 8  # mpeg4 is lossy
    with sample["sound"].open() as container:
        heard = np.concatenate([frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)])
    np.testing.assert_array_equal(heard, tone)
