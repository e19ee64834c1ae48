"""A run's own record of what it trained on: each rank appends one sum a step, and the whole is checked afterwards.

A file holds the steps of one rank in one uninterrupted part of an epoch, which is in its name. A run that was
killed trains on some steps twice, from its last checkpoint on, so stretches may overlap; they must leave no gap.
A run that begins at the beginning of its data replaces what an earlier run recorded in the folder.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from lightning_stream.dataset import StreamingDataset, source_of
from lightning_stream.errors import LedgerError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.order import BatchPlan, Position, RunOrder, Tail, World, ledger
from lightning_stream.order.micro_batches import MicroBatch

_START = "run.json"
_SUBSTITUTIONS = ".substitutions"
_PATTERN = re.compile(r"epoch(\d+)-from(\d+)-batch(\d+)-(pad|drop|exact)-rank(\d+)of(\d+)by(\d+)\.ledger")


@dataclass(frozen=True)
class Verdict:
    """The result of checking a run's record."""

    num_steps: int  # optimizer steps compared
    first_difference: tuple[int, int] | None  # (epoch, position) of the first step that differs or is missing
    sentence: str  # the finding in words


@dataclass(frozen=True, order=True)
class _Stretch:
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

    def path(self, folder: Path, rank: int) -> Path:
        steps = f"epoch{self.epoch}-from{self.begin}-batch{self.batch_size}-{self.tail}"
        return folder / f"{steps}-rank{rank}of{self.num_ranks}by{self.replication}.ledger"


class DeliveryRecord:
    """Writes one rank's sums. The folder is created with the first step; ranks of other machines may have another.

    It belongs to one run, over its stops. A run from the start of its data replaces what is there.
    """

    def __init__(self, folder: str | os.PathLike[str], loader: StreamingDataLoader) -> None:
        self._folder, self._loader = Path(folder), loader
        self._taken: list[MicroBatch] = []
        self._file: BinaryIO | None = None
        self._next = (-1, -1)

    def take(self, info: MicroBatch) -> None:
        """Note a micro-batch that is about to be trained on; a step begun before and not committed is done again."""
        if self._taken and (info.epoch, info.begin) < (self._taken[-1].epoch, self._taken[-1].begin):
            self._taken = []
        self._taken.append(info)

    def commit(self, _step: int) -> None:
        """Write the sums of the global batches taken, all of which the optimizer has used up."""
        taken, self._taken = self._taken, []  # first: a signal's handler may call this again
        steps: dict[int, list[MicroBatch]] = defaultdict(list)
        for info in taken:
            steps[info.begin].append(info)
        for infos in steps.values():
            if infos[-1].completes_step:  # else the trainer's limit on an epoch ended it inside a step
                self._write(infos)

    def close(self) -> None:
        """Close the file; a later commit opens another."""
        if self._file is not None:
            self._file.close()
        self._file, self._next = None, (-1, -1)

    def _write(self, infos: list[MicroBatch]) -> None:
        first = infos[0]
        if (first.epoch, first.begin) != self._next:
            self._open(first)
        assert self._file is not None
        whole = 0
        for info in infos:
            keep = ~info.filler
            whole += ledger.total(info.epoch, info.positions[keep], info.delivered[keep])
        self._file.write(ledger.to_bytes(np.array([whole % ledger.MODULUS], dtype=np.uint64)))
        listed = [one for info in infos for one in info.substitutions]
        if listed:
            with Path(f"{self._file.name}{_SUBSTITUTIONS}").open("a", encoding="utf-8") as lines:
                lines.writelines(f"{json.dumps([one.position, one.drawn, one.delivered])}\n" for one in listed)
        self._next = (first.epoch, first.end)

    def _open(self, first: MicroBatch) -> None:
        settings = self._loader.settings()
        world = settings.world
        self._folder.mkdir(parents=True, exist_ok=True)
        self.close()
        if (first.epoch, first.begin) == (0, 0):
            self._remove_former_run(world)
        if world.rank == 0:
            self._write_start(self._loader.first_position())
        size, tail = settings.global_batch_size, settings.tail
        stretch = _Stretch(first.epoch, first.begin, size, tail, world.num_ranks, world.replication)
        path = stretch.path(self._folder, world.rank)
        Path(f"{path}{_SUBSTITUTIONS}").unlink(missing_ok=True)
        self._file = path.open("wb", buffering=0)  # a run from the same checkpoint, as before, makes the former void
        weakref.finalize(self, self._file.close)  # an exception ends a run without asking its callbacks

    def _remove_former_run(self, world: World) -> None:
        """Delete the files of this rank, and of ranks that this run does not have: each has one run's steps."""
        for path in self._folder.iterdir():
            match = _PATTERN.fullmatch(path.name.removesuffix(_SUBSTITUTIONS))
            if match and (int(match[5]) == world.rank or int(match[5]) >= world.num_ranks):
                path.unlink(missing_ok=True)
        if world.rank == 0:
            (self._folder / _START).unlink(missing_ok=True)

    def _write_start(self, here: Position) -> None:
        """Note the beginning of the run; and again after a change of its mixture."""
        path = self._folder / _START
        if path.exists():
            known = _read_start(path)
            if structs.replace(known.order, schedule=here.order.schedule) != here.order:
                warnings.warn(
                    f"The folder of record_delivery= belongs to one run, but {self._folder} has the record of a run "
                    "with another order: verify_delivery will find a difference. Give each run a folder of its own.",
                    stacklevel=2,
                )
            if known.order.schedule == here.order.schedule:
                return
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(here.to_state()), encoding="utf-8")
        draft.replace(path)


def _read_start(path: Path) -> Position:
    return Position.from_state(json.loads(path.read_text(encoding="utf-8")))


def verify_delivery(folder: str | os.PathLike[str], dataset: StreamingDataset) -> Verdict:
    """Compare a run's record with the order of its data, step by step over all ranks, stops and worlds.

    Args:
        folder: The `record_delivery` folder, with the files of all ranks.
        dataset: The data that was trained on.

    Raises:
        LedgerError: There is no whole record here.
        StateError: The dataset is not the one that was trained on.
    """
    path = Path(folder)
    stretches = _read_stretches(path)
    if not stretches or not (path / _START).exists():
        raise LedgerError(f"a run with record_delivery= leaves {_START} and *.ledger files; {path} lacks them")
    start = _read_start(path / _START)
    run = source_of(dataset).order(start.order)
    start.converted(run.snapshot).check(run)
    return _compare(path, run, stretches)


def _compare(folder: Path, run: RunOrder, stretches: Mapping[_Stretch, list[NDArray[np.uint64]]]) -> Verdict:
    steps, epoch, reached, end, left = 0, min(stretches).epoch, 0, 0, ""
    for stretch in sorted(stretches):
        plan, ranks = stretch.plan(run), stretches[stretch]
        if stretch.epoch == epoch + 1:
            if reached < end:
                left += f"; epoch {epoch} was left at position {reached}"
            epoch, reached = stretch.epoch, 0
        if stretch.epoch > epoch or stretch.begin > reached:
            sentence = f"nothing is recorded of the steps from epoch {epoch}, position {reached} on"
            return Verdict(steps, (epoch, reached), sentence)
        count, end = min(map(len, ranks)), plan.end
        wanted = _corrected(ledger.of_steps(plan, 0, count), plan, folder, stretch)
        found = ledger.verify(wanted, ranks, replication=stretch.replication)
        if found.first_difference is not None:
            position = plan.bounds(found.first_difference)[0]
            sentence = f"epoch {epoch}, position {position} is the first step that differs: {found.message}"
            return Verdict(steps + found.first_difference, (epoch, position), sentence)
        steps += count
        reached = max(reached, plan.bounds(count - 1)[1] if count else 0)
    return Verdict(steps, None, f"all {steps} recorded steps saw exactly the planned samples{left}")


def _read_stretches(folder: Path) -> Mapping[_Stretch, list[NDArray[np.uint64]]]:
    matches = [match for path in folder.glob("*.ledger") if (match := _PATTERN.fullmatch(path.name))]
    stretches = {
        _Stretch(int(epoch), int(begin), int(size), tail, int(ranks), int(replication))  # type: ignore[arg-type]
        for epoch, begin, size, tail, _, ranks, replication in (match.groups() for match in matches)
    }
    found = {}
    for stretch in stretches:
        paths = [stretch.path(folder, rank) for rank in range(stretch.num_ranks)]
        absent = [rank for rank, path in enumerate(paths) if not path.exists()]
        if absent:
            raise LedgerError(
                f"a record needs the files of all ranks, but of {stretch.num_ranks} ranks at epoch {stretch.epoch}, "
                f"position {stretch.begin} those of {absent} are missing: put the folders of all machines together"
            )
        found[stretch] = [ledger.from_bytes(path.read_bytes()) for path in paths]
    return found


def _corrected(wanted: NDArray[np.uint64], plan: BatchPlan, folder: Path, stretch: _Stretch) -> NDArray[np.uint64]:
    """The planned sums with the substitutions that were listed."""
    paths = [Path(f"{stretch.path(folder, rank)}{_SUBSTITUTIONS}") for rank in range(stretch.num_ranks)]
    lines = [line for path in paths if path.exists() for line in path.read_text(encoding="utf-8").splitlines()]
    changes = {ledger.Substitution(*json.loads(line)) for line in lines}
    for k in range(len(wanted)):
        begin, end = plan.bounds(k)
        here = [one for one in changes if begin <= one.position < end]
        if here:
            wanted[k] = ledger.substituted(int(wanted[k]), stretch.epoch, here)
    return wanted
