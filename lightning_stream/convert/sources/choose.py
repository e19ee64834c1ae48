"""Which reader fits a source: by its files' names, unless the user says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_stream.convert.files import Places, SourceFile, find_files
from lightning_stream.convert.sources.base import Reader
from lightning_stream.convert.sources.delimited import DelimitedReader
from lightning_stream.convert.sources.images import SUFFIXES, ImageFolderReader
from lightning_stream.convert.sources.lines import JsonlReader
from lightning_stream.errors import FormatError, missing_extra

_KIND_OF = {
    ".parquet": "parquet", ".pq": "parquet",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".csv": "csv", ".tsv": "tsv",
    **dict.fromkeys(SUFFIXES, "images"),
}  # fmt: skip


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
    source: Places, kind: str | None = None, options: Mapping[str, Any] | None = None, store_options: Any = None
) -> Source:
    """Find the files of a source, and the reader for them.

    Args:
        source: A file, folder or pattern, or a list of these; paths or URLs.
        kind: The kind of its files; None to tell it by their names.
        options: For the reader, e.g. ``{"delimiter": ";"}``.
        store_options: For the store it lies in.

    Raises:
        NotFoundError: There are no such files.
        ValueError: Files of several kinds, or of none that is known; an unknown kind or option.
        MissingExtraError: The reader needs a package that is not installed.
    """
    found = find_files(source, store_options)
    kinds = Counter(_KIND_OF[file.ending] for file in found if file.ending in _KIND_OF)
    chosen = kind or _only(kinds, source)
    if chosen not in _MAKERS:
        raise ValueError(f"kind must be one of {', '.join(sorted(_MAKERS))}; got {chosen!r}.")
    files = [file for file in found if _KIND_OF.get(file.ending) == chosen] or found
    if kind is not None and len(files) < len(found):
        files = files if any(_KIND_OF.get(file.ending) == kind for file in found) else found
    try:
        reader = _MAKERS[chosen](files, **dict(options or {}))
    except TypeError as error:
        raise ValueError(f"source_options do not fit kind {chosen!r}: {error}.") from error
    return Source(str(source), tuple(files), reader)


def _only(kinds: Counter[str], source: Places) -> str:
    if len(kinds) == 1:
        return next(iter(kinds))
    if not kinds:
        raise FormatError(
            f"{source} holds no file of a known kind ({', '.join(sorted(_MAKERS))}). Pass kind= if their names do not "
            "tell it."
        )
    told = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    raise ValueError(f"a source must be of one kind; {source} holds files of several ({told}). Pass kind=.")


def _parquet(files: Sequence[SourceFile]) -> Reader:  # noqa: ARG001 - makers are called alike
    try:
        from lightning_stream.convert.sources.parquet import ParquetReader
    except ModuleNotFoundError as error:
        raise missing_extra("pyarrow", "convert", "reading Parquet files") from error
    return ParquetReader()


def _delimited(kind: str, default: str) -> Callable[..., Reader]:
    def make(_: Sequence[SourceFile], delimiter: str = default, names: Sequence[str] | None = None) -> Reader:
        return DelimitedReader(kind, delimiter, None if names is None else tuple(names))

    return make


_MAKERS: dict[str, Callable[..., Reader]] = {
    "parquet": _parquet,
    "jsonl": lambda _: JsonlReader(),
    "csv": _delimited("csv", ","),
    "tsv": _delimited("tsv", "\t"),
    "images": ImageFolderReader.over,
}
