"""A folder as an S3 bucket on 127.0.0.1 that answers as slowly as a network does: for benchmarks of reading.

It speaks as much of S3 as clients need to read: GetObject with ranges, HeadObject, ListObjectsV2. Bodies go from the
page cache to the socket by `sendfile`: on a small machine the server takes little of what the clients could use.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import re
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

CERTIFICATE = "server.pem"
_KEY = "server.key"
_PIECE_BYTES = 1 << 17


@dataclass(frozen=True)
class Pace:
    """How slowly.

    Attributes:
        latency_s: From a request to the first byte of its answer.
        bytes_per_s: Of each connection; None: as fast as it goes.
        all_bytes_per_s: Of all connections together, which share it equally; None: no limit.
        tls: The server has a certificate, which clients trust by ``AWS_CA_BUNDLE``.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    all_bytes_per_s: float | None = None
    tls: bool = False

    def piece_s(self, num_bytes: int, num_sending: int) -> float:
        """Seconds that a piece takes on one of so many connections that send."""
        rates = [self.bytes_per_s, self.all_bytes_per_s and self.all_bytes_per_s / num_sending]
        return max((num_bytes / rate for rate in rates if rate), default=0.0)


@contextlib.contextmanager
def serve(folder: Path, pace: Pace) -> Iterator[tuple[str, Any]]:
    """A server in a process of its own while the context lasts.

    Gives its endpoint, and the numbers of GET requests and of bytes sent so far, which may be set to 0. The bucket's
    name is ignored: ``s3://anything/name`` is ``folder/name``. A certificate, which signs itself, is `CERTIFICATE` in
    the folder.
    """
    if pace.tls:
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-keyout", folder / _KEY, "-out", folder / CERTIFICATE, "-subj", "/CN=127.0.0.1"]
        subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    counts = context.Array("q", 2)
    process = context.Process(target=_main, args=(folder, pace, counts, its), daemon=True)
    process.start()
    try:
        yield f"http{'s' * pace.tls}://127.0.0.1:{ours.recv()}", counts
    finally:
        process.terminate()
        process.join()


def _main(folder: Path, pace: Pace, counts: Any, ready: Any) -> None:
    context = None
    if pace.tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / CERTIFICATE, folder / _KEY)
    asyncio.run(_Server(folder, pace, counts).run(ready, context))


class _Server:
    def __init__(self, folder: Path, pace: Pace, counts: Any) -> None:
        self.folder = folder
        self.pace = pace
        self.counts = counts
        self.sending = 0

    async def run(self, ready: Any, tls: ssl.SSLContext | None) -> None:
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, backlog=1024, ssl=tls)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    async def _client(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with contextlib.closing(client), contextlib.suppress(ConnectionError, RuntimeError, EOFError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await self._answer(client, head.decode("latin1"))

    async def _answer(self, client: asyncio.StreamWriter, head: str) -> None:
        method, target, _ = head.split(" ", 2)
        url = urlsplit(target)
        name = url.path.lstrip("/").partition("/")[2]
        self.counts[0] += method == "GET"
        await asyncio.sleep(self.pace.latency_s)
        query = parse_qs(url.query)
        if "list-type" in query:
            return await _send(client, "200 OK", self._listing(query.get("prefix", [""])[0]))
        path = self.folder / name
        if not path.is_file():
            return await _send(client, "404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>", method)
        return await self._send_file(client, path, head, method)

    async def _send_file(self, client: asyncio.StreamWriter, path: Path, head: str, method: str) -> None:
        loop = asyncio.get_running_loop()
        size = path.stat().st_size
        begin = 0
        end = size
        status = "200 OK"
        if asked := re.search(r"(?im)^range:\s*bytes=(\d+)-(\d*)", head):
            begin = int(asked[1])
            end = min(size, int(asked[2]) + 1 if asked[2] else size)
            status = f"206 Partial Content\r\nContent-Range: bytes {begin}-{end - 1}/{size}"
        fields = f'ETag: "{size:x}"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nAccept-Ranges: bytes'
        fields += f"\r\nContent-Type: application/octet-stream\r\nContent-Length: {end - begin}"
        client.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode())
        if method == "HEAD":
            return
        due = time.monotonic()
        step = _PIECE_BYTES if self.pace.piece_s(1, 1) else end
        self.sending += 1
        try:
            with path.open("rb") as file:
                while begin < end:
                    sent = await loop.sendfile(client.transport, file, begin, min(step, end - begin))
                    begin += sent
                    self.counts[1] += sent
                    due += self.pace.piece_s(sent, self.sending)
                    await asyncio.sleep(due - time.monotonic())
        finally:
            self.sending -= 1

    def _listing(self, prefix: str) -> bytes:
        paths = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}
        entries = "".join(
            f"<Contents><Key>{name}</Key><Size>{paths[name].stat().st_size}</Size>"
            "<LastModified>2024-01-01T00:00:00Z</LastModified></Contents>"
            for name in sorted(paths)
            if name.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()


async def _send(client: asyncio.StreamWriter, status: str, body: bytes, method: str = "GET") -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    client.write(head + (b"" if method == "HEAD" else body))
    await client.drain()
