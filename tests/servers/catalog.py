"""A server of Unity Catalog for tests, with the storage behind it that refuses keys that have ended.

It answers as the open interface says, https://github.com/unitycatalog/unitycatalog/blob/main/api/all.yaml,
in the version
of commit 00c5b425 (``/api/2.1/unity-catalog``): tables, volumes, ``temporary-table-credentials`` and
``temporary-volume-credentials``. The Files interface of Databricks is that of `fake_databricks`.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

from servers.fake_databricks import WorkspaceHandler
from servers.vending import VendingHandler, VendingServer
from servers.web import Handler

TOKEN = "dapi-catalog-token"
_API = re.compile(r"/api/2\.1/unity-catalog/(.+)")


class CatalogServer(VendingServer):
    """`things` are tables and volumes by their full names; `storage` says which cloud's keys are handed out.

    Attributes:
        grants: What the user may ask keys for: operations.
        tokens: Who may use the catalog.
        asked_for: The operation of each request for keys.
        troubles: The statuses of the next answers of the catalog.
    """

    def __init__(self, lifetime_s: float = 3600.0, storage: str = "aws") -> None:
        super().__init__(lifetime_s)
        self.things: dict[str, dict[str, Any]] = {}
        self.storage = storage
        self.grants = {"READ", "READ_WRITE", "READ_VOLUME", "WRITE_VOLUME"}
        self.tokens = {TOKEN}
        self.asked_for: list[str] = []
        self.troubles: list[int] = []

    def handler(self) -> type[Handler]:
        return _CatalogHandler

    def add(self, name: str, location: str, form: str = "", **about: Any) -> None:
        """A table of a format, or a volume."""
        kind = "table" if form else "volume"
        about = {"table_type": "MANAGED", "data_source_format": form, **about} if form else about
        self.things[name] = {f"{kind}_id": f"id-of-{name}", "storage_location": location, **about}


class _CatalogHandler(VendingHandler, WorkspaceHandler):
    def answer(self) -> None:
        if not self.where.startswith("/api/"):
            return self._from_storage()
        if self.owner.troubles:
            return self.say(self.owner.troubles.pop(), "REQUEST_LIMIT_EXCEEDED", "Try again later.")
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in self.owner.tokens:
            return self.say(401, "UNAUTHENTICATED", "The token is wrong.")
        found = _API.fullmatch(self.where)
        if found is None:
            return WorkspaceHandler.answer(self)
        verb, _, name = found[1].partition("/")
        if self.command == "GET" and verb in ("tables", "volumes"):
            about = self.owner.things.get(name)
            if about is None or f"{verb[:-1]}_id" not in about:
                return self.say(404, f"{verb[:-1].upper()}_DOES_NOT_EXIST", f"'{name}' does not exist.")
            return self.reply(200, about)
        return self._keys(verb.removeprefix("temporary-").removesuffix("-credentials"))

    def _keys(self, kind: str) -> None:
        asked = json.loads(self.content)
        known = {about.get(f"{kind}_id") for about in self.owner.things.values()}
        if asked[f"{kind}_id"] not in known:
            return self.say(404, "NOT_FOUND", "There is no such id.")
        self.owner.asked_for.append(asked["operation"])
        if asked["operation"] not in self.owner.grants:
            return self.say(403, "PERMISSION_DENIED", "User does not have EXTERNAL USE SCHEMA on Schema 'main.ml'.")
        keys = self.owner.issue()
        answers = {
            "aws": {"aws_temp_credentials": {name: keys[name] for name in keys if name != "expires_at"}},
            "azure": {"azure_user_delegation_sas": {"sas_token": f"sig={keys['session_token']}"}},
            "gcp": {"gcp_oauth_token": {"oauth_token": keys["session_token"]}},
        }
        return self.reply(200, {**answers[self.owner.storage], "expiration_time": int(keys["expires_at"] * 1000)})

    def _from_storage(self) -> None:
        if self.owner.storage == "aws":
            return VendingHandler.answer(self)
        shown = self.query.get("sig") or self.headers.get("Authorization", "").removeprefix("Bearer ")
        if time.time() > self.owner.issued.get(shown, ("", "", 0.0))[2]:
            self.owner.refused += 1
            return self.refuse(401, "the token has ended")
        self.where = re.sub(r"/download/storage/v1/b/([^/]+)/o/", r"/\1/", self.where)
        return Handler.answer(self)

    def media(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        super().media(content, {"x-goog-generation": str(abs(hash(content))), **(headers or {})})

    def say(self, status: int, code: str, message: str) -> None:
        self.reply(status, {"error_code": code, "message": message, "details": []})

    def refuse(self, status: int, message: str) -> None:
        WorkspaceHandler.refuse(self, status, message)
