"""A server of keys that end, and a bucket that refuses them from then on."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import re
import secrets
import stat
import time
import traceback
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from servers.web import Handler, WebServer

from lightning_stream import MDSWriter

_SIGNED_BY = re.compile(r"Credential=([^/]+)/")


class VendingServer(WebServer):
    """Keys by ``POST /keys``, and S3 for objects ``/bucket/...`` for those who sign with keys that have not ended.

    Attributes:
        lifetime_s: Of the keys that are issued from now on.
        issued: The session tokens of all keys, with the other two and when they end.
        refused: How many requests came with keys that had ended, or with none.
    """

    def __init__(self, lifetime_s: float = 3600.0) -> None:
        super().__init__()
        self.lifetime_s = lifetime_s
        self.issued: dict[str, tuple[str, str, float]] = {}
        self.refused = 0

    def handler(self) -> type[Handler]:
        return VendingHandler

    def issue(self) -> dict[str, Any]:
        """New keys."""
        name, secret, token = (f"{word}{secrets.token_hex(12)}" for word in ("KEY", "Secret", "Session"))
        ends = time.time() + self.lifetime_s
        with self.lock:
            self.issued[token] = (name, secret, ends)
        return {"access_key_id": name, "secret_access_key": secret, "session_token": token, "expires_at": ends}

    def revoke(self) -> None:
        """End all keys now."""
        with self.lock:
            self.issued = {token: (name, secret, 0.0) for token, (name, secret, _) in self.issued.items()}

    def left_in(self, folder: Path) -> list[Path]:
        """The files of a folder that hold a secret."""
        words = [word.encode() for token, (_, secret, _) in self.issued.items() for word in (token, secret)]
        files = [path for path in folder.rglob("*") if path.is_file()]
        return [path for path in files if any(word in path.read_bytes() for word in words)]

    def store(self, folder: Path, bucket: str = "bucket") -> None:
        """Serve the files of a folder."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.objects[f"/{bucket}/{path.relative_to(folder)}"] = path.read_bytes()


class VendingHandler(Handler):
    def answer(self) -> None:
        if (self.command, self.where) == ("POST", "/keys"):
            return self.reply(200, self.owner.issue())
        if not self._is_allowed():
            with self.owner.lock:
                self.owner.refused += 1
            return self._fail(400, "ExpiredToken", "The provided token has expired.")
        if self.command == "GET" and self.query.get("list-type") == "2":
            return self._listing(self.where.rstrip("/"), self.query.get("prefix", ""))
        return Handler.answer(self)

    def _is_allowed(self) -> bool:
        signed = _SIGNED_BY.search(self.headers.get("Authorization", ""))
        name, _, ends = self.owner.issued.get(self.headers.get("x-amz-security-token", ""), ("", "", 0.0))
        return signed is not None and signed[1] == name and time.time() < ends

    def _fail(self, status: int, code: str, message: str) -> None:
        self.xml(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>")

    def _listing(self, bucket: str, prefix: str) -> None:
        names = {path.removeprefix(f"{bucket}/"): content for path, content in self.owner.objects.items()}
        found = "".join(
            f'<Contents><Key>{escape(name)}</Key><Size>{len(content)}</Size><ETag>"{hash(content):x}"</ETag></Contents>'
            for name, content in sorted(names.items())
            if name.startswith(prefix)
        )
        self.xml(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>")

    def xml(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@dataclass(frozen=True)
class Ask:
    """What `credentials=` takes: keys of the server at an address."""

    url: str

    def __call__(self) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/keys", b"", method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def train_rank(
    method: str, stream: dict[str, Any], rank: int, folder: Path, most: int | None, pause_s: float, said: Any
) -> None:
    """Be one of two ranks that trains, slowly, on `most` batches from the state in `folder` on, or on all.

    It has two workers that start by this method. The first rank leaves its state there, and each its log. Says the ids
    that it trained on, or the text of an error.
    """
    from lightning_stream import Stream, StreamingDataLoader, StreamingDataset, World

    try:
        multiprocessing.set_start_method(method, force=True)
        logging.basicConfig(filename=folder / f"log-{rank}", level=logging.DEBUG, force=True)
        spread = {"predownload": 4, "window": 2, "num_canonical_nodes": 2}  # shards are fetched during the whole run
        dataset = StreamingDataset(streams=[Stream(**stream)], shuffle=True, **spread)
        world = World(rank, 2, 2)
        loader = StreamingDataLoader(dataset, 2, num_workers=2, prefetch_factor=1, world=world)
        state = folder / "state.json"
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text()))
        ids: list[int] = []
        for batch in itertools.islice(loader, most):
            ids += [int(value) for value in batch["id"]]
            time.sleep(pause_s)
        if rank == 0 and most is not None:
            state.write_text(json.dumps(loader.state_dict()))
            (folder / "described").write_text(f"{dataset!r} {loader!r} {dataset.describe()} {vars(dataset)}")
        said.put((rank, ids))
    except BaseException as error:  # noqa: BLE001 - the parent judges
        said.put((rank, "".join(traceback.format_exception(error))))


def written(folder: Path, num_samples: int) -> Path:
    """A folder with a small dataset."""
    with MDSWriter(out=str(folder), columns={"id": "int", "x": "bytes"}, size_limit=1 << 11) as writer:
        for number in range(num_samples):
            writer.write({"id": number, "x": number.to_bytes(2, "big") * 200})
    return folder


def run(method: str, folder: Path, stream: dict[str, Any], most: int | None, pause_s: float) -> list[int]:
    """Train with two ranks; return the ids that they got."""
    context: Any = multiprocessing.get_context(method)
    said: Any = context.Queue()
    ranks = [
        context.Process(target=train_rank, args=(method, stream, rank, folder, most, pause_s, said))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    got = dict(said.get(timeout=600) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    assert all(isinstance(ids, list) for ids in got.values()), got
    return [*got[0], *got[1]]


def stopped_and_resumed(
    method: str, server: VendingServer, folder: Path, stream: dict[str, Any], num_samples: int, pause_s: float
) -> None:
    """Train with keys that end meanwhile, stop in the middle and resume; nothing fails, and no secret is left.

    The stream reads ``bucket/train``. `method` is how its two ranks and their workers are started.
    """
    server.store(written(folder / "data", num_samples), "bucket/train")
    work = folder / "work"
    work.mkdir()
    stream = {**stream, "local": str(work / "cache")}
    begun = time.time()
    ids = run(method, work, stream, num_samples // 8, pause_s) + run(method, work, stream, None, pause_s)
    lifetimes = (time.time() - begun) / server.lifetime_s
    assert sorted(ids) == [*range(num_samples)]
    assert lifetimes > 1.5
    assert 2 <= len(server.issued) <= 1 + 1.2 * lifetimes
    (file,) = server.left_in(folder)
    assert file.parent == work / "cache" / ".lightning_stream"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {"state.json", "described", "log-0", "log-1"} <= {path.name for path in work.iterdir()}
