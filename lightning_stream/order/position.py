"""Where a run is: one frozen value, the same on every rank, a few hundred bytes as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal
from zlib import crc32

from lightning_stream.errors import SettingsMismatch, SnapshotMismatch, StateError, VersionMismatch
from lightning_stream.order import ledger as ledgers
from lightning_stream.order.batching.base import BatchPlan
from lightning_stream.order.config import ORDER_VERSION, OrderConfig
from lightning_stream.order.draw import weights_digest
from lightning_stream.order.plan import RunOrder
from lightning_stream.order.rank_split import TAILS, Tail
from lightning_stream.order.rules import TEXT, Rule, broken, count, is_count, one_of, short
from lightning_stream.order.snapshot import Snapshot
from lightning_stream.order.world import World

STATE_VERSION = 1
"""Raised whenever the layout of a state changes."""

MOST_EPOCHS = 2**32


@dataclass(frozen=True)
class SnapshotSummary:
    """What a state remembers of its data: enough to tell other data, and to say how it differs.

    ``versions`` has 16 digits of the digest of each stream's index, by which `Stream(version=...)` opens it again.
    """

    digest: str
    num_samples: int
    num_shards: int
    versions: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, snapshot: Snapshot) -> SnapshotSummary:
        """What to remember of this data."""
        versions = tuple(digest[:16] for digest in snapshot.stream_digests)
        return cls(snapshot.digest, snapshot.num_samples, snapshot.num_shards, versions)

    def to_state(self) -> dict[str, Any]:
        """The summary as a dict of plain values."""
        state = {"digest": self.digest, "samples": self.num_samples, "shards": self.num_shards}
        return {**state, "versions": list(self.versions)} if self.versions else state


@dataclass(frozen=True)
class Position:
    """A run's place in its order: everything before it was trained on, nothing after it.

    Args:
        epoch: Counts from 0.
        position: Samples of this epoch consumed by the optimizer over all replicas, padding excluded.
        batch_size, tail: B in force, and what the run does with an epoch's remainder.
        order, weights, snapshot: The run's order settings, the digest of its streams' weights, and its data.
        ledger: Sum of the ledger hashes of positions [0, position) of this epoch, modulo 2**64.
        batch_changes: ``(position, B from there on)``, beginning with position 0, if B changed in this epoch; else ().

    Example::

        position = Position.start(run, batch_size=256, tail="pad").advanced(run, 512)  # two steps of epoch 0
        Position.from_state(position.to_state()) == position
    """

    epoch: int
    position: int
    batch_size: int
    tail: Tail
    order: OrderConfig
    weights: str
    snapshot: SnapshotSummary
    ledger: int = 0
    batch_changes: tuple[tuple[int, int], ...] = ()

    @classmethod
    def start(cls, run: RunOrder, *, batch_size: int, tail: Tail, epoch: int = 0) -> Position:
        """The beginning of an epoch of a run."""
        summary = SnapshotSummary.of(run.snapshot)
        return cls(epoch, 0, batch_size, tail, run.config, weights_digest(run.weights), summary)

    def advanced(self, run: RunOrder, position: int) -> Position:
        """After training up to ``position`` of the same epoch. O(samples advanced), for the ledger."""
        if position < self.position:
            asked = f"at {self.position}, {position} was asked."
            raise ValueError(f"A position only moves forward within an epoch: {asked}")
        grown = ledgers.expected(run.epoch(self.epoch), self.position, position)
        return replace(self, position=position, ledger=(self.ledger + grown) % ledgers.MODULUS)

    def next_epoch(self) -> Position:
        """The beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, position=0, ledger=0, batch_changes=())

    def normalised(self, run: RunOrder, *, batch_size: int, tail: Tail, world: World | None = None) -> Position:
        """As the loading run sees it: its data, settings, B and tail, and the next epoch if this one has no batch left.

        Under other data or another order it gets the ledger's sum of the new order.
        """
        order = run.epoch(self.epoch)
        ended = self.position >= order.num_samples
        if not ended:
            plan = BatchPlan(order, batch_size=batch_size, world=world, tail=tail, start=self.position)
            ended = self.position > 0 and plan.num_batches == 0
        here = self.next_epoch() if ended else self
        changes = here.batch_changes
        if batch_size != here.batch_size and here.position:
            changes = (*(changes or ((0, here.batch_size),)), (here.position, batch_size))
        new = Position.start(run, batch_size=batch_size, tail=tail, epoch=here.epoch)
        here = replace(new, position=here.position, ledger=here.ledger, batch_changes=changes)
        if (self.order, self.weights, self.snapshot) == (new.order, new.weights, new.snapshot):
            return here
        return replace(new, batch_changes=changes).advanced(run, here.position)

    def check(
        self, run: RunOrder, *, tail: Tail | None = None, on_mismatch: Literal["error", "warn"] = "error"
    ) -> list[str]:
        """Compare with the run that wants to continue: data first, then settings.

        Args:
            run: The loading run; resolve its config with ``resumed=position.order``, so that what the user left open
                is taken from the state.
            tail: What that run does with an epoch's remainder; None to leave it out.
            on_mismatch: ``"error"`` refuses any difference; ``"warn"`` returns the sentences instead.

        Raises:
            SnapshotMismatch: The data changed.
            SettingsMismatch: An order setting or the tail changed; all that did are named.
            StateError: The position lies outside the epoch.
        """
        if on_mismatch not in ("error", "warn"):
            raise ValueError(f"on_mismatch must be 'error' or 'warn', not {on_mismatch!r}.")
        data, settings = self._data_differences(run), self._setting_differences(run, tail)
        if on_mismatch == "warn":
            return data + settings
        if data:
            raise SnapshotMismatch(" ".join(data + settings))
        if settings:
            raise SettingsMismatch(" ".join(settings))
        if run.config.mosaic is None and self.position > run.num_samples:
            raise _damaged([f"position is {self.position}, but an epoch has {run.num_samples} samples."])
        return []

    def is_proven(self, run: RunOrder) -> bool:
        """Whether the ledger sum is the one this position must have. O(position)."""
        return self.ledger == ledgers.expected(run.epoch(self.epoch), 0, self.position)

    def _data_differences(self, run: RunOrder) -> list[str]:
        old, new = self.snapshot, run.snapshot
        if old.digest == new.digest:
            return []
        sentence = (
            "A run must continue over the data it began with, but the state was written over "
            f"{old.num_samples} samples in {old.num_shards} shards (digest {old.digest}) and this dataset has "
            f"{new.num_samples} samples in {new.num_shards} shards (digest {new.digest}). "
            f"{self._version_remedy(run.snapshot)}, or accept another order from here on with on_mismatch='warn'."
        )
        return [sentence]

    def _version_remedy(self, new: Snapshot) -> str:
        """Which versions of the streams to open, to continue exactly."""
        versions, names, digests = self.snapshot.versions, new.stream_names, new.stream_digests
        if not len(versions) == len(names) == len(digests):
            return "Point the dataset to the former index"
        changed = [
            f"version={version!r} for {name} (now at {digest[:16]})"
            for version, name, digest in zip(versions, names, digests, strict=True)
            if not digest.startswith(version)
        ]
        if not changed:
            return "Read the same streams, and the same part of them"
        return (
            f"To continue over the former data, which stays readable where shards were appended, pass to Stream or "
            f"StreamingDataset: {', '.join(changed)}"
        )

    def _setting_differences(self, run: RunOrder, tail: Tail | None) -> list[str]:
        found = [] if tail in (None, self.tail) else [f"tail was {self.tail!r} and is {tail!r} now."]
        for setting in fields(OrderConfig):
            old, new = getattr(self.order, setting.name), getattr(run.config, setting.name)
            if old != new:
                found.append(f"{setting.name} was {old!r} and is {new!r} now.")
        if (new_weights := weights_digest(run.weights)) != self.weights:
            found.append(f"The streams' weights had digest {self.weights} and have {new_weights} now.")
        if not found:
            return []
        return [
            "A run must continue under the order settings it began with, but: "
            + " ".join(found)
            + " Pass the former values, or accept another order from here on with on_mismatch='warn'."
        ]

    def to_state(self) -> dict[str, Any]:
        """Plain ints, strings, lists, dicts and None: JSON-able, and loadable with ``weights_only=True``."""
        state = {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "batch_size": self.batch_size,
            "batch_changes": [list(change) for change in self.batch_changes],
            "tail": self.tail,
            "order": self.order.to_state(),
            "weights": self.weights,
            "snapshot": self.snapshot.to_state(),
            "ledger": f"{self.ledger:016x}",
        }
        return {**state, "checksum": _checksum(state)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Position:
        """Read what :meth:`to_state` gave.

        Raises:
            VersionMismatch: A newer version wrote it.
            StateError: It is not a state of ours, or damaged; everything wrong is named.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"A state must be a dict that state_dict() gave, not {type(state).__name__}.")
        _check_versions(state)
        mark = state.get("snapshot")
        problems = broken(state, _RULES)
        problems += [f"snapshot {one}" for one in broken(mark, _SNAPSHOT_RULES)] if isinstance(mark, Mapping) else []
        if problems:
            raise _damaged(problems)
        changes = tuple((int(at), int(size)) for at, size in state["batch_changes"])
        problems = _change_problems(changes, state["position"], state["batch_size"]) or _checksum_problems(state)
        if problems:
            raise _damaged(problems)
        held = state["snapshot"]
        return cls(
            **{name: state[name] for name in ("epoch", "position", "batch_size", "tail", "weights")},
            order=OrderConfig.from_state(state["order"]),
            snapshot=SnapshotSummary(
                held["digest"], held["samples"], held["shards"], tuple(held.get("versions") or ())
            ),
            ledger=int(state["ledger"], 16),
            batch_changes=changes,
        )


def _check_versions(state: Mapping[str, Any]) -> None:
    version, order_version = state.get("version"), state.get("order_version")
    if bad := broken(state, _VERSION_RULES):
        raise _damaged(bad)
    if version != STATE_VERSION:
        raise VersionMismatch(
            f"This version reads states of version {STATE_VERSION}, but the state has version {version}: it was "
            "written by a newer lightning-stream. Install that one to continue the run."
        )
    if order_version != ORDER_VERSION:
        raise VersionMismatch(
            f"This version makes order {ORDER_VERSION}, but the state was written under order {order_version}, which "
            "gives other samples. Install the version that wrote it to continue the run."
        )


def _change_problems(changes: tuple[tuple[int, int], ...], position: int, batch_size: int) -> list[str]:
    """Sentences on batch changes that contradict each other or the position."""
    if not changes:
        return []
    starts = [at for at, _ in changes]
    good = starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] <= position and changes[-1][1] == batch_size
    return [] if good else [f"batch_changes must rise from 0 to the batch size {batch_size} at {position} or before."]


def _checksum(state: Mapping[str, Any]) -> str:
    """CRC-32 of the canonical JSON of all but the checksum itself, as 8 hexadecimal digits."""
    kept = {name: value for name, value in state.items() if name != "checksum"}
    return f"{crc32(json.dumps(kept, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _checksum_problems(state: Mapping[str, Any]) -> list[str]:
    """What the checksum says; older versions wrote none."""
    if "checksum" not in state:
        return []
    try:
        found = _checksum(state)
    except (TypeError, ValueError, RecursionError) as error:
        return [f"it holds what no state does: {error}."]
    return [] if state["checksum"] == found else [f"its checksum is {found}, not {short(state['checksum'])}."]


def _damaged(problems: list[str]) -> StateError:
    return StateError(
        "A state must be one that state_dict() gave, but: " + " ".join(problems) + " It is damaged or not ours; load "
        "another checkpoint."
    )


def _is_changes(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and is_count(pair[0], 0) and is_count(pair[1], 1)
        for pair in value
    )


_VERSION_RULES = {"version": count(1), "order_version": count(1)}
_SNAPSHOT_RULES = {
    "digest": TEXT,
    "samples": count(),
    "shards": count(),
    "versions": Rule(
        "None or a list of strings",
        lambda value: value is None or (isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)),
    ),
}
_RULES = {
    "epoch": count(0, MOST_EPOCHS),
    "position": count(),
    "batch_size": count(1),
    "batch_changes": Rule("a list of [position, batch size] pairs", _is_changes),
    "tail": one_of(*TAILS),
    "order": Rule("a dict of order settings", lambda value: isinstance(value, Mapping)),
    "weights": TEXT,
    "snapshot": Rule("a dict of digest, samples and shards", lambda value: isinstance(value, Mapping)),
    "ledger": Rule(
        "16 hexadecimal digits", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{16}", value))
    ),
}
