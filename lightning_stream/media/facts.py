"""What the headers of sounds and videos say."""

from __future__ import annotations

import wave
from contextlib import suppress
from io import BytesIO
from typing import Any

from lightning_stream.errors import MissingExtraError
from lightning_stream.formats.encodings.media import Media

# FLAC, Ogg, MP3 with and without tags, Matroska and WebM.
_STARTS = (b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"\x1aE\xdf\xa3")

_COVER = 1 << 10  # FFmpeg's flag of a picture that belongs to a sound


def media_facts(value: Any) -> dict[str, float]:
    """Return what the header of a sound or video says: ``seconds``, and ``sample_rate`` and ``channels``, or its size.

    Nothing is decoded. The result is empty for other values, and without PyAV, unless it is a WAV file.
    """
    data = value.data if isinstance(value, Media) else value
    if not isinstance(data, bytes) or not (isinstance(value, Media) or _begins_like_media(data)):
        return {}
    try:
        with Media(data).open() as file:
            sound, video = (next(iter(streams), None) for streams in (file.streams.audio, file.streams.video))
            seconds = (file.duration or 0) / 1_000_000
            if video is not None and (sound is None or not int(video.disposition) & _COVER):
                facts = {"width": video.width, "height": video.height}
            else:
                facts = {} if sound is None else {"sample_rate": sound.rate, "channels": sound.channels}
            return {"seconds": seconds, **facts} if seconds and facts else {}
    except MissingExtraError:
        with suppress(wave.Error, EOFError), wave.open(BytesIO(data)) as plain:
            seconds = plain.getnframes() / plain.getframerate()
            rate = plain.getframerate()
            return {"seconds": seconds, "sample_rate": rate, "channels": plain.getnchannels()}
    except (OSError, ValueError, EOFError, RuntimeError):  # PyAV's own errors are subclasses of these
        pass
    return {}


def _begins_like_media(data: bytes) -> bool:
    is_wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    return is_wav or data[4:8] == b"ftyp" or data.startswith(_STARTS)
