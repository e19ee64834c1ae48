"""A listing has every name once, in order, whatever order and pages the server lists in, and whatever fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from servers.fake_gcs import FakeGcs

from lightning_stream import MDSWriter
from lightning_stream.errors import StoreError, UnavailableError
from lightning_stream.stores import LocalStore, ObjectEntry, RetryingStore, RetryPolicy, StoreTraits, open_store

POLICY = RetryPolicy(retries=3, first_pause_s=0.001, longest_pause_s=0.001)
NAMES = [f"{folder}/{name}" for folder in ("de", "en", "en-US", "v1", "v1.1") for name in ("a", "b", "index.json")]


def pre_order(names: list[str]) -> list[str]:
    """As an account with folders lists (ADLS): a folder's content before its neighbours, so "en/x" before "en-US/x"."""
    return sorted(names, key=lambda name: name.split("/"))


def any_order(names: list[str]) -> list[str]:
    """As S3's directory buckets list."""
    return names[1::2] + names[::-2]


class Server(LocalStore):
    """Lists a fixed set of names, in its own order, two a page; every `fails`-th request fails."""

    traits = StoreTraits()

    def __init__(self, names: list[str], fails: int = 0) -> None:
        super().__init__("/nowhere")
        self.names, self.fails, self.asked = names, fails, 0

    def _list_page(self, prefix: str, token: str | None) -> tuple[list[ObjectEntry], str | None]:
        self.asked += 1
        if self.fails and self.asked % self.fails == 0:
            raise UnavailableError("503")
        begin = int(token or 0)
        names = [name for name in self.names if name.startswith(prefix)]
        entries = [ObjectEntry(name, 1) for name in names[begin : begin + 2]]
        return entries, str(begin + 2) if begin + 2 < len(names) else None


@pytest.mark.parametrize("order", [sorted, pre_order, any_order])
@pytest.mark.parametrize("fails", [0, 2, 3])
def test_no_name_is_lost_or_repeated_whatever_the_servers_order(order: object, fails: int) -> None:
    server = Server(order(sorted(NAMES)), fails)  # type: ignore[operator]
    assert [entry.name for entry in RetryingStore(server, POLICY).list()] == sorted(NAMES)


def test_failures_far_apart_do_not_add_up_and_the_listing_continues_with_its_page() -> None:
    server = Server([f"{number:05}" for number in range(100)], fails=5)
    assert len(list(RetryingStore(server, POLICY).list())) == 100
    assert server.asked == 50 + server.asked // 5


def test_failures_in_a_row_end_a_listing() -> None:
    with pytest.raises(UnavailableError, match="gave up after 4 failures in a row"):
        list(RetryingStore(Server(NAMES, fails=1), POLICY).list())


def test_marks_of_folders_are_no_objects_and_leave_a_place_empty() -> None:
    """The consoles of S3 and Google make such empty objects for "create folder"."""
    with FakeGcs() as server:
        server.objects = {"bucket/data/": b"", "bucket/data/sub/": b"", "bucket/data/odd/": b"content"}
        options = {"endpoint_url": server.url}
        assert [entry.name for entry in open_store("gs://bucket/data", options).list()] == ["odd/"]
        del server.objects["bucket/data/odd/"]
        with MDSWriter(out="gs://bucket/data", columns={"x": "int"}, store_options=options) as writer:
            writer.write({"x": 1})
        assert "bucket/data/index.json" in server.objects


def test_a_folder_that_cannot_be_listed_is_one_of_our_errors(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StoreError, match="symbolic links"):
        list(LocalStore(tmp_path).list())


def test_the_name_of_a_folder_that_is_no_utf_8_is_refused_as_those_of_files_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"names of folders must be UTF-8; rename '.*\\udcff/data'"):
        LocalStore(tmp_path / os.fsdecode(b"\xff") / "data")
