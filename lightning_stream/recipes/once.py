"""A converted set is whole or absent, and is made once: by one process of a machine, while the others wait for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TypeVar

from lightning_stream.errors import NotFoundError
from lightning_stream.storage import LocalStore, open_store
from lightning_stream.storage.files import FileLock, make_folder

_WAIT_S = 6 * 3600.0
_T = TypeVar("_T")


def describe(place: str, name: str, read: Callable[[bytes], _T]) -> _T | None:
    """What the set at a folder or URL says of itself in the file `name`, which is written last; None without one."""
    try:
        return read(open_store(place).read(name))
    except NotFoundError:
        return None


def convert_once(place: str, known: Callable[[], _T | None], convert: Callable[[str], _T]) -> _T:
    """The description of a set, which is converted first where that was not done.

    Args:
        place: Folder or URL where it belongs.
        known: Gives its description, or None where there is none yet.
        convert: Writes it into a folder or URL, the description last, and gives that.
    """
    if (found := known()) is not None:
        return found
    store = open_store(place)
    if not isinstance(store, LocalStore):
        return convert(place)
    final = store.folder
    make_folder(final.parent)
    with FileLock(final.with_name(f".{final.name}.lock"), _WAIT_S):
        if (found := known()) is not None:
            return found
        draft = final.with_name(f".{final.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        try:
            done = convert(str(draft))
            shutil.rmtree(final, ignore_errors=True)  # without a description: the remains of nothing we know
            draft.replace(final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return done
