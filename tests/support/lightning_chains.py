"""Chains of runs drawn from a seed: each stopped in its own way, each in a world of its own.

A world's ranks run one after the other in this process, each as if it were one of several: which samples it gets is
a matter of its place alone, and a checkpoint must be the same on all of them.
"""

from __future__ import annotations

import random
import signal
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_stream import StreamingDataModule
from lightning_stream.order import World
from support.lightning_data import draw_data
from support.lightning_habits import HOOKS as HOOKS_OF_LOOKS
from support.lightning_habits import Habits, OrdinaryRun, draw_habits, draw_surroundings
from support.lightning_runs import EPOCHS, Run, Steps, checkpoints, keep_all
from support.lightning_stops import At, Stopped, StopsIn, raise_stopped, saved_on_exception, send
from support.looks import Look

STEPS_PER_EPOCH = 11
WAYS = ("max_steps", "killed", "exception", "signal", "clock", "epoch end", "validation")
HOOKS = ("training_step", "training_step", "on_train_batch_end", "on_before_zero_grad")


@dataclass(frozen=True)
class Link:
    """One run of a chain: where it runs, and how it ends."""

    num_ranks: int
    accumulate: int
    workers: int
    way: str
    at: At | None
    options: tuple[tuple[str, Any], ...]
    habits: Habits | None = None  # what its user does beside training; None for nothing at all

    def __str__(self) -> str:
        where = f"{self.num_ranks} ranks x{self.accumulate} {self.workers}w"
        return f"{where}, {self.way} {self.at} {dict(self.options)} {self.habits}"


def draw_chain(seed: int, *, workers: tuple[int, ...] = (0,), num_links: int = 4) -> tuple[list[Link], dict[str, Any]]:
    """A chain of runs, and what holds for all of them."""
    rng = random.Random(seed)
    shared: dict[str, Any] = {
        "data": {"tail": rng.choice(("pad", "exact", "drop")), "persistent_workers": False},
        "dataset": {"shuffle": rng.random() < 0.8, "shuffle_seed": rng.randrange(100), "num_canonical_nodes": 4},
    }
    begun, links = 0, []
    for number in range(num_links):
        ranks, accumulate = rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 4))
        step = min(begun + rng.choice((0, 1, 1, 2, 5, 11)), EPOCHS * STEPS_PER_EPOCH - 2)
        way = rng.choice(WAYS)
        hook = rng.choice(HOOKS if way == "exception" else ("training_step",))
        micro = rng.randrange(accumulate) if hook == "training_step" else 0
        options = {
            "val_check_interval": rng.choice((1.0, 0.5, 3)),
            "reload_dataloaders_every_n_epochs": rng.choice((0, 0, 1)),
        }
        last = number == num_links - 1
        links.append(
            Link(
                ranks, accumulate, rng.choice(workers), "end" if last else way,
                None if last else At(hook, max(step, 1), micro), tuple(options.items()),
            )
        )  # fmt: skip
        begun = step
    return links, shared


def draw_ordinary_chain(
    seed: int, *, workers: tuple[int, ...] = (0,), num_links: int = 4
) -> tuple[list[Link], dict[str, Any]]:
    """A chain of runs by users who look at batches, validate on them, and hand loaders over in their own ways."""
    links, shared = draw_chain(seed, workers=workers, num_links=num_links)
    rng = random.Random(f"habits {seed}")
    around = draw_surroundings(rng)
    shared |= around.options
    shared["data"] |= around.data_options
    drawn = []
    for link in links:
        num_ranks, accumulate = link.num_ranks, link.accumulate
        if around.accumulate:  # what an empty batch leaves out is a matter of where batches are cut
            num_ranks, accumulate = 1, around.accumulate
        at = link.at
        if at is not None:
            at = replace(at, micro=at.micro % accumulate, step=max(1, min(at.step, around.num_steps - 2)))
        habits = draw_habits(rng, around, link.way)
        drawn.append(replace(link, num_ranks=num_ranks, accumulate=accumulate, at=at, habits=habits))
    return drawn, shared


def draw_data_chain(
    seed: int, *, folder: Path, workers: tuple[int, ...] = (0,), num_links: int = 4
) -> tuple[list[Link], dict[str, Any]]:
    """A chain of ordinary users over other kinds of data, see `draw_data`, who also make second loaders over it."""
    links, shared = draw_ordinary_chain(seed, workers=workers, num_links=num_links)
    rng = random.Random(f"data {seed}")
    dataset, loading, fits_any = draw_data(rng, folder)
    del shared["dataset"]["num_canonical_nodes"]
    shared["dataset"] |= dataset
    shared["data"] |= loading
    drawn = []
    for link in links:
        num_ranks, accumulate = link.num_ranks, link.accumulate
        if fits_any and "accumulate_grad_batches" not in shared:
            num_ranks, accumulate = rng.choice((1, 2, 3, 4, 6)), rng.choice((1, 2, 3, 8))
        at = link.at and replace(link.at, micro=link.at.micro % accumulate)
        assert link.habits is not None
        seconds = [
            Look(rng.choice(HOOKS_OF_LOOKS), rng.randrange(20), "second") for _ in range(rng.choice((0, 0, 1, 2)))
        ]
        habits = replace(link.habits, looks=(*link.habits.looks, *seconds))
        options = tuple((name, 0.5 if value == 3 else value) for name, value in link.options)  # epochs may be short
        kept = {"at": at, "options": options, "habits": habits}
        drawn.append(replace(link, num_ranks=num_ranks, accumulate=accumulate, **kept))
    return drawn, shared


def run_chain(shards: Path, folder: Path, links: list[Link], shared: dict[str, Any], rng: random.Random) -> Steps:
    """The steps that counted: those of each run up to the checkpoint that the next one began with."""
    steps: Steps = {}
    ckpts: list[Path] | None = None
    loaders: dict[Any, Any] = {}  # of the runs so far, for those that train on one again
    for number, link in enumerate(links):
        seen: Steps = defaultdict(list)
        saved: list[list[tuple[int, Path]]] = []
        for rank in range(link.num_ranks):
            own = folder / f"link{number}" / f"rank{rank}"
            run = _run(shards, own, link, rank, ckpts and ckpts[rank % len(ckpts)], shared, loaders)
            for step, ids in run.steps.items():
                seen[step] += ids
            saved.append(_saved(own, link))
        if link.way == "end":
            return steps | {step: sorted(ids) for step, ids in seen.items()}
        begun = [(step, path) for step, path in saved[0] if step <= (link.at.step if link.at else 0)] or saved[0]
        if not begun:
            continue  # nothing was saved yet: the next run begins where this one did
        chosen = rng.randrange(len(begun)) if link.way in ("clock", "killed", "validation", "epoch end") else -1
        done, path = begun[chosen]
        index = saved[0].index((done, path))
        ckpts = [files[index][1] for files in saved]
        _expect_the_same(ckpts)
        steps |= {step: sorted(ids) for step, ids in seen.items() if step < done}
    raise AssertionError("a chain ends with a run that ends")


def _run(
    shards: Path, own: Path, link: Link, rank: int, ckpt: Path | None, shared: dict[str, Any], loaders: dict[Any, Any]
) -> Run:
    def as_one_of(**arguments: Any) -> StreamingDataModule:
        return OneOf(World(rank=rank, num_ranks=link.num_ranks, ranks_per_node=link.num_ranks), **arguments)

    options: dict[str, Any] = {
        **dict(link.options), **shared, "data": {**shared["data"], "num_workers": link.workers},
        "accumulate_grad_batches": link.accumulate, "data_class": as_one_of, "callbacks": [],
    }  # fmt: skip
    if "limit_train_batches" in shared:
        options["limit_train_batches"] *= link.accumulate
    options |= _ending(link, own)
    stops = options.pop("stops", (None,))
    if link.habits is None:
        return Run(shards, own, ckpt, recorder=lambda: StopsIn(*stops), **options)
    return OrdinaryRun(shards, own, ckpt, habits=link.habits, loaders=loaders, stops=stops, **options)


class OneOf(StreamingDataModule):
    """A data module that takes its process for one of several."""

    def __init__(self, as_world: World, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.as_world = as_world

    def world(self) -> World:
        return self.as_world


def _ending(link: Link, own: Path) -> dict[str, Any]:
    at = link.at
    if at is None:
        return {}
    if link.way in ("exception", "signal"):
        act: Callable[[], None] = send(signal.SIGTERM) if link.way == "signal" else raise_stopped
        return {
            "stops": (at, act), "raises": (Stopped, SystemExit),
            "callbacks": [saved_on_exception(own / "ckpt", "OnExceptionCheckpoint")],
        }  # fmt: skip
    when: dict[str, Any] = {
        "max_steps": {"every_n_train_steps": 1}, "killed": {"every_n_train_steps": 3},
        "clock": {"train_time_interval": timedelta(microseconds=1)},
        "epoch end": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        "validation": {"save_on_train_epoch_end": False},
    }[link.way]  # fmt: skip
    return {"callbacks": [keep_all(own, **when)], "max_steps": at.step + (2 if link.way == "killed" else 0)}


def _saved(own: Path, link: Link) -> list[tuple[int, Path]]:
    return checkpoints(own) if (own / "ckpt").exists() else []


def _expect_the_same(paths: list[Path]) -> None:
    states = [torch.load(path, weights_only=True)["callbacks"]["lightning_stream"] for path in paths]
    assert all(state == states[0] for state in states), states
