"""What a batch reads before its shards are here: single samples by ranges, or the beginnings of shards that arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.shard import Shard
from lightning_stream.reading.fetches import ReaderProcess
from lightning_stream.reading.proofs import EarlyRead

if TYPE_CHECKING:
    from lightning_stream.reading.reader import SampleReader


def by_range(
    reader: SampleReader, process: ReaderProcess, numbers: list[int], indices: Callable[[int], NDArray[np.int64]]
) -> dict[int, Shard]:
    """Of shards that are not here: the wanted samples (``indices(k)`` of the k-th) alone, if that is cheaper."""
    if all(cache.in_place for cache in reader.caches):
        return {}
    starts, found, awaited, early = reader.config.start_by_range, {}, set(), set()
    if starts is None and process.ranges.num_requests >= process.spare_requests:
        starts = False
    for k, number in enumerate(numbers):
        fetch = process.fetches.get(number)
        if number in process.open or (fetch is not None and (fetch.done() or starts is False)):
            continue
        (cache, entry), samples = reader.entry(number), indices(k)
        if fetch is not None and not cache.present(entry):  # else it is opened soon
            awaited.add(number)
            if process.heads.pays(cache, entry, int(samples[-1]) + 1):
                early.add(number)
        if reader.ranges_are_cheaper(number, len(samples)):
            found[number] = (cache, entry, samples)
    if starts is None:  # the batch comes earlier only if it waits for none of them, not even for their beginnings
        num_requests = sum(1 + len(found[number][2]) for number in awaited & found.keys())
        most = process.spare_requests - process.ranges.num_requests
        if awaited == early or awaited - found.keys() or num_requests > most:
            found = {number: one for number, one in found.items() if number not in awaited}
    process.hurry(list(awaited - found.keys()), reader.entry)
    if not found:
        return {}
    with reader.counters.waiting():
        parts = process.ranges.shards(found)
    for number, part in parts.items():
        places = range(part.num_samples)
        _note(reader, number, part, places, found[number][2].tolist(), is_awaited=number in awaited)
    return parts


def _note(
    reader: SampleReader, number: int, part: Shard, places: Sequence[int], indices: Sequence[int], *, is_awaited: bool
) -> None:
    """Note that samples are read from a part of a shard, where they have these places."""
    read = EarlyRead.of(number, indices, list(map(part.stored, places)), is_awaited)
    reader.counters.spent.reading_early += (read,)


def beginning(
    reader: SampleReader, process: ReaderProcess, number: int, indices: Callable[[], NDArray[np.int64]]
) -> Shard | None:
    """The first samples of a shard that is arriving, as far as these indices; None if waiting is better."""
    fetch = process.fetches.get(number)
    if number in process.open or fetch is None or fetch.done() or reader.config.start_by_range is False:
        return None
    cache, entry = reader.entry(number)
    wanted = indices().tolist()
    count = wanted[-1] + 1
    if not process.heads.pays(cache, entry, count):
        return None
    with reader.counters.waiting():
        head = process.heads.open(number, cache, entry, count, fetch.done)
    if head is not None:
        fetch.add_done_callback(lambda _: process.heads.drop(number))
        _note(reader, number, head, wanted, wanted, is_awaited=True)
    return head
