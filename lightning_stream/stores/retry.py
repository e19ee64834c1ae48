"""A store that tries again: with jittered backoff, streams that are resumed by range, and a deadline."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from lightning_stream.counters import Counters
from lightning_stream.errors import AlreadyExistsError, ConflictError, NotFoundError, StoreError, UnavailableError
from lightning_stream.shared_files import jitter
from lightning_stream.threads import DaemonPool

from .base import Download, ListingPage, Store, StoreTraits
from .credentials import SharedFolder
from .transfer import ObjectStream, source_file

T = TypeVar("T")
_Span = tuple[int, "int | None"]  # first byte, and the byte after the last one; None: to the end
_log = logging.getLogger("lightning_stream.stores")
_LEAST_PART_BYTES = 4 << 20  # for smaller parts, a request costs too much
_LEAST_RATE = 16 << 10  # bytes per second: a server that sends less is silent, as far as a download is concerned
_MOST_REPEATS = 2  # of reads of an object that is replaced during each of them
_in_flight: weakref.WeakValueDictionary[int, RetryBudget] = weakref.WeakValueDictionary()  # by id


@dataclass(frozen=True)
class RetryPolicy:
    """How a store's operations are tried again.

    Attributes:
        retries: Number of failures in a row that are tried again; any progress resets it to zero.
        timeout_s: Longest silence on a connection, for the client.
        deadline_s: For one operation with its retries and pauses, or for each page of a listing. A download may take
            longer while it makes progress: in each such span, at least 16 KiB must arrive for each of its seconds.
        first_pause_s, longest_pause_s: Mean pause after the first failure, which doubles with each; its limit, also for
            what the server asks to wait before.
        parallel_from_bytes: An object of at least this size is fetched as several ranges at once.
        part_bytes, parts_at_once: The size and the number of these ranges.
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


class _ReadAgainError(StoreError):
    """Only a read from the beginning helps. It is raised and caught in this file; `reason` is raised if none helps."""

    def __init__(self, reason: StoreError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class RetryingStore(Store):
    """A store that tries again after :class:`UnavailableError`, and raises all other errors as they are."""

    def __init__(self, store: Store, policy: RetryPolicy | None = None) -> None:
        self.store = store
        self.policy = policy or RetryPolicy()
        self.counters = Counters()
        self.url = store.url

    @property
    def identity(self) -> str:
        return self.store.identity

    @cached_property
    def traits(self) -> StoreTraits:  # type: ignore[override]
        return self._budget("").call(lambda: self.store.traits)

    def share_keys(self, folder: SharedFolder) -> None:
        self.store.share_keys(folder)

    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        return self._open(name, begin, end, self._budget(name), restarts=False)

    def get(self, name: str, to: Path, num_bytes: int | None = None, connections: int = 1) -> int:
        return self._read_unchanged(name, lambda budget: self._get(name, to, num_bytes, connections, budget))

    def put(self, name: str, source: Path | bytes, *, if_absent: bool = False, if_version: str | None = None) -> None:
        budget = self._budget(name)

        def put() -> None:
            try:
                self.store.put(name, source, if_absent=if_absent, if_version=if_version)
            except (AlreadyExistsError, ConflictError):
                # A put whose answer was lost does not conflict with itself.
                if not budget.failures or not self._holds(name, source):
                    raise

        budget.call(put)

    def list_page(self, prefix: str = "", token: str | None = None) -> ListingPage:
        return self._budget(prefix).call(lambda: self.store.list_page(prefix, token))

    def delete(self, name: str) -> None:
        self._budget(name).call(lambda: self.store.delete(name))

    def _budget(self, name: str) -> RetryBudget:
        return RetryBudget(self.policy, f"{self.url}/{name}", self.counters)

    def connect(self, name: str, begin: int, end: int | None) -> ObjectStream:
        """Send one request for a range, and count it."""
        self.counters.add("requests")
        with self.counters.timed("first_byte_s"):
            return self.store.open(name, begin, end)

    def _first(self, name: str, begin: int, end: int | None) -> ObjectStream:
        """Connect; where an object seems to end before the range, ask for the whole object whether that is so."""
        stream = self.connect(name, begin, end)
        if stream.past_end:
            with self.connect(name, 0, None) as complete:
                if complete.past_end or (complete.num_bytes or 0) > begin:
                    raise UnavailableError(f"{stream.where}: the server says that byte {begin:,} is not there; it is.")
        return stream

    def _open(self, name: str, begin: int, end: int | None, budget: RetryBudget, restarts: bool = True) -> ObjectStream:
        stream = budget.call(lambda: self._first(name, begin, end))
        chunks = self._chunks((name, begin, end), stream, budget, restarts)

        def close() -> None:
            chunks.close()  # and a later connection
            stream.close()

        # Only `open` makes a version from the content: a download of a shard needs none.
        digest = stream.version is None and begin == 0 and end is None and not restarts
        return replace(stream, chunks=chunks, close=close, digest=digest)

    def _chunks(
        self, span: tuple[str, int, int | None], first: ObjectStream, budget: RetryBudget, restarts: bool
    ) -> Generator[bytes, None, None]:
        """Yield the chunks of an object or range, over any number of connections.

        A wrong answer to a resumed request (a login page, too few bytes) is tried again, like a broken connection. Only
        an answer with another tag means that the object was replaced.
        """
        name, position, end = span
        stop = None if first.num_bytes is None else position + first.num_bytes
        chunks = iter(first)
        while True:
            try:
                chunk = next(chunks, b"")
                reached = position + len(chunk)
                if stop is not None and (reached > stop or (not chunk and reached < stop)):
                    more = "more" if chunk else "less"
                    raise UnavailableError(f"{first.where}: the server sent {more} than it promised.")
            except UnavailableError as error:
                first.close()
                if position == stop:
                    return  # it broke after the last byte
                budget.failed(error)
                left = None if stop is None else stop - position
                chunks = self._rest((name, position, end), first, left, restarts)
                continue
            if not chunk:
                return
            position = reached
            self.counters.add("fetched_bytes", len(chunk))
            budget.progressed(len(chunk))
            handed_over = time.monotonic()
            yield chunk
            budget.exclude(time.monotonic() - handed_over)

    def _rest(
        self, span: tuple[str, int, int | None], first: ObjectStream, left: int | None, restarts: bool
    ) -> Iterator[bytes]:
        """Connect again, and yield the chunks of what is left."""
        with self.connect(*span) as stream:
            if (error := _changed(first, stream, left)) is not None:
                raise _ReadAgainError(error) if restarts else error
            yield from stream

    def _read_unchanged(self, name: str, read: Callable[[RetryBudget], T]) -> T:
        """Read an object; if it is replaced meanwhile, or ends early, read it again from the beginning."""
        budget = self._budget(name)
        num_repeats = 0
        while True:
            try:
                return read(budget)
            except _ReadAgainError as error:
                reason = error.reason
            if num_repeats == (self.policy.retries if isinstance(reason, UnavailableError) else _MOST_REPEATS):
                raise reason
            num_repeats += 1

    def _read(self, name: str, begin: int, end: int | None) -> bytes:
        def read(budget: RetryBudget) -> bytes:
            with self._open(name, begin, end, budget) as stream:
                return b"".join(stream)

        return self._read_unchanged(name, read)

    def _get(self, name: str, to: Path, num_bytes: int | None, connections: int, budget: RetryBudget) -> int:
        file = Download(to, num_bytes)
        connections = connections if self.traits.ranges else 1  # others may send the whole object for each range
        ranges = [] if num_bytes is None else parts_of(num_bytes, connections, self.policy)
        if len(ranges) > 1 and not self.traits.ranges:
            with self._open(name, *ranges[0], budget) as stream:
                ranges = [] if stream.total is None else ranges[1:]  # None: it sends the whole object
                if ranges:
                    file.receive(stream, 0)
        if len(ranges) > 1 or file.parts:
            self._get_parts(name, to, file, ranges)
        else:
            self._receive(name, file, (0, None), budget)
        return file.num_bytes

    def _get_parts(self, name: str, to: Path, file: Download, ranges: list[tuple[int, int]]) -> None:
        """Fetch ranges at once, each with its own budget, which begins with it, not in the queue."""
        file.resize(ranges[-1][1])
        with DaemonPool(min(self.policy.parts_at_once, len(ranges)), "parts") as pool:
            try:
                pool.map(lambda span: self._receive(name, file, span), ranges)
            except BaseException:
                to.unlink(missing_ok=True)  # threads may still write to it: what is read next gets another file
                raise
        if len({tag for _, tag in file.parts}) > 1:
            raise _ReadAgainError(_replaced(f"{self.url}/{name}"))
        file.resize(file.num_bytes)  # of a part that came short, the size tells

    def _receive(self, name: str, file: Download, span: _Span, budget: RetryBudget | None = None) -> None:
        with self._open(name, *span, budget or self._budget(name)) as stream:
            file.receive(stream, span[0])

    def _holds(self, name: str, source: Path | bytes) -> bool:
        """Return whether the object has these bytes."""
        with suppress(NotFoundError), self.store.open(name) as stream, source_file(source) as (file, num_bytes):
            same = stream.num_bytes in (None, num_bytes) and all(chunk == file.read(len(chunk)) for chunk in stream)
            return same and not file.read(1)
        return False


def parts_of(num_bytes: int, connections: int, policy: RetryPolicy) -> list[tuple[int, int]]:
    """The ranges in which an object is fetched: its first byte and the one behind its last, of each."""
    part_bytes = policy.part_bytes
    if num_bytes < policy.parallel_from_bytes:
        part_bytes = -(-num_bytes // max(1, min(connections, num_bytes // _LEAST_PART_BYTES)))
    return [(begin, min(begin + part_bytes, num_bytes)) for begin in range(0, num_bytes, max(1, part_bytes))]


class RetryBudget:
    """The failures of one operation, and their limit."""

    def __init__(self, policy: RetryPolicy, where: str, counters: Counters) -> None:
        self._policy = policy
        self._counters = counters
        self._where = where
        self._begun = self._span_begun = time.monotonic()
        self._span_bytes = 0
        self._in_a_row = 0
        self.failures = 0
        self.pid = os.getpid()  # a forked process has copies of its parent's
        _in_flight[id(self)] = self

    def __str__(self) -> str:
        failed = f", {self.failures} failures" if self.failures else ""
        return f"{self._where} for {time.monotonic() - self._begun:.1f} s{failed}"

    def call(self, call: Callable[[], T]) -> T:
        """Call until it succeeds, or until there were too many failures."""
        while True:
            try:
                return call()
            except UnavailableError as error:
                self.failed(error)

    def progressed(self, num_bytes: int) -> None:
        """Note that bytes have arrived; UnavailableError if the deadline has passed with too few of them."""
        self._in_a_row = 0
        self._span_bytes += num_bytes
        now = time.monotonic()
        if self._span_bytes >= _LEAST_RATE * self._policy.deadline_s:
            self._span_begun = now
            self._span_bytes = 0
        elif now - self._span_begun > self._policy.deadline_s:
            raise self._too_late(f"it was still arriving, but at less than {_LEAST_RATE >> 10} KiB/s")

    def exclude(self, seconds: float) -> None:
        """Do not count a time in which the reader did not wait for the store."""
        self._span_begun += seconds

    def failed(self, error: UnavailableError) -> None:
        """Pause after a failure, or raise it if there were too many."""
        self.failures += 1
        self._in_a_row += 1
        pause_s = min(self._policy.longest_pause_s, self._policy.first_pause_s * 2 ** (self._in_a_row - 1))
        pause_s *= jitter.uniform(0.0, 2.0)
        pause_s += min(error.wait_s, self._policy.longest_pause_s)
        if self._in_a_row > self._policy.retries:
            raise UnavailableError(f"{error} (gave up after {self._in_a_row} failures in a row)") from None
        if time.monotonic() + pause_s - self._span_begun > self._policy.deadline_s:
            raise self._too_late(str(error)) from None
        self._counters.add("retries")
        self._counters.add("throttled", error.is_throttled)
        level = logging.WARNING if 2 * self._in_a_row > self._policy.retries else logging.INFO
        _log.log(level, "%s; trying again in %.2f s (failure %d)", str(error).rstrip("."), pause_s, self.failures)
        with self._counters.timed("retry_s"):
            time.sleep(pause_s)

    def _too_late(self, reason: str) -> UnavailableError:
        return UnavailableError(
            f"{self._where}: not done within the deadline of {self._policy.deadline_s:g} s, after {self.failures} "
            f"failures. Last: {reason}. Check the network, or allow more time with deadline_s."
        )


def requests_in_flight() -> list[str]:
    """The operations of this process that have not ended: the object, for how long, and the failures so far."""
    budgets = [budget for ref in _in_flight.valuerefs() if (budget := ref()) is not None]
    return [str(budget) for budget in budgets if budget.pid == os.getpid()]


def _changed(first: ObjectStream, rest: ObjectStream, left: int | None) -> StoreError | None:
    """Return the error where an answer to a resumed request shows that only a read from the beginning helps.

    UnavailableError for an answer that is not about this object, or not right. `left`: the bytes that are missing.
    """
    if rest.past_end:
        if left:
            return UnavailableError(f"{rest.where}: the server says that {left:,} bytes of it are not there.")
    elif rest.tag != first.tag:
        # A date says nothing about a version.
        is_alike = (first.version is None) == (rest.version is None)
        if is_alike and rest.tag is not None and first.tag is not None:
            return _replaced(rest.where)
        raise UnavailableError(f"{rest.where}: an answer without the object's version, perhaps a proxy's page.")
    elif first.tag is None and left is not None and rest.num_bytes not in (None, left):
        raise UnavailableError(f"{rest.where}: the answer does not have the size of the rest of the object.")
    return None


def _replaced(where: str) -> StoreError:
    return StoreError(f"{where}: it was replaced while it was being read. Read it again; write datasets to new names.")
