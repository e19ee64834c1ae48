"""Google Cloud Storage's JSON API, as much as a client needs to read, write, list and delete."""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
import uuid
from typing import Any

from servers.web import Handler, WebServer


class FakeGcs(WebServer):
    """Buckets of objects; `objects` maps ``bucket/name`` to content. Listings come in pages of `page_size`."""

    def __init__(self, buckets: tuple[str, ...] = ("bucket",), page_size: int = 3) -> None:
        super().__init__()
        self.buckets = set(buckets)
        self.page_size = page_size
        self.conditions: dict[str | None, str | None] = {}  # of uploads, by their ids
        self.uploads: dict[str, tuple[str, bytearray]] = {}

    def handler(self) -> type[Handler]:
        return _GcsHandler


class _GcsHandler(Handler):
    def answer(self) -> None:
        # Names are one quoted path segment: take the path apart before it is unquoted.
        path = urllib.parse.urlsplit(self.path).path
        found = re.fullmatch(r"(/upload|/download)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?", path)
        if found is None:
            return self.refuse(404, "no such method")
        kind, bucket, name = found[1], found[2], urllib.parse.unquote(found[3] or "")
        if bucket not in self.owner.buckets:
            return self.refuse(404, "The specified bucket does not exist.")
        if kind == "/upload":
            return self._upload(bucket)
        if not name:
            return self._list(bucket)
        return self._object(bucket, name)

    def _object(self, bucket: str, name: str) -> None:
        content = self.owner.objects.get(f"{bucket}/{name}")
        if content is None:
            return self.refuse(404, f"No such object: {bucket}/{name}")
        if self.command == "DELETE":
            del self.owner.objects[f"{bucket}/{name}"]
            return self.reply(204)
        if self.query.get("alt") == "media":
            return self.media(content, {"x-goog-generation": str(abs(hash(content)))})
        return self.reply(200, self._about(bucket, name))

    def _list(self, bucket: str) -> None:
        prefix = f"{bucket}/{self.query.get('prefix', '')}"
        after = base64.b64decode(self.query.get("pageToken", "")).decode()
        keys = [key for key in sorted(self.owner.objects) if key.startswith(prefix) and key > after]
        page = keys[: self.owner.page_size]
        items = [self._about(*key.split("/", 1)) for key in page]
        listing: dict[str, Any] = {"kind": "storage#objects", "items": items}
        if len(keys) > len(page):
            listing["nextPageToken"] = base64.b64encode(page[-1].encode()).decode()
        return self.reply(200, listing)

    def _upload(self, bucket: str) -> None:
        kind = self.query.get("uploadType")
        if kind == "multipart":
            boundary = re.search(r"boundary=\"?([^\";]+)", self.headers["Content-Type"].replace("'", '"'))
            assert boundary is not None
            mark = b"--" + boundary[1].encode()
            _, about, media = self.content.split(mark, 2)
            name = json.loads(about.split(b"\r\n\r\n", 1)[1])["name"]
            content = media.split(b"\r\n\r\n", 1)[1].rsplit(b"\r\n" + mark, 1)[0]
            return self._store(bucket, name, content)
        if "upload_id" not in self.query:
            ticket = uuid.uuid4().hex
            self.owner.uploads[ticket] = (json.loads(self.content or b"{}")["name"], bytearray())
            self.owner.conditions[ticket] = self.query.get("ifGenerationMatch")
            here = f"{self.owner.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={ticket}"
            return self.reply(200, headers={"Location": here})
        return self._resume(bucket, self.query["upload_id"])

    def _resume(self, bucket: str, ticket: str) -> None:
        name, so_far = self.owner.uploads[ticket]
        so_far += self.content
        span = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+|\*)", self.headers.get("Content-Range", "bytes */*"))
        assert span is not None
        if span[1] == "*" or int(span[1]) > len(so_far):
            return self.reply(308, headers={"Range": f"bytes=0-{len(so_far) - 1}"} if so_far else {})
        return self._store(bucket, name, bytes(so_far))

    def _store(self, bucket: str, name: str, content: bytes) -> None:
        wanted = self.query.get("ifGenerationMatch", self.owner.conditions.get(self.query.get("upload_id")))
        with self.owner.lock:
            there = self.owner.objects.get(f"{bucket}/{name}")
            if wanted is not None and int(wanted) != (0 if there is None else abs(hash(there))):
                return self.refuse(412, "At least one of the pre-conditions you specified did not hold.")
            self.owner.objects[f"{bucket}/{name}"] = content
        return self.reply(200, self._about(bucket, name))

    def _about(self, bucket: str, name: str) -> dict[str, Any]:
        import google_crc32c

        content = self.owner.objects[f"{bucket}/{name}"]
        crc32c = base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()
        return {"bucket": bucket, "name": name, "size": str(len(content)), "crc32c": crc32c, "generation": "1"}
