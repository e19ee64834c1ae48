"""An encoding of a recipe's own: a column ``wav`` holds sound files, and decodes only the moments that are asked for.

It is an example of how any kind of file is streamed: `encode` looks at what is written, `decode` gives a value that
knows how to read the bytes, and `register_encoding` gives it a name, here as this module is imported. Columns of
other packages' encodings are found by an entry point of the group ``lightning_stream.encodings`` instead.
"""

from __future__ import annotations

import wave
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.encodings import encoding_names, register_encoding
from lightning_stream.formats.encodings.base import Encoding, type_name

WAV = "wav"


class Recording:
    """A WAV file in memory, of which nothing is decoded until it is asked for. Picklable.

    Attributes:
        data: The file's bytes.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def num_moments(self) -> int:
        """How many there are, of each channel."""
        with self._open() as file:
            return file.getnframes()

    @property
    def rate(self) -> int:
        """Moments per second."""
        with self._open() as file:
            return file.getframerate()

    def moments(self, begin: int = 0, count: int | None = None) -> NDArray[np.float32]:
        """Some of the sound, float32[channels, count] in [-1, 1]; only this part of the file is decoded.

        Args:
            begin: The first moment.
            count: How many; None for all that come after. Fewer are given where the file ends.
        """
        with self._open() as file:
            file.setpos(min(begin, file.getnframes()))
            data = file.readframes(file.getnframes() if count is None else count)
            numbers = _numbers(data, file.getsampwidth())
            sound: NDArray[np.float32] = numbers.reshape(-1, file.getnchannels()).T
            return sound

    def checked(self) -> Recording:
        """This recording, once its head was read.

        Raises:
            ValueError: It is no WAV file of plain numbers.
        """
        with self._open():
            return self

    def _open(self) -> wave.Wave_read:
        try:
            return wave.Wave_read(BytesIO(self.data))
        except (wave.Error, EOFError) as error:
            raise ValueError(f"a WAV file of plain numbers (PCM) is needed; found another: {error}.") from error

    def __bytes__(self) -> bytes:
        return self.data

    def __repr__(self) -> str:
        return f"Recording({len(self.data)} bytes)"


def _numbers(data: bytes, width: int) -> NDArray[np.float32]:
    """Numbers of 1 to 4 bytes as float32 in [-1, 1]."""
    parts = np.frombuffer(data, np.uint8).reshape(-1, width)
    whole = np.zeros((len(parts), 4), np.uint8)
    whole[:, 4 - width :] = parts  # little-endian: the bytes that count most come last
    if width == 1:  # the only width without a sign
        whole ^= np.array([0, 0, 0, 128], np.uint8)
    numbers: NDArray[np.float32] = whole.view("<i4")[:, 0].astype(np.float32) / np.float32(2**31)
    return numbers


class WavEncoding(Encoding):
    """WAV files as they are, byte for byte."""

    checks_bytes = True

    def encode(self, value: Any) -> bytes:
        """The file's bytes, once its head was looked at: what cannot be read is refused before it is written."""
        if not isinstance(value, (bytes, Recording)):
            raise TypeError(f"{WAV} takes the bytes of a WAV file, or a Recording; got {type_name(value)}.")
        return bytes(Recording(bytes(value)).checked())

    def decode(self, data: bytes | memoryview) -> Recording:
        """The recording, of which nothing is read yet."""
        return Recording(bytes(data))


if WAV not in encoding_names():
    register_encoding(WAV, WavEncoding())
