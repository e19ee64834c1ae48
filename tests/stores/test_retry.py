"""What may pass is tried again and resumed by range; what may not is raised at once; a deadline ends both."""

from __future__ import annotations

import base64
import contextlib
import gc
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.fault_proxy import FaultProxy, Plan
from servers.ports import free_port
from servers.web import Handler, WebServer

from lightning_stream.errors import AlreadyExistsError, NotFoundError, StoreError, UnavailableError
from lightning_stream.stores import LocalStore, ObjectEntry, ObjectStream, RetryingStore, RetryPolicy, open_store

QUICK = {"first_pause_s": 0.001, "longest_pause_s": 0.01, "timeout_s": 20.0, "retries": 3}
PATIENT = {**QUICK, "timeout_s": 0.3, "retries": 40}  # a busy machine may pause for as long, too
CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        server.objects["/shard"] = CONTENT
        yield server


@contextlib.contextmanager
def faulty(web: WebServer, options: Any = QUICK, **plan: Any) -> Iterator[tuple[FaultProxy, Any]]:
    with FaultProxy(web.url, Plan(**plan)) as proxy:
        yield proxy, open_store(proxy.url, options)


@pytest.mark.parametrize("fault", ["error", "reset", "truncate", "stall"])
def test_a_fault_that_passes_is_overcome_and_not_one_byte_is_wrong(web: WebServer, tmp_path: Path, fault: str) -> None:
    with faulty(web, PATIENT, probability={fault: 1.0}, left=3) as (proxy, store):
        assert store.get("shard", tmp_path / "x") == len(CONTENT)
        assert proxy.counts[fault] == 3
    assert (tmp_path / "x").read_bytes() == CONTENT


@pytest.mark.parametrize(("asked", "waits"), [("60", True), ("0", False), ("Fri, 31 Dec 1999 23:59:59 GMT", False)])
def test_a_server_that_asks_to_wait_is_waited_for_up_to_the_longest_pause(
    monkeypatch: pytest.MonkeyPatch, asked: str, waits: bool
) -> None:
    class Throttled(Handler):
        def answer(self) -> None:
            self.reply(429, headers={"Retry-After": asked})

    class Throttling(WebServer):
        def handler(self) -> type[Handler]:
            return Throttled

    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with Throttling() as server, pytest.raises(UnavailableError, match="429"):
        open_store(server.url, {**QUICK, "longest_pause_s": 5.0}).read("shard")
    assert [pause >= 5.0 for pause in pauses] == [waits] * QUICK["retries"]


def test_a_broken_body_is_resumed_and_not_read_from_the_beginning(web: WebServer, tmp_path: Path) -> None:
    with faulty(web, probability={"truncate": 1.0}, left=2) as (_, store):
        store.get("shard", tmp_path / "x")
    ranges = [headers.get("Range") for headers in web.headers]
    assert ranges[0] is None
    begins = [int(value.removeprefix("bytes=").rstrip("-")) for value in ranges[1:] if value]
    assert begins == sorted(begins)
    assert begins[-1] > 0


def test_a_server_without_ranges_is_resumed_all_the_same(web: WebServer) -> None:
    web.ranges = False
    with faulty(web, probability={"truncate": 1.0}, left=2) as (_, store):
        assert store.read("shard") == CONTENT


def test_progress_renews_patience(web: WebServer) -> None:
    with faulty(web, probability={"truncate": 0.8}, left=40, seed=3) as (proxy, store):
        for _ in range(12):
            assert store.read("shard") == CONTENT
        assert proxy.faults() > 3 * QUICK["retries"]


def test_endless_trouble_ends_with_what_happened_and_how_often(web: WebServer) -> None:
    with faulty(web, probability={"error": 1.0}) as (proxy, store):
        with pytest.raises(UnavailableError, match=r"shard: 503 .*gave up after 4 failures in a row"):
            store.read("shard")
        assert proxy.counts["error"] == 4


def test_a_deadline_ends_what_still_makes_progress(web: WebServer) -> None:
    with FaultProxy(web.url, Plan(probability={"truncate": 1.0}, latency_s=0.2)) as proxy:
        store = open_store(proxy.url, {**QUICK, "deadline_s": 0.3})
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match=r"deadline of 0\.3 s"):
            store.read("shard")
        assert time.monotonic() - begun < 10


def test_nobody_listening_is_unavailable(web: WebServer) -> None:
    with pytest.raises(UnavailableError, match="gave up after 4"):
        open_store(f"http://127.0.0.1:{free_port()}", QUICK).read("x")


class Scripted(LocalStore):
    """Raises the given errors before it answers."""

    def __init__(self, folder: Path, troubles: list[Exception]) -> None:
        super().__init__(folder)
        self.troubles = troubles

    def _trouble(self) -> None:
        if self.troubles:
            raise self.troubles.pop(0)

    def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
        self._trouble()
        return super().open(name, begin, end)

    def put(self, name: str, source: Path | bytes, **condition: Any) -> None:
        self._trouble()
        super().put(name, source, **condition)

    def _list(self, prefix: str) -> Iterator[ObjectEntry]:
        for number, entry in enumerate(super()._list(prefix)):
            if number == 2:
                self._trouble()
            yield entry


POLICY = RetryPolicy(retries=3, first_pause_s=0.001)


def test_what_is_absent_or_refused_is_not_tried_again(tmp_path: Path) -> None:
    troubles: list[Exception] = [NotFoundError("absent"), UnavailableError("never reached")]
    with pytest.raises(NotFoundError, match="absent"):
        RetryingStore(Scripted(tmp_path, troubles), POLICY).read("x")
    assert len(troubles) == 1


def test_writes_and_listings_are_tried_again(tmp_path: Path) -> None:
    store = RetryingStore(Scripted(tmp_path, [UnavailableError("1"), UnavailableError("2")]), POLICY)
    store.put("a", b"a")
    for name in "bcde":
        store.put(name, b"x")
    store = RetryingStore(Scripted(tmp_path, [UnavailableError("1"), UnavailableError("2")]), POLICY)
    assert [entry.name for entry in store.list()] == list("abcde")


class LostAnswers(LocalStore):
    """Does each put, and the first time loses the answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lost = 1

    def put(self, name: str, source: Path | bytes, **condition: Any) -> None:
        super().put(name, source, **condition)
        self.lost -= 1
        if self.lost == 0:
            raise UnavailableError("the connection broke")


def test_a_conditional_put_whose_answer_was_lost_is_no_conflict_with_itself(tmp_path: Path) -> None:
    RetryingStore(LostAnswers(tmp_path), POLICY).put("a", b"mine", if_absent=True)
    with LocalStore(tmp_path).open("a") as stream:
        version = stream.version
    RetryingStore(LostAnswers(tmp_path), POLICY).put("a", b"next", if_version=version)
    assert LocalStore(tmp_path).read("a") == b"next"


@pytest.mark.parametrize("there", [b"othe", b"another", b""])
def test_a_conditional_put_tried_again_still_sees_what_another_put(tmp_path: Path, there: bytes) -> None:
    LocalStore(tmp_path).put("a", there)
    troubles: list[Exception] = [UnavailableError("the connection broke")]
    with pytest.raises(AlreadyExistsError):
        RetryingStore(Scripted(tmp_path, troubles), POLICY).put("a", b"mine", if_absent=True)
    assert LocalStore(tmp_path).read("a") == there


def test_an_object_replaced_while_it_is_read_is_an_error_not_a_mixture(tmp_path: Path) -> None:
    class Changing(LocalStore):
        version = 0

        def open(self, name: str, begin: int = 0, end: int | None = None) -> ObjectStream:
            self.version += 1
            return ObjectStream(iter([b"half"]), 8 - begin, f"v{self.version}")

    with pytest.raises(StoreError, match="replaced while it was being read"):
        RetryingStore(Changing(tmp_path), POLICY).read("x")


def test_a_large_object_comes_in_parts_each_resumed(web: WebServer, tmp_path: Path) -> None:
    options = {**QUICK, "parallel_from_bytes": 1, "part_bytes": 100_000, "retries": 20}
    with FaultProxy(web.url, Plan(probability={"reset": 0.3, "error": 0.2})) as proxy:
        assert open_store(proxy.url, options).get("shard", tmp_path / "x", len(CONTENT)) == len(CONTENT)
        assert proxy.faults() > 0
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_settings_that_cannot_be_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"retries is 0 or more; got -1; timeout_s is positive; got 0"):
        RetryPolicy(retries=-1, timeout_s=0)


def test_an_upload_carries_what_lets_the_server_refuse_damage(moto_place: Any) -> None:
    store: Any = open_store(moto_place.url, {**QUICK, **moto_place.options})
    sent: list[str] = []
    send = store.store._send

    def note(request: Any) -> Any:
        sent.append(request.headers["Content-MD5"])
        return send(request)

    store.store._send = note
    store.put("x", b"content")
    assert sent == [base64.b64encode(hashlib.md5(b"content").digest()).decode()]


def test_a_listing_continues_from_page_to_page(moto_place: Any) -> None:
    store: Any = open_store(moto_place.url, moto_place.options)
    send = store.store._send

    def cut(request: Any) -> Any:
        request.url += "&max-keys=2" if "list-type" in request.url else ""
        return send(request)

    store.store._send = cut
    for number in range(7):
        store.put(f"page/{number}", bytes(number))
    assert [entry.num_bytes for entry in store.list("page/")] == list(range(7))


def test_a_file_that_cannot_be_opened_raises_and_prints_nothing(moto_place: Any, tmp_path: Path) -> None:
    store = open_store(moto_place.url, moto_place.options)
    store.put("x", b"content")
    with pytest.raises(FileNotFoundError):
        store.get("x", tmp_path / "none" / "x")
    gc.collect(0)  # pytest fails a test whose objects raise as they are freed; these are young


class Clock:
    """Stands for `time` in a module: it goes only as far as it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    perf_counter = monotonic


class Paced(LocalStore):
    """A store that takes a number of seconds for each piece."""

    def __init__(self, folder: Path, clock: Clock, seconds: float, piece_bytes: int) -> None:
        super().__init__(folder)
        self.clock, self.seconds, self.piece_bytes = clock, seconds, piece_bytes

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        stream = super()._open(name, begin, end)
        data = b"".join(stream.chunks)
        pieces = [data[k : k + self.piece_bytes] for k in range(0, len(data), self.piece_bytes)]
        stream.chunks = (self.clock.sleep(self.seconds) or piece for piece in pieces)
        return stream


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lightning_stream.stores.retry.time", clock)
    return clock


def paced(folder: Path, clock: Clock, seconds: float, piece_bytes: int, **how: Any) -> RetryingStore:
    (folder / "x").write_bytes(bytes(4 << 20))
    return RetryingStore(Paced(folder, clock, seconds, piece_bytes), RetryPolicy(**how))


@pytest.mark.parametrize("parts", [1, 16])
def test_a_steady_download_may_take_longer_than_the_deadline(tmp_path: Path, clock: Clock, parts: int) -> None:
    store = paced(tmp_path, clock, 10.0, 1 << 18, deadline_s=15.0, parallel_from_bytes=1, part_bytes=(4 << 20) // parts)
    assert store.get("x", tmp_path / "y", 4 << 20) == 4 << 20
    assert clock.now >= 160
    assert len(store.read("x")) == 4 << 20


def test_a_server_that_trickles_is_given_up_at_the_deadline(tmp_path: Path, clock: Clock) -> None:
    store = paced(tmp_path, clock, 10.0, 100_000, deadline_s=60.0)
    with pytest.raises(UnavailableError, match=r"deadline of 60 s.*less than 16 KiB/s.*deadline_s"):
        store.read("x")
    assert clock.now == 70


def test_a_reader_may_take_its_time_between_two_chunks(tmp_path: Path, clock: Clock) -> None:
    store = paced(tmp_path, clock, 1.0, 10_000, deadline_s=600.0)
    with store.open("x") as stream:
        for number, _ in enumerate(stream):
            clock.sleep(1000.0 if number % 100 == 0 else 0.0)
