"""A server of keys that end, and a bucket that refuses them from then on."""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import time
import traceback
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from servers.web import Handler, WebServer

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
        return super().answer()

    def _is_allowed(self) -> bool:
        signed = _SIGNED_BY.search(self.headers.get("Authorization", ""))
        name, _, ends = self.owner.issued.get(self.headers.get("x-amz-security-token", ""), ("", "", 0.0))
        return signed is not None and signed[1] == name and time.time() < ends

    def _fail(self, status: int, code: str, message: str) -> None:
        self.xml(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>")

    def _listing(self, bucket: str, prefix: str) -> None:
        names = {path.removeprefix(f"{bucket}/"): content for path, content in self.owner.objects.items()}
        found = "".join(
            f'<Contents><Key>{escape(name)}</Key><Size>{len(content)}</Size><ETag>"e"</ETag></Contents>'
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
    stream: dict[str, Any], rank: int, num_ranks: int, folder: Path, most: int | None, pause_s: float, said: Any
) -> None:
    """Be one rank with two workers that trains, slowly, on `most` batches from the state in `folder` on, or on all.

    The first rank leaves its state there, and each its log. Says the ids that it trained on, or the text of an error.
    """
    from lightning_stream import Stream, StreamingDataLoader, StreamingDataset, World

    try:
        logging.basicConfig(filename=folder / f"log-{rank}", level=logging.DEBUG, force=True)
        dataset = StreamingDataset(streams=[Stream(**stream)], shuffle=True, predownload=4, num_canonical_nodes=2)
        world = World(rank, num_ranks, num_ranks)
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
