"""Which reader fits a source, by its files' names unless the user names a kind; and what splits it holds."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any

from lightning_stream.convert.files import SourceFile, Uris, find_files
from lightning_stream.convert.sources.base import Reader, Source
from lightning_stream.convert.sources.images import SUFFIXES, ImageFolderReader
from lightning_stream.convert.sources.inputs import FunctionReader, Inputs, input_items
from lightning_stream.convert.sources.lines import JsonlReader, TextReader
from lightning_stream.convert.sources.webdataset import TarReader
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
# Files that often lie beside others to describe them: they decide the kind only where they are alone.
_BESIDE = (".json", ".txt", ".text", ".md")
_SPLIT_OF = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_HUGGING_FACE_STATE = "state.json"


def open_source(source: Any, kind: str | None, options: Mapping[str, Any] | None, store_options: Any) -> Source:
    """Find the files of a source, and the reader for them."""
    if isinstance(source, Inputs):
        return Source(f"{len(source.inputs):,} inputs", input_items(source), FunctionReader(source.function))
    if hasattr(source, "with_format") and hasattr(source, "features"):
        dataset = _table_reader("DatasetReader")(source)
        return Source("a datasets.Dataset", dataset.files, dataset)
    found = _saved_files(find_files(source, store_options))
    chosen = kind or _only_kind(found, source)
    if chosen not in _MAKERS:
        raise ValueError(f"kind must be one of {', '.join(sorted(_MAKERS))}; got {chosen!r}.")
    files = [file for file in found if _KIND_OF.get(file.ending) == chosen] or found
    splits = _by_split(files) if isinstance(source, (str, os.PathLike)) else {}
    known = [file for each in splits.values() for file in each] or files  # a class is a folder in its split
    try:
        reader = _MAKERS[chosen](known, **dict(options or {}))
    except TypeError as error:
        raise ValueError(f"source_options do not fit kind {chosen!r}: {error}.") from error
    name = source if isinstance(source, (str, os.PathLike)) else ", ".join(map(str, source))
    return Source(redact(f"{name!s:.200}"), tuple(files), reader, splits)


def _by_split(files: Sequence[SourceFile]) -> dict[str, tuple[SourceFile, ...]]:
    """The files of each split, named by folders (``train/a.csv``) or by files (``train-1.csv``); empty for no splits.

    Raises:
        ValueError: Beside the splits there are other files.
    """
    folders: dict[str, list[SourceFile]] = {}
    for file in files:
        first, slash, _ = file.name.partition("/")
        folders.setdefault(first if slash else re.split("[-_.]", first)[0], []).append(file)
    found = {name: _SPLIT_OF[name.lower()] for name in folders if name.lower() in _SPLIT_OF}
    if "train" not in found.values() or len(found) < 2:
        return {}
    others = [folders[name][0].name for name in sorted(folders.keys() - found.keys())]
    if others or len(set(found.values())) < len(found):
        raise ValueError(
            f"{redact(files[0].root)} holds the splits {', '.join(sorted(found))}"
            + (f", and beside them {others[0]}" if others else "")
            + ". Convert each by itself, or pass a list of files or folders to write them as one dataset."
        )
    in_order = sorted(found, key=lambda name: (found[name] != "train", name))
    return {found[name]: tuple(map(_in_split, folders[name])) for name in in_order}


def _in_split(file: SourceFile) -> SourceFile:
    folder, slash, name = file.name.partition("/")
    return replace(file, root=f"{file.root}/{folder}", name=name) if slash else file


def _saved_files(found: Sequence[SourceFile]) -> list[SourceFile]:
    """The Arrow files that Hugging Face's ``save_to_disk`` noted, in its order; any other files as they are."""
    states = [file for file in found if PurePosixPath(file.name).name == _HUGGING_FACE_STATE]
    by_name = {file.name: file for file in found}
    noted: list[SourceFile] = []
    for state in states:
        content = json.loads(state.read())
        names = [each["filename"] for each in content.get("_data_files", ())] if isinstance(content, dict) else []
        noted += [
            by_name[name] for each in names if (name := state.name[: -len(_HUGGING_FACE_STATE)] + each) in by_name
        ]
    return noted or list(found)


def _only_kind(found: Sequence[SourceFile], source: Uris) -> str:
    kinds = Counter(_KIND_OF[file.ending] for file in found if file.ending in _KIND_OF)
    certain = Counter(_KIND_OF[file.ending] for file in found if file.ending in _KIND_OF and file.ending not in _BESIDE)
    kinds = certain or kinds
    if len(kinds) == 1:
        return next(iter(kinds))
    if not kinds:
        raise FormatError(f"{source} holds no file of a known kind ({', '.join(sorted(_MAKERS))}). Pass kind=.")
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    raise ValueError(f"a source must be of one kind; {source} holds files of several ({counts}). Pass kind=.")


def _table_reader(name: str, module: str = "tables") -> Any:
    try:
        return getattr(import_module(f"lightning_stream.convert.sources.{module}"), name)
    except ModuleNotFoundError as error:
        raise missing_extra("pyarrow", "convert", "reading Parquet, Arrow, CSV and NumPy files") from error


def _delimited(kind: str, default: str) -> Callable[..., Reader]:
    def make(_: Sequence[SourceFile], delimiter: str = default, names: Sequence[str] | None = None) -> Reader:
        reader: Reader = _table_reader("CsvReader", "delimited")(
            kind, delimiter, None if names is None else tuple(names)
        )
        return reader

    return make


_MAKERS: dict[str, Callable[..., Reader]] = {
    "parquet": lambda _: _table_reader("ParquetReader")(),
    "arrow": lambda _: _table_reader("ArrowReader")(),
    "jsonl": lambda _: JsonlReader(),
    "csv": _delimited("csv", ","),
    "tsv": _delimited("tsv", "\t"),
    "images": ImageFolderReader.over,
    "webdataset": lambda _: TarReader(),
    "numpy": lambda _, column="array": _table_reader("NumpyReader")(column),
    "text": lambda _, lines=False: TextReader(lines),
}
