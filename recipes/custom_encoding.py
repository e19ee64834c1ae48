"""An encoding of your own: a column of WAV files, of which only the frames that you ask for are decoded.

    python -m recipes.custom_encoding

Importing this module registers it. A package does so in every process by an entry point ``lightning_stream.encodings``.
"""

import io
import tempfile
import wave
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream import MDSWriter, StreamingDataset
from lightning_stream.formats.encodings import register_encoding
from lightning_stream.formats.encodings.base import Encoding


class Clip:
    """A WAV file of 16-bit samples in memory; nothing is decoded until `frames` is called."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        try:
            with wave.open(io.BytesIO(data)) as file:
                self.num_frames, self.rate = file.getnframes(), file.getframerate()
                if file.getsampwidth() != 2:
                    raise wave.Error(f"{8 * file.getsampwidth()} bits")
        except (wave.Error, EOFError) as error:
            raise ValueError(f"the column holds WAV files of 16-bit samples; found {error}.") from error

    def frames(self, begin: int = 0, count: int | None = None) -> NDArray[np.float32]:
        """Decode float32[channels, count] in [-1, 1) from frame `begin`; fewer where the file ends, None for all."""
        with wave.open(io.BytesIO(self.data)) as file:
            file.setpos(min(begin, self.num_frames))
            samples = np.frombuffer(file.readframes(self.num_frames if count is None else count), "<i2")
            return (samples.astype(np.float32) / np.float32(2**15)).reshape(-1, file.getnchannels()).T


class WavEncoding(Encoding):
    """WAV files, stored byte for byte. A file that could not be decoded later is refused when it is written."""

    checks_bytes = True

    def encode(self, value: Any) -> bytes:
        return value.data if isinstance(value, Clip) else Clip(bytes(value)).data

    def decode(self, data: bytes | memoryview) -> Clip:
        return Clip(bytes(data))


register_encoding("wav", WavEncoding())


def tone(pitch_hz: float, num_frames: int = 8000, rate: int = 8000) -> bytes:
    """A sine wave as the bytes of a mono WAV file."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", "not compressed"))
        file.writeframes((np.sin(np.arange(num_frames) / rate * 2 * np.pi * pitch_hz) * 32000).astype("<i2").tobytes())
    return out.getvalue()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with MDSWriter(out=f"{folder}/set", columns={"sound": "wav", "pitch_hz": "int"}) as writer:
            for pitch_hz in (220, 440, 880):
                writer.write({"sound": tone(pitch_hz), "pitch_hz": pitch_hz})
        for sample in StreamingDataset(remote=f"{folder}/set", local=f"{folder}/cache"):
            clip, part = sample["sound"], sample["sound"].frames(begin=100, count=4)[0]
            print(f"{sample['pitch_hz']} Hz: {clip.num_frames} frames at {clip.rate} Hz; frames 100 to 103: {part}")
