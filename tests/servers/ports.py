"""Ports of 127.0.0.1 for servers that must be told theirs before they start."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the ports that Linux and macOS give to connections, and to servers that ask for any: another test, or a client,
# would get one of those in the seconds before a server listens.
_PORTS = range(10_000, 32_000)
_draw = random.SystemRandom()  # processes that are forked, or seeded, draw different ones


def free_port() -> int:
    """A port on which nobody listens, and which nobody gets by chance."""
    while True:
        port = _draw.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
