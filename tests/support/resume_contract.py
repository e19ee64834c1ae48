"""The resume contract: under every trainer, a run that is continued trains on exactly what was left.

A `Host` runs a small model under one trainer and notes which samples fed each optimizer step. The functions here state
what must hold between its runs, whatever the trainer: no sample is lost or repeated, and all ranks save one state.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest

from lightning_stream import MDSWriter, read_position

NUM_SAMPLES, GLOBAL_BATCH, EPOCHS, STEPS_PER_EPOCH = 167, 16, 3, 11
MOST_STATE_BYTES = 1000  # the documentation promises a few hundred
HOSTS = {  # the module of each, what must be installed, and the command for it
    "Lightning": ("lightning_host", "lightning.pytorch", "uv sync"),
    "Composer": ("composer_host", "composer", "uv sync --no-dev --extra composer"),
    "plain loop": ("plain_host", "torch", "uv sync"),
}
Steps = dict[int, list[int]]  # optimizer step -> sorted ids of the samples that fed it, without filler
Value = TypeVar("Value")

# What the trainers themselves say of runs as small and as odd as these.
WARNINGS = [
    pytest.mark.filterwarnings("default::UserWarning:composer"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    *(
        pytest.mark.filterwarnings(f"ignore:.*{text}.*")
        for text in (
            "callbacks used to create the checkpoint", "manual optimization", "dirpath has changed", "extra step",
            "num_workers", "called without a model", "no last checkpoint available", "yielded None", "save_interval",
            "have no `val_dataloader`", "SLURM", "Cannot split tensor", "torch.distributed is disabled",
        )
    ),
]  # fmt: skip


class Fit(Protocol):
    """One run, after its end.

    Attributes:
        steps: What fed its optimizer steps, on this rank.
        epochs: The epoch of each step.
        losses: The loss of each step, where the trainer tells it.
        weights: The model's parameters.
        evaluations: (optimizer step, sorted ids) of each evaluation.
        clock: How many steps its loggers have counted.
    """

    steps: Steps
    epochs: dict[int, int]
    losses: dict[int, float]
    weights: list[float]
    evaluations: list[tuple[int, tuple[int, ...]]]
    clock: int


class Host(Protocol):
    """A trainer, as the contract runs it."""

    def run(self, shards: Path, folder: Path, checkpoint: Path | None = None, **options: Any) -> Fit:
        """Train; ``save_at=`` names the optimizer steps after which a checkpoint is kept in the folder."""

    def checkpoints(self, folder: Path) -> list[tuple[int, Path]]:
        """(optimizer step, checkpoint) of what a run has kept, in order."""

    def is_due(self, evaluated_at: int, step: int, options: Mapping[str, Any]) -> bool:
        """Whether an evaluation after a step comes after a checkpoint of another step."""


class Stopped(Exception):
    """What a test raises to stop a run."""


def raise_stopped() -> None:
    """Stop a run."""
    raise Stopped


@dataclass(frozen=True)
class At:
    """A place in a run: a hook's name, and the optimizer step and micro-batch of the step it comes in."""

    hook: str
    step: int
    micro: int = 0

    def __str__(self) -> str:
        return f"{self.hook} {self.step}.{self.micro}"


def host_named(name: str) -> Any:
    """The host of this name; skips the test where its trainer is not installed."""
    module, package, command = HOSTS[name]
    pytest.importorskip(package, reason=f"{name} is not installed: {command}")
    return import_module(f"support.{module}").HOST


def write_shards(folder: Path, num_samples: int = NUM_SAMPLES, first: int = 0) -> Path:
    """Write samples in shards of about a dozen, numbered from `first`."""
    columns, lengths = {"id": "int", "x": "ndarray:float32:4"}, {"tokens": lambda sample: 1 + sample["id"] ** 2 % 97}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1000, lengths=lengths) as writer:
        for number in range(first, first + num_samples):
            writer.write({"id": number, "x": np.full(4, number / NUM_SAMPLES, np.float32)})
    return folder


def from_step(values: Mapping[int, Value], step: int) -> dict[int, Value]:
    """What belongs to this step and the later ones."""
    return {number: value for number, value in values.items() if number >= step}


def before_step(values: Mapping[int, Value], step: int) -> dict[int, Value]:
    """What belongs to the earlier steps."""
    return {number: value for number, value in values.items() if number < step}


def merged(ranks: Iterable[Mapping[Any, Sequence[int]]]) -> Steps:
    """The steps of all ranks together."""
    steps: Steps = defaultdict(list)
    for rank in ranks:
        for step, ids in rank.items():
            steps[int(step)] += ids
    return {step: sorted(ids) for step, ids in steps.items()}


def planned(loader: Any, *, limit: int | None = None, epochs: int = EPOCHS) -> Steps:
    """What feeds the optimizer steps of a run by the order alone, read from a loader of one process."""
    steps: Steps = {}
    ids: list[int] = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number == limit:
                break
            if batch is None:  # a trainer passes over an empty batch
                continue
            ids += batch["id"][np.flatnonzero(~loader.last_batch.filler)].tolist()
            if loader.last_batch.completes_step:
                steps[len(steps)] = sorted(ids)
                ids = []
    return steps


def expect_exact(whole: Fit, resumed: Fit, step: int) -> None:
    """The resumed run fed every step from `step` on with what the uninterrupted one did, and came to its weights."""
    assert resumed.steps == from_step(whole.steps, step)
    assert resumed.epochs == from_step(whole.epochs, step)
    assert resumed.losses == from_step(whole.losses, step)
    assert resumed.weights == whole.weights


def expect_every_resume_exact(host: Host, shards: Path, folder: Path, stops: Collection[int], **options: Any) -> Fit:
    """A run that is resumed from its checkpoint of each of these steps does what it did without an interruption."""
    whole = host.run(shards, folder, save_at=stops, **options)
    saved = host.checkpoints(folder)
    assert {step for step, _ in saved} == {step for step in stops if step <= max(whole.steps) + 1}
    states = {step: read_position(path) for step, path in saved}
    for step, path in saved:
        if step == whole.clock and "max_duration" in options:
            continue  # Composer refuses to resume a run that is over
        resumed = host.run(shards, folder / str(step), path, save_at=stops, **options)
        expect_exact(whole, resumed, step)
        assert resumed.clock == whole.clock
        later = {number: read_position(path) for number, path in host.checkpoints(folder / str(step)) if number > step}
        assert later == {number: state for number, state in states.items() if number > step}
        due = [one for one in whole.evaluations if host.is_due(one[0], step, options)]
        assert resumed.evaluations == due, f"evaluations after step {step}"
    return whole


def expect_one_small_state(checkpoints: Sequence[Path]) -> None:
    """All ranks have saved the same state of the data, which is small."""
    states = [read_position(path) for path in checkpoints]
    assert all(state == states[0] for state in states), states
    assert len(json.dumps(states[0], default=str)) <= MOST_STATE_BYTES, states[0]
