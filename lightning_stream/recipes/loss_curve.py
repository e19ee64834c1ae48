"""The curve of a run that was stopped and resumed, laid over the one of a run that never was: ids and losses by step.

`StepRecord` writes a run down, rank by rank and without any collective; `read_record` puts the ranks together;
`compare` says whether a chain of runs is the uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_stream.recipes.callbacks import batch_in_training


class StepRecord(Callback):
    """Notes what each optimizer step was made of and its loss, one JSON line a step; stops after a given step.

    A loss is the one that Lightning averages over ranks, summed over accumulated micro-batches: each rank notes its
    own part.

    Args:
        dirpath: Folder of the files ``rank-<n>.jsonl``; a run that begins writes over them.
        stop_after: The optimizer step after which the run is stopped; None to let it end by itself.
        checkpoint: What is saved then, for the next run to go on from; None for ``stopped.ckpt`` in `dirpath`.
    """

    def __init__(self, dirpath: str, stop_after: int | None = None, checkpoint: str | None = None) -> None:
        self._folder = Path(dirpath)
        self._stop_after = stop_after
        self._checkpoint = Path(checkpoint) if checkpoint is not None else self._folder / "stopped.ckpt"
        self._path = self._folder / "rank-0.jsonl"
        self._ids: list[int] = []
        self._loss = 0.0
        self._step_before = 0

    def on_train_start(self, trainer: Trainer, _module: LightningModule) -> None:
        """Begin this rank's file."""
        self._path = self._folder / f"rank-{trainer.global_rank}.jsonl"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path.write_text("")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Remember where the step began."""
        self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, _module: LightningModule, outputs: Any, *_: Any) -> None:
        """Add this micro-batch; write the step down once it is made."""
        made_of = batch_in_training(trainer)
        self._ids += made_of.ids[~made_of.filler].tolist()
        self._loss += float(outputs["loss"])
        if trainer.global_step == self._step_before:
            return
        line = {
            "step": trainer.global_step, "epoch": made_of.epoch, "ids": self._ids, "loss": self._loss,
            "ranks": trainer.world_size,
        }  # fmt: skip
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._ids, self._loss = [], 0.0
        if trainer.global_step == self._stop_after:
            trainer.save_checkpoint(self._checkpoint)
            trainer.should_stop = True


@dataclass(frozen=True)
class Step:
    """One optimizer step over all ranks.

    Attributes:
        epoch: Of its samples.
        ids: What it was made of, sorted, filler left out.
        loss: The mean over its ranks.
    """

    epoch: int
    ids: tuple[int, ...]
    loss: float


Record = Mapping[int, Step]
"""Optimizer steps, counted from 1, with what each was."""


def read_record(folder: Path) -> Record:
    """What a run's ranks wrote down, put together.

    Raises:
        ValueError: A rank's line of a step is missing: the record does not show the whole run.
    """
    lines: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            lines.setdefault(line["step"], []).append(line)
    for step, found in sorted(lines.items()):
        if len(found) != found[0]["ranks"]:
            raise ValueError(
                f"each rank writes a line for each step; step {step} in {folder} has {len(found)} of "
                f"{found[0]['ranks']}. Run it again, into an empty folder"
            )
    return {
        step: Step(
            found[0]["epoch"],
            tuple(sorted(one for line in found for one in line["ids"])),
            sum(line["loss"] for line in found) / len(found),
        )
        for step, found in sorted(lines.items())
    }


@dataclass(frozen=True)
class Link:
    """One run of a chain.

    Attributes:
        devices: Processes that trained together.
        workers: Worker processes of each.
        record: Its steps.
    """

    devices: int
    workers: int
    record: Record

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.devices} device{'s' * (self.devices != 1)}, {self.workers} worker{'s' * (self.workers != 1)}"


@dataclass(frozen=True)
class Comparison:
    """A chain of runs beside an uninterrupted one.

    Attributes:
        missing: Steps that no link trained.
        repeated: Steps that more than one link trained.
        wrong: Steps made of other samples than the uninterrupted run's.
        lost, extra: Samples that the chain trained on fewer, or more, times than the uninterrupted run, over all steps.
        differences: By step, how far the loss is from the uninterrupted run's.
    """

    missing: tuple[int, ...]
    repeated: tuple[int, ...]
    wrong: tuple[int, ...]
    lost: int
    extra: int
    differences: Mapping[int, float]

    @property
    def exact(self) -> bool:
        """Whether each step was made of the very samples it should be."""
        return not (self.missing or self.repeated or self.wrong or self.lost or self.extra)


def compare(whole: Record, chain: Sequence[Link]) -> Comparison:
    """Hold a chain against the run that was never stopped."""
    seen: dict[int, list[Step]] = {}
    for link in chain:
        for number, step in link.record.items():
            seen.setdefault(number, []).append(step)
    counts: dict[tuple[int, int], int] = {}
    for sign, steps in ((1, whole.values()), (-1, [step for found in seen.values() for step in found])):
        for step in steps:
            for one in step.ids:
                counts[step.epoch, one] = counts.get((step.epoch, one), 0) + sign
    shared = [number for number in seen if number in whole]
    return Comparison(
        missing=tuple(sorted(whole.keys() - seen.keys())),
        repeated=tuple(sorted(number for number, found in seen.items() if len(found) > 1)),
        wrong=tuple(
            sorted(n for n in seen if n not in whole or any(step.ids != whole[n].ids for step in seen[n]))
        ),
        lost=sum(count for count in counts.values() if count > 0),
        extra=-sum(count for count in counts.values() if count < 0),
        differences={n: max(abs(step.loss - whole[n].loss) for step in seen[n]) for n in sorted(shared)},
    )  # fmt: skip


def table(whole: Record, chain: Sequence[Link]) -> str:
    """The comparison, link by link, as a Markdown table."""
    rows = [
        "| run | steps | samples | steps with other samples | loss difference at its first step | largest |",
        "|---|---|---|---|---|---|",
    ]
    for link in chain:
        found = compare({n: step for n, step in whole.items() if n in link.record}, [link])
        steps, samples = sorted(link.record), sum(len(step.ids) for step in link.record.values())
        span = f"{steps[0]}-{steps[-1]}" if steps else "none"
        off = list(found.differences.values()) or [0.0]
        rows.append(f"| {link.name} | {span} | {samples} | {len(found.wrong)} | {off[0]:.1e} | {max(off):.1e} |")
    return "\n".join(rows)
