"""Results that are computed from a dataset once per machine, e.g. which samples a filter keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_64_digest

from lightning_stream.cache.folder import CacheFolder
from lightning_stream.shared_files import publish_bytes

T = TypeVar("T")
_DIGEST_BYTES = 8


@dataclass(frozen=True)
class Results:
    """Small files in the control folder of a cache, each with a hash of its content at its end."""

    folder: CacheFolder

    def read(self, name: str) -> bytes | None:
        """Return the result of this name; None if there is none, or it is damaged."""
        with self.folder.translated_errors(), contextlib.suppress(FileNotFoundError):
            kept = self._path(name).read_bytes()
            content, digest = kept[:-_DIGEST_BYTES], kept[-_DIGEST_BYTES:]
            return content if xxh3_64_digest(content) == digest else None
        return None

    def keep(self, name: str, content: bytes, parts: Iterable[str] = ()) -> None:
        """Keep a result under a name; then delete the partial results that it was made of."""
        with self.folder.translated_errors():
            self.folder.prepare()
            publish_bytes(content + xxh3_64_digest(content), self._path(name), self.folder.modes)
            for part in parts:
                self._path(part).unlink(missing_ok=True)

    def compute_once(self, name: str, done: Callable[[], T | None], work: Callable[[], T], wait_s: float) -> T:
        """Have one process of the machine do the work while others wait for it, see `run_once_across_processes`."""
        with self.folder.translated_errors():
            self.folder.prepare()
        return self.folder.run_once(f"{name}.result", done, lambda _: work(), wait_s)

    def _path(self, name: str) -> Path:
        return self.folder.control / f"{name}.result"
