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
_BAD = (FormatError, NotFoundError)  # a store that does not answer, or refuses, is no bad data


@dataclass(frozen=True)
class BadDataPolicy:
    """What a dataset does with data that cannot be read.

    Attributes:
        on_bad_sample: What happens to a sample whose bytes cannot be decoded.
        on_bad_shard: What happens to a shard that the store lacks, or whose bytes are not what the index says.
        quarantine: The file that lists them, a JSON object a line; None for ``quarantine.jsonl`` in the cache folder.
        seed: Key of the replacements.
    """

    on_bad_sample: Policy = "raise"
    on_bad_shard: Policy = "raise"
    quarantine: Path | None = None
    seed: int = 0

    @property
    def substitutes(self) -> bool:
        """Whether samples may be delivered in the place of others."""
        return "substitute" in (self.on_bad_sample, self.on_bad_shard)

    def __post_init__(self) -> None:
        for name, value in (("on_bad_sample", self.on_bad_sample), ("on_bad_shard", self.on_bad_shard)):
            if value not in ("raise", "substitute"):
                raise ValueError(f"{name} is 'raise' or 'substitute'; found {value!r}.")


class HasBadData(Protocol):
    """What is read: a `StreamingDataset`."""

    reader: SampleReader
    bad_data: BadData


@dataclass
class BadData:
    """A policy, and what one process has found bad so far: samples and whole shards, with the reason.

    `listed` are the samples that were drawn and are in the quarantine file.
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
        """Whether the sample cannot be read; tries to, where that is not known yet.

        Raises:
            FormatError, NotFoundError: It cannot, and the policy for its kind of trouble is to raise.
        """
        shard = int(reader.snapshot.shards_of(np.array([sample_id]))[0])
        if sample_id in self.found or shard in self.shards:
            self.found.setdefault(sample_id, self.shards.get(shard, ""))
            return True
        is_open = False
        try:
            reader.open_for(sample_id)
            is_open = True
            reader.sample(sample_id)
        except _BAD as error:
            if (self.policy.on_bad_sample if is_open else self.policy.on_bad_shard) == "raise":
                raise
            self.found[sample_id] = str(error)
            if not is_open:
                self.shards[shard] = str(error)
            return True
        return False

    def replacement(self, reader: SampleReader, epoch: int, position: int, drawn: int) -> int:
        """The sample to deliver at a position instead of the one drawn: the same in every world.

        Raises:
            FormatError: None of those planned can be read either.
        """
        planned = replacements(reader.snapshot, self.policy.seed, epoch, position, drawn)
        for sample_id in planned:
            if not self.is_bad(reader, sample_id):
                return sample_id
        raise FormatError(
            f"sample {drawn} cannot be read, nor can any planned in its place; too much of the data is bad to go on. "
            f"The last reason: {self.found[drawn]}"
        )

    def replaced(self, reader: SampleReader, info: MicroBatch) -> MicroBatch:
        """The micro-batch with substitutes for samples that cannot be read; the same object where all can be."""
        substitutions = []
        for position, drawn in zip(info.positions.tolist(), info.ids.tolist(), strict=True):
            if self.is_bad(reader, drawn):
                delivered = self.replacement(reader, info.epoch, position, drawn)
                substitutions.append(Substitution(position, drawn, delivered))
                if drawn not in self.listed:
                    self.listed.add(drawn)
                    self._quarantine(reader, info.epoch, substitutions[-1])
        return replace(info, substitutions=tuple(substitutions)) if substitutions else info

    def _quarantine(self, reader: SampleReader, epoch: int, one: Substitution) -> None:
        """Add a line for a sample: written at once and whole, since other processes write there too."""
        path = self.policy.quarantine or reader.caches[0].folder / "quarantine.jsonl"
        snapshot, ids = reader.snapshot, np.array([one.drawn])
        line = {
            "sample": one.drawn,
            "stream": snapshot.stream_names[int(snapshot.streams_of(ids)[0])],
            "shard": reader.entry(int(snapshot.shards_of(ids)[0]))[1].raw.basename,
            "epoch": epoch,
            "position": one.position,
            "delivered": one.delivered,
            "reason": self.found[one.drawn],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)


def readable(dataset: HasBadData, info: MicroBatch, read: Callable[[MicroBatch], T]) -> tuple[T, MicroBatch]:
    """Read a micro-batch as the dataset's policy says.

    Returns:
        What was read, and the micro-batch with its substitutions.

    Raises:
        FormatError, NotFoundError: Something cannot be read, and the policy is to raise.
    """
    bad, reader = dataset.bad_data, dataset.reader
    if not bad.suspects(reader, info.ids):
        try:
            return read(info), info
        except _BAD:
            if bad.policy.on_bad_sample == bad.policy.on_bad_shard == "raise":
                raise
            whole = bad.replaced(reader, info)
            if whole is info:
                raise  # all samples can be read: the user's own code failed
    else:
        whole = bad.replaced(reader, info)
    instead = np.array([one.delivered for one in whole.substitutions])
    announced = reader.read_ahead(instead)
    try:
        return read(whole), whole
    finally:
        reader.done_with(announced)


def bad_data(on_bad_sample: Any, on_bad_shard: Any, quarantine: str | os.PathLike[str] | None, seed: int) -> BadData:
    """A policy, before anything was found bad."""
    path = None if quarantine is None else Path(quarantine)
    return BadData(BadDataPolicy(on_bad_sample, on_bad_shard, path, seed))
