"""What a PATH or URL on the command line means: a store, and the datasets in it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_stream.errors import NotFoundError
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.stores import LocalStore, Store, open_store

_SPLITS = ("train", "val", "validation", "valid", "test", "eval")


def add_place(parser: argparse.ArgumentParser) -> None:
    """Let a command take a dataset's place."""
    parser.add_argument("place", metavar="PATH|URL", help="folder or URL of a dataset, or of a folder of splits")
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a command take the options of a store."""
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="of the store, e.g. endpoint_url=http://127.0.0.1:9000; secrets come from the environment",
    )


def store_options(given: list[str]) -> dict[str, Any]:
    """``name=value`` texts as options of a store.

    Raises:
        ValueError: One that is none, or that holds a secret.
    """
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option takes NAME=VALUE; found {text!r}")
        if any(word in name for word in ("secret", "password", "token", "_key", "key_")):
            raise ValueError(f"a secret must not stand on a command line; set the variable that {name} is read from")
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    return options


def datasets_at(place: str, options: Mapping[str, Any]) -> dict[str, tuple[Store, Index]]:
    """The datasets at a place by the names of their splits; one named ``""`` where the place itself is a dataset.

    Raises:
        NotFoundError: There is none.
    """
    store = open_store(place, options)
    try:
        return {"": (store, read_index(store))}
    except NotFoundError as error:
        found = {}
        for name in _split_names(store):
            split = open_store(f"{place.rstrip('/')}/{name}", options)
            try:
                found[name] = (split, read_index(split))
            except NotFoundError:
                continue
        if found:
            return found
        raise NotFoundError(
            f"a dataset is a folder with an {INDEX_NAME}; there is none at {store.url}, nor in a split of it "
            f"({', '.join(_SPLITS)}). Check the path or URL; a writer that did not finish leaves no index."
        ) from error


def _split_names(store: Store) -> list[str]:
    if isinstance(store, LocalStore):
        folder = Path(store.folder)
        return sorted(path.parent.name for path in folder.glob(f"*/{INDEX_NAME}")) if folder.is_dir() else []
    return list(_SPLITS)


def read_index(store: Store) -> Index:
    """The index of a dataset."""
    return Index.from_bytes(store.read(INDEX_NAME), f"{store.url}/{INDEX_NAME}")


def readable(num_bytes: float) -> str:
    """A size for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
