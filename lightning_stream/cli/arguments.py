"""Arguments that several commands take: a dataset, options of its store, the streams of a mixture."""

from __future__ import annotations

import inspect
import logging
import math
import re
import sys
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from lightning_stream.errors import FormatError, NotFoundError, StoreError, UnavailableError, is_secret
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.reading.filters import Filters
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.shard_table import ReaderConfig
from lightning_stream.reading.stream import CacheDefaults, Stream, cache_of, index_of
from lightning_stream.reading.stream_shards import StreamShards
from lightning_stream.sources.in_place import InPlace
from lightning_stream.stores import LocalStore, Store, open_store, option_of
from lightning_stream.version_log import read_index, version_of

_SPLITS = ("train", "val", "validation", "valid", "test", "eval")
_WEIGHTED = re.compile(r"(.+)=(?:(proportion|repeat|choose):)?([0-9]*\.?[0-9]+)")
_FIRST_REQUEST = {"retries": 1, "timeout_s": 4}  # a user waits for it, and a wrong URL or network shows there
# An argument, or several, and its first sentence in a docstring.
_DOCUMENTED = re.compile(r"^ +([a-z_, ]+): (\S.*?\.)(?=\s+[A-Z0-9]|\n +[a-z_, ]+:|\s*\Z)", re.MULTILINE | re.DOTALL)

# The flag of commands whose work is cut in pieces.
SPARK = {"--spark MASTER": "do the work on Spark: spark://host:7077, sc://host:15002, yarn, k8s://..., local[8]"}

Options = Mapping[str, Any] | None
Reading = Mapping[str, Any]  # how a dataset is read: arguments of `Stream`


@dataclass(frozen=True)
class OpenDataset:
    """A dataset that an argument names: its URL as it was given, its files, its index, and how it is read."""

    remote: str
    options: Options
    store: Store
    index: Index
    how: Reading

    @property
    def format(self) -> str | None:
        """The name of another format that is read in place; None for MDS and row formats."""
        origin = self.index.entry(0).raw.origin if self.index.num_shards else None
        return None if origin is None else origin.kind

    @property
    def is_local(self) -> bool:
        """Whether it is in a folder of this machine."""
        return isinstance(self.store, LocalStore)

    def stream(self, folder: str | None, **settings: Any) -> Stream:
        """The stream that reads it, with a folder for what is downloaded."""
        local = None if self.is_local else folder
        return Stream(self.remote, local=local, options=self.options, **self.how, **settings)

    def reader(self, folder: str | None) -> SampleReader:
        """A reader of it."""
        return _reader([self.stream(folder)], [self])


def reader_over(streams: Sequence[Stream], config: ReaderConfig | None = None) -> SampleReader:
    """A reader of these streams."""
    return SampleReader(StreamShards(streams, config=config))


def _reader(streams: Sequence[Stream], datasets: Sequence[OpenDataset]) -> SampleReader:
    """A reader of these streams, with the indexes that were read to find the datasets."""
    reader = reader_over(streams)
    reader.shards.indexes = tuple(dataset.index for dataset in datasets)
    return reader


class Pairs(Action):
    """Collects ``KEY=VALUE``, given any number of times, in a dict; refuses secrets among the options of a store."""

    def __call__(self, _parser: Any, options: Namespace, text: Any, _flag: Any = None) -> None:
        """Add a pair."""
        name, equals, value = text.partition("=")
        of_store = "store" in self.dest
        if not name or not (equals or "[" in str(self.metavar)):
            detail = "" if of_store else f", got {text!r}"  # of a store, it may be a secret
            raise ArgumentError(self, f"expected {self.metavar}{detail}")
        if of_store and is_secret(name, value, of_store=True):
            message = f"a secret must not be on a command line; set the variable of {name}"
            raise ArgumentError(self, message)
        pairs = getattr(options, self.dest) or {}
        setattr(options, self.dest, {**pairs, name: self.value(value) if equals else None})

    def value(self, text: str) -> Any:
        """A number, a list or a truth value; else text."""
        return option_of(text)


class _Bounds(Pairs):
    def value(self, text: str) -> Any:
        """The least and the greatest of ``64:4096``, of which one may be absent."""
        if not re.fullmatch("[0-9]*:[0-9]*", text):
            raise ArgumentError(self, f"expected {self.metavar}, got {text!r}")
        return tuple(int(limit) if limit else None for limit in text.split(":"))


def positive(text: str) -> float:
    """A number above 0; ArgumentTypeError for other text."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ArgumentTypeError(f"takes a number above 0; found {text!r}")


def whole_number(text: str, least: int = 1) -> int:
    """A whole number; ArgumentTypeError for other text."""
    if text.isdecimal() and int(text) >= least:
        return int(text)
    raise ArgumentTypeError(f"takes a whole number, {least} or more; found {text!r}")


def _page(text: str) -> str:
    if text.endswith(".html"):
        return text
    raise ArgumentTypeError(f"takes the name of a file that ends with .html; found {text!r}")


_TYPES: dict[str, Callable[[str], Any]] = {
    "N": whole_number,
    "I": partial(whole_number, least=0),
    "F": positive,
    "FILE.html": _page,
    "VERSION": version_of,
}


def add_flags(parser: Any, texts: Mapping[str, str], **types: Callable[[str], Any]) -> None:
    """Let a command take flags, with their help: ``--samples N``, ``--page FILE.html``, ``--stats``.

    N is a whole number from 1 on, I one from 0 on, and F a number above 0; `types` has others by their metavar.
    What has ``=`` in it is collected in a dict.
    """
    for flag, text in texts.items():
        name, _, metavar = flag.partition(" ")
        settings: dict[str, Any] = {"metavar": metavar, "type": (_TYPES | types).get(metavar, str)}
        if "=" in metavar and metavar not in types:
            settings = {"metavar": metavar, "action": _Bounds if ":" in metavar else Pairs}
        parser.add_argument(name, help=text, **(settings if metavar else {"action": "store_true"}))


def add_signature(parser: ArgumentParser, function: Callable[..., Any], names: Iterable[str]) -> None:
    """Let a command take arguments of a Python function: their kinds and defaults, and what its docstring says."""
    texts: dict[str, str] = {}
    for several, text in _DOCUMENTED.findall(function.__doc__ or ""):
        texts |= dict.fromkeys(several.split(", "), " ".join(text.replace("%", "%%").replace("``", "").split()))
    for name in names:
        parameter = inspect.signature(function).parameters[name]
        settings = _KINDS.get(parameter.annotation.partition("[")[0], {"type": _text})
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, help=texts.get(name), default=parameter.default, **settings)


def _text(text: str) -> str | None:
    return None if text == "none" else text


def _list(text: str) -> list[str]:
    return [] if text == "none" else text.split(",")


_KINDS: dict[str, dict[str, Any]] = {
    "bool": {"action": "store_true"},
    "int": {"type": int},
    "int | None": {"type": int},
    "float | None": {"type": float},
    "Iterable": {"type": _list},
    "Mapping": {"action": Pairs, "metavar": "NAME=VALUE"},
}


def add_dataset(parser: ArgumentParser, **kwargs: Any) -> None:
    """Let a command take the folder or URL of a dataset."""
    help_text = "folder or URL of a dataset, or of a folder of splits"
    parser.add_argument("remote", metavar="PATH|URL", help=help_text, **kwargs)


def add_reading(parser: ArgumentParser) -> None:
    """Let a command take how a dataset is read, as `Stream` takes it."""
    reading = parser.add_argument_group("how the data is read, as in StreamingDataset")
    add_flags(reading, {
        "--format NAME": "format of files without an index.json: parquet, arrow, jsonl, ...",
        "--columns NAME[=ENCODING]": "column to read, and its encoding in such files; may be repeated (default: all)",
        "--version VERSION": "version of a dataset: a number, or digits of its digest; of a Delta table: its number",
    })  # fmt: skip
    add_store_options(reading)


def reading_of(options: Namespace) -> Reading:
    """What the flags of :func:`add_reading` say; empty without any."""
    names = options.columns
    if names is not None and not any(names.values()):
        names = list(names)
    settings = {"format": options.format, "columns": names, "version": options.version}
    return {name: value for name, value in settings.items() if value is not None}


def add_store_options(parser: Any) -> None:
    """Let a command take options of a store."""
    text = "storage option, e.g. endpoint_url=http://127.0.0.1:9000; credentials are read from the environment"
    add_flags(parser, {"--store-options KEY=VALUE": text})


def add_source(parser: ArgumentParser, **kwargs: Any) -> None:
    """Let a command take a dataset, how it is read, and the options of its store."""
    add_dataset(parser, **kwargs)
    add_reading(parser)


def add_mixture(parser: ArgumentParser) -> None:
    """Let a command take the datasets of a mixture, how they are read, and what chooses among their samples."""
    text = "a dataset, in a mixture with its weight: 0.3 (proportion), repeat:2 or choose:1000; once for each stream"
    parser.add_argument("--stream", action="append", default=[], metavar="URL[=WEIGHT]", help=text)
    add_reading(parser)
    rules = parser.add_argument_group("samples that are kept, as in StreamingDataset")
    add_flags(rules, {
        "--filter-lengths NAME=LEAST:GREATEST": "lengths to keep, e.g. tokens=64:4096, tokens=64: or tokens=:4096",
        "--exclude-ids FILE": "ids of samples to exclude: one a line, or .npy",
        "--forget FILE": "ids of samples that others replace, in the same form",
    })  # fmt: skip


def require_answer(remote: str, options: Options) -> None:
    """Raise UnavailableError within seconds where a store does not answer; later requests are tried for longer."""
    logging.disable(logging.WARNING)  # the error says all
    try:
        open_store(remote, {**_FIRST_REQUEST, **(options or {})}).open(INDEX_NAME, 0, 1).close()
    except UnavailableError:
        raise
    except (StoreError, OSError, ValueError):  # which the command meets, too
        return
    finally:
        logging.disable(logging.NOTSET)


def datasets_at(remote: str, options: Options, how: Reading | None = None) -> list[OpenDataset]:
    """Find the dataset in a folder, or the datasets in its splits.

    Raises:
        NotFoundError: There is none.
        UnavailableError: The store does not answer.
        ValueError: There are files that cannot be read in place.
    """
    require_answer(remote, options)
    datasets = [] if how and "format" in how else _indexed(remote, options)
    if datasets and not how:
        return datasets
    return [_as_stream(url, options, how or {}) for url in [dataset.remote for dataset in datasets] or [remote]]


def datasets_of(options: Namespace) -> list[OpenDataset]:
    """The datasets that the arguments of :func:`add_source` name; see :func:`datasets_at`."""
    return datasets_at(options.remote, options.store_options, reading_of(options))


def _indexed(remote: str, options: Options) -> list[OpenDataset]:
    """The dataset with an index.json in a folder, or those in its splits."""
    store = open_store(remote, options)
    with suppress(NotFoundError):
        return [_with_index(remote, store, options)]
    splits: Sequence[str] = _SPLITS
    if isinstance(store, LocalStore):
        splits = sorted(path.parent.name for path in store.folder.glob(f"*/{INDEX_NAME}"))
    datasets = []
    for url in [f"{remote.rstrip('/')}/{split}" for split in splits]:
        with suppress(NotFoundError):
            datasets.append(_with_index(url, open_store(url, options), options))
    return datasets


def _with_index(remote: str, store: Store, options: Options) -> OpenDataset:
    try:
        return OpenDataset(remote, options, store, read_index(store), {})
    except FormatError:
        if not InPlace().recognises(store.read(INDEX_NAME)):
            raise
        return _as_stream(remote, options, {})


def _as_stream(remote: str, options: Options, how: Reading) -> OpenDataset:
    """The dataset as `StreamingDataset` reads it; an index that is made stays in the cache, for that too."""
    stream = Stream(remote, options=options, **how)
    cache = cache_of(stream, CacheDefaults())
    return OpenDataset(remote, options, cache.store, index_of(stream, cache), how)


def mds_at(remote: str, options: Options, remedy: str) -> list[OpenDataset]:
    """Find datasets that have an index.json beside them. ValueError with the remedy for any other format."""
    datasets = datasets_at(remote, options)
    if other := datasets[0].format:
        raise ValueError(f"{datasets[0].store.url} holds data of the format {other}, which is read in place. {remedy}")
    return datasets


def only_dataset(datasets: Sequence[OpenDataset], rule: str) -> OpenDataset:
    """The one dataset; ValueError, which begins with the rule, for several splits."""
    if len(datasets) > 1:
        splits = " or ".join(dataset.store.url for dataset in datasets)
        raise ValueError(f"{rule}; this is a folder of splits. Pass {splits}")
    return datasets[0]


def readers_of(streams: Sequence[str], options: Namespace, folder: str) -> list[SampleReader]:
    """Find the mixture of these streams; of a single one that is a folder of splits, each split.

    The rules of :func:`add_rules` choose among the samples. What is downloaded is kept in the folder.

    Raises:
        ValueError: One of several streams is a folder of splits.
    """
    how = reading_of(options)
    if "version" in how and len(streams) > 1:
        raise ValueError(f"--version is that of one dataset; found {len(streams)} streams. Omit it, or pass one stream")
    urls, weights = zip(*map(_weighted, streams), strict=True)
    places = [datasets_at(url, options.store_options, how) for url in urls]
    for datasets in places if len(places) > 1 else ():
        only_dataset(datasets, "a stream of a mixture is one dataset")
    readers: list[SampleReader] = []
    for mixture in product(*places):
        members = [dataset.stream(f"{folder}/{len(readers)}/{k}", **weights[k]) for k, dataset in enumerate(mixture)]
        reader = _reader(members, mixture)
        readers.append(Filters(lengths=options.filter_lengths, exclude_ids=options.exclude_ids).applied(reader))
    return readers


def _weighted(text: str) -> tuple[str, dict[str, Any]]:
    """The URL and the weight of ``URL[=WEIGHT]``."""
    match = _WEIGHTED.fullmatch(text)
    if match is None:
        return text, {}
    kind = match[2] or "proportion"
    value = float(match[3])
    return match[1], {kind: int(value) if kind == "choose" else value}


def session_of(options: Namespace) -> Any:
    """The Spark session at the master that ``--spark`` names; None without it."""
    if options.spark is None:
        return None
    from lightning_stream.spark import local_session

    return local_session(options.spark)


def imported(text: str, flag: str) -> Callable[[Any], Any]:
    """The function that ``MODULE:FUNCTION`` names. ValueError if there is none."""
    sys.path.insert(0, str(Path.cwd()))  # a program that is installed does not look there by itself
    module, _, name = text.partition(":")
    try:
        function: Callable[[Any], Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{flag} takes MODULE:FUNCTION; {text} cannot be imported from here: {error}") from error
    return function
