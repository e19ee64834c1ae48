"""WebDataset tars: files with one key are a sample, their endings its columns. Nothing is unpacked to disk."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from lightning_stream.errors import FormatError
from lightning_stream.sources.base import Asked, Batch, Found, InputSplit, Piece, Reader, Row, batched
from lightning_stream.sources.files import SourceFile

if TYPE_CHECKING:
    from typing_extensions import Self

KEY = "__key__"
_SAMPLED = 100
_PIECE_BYTES, _RECORD_BYTES = 64 << 20, 20 << 10
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

    def find_columns(self, files: Sequence[SourceFile], asked: Asked | None) -> Found:  # noqa: ARG002
        """Return ``__key__`` and the endings of the first samples."""
        file, known, keys = files[0], {KEY: "str"}, set[str]()
        is_packed = file.is_packed or file.ending == ".tgz"
        with file.unpacked("a whole tar") if is_packed else file.open_headers() as plain:
            for key, ending, member in _members(file, plain, "r|" if is_packed else "r:"):
                if len(keys) == _SAMPLED and key not in keys:
                    break
                keys.add(key)
                if ending not in known:
                    known[ending] = _encoding(file, key, ending, member)
        if not keys:
            raise ValueError(f"{file.uri} holds no sample. Remove it.")
        media = tuple(name for name in known if name.rpartition(".")[2] in _MEDIA)
        return Found(known, media=media)

    def pieces(self, file: SourceFile, columns: Mapping[str, str]) -> list[Piece]:
        """Return pieces of about 64 MiB, cut between samples; only the headers are read."""
        if file.is_packed or file.ending == ".tgz":
            raise ValueError(f"{file.uri}: a compressed tar can only be read from its beginning. Convert it.")
        found, begin, num_rows, key, endings = [], 0, 0, None, dict[str, None]()
        with file.open_headers() as plain:
            for stem, ending, member in _members(file, plain):
                endings[ending] = None
                if stem == key:
                    continue
                if num_rows and member.offset - begin >= _PIECE_BYTES:
                    found.append(Piece(begin, member.offset, num_rows, member.offset - begin))
                    begin, num_rows = member.offset, 0
                key, num_rows = stem, num_rows + 1
        if num_rows:
            found.append(Piece(begin, file.num_bytes, num_rows, file.num_bytes - begin))
        others = tuple(name for name in endings if name not in columns)
        return [piece._replace(others=others) for piece in found]

    def read(self, splits: Sequence[InputSplit], columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield some MiB of samples at a time."""
        return batched(_row(sample, columns, split.file) for split in splits for sample in _samples(split))


def _encoding(file: SourceFile, key: str, ending: str, member: _Member) -> str:
    encoding = _ENCODINGS.get(ending.rpartition(".")[2], "bytes")
    if encoding != "ndarray":
        return encoding
    try:
        return f"ndarray:{_array(member.data()).dtype.name}"
    except (ValueError, EOFError) as error:
        raise FormatError(f"{file.uri}: {key}.{ending} must be a plain array: {error}. Write it again.") from error


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
        return _array(data)
    if encoding == "json":
        return json.loads(data)
    return data.decode() if encoding.startswith("str") else data


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _samples(split: InputSplit) -> Iterator[dict[str, Any]]:
    """Yield samples as their files' bytes by ending."""
    sample: dict[str, Any] = {}
    file = split.file
    part = io.BytesIO(file.read(split.begin, split.end)) if split.end is not None else None
    with nullcontext(part) if part is not None else file.unpacked("a whole tar") as plain:
        for key, ending, member in _members(file, plain, "r|"):
            if sample and sample[KEY] != key:
                yield sample
                sample = {}
            sample.setdefault(KEY, key)
            if ending in sample:
                raise FormatError(f"{file.uri}: sample {key!r} has two files {ending!r}.")
            sample[ending] = member.data()
    if sample:
        yield sample


class _Member(NamedTuple):
    """A file in a tar: where its header begins, and what reads it."""

    offset: int
    data: Callable[[], bytes]


def _members(file: SourceFile, plain: Any, mode: Any = "r:") -> Iterator[tuple[str, str, _Member]]:
    """Yield the key and the ending of every file of a sample. With ``"r:"`` only headers are read."""
    try:
        with tarfile.open(fileobj=plain, mode=mode, tarinfo=_Header) as archive:
            for member in archive:
                if mode == "r:" and member.offset_data + member.size > file.num_bytes:
                    raise tarfile.ReadError(f"{member.name} ends behind the end of the file")
                path = PurePosixPath(member.name)
                stem, dot, ending = path.name.partition(".")
                if member.isreg() and dot and stem and not stem.startswith("__"):
                    yield (
                        str(path.with_name(stem)),
                        ending.lower(),
                        _Member(member.offset, partial(_bytes, archive, member)),
                    )
            if mode == "r:":
                plain.seek(archive.offset)
                rest = plain.read(_RECORD_BYTES)
                if len(rest) < tarfile.BLOCKSIZE:
                    raise tarfile.ReadError("it has no end mark, so it may be cut off")
                if rest.strip(b"\0"):
                    raise tarfile.ReadError(f"bytes follow its end at {archive.offset:,}, such as another tar")
    except tarfile.TarError as error:
        raise FormatError(f"{file.uri} must be a whole tar; reading it failed: {error}. Fetch it again.") from error


def _bytes(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    data = cast(IO[bytes], archive.extractfile(member)).read()
    if len(data) != member.size:
        raise tarfile.ReadError(f"{member.name} has {len(data)} of {member.size} bytes")
    return data


class _Header(tarfile.TarInfo):
    """A damaged header is an error; tarfile would take it for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if not bytes(buf).strip(b"\0"):
                raise  # this is the end
            raise tarfile.ReadError(f"a damaged header: {error}") from error
