"""Fetching one public file: with a progress bar, checked, whole or absent."""

from __future__ import annotations

import hashlib
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

from lightning_stream.errors import DigestError, UnavailableError
from lightning_stream.shared_files import FileLock, publish

FLOWERS_URL = "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz"
# As listed for this archive (228,813,984 bytes) by TensorFlow Datasets, url_checksums/tf_flowers.txt.
FLOWERS_SHA256 = "4c54ace7911aaffe13a365c34f650e71dd5bf1be0a58b464e5a7183e3e595d9c"
_CHUNK_BYTES = 1 << 18
_SILENCE_S = 30.0
_WAIT_S = 3600.0


def fetch_file(url: str, path: Path, sha256: str) -> Path:
    """Fetch a file once; processes that ask at the same time wait for the one that does.

    Raises:
        UnavailableError: It cannot be reached, or the connection broke.
        DigestError: What came is not what was expected; nothing is kept.
    """
    with FileLock(path.with_name(f".{path.name}.lock"), _WAIT_S):
        if not path.exists():
            draft = path.with_name(f".{path.name}.part")
            try:
                found = _fetch(url, draft)
                if found != sha256.lower():
                    raise DigestError(
                        f"{url} must have the sha256 {sha256}; what came has {found}. Try again; if the publisher "
                        "changed the file, set data.photos_sha256 to its new digest."
                    )
                publish(draft, path)
            finally:
                draft.unlink(missing_ok=True)
    return path


def _fetch(url: str, draft: Path) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_SILENCE_S) as response, draft.open("wb") as file:
            return _copy(response, file, int(response.headers.get("Content-Length") or 0))
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise UnavailableError(
            f"data.photos=download needs the internet, and {url} could not be fetched: {reason}. Fetch it elsewhere "
            "and pass data.photos=<path of the .tgz>, or use the drawings, which need no network: data.photos=drawn"
        ) from error


def _copy(response: Any, file: IO[bytes], num_bytes: int) -> str:
    from tqdm import tqdm  # type: ignore[import-untyped]

    total = hashlib.sha256()
    bar = tqdm(desc="fetching photos", total=num_bytes or None, unit="B", unit_scale=True, file=sys.stderr)
    with bar:
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            total.update(chunk)
            bar.update(len(chunk))
    if num_bytes and file.tell() != num_bytes:
        raise ConnectionError(f"the connection ended after {file.tell()} of {num_bytes} bytes")
    return total.hexdigest()
