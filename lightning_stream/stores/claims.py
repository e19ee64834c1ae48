"""Conditional puts for a server that has none."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_stream.errors import NotFoundError, StoreError, UnavailableError
from lightning_stream.shared_files import backoff

from .transfer import content_version

if TYPE_CHECKING:
    from .base import BaseStore

_LIFETIME_S = 600
_WAIT_S = 60.0


class PreconditionError(StoreError):
    """The condition of a put does not hold. Raised and caught within the stores."""


@contextlib.contextmanager
def claimed(store: BaseStore, name: str, if_version: str | None) -> Iterator[None]:
    """Exclude other conditional puts of a name, and see that it has this version (None: that there is no object).

    Each process puts a claim of its own beside the object, then looks for others; one that sees another's withdraws and
    tries again. Of two, the one that looks last sees both. The claim of a killed process counts for ten minutes.
    """
    for _ in backoff(_WAIT_S):
        claim = f"{name}.claim-{int(time.time())}-{uuid.uuid4().hex}"
        store.put(claim, b"")
        try:
            oldest = time.time() - _LIFETIME_S
            others = [entry.name for entry in store.list(f"{name}.claim-") if entry.name != claim]
            if any(int(other.rsplit("-", 2)[1]) > oldest for other in others):
                continue
            if _version(store, name) != if_version:
                raise PreconditionError(name)
            yield
            return
        finally:
            store.delete(claim)
    raise UnavailableError(f"{store.url}/{name}: other processes write it all the time. Let one process write it.")


def _version(store: BaseStore, name: str) -> str | None:
    try:
        return content_version(store.read(name))
    except NotFoundError:
        return None
