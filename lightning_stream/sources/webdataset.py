"""WebDataset tars: files with one key are a sample, their endings its columns. Nothing is unpacked to disk."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError
from lightning_stream.formats.encodings.base import BinaryColumn
from lightning_stream.sources import npy
from lightning_stream.sources.base import Asked, Batch, Found, Piece, Reader, Row, batched
from lightning_stream.sources.files import SourceFile
from lightning_stream.sources.stretches import rows_at
from lightning_stream.sources.tar_headers import BLOCK, Members, is_named, refusal, walk

if TYPE_CHECKING:
    from typing import Self

KEY = "__key__"
_SAMPLED = 100
_PIECE_BYTES = 64 << 20
_SMALL_BYTES = 1 << 16  # files that are read along with their headers: a request for each header would cost more
_HEAD_BYTES, _PART_BYTES, _FETCHED_BYTES = 1 << 11, 1 << 24, 1 << 22
_BLOCK_BYTES = 1 << 16  # values of one size up to this are encoded at once
_NAME_BYTES = 100
_ENCODINGS = {
    **dict.fromkeys(("jpg", "jpeg"), "jpeg"), "png": "png",
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), "int"),
    **dict.fromkeys(("txt", "text", "transcript", "caption"), "str"),
    **dict.fromkeys(("json", "jsn"), "json"), "npy": "ndarray",
}  # fmt: skip
_MEDIA = ("webp", "gif", "mp3", "m4a", "ogg", "opus", "flac", "mp4", "webm", "mkv", "mov", "avi")


@dataclass
class TarReader(Reader):
    """Samples of WebDataset tars."""

    kind = "webdataset"

    def find_columns(self, files: Sequence[SourceFile], asked: Asked | None) -> Found:
        known = {KEY: "str"}
        for ending, data in _first(files[0]):
            if ending not in known:
                known[ending] = _encoding(files[0], ending, data)
        if len(known) == 1:
            raise ValueError(f"{files[0].uri} holds no sample. Remove it.")
        media = tuple(name for name in known if name.rpartition(".")[2] in _MEDIA)
        return Found(known, media=media)

    def has_pieces(self, files: Sequence[SourceFile]) -> bool:
        return not any(file.is_packed or file.ending == ".tgz" for file in files)

    def takes_nulls(self, encoding: str) -> bool:
        return False  # only some files are their own JSON

    def pieces(self, file: SourceFile, columns: Mapping[str, str]) -> list[Piece]:
        """Return pieces of about 64 MiB, cut between samples; headers are read, and small files between them."""
        if file.is_packed or file.ending == ".tgz":
            raise ValueError(f"{file.uri}: a compressed tar can only be read from its beginning. Convert it.")
        begins, key, endings = [np.empty(0, np.int64)], b"", Counter[str]()
        for base, data, members in _walked(file):
            names = _named(data, members)
            counts = np.bincount(names.codes, minlength=len(names.endings)).tolist()
            endings.update(dict(zip(names.endings, counts, strict=True)))
            if len(names.keys):
                is_new = np.append(names.keys[:1] != key, names.keys[1:] != names.keys[:-1])
                begins.append(base + members.starts[names.numbers][is_new])
                key = names.keys[-1]
        samples, others = np.concatenate(begins), tuple(name for name in endings if name not in columns)
        wanted = [name for name, encoding in columns.items() if name != KEY and encoding != "json"]
        nulls = tuple(name for name in wanted if endings[name] < len(samples))
        found, first = [], 0
        while first < len(samples):
            end = max(first + 1, int(np.searchsorted(samples, samples[first] + _PIECE_BYTES)))
            begin, stop = int(samples[first]), int(samples[end]) if end < len(samples) else file.num_bytes
            found.append(Piece(file, begin, stop, stop - begin, end - first, nulls=nulls, others=others))
            first = end
        return found

    def read(self, splits: Sequence[Piece], columns: Mapping[str, str]) -> Iterator[Batch]:
        return batched(_row(sample, columns, split.file) for split in splits for sample in _streamed(split.file))

    def read_columns(self, split: Piece, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield all samples of a piece by column; row by row where one of them lacks a column, or has a wrong value."""
        file, data = split.file, split.file.view(split.begin, split.end)
        found = walk(data, file.uri, is_whole=True, checked=True)
        table = _sample_table(_named(data, found.members), file)
        members = found.members
        try:
            if self.is_strict and not columns.keys() >= set(table.endings):
                raise LookupError("a sample has another file")
            yield Batch(_columns(data, members, table, columns), file.uri)
        except (LookupError, ValueError):
            yield from batched(_row(sample, columns, file) for sample in _samples(data, members, table))


class _Names(NamedTuple):
    """Of the files that belong to samples: their numbers, keys and endings (as numbers into ``endings``)."""

    numbers: NDArray[np.int64]
    keys: NDArray[np.bytes_]
    codes: NDArray[np.int64]
    endings: list[str]


class _SampleTable(NamedTuple):
    """The keys of samples, and the number of each sample's file of each ending, -1 for none: int64[n, endings]."""

    keys: NDArray[np.bytes_]
    endings: list[str]
    files: NDArray[np.int64]


def _walked(file: SourceFile) -> Iterator[tuple[int, memoryview, Members]]:
    """Yield the files of a tar, part by part: where a part begins, and its bytes."""
    at, room = 0, _SMALL_BYTES
    is_end = False
    while not is_end:
        if at + BLOCK > file.num_bytes:
            raise FormatError(
                f"{file.uri} must be a whole tar; it has no end mark, or ends within a file. It may be cut off: fetch "
                "it again, or write it again."
            )
        stop = min(file.num_bytes, at + room)
        data = file.view(at, stop)
        found = walk(data, file.uri, is_whole=stop == file.num_bytes, checked=False)
        yield at, data, found.members
        is_end, at = found.is_end, at + found.next
        each = found.next // max(1, len(found.members.sizes))
        part = _PART_BYTES if file.path is not None else _FETCHED_BYTES
        room = 4 * room if not found.next else part if each <= _SMALL_BYTES else _HEAD_BYTES
    if any(file.view(at, min(at + _PART_BYTES, file.num_bytes)).tobytes().strip(b"\0")):
        raise FormatError(f"{file.uri} holds bytes behind the end mark of its tar. Join tars by `tar --concatenate`.")


def _named(data: memoryview, members: Members) -> _Names:
    """Cut the names of files into keys and endings."""
    count = len(members.headers)
    chars = np.ascontiguousarray(rows_at(data, members.headers, _NAME_BYTES))
    chars = chars[:, : 1 + int(np.flatnonzero(chars.any(axis=0)).max(initial=0))]
    places = np.arange(chars.shape[1], dtype=np.int16)
    is_zero = chars == 0
    lengths = np.where(is_zero.any(axis=1), is_zero.argmax(axis=1), chars.shape[1]).astype(np.int16)
    chars = np.where(places < lengths[:, None], chars, np.uint8(0))
    is_slash, is_dot = chars == ord("/"), chars == ord(".")
    if members.odd or ((is_slash[:, :-1] | is_dot[:, :-1]) & is_slash[:, 1:]).any():  # `./name` and `a//name` too
        texts = [bytes(row).rstrip(b"\0").decode("utf-8", "surrogateescape") for row in chars]
        return _named_one_by_one([members.odd.get(number, text) for number, text in enumerate(texts)])
    stems = np.where(is_slash, places + np.int16(1), np.int16(0)).max(axis=1, initial=0)
    is_dot &= places >= stems[:, None]
    dots = is_dot.argmax(axis=1).astype(np.int16)  # 0 where there is none
    is_hidden = np.zeros(count, bool)
    if chars.shape[1] > 2:
        starts = np.minimum(stems, chars.shape[1] - 2)[:, None]
        is_hidden = (np.take_along_axis(chars, starts + np.arange(2), 1) == ord("_")).all(axis=1)
    numbers = np.flatnonzero((dots > stems) & ~is_hidden)
    chars, dots, lengths = chars[numbers], dots[numbers, None], lengths[numbers, None]
    keys = _texts(np.where(places < dots, chars, 0)[:, : max(1, int(dots.max(initial=1)))])
    tails = dots + 1 + np.arange(max(1, int((lengths - dots).max(initial=1)) - 1))
    tail = np.take_along_axis(chars, np.minimum(tails, chars.shape[1] - 1), 1)
    cut = _texts(np.where(tails < lengths, tail, 0))
    if len(cut) and (cut == cut[0]).all():
        return _Names(numbers, keys, np.zeros(len(cut), np.int64), [_lower(cut[0])])
    stored, codes = np.unique(cut, return_inverse=True)
    endings = sorted({_lower(each) for each in stored})
    order = np.array([endings.index(_lower(each)) for each in stored], np.int64)
    return _Names(numbers, keys, order[codes.reshape(-1)], endings)


def _named_one_by_one(names: Sequence[str]) -> _Names:
    numbers = [number for number, name in enumerate(names) if is_named(name)]
    cut = [_key_and_ending(names[number]) for number in numbers]
    endings = sorted({ending for _, ending in cut})
    codes = np.array([endings.index(ending) for _, ending in cut], np.int64)
    keys = np.array([key.encode("utf-8", "surrogateescape") for key, _ in cut] or [b""])[: len(cut)]
    return _Names(np.array(numbers, np.int64), keys, codes, endings)


def _key_and_ending(name: str) -> tuple[str, str]:
    path = PurePosixPath(name)
    stem, _, ending = path.name.partition(".")
    return str(path.with_name(stem)), ending.lower()


def _texts(chars: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    return np.ascontiguousarray(chars).view(f"S{chars.shape[1]}")[:, 0]


def _lower(ending: bytes) -> str:
    return ending.decode("utf-8", "surrogateescape").lower()


def _sample_table(names: _Names, file: SourceFile) -> _SampleTable:
    """Group files with one key that are neighbours; FormatError for two files of one ending."""
    is_new = np.append(np.ones(min(1, len(names.keys)), bool), names.keys[1:] != names.keys[:-1])
    samples, keys = np.cumsum(is_new) - 1, names.keys[is_new]
    cells = samples * len(names.endings) + names.codes
    twice = np.flatnonzero(np.bincount(cells, minlength=1) > 1)
    if len(twice):
        sample, code = divmod(int(twice[0]), len(names.endings))
        raise _two_files(file, keys[sample].decode("utf-8", "replace"), names.endings[code])
    table = np.full(len(keys) * len(names.endings), -1)
    table[cells] = names.numbers
    return _SampleTable(keys, names.endings, table.reshape(len(keys), -1))


def _two_files(file: SourceFile, key: str, ending: str) -> FormatError:
    return FormatError(f"{file.uri}: sample {key!r} has two files {ending!r}.")


def _columns(data: memoryview, members: Members, table: _SampleTable, columns: Mapping[str, str]) -> dict[str, Any]:
    """The values of all samples by column. LookupError, ValueError if a sample lacks one, or a value is not right."""
    found: dict[str, Any] = {}
    for name, encoding in columns.items():
        if name == KEY:
            found[name] = _checked_texts(_block(table.keys))
            continue
        files = table.files[:, table.endings.index(name)]
        if (files < 0).any():
            raise LookupError(name)
        found[name] = _values(data, members.headers[files] + BLOCK, members.sizes[files], encoding)
    return found


def _values(data: memoryview, begins: NDArray[np.int64], sizes: NDArray[np.int64], encoding: str) -> Any:
    """Files as values, as an encoder takes them; views of the tar where that is possible."""
    width = int(sizes[0]) if len(sizes) and (sizes == sizes[0]).all() else 0
    if encoding.startswith("ndarray") and width and (arrays := _arrays(data, begins, width)) is not None:
        return arrays
    if 0 < width < _BLOCK_BYTES and encoding in ("bytes", "str"):
        values: Any = rows_at(data, begins, width).view(f"V{width}")[:, 0]
    else:
        values = BinaryColumn(data[at : at + size] for at, size in zip(begins.tolist(), sizes.tolist(), strict=True))
    if encoding == "str":
        return _checked_texts(values)
    is_parsed = encoding.startswith(("int", "uint", "float", "ndarray", "json", "str"))
    return [_value(bytes(value), encoding) for value in values] if is_parsed else values


def _arrays(data: memoryview, begins: NDArray[np.int64], width: int) -> NDArray[Any] | None:
    """Files of NumPy that have one head, as one array; None if their heads differ."""
    first = io.BytesIO(data[int(begins[0]) : int(begins[0]) + width])
    layout = npy.read_head(first)
    if layout is None:
        return None
    shape, is_fortran, dtype = layout
    head, num_bytes = first.tell(), dtype.itemsize * int(np.prod(shape))
    heads = rows_at(data, begins, head)
    if is_fortran or dtype.hasobject or not num_bytes or head + num_bytes != width or (heads != heads[0]).any():
        return None
    return rows_at(data, begins + head, num_bytes).view(dtype).reshape(len(begins), *shape)


def _block(texts: NDArray[np.bytes_]) -> Any:
    """Texts of one length as a block of bytes, others as a list."""
    width = texts.dtype.itemsize
    if len(texts) and (np.char.str_len(texts) == width).all():
        return texts.view(f"V{width}")
    return texts.tolist()


def _checked_texts(values: Any) -> Any:
    """Return the bytes of texts; ValueError if they are not UTF-8."""
    if isinstance(values, np.ndarray):
        if (values.reshape(len(values), 1).view(np.uint8) < 128).all():
            return values
        values = [bytes(value) for value in values]
    for value in values:
        str(value, "utf-8")
    return values


def _samples(data: memoryview, members: Members, table: _SampleTable) -> Iterator[dict[str, Any]]:
    """Yield samples as their files' bytes by ending."""
    begins, sizes = (members.headers + BLOCK).tolist(), members.sizes.tolist()
    for key, files in zip(table.keys.tolist(), table.files.tolist(), strict=True):
        sample: dict[str, Any] = {KEY: key.decode("utf-8", "surrogateescape")}
        for ending, k in zip(table.endings, files, strict=True):
            if k >= 0:
                sample[ending] = bytes(data[begins[k] : begins[k] + sizes[k]])
        yield sample


def _encoding(file: SourceFile, ending: str, data: bytes) -> str:
    encoding = _ENCODINGS.get(ending.rpartition(".")[2], "bytes")
    try:
        return encoding if encoding != "ndarray" else f"ndarray:{npy.load(io.BytesIO(data)).dtype.name}"
    except (ValueError, EOFError) as error:
        raise FormatError(f"{file.uri}: a file {ending!r} must be a plain array: {error}. Write it again.") from error


def _first(file: SourceFile) -> Iterator[tuple[str, bytes]]:
    """Yield the endings of the first samples, with the bytes of arrays."""
    if file.is_packed or file.ending == ".tgz":
        for sample in islice(_streamed(file), _SAMPLED):
            yield from sample.items()
        return
    count = 0
    for base, data, members in _walked(file):
        names = _named(data, members)
        samples = count + np.cumsum(np.append(True, names.keys[1:] != names.keys[:-1])[: len(names.keys)])
        codes, firsts = np.unique(names.codes[samples <= _SAMPLED], return_index=True)
        for ending, k in zip((names.endings[code] for code in codes), names.numbers[firsts].tolist(), strict=True):
            begin = base + int(members.headers[k]) + BLOCK
            end = begin + int(members.sizes[k]) if ending.endswith("npy") else begin
            yield ending, bytes(file.view(begin, end))
        count = int(samples[-1]) if len(samples) else count
        if count >= _SAMPLED:
            return


def _row(sample: Row, columns: Mapping[str, str], file: SourceFile) -> tuple[Row, str]:
    where = f"{file.uri}: sample {sample[KEY]!r}"
    try:
        return {name: _value(data, columns.get(name, "bytes")) for name, data in sample.items()}, where
    except (ValueError, EOFError) as error:
        raise FormatError(f"{where}: {error}. Write it again, or pass columns= without it or as 'bytes'.") from error


def _value(data: Any, encoding: str) -> Any:
    """A file as a value: the bytes themselves wherever the encoding stores files."""
    if isinstance(data, str):
        return data
    if encoding.startswith(("int", "uint", "float")):
        return (float if encoding.startswith("float") else int)(data)
    if encoding.startswith("ndarray"):
        return npy.load(io.BytesIO(data))
    if encoding == "json":
        return json.loads(data)
    return data.decode() if encoding.startswith("str") else data


def _streamed(file: SourceFile) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar, compressed or not, as their files' bytes by ending, from its beginning."""
    sample: dict[str, Any] = {}
    with file.unpacked("a whole tar") as plain:
        for name, data in _stream_members(file, plain):
            key, ending = _key_and_ending(name)
            if sample and sample[KEY] != key:
                yield sample
                sample = {}
            sample.setdefault(KEY, key)
            if ending in sample:
                raise _two_files(file, key, ending)
            sample[ending] = data()
    if sample:
        yield sample


def _stream_members(file: SourceFile, plain: Any) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the name of every file of a sample, and what reads it."""
    try:
        with tarfile.open(fileobj=plain, mode="r|", tarinfo=_Header) as archive:
            for member in archive:
                if why := refusal(member, archive):
                    raise FormatError(f"{file.uri}: {why}")
                if member.isreg() and is_named(member.name):
                    yield member.name, lambda member=member: _bytes(archive, member)  # type: ignore[misc]
    except tarfile.TarError as error:
        raise FormatError(f"{file.uri} must be a whole tar; reading it failed: {error}. Fetch it again.") from error


def _bytes(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    data = cast(IO[bytes], archive.extractfile(member)).read()
    if len(data) != member.size:
        raise tarfile.ReadError(f"{member.name} has {len(data)} of {member.size} bytes")
    return data


class _Header(tarfile.TarInfo):
    """A header that is damaged or missing is an error; tarfile would take it for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf and not bytes(buf).strip(b"\0"):
                raise  # this is the end
            raise tarfile.ReadError(f"a damaged header: {error}" if buf else "it has no end mark") from error
