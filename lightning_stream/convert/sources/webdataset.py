"""WebDataset tars: files with one key are a sample, their endings its columns. Nothing is unpacked to disk."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePosixPath
from typing import IO, Any, cast

import numpy as np

from lightning_stream.convert.files import SourceFile
from lightning_stream.convert.sources.base import Batch, Found, InputSplit, Reader, chosen_columns
from lightning_stream.convert.sources.lines import DAMAGED
from lightning_stream.errors import FormatError

KEY = "__key__"
_SAMPLED = 100
_TAIL_BYTES = 1 << 16
_BATCH_BYTES, _BATCH_SAMPLES = 1 << 23, 256
_ENCODINGS = {
    **dict.fromkeys(("jpg", "jpeg"), "jpeg"), "png": "png",
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), "int"),
    **dict.fromkeys(("txt", "text", "transcript", "caption"), "str"),
    **dict.fromkeys(("json", "jsn"), "json"), "npy": "ndarray",
}  # fmt: skip
_MEDIA = ("webp", "gif", "mp3", "m4a", "ogg", "opus", "flac", "mp4", "webm", "mkv", "mov", "avi")


@dataclass(frozen=True)
class TarReader(Reader):
    """Samples of WebDataset tars."""

    kind = "webdataset"

    def find_columns(self, files: Sequence[SourceFile], asked: Mapping[str, str] | None) -> Found:
        """Return ``__key__`` and the endings of the first samples."""
        samples = [sample for sample, _ in islice(_samples(files[0]), _SAMPLED)]
        endings = dict.fromkeys(name for sample in samples for name in sample)
        if not endings:
            raise ValueError(f"{files[0].uri} holds no sample: there is nothing to write.")
        known = {name: _encoding(name, samples) for name in endings}
        media = tuple(name for name in endings if name.rpartition(".")[2] in _MEDIA)
        return Found(chosen_columns(known, asked, f"each sample of {files[0].uri}"), media=media)

    def read(self, split: InputSplit, columns: Mapping[str, str]) -> Iterator[Batch]:
        """Yield some MiB of samples at a time."""
        rows: list[Mapping[str, Any]] = []
        num_bytes, uri = 0, split.file.uri
        for sample, size in _samples(split.file):
            try:
                rows.append({name: _value(data, columns.get(name, "bytes")) for name, data in sample.items()})
            except ValueError as error:
                raise ValueError(f"{uri}: sample {sample[KEY]!r}: {error}") from error
            num_bytes += size
            if num_bytes >= _BATCH_BYTES or len(rows) == _BATCH_SAMPLES:
                yield Batch(rows, f"{uri}, samples from {rows[0][KEY]!r}")
                rows, num_bytes = [], 0
        if rows:
            yield Batch(rows, f"{uri}, samples from {rows[0][KEY]!r}")


def _encoding(name: str, samples: Sequence[Mapping[str, Any]]) -> str:
    if name == KEY:
        return "str"
    encoding = _ENCODINGS.get(name.rpartition(".")[2], "bytes")
    if encoding != "ndarray":
        return encoding
    first = next(sample[name] for sample in samples if name in sample)
    return f"ndarray:{_array(first).dtype.name}"


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


def _samples(file: SourceFile) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield samples as their files' bytes by ending, and their sizes."""
    try:
        with file.unpacked() as plain:
            watched = _Watched(plain)
            with tarfile.open(fileobj=cast(IO[bytes], watched), mode="r|") as archive:
                yield from _grouped(archive, file)
                watched.check_end(archive.offset)
    except (*DAMAGED, tarfile.TarError) as error:
        raise FormatError(f"{file.uri} must be a whole tar; reading it failed: {error}. Fetch it again.") from error


class _Watched:
    """A stream that keeps its last bytes: tarfile takes a header that it cannot read for the end, without an error."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._at = 0
        self._tail = b""

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._at += len(data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return data

    def check_end(self, offset: int) -> None:
        """Raise ReadError unless the tar ends at ``offset``."""
        held = self._at - len(self._tail)
        if self._tail[offset - held : offset - held + tarfile.BLOCKSIZE].strip(b"\0"):
            raise tarfile.ReadError(f"no header at byte {offset:,}, nor the end")


def _grouped(archive: tarfile.TarFile, file: SourceFile) -> Iterator[tuple[dict[str, Any], int]]:
    sample: dict[str, Any] = {}
    num_bytes = 0
    for member in archive:
        path = PurePosixPath(member.name)
        stem, dot, ending = path.name.partition(".")
        if not member.isreg() or not dot or not stem or stem.startswith("__"):
            continue
        key = str(path.with_name(stem))
        if sample and sample[KEY] != key:
            yield sample, num_bytes
            sample, num_bytes = {}, 0
        sample.setdefault(KEY, key)
        if ending.lower() in sample:
            raise FormatError(f"{file.uri}: sample {key!r} has two files {ending!r}.")
        sample[ending.lower()] = _bytes(archive, member)
        num_bytes += member.size
    if sample:
        yield sample, num_bytes


def _bytes(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened: IO[bytes] | None = archive.extractfile(member)
    assert opened is not None, "a regular file"
    data = opened.read()
    if len(data) != member.size:
        raise tarfile.ReadError(f"{member.name} has {len(data)} of {member.size} bytes")
    return data
