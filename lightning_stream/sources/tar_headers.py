"""Where the files of a tar lie, from its headers, without a Python object for each.

Plain headers are walked by their sizes. Any header that is not plain (folders, long names, pax records that change a
file, base-256 sizes, links) is read by `tarfile`. The layout:
https://www.gnu.org/software/tar/manual/html_node/Standard.html.
"""

from __future__ import annotations

import io
import re
import struct
import tarfile
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lightning_stream.errors import FormatError
from lightning_stream.formats.memory import Int64s
from lightning_stream.sources.files import rows_at

BLOCK = 512
_HEADER = struct.Struct("124x12s20xB188xB")  # the size, the type, and the first byte of a prefix of the name
_PLAIN = b"0"[0]
_PAX = b"x"[0]
_CHANGES = re.compile(rb"path=|size=|sparse|hdrcharset")  # pax records that change how a file is read
_OCTAL = re.compile(rb" *([0-7]{1,12})[ \0]*")
# Of the headers of one file
_FEW_BYTES = 1 << 14
_MOST_BYTES = 1 << 20
_CHECKED = 1024  # headers at once: 512 KiB
_ALIKE = 16  # files of one size: more of them may follow, as of token rows
_PLAIN_FIELDS = [*range(124, 136), 156, 345]  # what `_HEADER` has


class Members(NamedTuple):
    """The regular files of a part of a tar, int64[n] each, and the names of those that are not plain, by number.

    ``starts``: where the first header of each file begins. ``headers``: its last one. ``sizes``: its bytes.
    """

    starts: Int64s
    headers: Int64s
    sizes: Int64s
    odd: dict[int, str]


class Walk(NamedTuple):
    """The files of a part of a tar, where the next header begins, and whether the tar's end mark is there."""

    members: Members
    next: int
    is_end: bool


def walk(data: memoryview, where: str, *, is_whole: bool, checked: bool) -> Walk:
    """Find the files of a tar, from the header at the beginning of ``data`` on, up to the end mark or the end of it.

    Without ``is_whole``, the file continues behind ``data``: headers that are cut off are those of the next part. With
    ``checked``, the sum of the bytes of each header must be the one that it states.

    Raises:
        FormatError: A header is damaged or cut off, or describes what has no bytes of its own.
    """
    entries = list[int]()
    odd = dict[int, str]()
    extensions = list[int]()
    end = len(data)
    start = at = alike = last = 0  # of the first header of a file, and of the next one
    while at + BLOCK <= end:
        field, kind, prefix = _HEADER.unpack_from(data, at)
        size, width = (-1, 0) if prefix else _plain_size(field)
        if width and kind == _PLAIN:
            entries += start, at, size
            start = at = at + width
            alike = alike + 1 if size == last else 0
            last = size
            if alike == _ALIKE:
                alike = 0
                count = _num_alike(data, at - width, width)
                for begin in range(at, at + width * count, width):
                    entries += begin, begin, size
                start = at = at + width * count
        elif width and kind == _PAX and _is_harmless(data, at + BLOCK, size):
            extensions.append(at)
            at += width
        else:
            is_zero = not kind and not any(data[at : at + BLOCK])
            entry = None if is_zero else _by_tarfile(data, start, where, is_whole)
            if entry is None:
                break
            member, width = entry
            if member.isreg():
                odd[len(entries) // 3] = member.name
                entries += start, start + member.offset_data - BLOCK, member.size
            start = at = start + width
    is_end = start == at <= end - BLOCK and not any(data[at : at + BLOCK])
    if is_whole and not is_end and (start != at or at != end):
        raise _damaged(where, f"a header or a file that ends behind the end, at byte {end:,}")
    starts, files, sizes = np.array(entries, np.int64).reshape(-1, 3).T
    for headers in (files, np.array(extensions, np.int64)) if checked else ():
        for k in range(0, len(headers), _CHECKED):
            _check_sums(data, headers[k : k + _CHECKED], where)
    return Walk(Members(starts, files, sizes, odd), start, is_end)


@lru_cache(1 << 12)
def _plain_size(field: bytes) -> tuple[int, int]:
    """The size in a header, and the bytes up to the next one; 0 of these if it is not plain."""
    match = _OCTAL.fullmatch(field)
    size = int(match[1], 8) if match else -1
    return size, BLOCK + -(-size // BLOCK) * BLOCK if match else 0


def _num_alike(data: memoryview, at: int, width: int) -> int:
    """The number of headers behind one, at equal distances, that are as plain and have its size; a thousand at most."""
    most = min((len(data) - at - BLOCK) // width, _CHECKED)
    fields = rows_at(data, at + width * np.arange(most + 1), BLOCK)[:, _PLAIN_FIELDS]
    is_other = (fields != fields[0]).any(axis=1)
    return int(is_other.argmax()) - 1 if is_other.any() else most


def _is_harmless(data: memoryview, begin: int, size: int) -> bool:
    """Whether a pax extension is here as a whole, and changes neither the name nor the size of its file."""
    return begin + size + BLOCK <= len(data) and _CHANGES.search(data, begin, begin + size) is None


def _by_tarfile(data: memoryview, at: int, where: str, is_whole: bool) -> tuple[tarfile.TarInfo, int] | None:
    """Read the headers of one file from ``at`` on, and up to where the next one begins; None if they are cut off."""
    for room in (_FEW_BYTES, _MOST_BYTES):
        try:
            archive = tarfile.TarFile(fileobj=io.BytesIO(data[at : at + room]))
            break
        except tarfile.TarError as error:
            is_cut = at + room > len(data)
            if is_cut and not is_whole and len(data) - at < _MOST_BYTES:
                return None
            if is_cut or room == _MOST_BYTES:
                raise _damaged(where, f"a damaged header at byte {at:,}: {error}") from error
    member: tarfile.TarInfo | None = archive.firstmember  # type: ignore[attr-defined]  # not in the stubs
    if member is None:
        raise _damaged(where, f"a damaged header at byte {at:,}")
    if why := refusal(member, archive):
        raise FormatError(f"{where}: {why}")
    return member, archive.offset


def _check_sums(data: memoryview, headers: Int64s, where: str) -> None:
    rows = rows_at(data, headers, BLOCK)
    stated = rows[:, 148:156]  # which counts as spaces
    sums = rows.sum(axis=1, dtype=np.uint32) - stated.sum(axis=1, dtype=np.uint32) + 8 * ord(" ")
    digits = (sums[:, None] >> np.arange(15, -1, -3, dtype=np.uint32) & 7) + ord("0")
    for at in headers[(digits != stated[:, :6]).any(axis=1)].tolist():
        try:  # some old tars have spaces before it, or sums of signed bytes
            tarfile.TarInfo.frombuf(bytes(data[at : at + BLOCK]), "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise _damaged(where, f"a damaged header at byte {at:,}: {error}") from error


def _damaged(where: str, problem: str) -> FormatError:
    return FormatError(f"{where} must be a whole tar; found {problem}. Fetch it again.")


def refusal(member: tarfile.TarInfo, archive: tarfile.TarFile) -> str:
    """Why an entry of a tar cannot be read; empty if it can, or if it is no file of a sample."""
    if archive.pax_headers.keys() & {"path", "size", "hdrcharset"}:
        return f"a global header changes {', '.join(archive.pax_headers)} of all files. Write the tar without it."
    if member.issparse():
        return f"{member.name!r} is a sparse file, which cannot be read. Write the tar without --sparse."
    if (member.islnk() or member.issym()) and is_named(member.name):
        return (
            f"{member.name!r} is a link to {member.linkname!r}, and has no bytes of its own. Write the tar with "
            "--dereference --hard-dereference."
        )
    return ""


def is_named(name: str) -> bool:
    """Return whether a file's name has a key and an ending, so that the file belongs to a sample."""
    stem, dot, _ = name.rpartition("/")[2].partition(".")
    return bool(dot and stem and not stem.startswith("__"))
