"""A web server that sends a part of each shard, and the rest once the test lets it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from servers.web import Handler, WebServer

from lightning_stream import MDSWriter

WIDTH, NUM_SAMPLES = 1 << 15, 512  # 16 MiB in 4 shards
PART = 0.3  # of a shard that arrives at once


class HoldingServer(WebServer):
    """Sends a part of each shard, and the rest once `go` is set. `wrong` has other content, for first answers."""

    def __init__(self, part: float = PART) -> None:
        super().__init__()
        self.part = part
        self.go, self.wrong = threading.Event(), dict[str, bytes]()

    def handler(self) -> type[Handler]:
        return _HoldingHandler


class _HoldingHandler(Handler):
    def answer(self) -> None:
        if "shard" not in self.where or self.where not in self.owner.objects:
            return super().answer()
        content = self.owner.wrong.pop(self.where, self.owner.objects[self.where])
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: int(self.owner.part * len(content))])
        self.wfile.flush()
        self.owner.go.wait(30)
        self.wfile.write(content[int(self.owner.part * len(content)) :])
        return None


def value(number: int) -> np.ndarray[Any, Any]:
    return np.full(WIDTH, number % 251, np.uint8)


def held_files(folder: Path) -> dict[str, bytes]:
    """The files of two datasets, ``/raw`` and ``/packed``: four shards each, of samples of one size."""
    for part, options in (("raw", {}), ("packed", {"compression": "zstd"})):
        columns = {"id": "int", "x": f"ndarray:uint8:{WIDTH}"}
        size = NUM_SAMPLES // 4 * (WIDTH + 13)
        with MDSWriter(out=folder / part, columns=columns, size_limit=size, hashes=["xxh3_64"], **options) as writer:
            for number in range(NUM_SAMPLES):
                writer.write({"id": number, "x": value(number)})
    return {f"/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in folder.rglob("*.*")}
