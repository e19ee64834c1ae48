"""What to do with a sample or shard that cannot be read: raise, or deliver the sample that the order plans instead."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError, LightningStreamError, NotFoundError
from lightning_stream.former_names import parts_of
from lightning_stream.order.batches import EpochOrder
from lightning_stream.order.ledger import Substitution, replacements
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.order.packing import RowSpans
from lightning_stream.reading.proofs import UnverifiedRead
from lightning_stream.reading.reader import SampleReader

T = TypeVar("T")
Policy = Literal["raise", "substitute"]
OnBad = Policy | Mapping[str, Any]
_log = logging.getLogger(__name__)
UNREADABLE = (FormatError, NotFoundError)  # not a store that does not answer, or refuses


@dataclass(frozen=True)
class BadDataPolicy:
    """What a dataset does with data that cannot be read: ``"raise"``, or ``"substitute"`` to deliver another sample.

    Attributes:
        sample: For a sample whose bytes cannot be decoded.
        shard: For a shard that the store lacks, or whose bytes do not match the index.
        quarantine: The file that lists the samples, one JSON object a line; None for the one in the cache folder.
        seed: Key of the replacements.
    """

    sample: Policy = "raise"
    shard: Policy = "raise"
    quarantine: str | os.PathLike[str] | None = None
    seed: int = 0

    @property
    def substitutes(self) -> bool:
        """Whether other samples may be delivered."""
        return "substitute" in (self.sample, self.shard)

    def __post_init__(self) -> None:
        for value in (self.sample, self.shard):
            if value not in ("raise", "substitute"):
                raise ValueError(f"on_bad must be 'raise' or 'substitute', also for its parts; found {value!r}.")

    @classmethod
    def of(cls, on_bad: OnBad, seed: int) -> BadDataPolicy:
        """The policy that a dataset's `on_bad` describes; raise ValueError for another word or part."""
        return cls(**parts_of("on_bad", on_bad), seed=seed)


@dataclass
class BadData:
    """A policy, and the samples and shards that one process has found bad so far, with the reason.

    `listed` are the streams and ids of samples that are in the quarantine file, each with what the thread that listed
    it put there. `launch` names this process and all its workers in that file, so that they list a sample only once.
    `names` are the columns of packed rows, which alone are read of documents; None for all.
    """

    policy: BadDataPolicy = field(default_factory=BadDataPolicy)
    samples: dict[int, str] = field(default_factory=dict)
    shards: dict[int, str] = field(default_factory=dict)
    listed: dict[tuple[str, int], object] = field(default_factory=dict)
    launch: str = field(default_factory=lambda: secrets.token_hex(4))
    names: tuple[str, ...] | None = None
    _listed_in: int = field(default=0, init=False)  # the process that knows what others of its launch have listed

    def suspects(self, reader: SampleReader, ids: NDArray[np.int64]) -> bool:
        """Whether some of these are known to be bad."""
        if self.shards and not self.shards.keys().isdisjoint(reader.snapshot.shards_of(ids).tolist()):
            return True
        return bool(self.samples) and not self.samples.keys().isdisjoint(ids.tolist())

    def is_bad(self, reader: SampleReader, sample_id: int) -> bool:
        """Whether the sample cannot be read, which is tried if unknown; raises its error if the policy is to raise."""
        shard = int(reader.snapshot.shards_of(np.array([sample_id]))[0])
        if sample_id in self.samples or shard in self.shards:
            self.samples.setdefault(sample_id, self.shards.get(shard, ""))
            return True
        is_open = False
        try:
            reader.open_for(sample_id)
            is_open = True
            if self.names is None:
                reader.sample(sample_id)
            else:
                reader.use_flat(np.array([sample_id]), self.names, lambda *_: True)
        except UNREADABLE as error:
            if (self.policy.sample if is_open else self.policy.shard) == "raise":
                raise
            self.samples[sample_id] = str(error)
            if not is_open:
                self.shards[shard] = str(error)
            return True
        return False

    def _bad_ids(self, reader: SampleReader, drawn: int | RowSpans) -> list[int]:
        """Those of a sample, or of the documents of a row, that cannot be read."""
        ids = [drawn] if isinstance(drawn, int) else drawn.ids.tolist()
        return [sample_id for sample_id in ids if self.is_bad(reader, sample_id)]

    def replaced(self, reader: SampleReader, info: MicroBatch, order: EpochOrder) -> MicroBatch:
        """The micro-batch with substitutes for samples that cannot be read; the same object if there are none.

        A packed row with a document that cannot be read is replaced as a whole, by another row of its window. The
        substitutes are the same in every world.
        """
        drawn: list[int | RowSpans] = info.ids.tolist() if info.rows is None else list(info.rows)
        substitutions = []
        for k, (position, sample_id) in enumerate(zip(info.positions.tolist(), info.ids.tolist(), strict=True)):
            bad_ids = self._bad_ids(reader, drawn[k])
            if not bad_ids:
                continue
            others: Iterable[int | RowSpans] = (
                replacements(reader.snapshot, self.policy.seed, info.epoch, position, sample_id)
                if info.rows is None
                else order.order.alternatives(position, self.policy.seed, order.epoch)
            )
            other = next((other for other in others if not self._bad_ids(reader, other)), None)
            if other is None:
                raise FormatError(
                    f"sample {bad_ids[0]} cannot be read, and nothing that could replace it, another sample or another "
                    f"row of its window: too much of the data is bad. The last reason: {self.samples[bad_ids[0]]}"
                )
            drawn[k] = other
            delivered = other if isinstance(other, int) else int(other.fingerprints()[0])
            substitutions.append(Substitution(position, sample_id, delivered))
            for bad_id in bad_ids:
                self._quarantine(reader, info.epoch, position, bad_id, delivered if info.rows is None else None)
        if not substitutions:
            return info
        rows = None if info.rows is None else RowSpans.joined(cast("list[RowSpans]", drawn))
        return replace(info, rows=rows, substitutions=tuple(substitutions))

    def path_of(self, reader: SampleReader) -> Path:
        """The file that lists the bad samples."""
        return Path(self.policy.quarantine or reader.caches[0].folder / "quarantine.jsonl")

    def _quarantine(self, reader: SampleReader, epoch: int, position: int, drawn: int, delivered: int | None) -> None:
        """Add a line for a sample, in one write, since other processes append to the file too; once for each sample."""
        path = self.path_of(reader)
        snapshot = reader.snapshot
        ids = np.array([drawn])
        original = reader.original_ids(ids if delivered is None else np.array([drawn, delivered])).tolist()
        line = {
            "sample": original[0],
            "stream": snapshot.stream_names[int(snapshot.streams_of(ids)[0])],
            "shard": reader.entry(int(snapshot.shards_of(ids)[0]))[1].raw.basename,
            "epoch": epoch,
            "position": position,
            "delivered": None if delivered is None else original[1],
            "reason": self.samples[drawn],
            "launch": self.launch,
        }
        self._take_listed(path)
        # In one step: threads may find it together
        if self.listed.setdefault((line["stream"], line["sample"]), mine := object()) is not mine:
            return
        reader.counters.add("bad_samples")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)

    def _take_listed(self, path: Path) -> None:
        """Know, once in each process, what others of this launch have listed: workers may live for one epoch each."""
        if self._listed_in != os.getpid() and path.exists():
            ours = f'"launch": "{self.launch}"}}'.encode()
            lines = [line for line in path.read_bytes().splitlines() if line.endswith(ours)]
            for line in lines:
                with suppress(ValueError):  # a full disk may have cut the line before it
                    sample = json.loads(line)
                    self.listed.setdefault((sample["stream"], sample["sample"]), None)
            self._listed_in = os.getpid()


def readable(
    reader: SampleReader, bad: BadData, info: MicroBatch, order: EpochOrder, read: Callable[[MicroBatch], T]
) -> tuple[T, MicroBatch, tuple[UnverifiedRead, ...]]:
    """Read a micro-batch under a policy for bad data: the result, and the micro-batch with its substitutions.

    The third has the samples that were read before their shards were verified. Where the user's code fails on some that
    the verified shards have other bytes of, that was no error of its own: the batch is made again.

    Raises:
        FormatError, NotFoundError: Data cannot be read and the policy is to raise.
    """
    of_thread = reader.counters.of_thread
    attempt = info
    if (bad.samples or bad.shards) and bad.suspects(reader, info.sample_ids):
        attempt = bad.replaced(reader, info, order)
    while True:
        unverified: list[UnverifiedRead] = []
        of_thread.unverified = unverified
        try:
            if attempt is info:
                return read(info), info, tuple(unverified)
            instead = [swap.delivered for swap in attempt.substitutions] if attempt.rows is None else attempt.sample_ids
            with reader.read_ahead(np.array(instead)):
                return read(attempt), attempt, tuple(unverified)
        except UNREADABLE:
            if attempt is not info or not bad.policy.substitutes:
                raise
            attempt = bad.replaced(reader, info, order)
            if attempt is info:
                raise  # all samples can be read: the user's own code failed
        except LightningStreamError:
            raise
        except Exception as error:
            if reader.is_right(unverified, wait=True):
                raise
            _log.warning("The batch at %s was read unverified and wrong (%r): it is made again.", info.label, error)
        finally:
            of_thread.unverified = None
