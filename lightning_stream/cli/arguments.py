"""Arguments that several commands take: a dataset, options of its store, streams of a mixture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_stream.errors import NotFoundError
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.order import Snapshot, StreamWeights
from lightning_stream.stores import LocalStore, Store, open_store

_SPLITS = ("train", "val", "validation", "valid", "test", "eval")
_SECRETS = ("secret", "password", "token", "_key", "key_")


@dataclass(frozen=True)
class FoundDataset:
    """A dataset that an argument names.

    Attributes:
        split: The name of its folder below the folder that was named; empty if that is the dataset.
        store, index: Its files, and its parsed index.json.
    """

    split: str
    store: Store
    index: Index


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Let a command take the folder or URL of a dataset."""
    parser.add_argument("remote", metavar="PATH|URL", help="folder or URL of a dataset, or of a folder of splits")
    add_store_options(parser)


def add_store_options(parser: argparse.ArgumentParser, flag: str = "--store-options", of: str = "the store") -> None:
    """Let a command take options of a store."""
    add_pairs(
        parser,
        flag,
        "KEY=VALUE",
        f"option of {of}, e.g. endpoint_url=http://127.0.0.1:9000; may be repeated; credentials are read from the "
        "environment",
    )


def add_pairs(parser: argparse.ArgumentParser, flag: str, metavar: str, help_text: str) -> None:
    """Let a command take ``KEY=VALUE`` any number of times; the option is a list of (key, value)."""
    parser.add_argument(flag, action="append", default=[], type=_pair, metavar=metavar, help=help_text)


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    if any(word in name for word in _SECRETS):
        raise argparse.ArgumentTypeError(
            f"a secret must not be on a command line; set the environment variable that {name} is read from"
        )
    return name, _value(value)


def _value(text: str) -> Any:
    """A number, a list or a truth value where the text is one in JSON, else the text."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text


def datasets_at(remote: str, options: Mapping[str, Any]) -> list[FoundDataset]:
    """The dataset in a folder, or the datasets in its splits.

    Raises:
        NotFoundError: There is none.
    """
    store = open_store(remote, options)
    try:
        return [FoundDataset("", store, read_index(store))]
    except NotFoundError as error:
        if "there is no" in str(error):  # neither a bucket nor a container
            raise
    found = []
    for split in _splits(store):
        at = open_store(f"{remote.rstrip('/')}/{split}", options)
        try:
            found.append(FoundDataset(split, at, read_index(at)))
        except NotFoundError:
            continue
    if not found:
        raise NotFoundError(
            f"a dataset is a folder with an {INDEX_NAME}; {store.url} has none, and no split below it "
            f"({', '.join(_SPLITS)}) has one. Check the path or URL; a writer that did not finish leaves no index."
        )
    return found


def _splits(store: Store) -> Sequence[str]:
    if isinstance(store, LocalStore):
        return sorted(path.parent.name for path in Path(store.folder).glob(f"*/{INDEX_NAME}"))
    return _SPLITS


def read_index(store: Store) -> Index:
    """The index of a dataset."""
    return Index.from_bytes(store.read(INDEX_NAME), f"{store.url}/{INDEX_NAME}")


# Mixtures


def add_streams(parser: argparse.ArgumentParser) -> None:
    """Let a command take the streams of a mixture."""
    parser.add_argument(
        "--stream",
        action="append",
        default=[],
        dest="streams",
        metavar="URL[=WEIGHT]",
        help="a dataset of a mixture, with its weight: 0.3 (proportion), repeat:2 or choose:1000; may be repeated, in "
        "the order of the training run's streams",
    )
    add_store_options(parser)


def weighted(text: str) -> tuple[str, StreamWeights]:
    """The URL and the weights of ``URL=WEIGHT``."""
    url, equals, weight = text.rpartition("=")
    kind, colon, number = weight.rpartition(":")
    if not equals or (colon and kind not in ("repeat", "choose")) or not number.replace(".", "", 1).isdigit():
        return text, StreamWeights()
    if kind == "choose":
        return url, StreamWeights(choose=int(float(number)))
    return url, StreamWeights(repeat=float(number)) if kind else StreamWeights(proportion=float(number))


def mixture_of(streams: Sequence[str], options: Mapping[str, Any]) -> tuple[list[FoundDataset], list[StreamWeights]]:
    """The datasets and the weights of ``--stream`` arguments.

    Raises:
        ValueError: A stream is a folder of several splits.
    """
    found, weights = [], []
    for url, weight in map(weighted, streams):
        first, *others = datasets_at(url, options)
        if others or first.split:
            names = ", ".join(one.split for one in (first, *others))
            raise ValueError(f"a stream is one dataset; {url} has the splits {names}. Pass {url}/{first.split}")
        found.append(first)
        weights.append(weight)
    return found, weights


def snapshot_of(datasets: Sequence[FoundDataset]) -> Snapshot:
    """The data that these datasets are together, as their order needs it."""
    indexes = [dataset.index for dataset in datasets]
    return Snapshot.of(
        [index.shard_sizes for index in indexes],
        names=[index.where for index in indexes],
        stream_digests=[index.digest for index in indexes],
    )
