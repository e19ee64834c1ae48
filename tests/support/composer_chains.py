"""Chains of runs under Composer: by its launcher and torchrun, or drawn from a seed, in this process."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer import Callback, DataSpec
from torch.utils.data import DataLoader

from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.trainers.composer.spec import data_spec
from support.composer_runs import EPOCHS, GLOBAL_BATCH, Run, Steps, checkpoints
from support.looks import KINDS, Look, use

TESTS = Path(__file__).resolve().parent.parent
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_PORT")


def launch(out: Path, shards: Path, world: int, launcher: str = "composer", **options: Any) -> int:
    """Run one link of a chain to its end; the exit code."""
    argument = json.dumps({"shards": str(shards), "out": str(out), **options})
    done = run_module("support.composer_worker", [argument], world, launcher)
    if "stop_at" not in options:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.returncode


def run_module(module: str, arguments: list[str], world: int, launcher: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module`` in so many processes, started by ``"composer"`` or ``"torchrun"``."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "FSDP_VERSION": "2"}
    program = ["-m", module, *arguments]
    if world > 1 and launcher == "composer":
        start = ["-m", "composer.cli", "-n", str(world), "--master_port", str(_free_port())]
        program = [*start, "-m", *program[1:]]
    elif world > 1:
        start = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={_free_port()}"]
        program = [*start, *program]
    command = [sys.executable, *program]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ranks_of(out: Path) -> list[dict[str, Any]]:
    """What each rank wrote."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]


def steps_of(out: Path, below: int = 10**9, ranks: slice = slice(None)) -> dict[int, list[int]]:
    """Optimizer step -> sorted sample ids over all ranks."""
    steps: dict[int, list[int]] = defaultdict(list)
    for rank in ranks_of(out)[ranks]:
        for step, ids in rank["steps"].items():
            if int(step) < below:
                steps[int(step)] += ids
    return {step: sorted(ids) for step, ids in steps.items()}


def newest(out: Path) -> tuple[int, Path]:
    """The last checkpoint of a run, and its step."""
    return list(checkpoints(out).items())[-1]


HOOKS = (
    "fit_start", "epoch_start", "before_dataloader", "after_dataloader", "batch_start", "after_forward", "after_loss",
    "after_backward", "batch_end", "batch_checkpoint", "epoch_end", "epoch_checkpoint", "eval_start", "eval_end",
    "fit_end",
)  # fmt: skip
SOURCES = ("spec", "bare", "DataSpec", "torch")
STOPS_IN = ("batch_start", "after_forward", "after_backward", "batch_end", "epoch_start")


class Stopped(Exception):
    """What a test raises to stop a run."""


@dataclass(frozen=True)
class Link:
    """One run of a chain: how it gets its data, how it ends, and what its user does beside training."""

    source: str
    workers: int
    way: str
    hook: str
    step: int
    looks: tuple[Look, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    evaluates_on_train: bool
    keeps_loader: bool
    options: dict[str, Any]

    def __str__(self) -> str:
        looks = ", ".join(map(str, self.looks))
        flags = [name for name in ("evaluates_on_train", "keeps_loader") if getattr(self, name)]
        return (
            f"{self.source} {self.workers}w, {self.way} {self.hook} {self.step} [{looks}] before {self.before} after "
            f"{self.after} {flags} {self.options}"
        )


class Looks(Callback):
    """Does what a user does with the training loader, in the trainer's hooks; and stops the run in one."""

    def __init__(self, link: Link, stop: int | None) -> None:
        self.looks, self.kept = list(link.looks), []
        self.hook, self.stop = link.hook, stop

    def _pass(self, hook: str, state: Any) -> None:
        step = int(state.timestamp.batch)
        for look in [one for one in self.looks if one.hook == hook and one.step <= step]:
            self.looks.remove(look)
            self.kept += use(state.train_dataloader, look.kind)
        if self.stop is not None and hook == self.hook and step >= self.stop:
            raise Stopped


def _hook(name: str) -> Callable[..., None]:
    def on(self: Looks, state: Any, logger: Any) -> None:
        self._pass(name, state)

    return on


for _name in HOOKS:
    setattr(Looks, _name, _hook(_name))


class StoppedRun(Run):
    """A run that may be stopped."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        try:
            super().__init__(*arguments, **options)
        except Stopped:
            self.trainer.close()


def draw_chain(seed: int, *, num_links: int = 4, kinds: Sequence[str] = KINDS) -> tuple[list[Link], dict[str, Any]]:
    """A chain of runs by users who look at batches and hand loaders over in their own ways; and what holds for all."""
    rng = random.Random(seed)
    sources = [rng.choice(SOURCES)] if rng.random() < 0.7 else SOURCES
    per_epoch = rng.choice((11, 11, 11, 1, 4, 6) if len(sources) == 1 or "torch" not in sources else (11,))
    shared: dict[str, Any] = {
        "dataset": {"shuffle": rng.random() < 0.8, "shuffle_seed": rng.randrange(100), "num_canonical_nodes": 4},
        "tail": "pad" if "torch" in sources else rng.choice(("pad", "exact", "drop")),
        "limit": -1 if per_epoch == 11 else per_epoch,
    }
    begun, links, num_steps = 0, [], EPOCHS * min(per_epoch, 10)
    shared["num_steps"] = num_steps
    for number in range(num_links):
        source = rng.choice(sources)
        begun = min(begun + rng.choice((1, 1, 2, 5, 11)), num_steps - 1)
        looks = tuple(
            Look(rng.choice(HOOKS), rng.randrange(num_steps), rng.choice(kinds)) for _ in range(rng.randrange(5))
        )
        done = tuple(tuple(rng.choices(kinds, k=rng.choice((0, 0, 1, 2)))) for _ in "ba")
        plain = source == "torch"  # torch's loader has one position: what iterates over it moves it
        options = {
            "save_interval": rng.choice(("1ba", "1ba", "3ba", "1ep")),
            "device_train_microbatch_size": rng.choice((16, 16, 5)),
        }
        way = "end" if number == num_links - 1 else rng.choice(("max_duration", "exception", "killed"))
        links.append(
            Link(
                source, rng.choice((0, 0, 0, 2)), way, rng.choice(STOPS_IN), begun, () if plain else looks,
                *(((), ()) if plain else done), not plain and rng.random() < 0.3, rng.random() < 0.5, options,
            )
        )  # fmt: skip
    return links, shared


def run_drawn_chain(
    shards: Path, folder: Path, links: list[Link], shared: dict[str, Any], rng: random.Random
) -> tuple[Steps, dict[int, float]]:
    """The steps that counted, and their losses."""
    steps: Steps = {}
    losses: dict[int, float] = {}
    done, path = 0, None
    loaders: dict[Any, Any] = {}
    for number, link in enumerate(links):
        own = folder / f"link{number}"
        run = run_link(shards, own, link, shared, path, done, loaders)
        if link.way == "end":
            return steps | run.steps, losses | run.losses
        saved = [(step, file) for step, file in checkpoints(own).items() if done < step < shared["num_steps"]]
        if not saved:
            continue  # the next run begins where this one did
        done, path = saved[-1] if link.way == "max_duration" else rng.choice(saved)
        steps |= {step: ids for step, ids in run.steps.items() if step < done}
        losses |= {step: loss for step, loss in run.losses.items() if step < done}
    raise AssertionError("a chain ends with a run that ends")


def run_link(
    shards: Path, own: Path, link: Link, shared: dict[str, Any], path: Path | None, done: int, loaders: dict[Any, Any]
) -> Run:
    """One run of a chain."""
    key = (link.source, link.workers)
    is_new_run_of_torch = path is None and link.source == "torch"  # its dataset keeps counting epochs under any trainer
    if not link.keeps_loader or key not in loaders or is_new_run_of_torch:
        loaders[key] = made(shards, link.source, link.workers, shared)
    data = loaders[key]
    loader = getattr(data, "dataloader", data)
    kept = [one for kind in link.before for one in use(loader, kind)]
    looks = Looks(link, max(link.step, done + 1) if link.way == "exception" else None)
    options: dict[str, Any] = {**link.options, "train_subset_num_batches": shared["limit"]}
    if link.evaluates_on_train:
        options |= {"eval_dataloader": data, "eval_interval": "4ba"}
    if link.way in ("max_duration", "killed"):
        options["max_duration"] = f"{max(link.step, done + 1) + 2 * (link.way == 'killed')}ba"
    run = StoppedRun(shards, own, path, spec=data, callbacks=[looks], **options)
    kept += [one for kind in link.after for one in use(loader, kind)]
    return run


def made(shards: Path, source: str, workers: int, shared: dict[str, Any]) -> Any:
    """What a trainer takes its data from."""
    batch_size = GLOBAL_BATCH if source == "torch" else None
    dataset = StreamingDataset(remote=str(shards), batch_size=batch_size, **shared["dataset"])
    if source == "torch":
        return DataLoader(dataset, GLOBAL_BATCH, num_workers=workers)
    make = data_spec if source == "spec" else StreamingDataLoader
    data = make(dataset, global_batch_size=GLOBAL_BATCH, num_workers=workers, tail=shared["tail"])
    return DataSpec(data) if source == "DataSpec" else data
