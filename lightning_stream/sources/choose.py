"""Which reader fits a source, by its files' names unless the user names a kind; and what splits it holds."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

from lightning_stream.errors import FormatError, NotFoundError, needs, redact
from lightning_stream.sources.base import Reader, Source
from lightning_stream.sources.files import DELTA_LOG, Files, Listing, SourceFile, find_files, media_store, readable
from lightning_stream.sources.inputs import FunctionReader, Inputs, input_items
from lightning_stream.writer.place import OURS

# The suffixes and the reader of each kind.
_KINDS = {
    "parquet": (".parquet .pq", "tables.ParquetReader"),
    "arrow": (".arrow .feather .ipc", "tables.ArrowReader"),
    "jsonl": (".jsonl .ndjson .json", "lines.JsonlReader"),
    "csv": (".csv", "delimited.CsvReader"),
    "tsv": (".tsv", "delimited.TsvReader"),
    "images": (".jpg .jpeg .png .webp .gif .bmp .tif .tiff", "images.ImageFolderReader"),
    "files": (".wav .flac .mp3 .ogg .opus .m4a .mp4 .webm .mkv .avi .mov", "images.FileFolderReader"),
    "webdataset": (".tar .tgz", "webdataset.TarReader"),
    "litdata": (".bin", "litdata.LitDataReader"),
    "delta": ("", "delta.DeltaReader"),
    "numpy": (".npy .npz", "arrays.NumpyReader"),
    "text": (".txt .text .md", "lines.TextReader"),
}
_KIND_OF = {suffix: kind for kind, (suffixes, _) in _KINDS.items() for suffix in suffixes.split()}
# Files that often lie beside others to describe them: they decide the kind only where they are alone.
_BESIDE = (".json", ".txt", ".text", ".md")
SPLIT_OF = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_HUGGING_FACE_STATE = "state.json"


def open_source(
    source: Any, kind: str | None, options: Mapping[str, Any] | None, store_options: Any, out: Sequence[str] = ()
) -> Source:
    """Find the files of a source, and the reader for them; the dataset is written to the places `out`."""
    options = dict(options or {})
    hidden = bool(options.pop("hidden", False))
    if isinstance(source, Inputs):
        return Source(f"{len(source.inputs):,} inputs", input_items(source), FunctionReader(source.function))
    if hasattr(source, "with_format") and hasattr(source, "data") and hasattr(source, "features"):
        from lightning_stream.sources.arrays import DatasetReader

        if source.format["type"] == "custom":
            raise ValueError(
                "the rows of a datasets.Dataset are read without its own transform. Pass that as transform=, and the "
                "dataset as dataset.with_format(None)."
            )
        reader: Any = DatasetReader(dataset=source, **options)
        files: Files = reader.files
        listing = Listing("a datasets.Dataset", files)
    else:
        listing = find_files(source, store_options, hidden=hidden, out=out)
        files, reader = reader_of(listing, kind, options)
    splits = _by_split(files) if isinstance(source, (str, os.PathLike)) and reader.kind != "delta" else {}
    if root := options.get("media_root"):
        reader.media = media_store(root, files[0].root, store_options)
    reader.begin([file for split in splits.values() for file in split] or files)
    return Source(listing.name, tuple(files), reader, splits, len(listing.left_out))


def reader_of(
    listing: Listing, kind: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Files, Reader]:
    """Return the files of one kind, or of one version of a table, among all files of a source; and their reader.

    Raises:
        NotFoundError: There are none.
        ValueError: There are several kinds; or it is a Delta table and none is asked for, or the other way round.
    """
    if listing.log and kind in (None, "delta"):
        table: Any = make_reader("delta", options)
        return table.open_log(listing), table
    if listing.is_table:
        raise ValueError(
            f"{listing.name} is a Delta table, whose files hold deleted rows, too. Pass its folder, and no format."
        )
    if kind == "delta" or (options or {}).get("version") is not None:
        raise ValueError(
            f"{listing.name} is no Delta table: it has no {DELTA_LOG}. Pass no version=, or another format."
        )
    listed = _saved_files(listing.files)
    chosen = kind or _only_kind(listed, listing.name)
    reader = make_reader(chosen, options)
    files = [file for file in listed if kind == "files" or _KIND_OF.get(file.ending) == chosen]
    files = files or [file for file in listed if file.ending not in _KIND_OF]  # of any name, if the kind is named
    if not files:
        raise NotFoundError(
            f"{listing.name} holds no file of the format {chosen!r}; it holds {_counted(listed)}. Name another."
        )
    return files, reader


def make_reader(kind: str, options: Mapping[str, Any] | None) -> Reader:
    """Return a reader of a kind, with its options."""
    if kind not in _KINDS:
        raise ValueError(f"a format must be one of {', '.join(sorted(_KINDS))}; got {kind!r}.")
    module, _, name = _KINDS[kind][1].partition(".")
    with needs("pyarrow", "parquet", "reading Parquet, Arrow, CSV and NumPy files"):
        make: type[Any] = getattr(import_module(f"lightning_stream.sources.{module}"), name)
    try:
        return make(**(options or {}))  # type: ignore[no-any-return]
    except TypeError as error:
        known = ", ".join(sorted(option.name for option in fields(make) if option.init))
        raise ValueError(
            f"source_options of kind {kind!r} are {known or 'none'}, and hidden; found {', '.join(options or {})}."
        ) from error


def _by_split(files: Files) -> dict[str, tuple[SourceFile, ...]]:
    """The files of each split, named by folders (``train/a.csv``) or by files (``train-1.csv``); empty for no splits.

    Raises:
        ValueError: Beside the splits there are other files.
    """
    folders = split_folders(files)
    split_of = {name: SPLIT_OF[name.lower()] for name in folders if name.lower() in SPLIT_OF}
    if not split_of:
        return {}
    others = sorted(folders.keys() - split_of.keys())
    if others or len(set(split_of.values())) < len(split_of):
        raise ValueError(
            f"{redact(files[0].root)} holds the splits {', '.join(sorted(split_of))}"
            + (f", and beside them {others[0]}" if others else "")
            + ". Convert each by itself, or pass a list of files or folders to write them as one dataset."
        )
    in_order = sorted(split_of, key=lambda name: (split_of[name] != "train", name))
    return {split_of[name]: tuple(folders[name]) for name in in_order}


def split_folders(files: Files) -> dict[str, list[SourceFile]]:
    """The files by what names their split: a folder, or the first word of a file's name; empty if there is no split."""
    above = os.path.commonpath([os.path.dirname(file.name) for file in files])  # noqa: PTH120 - names, no paths
    folders: dict[str, list[SourceFile]] = {}
    for file in files:
        first, slash, rest = file.name[len(above) :].lstrip("/").partition("/")
        root = "/".join(part for part in (file.root, above, first) if part)
        below = replace(file, root=root, name=rest) if slash else file
        folders.setdefault(first if slash else re.split("[-_.]", first)[0], []).append(below)
    splits = [SPLIT_OF[name.lower()] for name in folders if name.lower() in SPLIT_OF]
    return folders if "train" in splits and len(splits) > 1 else {}


def _saved_files(files: Files) -> Files:
    """The Arrow files that Hugging Face's ``save_to_disk`` noted, in its order; any other files as they are."""
    by_name = {file.name: file for file in files}
    noted: list[SourceFile] = []
    for name, file in by_name.items():
        folder, _, last = name.rpartition("/")
        if last != _HUGGING_FACE_STATE:
            continue
        with readable(file.uri, has_arguments=False):
            state = json.loads(file.read())
            file_names = [entry["filename"] for entry in state["_data_files"]] if "_data_files" in state else []
            chosen = file_names and state.get("_indices_data_files")
        paths = [f"{folder}/{file_name}".lstrip("/") for file_name in file_names]
        if missing := [path for path in paths if path not in by_name]:
            raise FormatError(f"{file.uri} names {missing[0]}, which is not there. Copy the dataset again.")
        if chosen:
            raise FormatError(f"{file.uri} chooses rows by other files. Call flatten_indices() and save it again.")
        noted += [by_name[path] for path in paths]
    return noted or files


def _only_kind(files: Files, name: str) -> str:
    remedy = "Name one: format= of a stream, kind= of convert."
    known = [file for file in files if file.ending in _KIND_OF]  # not those of a cache in this folder
    ours = [file.name for file in known if OURS.fullmatch(file.name.rpartition("/")[2])]
    if ours:
        raise NotFoundError(
            f"{name} holds {ours[0]}, which is read by an index.json of {name}: a writer puts it last, and merge_index "
            f"that of partitions. If another program wrote this file, its format must be named. {remedy}"
        )
    endings = [file.ending for file in known]
    kinds = {_KIND_OF[ending] for ending in [ending for ending in endings if ending not in _BESIDE] or endings}
    if len(kinds) == 1:
        return kinds.pop()
    if not kinds:
        raise NotFoundError(
            f"{name} holds no file of a known format; it holds {_counted(files)}. {remedy} 'files' takes any files, "
            "each as a sample."
        )
    raise ValueError(f"a dataset must be of one format; {name} holds {_counted(files)}. {remedy}")


def _counted(files: Files) -> str:
    """How many files of each format there are, for messages."""
    counts = Counter(_KIND_OF.get(file.ending, f"*{file.ending}" if file.ending else file.name) for file in files)
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common(5)) or "no files"
