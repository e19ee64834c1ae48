"""The books of a cache folder: what several processes write is one truth, whatever is torn, rewritten or killed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers.shards import bytes_in

from lightning_stream.cache import usage_log as log_module
from lightning_stream.cache.folder import CacheFolder
from lightning_stream.cache.usage_log import CacheEntry, UsageLog

KINDS = st.sampled_from(["reserve", "settle", "forget", "tear"])
ACTIONS = st.lists(st.tuples(KINDS, st.integers(0, 2), st.integers(0, 5), st.integers(1, 90)), max_size=40)


def all_of(held: list[CacheEntry]) -> list[CacheEntry]:
    return held


@settings(max_examples=40)
@given(ACTIONS)
def test_three_processes_agree_with_one_simple_book(actions: list[tuple[str, int, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = CacheFolder(Path(folder))
        place.prepare()
        ledgers = [UsageLog(place) for _ in range(3)]
        book: dict[str, int] = {}
        for action, who, shard, size in actions:
            name = f"shard{shard}"
            if action == "reserve":
                assert (
                    ledgers[who].reserve(CacheEntry((name, f"{name}.meta"), size), None, all_of, lambda _: True) is None
                )
            if action == "settle":
                ledgers[who].settle(CacheEntry((name,), size))
            if action == "forget":
                ledgers[who].forget(name)
                book.pop(name, None)
            if action == "tear":
                with (place.control / "ledger").open("ab") as file:
                    file.write(b'["+", 12')
            if action in ("reserve", "settle"):
                book[name] = size
            assert bytes_in(ledgers[(who + 1) % 3]) == sum(book.values())
        assert all(one.knows(name) for one in ledgers for name in book)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=60), st.sets(st.integers(0, 9)))
def test_the_limit_is_never_passed_and_what_is_in_use_never_removed(
    wanted: list[tuple[int, int]], in_use: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = CacheFolder(Path(folder))
        place.prepare()
        book = UsageLog(place)
        removed: list[str] = []

        def remove(held: CacheEntry) -> bool:
            if int(held.names[0]) in in_use:
                return False
            removed.append(held.names[0])
            return True

        for shard, size in wanted:
            shortage = book.reserve(CacheEntry((str(shard),), size), 100, all_of, remove)
            assert bytes_in(book) <= 100
            if shortage is not None:
                assert shortage > 0
        assert not in_use & set(map(int, removed))


def test_a_long_history_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_COMPACT_FROM", 20)
    place = CacheFolder(tmp_path)
    place.prepare()
    one, other = UsageLog(place), UsageLog(place)
    for number in range(200):
        one.settle(CacheEntry((f"s{number % 3}",), number))
        assert bytes_in(other) == bytes_in(one)
    assert (place.control / "ledger").read_bytes().count(b"+") < 50
    assert bytes_in(one) == 197 + 198 + 199
