"""A folder and a remote store as one store: what both have, and what happens where only one of them refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_stream.errors import AlreadyExistsError, ConflictError
from lightning_stream.stores import LocalStore
from lightning_stream.writer.pair import Pair, seen


@pytest.fixture
def places(tmp_path: Path) -> tuple[LocalStore, LocalStore]:
    return LocalStore(tmp_path / "main"), LocalStore(tmp_path / "copy")


def contents(places: tuple[LocalStore, LocalStore], name: str) -> list[bytes | None]:
    return [seen(store, name)[0] for store in places]


def test_a_put_reaches_both_or_is_an_error_of_both(places: tuple[LocalStore, LocalStore]) -> None:
    pair = Pair(*places)
    pair.put("a", b"1", if_absent=True)
    assert contents(places, "a") == [b"1", b"1"]
    with pytest.raises(AlreadyExistsError):
        pair.put("a", b"2", if_absent=True)
    _, version = seen(pair, "a")
    pair.put("a", b"2", if_version=version)
    assert contents(places, "a") == [b"2", b"2"]
    with pytest.raises(ConflictError, match="Read it again"):
        pair.put("a", b"3", if_version=version)
    assert contents(places, "a") == [b"2", b"2"]
    pair.delete("a")
    assert contents(places, "a") == [None, None]


def test_a_copy_that_changed_since_it_was_read_is_an_error_that_names_the_changed_place(
    places: tuple[LocalStore, LocalStore],
) -> None:
    pair = Pair(*places)
    pair.put("a", b"1")
    _, version = seen(pair, "a")
    places[1].put("a", b"other")
    with pytest.raises(ConflictError, match=r"copy/a changed .*main was changed before.*Decide which"):
        pair.put("a", b"2", if_version=version)
    assert contents(places, "a") == [b"2", b"other"]


def test_an_object_that_only_the_copy_had_when_it_was_read_is_replaced(places: tuple[LocalStore, LocalStore]) -> None:
    pair = Pair(*places)
    places[1].put("a", b"former")
    assert seen(pair, "a") == (None, None)
    pair.put("a", b"1", if_absent=True)
    assert contents(places, "a") == [b"1", b"1"]
    places[1].put("b", b"not read before")
    with pytest.raises(ConflictError, match="Decide which"):
        pair.put("b", b"1", if_absent=True)
    assert contents(places, "b") == [b"1", b"not read before"]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_put_whose_answer_was_lost_is_finished_at_both_places(
    places: tuple[LocalStore, LocalStore], monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    put = LocalStore.put

    def twice(self: LocalStore, name: str, source: Any, **how: Any) -> None:
        put(self, name, source, **how)
        if self is places[lost]:
            put(self, name, source, **how)

    monkeypatch.setattr(LocalStore, "put", twice)
    Pair(*places).put("a", b"1", if_absent=True)
    assert contents(places, "a") == [b"1", b"1"]


def test_a_listing_tells_what_one_place_lacks_or_has_otherwise(places: tuple[LocalStore, LocalStore]) -> None:
    pair = Pair(*places)
    pair.put("both", b"1")
    places[0].put("main", b"1")
    places[1].put("copy", b"1")
    for store, data in zip(places, (b"1", b"22"), strict=True):
        store.put("other", data)
    assert {entry.name: entry.num_bytes for entry in pair.list()} == {"both": 1, "copy": -1, "main": -1, "other": -1}
