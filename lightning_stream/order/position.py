"""Where a training run is: one frozen value, the same on every rank, a few hundred bytes as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any, Literal
from zlib import crc32

import msgspec
import numpy as np
from msgspec import Meta, Struct, structs

from lightning_stream.errors import SettingsMismatch, SnapshotMismatch, StateError, VersionMismatch

from . import ledger as ledgers
from .batches import TAILS, BatchPlan, EpochOrder, Tail
from .config import NATIVE_NAMES, ORDER_VERSION, PUBLIC_NAMES, OrderConfig
from .draw import weights_digest
from .orders import Counted, Windows, ceil_div
from .rows import CountedWindows
from .rules import MAX_NUMBER, TEXT, Rule, count, one_of, plain, shaped, short, violations
from .run import RunOrder
from .snapshot import Snapshot
from .switches import switch_difference
from .world import World

STATE_VERSION = 1
"""It grows when an older release would misread a state. A new setting or an optional key does not raise it: a release
refuses a setting that it does not know as one of a newer release, by its name.
"""

MOST_EPOCHS = 2**32
_CONVERT = (
    " If this dataset was converted from that data: `convert` keeps the order if neither size_limit, partition_bytes, "
    "shuffle, val_fraction, a transform nor a rule for nulls is passed, and the source was not changed."
)


class SnapshotSummary(
    Struct,
    frozen=True,
    eq=False,
    omit_defaults=True,
    forbid_unknown_fields=True,
    rename={"num_samples": "samples", "num_shards": "shards"},
):
    """What a state holds of its data: enough to recognise other data, and to describe the difference.

    ``versions`` has 16 digits of the digest of each stream's index, with which `Stream(version=...)` opens it again; of
    a Delta table, also its version behind a space. Summaries that differ in it alone are equal.
    """

    digest: str
    num_samples: Annotated[int, Meta(ge=0)]
    num_shards: Annotated[int, Meta(ge=0)]
    versions: tuple[str, ...] = ()

    @classmethod
    def of(cls, snapshot: Snapshot) -> SnapshotSummary:
        """The summary of this data."""
        tables = snapshot.table_versions or [None] * len(snapshot.stream_digests)
        versions = tuple(
            digest[:16] if table is None else f"{digest[:16]} {table}"
            for digest, table in zip(snapshot.stream_digests, tables, strict=True)
        )
        return cls(snapshot.digest, snapshot.num_samples, snapshot.num_shards, versions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SnapshotSummary) and structs.astuple(self)[:3] == structs.astuple(other)[:3]

    def __hash__(self) -> int:
        return hash(self.digest)

    def has_streams_of(self, snapshot: Snapshot) -> bool:
        """Whether the data is known to be of the same versions of the same streams, perhaps other samples of them."""
        digests = snapshot.stream_digests
        same = [version[:16] for version in self.versions] == [digest[:16] for digest in digests]
        return same and bool(digests)


@dataclass(frozen=True)
class Position:
    """A run's position in its order: everything before it was trained on, nothing after it.

    Args:
        epoch: Counts from 0.
        position: Samples of this epoch that were trained on, over all replicas, padding excluded.
        batch_size, tail: The current B, and what the run does with an epoch's last partial batch.
        order, weights, snapshot: The run's order settings, the digest of its streams' weights, and its data.
        ledger: Sum of the ledger hashes of positions [0, position) of this epoch, modulo 2**64.
        batch_changes: ``(position, B from there on)``, beginning with position 0, if B changed in this epoch; else ().
        landmark: Of packed rows and batches of a budget: windows counted so far, which make a resume fast; else None.

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
    landmark: CountedWindows | None = field(default=None, compare=False)

    @classmethod
    def start(cls, run: RunOrder, *, batch_size: int, tail: Tail, epoch: int = 0) -> Position:
        """The beginning of an epoch of a run."""
        summary = SnapshotSummary.of(run.origin)
        return cls(epoch, 0, batch_size, tail, run.config, weights_digest(run.weights), summary)

    def converted(self, snapshot: Snapshot) -> Position:
        """This position over these samples, if they were converted from those of the state; else itself."""
        old = self.snapshot
        if old.digest == snapshot.digest or snapshot.digest_of(old.versions) != old.digest:
            return self
        return replace(self, snapshot=SnapshotSummary.of(snapshot))

    def advanced(self, run: RunOrder, position: int) -> Position:
        """The position after training up to ``position`` of the same epoch. O(samples advanced), for the ledger."""
        if position < self.position:
            raise ValueError(f"A position only moves forward in its epoch, but {position} is before {self.position}.")
        grown = ledgers.expected(self.order_in(run), self.position, position)
        return replace(self, position=position, ledger=(self.ledger + grown) % ledgers.MODULUS)

    def order_in(self, run: RunOrder) -> EpochOrder:
        """The order of this position's epoch. Windows counted with this data and settings make it fast to read."""
        is_known = (self.order, self.weights, self.snapshot.digest) == (
            run.config, weights_digest(run.weights), run.origin.digest
        )  # fmt: skip
        return run.epoch(self.epoch, self.landmark if is_known else None)

    def num_steps(self, run: RunOrder | None) -> int:
        """Global batches of this epoch that are done, in the run of its state; batches of a budget need the run.

        Batches of remainders, which may be smaller than B, count by their samples here; ``questions`` counts them.
        """
        if run is not None and (counted := self.order_in(run).order.batches_before(self.position)) is not None:
            return counted
        return sum(ceil_div(end - begin, size) for begin, end, size in self.segments(self.position))

    def segments(self, end: int) -> list[tuple[int, int, int]]:
        """The epoch up to a position by its batch sizes: the first position of each, the one behind its last, and B."""
        changes = self.batch_changes or ((0, self.batch_size),)
        ends = [*(begin for begin, _ in changes[1:]), end]
        return [(begin, end, size) for (begin, size), end in zip(changes, ends, strict=True)]

    def next_epoch(self) -> Position:
        """The beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, position=0, ledger=0, batch_changes=(), landmark=None)

    def rebased_on(self, run: RunOrder, *, batch_size: int, tail: Tail, world: World | None = None) -> Position:
        """This position in the run that loads it: with its data, settings, B and tail, and the ledger of its order.

        It is the beginning of the next epoch if this one was begun and has no batch left.
        """
        order = self.order_in(run)
        begin = self.position
        is_over = begin > 0 and not order.exists(begin)
        if begin and not is_over:
            plan = BatchPlan(order, batch_size=batch_size, world=world or World(), tail=tail, start=begin)
            is_over = not plan.has(0)
        here = self.next_epoch() if is_over else self
        changes = here.batch_changes
        if batch_size != here.batch_size and here.position:
            earlier = changes or ((0, here.batch_size),)
            changes = (*(change for change in earlier if change[0] < here.position), (here.position, batch_size))
        new = Position.start(run, batch_size=batch_size, tail=tail, epoch=here.epoch)
        here = replace(new, position=here.position, ledger=here.ledger, batch_changes=changes, landmark=here.landmark)
        if (self.order, self.weights, self.snapshot) == (new.order, new.weights, new.snapshot):
            return here
        return replace(new, batch_changes=changes).advanced(run, here.position)

    def check(
        self, run: RunOrder, *, tail: Tail | None = None, on_mismatch: Literal["error", "warn"] = "error"
    ) -> list[str]:
        """Compare with the run that resumes: data first, then settings.

        Args:
            run: That run; resolve its config with ``resumed=position.order``, which fills in what the user left open.
            tail: What it does with an epoch's last partial batch; None is not compared.
            on_mismatch: ``"error"`` refuses any difference; ``"warn"`` returns the sentences instead.

        Raises:
            SnapshotMismatch: The data changed.
            SettingsMismatch: Some order settings or the tail changed; all are named.
            StateError: The position lies outside the epoch.
        """
        data = self._data_difference(run)
        settings = self._setting_differences(run, tail)
        differences = [sentence for sentence in (data, settings) if sentence]
        if differences:
            if on_mismatch == "warn":
                return differences
            raise (SnapshotMismatch if data else SettingsMismatch)(
                f"{' '.join(differences)} To accept another order from here on instead, pass on_mismatch='warn' to "
                "StreamingDataLoader, or to what makes it."
            )
        order = None if run.config.mosaic is not None else self.order_in(run)
        if order is not None and not order.order.reads_to(self.position):
            raise _damaged([f"position is {self.position}, but epoch {self.epoch} ends at {order.num_samples}."])
        return []

    def ledger_matches(self, run: RunOrder) -> bool:
        """Whether the ledger sum is the one this position must have. O(position)."""
        return self.ledger == ledgers.expected(run.epoch(self.epoch), 0, self.position)

    def _data_difference(self, run: RunOrder) -> str:
        old = self.snapshot
        new = run.origin
        if self.order.switches or run.config.switches:
            data = (old.digest, old.versions)
            return switch_difference(data, self.order.switches, (self.epoch, self.position), run)
        if old.digest == new.digest:
            return ""
        if old.has_streams_of(new):
            return (
                "A run must continue over the samples it began with. Its streams are the same, but their filter "
                f"or subset is not: the state was written over {old.num_samples} samples (digest "
                f"{old.digest}) and this dataset has {new.num_samples} (digest {new.digest}). Pass the former rules."
            )
        return (
            "A run must continue over the data it began with, but the state was written over "
            f"{old.num_samples} samples in {old.num_shards} shards (digest {old.digest}) and this dataset has "
            f"{new.num_samples} samples in {new.num_shards} shards (digest {new.digest}). "
            f"{self._version_remedy(new)}." + (_CONVERT if old.num_samples == new.num_samples else "")
        )

    def _version_remedy(self, new: Snapshot) -> str:
        """The versions of the streams to open, to continue exactly."""
        versions = self.snapshot.versions
        names = new.stream_names
        digests = new.stream_digests
        if not len(versions) == len(names) == len(digests):
            return "Read the former data"
        changed = [
            f"version={version[17:] or repr(version[:16])} for {name} (now at {digest[:16]})"
            for version, name, digest in zip(versions, names, digests, strict=True)
            if not digest.startswith(version[:16])
        ]
        return (
            "Read the former data. Where shards or files were appended to it, pass to Stream or StreamingDataset: "
            f"{', '.join(changed)}"
        )

    def _setting_differences(self, run: RunOrder, tail: Tail | None) -> str:
        place = (self.epoch, self.position)
        alike = {"switches"}  # they are checked with the data
        if self.order.forgotten is None and run.forgotten is not None and not run.first_seen(run.forgotten, place):
            alike.add("forgotten")  # as if never seen, see `forget`
        former = self.order.schedule
        schedule = run.config.schedule
        if former and schedule and former != schedule and schedule.extends(former, run.settled(*place)):
            alike.add("schedule")
        if self.order.shuffle != run.config.shuffle:  # they follow
            alike.update(NATIVE_NAMES, ("even_rows",))
        names = [name for name in OrderConfig.__struct_fields__ if name not in alike]
        pairs = [("tail", self.tail, tail or self.tail)]
        pairs += [(name, getattr(self.order, name), getattr(run.config, name)) for name in names]
        differences = [(PUBLIC_NAMES.get(name, name), old, new) for name, old, new in pairs if old != new]
        sentences = [f"{name} was {old!r} and is {new!r} now." for name, old, new in differences]
        digests = [weights_digest(run.weights, kind) for kind in (None, float, int)]  # 1 may have been 1.0
        if self.weights not in digests:
            sentences.append(
                f"The streams' weights (proportion, repeat or choose) had digest {self.weights} and have {digests[0]} "
                "now; in a run, only those of a schedule= can change."
            )
        if not sentences:
            return ""
        return (
            f"A run must continue under the order settings it began with, but: {' '.join(sentences)} "
            "Pass the former values."
        )

    def to_state(self) -> dict[str, Any]:
        """Plain ints, strings, lists, dicts and None, for JSON and for ``torch.load(weights_only=True)``."""
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
            "snapshot": plain(self.snapshot),
            "ledger": f"{self.ledger:016x}",
        }
        if self.landmark is not None and self.landmark.epoch == self.epoch and self.landmark.windows:
            # Differences are shorter: without a schedule, 1 KB at most up to 10**9 documents in 16 sequences.
            state["landmark"] = np.diff(self.landmark.windows, axis=0, prepend=0).tolist()
        return {**state, "checksum": _checksum(state)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Position:
        """Read the result of :meth:`to_state`.

        Raises:
            VersionMismatch: Another version wrote it.
            StateError: It is not a state of this package, or damaged; all problems are named.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"A state must be a dict that state_dict() gave, not {type(state).__name__}.")
        _check_versions(state)
        if problems := violations(state, _RULES) or _change_problems(state) or _checksum_problems(state):
            raise _damaged(problems)
        order = OrderConfig.from_state(state["order"])
        # Such orders are newer than checksums, and their ledgers are not compared.
        if order.needs_lengths and "checksum" not in state:
            raise _damaged(["it has no checksum."])
        return cls(
            **{name: state[name] for name in ("epoch", "position", "batch_size", "tail", "weights")},
            order=order,
            snapshot=msgspec.convert(state["snapshot"], SnapshotSummary),
            ledger=int(state["ledger"], 16),
            # A state may hold two changes at one position, as older versions wrote them: the later one holds.
            batch_changes=tuple(dict(state["batch_changes"]).items()),
            landmark=CountedWindows(state["epoch"], _windows_of(state.get("landmark"))),
        )


def _windows_of(differences: Sequence[Counted] | None) -> Windows:
    """The windows that a state has counted, from the differences between them."""
    return tuple(zip(*map(accumulate, zip(*differences or (), strict=True)), strict=True))


def _are_windows(value: Any) -> bool:
    """Whether a state can hold these differences of windows."""
    if not _DIFFERENCES.accepts(value):
        return False
    windows = _windows_of(value)
    return all(window >= 0 and 0 <= before <= behind < MAX_NUMBER for window, before, behind in windows)


def _check_versions(state: Mapping[str, Any]) -> None:
    if problems := violations(state, _VERSION_RULES):
        raise _damaged(problems)
    if state["version"] != STATE_VERSION:
        raise VersionMismatch(
            f"This version reads states of version {STATE_VERSION}, but the state has version {state['version']}: it "
            "was written by a newer lightning-stream. Install that one to continue the run."
        )
    if state["order_version"] != ORDER_VERSION:
        raise VersionMismatch(
            f"This version makes order {ORDER_VERSION}, but the state was written under order "
            f"{state['order_version']}, which gives other samples. Install the version that wrote it."
        )


def _change_problems(state: Mapping[str, Any]) -> list[str]:
    """What contradicts itself or the position in the changes of the batch size."""
    changes = state["batch_changes"]
    size = state["batch_size"]
    starts = [begin for begin, _ in changes]
    rises = starts == sorted(starts) and starts.count(0) == 1 and starts[-1] <= state["position"]
    if not changes or (rises and changes[-1][1] == size):
        return []
    return [f"batch_changes must rise from 0 to the batch size {size} at {state['position']} or before."]


def _checksum(state: Mapping[str, Any]) -> str:
    """CRC-32 of the canonical JSON of all but the checksum itself, as 8 hexadecimal digits."""
    values = {name: value for name, value in state.items() if name != "checksum"}
    return f"{crc32(json.dumps(values, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _checksum_problems(state: Mapping[str, Any]) -> list[str]:
    """Whether the values are not those that were written; a state may lack the checksum."""
    try:
        computed = _checksum(state)
    except (TypeError, ValueError, RecursionError) as error:
        return [f"it holds a value that no state has: {error}."]
    wanted = state.get("checksum", computed)
    # torch.distributed.checkpoint loses an empty dict at the end of a list, as in a change of the mixture.
    if wanted == computed or wanted == _checksum({**state, "order": OrderConfig.from_state(state["order"]).to_state()}):
        return []
    return [f"its checksum is {computed}, not {short(wanted)}."]


def _damaged(problems: list[str]) -> StateError:
    return StateError(
        f"A state must be one that state_dict() gave, but: {' '.join(problems)} It is damaged or of another "
        "library; load another checkpoint."
    )


_VERSION_RULES = {"version": count(1), "order_version": count(1)}
_DIFFERENCES = shaped("", list[tuple[int, int, int]] | None)
_RULES = {
    "epoch": count(0, MOST_EPOCHS),
    "position": count(),
    "batch_size": count(1),
    "batch_changes": shaped(
        "a list of [position, batch size] pairs",
        list[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=1)]]],
    ),
    "landmark": Rule("None or a list of differences of [window, rows before, rows behind]", _are_windows),
    "tail": one_of(*TAILS),
    "order": Rule("a dict of order settings", lambda value: isinstance(value, Mapping)),
    "weights": TEXT,
    "snapshot": shaped("a dict of digest, samples and shards", SnapshotSummary),
    "ledger": shaped("16 hex digits", Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]),
}
