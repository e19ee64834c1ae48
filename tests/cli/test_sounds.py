"""``show`` of sounds and videos: their lengths, from the headers."""

from __future__ import annotations

import io
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import MDSWriter
from lightning_stream.cli import main
from lightning_stream.formats.encodings.media import Media
from lightning_stream.media.facts import media_facts

Answer = Callable[..., tuple[int, Any]]


def wav(seconds: float, rate: int = 16_000, channels: int = 2) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(2 * channels * int(seconds * rate)))
    return out.getvalue()


def encoded(kind: str, codec: str, seconds: float = 1.5) -> bytes:
    av = pytest.importorskip("av", reason="sounds need PyAV: uv sync --extra media")
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=48_000)
        frames = np.zeros((1, int(48_000 * seconds)), np.int16)
        resampler = av.AudioResampler(stream.format, stream.layout, 48_000)
        frame = av.AudioFrame.from_ndarray(frames, "s16", "mono")
        frame.rate = 48_000
        packets = [packet for one in resampler.resample(frame) for packet in stream.encode(one)]
        file.mux([*packets, *stream.encode(None)])
    return out.getvalue()


def test_show_prints_the_length_of_sounds(tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    with MDSWriter(out=str(tmp_path / "data"), columns={"sound": "audio", "file": "bytes"}) as writer:
        for seconds in (0.5, 2.0):
            writer.write({"sound": wav(seconds), "file": wav(seconds, 44_100, 1)})
    data = str(tmp_path / "data")
    assert main(["show", data, "--ids", "1"]) == 0
    text = capsys.readouterr().out
    assert "2.0 s, 16 kHz, 2 channels, 128,044 bytes" in text
    assert "2.0 s, 44.1 kHz, 1 channel, 176,444 bytes" in text
    columns = answer("show", data, "--stats")[1]["datasets"][0]["stats"]
    assert (columns["sound"]["seconds"]["min"], columns["sound"]["seconds"]["max"]) == (0.5, 2.0)
    assert columns["file"]["sample_rate"]["mean"] == 44_100
    assert main(["show", data, "--page", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<audio ") == 4
    assert "<dt>sound</dt><dd>0.5 s, 16 kHz, 2 channels, 32,044 bytes</dd>" in page


@pytest.mark.parametrize(("kind", "codec"), [("flac", "flac"), ("ogg", "libopus"), ("mp3", "libmp3lame")])
def test_lengths_come_from_the_headers_of_every_kind(kind: str, codec: str) -> None:
    facts = media_facts(encoded(kind, codec))
    assert (facts["sample_rate"], facts["channels"]) == (48_000, 2)
    assert facts["seconds"] == pytest.approx(1.5, abs=0.1)


def test_a_video_has_a_length_and_a_size() -> None:
    av = pytest.importorskip("av", reason="videos need PyAV: uv sync --extra media")
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(20):
            image = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
            file.mux(stream.encode(image))
        file.mux(stream.encode(None))
    assert media_facts(Media(out.getvalue())) == {"seconds": 2.0, "width": 64, "height": 48}


@pytest.mark.parametrize(
    "data", [b"", b"RIFF", b"ID3", b"fLaC" + bytes(90), wav(1)[:30], b"RIFF\0\0\0\0WEBPVP8 ", "text", 3]
)
def test_other_values_have_no_length(data: Any) -> None:
    assert media_facts(data) == {}
    if isinstance(data, bytes):
        assert media_facts(Media(data)) == {}


def test_without_pyav_wav_files_have_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert media_facts(wav(0.25)) == {"seconds": 0.25, "sample_rate": 16_000, "channels": 2}
    assert media_facts(b"fLaC" + bytes(90)) == {}
    assert media_facts(wav(1)[:30]) == {}
