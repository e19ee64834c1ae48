"""What to do with a sample or shard that cannot be read: raise, or deliver the sample that the order plans instead."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.order.ledger import Substitution, replacements
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.reading.reader import SampleReader

T = TypeVar("T")
Policy = Literal["raise", "substitute"]
UNREADABLE = (FormatError, NotFoundError)  # not a store that does not answer, or refuses


@dataclass(frozen=True)
class BadDataPolicy:
    """What a dataset does with data that cannot be read: ``"raise"``, or ``"substitute"`` to deliver another sample.

    Attributes:
        on_bad_sample: For a sample whose bytes cannot be decoded.
        on_bad_shard: For a shard that the store lacks, or whose bytes do not match the index.
        quarantine: The file that lists the samples, one JSON object a line; None for the one in the cache folder.
        seed: Key of the replacements.
    """

    on_bad_sample: Policy = "raise"
    on_bad_shard: Policy = "raise"
    quarantine: str | os.PathLike[str] | None = None
    seed: int = 0

    @property
    def substitutes(self) -> bool:
        """Whether other samples may be delivered."""
        return "substitute" in (self.on_bad_sample, self.on_bad_shard)

    def __post_init__(self) -> None:
        for name in ("on_bad_sample", "on_bad_shard"):
            if (value := getattr(self, name)) not in ("raise", "substitute"):
                raise ValueError(f"{name} must be 'raise' or 'substitute'; found {value!r}.")


class HasBadData(Protocol):
    """The source of samples: a `StreamingDataset`."""

    reader: SampleReader
    bad_data: BadData


@dataclass
class BadData:
    """A policy, and the samples and shards that one process has found bad so far, with the reason.

    `listed` are the drawn samples that are in the quarantine file.
    """

    policy: BadDataPolicy = field(default_factory=BadDataPolicy)
    found: dict[int, str] = field(default_factory=dict)
    shards: dict[int, str] = field(default_factory=dict)
    listed: set[int] = field(default_factory=set)

    def suspects(self, reader: SampleReader, ids: NDArray[np.int64]) -> bool:
        """Whether some of these are known to be bad."""
        if self.shards and not self.shards.keys().isdisjoint(reader.snapshot.shards_of(ids).tolist()):
            return True
        return bool(self.found) and not self.found.keys().isdisjoint(ids.tolist())

    def is_bad(self, reader: SampleReader, sample_id: int) -> bool:
        """Whether the sample cannot be read, which is tried if unknown; raises its error if the policy is to raise."""
        shard = int(reader.snapshot.shards_of(np.array([sample_id]))[0])
        if sample_id in self.found or shard in self.shards:
            self.found.setdefault(sample_id, self.shards.get(shard, ""))
            return True
        is_open = False
        try:
            reader.open_for(sample_id)
            is_open = True
            reader.sample(sample_id)
        except UNREADABLE as error:
            if (self.policy.on_bad_sample if is_open else self.policy.on_bad_shard) == "raise":
                raise
            self.found[sample_id] = str(error)
            if not is_open:
                self.shards[shard] = str(error)
            return True
        return False

    def _replacement(self, reader: SampleReader, epoch: int, position: int, drawn: int) -> int:
        """The sample to deliver at a position instead of the drawn one: the same in every world."""
        for sample_id in replacements(reader.snapshot, self.policy.seed, epoch, position, drawn):
            if not self.is_bad(reader, sample_id):
                return sample_id
        raise FormatError(
            f"sample {drawn} cannot be read, and none of the samples that could replace it: too much of the data is "
            f"bad. The last reason: {self.found[drawn]}"
        )

    def replaced(self, reader: SampleReader, info: MicroBatch) -> MicroBatch:
        """The micro-batch with substitutes for samples that cannot be read; the same object if there are none."""
        substitutions = []
        for position, drawn in zip(info.positions.tolist(), info.ids.tolist(), strict=True):
            if self.is_bad(reader, drawn):
                delivered = self._replacement(reader, info.epoch, position, drawn)
                substitutions.append(Substitution(position, drawn, delivered))
                if drawn not in self.listed:
                    self.listed.add(drawn)
                    self._quarantine(reader, info.epoch, substitutions[-1])
        return replace(info, substitutions=tuple(substitutions)) if substitutions else info

    def _quarantine(self, reader: SampleReader, epoch: int, one: Substitution) -> None:
        """Add a line for a sample, in one write, since other processes append to the file too."""
        path = Path(self.policy.quarantine or reader.caches[0].folder / "quarantine.jsonl")
        snapshot, ids = reader.snapshot, np.array([one.drawn])
        drawn, delivered = reader.original_ids(np.array([one.drawn, one.delivered])).tolist()
        line = {
            "sample": drawn,
            "stream": snapshot.stream_names[int(snapshot.streams_of(ids)[0])],
            "shard": reader.entry(int(snapshot.shards_of(ids)[0]))[1].raw.basename,
            "epoch": epoch,
            "position": one.position,
            "delivered": delivered,
            "reason": self.found[one.drawn],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)


def readable(dataset: HasBadData, info: MicroBatch, read: Callable[[MicroBatch], T]) -> tuple[T, MicroBatch]:
    """Read a micro-batch under the dataset's policy: the result, and the micro-batch with its substitutions.

    Raises FormatError or NotFoundError where data cannot be read and the policy is to raise.
    """
    bad, reader = dataset.bad_data, dataset.reader
    if not bad.suspects(reader, info.ids):
        try:
            return read(info), info
        except UNREADABLE:
            whole = bad.replaced(reader, info) if bad.policy.substitutes else info
            if whole is info:
                raise  # all samples can be read: the user's own code failed
    else:
        whole = bad.replaced(reader, info)
    announced = reader.read_ahead(np.array([one.delivered for one in whole.substitutions]))
    try:
        return read(whole), whole
    finally:
        reader.done_with(announced)


def bad_data(on_bad_sample: Any, on_bad_shard: Any, quarantine: str | os.PathLike[str] | None, seed: int) -> BadData:
    """A policy, before anything was found bad."""
    return BadData(BadDataPolicy(on_bad_sample, on_bad_shard, quarantine, seed))
