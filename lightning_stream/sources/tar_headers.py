"""Where the files of a tar lie, from its headers, without a Python object for each.

Plain headers are walked by their sizes; where sizes repeat, as for samples of tokens, all headers are checked at once.
Any header that is not plain (long names, pax records that change a file, base-256 sizes, links) is read by `tarfile`.
The layout: https://www.gnu.org/software/tar/manual/html_node/Standard.html.
"""

from __future__ import annotations

import io
import re
import tarfile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from lightning_stream.sources.stretches import rows_at

BLOCK = 512
_TYPE, _PREFIX = 156, 345
_PLAIN, _OLD, _PAX = b"0"[0], 0, b"x"[0]
_CHANGES = re.compile(rb"path=|size=|sparse|hdrcharset")  # pax records that change how a file is read
_OCTAL = re.compile(rb" *([0-7]{1,12})[ \0]*")
_STEPS, _PERIOD = 32, 12  # headers that are walked before repetitions are sought; those that one repetition may have
_FEW_BYTES, _MOST_BYTES = 1 << 14, 1 << 20  # of the headers of one file
_CHECKED = 1024  # headers at once: 512 KiB
_FIELDS = (slice(124, 136), slice(_TYPE, _TYPE + 1), slice(_PREFIX, _PREFIX + 1))


class Members(NamedTuple):
    """The regular files of a part of a tar, int64[n] each, and the names of those that are not plain, by number.

    ``starts``: where the first header of each file begins. ``headers``: its last one. ``sizes``: its bytes.
    """

    starts: NDArray[np.int64]
    headers: NDArray[np.int64]
    sizes: NDArray[np.int64]
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
    found = _Walker(data, where, is_whole)
    return found.run(checked)


class _Walker:
    def __init__(self, data: memoryview, where: str, is_whole: bool) -> None:
        self._data, self._where, self._is_whole, self._end = data, where, is_whole, len(data)
        self._found: list[tuple[Any, Any, Any]] = []  # arrays: starts, headers, sizes
        self._count = 0
        self._noted: list[int] = []  # the same three numbers of each file that was found since
        self._odd: dict[int, str] = {}
        self._pax: list[int] = []  # extensions that change nothing
        self._last: list[tuple[int, int, int]] = []  # the last plain headers: where, type, bytes up to the next one

    def run(self, checked: bool) -> Walk:
        start = at = step = 0
        pause, is_end = _STEPS, False
        while at + BLOCK <= self._end:
            kind, size = self._data[at + _TYPE], self._plain_size(at)
            if kind == _OLD and not any(self._data[at : at + BLOCK]):
                is_end = start == at
                break
            is_pax = kind == _PAX and size is not None and self._is_harmless(at, size)
            if size is None or not (is_pax or kind == _PLAIN or (kind == _OLD and not self._is_folder(at))):
                found = self._by_tarfile(start)
                if found is None:
                    break
                start = at = found
                self._last.clear()
                continue
            width = BLOCK + -(-size // BLOCK) * BLOCK
            self._last.append((at, kind, width))
            if is_pax:
                self._pax.append(at)
                at += width
                continue
            self._noted += start, at, size
            start = at = at + width
            step += 1
            if step >= pause:
                start = at = self._repeated(at)
                pause, step = (min(2 * pause, 1 << 12) if self._last else _STEPS), 0
        if self._is_whole and not is_end and (start != at or at != self._end):
            raise self._error(f"a header or a file that ends behind the end, at byte {self._end:,}")
        self._flush()
        empty = (np.empty(0, np.int64),) * 3
        starts, files, sizes = (np.concatenate(each) for each in zip(*(self._found or [empty]), strict=True))
        members = Members(starts, files, sizes, self._odd)
        for headers in (members.headers, np.array(self._pax, np.int64)) if checked else ():
            for k in range(0, len(headers), _CHECKED):
                self._check_sums(headers[k : k + _CHECKED])
        return Walk(members, start, is_end)

    def _plain_size(self, at: int) -> int | None:
        """The size in a header; None if it is not plain, or if the name has a prefix."""
        found = _OCTAL.fullmatch(self._data, at + 124, at + 136)
        return int(found[1], 8) if found and not self._data[at + _PREFIX] else None

    def _is_folder(self, at: int) -> bool:
        return bytes(self._data[at : at + 100]).partition(b"\0")[0].endswith(b"/")

    def _is_harmless(self, at: int, size: int) -> bool:
        """Whether a pax extension is here as a whole, and changes neither the name nor the size of its file."""
        begin, end = at + BLOCK, at + BLOCK + size
        return end + BLOCK <= self._end and _CHANGES.search(self._data, begin, end) is None

    def _repeated(self, at: int) -> int:
        """Take all files whose headers repeat the sizes of the last ones; return where the next header begins."""
        last = self._last
        del last[: -2 * _PERIOD]
        shapes = [each[1:] for each in last]
        periods = (q for q in range(1, len(last) // 2 + 1) if shapes[-q:] == shapes[-2 * q : -q])
        period = last[-next(periods, 0) :]
        if len(period) == len(last) or any(kind == _OLD for _, kind, _ in period):
            return at
        first, width = period[0][0], at - period[0][0]
        most = max(0, self._end - at) // width  # the last file may end behind this part
        ats = first + width * np.arange(most + 1)  # the first one is the last that was walked
        right = np.ones(most + 1, bool)
        for begin, _, _ in period:
            for part in _FIELDS:
                field = rows_at(self._data, ats + (begin - first + part.start), part.stop - part.start)
                right &= (field == field[0]).all(axis=1)
        count = int(np.argmin(right)) - 1 if not right.all() else most
        for begin in (begin for begin, kind, _ in period if kind == _PAX):
            size = self._plain_size(begin) or 0
            extensions = (ats[1 : count + 1] + (begin - first)).tolist()
            count = next((k for k, each in enumerate(extensions) if not self._is_harmless(each, size)), count)
            self._pax += extensions[:count]
        if count > 0:
            self._flush()
            ends = [begin + wide for begin, kind, wide in period if kind == _PLAIN]
            headers = np.array([begin for begin, kind, _ in period if kind == _PLAIN])
            sizes = np.array([self._plain_size(int(begin)) for begin in headers])
            moves = width * np.arange(1, count + 1)[:, None]
            starts = (np.array([first, *ends[:-1]]) + moves).reshape(-1)
            self._add(starts, (headers + moves).reshape(-1), np.tile(sizes, count))
            last.clear()
        return at + max(0, count) * width

    def _by_tarfile(self, at: int) -> int | None:
        """Read the headers of one file from ``at`` on; return where the next one begins, None if they are cut off."""
        for room in (_FEW_BYTES, _MOST_BYTES):
            part = io.BytesIO(self._data[at : at + room])
            try:
                archive = tarfile.TarFile(fileobj=part)
                break
            except tarfile.TarError as error:
                is_cut = at + room > self._end
                if is_cut and not self._is_whole and self._end - at < _MOST_BYTES:
                    return None
                if is_cut or room == _MOST_BYTES:
                    raise self._error(f"a damaged header at byte {at:,}: {error}") from error
        member: tarfile.TarInfo | None = archive.firstmember  # type: ignore[attr-defined]  # not in the stubs
        if member is None:
            raise self._error(f"a damaged header at byte {at:,}")
        if why := refusal(member, archive):
            raise FormatError(f"{self._where}: {why}")
        if member.isreg():
            self._odd[self._count + len(self._noted) // 3] = member.name
            self._noted += at, at + member.offset_data - BLOCK, member.size
        return at + archive.offset

    def _flush(self) -> None:
        if self._noted:
            self._add(*np.array(self._noted, np.int64).reshape(-1, 3).T)
            self._noted = []

    def _add(self, *columns: NDArray[np.int64]) -> None:
        self._found.append(columns)  # type: ignore[arg-type]
        self._count += len(columns[0])

    def _check_sums(self, headers: NDArray[np.int64]) -> None:
        rows = rows_at(self._data, headers, BLOCK)
        for at in headers[_sums(rows) != _octals(rows[:, 148:156])].tolist():
            try:  # some old tars have sums of signed bytes
                tarfile.TarInfo.frombuf(bytes(self._data[at : at + BLOCK]), "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                raise self._error(f"a damaged header at byte {at:,}: {error}") from error

    def _error(self, found: str) -> FormatError:
        return FormatError(f"{self._where} must be a whole tar; found {found}. Fetch it again.")


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


def _sums(rows: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The sum of the bytes of each header, with spaces in place of the sum that it states."""
    words = np.ascontiguousarray(rows).view("<u8")
    low = np.uint64(0x00FF00FF00FF00FF)
    lanes: Any = ((words & low) + ((words >> np.uint64(8)) & low)).sum(axis=1)  # four sums of 16 bits: at most 32,640
    found: NDArray[np.int64] = (
        lanes.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64) - rows[:, 148:156].sum(axis=1) + 8 * 32
    )
    return found


def _octals(fields: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Octal numbers, of fields that have spaces and zeros around the digits."""
    digits = fields.astype(np.int64) - 48
    found = np.zeros(len(fields), np.int64)
    for column in digits.T:
        found = np.where((column >= 0) & (column < 8), 8 * found + column, found)
    return found
