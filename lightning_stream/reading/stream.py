"""A stream: one dataset (one index.json) in a mix, and the settings that all streams of a dataset share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from lightning_stream.cache import CacheConfig, ShardCache, Spaces, default_folder
from lightning_stream.counters import Counters
from lightning_stream.errors import (
    NotFoundError,
    StoreError,
    UnavailableError,
    by_name,
    checking,
    redact,
    refuse_overrides,
)
from lightning_stream.formats.index import INDEX_NAME, Index, version_name
from lightning_stream.order import StreamWeights
from lightning_stream.sources.files import is_table, media_store, split_place
from lightning_stream.sources.in_place import InPlace, changed_files, is_made
from lightning_stream.stores import Store, open_store, shown_url
from lightning_stream.version_log import read_version

_INSTEAD = {  # of methods of mosaicml-streaming's Stream
    "write the shards into an index.json": "get_shards set_up_local get_index_size",
    "override _download_file": "prepare_shard _prepare_shard_part",
    "write the shards in one of the known compressions": "_decompress_shard_part",
    "pass the settings to Stream.__init__": "apply_default apply_weights validate_weights",
}
_NEVER_CALLED = {method: remedy for remedy, methods in _INSTEAD.items() for method in methods.split()}


T = TypeVar("T")
Version = str | int
_DIGITS = 16  # of a digest, in the name of a version's index
_DELTA = "delta://"
_VERSION = re.compile(r"(?:index\.)?([0-9a-f]{6,})(?:\.json)?")


class Stream:
    """One dataset in a mix, under the arguments MDS users know, which are attributes of it too.

    Example::

        code = Stream("s3://bucket/code", proportion=0.3)
        text = Stream("s3://bucket/text", proportion=0.7, version="3f2ac01b9d5e6a74")
        StreamingDataset(streams=[code, text], shuffle=True)

    Datasets read copies of it, which are their ``streams``: a stream may be in several datasets, with a `split` each.

    A subclass may override ``_download_file(from_basename, to_basename=None)``, which returns the path of the file it
    has downloaded. It is called for the index and for every shard, whose bytes are then verified as usual.

    Args:
        remote: Folder or URL that holds the dataset; None where `local` is the only copy. Of files in another format,
            also a file, or a pattern such as ``"s3://bucket/data/**/train-*.parquet"``; ``"delta://"`` before the URL
            of a Delta table is optional.
        local: The cache folder; None for a private one chosen from the URL, or for reading a local `remote` in place.
        split: Sub-folder of both, e.g. ``"train"``.
        proportion: Share of the epoch that comes from this stream, relative to the other streams' proportions.
        repeat: How often its samples are drawn per epoch (2.5: each twice, half of them a third time).
        choose: How many samples are drawn from it per epoch.
        download_retry: How often a failed request is tried again; None takes the dataset's.
        download_timeout: Longest silence on a connection, in seconds; None takes the dataset's.
        validate_hash: The hash that downloaded files must have; None checks those of the index.
        keep_zip: Whether compressed files stay in the cache after decompression; None takes the dataset's.
        options: Further options of the store, e.g. ``{"endpoint_url": ...}``.
        credentials: A function that returns keys of the store and their end, or its name as ``"module:function"`` or
            of an entry point. It is called again before they end, once a machine, and when they are refused.
        name: What a `Schedule` calls it; None for the last part of `remote` or `local`.
        version: The version of the dataset: its number, or 6 or more digits of its digest, as `lightning-stream log`
            lists them and a saved state has them; None for the newest. Of a Delta table: its number. Or pairs of an
            optimizer step, from 0, and the version from there on: ``[(0, "3f2ac01b"), (1200, "9d5e6a74")]``. Then a
            training run continues with the other version at that step: the samples of it that did not come yet in that
            epoch come in a fresh order.
        format: Of a folder without an index.json: ``"parquet"``, ``"arrow"``...; None to recognise it.
        columns: The columns to read; None for all. Of a folder without an index.json, also a mapping from their names
            to encodings. Of an MDS dataset, the files of added columns that are not read are not fetched either.
        hidden: Of a folder without an index.json: whether files whose names begin with ``_`` or ``.`` are read, too.
        media_root: The folder or URL of the files that tables name by paths, without their bytes, e.g. columns with
            images of Hugging Face's ``datasets``. None refuses such rows: data may name only what you give.

    Raises:
        ValueError: No `remote` or `local`, an empty one, the path of an index instead of its folder, or more than one
            weight.
        TypeError: A subclass overrides a method of mosaicml-streaming's Stream that is never called here.
    """

    @checking
    def __init__(
        self,
        remote: str | os.PathLike[str] | None = None,
        *,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
        proportion: float | None = None,
        repeat: float | None = None,
        choose: int | None = None,
        download_retry: int | None = None,
        download_timeout: float | None = None,
        validate_hash: str | None = None,
        keep_zip: bool | None = None,
        options: Mapping[str, Any] | None = None,
        credentials: Callable[[], Mapping[str, Any]] | str | None = None,
        version: Version | Sequence[tuple[int, Version]] | None = None,
        name: str | None = None,
        format: str | None = None,  # noqa: A002 - the word for it
        columns: Mapping[str, str] | Sequence[str] | None = None,
        hidden: bool = False,
        media_root: str | os.PathLike[str] | None = None,
    ) -> None:
        refuse_overrides(type(self), Stream, _NEVER_CALLED, "a Stream's hook is _download_file")
        if remote is None and local is None:
            raise ValueError("Stream needs remote= (a folder or URL), local= (a folder), or both")
        for uri in (remote, local):
            if uri is not None and not os.fspath(uri):
                raise ValueError("remote= and local= must not be empty; pass '.' for the working directory, or None")
            folder, slash, last = os.fspath(uri or "").rstrip("/").rpartition("/")
            if slash and last == INDEX_NAME:
                raise ValueError(
                    f"Stream takes a folder, not its index; found {redact(str(uri))}. Pass {redact(folder)!r}"
                )
        if sum(weight is not None for weight in (proportion, repeat, choose)) > 1:
            raise ValueError(f"a stream has one weight; found {proportion=}, {repeat=}, {choose=}. Pass one of them")
        self.remote = None if remote is None else os.path.expanduser(os.fspath(remote))  # noqa: PTH111 - may be a URL
        if self.remote is not None and self.remote.startswith(_DELTA):
            self.remote = self.remote.removeprefix(_DELTA)
            format = "delta"  # noqa: A001 - the word for it
            if "://" not in self.remote and not self.remote.startswith("/"):
                raise ValueError(
                    f"{_DELTA} takes the whole URL of a table, or a path from the root; found {redact(str(remote))!r}. "
                    f"Write e.g. {_DELTA}s3://{redact(self.remote)}, or pass the table's own URL"
                )
        self._options = by_name("options must be those of the store", options, "{'endpoint_url': ...}")
        self.options = self._options  # a subclass may use the name for its own
        if credentials is not None:
            self._options["credentials"] = credentials
        if remote is None and self._options:
            raise ValueError(f"options are those of the store of remote=; found {', '.join(self._options)} without one")
        self.local = None if local is None else os.fspath(local)
        self.split = split or ""
        pairs = list(version) if isinstance(version, (list, tuple)) else [(0, version)]
        self._versions = _checked_versions(pairs)
        self.version = self._versions[-1][1]
        self.proportion = proportion
        self.repeat = repeat
        self.choose = choose
        self.download_retry = download_retry
        self.download_timeout = download_timeout
        self.validate_hash = validate_hash
        self.keep_zip = keep_zip
        self.safe_keep_zip = bool(keep_zip) or self.remote in (None, self.local)
        self._label = name or shown_url(os.fspath(remote or local or "")).rstrip("/").rpartition("/")[2]
        self._store: Store | None = None  # for a hook that calls super()
        media = None if media_root is None else media_store(media_root, self.remote or "", self._options)
        # As far as it does not depend on the split and the version.
        self._in_place = InPlace(format, columns, hidden=hidden, media=media)

    def __repr__(self) -> str:
        try:
            name = name_of(self)
        except (ImportError, ValueError):  # of a URL that no store opens; using the stream raises it
            name = redact(str(self.remote))
        return f"{type(self).__name__}({name!r})"

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        """Download a file of the dataset to ``local/split/to_basename``; returns that path."""
        store = self._store or _store_of(self, CacheDefaults())
        to = Path(self.local or "", self.split, to_basename or from_basename)
        store.get(from_basename, to)
        return str(to)


@dataclass(frozen=True)
class CacheDefaults:
    """Settings of a dataset for all its streams."""

    config: CacheConfig = field(default_factory=CacheConfig)
    retries: int | None = None
    timeout_s: float | None = None


class DownloadHook:
    """The store of a stream whose class overrides `_download_file`, which then downloads whole files."""

    def __init__(self, stream: Stream, store: Store, folder: Path) -> None:
        self._stream = stream
        self._folder = folder
        self.url = store.url
        self.identity = store.identity

    def get(self, name: str, to: Path, *_: Any) -> int:
        """Download a whole file into `to`."""
        path = Path(self._stream._download_file(name, os.path.relpath(to, self._folder)))  # noqa: SLF001 - its hook
        if path != to:
            path.replace(to)
        return to.stat().st_size


# Functions of a stream, not methods: a subclass's own names cannot collide with them. A stream is a value: what is
# changed is a copy.


def with_split(stream: Stream, split: str) -> Stream:
    """The stream of a dataset with this split, which counts where the stream has none of its own."""
    return _changed(stream, split=stream.split or split)


def with_version(stream: Stream, version: Version | None) -> Stream:
    """The stream at another version."""
    return _changed(stream, version=version)


def _changed(stream: Stream, **values: Any) -> Stream:
    changed = object.__new__(type(stream))  # not by `copy`, which leaves out what is not pickled
    vars(changed).update(vars(stream), **values)
    return changed


def weights_of(stream: Stream) -> StreamWeights:
    """How much the stream gives to an epoch."""
    return StreamWeights(proportion=stream.proportion, repeat=stream.repeat, choose=stream.choose)


def name_of(stream: Stream) -> str:
    """The URL or folder of a stream, for messages; without credentials."""
    if stream.remote is not None:
        return _store_of(stream, CacheDefaults()).url
    return str(Path(str(stream.local), stream.split))


def labels_of(streams: Sequence[Stream]) -> list[str]:
    """The short names of the streams of a mix. Raises ValueError where two are equal."""
    labels = [stream._label for stream in streams]  # noqa: SLF001 - of this file's own class
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"The streams of a schedule must have different names, but they are {', '.join(map(repr, labels))}. Pass "
            "Stream(name=...)."
        )
    return labels


def index_of(stream: Stream, cache: ShardCache) -> Index:
    """The index that the stream reads: the newest, or that of its version. Raises NotFoundError for an unknown one."""
    index = version_index(stream, cache)
    in_place = stream._in_place  # noqa: SLF001 - of this file's own class
    if in_place.kind is not None and index.num_shards and not is_made(index):
        raise ValueError(
            f"format= is of a folder without an index.json, but {index.where} is an MDS dataset; found "
            f"{in_place.kind!r}. Omit format, or pass the files that you mean, e.g. FOLDER/*.parquet"
        )
    columns = in_place.columns
    if columns is None:
        return index
    index = index.choose(columns)
    encodings = columns if isinstance(columns, Mapping) else {}
    wrong = [
        name
        for name, encoding in encodings.items()
        for column_set in index.column_sets
        if column_set.get(name, encoding) != encoding
    ]
    if wrong:
        raise ValueError(
            "columns: those of an MDS dataset, or of a former version, keep their encodings; "
            f"{index.where} has another one for {', '.join(dict.fromkeys(wrong))}. Pass a list of names."
        )
    return index


def _holds_table(store: Store) -> bool:
    """Whether this is a Delta table; no, where nothing can be listed: one could not be read there."""
    try:
        return is_table(store)
    except UnavailableError:
        raise
    except StoreError:  # no right to list, or a web server
        return False


def version_index(stream: Stream, cache: ShardCache) -> Index:
    """As `index_of`, with all columns."""
    wanted = stream.version
    if wanted is None or (isinstance(wanted, int) and cache.other is not None and _holds_table(cache.store)):
        return cache.newest_index()
    if isinstance(wanted, int) or len(wanted) < _DIGITS:
        if isinstance(cache.store, DownloadHook):
            raise ValueError(
                f"a stream that overrides _download_file takes {_DIGITS} digits of a version; found {wanted!r}. Pass "
                "those that `lightning-stream log` lists"
            )
        some = wanted
        wanted = _of_other_format(cache, lambda: read_version(cache.store, some)).index.digest
    name = version_name(wanted)
    return _of_other_format(cache, lambda: cache.index(name))  # it never changes: the cache need not ask the store


def with_newest_lengths(cache: ShardCache, index: Index) -> Index:
    """The index with the lengths that its version has now, all columns: a version in the cache may have got others."""
    version = version_name(index.digest)
    if (cache.folder / version).is_file():
        with suppress(StoreError):  # it was overwritten, or nobody can be asked
            return cache.newest_index(version)
    return index


def _of_other_format(cache: ShardCache, read: Callable[[], T]) -> T:
    """Call a function; where it finds nothing since the files are in another format, its error states that."""
    try:
        return read()
    except NotFoundError as error:
        if cache.other is None or not is_made(index := cache.newest_index()):
            raise
        raise NotFoundError(
            f"version= opens versions of MDS datasets and Delta tables. {index.where} is made of files in another "
            "format, and this machine's cache holds no such former index. Restore the former files."
        ) from error


def changes_since(versions: Sequence[str], indexes: Sequence[Index], caches: Sequence[ShardCache]) -> str:
    """Describe which files in other formats changed since a state was written, whose versions these are."""
    changes = []
    for version, index, cache in zip(versions, indexes, caches, strict=False):
        if is_made(index) and not index.digest.startswith(version[:_DIGITS]):
            with suppress(NotFoundError):
                changes.append(changed_files(cache.index(version_name(version)), index))
    return " ".join(filter(None, changes))


def versions_of(stream: Stream) -> tuple[tuple[int, Version | None], ...]:
    """The steps at which the stream has another version, and the versions; the first step is 0."""
    return stream._versions  # noqa: SLF001 - of this file's own class


def version_at(stream: Stream, step: int) -> Version | None:
    """The version that the stream has at an optimizer step."""
    return [version for begin, version in versions_of(stream) if begin <= step][-1]


def _checked_versions(pairs: Sequence[Any]) -> tuple[tuple[int, Version | None], ...]:
    """The pairs of a step and a version. ValueError for others."""
    is_right = all(isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], int) for pair in pairs)
    steps = [pair[0] for pair in pairs] if is_right else []
    if not steps or steps[0] != 0 or steps != sorted(set(steps)):
        raise ValueError(
            "version takes a version, or pairs of an optimizer step and the version from there on, with steps that "
            f"rise from 0; found {pairs!r}"
        )
    if len(pairs) > 1 and any(version is None for _, version in pairs):
        raise ValueError(f"a switch of versions names each version; found {pairs!r}. See `lightning-stream log PATH`")
    return tuple((step, None if version is None else _version(version)) for step, version in pairs)


def _version(version: str | int) -> str | int:
    """The number of a version, or the digits of its digest, from these or from the name of its file."""
    if isinstance(version, int):
        return version
    match = _VERSION.fullmatch(str(version))
    if match is None:
        raise ValueError(
            "version must be a number, or 6 or more hex digits of an index's digest, or a file name "
            f"index.<16 digits>.json; found {version!r}. See `lightning-stream log PATH`, or the error of the resumed "
            "training run"
        )
    return match[1]


def cache_of(
    stream: Stream, defaults: CacheDefaults, counters: Counters | None = None, together: Spaces | None = None
) -> ShardCache:
    """The cache of the stream's shards, with the dataset's settings where the stream has none of its own."""
    store = None if stream.remote is None else _store_of(stream, defaults)
    other = None
    if store is not None and type(stream)._download_file is not Stream._download_file:  # noqa: SLF001 - its hook
        stream = _changed(stream, local=stream.local or str(default_folder(store.identity)), _store=store)
        to = Path(str(stream.local), stream.split).expanduser().absolute()
        store = cast("Store", DownloadHook(stream, store, to))
    else:
        table_version = stream.version if isinstance(stream.version, int) else None
        names = _place_of(stream)[1]
        other = replace(stream._in_place, version=table_version, names=names)  # noqa: SLF001 - of this file's own class
    config = replace(
        defaults.config,
        keep_zip=defaults.config.keep_zip if stream.keep_zip is None else stream.keep_zip,
        validate_hash=stream.validate_hash or defaults.config.validate_hash,
    )
    folder = None if stream.local is None else Path(stream.local, stream.split)
    return ShardCache(store, folder, config, other, counters, together)


def _store_of(stream: Stream, defaults: CacheDefaults) -> Store:
    retries = defaults.retries if stream.download_retry is None else stream.download_retry
    timeout = defaults.timeout_s if stream.download_timeout is None else stream.download_timeout
    policy = {name: value for name, value in (("retries", retries), ("timeout_s", timeout)) if value is not None}
    return open_store(_place_of(stream)[0], {**policy, **stream._options})  # noqa: SLF001 - of this file's own class


def _place_of(stream: Stream) -> tuple[str, str]:
    """The folder or URL of a stream, and what names its files there."""
    url = stream.remote or ""
    url = f"{url.rstrip('/')}/{stream.split}" if stream.split else url
    is_folder = "://" not in url and Path(url).is_dir()
    has_hook = type(stream)._download_file is not Stream._download_file  # noqa: SLF001 - its hook
    return (url, "") if is_folder or has_hook else split_place(url)
