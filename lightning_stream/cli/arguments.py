"""Arguments that several commands take: a dataset, options of its store, the streams of a mixture."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_stream.errors import FormatError, NotFoundError, is_secret
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights
from lightning_stream.order.forget import Forgotten
from lightning_stream.reading.bad_samples import BadDataPolicy
from lightning_stream.reading.filters import Filters, ids_of
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import CacheDefaults, Stream, cache_of, index_of
from lightning_stream.reading.stream_shards import ReaderConfig
from lightning_stream.sources.in_place import InPlace
from lightning_stream.stores import LocalStore, Store, open_store
from lightning_stream.version_log import read_index

_SPLITS = ("train", "val", "validation", "valid", "test", "eval")
_BOUNDS = re.compile(r"(.+)=([0-9]*):([0-9]*)")
_LEAST_DIGITS = 6  # of a digest, in the name of a version
_WEIGHTED = re.compile(r"(.+)=(?:(proportion|repeat|choose):)?([0-9]*\.?[0-9]+)")


@dataclass(frozen=True)
class Reading:
    """How a dataset is read, as `Stream` takes it."""

    format: str | None = None
    columns: Mapping[str, str] | Sequence[str] | None = None
    version: str | int | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Reading:
        """What the flags of :func:`add_reading` say."""
        names, version = options.columns, options.version
        columns = None if names is None else names if any(names.values()) else list(names)
        is_number = version is not None and version.isdigit() and len(version) < _LEAST_DIGITS
        return cls(options.format, columns, int(version) if is_number else version)


_AS_IT_IS = Reading()


@dataclass(frozen=True)
class FoundDataset:
    """A dataset that an argument names: its URL as it was given, its files, and its index."""

    remote: str
    store: Store
    index: Index
    how: Reading = _AS_IT_IS

    @property
    def format(self) -> str | None:
        """The name of another format that is read in place; None for MDS and row formats."""
        origin = self.index.entry(0).raw.origin if self.index.num_shards else None
        return None if origin is None else origin.kind

    def stream(self, folder: str, options: Mapping[str, Any] | None, **settings: Any) -> Stream:
        """The stream that reads it, with a folder for what is downloaded."""
        local = None if isinstance(self.store, LocalStore) else folder
        return Stream(self.remote, local=local, options=options, **vars(self.how), **settings)


def add_dataset(parser: argparse.ArgumentParser, **kwargs: Any) -> None:
    """Let a command take the folder or URL of a dataset."""
    help_text = "folder or URL of a dataset, or of a folder of splits"
    parser.add_argument("remote", metavar="PATH|URL", help=help_text, **kwargs)


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Let a command take how a dataset is read, as `Stream` takes it."""
    reading = parser.add_argument_group("how the data is read, as in StreamingDataset")
    reading.add_argument("--format", help="format of files without an index.json: parquet, arrow, jsonl, ...")
    text = "column to read of such files, and its encoding; may be repeated (default: all)"
    reading.add_argument("--columns", action=_Columns, metavar="NAME[=ENCODING]", help=text)
    text = "version of the dataset: a number, or digits of its digest; of a Delta table: its number"
    reading.add_argument("--version", metavar="VERSION", help=text)


class _Columns(argparse.Action):
    """Collects ``NAME`` or ``NAME=ENCODING``, given any number of times, in a dict."""

    def __call__(self, _parser: Any, options: argparse.Namespace, given: Any, _flag: Any = None) -> None:
        """Add a column."""
        name, _, encoding = given.partition("=")
        setattr(options, self.dest, {**(getattr(options, self.dest) or {}), name: encoding or None})


class Pairs(argparse.Action):
    """Collects ``KEY=VALUE``, given any number of times, in a dict; refuses secrets among the options of a store."""

    def __call__(self, _parser: Any, options: argparse.Namespace, given: Any, _flag: Any = None) -> None:
        """Add a pair."""
        name, equals, value = given.partition("=")
        of_store = "store" in self.dest
        if not equals or not name:
            is_name = not of_store or re.fullmatch(r"[a-z_]*=?", given)  # else it may be a secret
            raise argparse.ArgumentError(self, f"expected KEY=VALUE, got {repr(given) if is_name else 'other text'}")
        if of_store and is_secret(name, value, of_store=True):
            message = f"a secret must not be on a command line; set the variable of {name}"
            raise argparse.ArgumentError(self, message)
        with suppress(ValueError):  # a number, a list or a truth value; else text
            value = json.loads(value.lower() if value.lower() in ("true", "false") else value)
        setattr(options, self.dest, {**(getattr(options, self.dest) or {}), name: value})


def add_store_options(parser: argparse.ArgumentParser, flag: str = "--store-options") -> None:
    """Let a command take options of a store."""
    help_text = "storage option, e.g. endpoint_url=http://127.0.0.1:9000; credentials are read from the environment"
    parser.add_argument(flag, action=Pairs, metavar="KEY=VALUE", help=help_text)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Let a command take a dataset, how it is read, and the options of its store."""
    add_dataset(parser)
    add_reading(parser)
    add_store_options(parser)


def add_streams(parser: argparse.ArgumentParser) -> None:
    """Let a command take the datasets of a mixture."""
    parser.add_argument(
        "--stream",
        action="append",
        default=[],
        metavar="URL[=WEIGHT]",
        help="a dataset, in a mixture with its weight: 0.3 (proportion), repeat:2 or choose:1000; once for each stream",
    )


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Let a command take what chooses among the samples, as `StreamingDataset` takes it."""
    rules = parser.add_argument_group("samples that are kept, as in StreamingDataset")
    rules.add_argument(
        "--filter-lengths",
        action=_Bounds,
        metavar="NAME=LEAST:GREATEST",
        help="lengths that are kept, e.g. tokens=64:4096, tokens=64: or tokens=:4096; once for each name",
    )
    rules.add_argument("--exclude-ids", metavar="FILE", help="ids of samples to exclude: one a line, or .npy")
    rules.add_argument("--forget", metavar="FILE", help="ids of samples that others replace, in the same form")


class _Bounds(argparse.Action):
    """Collects ``NAME=LEAST:GREATEST``, given any number of times, in a dict."""

    def __call__(self, _parser: Any, options: argparse.Namespace, given: Any, _flag: Any = None) -> None:
        """Add a pair of bounds."""
        match = _BOUNDS.fullmatch(given)
        if match is None:
            raise argparse.ArgumentError(self, f"expected NAME=LEAST:GREATEST, got {given!r}")
        bounds = tuple(int(one) if one else None for one in match.group(2, 3))
        setattr(options, self.dest, {**(getattr(options, self.dest) or {}), match[1]: bounds})


def datasets_at(remote: str, options: Mapping[str, Any] | None, how: Reading = _AS_IT_IS) -> list[FoundDataset]:
    """Find the dataset in a folder, or the datasets in its splits.

    Raises:
        NotFoundError: There is none.
        ValueError: There are files that cannot be read in place.
    """
    found = _indexed(remote, options) if how.format is None else []
    if found:
        return found if how == _AS_IT_IS else [_as_stream(one.remote, options, how) for one in found]
    if how != _AS_IT_IS:
        return [_as_stream(remote, options, how)]
    with suppress(NotFoundError):
        return [_as_stream(remote, options, how)]
    raise NotFoundError(
        f"a dataset is a folder with an {INDEX_NAME}; {open_store(remote, options).url} has none, none of its splits "
        f"({', '.join(_SPLITS)}) has one, and there are no files of a format that is read in place. Check the path "
        "or URL; a writer that did not finish leaves no index."
    )


def datasets_of(options: argparse.Namespace) -> list[FoundDataset]:
    """The datasets that the arguments of :func:`add_source` name; see :func:`datasets_at`."""
    return datasets_at(options.remote, options.store_options, Reading.of(options))


def _indexed(remote: str, options: Mapping[str, Any] | None) -> list[FoundDataset]:
    """The dataset with an index.json in a folder, or those in its splits."""
    store = open_store(remote, options)
    try:
        return [_read(remote, store, options)]
    except NotFoundError as error:
        if "there is no" in str(error):  # bucket, or container
            raise
    splits: Sequence[str] = _SPLITS
    if isinstance(store, LocalStore):
        splits = sorted(path.parent.name for path in Path(store.folder).glob(f"*/{INDEX_NAME}"))
    found = []
    for split in splits:
        with suppress(NotFoundError):
            url = f"{remote.rstrip('/')}/{split}"
            found.append(_read(url, open_store(url, options), options))
    return found


def _read(remote: str, store: Store, options: Mapping[str, Any] | None) -> FoundDataset:
    try:
        return FoundDataset(remote, store, read_index(store))
    except FormatError:
        if not InPlace().recognises(store.read(INDEX_NAME)):
            raise
        return _as_stream(remote, options, _AS_IT_IS)


def _as_stream(remote: str, options: Mapping[str, Any] | None, how: Reading) -> FoundDataset:
    """The dataset as `StreamingDataset` reads it; an index that is made stays in the cache, for that too."""
    stream = Stream(remote, options=options, **vars(how))
    cache = cache_of(stream, CacheDefaults())
    return FoundDataset(remote, cache.store, index_of(stream, cache), how)


def mds_at(remote: str, options: Mapping[str, Any] | None, remedy: str) -> list[FoundDataset]:
    """Find datasets that have an index.json beside them. ValueError with the remedy for any other format."""
    found = datasets_at(remote, options)
    if other := next((one.format for one in found if one.format), None):
        raise ValueError(f"{found[0].store.url} holds data of the format {other}, which is read in place. {remedy}")
    return found


def _weighted(text: str) -> tuple[str, StreamWeights]:
    """The URL and the weights of ``URL[=WEIGHT]``."""
    match = _WEIGHTED.fullmatch(text)
    if match is None:
        return text, StreamWeights()
    kind, value = match[2] or "proportion", float(match[3])
    weight: dict[str, Any] = {kind: int(value) if kind == "choose" else value}
    return match[1], StreamWeights(**weight)


@dataclass(frozen=True)
class Mixture:
    """The datasets that ``--stream`` names, with their weights."""

    reader: SampleReader
    weights: Sequence[StreamWeights]

    @property
    def snapshot(self) -> Snapshot:
        """The samples of these datasets that are kept."""
        return self.reader.snapshot

    def order(self, config: OrderConfig, lengths: str | None = None, forget: str | None = None) -> RunOrder:
        """The order of a training run over this data, with these lengths of documents and this file of ids."""
        forgotten = self.forgotten(forget)
        config = replace(config, forgotten=None if forgotten is None else forgotten.digest)
        numbers = None if lengths is None else self.reader.lengths(lengths)
        return RunOrder(self.snapshot, self.weights, config, numbers, forgotten=forgotten)

    def forgotten(self, file: str | None) -> Forgotten | None:
        """The samples whose ids a file lists; None without one."""
        return None if file is None else Forgotten.of(self.snapshot, ids_of(file))


def mixtures_of(streams: Sequence[str], options: argparse.Namespace, folder: str) -> list[Mixture]:
    """Find the mixture of these streams; of a single one that is a folder of splits, each split.

    The rules of :func:`add_rules` choose among the samples. What is downloaded is kept in the folder.

    Raises:
        ValueError: One of several streams is a folder of splits.
    """
    urls, weights = zip(*map(_weighted, streams), strict=True)
    how = Reading.of(options)
    if how.version is not None and len(urls) > 1:
        raise ValueError(f"--version is that of one dataset; found {len(urls)} streams. Omit it, or pass one stream")
    found = [datasets_at(url, options.store_options, how) for url in urls]
    if len(found) == 1:
        chosen = [[dataset] for dataset in found[0]]
    else:
        for text, datasets in zip(streams, found, strict=True):
            if len(datasets) > 1:
                splits = " or ".join(dataset.store.url for dataset in datasets)
                raise ValueError(f"a stream of a mixture is one dataset; {text} is a folder of splits. Pass {splits}")
        chosen = [[dataset for (dataset,) in found]]
    return [Mixture(_reader(one, weights, options, f"{folder}/{number}"), weights) for number, one in enumerate(chosen)]


def _reader(
    datasets: Sequence[FoundDataset], weights: Sequence[StreamWeights], options: argparse.Namespace, folder: str
) -> SampleReader:
    streams = [
        dataset.stream(f"{folder}/{number}", options.store_options, **vars(weight))
        for number, (dataset, weight) in enumerate(zip(datasets, weights, strict=True))
    ]
    reader = SampleReader(streams, CacheDefaults(), ReaderConfig())
    reader.indexes = tuple(dataset.index for dataset in datasets)  # which were read to find the datasets
    return Filters(None, options.filter_lengths, options.exclude_ids, BadDataPolicy()).applied(reader)


def one_dataset_at(remote: str, options: argparse.Namespace, rule: str) -> FoundDataset:
    """Find the dataset in a folder; ValueError, which begins with the rule, for a folder of splits."""
    found = datasets_at(remote, options.store_options, Reading.of(options))
    if len(found) > 1:
        splits = " or ".join(dataset.store.url for dataset in found)
        raise ValueError(f"{rule}; {remote} is a folder of splits. Pass {splits}")
    return found[0]


def imported(text: str, flag: str) -> Callable[[Any], Any]:
    """The function that ``MODULE:FUNCTION`` names. ValueError if there is none."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{flag} takes MODULE:FUNCTION, e.g. my_package.data:prepare; found {text!r}")
    sys.path.insert(0, str(Path.cwd()))  # a program that is installed does not look there by itself
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{flag} {text} cannot be imported: {error}. Run the command in the module's folder"
        ) from error
    return found  # type: ignore[no-any-return]
