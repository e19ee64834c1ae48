"""A store that tries again: jittered backoff, bodies resumed by range, a deadline."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from lightning_stream.errors import AlreadyExistsError, ConflictError, NotFoundError, StoreError, UnavailableError
from lightning_stream.threads import DaemonPool

from .base import Body, BodyStore, ObjectEntry, Store, source_file

# Not the global generator: fetching threads must not disturb what a sample's transform draws.
_jitter = random.SystemRandom()

T = TypeVar("T")
_log = logging.getLogger("lightning_stream.stores")
_LEAST_PART_BYTES = 4 << 20  # below that a request's own time and work weigh too much


@dataclass(frozen=True)
class RetryPolicy:
    """How patiently.

    Attributes:
        retries: Failures in a row that are tried again; whenever bytes have come through, the count begins anew.
        timeout_s: Longest silence on a connection, given to the client.
        deadline_s: For one operation in all, retries and pauses included.
        first_pause_s: Mean pause after the first failure; doubles with each.
        longest_pause_s: Where the doubling ends.
        parallel_from_bytes: Objects known to be at least this large are fetched as several ranges at once.
        part_bytes: Size of such a range.
        parts_at_once: How many.
    """

    retries: int = 6
    timeout_s: float = 60.0
    deadline_s: float = 600.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 20.0
    parallel_from_bytes: int = 96 << 20
    part_bytes: int = 32 << 20
    parts_at_once: int = 4

    def __post_init__(self) -> None:
        problems = [f"retries is 0 or more; got {self.retries}"] if self.retries < 0 else []
        positive = ("timeout_s", "deadline_s", "first_pause_s", "longest_pause_s", "part_bytes", "parts_at_once")
        problems += [f"{name} is positive; got {getattr(self, name)}" for name in positive if getattr(self, name) <= 0]
        if problems:
            raise ValueError("; ".join(problems))


class RetryingStore(BodyStore):
    """The same store; what may pass (:class:`UnavailableError`) is tried again, all else is raised as it is."""

    def __init__(self, store: Store, policy: RetryPolicy | None = None) -> None:
        self.store = store
        self.policy = policy or RetryPolicy()

    @property
    def url(self) -> str:
        """The wrapped store's URL."""
        return self.store.url

    @property
    def identity(self) -> str:
        """The wrapped store's identity."""
        return self.store.identity

    def open(self, name: str, begin: int = 0, end: int | None = None) -> Body:
        """A body that resumes by range where its connection breaks."""
        patience = _Patience(self.policy, f"{self.url}/{name}")
        body = patience.call(lambda: self.store.open(name, begin, end))
        resuming = _Resuming(self.store, (name, begin, end), body, patience)
        return Body(iter(resuming), body.num_bytes, body.version, resuming.close, f"{self.url}/{name}")

    @property
    def cuts_ranges(self) -> bool:
        """Whether the wrapped store's server does."""
        return self.store.cuts_ranges

    def get(self, name: str, to: Path | BinaryIO, num_bytes: int | None = None, connections: int = 1) -> int:
        """Write a whole object into `to`; one known to be large comes as several ranges at once, and a smaller one
        where there are connections to spare."""
        if not isinstance(to, Path) or num_bytes is None:
            return super().get(name, to)
        if num_bytes >= self.policy.parallel_from_bytes:
            return self._get_parts(name, to, num_bytes, self.policy.part_bytes)
        num_parts = min(connections, num_bytes // _LEAST_PART_BYTES)
        if num_parts > 1 and self.cuts_ranges:
            return self._get_parts(name, to, num_bytes, -(-num_bytes // num_parts))
        return super().get(name, to)

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        """Store an object."""
        tries = 0

        def put() -> None:
            nonlocal tries
            tries += 1
            try:
                self.store.put(name, source, if_absent=if_absent, if_version=if_version)
            except (AlreadyExistsError, ConflictError):
                # An earlier try may have succeeded, and its answer been lost.
                if tries == 1 or not self._holds(name, source):
                    raise

        self._patiently(name, put)

    def _holds(self, name: str, source: Path | bytes) -> bool:
        """Whether the object has just these bytes."""
        num_bytes = len(source) if isinstance(source, bytes) else source.stat().st_size
        try:
            with self.store.open(name) as body, source_file(source) as file:
                same = body.num_bytes in (None, num_bytes) and all(chunk == file.read(len(chunk)) for chunk in body)
                return same and not file.read(1)
        except NotFoundError:
            return False

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """List; after a failure, from the name last given."""
        patience = _Patience(self.policy, f"{self.url}/{prefix}")
        listing, last = self.store.list(prefix), ""
        while True:
            try:
                entry = next(listing, None)
            except UnavailableError as error:
                patience.after(error)
                listing = self.store.list(prefix)
                continue
            if entry is None:
                return
            if entry.name > last:
                last = entry.name
                yield entry

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._patiently(name, lambda: self.store.delete(name))

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name."""
        return self._patiently(name, lambda: self.store.exists(name))

    def _patiently(self, name: str, call: Callable[[], T]) -> T:
        return _Patience(self.policy, f"{self.url}/{name}").call(call)

    def _get_parts(self, name: str, to: Path, num_bytes: int, part_bytes: int) -> int:
        begins = range(0, num_bytes, part_bytes)
        draft = _Draft(to)

        def part(begin: int) -> tuple[int, str | None]:
            return self._get_part(name, draft, begin, min(begin + part_bytes, num_bytes))

        with DaemonPool(min(self.policy.parts_at_once, len(begins)), "parts") as pool:
            parts = [future.result() for future in [pool.submit(part, begin) for begin in begins]]
        _same_version({version for _, version in parts}, f"{self.url}/{name}")
        return sum(written for written, _ in parts)

    def _get_part(self, name: str, draft: _Draft, begin: int, end: int) -> tuple[int, str | None]:
        position = begin
        with self.open(name, begin, end) as body:
            for chunk in body:
                draft.write(chunk, position)
                position += len(chunk)
        return position - begin, body.version


class _Draft:
    """A file that parts are written to, open as long as any of them may still write: also one left behind."""

    _fd = -1  # until it is open

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, chunk: bytes, position: int) -> None:
        view = memoryview(chunk)
        while view:
            written = os.pwrite(self._fd, view, position)
            position += written
            view = view[written:]

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:  # at exit modules are gone
        if self._fd >= 0:
            _close(self._fd)


class _Patience:
    """The failures of one operation, and when they are too many."""

    def __init__(self, policy: RetryPolicy, where: str) -> None:
        self._policy = policy
        self._where = where
        self._begun = time.monotonic()
        self._failures = 0
        self._in_a_row = 0

    def call(self, call: Callable[[], T]) -> T:
        """Call until it succeeds or the patience ends."""
        while True:
            try:
                return call()
            except UnavailableError as error:  # noqa: PERF203 (the loop is over retries)
                self.after(error)

    def progress(self) -> None:
        """Bytes have come through.

        Raises:
            UnavailableError: The deadline has passed all the same.
        """
        self._in_a_row = 0
        if time.monotonic() - self._begun > self._policy.deadline_s:
            raise self._over("it was still arriving, too slowly")

    def after(self, error: UnavailableError) -> None:
        """Pause after a failure, or raise it where there were too many."""
        self._failures += 1
        self._in_a_row += 1
        pause_s = min(self._policy.longest_pause_s, self._policy.first_pause_s * 2 ** (self._in_a_row - 1))
        pause_s *= _jitter.uniform(0.0, 2.0)
        if self._in_a_row > self._policy.retries:
            raise UnavailableError(f"{error} (gave up after {self._in_a_row} failures in a row)") from None
        if time.monotonic() + pause_s - self._begun > self._policy.deadline_s:
            raise self._over(str(error)) from None
        level = logging.WARNING if 2 * self._in_a_row > self._policy.retries else logging.INFO
        _log.log(level, "%s; trying again in %.2f s (failure %d)", error, pause_s, self._failures)
        time.sleep(pause_s)

    def _over(self, reason: str) -> UnavailableError:
        return UnavailableError(
            f"{self._where}: not done within the deadline of {self._policy.deadline_s:g} s, after {self._failures} "
            f"failures. Last: {reason}. Look at the network, or allow more with deadline_s."
        )


class _Resuming:
    """The chunks of one object or range over as many connections as it takes."""

    def __init__(self, store: Store, wanted: tuple[str, int, int | None], body: Body, patience: _Patience) -> None:
        self._store = store
        self._name, self._position, self._end = wanted
        self._body = body
        self._version = body.version
        self._patience = patience

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                yield from self._rest()
            except UnavailableError as error:  # noqa: PERF203 (the loop is over retries)
                self._body.close()
                self._patience.after(error)
            else:
                return

    def close(self) -> None:
        self._body.close()

    def _rest(self) -> Iterator[bytes]:
        if self._body.started:
            self._body = self._store.open(self._name, self._position, self._end)
            _same_version({self._version, self._body.version}, f"{self._store.url}/{self._name}")
        for chunk in self._body:
            self._position += len(chunk)
            yield chunk
            self._patience.progress()


def _same_version(versions: set[str | None], where: str) -> None:
    if len(versions) > 1:
        raise StoreError(
            f"{where}: it was replaced while it was being read. Read it again; write datasets to new names."
        )
