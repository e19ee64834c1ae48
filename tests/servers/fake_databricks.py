"""A Databricks workspace's Files API for volumes, as much as a store needs."""

from __future__ import annotations

from typing import Any

from servers.web import Handler, WebServer

TOKEN = "dapi-fake-token"


class FakeDatabricks(WebServer):
    """`objects` maps absolute paths to content. Listings come in pages of three."""

    def __init__(self) -> None:
        super().__init__()
        self.authorization = f"Bearer {TOKEN}"

    def handler(self) -> type[Handler]:
        return WorkspaceHandler


class WorkspaceHandler(Handler):
    page = 3

    def answer(self) -> None:
        for prefix, method in (
            ("/api/2.0/fs/files", self._files),
            ("/api/2.0/fs/directories", self._directories),
        ):
            if self.where.startswith(prefix):
                return method(self.where[len(prefix) :])
        return self.refuse(404, "ENDPOINT_NOT_FOUND")

    def refuse(self, status: int, message: str) -> None:
        codes = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ALREADY_EXISTS"}
        self.reply(status, {"error_code": codes.get(status, "BAD_REQUEST"), "message": message})

    def _files(self, path: str) -> None:
        objects = self.owner.objects
        if self.command == "PUT":
            with self.owner.lock:
                if self.query.get("overwrite") == "false" and path in objects:
                    return self.refuse(409, "The file being created already exists.")
                objects[path] = self.content
            return self.reply(204)
        if path not in objects:
            return self.refuse(404, "The file being accessed is not found.")
        if self.command == "DELETE":
            del objects[path]
            return self.reply(204)
        return self.media(objects[path], {"Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"})

    def _directories(self, path: str) -> None:
        if self.command != "GET":
            return self.reply(204 if self.command == "PUT" else 200)
        top = path.rstrip("/") + "/"
        below = [key[len(top) :] for key in self.owner.objects if key.startswith(top)]
        if not below:
            return self.refuse(404, "The directory being accessed is not found.")
        names = sorted({name.partition("/")[0] + "/" * ("/" in name) for name in below})
        begin = int(self.query.get("page_token", 0))
        listing: dict[str, Any] = {"contents": [self._about(top, name) for name in names[begin : begin + self.page]]}
        if begin + self.page < len(names):
            listing["next_page_token"] = str(begin + self.page)
        return self.reply(200, listing)

    def _about(self, top: str, name: str) -> dict[str, Any]:
        if name.endswith("/"):
            return {"path": top + name, "name": name[:-1], "is_directory": True}
        return {
            "path": top + name,
            "name": name,
            "is_directory": False,
            "file_size": len(self.owner.objects[top + name]),
        }
