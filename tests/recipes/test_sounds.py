"""Sounds: an encoding of the recipe's own, which decodes only what is heard; chords that are told apart."""

from __future__ import annotations

import io
import json
import pickle
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.recipes import chords, training
from lightning_stream.recipes.sound_classifier import SoundClassifier, Spectrogram
from lightning_stream.recipes.sounds import SoundData, SoundWindow, sound_data
from lightning_stream.recipes.wav import Recording

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def sounds(folder: Path, **settings: object) -> SoundData:
    places = {"remote": str(folder / "shards"), "local": str(folder / "cache")}
    return sound_data(**{"conversion_workers": 1, "num_workers": 0, "played_count": 40, **places, **settings})


def wav(numbers: np.ndarray, width: int, channels: int = 1) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((channels, width, 8000, 0, "NONE", "not compressed"))
        file.writeframes(numbers.tobytes())
    return out.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_numbers_of_any_width_are_the_same_sound(width: int) -> None:
    sound = np.array([-1, -0.5, 0, 0.25, 0.5], np.float64)
    whole = (sound * 2 ** (8 * width - 1)).astype(np.int64)
    if width == 1:
        whole += 128
    stored = whole.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
    heard = Recording(wav(stored, width)).moments()
    assert heard.dtype == np.float32
    np.testing.assert_array_equal(heard, sound[None].astype(np.float32))


def test_only_what_is_asked_for_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    stereo = np.arange(2000, dtype="<i2")
    recording = pickle.loads(pickle.dumps(Recording(wav(stereo, 2, channels=2))))
    assert (recording.num_moments, recording.rate) == (1000, 8000)
    read = []
    readframes = wave.Wave_read.readframes
    monkeypatch.setattr(wave.Wave_read, "readframes", lambda file, count: read.append(count) or readframes(file, count))
    part = recording.moments(100, 3)
    np.testing.assert_array_equal(part * 2**15, stereo.reshape(-1, 2)[100:103].T)
    assert recording.moments(998, 50).shape == (2, 2)
    assert read == [3, 50]


def test_what_is_no_wav_file_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "set"), columns={"sound": "wav"}) as writer:
        writer.write({"sound": Recording(chords.wav_file(np.zeros(10, np.float32)))})
        with pytest.raises(ValueError, match="a WAV file of plain numbers"):
            writer.write({"sound": b"ID3 this is another kind of file"})
        with pytest.raises(TypeError, match="takes the bytes of a WAV file"):
            writer.write({"sound": [1, 2]})


def test_the_same_part_is_heard_over_any_workers(tmp_path: Path) -> None:
    data = sounds(tmp_path)
    data.prepare_data()
    train = data.datasets["train"]
    assert train is not None
    heard = {
        workers: [batch["sound"] for batch in StreamingDataLoader(train, batch_size=8, num_workers=workers)]
        for workers in (0, 2)
    }
    assert heard[0][0].shape == (8, 8000)
    for one, other in zip(heard[0], heard[2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_short_sound_is_filled_up_with_silence() -> None:
    sample = {"sound": Recording(chords.wav_file(np.full(10, 0.5, np.float32))), "label": 1}
    heard = SoundWindow(16, random=False)(sample)["sound"]
    assert heard.shape == (16,)
    assert (heard[:10] > 0.49).all()
    assert (heard[10:] == 0).all()


def test_a_folder_of_wav_files_comes_out_byte_for_byte(tmp_path: Path) -> None:
    files = {}
    for label in ("bell", "horn"):
        (tmp_path / "files" / label).mkdir(parents=True)
        for number in range(15):
            data = chords.wav_file(chords.play("major", 3, number)[:2000])
            (tmp_path / "files" / label / f"{number}.wav").write_bytes(data)
            files[f"{label}/{number}.wav"] = data
    given = sounds(tmp_path, source=str(tmp_path / "files"), held_out=0.3)
    given.prepare_data()
    found = [one for split in ("train", "val") for one in StreamingDataset(remote=f"{given.place}/{split}")[:]]
    assert {one["name"]: bytes(one["sound"]) for one in found} == files
    assert {given.classes[one["label"]] for one in found if one["name"].startswith("bell")} == {"bell"}
    (tmp_path / "files" / "horn" / "3.wav").write_bytes(b"RIFF, cut short")
    with pytest.raises(FormatError, match=r"horn/3\.wav: a WAV file of plain numbers"):
        sounds(tmp_path, source=str(tmp_path / "files"), held_out=0.3).prepare_data()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"none in .*empty"):
        sounds(tmp_path, source=str(tmp_path / "empty")).prepare_data()


def test_loudness_tells_nothing_and_another_note_moves_the_picture() -> None:
    seconds = torch.arange(8000) / 8000
    low, high = (torch.sin(2 * torch.pi * pitch * seconds)[None] for pitch in (440.0, 880.0))
    spectrogram = Spectrogram(per_octave=12)
    one, other = spectrogram(low), spectrogram(high)
    torch.testing.assert_close(spectrogram(low * 0.3), one, rtol=1e-3, atol=1e-3)
    assert int(other.mean(3).argmax()) - int(one.mean(3).argmax()) == 12


def test_too_few_moments_for_a_spectrogram_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs 1024 moments and more; data\.moments is 500"):
        SoundClassifier().build(sounds(tmp_path, moments=500))


def test_train_py_tells_chords_apart(tmp_path: Path) -> None:
    chosen = [
        "data=sounds",
        "model=sound_classifier",
        "scale=cpu",
        "num_threads=1",
        "data.played_count=150",
        "data.held_out=0.2",
        "data.moments=3000",
        "data.num_workers=0",
        "data.conversion_workers=1",
        "data.global_batch_size=16",
        "model.width=16",
        "model.per_octave=24",
        "trainer.max_epochs=5",
        "~callbacks.progress",
        "trainer.enable_progress_bar=false",
        f"root={tmp_path}",
        "name=sounds",
    ]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("train", overrides=chosen)
    training.train(config)
    summary = json.loads((tmp_path / "sounds" / "summary.json").read_text())
    assert summary["history"]["4"]["val/accuracy"] > 0.35
    assert summary["history"]["4"]["val/loss"] < summary["history"]["0"]["val/loss"]
    assert Path(summary["places"]["picture"]).read_bytes().startswith(b"\x89PNG")
    assert any("not recordings" in note for note in summary["notes"])
