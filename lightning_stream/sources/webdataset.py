"""WebDataset tars: files with one key are a sample, their endings its columns. Nothing is unpacked to disk."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
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
_HEADER_BYTES, _PIECE_BYTES = 1 << 10, 64 << 20
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
        known: dict[str, str] = {}
        for sample in islice(_samples(InputSplit(files[0], 0, None, 0)), _SAMPLED):
            known = {**{name: _encoding(name, data) for name, data in sample.items()}, **known}
        if not known:
            raise ValueError(f"{files[0].uri} holds no sample: there is nothing to write.")
        media = tuple(name for name in known if name.rpartition(".")[2] in _MEDIA)
        return Found(known, media=media)

    def has_pieces(self, files: Sequence[SourceFile]) -> bool:
        """Whether no tar is compressed."""
        return not any(file.is_packed or file.ending == ".tgz" for file in files)

    def pieces(self, file: SourceFile, columns: Mapping[str, str]) -> list[Piece]:  # noqa: ARG002
        """Return pieces of about 64 MiB, cut between samples; only the headers are read."""
        if file.is_packed or file.ending == ".tgz":
            raise ValueError(f"{file.uri}: a compressed tar can only be read from its beginning. Convert it.")
        found, begin, num_rows, key = [], 0, 0, None
        with file.open(_HEADER_BYTES) as plain:
            for stem, _, member in _members(file, plain):
                if stem == key:
                    continue
                if num_rows and member.offset - begin >= _PIECE_BYTES:
                    found.append(Piece(begin, member.offset, num_rows, member.offset - begin))
                    begin, num_rows = member.offset, 0
                key, num_rows = stem, num_rows + 1
        return [*found, *([Piece(begin, file.num_bytes, num_rows, file.num_bytes - begin)] if num_rows else [])]

    def read(self, splits: Sequence[InputSplit], columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield some MiB of samples at a time."""
        return batched(_row(sample, columns, split.file) for split in splits for sample in _samples(split))


def _encoding(name: str, data: Any) -> str:
    encoding = "str" if name == KEY else _ENCODINGS.get(name.rpartition(".")[2], "bytes")
    return encoding if encoding != "ndarray" else f"ndarray:{_array(data).dtype.name}"


def _row(sample: Row, columns: Mapping[str, str], file: SourceFile) -> tuple[Row, str]:
    where = f"{file.uri}: sample {sample[KEY]!r}"
    try:
        return {name: _value(data, columns.get(name, "bytes")) for name, data in sample.items()}, where
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


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
