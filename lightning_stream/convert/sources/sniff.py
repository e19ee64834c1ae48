"""What the first bytes of a file say that it is."""

from __future__ import annotations


def image_encoding(data: bytes) -> str:
    """The encoding that keeps an image's bytes untouched: ``jpeg``, ``png``, else ``bytes``."""
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    return "png" if data.startswith(b"\x89PNG\r\n\x1a\n") else "bytes"
