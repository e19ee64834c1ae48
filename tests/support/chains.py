"""Chains of runs drawn from a seed: each stopped in its own way, each in a world of its own, by users with habits.

A world's ranks run one after the other in this process, each as if it were one of several: which samples it gets is
a matter of its place alone, and a checkpoint must be the same on all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_stream import MDSWriter, Packing, Schedule, Stream, StreamingDataLoader, StreamingDataset, World
from lightning_stream.loading.collate import collate_samples
from support import documents
from support.resume_contract import (
    EPOCHS,
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    At,
    Fit,
    Steps,
    before_step,
    expect_one_small_state,
    merged,
    planned,
    raise_stopped,
)

LOOKS = ("look", "look", "three", "kept", "pass", "statistics", "state")
SECOND_LOADERS = ("second", "kept second", "second of torch")
DATA = ("samples", "budget", "budget", "budget", "buckets", "rows", "rows", "mixture", "rows of a mixture")
SIZES = {"a": 260, "b": 140}
LONGEST = {"a": 40, "b": 120}


# What a user does beside training


@dataclass(frozen=True)
class Look:
    """Something done with the training loader in a hook of the trainer's, from an optimizer step on."""

    hook: str
    step: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.hook} {self.step}"


def use(loader: Any, kind: str) -> list[Any]:
    """Do something with a training loader that is not training; gives the iterations that are kept open."""
    if kind in ("look", "three", "kept"):
        batches = iter(loader)
        for _ in range(1 if kind == "look" else 3):
            next(batches, None)
        return [batches] if kind == "kept" else []
    if kind == "pass":
        assert list(loader) or not len(loader)  # a schedule's data may be over
    elif kind == "statistics":
        assert len(list(loader.look())) == len(loader)
    elif kind in ("second", "kept second"):
        dataset, size = loader.streaming, {} if loader.streaming.batch_tokens else {"batch_size": 5}
        batches = iter(type(loader)(dataset, collate_fn=len, world=loader.world, **size))
        next(batches, None), next(batches, None)
        return [batches] if kind == "kept second" else []
    elif kind == "second of torch":
        next(iter(DataLoader(loader.dataset, 16)))
    elif kind == "change":
        loader.change_mixture({"b": 1}, after_steps=2)
    elif kind == "state":
        assert loader.state_dict() == loader.state_dict()
    else:
        raise ValueError(f"there is no way {kind!r} to use a loader")
    return []


class User:
    """Looks at the loader in hooks of the trainer's, and stops the run in one of them."""

    def __init__(
        self, looks: Sequence[Look] = (), stop: At | None = None, use: Callable[[Any, str], list[Any]] = use
    ) -> None:
        self.looks, self.stop, self.use, self.kept = list(looks), stop, use, list[Any]()

    def reaches(self, hook: str, step: int, loader: Any) -> None:
        """Do what is to be done in a hook."""
        for look in [one for one in self.looks if one.hook == hook and one.step <= step]:
            self.looks.remove(look)
            self.kept += self.use(loader, look.kind)
        if self.stop is not None and hook == self.stop.hook and step >= self.stop.step:
            raise_stopped()


@dataclass(frozen=True)
class EmptyBatches:
    """A `collate_fn` that gives None for a batch with one of these samples."""

    ids: tuple[int, ...]

    def __call__(self, samples: list[Any]) -> Any:
        return None if {sample["id"] for sample in samples} & set(self.ids) else collate_samples(samples)


# What it trains on


def write_streams(folder: Path) -> Path:
    """Two streams of short and of longer documents, each token of which is the number of its sample."""
    rng = np.random.default_rng(5)
    columns = {"id": "int", "x": "ndarray:float32:4", "tokens": "ndarray:int32"}
    for first, (name, count) in zip((0, 1000), SIZES.items(), strict=True):
        out = str(folder / name)
        with MDSWriter(out=out, columns=columns, size_limit=2000, lengths={"tokens": len}) as writer:
            for number in range(first, first + count):
                tokens = np.full(rng.integers(1, LONGEST[name] + 1), number + 1, np.int32)
                writer.write({"id": number, "x": np.full(4, number % 97 / 97, np.float32), "tokens": tokens})
    return folder


def number_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A packed row as a sample whose number follows from all of its tokens."""
    number = crc32(np.asarray(row["input_ids"]).tobytes())
    return {"id": number, "x": np.full(4, number % 97 / 97, np.float32)}


def number_rows(rows: Sequence[Sequence[Mapping[str, Any]]]) -> Any:
    """Rows of whole samples as samples whose numbers follow from all of theirs; an evaluation has samples."""
    if isinstance(rows[0], Mapping):
        return collate_samples(rows)
    numbers = [crc32(repr([sample["id"] for sample in row]).encode()) for row in rows]
    return collate_samples([{"id": one, "x": np.full(4, one % 97 / 97, np.float32)} for one in numbers])


def without_tokens(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A document as a sample that is as long as any other."""
    return {"id": sample["id"], "x": sample["x"]}


def draw_data(rng: random.Random, folder: Path) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Arguments of the dataset and of its loader, and whether any world and accumulation will do."""
    kind = rng.choice(DATA)
    dataset: dict[str, Any] = {"remote": folder / "a", "transform": without_tokens}
    loading: dict[str, Any] = {"tail": rng.choice(("pad", "drop"))}
    if "mixture" in kind:
        streams = [Stream(remote=folder / name, name=name) for name in SIZES]
        schedule = Schedule([(0, {"a": rng.choice((1, 2)), "b": 1})], exhausted="stop")
        dataset |= {"remote": None, "streams": streams, "schedule": schedule}
        dataset["epoch_size"] = rng.choice((120, 152, 184))
    if "rows" in kind:
        dataset |= {"pack": Packing(row_length=rng.choice((48, 64)), window=rng.choice((20, 50)))}
        dataset |= {"transform": number_row}
    if kind == "buckets":
        dataset["bucket_by"] = {"lengths": "tokens", "window": rng.choice((48, 64))}
    if kind == "budget":
        tokens = rng.choice((480, 520, 700))
        dataset["bucket_by"] = {"window": rng.choice((None, 48))}
        dataset["batch_tokens"] = {"tokens": tokens, "multiple": rng.choice((None, None, 1, 3, 4, 12))}
        loading |= {"global_batch_size": None}
    return dataset, loading, kind == "budget"


def composed(root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schedule, a filter, packing and a balance together: arguments of the dataset, and of its loader."""
    streams = [Stream(local=root / name) for name in documents.SIZES]
    stages = {"pack": documents.PACK, "filter": documents.is_kept, "balance": documents.square, **documents.MIXED}
    dataset = {"remote": None, "streams": streams, "transform": number_row, **stages}
    return dataset, {"global_batch_size": documents.BATCH, "tail": "drop"}


# The chains


@dataclass(frozen=True)
class Link:
    """One run of a chain.

    Attributes:
        source: How the trainer gets its data: one of the host's `sources`.
        num_ranks, accumulate, workers: Where it runs, and how it loads.
        way, at: How it ends: one of the host's `ways`, at a place.
        options: Of the trainer.
        looks: What is done in the trainer's hooks.
        before, after: What is done with the loader before and after the fit, also after an error.
        evaluates_on_train: Whether the training loader is the evaluation loader, too.
        keeps_loader: Whether a loader of a run before is trained on again, where it has the same settings.
        looks_first: Whether the user's callbacks come before those of ours.
    """

    source: str
    num_ranks: int = 1
    accumulate: int = 1
    workers: int = 0
    way: str = "end"
    at: At | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    looks: tuple[Look, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    evaluates_on_train: bool = False
    keeps_loader: bool = False
    looks_first: bool = False


@dataclass
class Chain:
    """Runs that continue each other, and what holds for all of them.

    Attributes:
        dataset, loading: Arguments of the dataset, and of its loader.
        limit: Optimizer steps of an epoch; None for all.
        accumulate: Micro-batches of a step in all runs, of one rank each; None where each run has its own.
        num_steps: About how many optimizer steps it takes.
    """

    seed: int
    dataset: dict[str, Any]
    loading: dict[str, Any]
    limit: int | None = None
    accumulate: int | None = None
    num_steps: int = EPOCHS * STEPS_PER_EPOCH
    links: Sequence[Link] = ()

    def loader(self, shards: Path, **settings: Any) -> StreamingDataLoader:
        """A loader over the data of all runs."""
        dataset = StreamingDataset(**{"remote": shards, "shuffle": True, **self.dataset})
        return StreamingDataLoader(dataset, **{"global_batch_size": 16, **self.loading, **settings})


def draw_chain(
    host: Any, seed: int, *, has_habits: bool = True, folder: Path | None = None, num_links: int = 4,
    workers: Sequence[int] = (0,), kinds: Sequence[str] = LOOKS,
) -> Chain:  # fmt: skip
    """A chain of runs under a host.

    Args:
        host: The host.
        seed: What all is drawn from.
        has_habits: Whether users do other things than training.
        folder: Where `write_streams` wrote; None to train on plain samples.
        num_links: How many runs it has.
        workers: Numbers of workers.
        kinds: What users do.
    """
    rng = random.Random(seed)
    dataset = {"shuffle": rng.random() < 0.8, "shuffle_seed": rng.randrange(100), "num_canonical_nodes": 4}
    chain = Chain(seed, dataset, {"tail": rng.choice(("pad", "exact", "drop"))})
    sources = [rng.choice(host.sources)] if rng.random() < 0.7 else host.sources
    fits_any = False
    if folder is not None:
        data, loading, fits_any = draw_data(rng, folder)
        chain.dataset = {"shuffle": dataset["shuffle"], "shuffle_seed": dataset["shuffle_seed"], **data}
        chain.loading |= loading
        sources = [source for source in sources if source != "torch"] or host.sources[:1]
    elif "torch" in sources:
        chain.loading["tail"] = "pad"
    if has_habits and host.limits and rng.random() < 0.3:
        # Loaders of torch and ours would count a limited epoch differently.
        chain.limit = rng.choice(host.limits) if len(sources) == 1 or "torch" not in sources else None
    if chain.limit is not None:
        chain.num_steps = EPOCHS * min(chain.limit, STEPS_PER_EPOCH - 1)
    if has_habits and host.passes_over_empty_batches and rng.random() < 0.3:
        chain.accumulate = 1  # else an empty batch leaves a gradient over at an epoch's end, which no checkpoint holds
        chain.loading["collate_fn"] = EmptyBatches(tuple(rng.sample(range(NUM_SAMPLES), rng.choice((1, 2)))))
    # Composer asks a kept loader for the length of the epoch in which its last trainer ended: see docs/guarantees.md.
    keeps_any = has_habits and not (host.name == "Composer" and chain.limit is not None and "schedule" in chain.dataset)
    begun, links = 0, []
    for number in range(num_links):
        begun = max(1, min(begun + rng.choice((0, 1, 1, 2, 5, 11)), chain.num_steps - 2))
        link = _draw_link(host, rng, chain, rng.choice(sources), begun, fits_any)
        link = replace(link, workers=rng.choice(workers))
        if number == num_links - 1:
            link = replace(link, way="end", at=None)
        if has_habits and link.source != "torch":  # torch's loader has one position: what iterates over it moves it
            link = _draw_habits(host, rng, chain, link, kinds)
        links.append(replace(link, keeps_loader=has_habits and rng.random() < 0.5 and keeps_any))
    chain.links = links
    return chain


def _draw_link(host: Any, rng: random.Random, chain: Chain, source: str, step: int, fits_any: bool) -> Link:
    num_ranks = rng.choice((1, 2, 3, 4, 6) if fits_any else (1, 1, 2, 4))
    accumulate = rng.choice((1, 2, 3, 8) if fits_any else (1, 2, 4))
    if chain.accumulate:  # what an empty batch leaves out is a matter of where batches are cut
        num_ranks, accumulate = 1, chain.accumulate
    if not host.simulates_ranks:
        num_ranks, accumulate = 1, 1
    way = rng.choice(host.ways)
    hook = rng.choice(host.stops_in)
    at = At(hook, step, rng.randrange(accumulate) if hook == "training_step" else 0)
    return Link(source, num_ranks, accumulate, 0, way, at, host.draw_options(rng))


def _draw_habits(host: Any, rng: random.Random, chain: Chain, link: Link, kinds: Sequence[str]) -> Link:
    uses = [kind for kind in (*kinds, *host.uses) if link.way != "signal" or kind not in host.uses]
    around = [kind for kind in uses if kind not in ("kept", "kept second")]
    return replace(
        link,
        looks=tuple(
            Look(rng.choice(host.hooks), rng.randrange(chain.num_steps), rng.choice(uses))
            for _ in range(rng.randrange(5) if host.hooks else 0)
        ),
        before=tuple(rng.choices(around, k=rng.choice((0, 0, 1, 2)))),
        after=tuple(rng.choices(around, k=rng.choice((0, 0, 0, 1)))),
        evaluates_on_train=rng.random() < 0.3,
        looks_first=rng.random() < 0.5,
    )


def run_chain(host: Any, shards: Path, folder: Path, chain: Chain) -> tuple[Steps, dict[int, float]]:
    """The steps that counted, those of each run up to the checkpoint that the next one began with; and their losses."""
    rng = random.Random(chain.seed)
    steps: Steps = {}
    losses: dict[int, float] = {}
    done, saved = 0, [None]
    loaders: dict[Any, Any] = {}  # of the runs so far, for those that train on one again
    for number, link in enumerate(chain.links):
        if link.at is not None and link.at.step <= done:
            link = replace(link, at=replace(link.at, step=done + 1))
        runs: list[Fit] = []
        kept: list[list[tuple[int, Path]]] = []
        for rank in range(link.num_ranks):
            own = folder / f"link{number}" / f"rank{rank}"
            world = World(rank, link.num_ranks, link.num_ranks)
            runs.append(host.run_link(shards, own, chain, link, world, saved[rank % len(saved)], loaders))
            kept.append([pair for pair in host.checkpoints(own) if done < pair[0] < chain.num_steps])
        seen = merged(run.steps for run in runs)
        if link.way == "end":
            return steps | seen, losses | runs[0].losses
        if not kept[0]:
            continue  # nothing was saved: the next run begins where this one did
        chosen = -1 if link.way in ("max_steps", "exception", "signal") else rng.randrange(len(kept[0]))
        done = kept[0][chosen][0]
        saved = [files[chosen][1] for files in kept]
        expect_one_small_state(saved)
        steps |= before_step(seen, done)
        losses |= before_step(runs[0].losses, done)
    raise AssertionError("a chain ends with a run that ends")


def expect_chain_exact(host: Any, shards: Path, folder: Path, chain: Chain) -> None:
    """No sample of the order is lost or repeated over a chain; losses are the same, where the trainer tells them."""
    whole = planned(chain.loader(shards, world=World()), limit=chain.limit)
    chain.num_steps = len(whole)
    steps, losses = run_chain(host, shards, folder, chain)
    wrong = [step for step in sorted({*whole, *steps}) if whole.get(step) != steps.get(step)]
    assert not wrong, f"steps {wrong} differ: {chain}"
    if losses:
        quiet = replace(chain.links[-1], looks=(), before=(), after=(), evaluates_on_train=False, keeps_loader=False)
        alone = host.run_link(shards, folder / "whole", chain, quiet, World(), None, {})
        assert losses == pytest.approx(alone.losses, abs=1e-6), chain
