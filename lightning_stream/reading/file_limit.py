"""How many files this process may have open.

A shuffled batch reads from hundreds of shards, each with one descriptor for its lock and, before Python 3.13, one for
its mapping; many systems let a process have 1,024 by default, and far more if it asks.
"""

from __future__ import annotations

import errno
import resource

from lightning_stream.errors import CacheError

FILES_PER_SHARD = 2
_FILES_OF_OTHERS = 256  # connections, logs, and what the trainer has open


def make_room_for(num_shards: int) -> None:
    """Ask the system for a higher limit where so many open shards need it."""
    wanted = num_shards * FILES_PER_SHARD + _FILES_OF_OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    most = max(2 * soft, wanted)  # seldom asked again
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def is_limit_reached(error: OSError) -> bool:
    """Whether the limit is why a file could not be opened."""
    return error.errno == errno.EMFILE


def too_many(num_shards: int) -> CacheError:
    """What to raise where the limit was reached with so many shards open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CacheError(
        f"each open shard takes up to {FILES_PER_SHARD} open files, but this process may have {soft} in all and has "
        f"{num_shards} shards open already. Raise the limit (`ulimit -n`), write larger shards, or let a batch draw "
        "from fewer: a smaller window= or batch"
    )
