"""The first stages of the chain, which a reader knows: its streams, the samples that are kept, and their lengths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_stream.order import RunOrder
from lightning_stream.questions.describe import Stage, weights_in
from lightning_stream.reading.lengths import summary
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import name_of, weights_of


def stages_of_reader(reader: SampleReader, lengths: Iterable[str] = (), run: RunOrder | None = None) -> list[Stage]:
    """The streams, every filter and subset, and these lengths of the samples that are kept.

    With the run, every stream of several shows how many of its samples an epoch draws.
    """
    chosen = list[Stage]()
    root = reader
    while root.parent is not None:
        chosen.insert(0, _chosen(root, root.parent))
        root = root.parent
    measured = [Stage(name, {}, summary(reader.lengths(name)), reader.lengths_digest(name)) for name in lengths]
    return [
        _streams(root, run),
        *chosen,
        *([Stage("lengths", parts=tuple(measured))] if measured else []),
    ]


def _streams(reader: SampleReader, run: RunOrder | None) -> Stage:
    parts = []
    snapshot = reader.snapshot
    drawn = None if run is None or run.config.schedule is not None else run.num_drawn
    for stream_id, (stream, index) in enumerate(zip(reader.streams, reader.indexes, strict=True)):
        counts: dict[str, Any] = {"samples": index.num_samples, "shards": index.num_shards}
        counts["bytes"] = int(index.raw_bytes.sum())
        if drawn is not None:
            counts["drawn per epoch"] = drawn[stream_id]
        is_single = len(reader.streams) == 1
        parts.append(Stage(name_of(stream), weights_in(weights_of(stream)), {} if is_single else counts, index.digest))
    raw = sum(int(index.raw_bytes.sum()) for index in reader.indexes)
    stored = sum(int(index.stored_bytes.sum()) for index in reader.indexes)
    total = {"samples": snapshot.num_samples, "shards": snapshot.num_shards, "bytes": raw}
    total |= {} if stored == raw else {"stored bytes": stored}
    return Stage("streams", {}, total, snapshot.digest, parts=tuple(parts))


def _chosen(reader: SampleReader, parent: SampleReader) -> Stage:
    before = parent.snapshot.num_samples
    num_kept = reader.snapshot.num_samples
    counts = {"samples kept": num_kept, "kept_percent": 100 * num_kept / max(1, before)}
    rules = tuple(Stage(rule, {}, {"samples left": left}) for rule, left in reader.left.items())
    return Stage("filter" if rules else "subset", {}, counts, reader.snapshot.digest, parts=rules)
