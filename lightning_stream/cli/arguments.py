"""Arguments that several commands take: a dataset, options of its store, the streams of a mixture."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_stream.errors import FormatError, NotFoundError, StoreError, UnavailableError, is_secret
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
_FIRST_REQUEST = {"retries": 1, "timeout_s": 4}  # a user waits for it, and a wrong URL or network shows there
# An argument, or several, and its first sentence in a docstring.
_DOCUMENTED = re.compile(r"^ +([a-z_, ]+): (\S.*?\.)(?=\s+[A-Z0-9]|\n +[a-z_, ]+:|\s*\Z)", re.MULTILINE | re.DOTALL)

Options = Mapping[str, Any] | None
Reading = Mapping[str, Any]  # how a dataset is read: arguments of `Stream`


@dataclass(frozen=True)
class FoundDataset:
    """A dataset that an argument names: its URL as it was given, its files, its index, and how it is read."""

    remote: str
    store: Store
    index: Index
    how: Reading

    @property
    def format(self) -> str | None:
        """The name of another format that is read in place; None for MDS and row formats."""
        origin = self.index.entry(0).raw.origin if self.index.num_shards else None
        return None if origin is None else origin.kind

    @property
    def num_samples(self) -> int:
        """Samples that are not deleted."""
        return self.index.num_samples - self.index.num_deleted

    @property
    def is_local(self) -> bool:
        """Whether it is in a folder of this machine."""
        return isinstance(self.store, LocalStore)

    def stream(self, folder: str | None, options: Options, **settings: Any) -> Stream:
        """The stream that reads it, with a folder for what is downloaded."""
        return Stream(self.remote, local=None if self.is_local else folder, options=options, **self.how, **settings)


def reader_over(streams: Sequence[Stream], config: ReaderConfig | None = None) -> SampleReader:
    """A reader of these streams."""
    return SampleReader(streams, CacheDefaults(), config or ReaderConfig())


def add_dataset(parser: argparse.ArgumentParser, **kwargs: Any) -> None:
    """Let a command take the folder or URL of a dataset."""
    help_text = "folder or URL of a dataset, or of a folder of splits"
    parser.add_argument("remote", metavar="PATH|URL", help=help_text, **kwargs)


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Let a command take how a dataset is read, as `Stream` takes it."""
    reading = parser.add_argument_group("how the data is read, as in StreamingDataset")
    reading.add_argument("--format", help="format of files without an index.json: parquet, arrow, jsonl, ...")
    text = "column to read, and its encoding in files without an index.json; may be repeated (default: all)"
    reading.add_argument("--columns", action=Pairs, metavar="NAME[=ENCODING]", help=text)
    text = "version of the dataset: a number, or digits of its digest; of a Delta table: its number"
    reading.add_argument("--version", metavar="VERSION", help=text)


def reading_of(options: argparse.Namespace) -> Reading:
    """What the flags of :func:`add_reading` say; empty without any."""
    names, version = options.columns, options.version
    is_number = version is not None and version.isdigit() and len(version) < _LEAST_DIGITS
    has_encodings = names is not None and any(names.values())
    settings = {
        "format": options.format,
        "columns": names if has_encodings or names is None else list(names),
        "version": int(version) if is_number else version,
    }
    return {name: value for name, value in settings.items() if value is not None}


class Pairs(argparse.Action):
    """Collects ``KEY=VALUE``, given any number of times, in a dict; refuses secrets among the options of a store."""

    def __call__(self, _parser: Any, options: argparse.Namespace, text: Any, _flag: Any = None) -> None:
        """Add a pair."""
        name, equals, value = text.partition("=")
        of_store = "store" in self.dest
        needs_value = self.metavar != "NAME[=ENCODING]"
        if not name or (needs_value and not equals):
            is_name = not of_store or re.fullmatch(r"[a-z_]*=?", text)  # else it may be a secret
            raise argparse.ArgumentError(self, f"expected KEY=VALUE, got {repr(text) if is_name else 'other text'}")
        if of_store and is_secret(name, value, of_store=True):
            message = f"a secret must not be on a command line; set the variable of {name}"
            raise argparse.ArgumentError(self, message)
        parsed: Any = value if equals else None
        with suppress(ValueError):  # a number, a list or a truth value; else text
            parsed = json.loads(value.lower() if value.lower() in ("true", "false") else value)
        setattr(options, self.dest, {**(getattr(options, self.dest) or {}), name: parsed})


def add_signature(parser: argparse.ArgumentParser, function: Callable[..., Any], names: Iterable[str]) -> None:
    """Let a command take arguments of a Python function: their kinds and defaults, and what its docstring says."""
    parameters = inspect.signature(function).parameters
    texts: dict[str, str] = {}
    for several, text in _DOCUMENTED.findall(function.__doc__ or ""):
        texts |= dict.fromkeys(several.split(", "), " ".join(text.replace("%", "%%").replace("``", "").split()))
    for name in names:
        kind, default = str(parameters[name].annotation), parameters[name].default
        settings: dict[str, Any] = {"type": _text, "default": default}
        if kind == "bool":
            settings = {"action": "store_true"}
        elif kind.startswith("Mapping"):
            settings = {"action": Pairs, "metavar": "NAME=VALUE"}
        elif kind.startswith("Iterable"):
            settings["type"] = _list
        elif kind.startswith(("int", "float")) and "str" not in kind:
            settings["type"] = int if kind.startswith("int") else float
        parser.add_argument(f"--{name.replace('_', '-')}", help=texts.get(name), **settings)


def _text(text: str) -> str | None:
    return None if text == "none" else text


def _list(text: str) -> list[str]:
    return [] if text == "none" else text.split(",")


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

    def __call__(self, _parser: Any, options: argparse.Namespace, text: Any, _flag: Any = None) -> None:
        """Add a pair of bounds."""
        match = _BOUNDS.fullmatch(text)
        if match is None:
            raise argparse.ArgumentError(self, f"expected NAME=LEAST:GREATEST, got {text!r}")
        bounds = tuple(int(limit) if limit else None for limit in match.group(2, 3))
        setattr(options, self.dest, {**(getattr(options, self.dest) or {}), match[1]: bounds})


def require_answer(remote: str, options: Options) -> None:
    """Raise UnavailableError within seconds where a store does not answer; later requests are tried for longer."""
    try:
        open_store(remote, {**_FIRST_REQUEST, **(options or {})}).open(INDEX_NAME, 0, 1).close()
    except UnavailableError:
        raise
    except (StoreError, OSError, ValueError):  # which the command meets, too
        return


def datasets_at(remote: str, options: Options, how: Reading | None = None) -> list[FoundDataset]:
    """Find the dataset in a folder, or the datasets in its splits.

    Raises:
        NotFoundError: There is none.
        UnavailableError: The store does not answer.
        ValueError: There are files that cannot be read in place.
    """
    require_answer(remote, options)
    how = how or {}
    if found := [] if "format" in how else _indexed(remote, options):
        return [_as_stream(dataset.remote, options, how) for dataset in found] if how else found
    if how:
        return [_as_stream(remote, options, how)]
    try:
        return [_as_stream(remote, options, how)]
    except NotFoundError as error:
        raise NotFoundError(
            f"{open_store(remote, options).url} is no dataset: it has no {INDEX_NAME}, none of its splits "
            f"({', '.join(_SPLITS)}) has one, and there are no files of a format that is read in place. {error}"
        ) from error


def datasets_of(options: argparse.Namespace) -> list[FoundDataset]:
    """The datasets that the arguments of :func:`add_source` name; see :func:`datasets_at`."""
    return datasets_at(options.remote, options.store_options, reading_of(options))


def _indexed(remote: str, options: Options) -> list[FoundDataset]:
    """The dataset with an index.json in a folder, or those in its splits."""
    store = open_store(remote, options)
    with suppress(NotFoundError):
        return [_read(remote, store, options)]
    splits: Sequence[str] = _SPLITS
    if isinstance(store, LocalStore):
        splits = sorted(path.parent.name for path in Path(store.folder).glob(f"*/{INDEX_NAME}"))
    found = []
    for split in splits:
        with suppress(NotFoundError):
            url = f"{remote.rstrip('/')}/{split}"
            found.append(_read(url, open_store(url, options), options))
    return found


def _read(remote: str, store: Store, options: Options) -> FoundDataset:
    try:
        return FoundDataset(remote, store, read_index(store), {})
    except FormatError:
        if not InPlace().recognises(store.read(INDEX_NAME)):
            raise
        return _as_stream(remote, options, {})


def _as_stream(remote: str, options: Options, how: Reading) -> FoundDataset:
    """The dataset as `StreamingDataset` reads it; an index that is made stays in the cache, for that too."""
    stream = Stream(remote, options=options, **how)
    cache = cache_of(stream, CacheDefaults())
    return FoundDataset(remote, cache.store, index_of(stream, cache), how)


def mds_at(remote: str, options: Options, remedy: str) -> list[FoundDataset]:
    """Find datasets that have an index.json beside them. ValueError with the remedy for any other format."""
    found = datasets_at(remote, options)
    if other := next((dataset.format for dataset in found if dataset.format), None):
        raise ValueError(f"{found[0].store.url} holds data of the format {other}, which is read in place. {remedy}")
    return found


def only_dataset(found: Sequence[FoundDataset], rule: str) -> FoundDataset:
    """The one dataset; ValueError, which begins with the rule, for several splits."""
    if len(found) > 1:
        splits = " or ".join(dataset.store.url for dataset in found)
        raise ValueError(f"{rule}; this is a folder of splits. Pass {splits}")
    return found[0]


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
    how = reading_of(options)
    if "version" in how and len(urls) > 1:
        raise ValueError(f"--version is that of one dataset; found {len(urls)} streams. Omit it, or pass one stream")
    found = [datasets_at(url, options.store_options, how) for url in urls]
    if len(found) == 1:
        chosen = [[dataset] for dataset in found[0]]
    else:
        chosen = [[only_dataset(datasets, "a stream of a mixture is one dataset") for datasets in found]]
    return [
        Mixture(_reader(datasets, weights, options, f"{folder}/{number}"), weights)
        for number, datasets in enumerate(chosen)
    ]


def _reader(
    datasets: Sequence[FoundDataset], weights: Sequence[StreamWeights], options: argparse.Namespace, folder: str
) -> SampleReader:
    streams = [
        dataset.stream(f"{folder}/{number}", options.store_options, **vars(weight))
        for number, (dataset, weight) in enumerate(zip(datasets, weights, strict=True))
    ]
    reader = reader_over(streams)
    reader.indexes = tuple(dataset.index for dataset in datasets)  # which were read to find the datasets
    return Filters(None, options.filter_lengths, options.exclude_ids, BadDataPolicy()).applied(reader)


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
