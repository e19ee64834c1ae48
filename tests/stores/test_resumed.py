"""Reads over several connections: an odd answer is a failure like any other, a replaced object is read again, and no
more is downloaded than was promised."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from servers.web import WebServer

from lightning_stream.errors import DigestError, StoreError, UnavailableError
from lightning_stream.stores import (
    BaseStore,
    LocalStore,
    ObjectStream,
    RetryingStore,
    RetryPolicy,
    StoreTraits,
    open_store,
)
from lightning_stream.stores.base import AnswerError

POLICY = RetryPolicy(retries=3, first_pause_s=0.001, longest_pause_s=0.002)
CONTENT = bytes(range(256)) * 40
Answer = Callable[[int, int | None], ObjectStream]


class Script(BaseStore):
    """Answers each request for the object as the script says, and by its content when the script is over."""

    url = "script://x"
    traits = StoreTraits(conditional_put=True)

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.begins: list[int] = []

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        self.begins.append(begin)
        return (self.answers.pop(0) if self.answers else whole())(begin, end)

    def _put(self, name: str, file: BinaryIO, num_bytes: int, if_absent: bool, if_version: str | None) -> None:
        raise AssertionError("reads do not write")

    def _delete(self, name: str) -> None:
        raise AssertionError("reads do not delete")


def whole(
    content: bytes = CONTENT,
    tag: str | None = "v1",
    sent: int | None = None,
    said: int | None = None,
    known: bool = True,
) -> Answer:
    """An answer of `sent` bytes at most that says it has `said`, or what there is; `known`: it says so at all."""

    def answer(begin: int, end: int | None) -> ObjectStream:
        if begin >= len(content):
            raise AnswerError(416, "past its end")
        there = content[begin:end]
        length = (len(there) if said is None else said) if known else None
        return ObjectStream(cut(there, sent), length, tag)

    return answer


def cut(there: bytes, sent: int | None) -> Iterator[bytes]:
    yield there[:sent]
    if sent is not None:
        raise ConnectionResetError("reset by peer")


def page(begin: int, end: int | None) -> ObjectStream:
    """A proxy's login page."""
    return ObjectStream(iter([b"login"]), 5)


def empty(begin: int, end: int | None) -> ObjectStream:
    return ObjectStream(iter([]), 0)


def half(begin: int, end: int | None) -> ObjectStream:
    """Half of what was asked for."""
    there = CONTENT[begin:end][: max(1, len(CONTENT[begin:end]) // 2)]
    return ObjectStream(iter([there]), len(there), "v1")


def dated(begin: int, end: int | None) -> ObjectStream:
    """The rest of the object, by a proxy that leaves out its version: a date is all that is said of it."""
    return ObjectStream(iter([CONTENT[begin:end]]), len(CONTENT[begin:end]), tag="Wed, 21 Oct 2026 07:28:00 GMT")


def ended(begin: int, end: int | None) -> ObjectStream:
    raise AnswerError(416, "past its end")


BROKEN = whole(sent=1000)


@pytest.mark.parametrize(
    "answers",
    [
        [BROKEN, page],
        [BROKEN, page, empty, half],
        [BROKEN, dated, BROKEN, dated, BROKEN, dated],
        [BROKEN, half, half, half, half, half, half],
        [BROKEN, ended, BROKEN, ended, BROKEN, ended],
        [whole(CONTENT[::-1], "v0", sent=1000), BROKEN, BROKEN, ended, BROKEN, ended],
        [whole(sent=len(CONTENT))],
        [whole(sent=len(CONTENT), known=False)],
        [whole(sent=1000, known=False), whole(known=False)],
        [whole(said=len(CONTENT) + 7, sent=len(CONTENT))],
        [whole(tag=None, sent=1000), page, whole(tag=None)],
        [whole(CONTENT[::-1], "v0", sent=1000)],
        [whole(CONTENT[::-1], "v0", sent=1000), whole(sent=1000)],
    ],
    ids=[
        *(
            "login page",
            "page, empty, short",
            "without its version",
            "always short",
            "ends early",
            "replaced once, ends early twice",
            "reset after the last byte",
            "the same, unknown length",
        ),
        *("unknown length", "said too long", "no versions", "replaced once", "replaced once and broken"),
    ],
)
def test_an_odd_answer_to_a_resumed_request_ends_no_read(answers: list[Answer], tmp_path: Path) -> None:
    assert RetryingStore(Script(*answers), POLICY).read("x") == CONTENT
    assert RetryingStore(Script(*answers), POLICY).get("x", tmp_path / "x") == len(CONTENT)
    assert (tmp_path / "x").read_bytes() == CONTENT


@pytest.mark.parametrize("begin", [0, 1000])
def test_an_end_that_the_whole_object_contradicts_is_none(begin: int, tmp_path: Path) -> None:
    assert RetryingStore(Script(ended), POLICY).read("x", begin, 2000) == CONTENT[begin:2000]
    assert RetryingStore(Script(ended), POLICY).read("x") == CONTENT
    assert RetryingStore(Script(ended), POLICY).get("x", tmp_path / "x") == len(CONTENT)
    with pytest.raises(UnavailableError, match="the server says that byte 0 is not there"):
        RetryingStore(Script(*[ended] * 9), POLICY).read("x")
    assert RetryingStore(Script(), POLICY).read("x", len(CONTENT), len(CONTENT) + 5) == b""
    assert RetryingStore(Script(ended, empty), POLICY).read("x", 0, 5) == b""


def test_a_reset_after_the_last_byte_is_the_end_without_a_further_request() -> None:
    store = Script(whole(sent=len(CONTENT)))
    assert RetryingStore(store, POLICY).read("x") == CONTENT
    assert store.begins == [0]


def test_odd_answers_without_end_are_unavailable() -> None:
    with pytest.raises(
        UnavailableError, match=r"an answer without the object's version.*gave up after 4 failures in a row"
    ):
        RetryingStore(Script(BROKEN, *[page] * 9), POLICY).read("x")


def test_an_object_that_ends_early_each_time_is_unavailable() -> None:
    store = Script(*[BROKEN, ended] * 9)
    with pytest.raises(UnavailableError, match=r"the server says that 9,240 bytes of it are not there"):
        RetryingStore(store, POLICY).read("x")
    assert len(store.begins) == 8


def test_an_object_replaced_each_time_is_an_error_of_a_known_kind() -> None:
    changing = [whole(tag=f"v{number}", sent=1000) for number in range(20)]
    with pytest.raises(StoreError, match="replaced while it was being read") as caught:
        RetryingStore(Script(*changing), POLICY).read("x")
    assert type(caught.value) is StoreError
    stream = RetryingStore(Script(BROKEN, whole(tag="v2")), POLICY).open("x")
    with pytest.raises(StoreError, match="replaced while it was being read") as caught:
        b"".join(stream)
    assert type(caught.value) is StoreError


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("parts", [{}, {"parallel_from_bytes": 1, "part_bytes": 50}])
def test_nothing_larger_than_promised_is_downloaded(known: bool, parts: dict[str, int], tmp_path: Path) -> None:
    taken = [0]

    def endless(begin: int, end: int | None) -> ObjectStream:
        def chunks() -> Iterator[bytes]:
            while True:
                taken[0] += 100
                yield bytes(100)

        return ObjectStream(chunks(), 10**9 if known else None, "v1", total=None)

    store = RetryingStore(Script(endless, endless), RetryPolicy(**parts))
    with pytest.raises(DigestError, match="the index promises 150 bytes; there are"):
        store.get("x", tmp_path / "x", 150)
    assert (tmp_path / "x").stat().st_size <= 150
    assert taken[0] <= 300


class Replaced(Script):
    """Two ranges of an object that is replaced meanwhile; of the old one, the latter comes when all is over."""

    traits = StoreTraits(ranges=True, conditional_put=True)

    def __init__(self) -> None:
        super().__init__()
        self.is_over, self.has_come = threading.Event(), threading.Event()

    def _open(self, name: str, begin: int, end: int | None) -> ObjectStream:
        self.begins.append(begin)
        if begin not in (0, len(CONTENT) // 2) or self.begins.count(begin) > 1:
            return whole()(begin, end)
        old = bytes(len(CONTENT))[begin:end]
        return ObjectStream(cut(old, 1000) if begin == 0 else self._late(old), len(old), "v0")

    def _late(self, old: bytes) -> Iterator[bytes]:
        self.is_over.wait(5)
        yield old
        self.has_come.set()


def test_a_range_of_a_read_that_was_given_up_is_not_written_into_the_next_one(tmp_path: Path) -> None:
    half = len(CONTENT) // 2
    server = Replaced()
    policy = RetryPolicy(first_pause_s=0.001, parallel_from_bytes=1, part_bytes=half)
    store = RetryingStore(server, policy)
    assert store.get("x", tmp_path / "x", len(CONTENT)) == len(CONTENT)
    server.is_over.set()
    assert server.has_come.wait(30)
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_local_file_larger_than_promised_is_not_copied(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DigestError, match="the index promises 100 bytes; there are 1,099,511,627,776"):
        LocalStore(tmp_path).get("large", tmp_path / "copy", 100)
    assert (tmp_path / "copy").stat().st_size == 0


@pytest.mark.parametrize(("ranges", "requests"), [(False, 2), (True, 8)])
def test_a_web_server_without_ranges_sends_a_large_file_once(ranges: bool, requests: int, tmp_path: Path) -> None:
    with WebServer() as server:
        server.ranges = ranges
        server.objects["/x"] = CONTENT * 100
        store = open_store(server.url, {"parallel_from_bytes": 1, "part_bytes": 128_000})
        assert store.get("x", tmp_path / "x", len(CONTENT) * 100) == len(CONTENT) * 100
        assert (tmp_path / "x").read_bytes() == CONTENT * 100
        assert server.count("GET") == requests


def test_a_deadline_ends_a_server_that_sends_a_byte_now_and_then() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.recv(10_000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                ended.wait(0.05)
                with contextlib.suppress(OSError):  # the client hangs up
                    while not ended.wait(0.05):
                        connection.sendall(b"x")

        ended = threading.Event()
        thread = threading.Thread(target=drip)
        thread.start()
        begun = time.monotonic()
        store: Any = open_store(
            f"http://127.0.0.1:{listener.getsockname()[1]}", {"deadline_s": 0.5, "timeout_s": 100.0}
        )
        with pytest.raises(UnavailableError, match=r"not done within the deadline of 0\.5 s"):
            store.read("x")
        assert time.monotonic() - begun < 60
        ended.set()
        thread.join()


def test_a_connection_is_free_for_a_short_answer_after_a_long_one() -> None:
    """To wait in the kernel for many bytes saves CPU, but must end with the response that has so many."""
    long, short = bytes(range(256)) * 4096, b"short"
    with WebServer() as server:
        server.objects.update({"/long": long, "/short": short})
        store: Any = open_store(server.url, {"timeout_s": 60.0})
        for _ in range(3):
            assert store.read("long") == long
            begun = time.monotonic()
            assert store.read("short") == short
            assert time.monotonic() - begun < 40


def _send_in_pieces(listener: socket.socket, content: bytes, then: threading.Event) -> None:
    connection = listener.accept()[0]
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(10_000)
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode())
        for at in range(0, len(content), 4096):
            connection.sendall(content[at : at + 4096])
        then.wait(20)


def test_bytes_that_arrive_in_many_pieces_are_read_in_few_and_to_the_last_one() -> None:
    content = bytes(range(256)) * (32 << 10)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()
        thread = threading.Thread(target=_send_in_pieces, args=(listener, content, ended))
        thread.start()
        store: Any = open_store(f"http://127.0.0.1:{listener.getsockname()[1]}", {"timeout_s": 60.0, "retries": 0})
        with store.open("x") as stream:
            chunks = list(stream)
        ended.set()
        thread.join()
    assert b"".join(chunks) == content
    assert len(chunks) < len(content) // (100 << 10)
