"""An encoding of your own: what is stored comes back byte for byte, and only what is asked for is decoded."""

from __future__ import annotations

import pickle
import wave
from pathlib import Path

import numpy as np
import pytest

from lightning_stream import LocalDataset, MDSWriter
from recipes.custom_encoding import Clip, tone


def test_only_the_frames_that_are_asked_for_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = pickle.loads(pickle.dumps(Clip(tone(440, num_frames=1000))))
    expected = (np.sin(np.arange(1000) / 8000 * 2 * np.pi * 440) * 32000).astype(np.int16) / np.float32(2**15)
    read = []
    readframes = wave.Wave_read.readframes
    monkeypatch.setattr(wave.Wave_read, "readframes", lambda file, count: read.append(count) or readframes(file, count))
    np.testing.assert_array_equal(clip.frames(100, 3), expected[None, 100:103])
    assert clip.frames(998, 50).shape == (1, 2)
    assert read == [3, 50]


def test_files_come_back_byte_for_byte_and_others_are_refused(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "set"), columns={"sound": "wav"}) as writer:
        writer.write({"sound": tone(220)})
        writer.write({"sound": Clip(tone(880))})
        with pytest.raises(ValueError, match="holds WAV files"):
            writer.write({"sound": b"ID3 this is another kind of file"})
    assert [sample["sound"].data for sample in LocalDataset(tmp_path / "set")] == [tone(220), tone(880)]
