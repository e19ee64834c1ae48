"""Video and audio, stored as the file's bytes and decoded on request, by PyAV."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from typing import Any

from lightning_stream.errors import needs

from .base import Stored, ViewEncoding, describe


@dataclass(frozen=True, slots=True, repr=False)
class Media:
    """The `data` of a video or audio file. It can be pickled; two are equal if their bytes are."""

    data: bytes

    def open(self) -> Any:
        """Open the file by PyAV: ``with media.open() as container: for frame in container.decode(video=0)``."""
        with needs("av", "media", "decoding video and audio"):
            av = import_module("av")
        return av.open(BytesIO(self.data))

    def __bytes__(self) -> bytes:
        return self.data

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"Media({len(self.data)} bytes)"


class _MediaFile(ViewEncoding):
    def encode(self, value: Any) -> bytes:
        if isinstance(value, (bytes, bytearray, memoryview, Media)):
            return bytes(value)
        raise TypeError(f"{self.name} takes the bytes of a media file, or Media; got {describe(value)}.")

    def decode(self, data: Stored) -> Media:
        return Media(bytes(data))


ENCODINGS = {"video": _MediaFile, "audio": _MediaFile}
