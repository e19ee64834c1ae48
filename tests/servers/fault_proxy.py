"""An HTTP proxy that goes wrong on purpose, by a seeded plan, and counts what it did."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

RESUMED = ("page", "empty", "gone", "short", "unversioned")  # odd answers to a request that resumes a body
FAULTS = ("error", "refuse", "reset", "truncate", "stall", "flip", *RESUMED)
ANSWERS = {
    "error": b"HTTP/1.1 503 Slow Down\r\nContent-Length: 36\r\n\r\n<Error><Code>SlowDown</Code></Error>",
    "page": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 24\r\n\r\n<html>Please sign in!</h>",
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "gone": b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n\r\n",
    "refuse": b"HTTP/1.1 403 Forbidden\r\nContent-Length: 46\r\n\r\n<Error><Code>InvalidAccessKeyId</Code></Error>",
}


@dataclass
class Plan:
    """What goes wrong, and how often; may be changed while the proxy runs.

    Attributes:
        latency_s: Before each answer.
        bytes_per_s: Of the bodies of answers, on each connection; None: no limit.
        probability: Of each fault per answered request, by its name in `FAULTS`.
        resumed: Of each fault per request that resumes a body (a range that does not begin at 0), by its name.
        only: Faults befall requests whose path holds this.
        method: And that are of this method. A "flip" spoils what is sent with a PUT, and what is answered to a GET.
        burst: An "error" makes this many requests in a row fail.
        left: How many more faults may be injected.
        once: Only the first request for each path goes wrong.
        seed: Of the draws.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    probability: dict[str, float] = field(default_factory=dict)
    resumed: dict[str, float] = field(default_factory=dict)
    only: str = "shard"
    method: str = "GET"
    burst: int = 1
    left: int = 1 << 60
    once: bool = False
    seed: int = 0


class FaultProxy:
    """Stands before a server on 127.0.0.1, in a thread of its own, while the context lasts.

    Attributes:
        counts: Faults injected, by name; and ``bytes`` of bodies sent.
        asked: (method, path) of all requests, counted.
    """

    def __init__(self, upstream: str, plan: Plan | None = None) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.plan = plan or Plan()
        self.counts: Counter[str] = Counter()
        self.asked: Counter[tuple[str, str]] = Counter()
        self._random = random.Random(self.plan.seed)
        self._burst_left = 0
        self._transports: set[asyncio.WriteTransport] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._listening = threading.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def faults(self) -> int:
        return sum(self.counts[name] for name in FAULTS)

    def __enter__(self) -> Any:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 20))
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        self._loop.run_forever()
        for listening in server.sockets:  # a closed server would refuse connections that it has accepted already
            self._loop.remove_reader(listening.fileno())
        self._loop.run_until_complete(self._end())
        server.close()
        self._loop.close()

    async def _end(self) -> None:
        """Leave no socket open: neither of what goes on, nor of what just came in or was about to close."""
        await _rounds()
        while found := [*(asyncio.all_tasks(self._loop) - {asyncio.current_task()}), *self._open()]:
            for one in found:
                one.cancel() if isinstance(one, asyncio.Task) else one.abort()
            await _rounds()

    def _open(self) -> list[asyncio.WriteTransport]:
        return [one for one in self._transports if (sock := one.get_extra_info("socket")) and sock.fileno() >= 0]

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """No coroutine: one that is cancelled before its first step would leave the connection open."""
        self._transports.add(writer.transport)
        task = self._loop.create_task(self._client(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while await self._exchange(reader, writer):
                pass
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False where the connection is over."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, path = head.split(b" ", 2)[:2]
        sent = await reader.readexactly(int(_field(head, b"content-length") or 0))
        self.asked[method.decode(), urlsplit(path.decode()).path] += 1
        await self._wait()
        fault = self._draw(method, path, resumed=(_field(head, b"range") or b"bytes=0-")[6:8] != b"0-")
        if fault in ANSWERS:
            writer.write(ANSWERS[fault])
            await writer.drain()
            return True
        if fault == "flip" and sent:
            sent = self._flipped(sent)
        with contextlib.closing(await _Upstream.open(self._upstream)) as upstream:
            answer = await upstream.ask(head, sent, bodyless=method == b"HEAD")
        return await self._send(writer, answer, fault)

    async def _wait(self) -> None:
        """For the latency, which may change meanwhile."""
        begun = self._loop.time()
        while (left := begun + self.plan.latency_s - self._loop.time()) > 0:
            await asyncio.sleep(min(left, 0.05))

    def _draw(self, method: bytes, path: bytes, *, resumed: bool) -> str | None:
        if method != self.plan.method.encode() or self.plan.only.encode() not in path or self.plan.left <= 0:
            return None
        if self.plan.once and self.asked[method.decode(), urlsplit(path.decode()).path] > 1:
            return None
        if self._burst_left > 0:
            self._burst_left -= 1
            fault: str | None = "error"
        else:
            plan = {**self.plan.probability, **self.plan.resumed} if resumed else self.plan.probability
            names, chances = [*plan, None], list(plan.values())
            fault = self._random.choices(names, [*chances, max(0.0, 1 - sum(chances))])[0]
            self._burst_left = self.plan.burst - 1 if fault == "error" else 0
        if fault is not None:
            self.plan.left -= 1
            self.counts[fault] += 1
        return fault

    def _flipped(self, content: bytes) -> bytes:
        at = self._random.randrange(len(content))
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    async def _send(self, writer: asyncio.StreamWriter, answer: tuple[bytes, bytes], fault: str | None) -> bool:
        head, body = answer
        if fault == "flip" and body:
            body = self._flipped(body)
        if fault == "short" and body:
            head, body = _shortened(head, body)
        if fault == "unversioned":
            head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"etag:"))
        cut = self._random.randrange(len(body)) if fault in ("reset", "truncate", "stall") and body else len(body)
        self.counts["bytes"] += cut
        piece = cut if self.plan.bytes_per_s is None else 1 << 14
        writer.write(head)
        for begin in range(0, cut, max(1, piece)):
            if self.plan.bytes_per_s is not None:
                await asyncio.sleep(piece / self.plan.bytes_per_s)
            writer.write(body[begin : min(cut, begin + piece)])
        await writer.drain()
        if cut == len(body):
            return True
        if fault == "stall":
            await asyncio.sleep(3600)  # until the client loses patience, or the proxy ends
        if fault == "reset":
            connection: Any = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return False


class _Upstream:
    """One connection to the server behind."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: tuple[str, int]) -> _Upstream:
        return cls(*await asyncio.open_connection(*address, limit=1 << 20))

    async def ask(self, head: bytes, sent: bytes, *, bodyless: bool) -> tuple[bytes, bytes]:
        """The answer's head and body."""
        self._writer.write(head + sent)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        while answer.startswith(b"HTTP/1.1 100"):
            answer = await self._reader.readuntil(b"\r\n\r\n")
        status = answer.split(b" ", 2)[1]
        if bodyless or status in (b"204", b"304"):
            return answer, b""
        if (length := _field(answer, b"content-length")) is not None:
            return answer, await self._reader.readexactly(int(length))
        raw = b""
        while not raw.endswith(b"0\r\n\r\n"):
            raw += await self._reader.readuntil(b"\r\n")
        return answer, raw

    def close(self) -> None:
        self._writer.transport.abort()


def _shortened(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """An answer that is right in itself, and gives half of what was asked for."""
    body = body[: len(body) // 2]
    lines = [
        line for line in head.split(b"\r\n") if not line.lower().startswith((b"content-length:", b"content-range:"))
    ]
    begin = (_field(head, b"content-range") or b"bytes 0-").split(b" ")[1].split(b"-")[0]
    span = b"%d-%d/*" % (int(begin), int(begin) + len(body) - 1)
    lines[1:1] = [b"Content-Length: %d" % len(body), b"Content-Range: bytes " + span]
    return b"\r\n".join(lines), body


def _field(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


async def _rounds() -> None:
    """Let the loop go round often enough for what was begun to be carried out: a connection made, or closed."""
    for _ in range(5):
        await asyncio.sleep(0)
