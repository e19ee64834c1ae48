"""The lengths in an index: one number per sample, e.g. of tokens, in small files that readers get before any shard.

The key ``"lengths"`` of index.json has, by name, a list of files in the order of the shards. Each holds uint32 numbers
in little endian, one per sample. Readers that do not know the key ignore it, and it is no part of the index's digest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lightning_stream.errors import FormatError
from lightning_stream.formats.index.schema import Count, FileEntry, check_basename

_KEY = "lengths"
_REMEDY = "Replace them: lightning-stream convert PATH --lengths NAME --overwrite."


class CountedFile(msgspec.Struct, gc=False):
    """A file of numbers in the text of an index, and of how many samples they are."""

    basename: str
    bytes: Count
    hashes: dict[str, str]
    samples: Count


class _Top(msgspec.Struct, gc=False):
    lengths: dict[str, list[CountedFile]] = {}


def parse_lengths(data: bytes, num_samples: int, where: str) -> dict[str, tuple[FileEntry, ...]]:
    """Return the files of all lengths in the text of an index; FormatError unless they have a number per sample."""
    try:
        lengths = msgspec.json.decode(data, type=_Top).lengths
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: the lengths must list files by name; {error}. {_REMEDY}") from error
    found = {}
    for name, files in lengths.items():
        for file in files:
            check_basename(file.basename, where)
            if file.bytes != 4 * file.samples:
                raise FormatError(
                    f"{where}: lengths have 4 bytes per sample; {file.basename} of lengths {name!r} has {file.bytes:,} "
                    f"bytes for {file.samples:,} samples. {_REMEDY}"
                )
        if (total := sum(file.samples for file in files)) != num_samples:
            names = ", ".join(file.basename for file in files[:3]) or "no file"
            raise FormatError(
                f"{where}: lengths have one number per sample; lengths {name!r} ({names}) have {total:,} numbers for "
                f"{num_samples:,} samples. {_REMEDY}"
            )
        found[name] = tuple(FileEntry(file.basename, file.bytes, file.hashes) for file in files)
    return found


def with_lengths(index: bytes, lengths: Mapping[str, Sequence[FileEntry]]) -> bytes:
    """Return the text of an index with these lengths instead of its own. All other keys keep their bytes and order."""
    return with_keys(index, {_KEY: lengths_text(lengths) if lengths else None})


def with_keys(index: bytes, changed: Mapping[str, bytes | None]) -> bytes:
    """Return the text of an index with some keys replaced; None removes a key. Others keep their bytes and order."""
    top = msgspec.json.decode(index, type=dict[str, msgspec.Raw])
    if not any(text is not None or name in top for name, text in changed.items()):
        return index
    texts = {name: bytes(value) for name, value in top.items()}
    for name, text in changed.items():
        if text is None:
            texts.pop(name, None)
        else:
            texts[name] = text
    return b"{" + b", ".join(json.dumps(name).encode() + b": " + text for name, text in texts.items()) + b"}"


def lengths_text(lengths: Mapping[str, Sequence[FileEntry]]) -> bytes:
    """Return the value of the key ``"lengths"``."""
    listed = {name: [_file_object(file) for file in files] for name, files in lengths.items()}
    return json.dumps(listed, sort_keys=True).encode()


def deleted_text(file: FileEntry) -> bytes:
    """Return the value of the key ``"deleted"``."""
    return json.dumps({**_file_object(file), "samples": file.num_bytes // 8}, sort_keys=True).encode()


def _file_object(file: FileEntry) -> dict[str, Any]:
    about = {"basename": file.basename, "bytes": file.num_bytes, "hashes": dict(file.hashes)}
    return {**about, "samples": file.num_bytes // 4}


def length_file_stem(name: str) -> str:
    """Return how the names of the files of a length begin, e.g. ``lengths.tokens``; it differs for different names."""
    return "lengths." + re.sub(r"[^A-Za-z0-9_-]", lambda found: f"={ord(found[0]):x}=", name)
