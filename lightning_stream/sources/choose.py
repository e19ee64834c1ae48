"""Which reader fits a source, by its files' names unless the user names a kind; and what splits it holds."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from lightning_stream.errors import FormatError, missing_extra, redact
from lightning_stream.sources.base import Reader, Source
from lightning_stream.sources.files import SourceFile, find_files, is_table
from lightning_stream.sources.inputs import FunctionReader, Inputs, input_items
from lightning_stream.stores import open_store
from lightning_stream.writer.place import is_remote

# The suffixes and the reader of each kind.
_KINDS = {
    "parquet": (".parquet .pq", "tables.ParquetReader"),
    "arrow": (".arrow .feather .ipc", "tables.ArrowReader"),
    "jsonl": (".jsonl .ndjson .json", "lines.JsonlReader"),
    "csv": (".csv", "delimited.CsvReader"),
    "tsv": (".tsv", "delimited.TsvReader"),
    "images": (".jpg .jpeg .png .webp .gif .bmp .tif .tiff", "images.ImageFolderReader"),
    "webdataset": (".tar .tgz", "webdataset.TarReader"),
    "litdata": (".bin", "litdata.LitDataReader"),
    "delta": ("", "delta.DeltaReader"),
    "numpy": (".npy .npz", "tables.NumpyReader"),
    "text": (".txt .text .md", "lines.TextReader"),
}
_KIND_OF = {suffix: kind for kind, (suffixes, _) in _KINDS.items() for suffix in suffixes.split()}
# Files that often lie beside others to describe them: they decide the kind only where they are alone.
_BESIDE = (".json", ".txt", ".text", ".md")
_SPLIT_OF = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_HUGGING_FACE_STATE = "state.json"


def open_source(source: Any, kind: str | None, options: Mapping[str, Any] | None, store_options: Any) -> Source:
    """Find the files of a source, and the reader for them."""
    if isinstance(source, Inputs):
        return Source(f"{len(source.inputs):,} inputs", input_items(source), FunctionReader(source.function))
    if hasattr(source, "with_format") and hasattr(source, "features"):
        dataset = _reader_class("tables.DatasetReader")(source)
        return Source("a datasets.Dataset", dataset.files, dataset)
    is_one = isinstance(source, (str, os.PathLike))
    name = redact(str(source) if is_one else f"{', '.join(map(str, source)):.200}")
    if is_one:
        root = re.split(r"[^/]*[*?]", uri := os.fspath(source))[0] or "."  # that of a pattern
        store = open_store(root, store_options if is_remote(root) else None)
        has_log = is_table(store)
        if has_log and kind in (None, "delta") and root == uri:
            table: Any = _made("delta", options)
            return Source(name, tuple(table.open_log(store)), table)
        if has_log or kind == "delta":
            what = "is a Delta table, whose files hold deleted rows, too" if has_log else "has no log of a Delta table"
            raise ValueError(f"{redact(root)} {what}. Pass the folder of a table, and no kind.")
    files, reader = reader_of(find_files(source, store_options), name, kind, options)
    splits = _by_split(files) if is_one else {}
    reader.begin([file for each in splits.values() for file in each] or files)
    return Source(name, tuple(files), reader, splits)


def reader_of(
    found: Sequence[SourceFile], name: str, kind: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Sequence[SourceFile], Reader]:
    """Return the files of one kind among all files of a source, and the reader for them."""
    found = _saved_files(found)
    chosen = kind or _only_kind(found, name)
    files = [file for file in found if _KIND_OF.get(file.ending) == chosen] or found
    return files, _made(chosen, options)


def _made(kind: str, options: Mapping[str, Any] | None) -> Reader:
    try:
        return reader_class(kind)(**(options or {}))
    except TypeError as error:
        raise ValueError(f"source_options do not fit kind {kind!r}: {error}.") from error


def reader_class(kind: str) -> type[Reader]:
    """Return the reader of a kind."""
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(sorted(_KINDS))}; got {kind!r}.")
    found: type[Reader] = _reader_class(_KINDS[kind][1])
    return found


def _reader_class(name: str) -> Any:
    module, _, reader = name.partition(".")
    try:
        return getattr(import_module(f"lightning_stream.sources.{module}"), reader)
    except ModuleNotFoundError as error:
        raise missing_extra("pyarrow", "convert", "reading Parquet, Arrow, CSV and NumPy files") from error


def _by_split(files: Sequence[SourceFile]) -> dict[str, tuple[SourceFile, ...]]:
    """The files of each split, named by folders (``train/a.csv``) or by files (``train-1.csv``); empty for no splits.

    Raises:
        ValueError: Beside the splits there are other files.
    """
    folders: dict[str, list[SourceFile]] = {}
    for file in files:
        first, slash, rest = file.name.partition("/")
        below = replace(file, root=f"{file.root}/{first}", name=rest) if slash else file
        folders.setdefault(first if slash else re.split("[-_.]", first)[0], []).append(below)
    found = {name: _SPLIT_OF[name.lower()] for name in folders if name.lower() in _SPLIT_OF}
    if "train" not in found.values() or len(found) < 2:
        return {}
    others = sorted(folders.keys() - found.keys())
    if others or len(set(found.values())) < len(found):
        raise ValueError(
            f"{redact(files[0].root)} holds the splits {', '.join(sorted(found))}"
            + (f", and beside them {others[0]}" if others else "")
            + ". Convert each by itself, or pass a list of files or folders to write them as one dataset."
        )
    in_order = sorted(found, key=lambda name: (found[name] != "train", name))
    return {found[name]: tuple(folders[name]) for name in in_order}


def _saved_files(found: Sequence[SourceFile]) -> Sequence[SourceFile]:
    """The Arrow files that Hugging Face's ``save_to_disk`` noted, in its order; any other files as they are."""
    by_name = {file.name: file for file in found}
    noted: list[SourceFile] = []
    for name, file in by_name.items():
        folder, _, last = name.rpartition("/")
        if last == _HUGGING_FACE_STATE:
            state = json.loads(file.read())
            held = state.get("_data_files", ()) if isinstance(state, dict) else ()
            noted += [by_name[path] for each in held if (path := f"{folder}/{each['filename']}".lstrip("/")) in by_name]
    return noted or found


def _only_kind(found: Sequence[SourceFile], name: str) -> str:
    known = [file.ending for file in found if file.ending in _KIND_OF]
    kinds = Counter(_KIND_OF[ending] for ending in [each for each in known if each not in _BESIDE] or known)
    if not kinds:
        raise FormatError(f"{name} holds no file of a known kind ({', '.join(sorted(_KINDS))}). Pass kind=.")
    if len(kinds) == 1:
        return next(iter(kinds))
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    raise ValueError(f"a source must be of one kind; {name} holds files of several ({counts}). Pass kind=.")
