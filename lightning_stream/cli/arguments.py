"""Arguments that several commands take: a dataset, options of its store, the streams of a mixture."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_stream.cache import ShardCache
from lightning_stream.errors import NotFoundError
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.order import OrderConfig, RunOrder, Snapshot, StreamWeights
from lightning_stream.reading.deleted import kept_samples
from lightning_stream.stores import LocalStore, Store, open_store
from lightning_stream.version_log import read_index

_SPLITS = ("train", "val", "validation", "valid", "test", "eval")
_SECRETS = ("secret", "password", "token", "_key", "key_")
_WEIGHTED = re.compile(r"(.+)=(?:(proportion|repeat|choose):)?([0-9]*\.?[0-9]+)")


@dataclass(frozen=True)
class FoundDataset:
    """A dataset that an argument names: its files, and its index."""

    store: Store
    index: Index


def add_dataset(parser: argparse.ArgumentParser, **kwargs: Any) -> None:
    """Let a command take the folder or URL of a dataset."""
    help_text = "folder or URL of a dataset, or of a folder of splits"
    parser.add_argument("remote", metavar="PATH|URL", help=help_text, **kwargs)


class Pairs(argparse.Action):
    """Collects ``KEY=VALUE``, given any number of times, in a dict; refuses secrets among the options of a store."""

    def __call__(self, _parser: Any, options: argparse.Namespace, given: Any, _flag: Any = None) -> None:
        """Add a pair."""
        name, equals, value = given.partition("=")
        if not equals or not name:
            raise argparse.ArgumentError(self, f"expected KEY=VALUE, got {given!r}")
        if "store" in self.dest and any(word in name for word in _SECRETS):
            message = f"a secret must not be on a command line; set the variable of {name}"
            raise argparse.ArgumentError(self, message)
        with suppress(ValueError):  # a number, a list or a truth value; else text
            value = json.loads(value.lower() if value.lower() in ("true", "false") else value)
        setattr(options, self.dest, {**(getattr(options, self.dest) or {}), name: value})


def add_store_options(parser: argparse.ArgumentParser, flag: str = "--store-options") -> None:
    """Let a command take options of a store."""
    help_text = "storage option, e.g. endpoint_url=http://127.0.0.1:9000; credentials are read from the environment"
    parser.add_argument(flag, action=Pairs, metavar="KEY=VALUE", help=help_text)


def add_streams(parser: argparse.ArgumentParser) -> None:
    """Let a command take the datasets of a mixture."""
    parser.add_argument(
        "--stream",
        action="append",
        default=[],
        metavar="URL[=WEIGHT]",
        help="a dataset, in a mixture with its weight: 0.3 (proportion), repeat:2 or choose:1000; once for each stream",
    )


def datasets_at(remote: str, options: Mapping[str, Any] | None) -> list[FoundDataset]:
    """Find the dataset in a folder, or the datasets in its splits.

    Raises:
        NotFoundError: There is none.
    """
    store = open_store(remote, options)
    try:
        return [_read(store)]
    except NotFoundError as error:
        if "there is no" in str(error):  # bucket, or container
            raise
    splits: Sequence[str] = _SPLITS
    if isinstance(store, LocalStore):
        splits = sorted(path.parent.name for path in Path(store.folder).glob(f"*/{INDEX_NAME}"))
    found = []
    for split in splits:
        with suppress(NotFoundError):
            found.append(_read(open_store(f"{remote.rstrip('/')}/{split}", options)))
    if not found:
        raise NotFoundError(
            f"a dataset is a folder with an {INDEX_NAME}; {store.url} has none, and none of its splits "
            f"({', '.join(_SPLITS)}) has one. Check the path or URL; a writer that did not finish leaves no index."
        )
    return found


def _read(store: Store) -> FoundDataset:
    return FoundDataset(store, read_index(store))


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

    datasets: Sequence[FoundDataset]
    weights: Sequence[StreamWeights]

    @cached_property
    def snapshot(self) -> Snapshot:
        """The data of these datasets together."""
        whole = Snapshot.of(
            [dataset.index.shard_sizes for dataset in self.datasets],
            names=[dataset.store.url for dataset in self.datasets],
            stream_digests=[dataset.index.digest for dataset in self.datasets],
        )
        caches = [ShardCache(dataset.store) for dataset in self.datasets]
        kept = kept_samples(caches, [dataset.index for dataset in self.datasets])
        return whole if kept is None else whole.subset(kept)

    def order(self, config: OrderConfig) -> RunOrder:
        """The order of a training run over this data."""
        return RunOrder(self.snapshot, self.weights, config)


def mixtures_of(streams: Sequence[str], options: Mapping[str, Any] | None) -> list[Mixture]:
    """Find the mixture of these streams; of a single one that is a folder of splits, each split.

    Raises:
        ValueError: One of several streams is a folder of splits.
    """
    urls, weights = zip(*map(_weighted, streams), strict=True)
    found = [datasets_at(url, options) for url in urls]
    if len(found) == 1:
        return [Mixture([dataset], weights) for dataset in found[0]]
    for text, datasets in zip(streams, found, strict=True):
        if len(datasets) > 1:
            splits = " or ".join(dataset.store.url for dataset in datasets)
            raise ValueError(f"a stream of a mixture is one dataset; {text} is a folder of splits. Pass {splits}")
    return [Mixture([dataset for (dataset,) in found], weights)]
