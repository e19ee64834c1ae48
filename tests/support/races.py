"""Two writers at one place at once, and what became of the dataset. Importable, so that processes can run it too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lightning_stream.errors import NotFoundError
from lightning_stream.formats.hashing import digest_parts
from lightning_stream.stores import open_store
from lightning_stream.version_log import read_newest
from lightning_stream.writer import MDSWriter

ROWS = 40
KINDS: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "two writers": ({}, {}),
    "two appenders": ({"append": True}, {"append": True}),
    "two overwriters": ({"overwrite": True}, {"overwrite": True}),
    "writer and overwriter": ({}, {"overwrite": True}),
    "appender and overwriter": ({"append": True}, {"overwrite": True}),
}
BASE = [-3, -2, -1]


def prepare(kind: str, url: str, options: Mapping[str, Any] | None) -> list[int]:
    """Write the dataset that the race begins with; give its values."""
    if "writer" in kind.split() or "writers" in kind.split():
        return []
    write(url, options, BASE, {}, lambda: None)
    return BASE


def write(
    url: str, options: Mapping[str, Any] | None, values: Sequence[int], how: Mapping[str, bool], meet: Callable[[], Any]
) -> str:
    """Write values, in shards of a few; `meet` is called once the writer has begun. Gives "won", or the error."""
    try:
        with MDSWriter(
            out=url,
            columns={"x": "int"},
            size_limit=260,
            max_workers=2,
            store_options=options,
            lengths={"x": lambda x: int(x) + 10},
            **how,
        ) as writer:
            writer.write({"x": values[0]})
            meet()
            writer.write_batch({"x": np.array(values[1:])})
    except Exception as error:  # noqa: BLE001 - what it is, is what the race is about
        return f"{type(error).__name__}: {error}"
    return "won"


def values_of(number: int, same: bool) -> list[int]:
    """What a writer writes: its own values, or the same as the other."""
    return list(range(ROWS)) if same else list(range(number * 1000, number * 1000 + ROWS))


def race(kind: str, url: str, options: Mapping[str, Any] | None, *, same: bool = False, together: bool = True) -> None:
    """Let two threads race; see `judge`."""
    base = prepare(kind, url, options)
    meet = threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as pool:
        arrive: Callable[[], Any] = meet.wait if together else (lambda: None)
        runs = [pool.submit(write, url, options, values_of(k, same), KINDS[kind][k], arrive) for k in range(2)]
        judge(kind, url, options, base, [run.result() for run in runs], same=same, together=together)


def judge(
    kind: str, url: str, options: Any, base: list[int], results: list[str], *, same: bool, together: bool
) -> list[str]:
    """Raise AssertionError unless the dataset is whole and holds just what the winners wrote; nothing else is left."""
    won = [number for number in range(2) if results[number] == "won"]
    assert won, results
    if together:
        assert len(won) in {"two appenders": (2,), "appender and overwriter": (1, 2)}.get(kind, (1,)), results
    losers = [result for result in results if result != "won"]
    assert all(one.startswith(("AlreadyExistsError", "ConflictError", "FileExistsError")) for one in losers), results
    store = open_store(url, options)
    newest = read_newest(store)
    index = newest.index
    found, listed = [], {"index.json"}
    for entry in map(index.entry, range(len(index))):
        listed.add(entry.raw.basename)
        data = store.read(entry.raw.basename)
        assert dict(digest_parts(tuple(entry.raw.hashes), [data])) == dict(entry.raw.hashes)
        found.append(_values(data))
    lengths = [np.frombuffer(store.read(file.basename), "<u4") for file in index.lengths["x"]]
    assert (np.concatenate(lengths) == np.concatenate(found) + 10).all()
    listed |= {file.basename for file in index.lengths["x"]}
    listed |= {f"versions/{newest.root}/{number:08}.json" for number in range(1, newest.number + 1)}
    names = {entry.name for entry in store.list("")}
    kept = {name for name in names if name.startswith("index.") and name != "index.json"}
    if kind != "appender and overwriter":  # shards appended just before the dataset is replaced may stay
        assert names == listed | kept, (names ^ (listed | kept), results)
    wanted = [_after(base, order, kind, same) for order in ([won, won[::-1]] if len(won) == 2 else [won])]
    assert np.concatenate(found).tolist() in wanted, (results, found)
    return results


def _after(base: list[int], order: list[int], kind: str, same: bool) -> list[int]:
    held = list(base)
    for number in order:
        values = values_of(number, same)
        held = held + values if KINDS[kind][number].get("append") else values
    return held


def _values(shard: bytes) -> np.ndarray[Any, Any]:
    count = int(np.frombuffer(shard, "<u4", 1)[0])
    offsets = np.frombuffer(shard, "<u4", count + 1, 4)
    return np.frombuffer(shard[int(offsets[0]) : int(offsets[-1])], "<i8")


def exists(url: str, options: Any) -> bool:
    """Whether there is a dataset."""
    try:
        return bool(open_store(url, options).read("index.json"))
    except NotFoundError:
        return False
