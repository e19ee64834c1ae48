"""A run's own record of what it trained on: each rank appends one sum a step, and the whole is checked afterwards.

A file holds the steps of one rank in one uninterrupted part of an epoch, which is in its name; they must leave no gap.
A run that continues from a checkpoint cuts off what was recorded after that: it is what the run has trained on. A run
that begins at the beginning of its data replaces what an earlier run recorded in the folder; one that continues where
another run is recorded gets a folder inside, named by its order.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from lightning_stream.dataset import StreamingDataset, source_of
from lightning_stream.errors import LedgerError, StateError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.order import BatchPlan, Position, RunOrder, Tail, World, ledger
from lightning_stream.order.micro_batches import MicroBatch

_START = "run.json"
_SUM_BYTES = 8
_SUBSTITUTIONS = ".substitutions"
_PATTERN = re.compile(r"epoch(\d+)-from(\d+)-batch(\d+)-(pad|drop|exact)-rank(\d+)of(\d+)by(\d+)\.ledger")


@dataclass(frozen=True)
class Verdict:
    """The result of checking a run's record."""

    num_steps: int  # optimizer steps compared
    first_difference: tuple[int, int] | None  # (epoch, position) of the first step that differs or is missing
    sentence: str  # the finding in words


@dataclass(frozen=True, order=True)
class _StepRange:
    """Consecutive steps of an epoch in one world."""

    epoch: int
    begin: int
    batch_size: int
    tail: Tail
    num_ranks: int
    replication: int

    def plan(self, run: RunOrder) -> BatchPlan:
        world = World(rank=0, num_ranks=self.num_ranks, ranks_per_node=self.num_ranks, replication=self.replication)
        order = run.epoch(self.epoch)
        return BatchPlan(order, batch_size=self.batch_size, world=world, tail=self.tail, start=self.begin)

    def num_before(self, run: RunOrder, epoch: int, position: int, count: int) -> int:
        """How many of its first `count` steps end at or before a position of the run."""
        if self.epoch != epoch:
            return count if self.epoch < epoch else 0
        plan = self.plan(run)
        return bisect_right(range(count), position, key=lambda step: plan.bounds(step)[1])

    def path(self, folder: Path, rank: int) -> Path:
        steps = f"epoch{self.epoch}-from{self.begin}-batch{self.batch_size}-{self.tail}"
        return folder / f"{steps}-rank{rank}of{self.num_ranks}by{self.replication}.ledger"


class DeliveryRecord:
    """Writes one rank's sums. The folder is created with the first step; ranks of other machines may have another.

    It belongs to one run, over its stops, which has the same order and the same data: nothing else tells runs apart, so
    that a run that continues from any state finds its own. See the head of this module for what it replaces.

    Raises:
        LedgerError: The folder has another program's ``run.json``, or a damaged one.
    """

    def __init__(self, folder: str | os.PathLike[str], loader: StreamingDataLoader) -> None:
        self._folder = Path(folder)
        self._loader = loader
        self._taken: list[MicroBatch] = []
        self._file: BinaryIO | None = None
        self._next = (-1, -1)
        self._num_sums = 0  # in the file
        if (self._folder / _START).exists():
            _read_start(self._folder)  # a file of that name that no run wrote would be replaced

    def take(self, info: MicroBatch) -> None:
        """Note a micro-batch that is about to be trained on."""
        self._taken.append(info)

    def commit(self, _step: int) -> None:
        """Write the sums of the global batches taken, all of which the optimizer has used up."""
        while self._taken:
            first = self._taken[0]
            infos = [info for info in self._taken if (info.epoch, info.begin) == (first.epoch, first.begin)]
            later = self._taken[len(infos) :]  # gradients may outlive an epoch
            if infos[-1].completes_step:  # else the trainer's limit on an epoch ended it inside a step
                self._write(infos)
            self._taken = later

    def drop(self) -> None:
        """Forget what no step will use up."""
        self._taken = []

    def close(self) -> None:
        """Close the file; a later commit opens another."""
        file = self._file
        self._file = None
        self._next = (-1, -1)
        if file is None:
            return
        is_replaced = os.fstat(file.fileno()).st_nlink == 0
        file.close()
        if is_replaced:
            warnings.warn(
                "The folder of record_delivery= belongs to one run, but another one with the same order has replaced "
                f"{file.name} while this run wrote it: its steps are in no record. Give each run a folder of its own.",
                stacklevel=2,
            )

    def _write(self, infos: list[MicroBatch]) -> None:
        first = infos[0]
        if (first.epoch, first.begin) != self._next:
            self._open(first)
        assert self._file is not None
        batch_sum = 0
        for info in infos:
            keep = ~info.filler
            batch_sum += ledger.total(info.epoch, info.positions[keep], info.delivered[keep])
        listed = [change for info in infos for change in info.substitutions]
        if listed:  # before their sum, which a run that is killed in between lacks then
            with Path(f"{self._file.name}{_SUBSTITUTIONS}").open("a", encoding="utf-8") as lines:
                lines.writelines(
                    f"{json.dumps([change.position, change.drawn, change.delivered])}\n" for change in listed
                )
        after = (first.epoch, first.end)
        self._file.seek(self._num_sums * _SUM_BYTES)  # an error may have come behind it
        self._file.write(ledger.to_bytes(np.array([batch_sum % ledger.MODULUS], dtype=np.uint64)))
        self._next = after
        self._num_sums += 1

    def _open(self, first: MicroBatch) -> None:
        settings = self._loader.settings()
        world = settings.world
        run = source_of(self._loader.streaming).order(settings.order)
        begin = replace(self._loader.first_position(), epoch=first.epoch, position=first.begin)
        self.close()
        folder = self._folder
        if (begin.epoch, begin.position) == (0, 0):
            _remove_former_run(folder, world)
        else:
            folder = _folder_of(folder, begin, run)
            _cut_off(folder, begin, run, world)
        folder.mkdir(parents=True, exist_ok=True)
        _write_start(folder, begin, world.rank)
        size = settings.global_batch_size
        tail = settings.tail
        step_range = _StepRange(first.epoch, first.begin, size, tail, world.num_ranks, world.replication)
        path = step_range.path(folder, world.rank)
        for former in (path, Path(f"{path}{_SUBSTITUTIONS}")):
            former.unlink(missing_ok=True)  # a run from the same checkpoint, as before, makes it void
        self._num_sums = 0
        self._file = path.open("xb", buffering=0)
        weakref.finalize(self, self._file.close)  # an exception ends a run without asking its callbacks


def _folder_of(folder: Path, here: Position, run: RunOrder) -> Path:
    """Where a run that continues is recorded: in the folder, if it is free or has this run's record; else inside."""
    if not (folder / _START).exists() or _is_of_run(_read_start(folder), here, run):
        return folder
    schedule = here.order.schedule and structs.replace(here.order.schedule, changes=())
    order = structs.replace(here.order, schedule=schedule).to_state()
    name = json.dumps([order, here.weights, here.snapshot.digest], sort_keys=True).encode()
    run_folder = folder / f"run-{sha256(name).hexdigest()[:12]}"
    warnings.warn(
        f"The folder of record_delivery= belongs to one run, but {folder} has the record of a run with another order: "
        f"this run's is in {run_folder}. Give each run a folder of its own.",
        stacklevel=2,
    )
    return run_folder


def _is_of_run(start: Position, here: Position, run: RunOrder) -> bool:
    """Whether a record that begins there is of the run that stands here, perhaps before its data was converted."""
    same_order = structs.replace(start.order, schedule=here.order.schedule) == here.order
    return same_order and start.weights == here.weights and start.converted(run.snapshot).snapshot == here.snapshot


def _remove_former_run(folder: Path, world: World) -> None:
    """Delete the files of this rank, and of ranks that this run does not have: each has one run's steps."""
    for path, _, rank in _files(folder, _SUBSTITUTIONS):
        if rank == world.rank or rank >= world.num_ranks:
            path.unlink(missing_ok=True)
    (folder / _START).unlink(missing_ok=True)


def _cut_off(folder: Path, here: Position, run: RunOrder, world: World) -> None:
    """Void what this rank, and ranks that this run does not have, recorded from here on, in a run before this one.

    The files stay, since the folders of other machines may have those of other ranks.
    """
    for path, step_range, rank in _files(folder):
        if rank != world.rank and rank < world.num_ranks:
            continue
        count = path.stat().st_size // _SUM_BYTES
        num_valid = step_range.num_before(run, here.epoch, here.position, count)
        if num_valid < count:
            draft = path.with_suffix(f".draft-{world.rank}")
            draft.write_bytes(path.read_bytes()[: num_valid * _SUM_BYTES])
            draft.replace(path)  # not in place: a run that still writes it must not write into this one's


def _write_start(folder: Path, begin: Position, rank: int) -> None:
    """Note the beginning of the record; and again after a change of the run's mixture, or from an earlier beginning."""
    path = folder / _START
    if path.exists():
        known = _read_start(folder)
        if (known.epoch, known.position) <= (begin.epoch, begin.position):
            if known.order.schedule == begin.order.schedule:
                return
            begin = replace(known, order=begin.order)
    draft = path.with_suffix(f".draft-{rank}")
    draft.write_text(json.dumps(begin.to_state()), encoding="utf-8")
    draft.replace(path)


def _read_start(folder: Path) -> Position:
    with _readable(folder / _START) as text:
        return Position.from_state(json.loads(text))


@contextmanager
def _readable(path: Path) -> Iterator[bytes]:
    """What a run wrote into a file; LedgerError where that cannot be read any more."""
    try:
        yield path.read_bytes()
    except (ValueError, TypeError, StateError) as error:
        raise LedgerError(
            f"a record must be as its run wrote it, but {path} cannot be read: {error} Restore it, or record elsewhere"
        ) from error


def verify_delivery(folder: str | os.PathLike[str], dataset: StreamingDataset) -> Verdict:
    """Compare a run's record with the order of its data, step by step over all ranks, stops and worlds.

    Where a folder has the records of several runs of this data, all of them are compared.

    Args:
        folder: The `record_delivery` folder, with the files of all ranks.
        dataset: The data that was trained on.

    Raises:
        LedgerError: There is no whole record here.
        StateError: The dataset is not the one that was trained on.
    """
    records = [path for path in (Path(folder), *sorted(Path(folder).glob("run-*"))) if (path / _START).exists()]
    verdicts = {}
    for path in records:
        start = _read_start(path)
        run = source_of(dataset).order(start.order)
        differences = start.converted(run.snapshot).check(run, on_mismatch="warn")
        if not differences:
            verdicts[path.name] = _compare(path, start, run)
    if not records:
        raise LedgerError(f"a run with record_delivery= leaves {_START} and *.ledger files; {folder} lacks them")
    if not verdicts:
        raise StateError(f"verify_delivery takes the data of the recorded run. {' '.join(differences)}")
    first, *more = verdicts.values()
    if not more:
        return first
    differing = [verdict.first_difference for verdict in verdicts.values() if verdict.first_difference is not None]
    sentence = "; ".join(f"{name}: {verdict.sentence}" for name, verdict in verdicts.items())
    return Verdict(sum(verdict.num_steps for verdict in verdicts.values()), next(iter(differing), None), sentence)


def _compare(folder: Path, start: Position, run: RunOrder) -> Verdict:
    recorded = _read_sums(folder)
    steps = 0
    epoch = start.epoch
    reached = start.position
    end = 0
    left = ""
    if (epoch, reached) != (0, 0):
        left = f"; the record begins at epoch {epoch}, position {reached}"
    for step_range in sorted(recorded):
        ranks = recorded[step_range]
        if not (count := min(map(len, ranks))):
            continue  # made void by a run from a checkpoint before it
        plan = step_range.plan(run)
        if step_range.epoch == epoch + 1:
            if reached < end:
                left += f"; epoch {epoch} was left at position {reached}"
            epoch = step_range.epoch
            reached = 0
        if step_range.epoch > epoch or step_range.begin > reached:
            sentence = f"nothing is recorded of the steps from epoch {epoch}, position {reached} on"
            return Verdict(steps, (epoch, reached), sentence)
        end = plan.end
        changes = _changes(folder, step_range, is_killed=True)
        wanted = _corrected(ledger.of_steps(plan, 0, count), plan, changes)
        comparison = ledger.verify(wanted, ranks, replication=step_range.replication)
        if comparison.first_difference is not None:
            _changes(folder, step_range, is_killed=False)
            position = plan.bounds(comparison.first_difference)[0]
            sentence = f"epoch {epoch}, position {position} is the first step that differs: {comparison.message}"
            return Verdict(steps + comparison.first_difference, (epoch, position), sentence)
        steps += count
        reached = max(reached, plan.bounds(count - 1)[1])
    return Verdict(steps, None, f"all {steps} recorded steps saw exactly the planned samples{left}")


def _files(folder: Path, also: str = "") -> Iterator[tuple[Path, _StepRange, int]]:
    """The files of a record, also those with this suffix behind their names: what each has, and of which rank."""
    for path in folder.glob("*.ledger*"):
        if match := _PATTERN.fullmatch(path.name.removesuffix(also)):
            epoch, begin, size, tail, rank, ranks, replication = match.groups()
            world = (int(ranks), int(replication))
            yield path, _StepRange(int(epoch), int(begin), int(size), tail, *world), int(rank)  # type: ignore[arg-type]


def _read_sums(folder: Path) -> Mapping[_StepRange, list[NDArray[np.uint64]]]:
    sums = {}
    for step_range in {step_range for _, step_range, _ in _files(folder)}:
        paths = [step_range.path(folder, rank) for rank in range(step_range.num_ranks)]
        absent = [rank for rank, path in enumerate(paths) if not path.exists()]
        if absent and all(path.stat().st_size for path in paths if path.exists()):
            raise LedgerError(
                f"a record needs the files of all ranks, but of {step_range.num_ranks} ranks at epoch "
                f"{step_range.epoch}, position {step_range.begin} those of {absent} are missing: put the folders of "
                "all machines together"
            )
        if not absent:
            sums[step_range] = [ledger.from_bytes(path.read_bytes()) for path in paths]
    return sums


def _changes(folder: Path, step_range: _StepRange, *, is_killed: bool) -> set[ledger.Substitution]:
    """The listed substitutions, without a last line that a killed run wrote in part: its step has no sum.

    LedgerError where a line cannot be read.
    """
    changes = set()
    for rank in range(step_range.num_ranks):
        path = Path(f"{step_range.path(folder, rank)}{_SUBSTITUTIONS}")
        if path.exists():
            with _readable(path) as text:
                lines = text[: text.rfind(b"\n") + 1] if is_killed else text
                changes |= {ledger.Substitution(*json.loads(line)) for line in lines.splitlines()}
    return changes


def _corrected(wanted: NDArray[np.uint64], plan: BatchPlan, changes: set[ledger.Substitution]) -> NDArray[np.uint64]:
    """The planned sums with the substitutions that were listed."""
    for k in range(len(wanted)):
        begin, end = plan.bounds(k)
        here = [change for change in changes if begin <= change.position < end]
        if here:
            wanted[k] = ledger.substituted(int(wanted[k]), plan.order.epoch, here)
    return wanted
