"""One index over the indexes of partitions."""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import msgspec

from lightning_stream.errors import ConflictError, FormatError, NotFoundError, redact
from lightning_stream.formats.index import INDEX_NAME, FileEntry, Index
from lightning_stream.formats.model import check_basename, with_lengths
from lightning_stream.stores import Store
from lightning_stream.version_log import Version, read_changes, read_index, read_newest

from .place import Out, Transaction, listed_files

_FILE_KEYS = ("raw_data", "raw_meta", "zip_data", "zip_meta")


def merge_index(
    indexes: Sequence[Out] | Out,
    out: Out | bool | None = None,
    keep_local: bool = True,
    download_timeout: float = 60.0,
    *,
    store_options: Mapping[str, Any] | None = None,
) -> None:
    """Put one index.json over all partitions of a dataset, with the shards in the order of the partitions.

    ``merge_index(root)`` takes every index below ``root``, at any depth, sorted by path with numbers as numbers
    (part2 before part10); it ignores an index below a folder that has one. ``merge_index([index, ...], root)`` takes
    the given indexes, in their order. As in mosaicml-streaming, ``keep_local`` and ``download_timeout`` may follow by
    position: ``merge_index(root, False, 30)``.

    Example::

        for number, rows in enumerate(parts):
            with MDSWriter(out=f"s3://bucket/train/part{number}", columns=columns) as writer:
                writer.write_batch(rows)
        merge_index("s3://bucket/train")

    Args:
        indexes: The root: a path, a URL, or (local path, URL), of which the URL is read. Or a list of indexes (the
            files, or their folders, or pairs as above), all below ``out``.
        out: The root, if ``indexes`` is a list.
        keep_local: Put the index into the local folder of a pair too.
        download_timeout: Longest silence on a connection, in seconds.
        store_options: Options of the remote store.

    The lengths that all partitions have are those of the merged index. A warning names others, which are dropped.

    Raises:
        NotFoundError: There is no index below the root, or one of the list is absent.
        ValueError: A partition has deleted samples, added columns or a name that no index can hold, an index of the
            list is not below ``out`` or comes twice, or the root's index lists what no partition has: shards of its
            own, as after an append there, or deleted samples.
        FormatError: One of them is not an index.
        FileExistsError, ConflictError: Another process put or changed the root's index meanwhile; that one stays.
    """
    listed = isinstance(indexes, Sequence) and not isinstance(indexes, (str, tuple))
    root = out if listed else indexes
    if not listed and isinstance(out, bool):  # a root, followed by keep_local
        download_timeout = download_timeout if isinstance(keep_local, bool) else keep_local
        keep_local = out
    elif root is None or isinstance(root, bool) or (not listed and out is not None):
        raise ValueError("merge_index takes a root, or a list of indexes and a root.")
    place = Transaction(root, keep_local, {"timeout_s": download_timeout, **(store_options or {})})
    place.begin("merge")
    store = place.store
    if listed:
        folders = [_below(index, root) for index in indexes]  # type: ignore[union-attr]
    else:
        folders = _partitions(entry.name for entry in store.list(""))
    if len(set(folders)) < len(folders):
        raise ValueError(f"merge_index takes each index once; found some twice among {', '.join(folders):.200}.")
    if not folders:
        raise NotFoundError(f"no {INDEX_NAME} in any folder below {store.url}. Give the root of the partitions.")
    for folder in folders:
        try:
            check_basename(folder, store.url)
        except FormatError:
            raise ValueError(
                f"no index can name files of the folder {folder!r} of {store.url}: a part of it begins with a dot, or "
                "it has a backslash, a drive or a control character. Rename it."
            ) from None
    former = _check_former(store)
    parts = {folder: read_index(place.partition(folder)) for folder in folders}
    if deleted := [folder for folder, index in parts.items() if index.deleted is not None]:
        raise ValueError(
            f"a merged index has no deleted samples; those of {', '.join(deleted[:3])} would be there again. Call "
            "versions.compact for each of these partitions first."
        )
    if joined := [folder for folder, index in parts.items() if index.joined]:
        raise ValueError(
            f"a merged index has no added columns; those of {', '.join(joined[:3])} would be lost. Call "
            "versions.compact for each of these partitions first."
        )
    texts = [text for folder, index in parts.items() for text in _entries(index, folder)]
    merged = with_lengths(b'{"version": 2, "shards": [' + b", ".join(texts) + b"]}", _lengths(parts))
    place.commit_index(merged)
    root_now = read_newest(store).root
    if former is not None and root_now != former.root and read_changes(store, former.root, former.number + 1, former):
        # Its writer has no error: it saw the former index still there after it had put its change.
        place.swap_back(INDEX_NAME, merged)
        if read_newest(store).root != former.root or read_changes(store, root_now):
            raise ConflictError(  # an append to the merged index, before that was gone, has no error either
                f"an append came to {store.url} before a merge put its index, and another writer after that; one index "
                f"cannot have both. Write again what `lightning-stream log {store.url}` does not list: it is in "
                f"versions/{former.root} or versions/{root_now}."
            )
        raise ConflictError(
            f"a merge must know all that the index of its root lists; {store.url} was changed meanwhile, and stays as "
            "that change left it. Merge again: what no partition has is refused then."
        )


def _check_former(store: Store) -> Version | None:
    """The version of the root, if any: ValueError if it has what no partition has; a warning of lengths."""
    former = None
    with contextlib.suppress(NotFoundError, FormatError):
        former = read_newest(store)
    beside = sorted(name for name in listed_files(None if former is None else former.index.data) if "/" not in name)
    files = [name for name in beside if not name.startswith(("deleted.", "lengths."))]
    if files:
        raise ValueError(
            f"a merged index lists only the shards of partitions; {store.url}/{INDEX_NAME} also lists {len(files)} "
            f"files beside it, such as {files[0]}, which would be lost. Move them into a folder with an index of their "
            "own; if they are not wanted, delete that index and the folder versions/."
        )
    changes = [] if former is None else read_changes(store, former.root)
    is_without = any(change.operation in ("delete", "compact") for change in changes)  # a shard may have gone whole
    if is_without or any(name.startswith("deleted.") for name in beside):
        raise ValueError(
            f"a merged index has no deleted samples; those of {store.url}/{INDEX_NAME} would be there again. Delete "
            "them in their partitions, call versions.compact for each of these, and then delete that index and the "
            "folder versions/."
        )
    if beside:
        warnings.warn(
            f"a merged index has the lengths of its partitions; {', '.join(beside[:3])} of the former one are not "
            "among them. Add them again: lightning-stream convert PATH --lengths NAME.",
            stacklevel=3,
        )
    return former


def _below(index: Any, root: Any) -> str:
    """Return the folder of an index, relative to the root."""
    root = _folder(root[-1] if isinstance(root, (tuple, list)) else root)
    places = list(map(_folder, index if isinstance(index, (tuple, list)) else [index]))
    for folder in reversed(places):
        if folder.startswith(f"{root}/"):
            return folder.removeprefix(f"{root}/")
    raise ValueError(f"all indexes must be below the root, {redact(root)}; got {redact(places[-1])}.")


def _folder(place: Any) -> str:
    """Return the folder or URL of an index, or of its file."""
    folder: str = os.path.expanduser(os.fspath(place)).rstrip("/")  # noqa: PTH111 - may be a URL
    folder = folder.removesuffix(f"/{INDEX_NAME}")
    return folder if "://" in folder else os.path.abspath(folder)  # noqa: PTH100 - no links are to be followed


def _partitions(names: Iterable[str]) -> list[str]:
    """Return the folders that have an index, except the root and the folders below another one."""
    folders = sorted((name[: -len(INDEX_NAME) - 1] for name in names if name.endswith(f"/{INDEX_NAME}")), key=_natural)
    known = set(folders)
    return [folder for folder in folders if known.isdisjoint(map(str, PurePosixPath(folder).parents))]


def _natural(name: str) -> list[tuple[int, int, str]]:
    pieces = re.split(r"([0-9]+)", name)
    return [(1, 0, piece) if k % 2 == 0 else (0, int(piece), piece) for k, piece in enumerate(pieces)]


def _lengths(indexes: Mapping[str, Index]) -> dict[str, list[FileEntry]]:
    """Return the files of the lengths that all partitions have samples' numbers of, named relative to the root.

    Other lengths are dropped: a dataset without them can be read, and they can be added at any time.
    """
    parts = {folder: index.lengths for folder, index in indexes.items() if index.num_samples}
    merged: dict[str, list[FileEntry]] = {}
    for name in sorted({name for lengths in parts.values() for name in lengths}):
        without = [folder for folder, lengths in parts.items() if name not in lengths]
        if without:
            warnings.warn(
                f"the merged index has no lengths {name!r}, since {len(without)} of {len(parts)} partitions have none: "
                f"{', '.join(without[:3])}{' ...' if len(without) > 3 else ''}. Add them to the merged dataset: "
                f"lightning-stream convert PATH --lengths {name}.",
                stacklevel=3,
            )
            continue
        files = ((folder, file) for folder, lengths in parts.items() for file in lengths[name])
        merged[name] = [msgspec.structs.replace(file, basename=f"{folder}/{file.basename}") for folder, file in files]
    return merged


def _entries(index: Index, folder: str) -> Iterator[bytes]:
    """Yield the shard entries of one partition, with their files named relative to the root."""
    for entry in map(json.loads, map(index.text, range(len(index)))):
        for file in filter(None, map(entry.get, _FILE_KEYS)):
            file["basename"] = f"{folder}/{file['basename']}"
        yield json.dumps(entry, sort_keys=True).encode()
