"""WebDataset tars: files with one key are a sample, their endings its columns. Nothing is unpacked to disk."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from lightning_stream.errors import FormatError
from lightning_stream.sources.base import Batch, Found, InputSplit, Reader, Row, batched
from lightning_stream.sources.files import SourceFile

if TYPE_CHECKING:
    from typing_extensions import Self

KEY = "__key__"
_SAMPLED = 100
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

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:  # noqa: ARG002
        """Return ``__key__`` and the endings of the first samples."""
        known: dict[str, str] = {}
        for sample in islice(_samples(files[0]), _SAMPLED):
            known = {**{name: _encoding(name, data) for name, data in sample.items()}, **known}
        if not known:
            raise ValueError(f"{files[0].uri} holds no sample: there is nothing to write.")
        media = tuple(name for name in known if name.rpartition(".")[2] in _MEDIA)
        return Found(known, media=media)

    def read(self, splits: Sequence[InputSplit], columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield some MiB of samples at a time."""
        files = [split.file for split in splits]
        return batched(_row(sample, columns, file) for file in files for sample in _samples(file))


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


def _samples(file: SourceFile) -> Iterator[dict[str, Any]]:
    """Yield samples as their files' bytes by ending."""
    sample: dict[str, Any] = {}
    with file.unpacked("a whole tar") as plain, tarfile.open(fileobj=plain, mode="r|", tarinfo=_Header) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            stem, dot, ending = path.name.partition(".")
            if not member.isreg() or not dot or not stem or stem.startswith("__"):
                continue
            key = str(path.with_name(stem))
            if sample and sample[KEY] != key:
                yield sample
                sample = {}
            sample.setdefault(KEY, key)
            if ending.lower() in sample:
                raise FormatError(f"{file.uri}: sample {key!r} has two files {ending!r}.")
            sample[ending.lower()] = _bytes(archive, member)
    if sample:
        yield sample


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
