"""A converted set is whole or absent, and is made once: by one process of a machine, while the others wait for it.

It lies in a folder or under a URL of its own: a `TRAIN` and a `VAL` dataset, and what it says of itself, put last.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lightning_stream.errors import NotFoundError
from lightning_stream.shared_files import FileLock, make_folder
from lightning_stream.stores import LocalStore, open_store

TRAIN, VAL = "train", "val"
_WAIT_S = 6 * 3600.0
_T = TypeVar("_T")
_Held = TypeVar("_Held", covariant=True)


@dataclass(frozen=True)
class Made(Generic[_Held]):
    """A set that is there.

    Attributes:
        description: What it holds.
        is_new: Whether this process converted it now; False where it was there, or another process made it meanwhile.
    """

    description: _Held
    is_new: bool


def describe(place: str, name: str, read: Callable[[bytes], _T]) -> _T | None:
    """What the set at a folder or URL says of itself in the file `name`, which is written last; None without one."""
    try:
        return read(open_store(place).read(name))
    except NotFoundError:
        return None


def convert_once(place: str, known: Callable[[], _T | None], convert: Callable[[str], _T]) -> Made[_T]:
    """A set, which is converted first where that was not done.

    Args:
        place: Folder or URL where it belongs.
        known: Gives its description, or None where there is none yet.
        convert: Writes it into a folder or URL, the description last, and gives that.
    """
    if (found := known()) is not None:
        return Made(found, is_new=False)
    store = open_store(place)
    if not isinstance(store, LocalStore):
        return Made(convert(place), is_new=True)
    final = store.folder
    make_folder(final.parent)
    with FileLock(final.with_name(f".{final.name}.lock"), _WAIT_S):
        if (found := known()) is not None:
            return Made(found, is_new=False)
        draft = final.with_name(f".{final.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        try:
            done = convert(str(draft))
            shutil.rmtree(final, ignore_errors=True)  # without a description: the remains of nothing we know
            draft.replace(final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return Made(done, is_new=True)


def tell(told: str, place: str, *, is_new: bool) -> None:
    """Say on stderr what a set holds, and whether this process converted it."""
    print(f"{'Converted' if is_new else 'Found'}: {told}, in {place}.", file=sys.stderr)


def split_datasets(
    place: str,
    local: str | None,
    transforms: Mapping[str, Any] | None = None,
    *,
    shuffle: bool = True,
    seed: int,
    cache_limit: int | str | None,
    num_canonical_nodes: int | None,
) -> dict[str, dict[str, Any]]:
    """How the two datasets of a set are streamed: arguments of `StreamingDataset`, by split.

    Args:
        place: Folder or URL of the set. Its last part names its cache.
        local: Folder for the caches of sets; None for the default ones.
        transforms: Of each split's samples.
        shuffle: Whether the train set is read in a shuffled order. The val set never is.
        seed: Of that order.
        cache_limit: Bytes that each cache may hold.
        num_canonical_nodes: See `StreamingDataset`.
    """
    fingerprint = place.rpartition("/")[2]
    return {
        split: {
            "remote": f"{place}/{split}",
            "local": f"{local}/{fingerprint}/{split}" if local else None,
            "transform": (transforms or {}).get(split),
            "shuffle": shuffle and split == TRAIN,
            "shuffle_seed": seed,
            "cache_limit": cache_limit,
            "num_canonical_nodes": num_canonical_nodes,
        }
        for split in (TRAIN, VAL)
    }
