"""Which URLs there are, and what a mistyped one may have meant."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from lightning_stream.errors import redact

_OURS = {
    **dict.fromkeys(("s3", "s3a", "s3n", "gs", "gcs", "azure", "az", "abfs", "abfss", "oci"), "://BUCKET/FOLDER"),
    **dict.fromkeys(("http", "https", "sftp", "ssh", "ftp", "smb"), "://HOST/FOLDER"),
    "hf": "://datasets/ORG/NAME",
    "file": ":///FOLDER",
    "dbfs": ":/Volumes/CATALOG/SCHEMA/VOLUME/FOLDER",
}
_KNOWN = (
    "s3://, gs://, azure:// (or abfss://), dbfs:/Volumes/, hf://datasets/, https://, sftp://, oci://, file://, a plain "
    "path, and what fsspec knows"
)
# What stands before a colon, or before two slashes where a colon was forgotten.
_MISTYPED = re.compile(r"([A-Za-z][A-Za-z0-9+]+)(?::/?(?!/)|//)")


def check_scheme(url: str) -> None:
    """See that a URL is one that some store has.

    Raises:
        ValueError: None has; the message lists what there is, and the nearest. A path that looks like a mistyped URL is
            refused too, where there is no such file.
    """
    scheme, colon, _ = url.partition("://")
    if colon and "/" not in scheme:
        if "::" in scheme or scheme.lower() in _OURS or scheme in _of_fsspec():
            return
        raise ValueError(f"no store is known for {scheme}://; known are {_KNOWN}.{_meant(scheme)} Got {redact(url)!r}.")
    found = _MISTYPED.match(url)
    if found is None or url.startswith("dbfs:/") or Path(url).exists():
        return
    if meant := _meant(found[1]):
        raise ValueError(f"this is no path of a file that exists, and no URL: {redact(url)!r}.{meant}")


def _meant(scheme: str) -> str:
    near = difflib.get_close_matches(scheme.lower(), _OURS, 1, 0.5)
    return f" Did you mean {near[0]}{_OURS[near[0]]}?" if near else ""


def _of_fsspec() -> list[str]:
    from .generic import protocols

    return protocols()
