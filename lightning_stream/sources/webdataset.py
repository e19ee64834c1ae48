"""WebDataset tars: files with one key are a sample, their endings its columns. Nothing is unpacked to disk.

Where files lie follows from their headers, without a Python object for each. Plain headers are walked by their sizes.
Any header that is not plain (folders, long names, pax records that change a file, base-256 sizes, links) is read by
`tarfile`. The layout: https://www.gnu.org/software/tar/manual/html_node/Standard.html.
"""

from __future__ import annotations

import io
import json
import re
import struct
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings.base import BinaryColumn
from lightning_stream.formats.memory import Int64s
from lightning_stream.sources import npy
from lightning_stream.sources.base import (
    Asked,
    Batch,
    Batches,
    Columns,
    Piece,
    Pieces,
    Reader,
    Row,
    SourceSchema,
    batched,
)
from lightning_stream.sources.files import Files, SourceFile, rows_at
from lightning_stream.sources.lines import finite

Read: TypeAlias = "Callable[[int, int], memoryview]"
KEY = "__key__"
_SAMPLED = 100
_PIECE_BYTES = 64 << 20
_SMALL_BYTES = 1 << 16  # files that are read along with their headers: a request for each header would cost more
_HEAD_BYTES = 1 << 11
_PART_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 16  # values of one size up to this are encoded at once
_NAME_BYTES = 100
_ODD = (b"\0", b"//", b"./")  # in names that have something behind them, or that `PurePosixPath` shortens
_ENDINGS = {
    "jpeg": "jpg jpeg",
    "png": "png",
    "int": "cls cls2 index inx id",
    "str": "txt text transcript caption",
    "json": "json jsn",
    "ndarray": "npy",
}
_ENCODINGS = {ending: encoding for encoding, endings in _ENDINGS.items() for ending in endings.split()}
_MEDIA = ("webp", "gif", "mp3", "m4a", "ogg", "opus", "flac", "mp4", "webm", "mkv", "mov", "avi")
# Of headers
_TAR_BLOCK = 512
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


@dataclass
class TarReader(Reader):
    """Samples of WebDataset tars."""

    kind = "webdataset"
    takes_nulls = False  # only some files are their own JSON

    def find_columns(self, files: Files, asked: Asked | None) -> SourceSchema:
        """Look at the names of the first 100 samples, and at the heads of arrays."""
        file = files[0]
        known = {KEY: "str"}
        count = 0
        for part in _parts(Piece(file), is_scan=True):
            count -= part.is_continued
            for ending, numbers in part.files.items():
                sample, member_index = next(iter(numbers.items()))
                if ending not in known and count + sample < _SAMPLED:
                    known[ending] = part.encoding(ending, member_index)
            count += len(part.keys)
            if count >= _SAMPLED:
                break
        if len(known) == 1:
            raise ValueError(f"{file.uri} holds no sample. Remove it.")
        media = tuple(name for name in known if name.rpartition(".")[2] in _MEDIA)
        return SourceSchema(known, media=media)

    def has_pieces(self, files: Files) -> bool:
        return not any(file.is_packed for file in files)

    def pieces_of(self, file: SourceFile, columns: Columns) -> list[Piece]:
        """Return pieces of about 64 MiB, cut between samples; headers are read, and small files between them."""
        if file.is_packed:
            raise ValueError(f"{file.uri}: a compressed tar can only be read from its beginning. Convert it.")
        begins = [np.empty(0, np.int64)]
        endings = Counter[str]()
        for part in _parts(Piece(file), is_scan=True):
            endings.update({ending: len(numbers) for ending, numbers in part.files.items()})
            begins.append(part.at + part.members.starts[part.firsts[part.is_continued :]])
        samples = np.concatenate(begins)
        others = tuple(name for name in endings if name not in columns)
        wanted = [name for name, encoding in columns.items() if name != KEY and encoding != "json"]
        nulls = tuple(name for name in wanted if endings[name] < len(samples))
        pieces = []
        first = 0
        while first < len(samples):
            end = max(first + 1, int(np.searchsorted(samples, samples[first] + _PIECE_BYTES)))
            begin = int(samples[first])
            stop = int(samples[end]) if end < len(samples) else file.num_bytes
            pieces.append(Piece(file, begin, stop, stop - begin, end - first, nulls=nulls, others=others))
            first = end
        return pieces

    def read(self, splits: Pieces, columns: Columns) -> Batches:
        """Yield samples by column; row by row where one of them lacks a column, or has a wrong value."""
        for split in splits:
            for part in _parts(split, is_scan=False):
                yield from self._batches(part, columns)

    def _batches(self, part: _Part, columns: Columns) -> Batches:
        try:
            if self.is_strict and not columns.keys() >= part.files.keys():
                raise LookupError("a sample has another file")
            yield Batch({name: part.column(name, encoding) for name, encoding in columns.items()}, part.file.uri)
        except (LookupError, ValueError, OverflowError):
            yield from batched(part.rows({**dict.fromkeys(part.files if self.is_strict else (), "bytes"), **columns}))


class _Part(NamedTuple):
    """A part of a tar, as samples: neighbours with one key.

    Attributes:
        file: The tar.
        read: What reads bytes of it.
        at: Where the part begins.
        data: Its bytes.
        members: All files.
        keys: Those of the samples.
        firsts: The number of the first file of each sample.
        files: By ending and sample, the number of its file.
        is_continued: Whether the first sample began in the part before.
    """

    file: SourceFile
    read: Read
    at: int
    data: memoryview
    members: Members
    keys: list[bytes]
    firsts: list[int]
    files: dict[str, dict[int, int]]
    is_continued: bool

    @classmethod
    def of(cls, file: SourceFile, read: Read, at: int, data: memoryview, members: Members, before: bytes) -> _Part:
        """Group files by their names; FormatError for two files of one ending. ``before``: the key before the part."""
        key = b""
        sample = -1
        keys = list[bytes]()
        firsts = list[int]()
        files = dict[str, dict[int, int]]()
        by_case = dict[bytes, dict[int, int]]()
        for member_index, name in enumerate(_names(data, members)):
            folder, slash, last = name.rpartition(b"/")
            stem, dot, ending = last.partition(b".")
            if not dot or not stem or stem[:2] == b"__":
                continue
            this = folder + slash + stem if slash else stem
            if this != key:
                key = this
                sample = sample + 1
                keys.append(key)
                firsts.append(member_index)
            numbers = by_case.get(ending)
            if numbers is None:
                numbers = by_case[ending] = files.setdefault(_text(ending).lower(), {})
            if sample in numbers:
                raise FormatError(f"{file.uri}: sample {_text(key)!r} has two files {_text(ending).lower()!r}.")
            numbers[sample] = member_index
        return cls(file, read, at, data, members, keys, firsts, files, keys[:1] == [before])

    def drop_last(self) -> int:
        """Drop the last sample, which may go on behind the part; return where it begins in the part."""
        self.keys.pop()
        for ending, by_sample in list(self.files.items()):
            by_sample.pop(len(self.keys), None)
            if not by_sample:
                del self.files[ending]
        return int(self.members.starts[self.firsts.pop()])

    def encoding(self, ending: str, member_index: int) -> str:
        """The encoding of the files with an ending: by that, and by the head of one of them if they are arrays."""
        encoding = _ENCODINGS.get(ending.rpartition(".")[2], "bytes")
        if encoding != "ndarray":
            return encoding
        begin = self.at + int(self.members.headers[member_index]) + _TAR_BLOCK
        data = self.read(begin, int(self.members.sizes[member_index]))
        try:
            return f"ndarray:{npy.load(io.BytesIO(data)).dtype.name}"
        except (ValueError, EOFError) as error:
            raise FormatError(
                f"{self.file.uri}: a file {ending!r} must be a plain array: {error}. Write it again."
            ) from error

    def column(self, name: str, encoding: str) -> Any:
        """The values of all samples. LookupError, ValueError if a sample lacks one, or a value is not right."""
        if name == KEY:
            return _texts(self.keys)
        by_sample = self.files[name]
        if len(by_sample) < len(self.keys):
            raise LookupError(name)
        numbers = np.fromiter(by_sample.values(), np.int64, len(by_sample))
        return _values(self.data, self.members.headers[numbers] + _TAR_BLOCK, self.members.sizes[numbers], encoding)

    def rows(self, columns: Columns) -> Iterator[tuple[Row, str]]:
        """Yield each sample with those of these files that it has, and where it is; FormatError for wrong values."""
        begins = (self.members.headers + _TAR_BLOCK).tolist()
        sizes = self.members.sizes.tolist()
        for sample, key in enumerate(self.keys):
            row: dict[str, Any] = {KEY: _text(key)}
            where = f"{self.file.uri}: sample {row[KEY]!r}"
            try:
                for ending, by_sample in self.files.items():
                    if ending in columns and (k := by_sample.get(sample)) is not None:
                        row[ending] = _value(bytes(self.data[begins[k] : begins[k] + sizes[k]]), columns[ending])
            except (ValueError, EOFError, OverflowError) as error:
                remedy = "Write it again, or pass columns= without it or as 'bytes'."
                raise FormatError(f"{where}: {error}. {remedy}") from error
            yield row, where


@contextmanager
def _opened(file: SourceFile) -> Iterator[Read]:
    """What reads bytes of a tar: from a place on, so many, or fewer at its end. Of a compressed one, places ascend."""
    if not file.is_packed:
        yield lambda at, size: file.view(at, min(file.num_bytes, at + size))
        return
    with file.unpacked() as plain:
        yield _Forward(plain).read


class _Forward:
    """A window of a stream that only goes forward."""

    def __init__(self, plain: BinaryIO) -> None:
        self._plain = plain
        self._at = 0
        self._data = b""

    def read(self, at: int, size: int) -> memoryview:
        self._plain.read(max(0, at - self._at - len(self._data)))
        self._data = self._data[at - self._at :]
        self._data += self._plain.read(max(0, size - len(self._data)))
        self._at = at
        return memoryview(self._data)[:size]


def _parts(piece: Piece, *, is_scan: bool) -> Iterator[_Part]:
    """Yield a piece of a tar part by part: whole samples, or for a scan what headers say of files of any size."""
    file = piece.file
    at = piece.begin
    before = b""
    is_end = False
    room = _SMALL_BYTES if is_scan else piece.end - piece.begin if piece.end else _PART_BYTES
    with _opened(file) as read:
        while not is_end:
            data = read(at, room)
            is_whole = bool(piece.end) or len(data) < room
            members = walk(data, file.uri, is_whole=is_whole, checked=not is_scan)
            part = _Part.of(file, read, at, data, members, before)
            step = members.next
            is_end = members.is_end or bool(piece.end)
            if is_whole and not is_end:
                raise FormatError(
                    f"{file.uri} must be a whole tar; it has no end mark, or ends within a file. It may be cut off: "
                    "fetch it again, or write it again."
                )
            if part.keys and not is_scan and not is_end:
                step = part.drop_last()
            if not step and not is_end:
                room *= 4
                continue
            if part.keys:
                yield part
                before = part.keys[-1]
            at += step
            if is_scan:
                room = _PART_BYTES if step <= _SMALL_BYTES * len(members.sizes) else _HEAD_BYTES
        if not piece.end and any(read(at, _PART_BYTES).tobytes().strip(b"\0")):
            raise FormatError(
                f"{file.uri} holds bytes behind the end mark of its tar. Join tars by `tar --concatenate`."
            )


def _names(data: memoryview, members: Members) -> list[bytes]:
    """The names of all files, as `PurePosixPath` has them."""
    chars = np.ascontiguousarray(rows_at(data, members.headers, _NAME_BYTES))
    names: list[bytes] = chars.view(f"S{_NAME_BYTES}")[:, 0].tolist()
    text = b"\n".join(names)
    if members.odd or any(mark in text for mark in _ODD):
        plain = [members.odd.get(k, _text(name.partition(b"\0")[0])) for k, name in enumerate(names)]
        names = [str(PurePosixPath(name)).encode("utf-8", "surrogateescape") for name in plain]
    return names


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _values(data: memoryview, begins: Int64s, sizes: Int64s, encoding: str) -> Any:
    """Files as values, as an encoder takes them; views of the tar where that is possible."""
    width = int(sizes[0]) if len(sizes) and (sizes == sizes[0]).all() else 0
    if encoding.startswith("ndarray") and width and (arrays := _arrays(data, begins, width)) is not None:
        return arrays
    if encoding == "bytes" and 0 < width < _BLOCK_BYTES:
        return rows_at(data, begins, width).view(f"V{width}")[:, 0]
    values = BinaryColumn(data[at : at + size] for at, size in zip(begins.tolist(), sizes.tolist(), strict=True))
    if encoding == "str":
        return _texts(values)
    is_parsed = encoding.startswith(("int", "uint", "float", "ndarray", "json", "str"))
    return [_value(bytes(value), encoding) for value in values] if is_parsed else values


def _arrays(data: memoryview, begins: Int64s, width: int) -> NDArray[Any] | None:
    """Files of NumPy that have one head, as one array; None if their heads differ."""
    layout = npy.read_head(data[int(begins[0]) : int(begins[0]) + width])
    if layout is None:
        return None
    head, shape, dtype = layout
    num_bytes = dtype.itemsize * int(np.prod(shape))
    heads = rows_at(data, begins, head)
    if not num_bytes or head + num_bytes != width or (heads != heads[0]).any():
        return None
    return rows_at(data, begins + head, num_bytes).view(dtype).reshape(len(begins), *shape)


def _texts(values: Sequence[bytes | memoryview]) -> BinaryColumn:
    """The bytes of texts; ValueError if they are not UTF-8."""
    b"\n".join(values).decode()
    column = BinaryColumn(values)
    column.encoding = "str"
    return column


def _value(data: bytes, encoding: str) -> Any:
    """A file as a value: the bytes themselves wherever the encoding stores files."""
    if encoding.startswith(("int", "uint", "float")):
        if b"_" in data:
            raise ValueError(f"{data!r:.40} is no number")
        return (float if encoding.startswith("float") else int)(data)
    if encoding.startswith("ndarray"):
        return npy.load(io.BytesIO(data))
    if encoding == "json":
        return json.loads(data, parse_float=finite)
    return data.decode() if encoding.startswith("str") else data


class Members(NamedTuple):
    """The regular files of a part of a tar, int64[n] each, and the names of those that are not plain, by number.

    ``starts``: where the first header of each file begins. ``headers``: its last one. ``sizes``: its bytes. ``next``:
    where the header behind all of them begins. ``is_end``: whether the tar's end mark is there.
    """

    starts: Int64s
    headers: Int64s
    sizes: Int64s
    odd: dict[int, str]
    next: int
    is_end: bool


def walk(data: memoryview, where: str, *, is_whole: bool, checked: bool) -> Members:
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
    while at + _TAR_BLOCK <= end:
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
        elif width and kind == _PAX and _is_harmless(data, at + _TAR_BLOCK, size):
            extensions.append(at)
            at += width
        else:
            is_zero = not kind and not any(data[at : at + _TAR_BLOCK])
            entry = None if is_zero else _by_tarfile(data, start, where, is_whole)
            if entry is None:
                break
            member, width = entry
            if member.isreg():
                odd[len(entries) // 3] = member.name
                entries += start, start + member.offset_data - _TAR_BLOCK, member.size
            start = at = start + width
    is_end = start == at <= end - _TAR_BLOCK and not any(data[at : at + _TAR_BLOCK])
    if is_whole and not is_end and (start != at or at != end):
        raise _damaged(where, f"a header or a file that ends behind the end, at byte {end:,}")
    starts, files, sizes = np.array(entries, np.int64).reshape(-1, 3).T
    for headers in (files, np.array(extensions, np.int64)) if checked else ():
        for k in range(0, len(headers), _CHECKED):
            _check_sums(data, headers[k : k + _CHECKED], where)
    return Members(starts, files, sizes, odd, start, is_end)


def _plain_size(field: bytes) -> tuple[int, int]:
    """The size in a header, and the bytes up to the next one; 0 of these if it is not plain."""
    match = _OCTAL.fullmatch(field)
    size = int(match[1], 8) if match else -1
    return size, _TAR_BLOCK + -(-size // _TAR_BLOCK) * _TAR_BLOCK if match else 0


def _num_alike(data: memoryview, at: int, width: int) -> int:
    """The number of headers behind one, at equal distances, that are as plain and have its size; a thousand at most."""
    most = min((len(data) - at - _TAR_BLOCK) // width, _CHECKED)
    fields = rows_at(data, at + width * np.arange(most + 1), _TAR_BLOCK)[:, _PLAIN_FIELDS]
    is_other = (fields != fields[0]).any(axis=1)
    return int(is_other.argmax()) - 1 if is_other.any() else most


def _is_harmless(data: memoryview, begin: int, size: int) -> bool:
    """Whether a pax extension is here as a whole, and changes neither the name nor the size of its file."""
    return begin + size + _TAR_BLOCK <= len(data) and _CHANGES.search(data, begin, begin + size) is None


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
    rows = rows_at(data, headers, _TAR_BLOCK)
    stated = rows[:, 148:156]  # which counts as spaces
    sums = rows.sum(axis=1, dtype=np.uint32) - stated.sum(axis=1, dtype=np.uint32) + 8 * ord(" ")
    digits = (sums[:, None] >> np.arange(15, -1, -3, dtype=np.uint32) & 7) + ord("0")
    for at in headers[(digits != stated[:, :6]).any(axis=1)].tolist():
        try:  # some old tars have spaces before it, or sums of signed bytes
            tarfile.TarInfo.frombuf(bytes(data[at : at + _TAR_BLOCK]), "utf-8", "surrogateescape")
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
