"""Conditional puts for a server without them."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_stream.errors import NotFoundError, StoreError, UnavailableError
from lightning_stream.shared_files import backoff

from .transfer import content_version

if TYPE_CHECKING:
    from .base import BaseStore

_CLAIM = re.compile(r"\.claim-([0-9]+)-[0-9a-f]{32}$")
_LIFETIME_S = 600
_WAIT_S = 60.0


class PreconditionError(StoreError):
    """The condition of a put does not hold. It is raised and caught within the stores."""


@contextlib.contextmanager
def claimed(store: BaseStore, name: str, if_version: str | None) -> Iterator[None]:
    """Exclude other conditional puts of a name, and check that it has this version (None: that there is no object).

    Each process puts a claim beside the object, then looks for other claims; if it sees one, it withdraws and tries
    again. Of two processes, the one that looks last sees both claims. The claim of a killed process is valid for ten
    minutes; then the next process that looks deletes it.
    """
    for _ in backoff(_WAIT_S):
        claim = f"{name}.claim-{int(time.time())}-{uuid.uuid4().hex}"
        store.put(claim, b"")
        try:
            if _others(store, name, claim):
                continue
            found = None
            with contextlib.suppress(NotFoundError):
                found = content_version(store.read(name))
            if found != if_version:
                raise PreconditionError(name)
            yield
            return
        finally:
            store.delete(claim)
    raise UnavailableError(f"{store.url}/{name}: other processes keep writing it. Let one process write it.")


def _others(store: BaseStore, name: str, claim: str) -> list[str]:
    """Return the valid claims of other processes, and delete the expired ones."""
    found = (_CLAIM.search(entry.name) for entry in store.list(f"{name}.claim-") if entry.name != claim)
    made_at = {match.string: int(match[1]) for match in found if match}
    dead = [other for other, since in made_at.items() if since < time.time() - _LIFETIME_S]
    for other in dead:
        store.delete(other)
    return [other for other in made_at if other not in dead]
