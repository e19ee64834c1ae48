"""Which reader fits a source: by its files' names, unless the user says."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_stream.convert.files import Places, SourceFile, find_files
from lightning_stream.convert.sources.arrays import NumpyReader
from lightning_stream.convert.sources.base import Reader
from lightning_stream.convert.sources.delimited import DelimitedReader
from lightning_stream.convert.sources.function import FunctionReader, Inputs
from lightning_stream.convert.sources.images import SUFFIXES, ImageFolderReader
from lightning_stream.convert.sources.lines import JsonlReader
from lightning_stream.convert.sources.saved import saved_files
from lightning_stream.convert.sources.tars import TarReader
from lightning_stream.convert.sources.texts import TextReader
from lightning_stream.errors import FormatError, missing_extra, redact

_KIND_OF = {
    ".parquet": "parquet", ".pq": "parquet",
    ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".csv": "csv", ".tsv": "tsv",
    ".tar": "webdataset", ".tgz": "webdataset",
    ".npy": "numpy", ".npz": "numpy",
    ".txt": "text", ".text": "text", ".md": "text",
    **dict.fromkeys(SUFFIXES, "images"),
}  # fmt: skip
# Files that often lie beside others to describe them: they tell the kind only where they are alone.
_BESIDE = (".json", ".txt", ".text", ".md")


@dataclass(frozen=True)
class Source:
    """What is converted.

    Attributes:
        place: As the user named it, for messages and the manifest.
        files: Those that are read.
        reader: How.
    """

    place: str
    files: tuple[SourceFile, ...]
    reader: Reader


def open_source(
    source: Places | Inputs,
    kind: str | None = None,
    options: Mapping[str, Any] | None = None,
    store_options: Any = None,
) -> Source:
    """Find the files of a source, and the reader for them.

    Args:
        source: A file, folder or pattern, or a list of these, paths or URLs; or inputs of the user's own.
        kind: The kind of its files; None to tell it by their names.
        options: For the reader, e.g. ``{"delimiter": ";"}``.
        store_options: For the store it lies in.

    Raises:
        NotFoundError: There are no such files.
        ValueError: Files of several kinds, or of none that is known; an unknown kind or option.
        MissingExtraError: The reader needs a package that is not installed.
    """
    if isinstance(source, Inputs):
        made = FunctionReader(source)
        return Source(f"{len(source.inputs):,} inputs", made.files, made)
    found = saved_files(find_files(source, store_options))
    chosen = kind or _only(found, source)
    if chosen not in _MAKERS:
        raise ValueError(f"kind must be one of {', '.join(sorted(_MAKERS))}; got {chosen!r}.")
    files = [file for file in found if _KIND_OF.get(file.ending) == chosen] or found
    try:
        reader = _MAKERS[chosen](files, **dict(options or {}))
    except TypeError as error:
        raise ValueError(f"source_options do not fit kind {chosen!r}: {error}.") from error
    place = source if isinstance(source, (str, os.PathLike)) else ", ".join(map(str, source))
    return Source(redact(f"{place!s:.200}"), tuple(files), reader)


def _only(found: Sequence[SourceFile], source: Places) -> str:
    kinds = Counter(_KIND_OF[file.ending] for file in found if file.ending in _KIND_OF)
    told = Counter(_KIND_OF[file.ending] for file in found if file.ending in _KIND_OF and file.ending not in _BESIDE)
    kinds = told or kinds
    if len(kinds) == 1:
        return next(iter(kinds))
    if not kinds:
        raise FormatError(
            f"{source} holds no file of a known kind ({', '.join(sorted(_MAKERS))}). Pass kind= if their names do not "
            "tell it."
        )
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    raise ValueError(f"a source must be of one kind; {source} holds files of several ({counts}). Pass kind=.")


def _parquet(_: Sequence[SourceFile]) -> Reader:
    try:
        from lightning_stream.convert.sources.parquet import ParquetReader
    except ModuleNotFoundError as error:
        raise missing_extra("pyarrow", "convert", "reading Parquet files") from error
    return ParquetReader()


def _arrow(_: Sequence[SourceFile]) -> Reader:
    try:
        from lightning_stream.convert.sources.ipc import IpcReader
    except ModuleNotFoundError as error:
        raise missing_extra("pyarrow", "convert", "reading Arrow files") from error
    return IpcReader()


def _delimited(kind: str, default: str) -> Callable[..., Reader]:
    def make(_: Sequence[SourceFile], delimiter: str = default, names: Sequence[str] | None = None) -> Reader:
        return DelimitedReader(kind, delimiter, None if names is None else tuple(names))

    return make


_MAKERS: dict[str, Callable[..., Reader]] = {
    "parquet": _parquet,
    "arrow": _arrow,
    "jsonl": lambda _: JsonlReader(),
    "csv": _delimited("csv", ","),
    "tsv": _delimited("tsv", "\t"),
    "images": ImageFolderReader.over,
    "webdataset": lambda _: TarReader(),
    "numpy": lambda _, column="array": NumpyReader(column),
    "text": lambda _, lines=False: TextReader(lines),
}
