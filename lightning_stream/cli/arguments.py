"""Arguments that several commands take: a dataset, options of its store, the streams of a mixture."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_stream.errors import NotFoundError
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.order import Snapshot, StreamWeights
from lightning_stream.stores import LocalStore, Store, open_store

_SPLITS = ("train", "val", "validation", "valid", "test", "eval")
_SECRETS = ("secret", "password", "token", "_key", "key_")
_WEIGHTED = re.compile(r"(.+)=(?:(proportion|repeat|choose):)?([0-9]*\.?[0-9]+)")


@dataclass(frozen=True)
class FoundDataset:
    """A dataset that an argument names: its files, and its parsed index.json."""

    store: Store
    index: Index


def add_dataset(parser: argparse.ArgumentParser, **kwargs: Any) -> None:
    """Let a command take the folder or URL of a dataset."""
    help_text = "folder or URL of a dataset, or of a folder of splits"
    parser.add_argument("remote", metavar="PATH|URL", help=help_text, **kwargs)


def add_pairs(parser: argparse.ArgumentParser, flag: str, metavar: str, help_text: str) -> None:
    """Let a command take ``KEY=VALUE`` any number of times; the option is a list of (key, value)."""
    pair = _store_option if "store" in flag else _pair
    parser.add_argument(flag, action="append", default=[], type=pair, metavar=metavar, help=help_text)


def add_store_options(parser: argparse.ArgumentParser, flag: str = "--store-options") -> None:
    """Let a command take options of a store."""
    example = "storage option, e.g. endpoint_url=http://127.0.0.1:9000; credentials are read from the environment"
    add_pairs(parser, flag, "KEY=VALUE", example)


def add_streams(parser: argparse.ArgumentParser) -> None:
    """Let a command take the datasets of a mixture."""
    parser.add_argument(
        "--stream",
        action="append",
        default=[],
        metavar="URL[=WEIGHT]",
        help="a dataset, in a mixture with its weight: 0.3 (proportion), repeat:2 or choose:1000; once for each stream",
    )


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:  # a number, a list or a truth value; else text
        return name, json.loads(value.lower() if value.lower() in ("true", "false") else value)
    except ValueError:
        return name, value


def _store_option(text: str) -> tuple[str, Any]:
    name, value = _pair(text)
    if any(word in name for word in _SECRETS):
        raise argparse.ArgumentTypeError(f"a secret must not be on a command line; set the variable of {name}")
    return name, value


def datasets_at(remote: str, options: Mapping[str, Any]) -> list[FoundDataset]:
    """The dataset in a folder, or the datasets in its splits.

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
    return FoundDataset(store, Index.from_bytes(store.read(INDEX_NAME), f"{store.url}/{INDEX_NAME}"))


def weighted(text: str) -> tuple[str, StreamWeights]:
    """The URL and the weights of ``URL[=WEIGHT]``."""
    match = _WEIGHTED.fullmatch(text)
    if match is None:
        return text, StreamWeights()
    if match[2] == "choose":
        return match[1], StreamWeights(choose=int(float(match[3])))
    amount = float(match[3])
    return match[1], StreamWeights(repeat=amount) if match[2] == "repeat" else StreamWeights(proportion=amount)


def mixtures_of(streams: Sequence[str], options: Mapping[str, Any]) -> list[list[FoundDataset]]:
    """The mixture of these streams; of a single one that is a folder of splits, each split.

    Raises:
        ValueError: One of several streams is a folder of splits.
    """
    found = [datasets_at(weighted(text)[0], options) for text in streams]
    if len(found) == 1:
        return [[dataset] for dataset in found[0]]
    for text, datasets in zip(streams, found, strict=True):
        if len(datasets) > 1:
            urls = " or ".join(dataset.store.url for dataset in datasets)
            raise ValueError(f"a stream of a mixture is one dataset; {text} is a folder of splits. Pass {urls}")
    return [[datasets[0] for datasets in found]]


def snapshot_of(datasets: Sequence[FoundDataset]) -> Snapshot:
    """The data of these datasets together, as an order needs it."""
    return Snapshot.of(
        [dataset.index.shard_sizes for dataset in datasets],
        names=[dataset.store.url for dataset in datasets],
        stream_digests=[dataset.index.digest for dataset in datasets],
    )
