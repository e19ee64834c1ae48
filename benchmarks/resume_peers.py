"""Runs stopped and resumed under Lightning and Composer: samples lost and repeated, with the loader of each library.

python benchmarks/resume_peers.py [--group Lightning] [--mosaic-python PATH]     each Python needs the trainer too

Each library is used as its own documentation says: its loader, with its state, handed to the trainer. A run trains 3
epochs of 176 samples in batches of 16. A chain of runs is compared, epoch by epoch, with the same library's own run
without a stop: "lost / repeated / other" are samples lost, samples repeated, and optimizer steps of other samples.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import loaders
import numpy as np
from frame import Clock, Group, Job, Result, main

NUM_SAMPLES, BATCH, EPOCHS = 176, 16, 3
NEVER = 1 << 30  # a step that no run reaches
LOADERS = {"mosaic": loaders.mosaic, "litdata": loaders.litdata}
Feed = dict[int, tuple[int, list[int]]]  # optimizer step -> its epoch, and its samples


@dataclass(frozen=True)
class Link:
    """One run of a chain.

    Attributes:
        step: Where it is left.
        way: What saves: "steps", "epoch" (its end) or "exception" (in this step).
        accumulate: Batches of a step.
    """

    step: int = NEVER
    way: str = "steps"
    accumulate: int = 1


LIGHTNING = {
    "in the middle of an epoch": [Link(4)],
    "twice in a row": [Link(4), Link(8)],
    "in the middle of the second epoch": [Link(15)],
    "at the last batch of an epoch": [Link(11)],
    "at the end of an epoch": [Link(11, "epoch")],
    "by an exception in a step": [Link(5, "exception")],
    "inside an accumulation of 4": [Link(2, "exception", accumulate=4)],
}
COMPOSER = {
    "in the middle of an epoch": [Link(7)],
    "twice in a row": [Link(7), Link(15)],
    "at the end of an epoch": [Link(11, "epoch")],
}


class StoppedError(Exception):
    """The exception in a step."""


def samples() -> list[dict[str, Any]]:
    return [{"id": number, "x": np.full(4, number / NUM_SAMPLES, np.float32)} for number in range(NUM_SAMPLES)]


def prepare(job: Job) -> None:
    from lightning_stream import MDSWriter

    columns = {"id": "int", "x": "ndarray:float32:4"}
    with MDSWriter(out=job.folder / "samples", columns=columns, size_limit=1000) as writer:
        for sample in samples():
            writer.write(sample)


def fit_lightning(library: str, link: Link, job: Job, out: Path, state: str | None) -> Feed:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    class Noting(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
            self.fed: Feed = {}

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:  # noqa: ARG002
            step = self.trainer.global_step
            fails = link.way == "exception" and step == link.step
            if fails and (link.accumulate == 1 or step in self.fed):
                raise StoppedError
            _, ids = self.fed.get(step, (0, []))
            self.fed[step] = (self.trainer.current_epoch, [*ids, *map(int, batch["id"])])
            return self.net(batch["x"]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    callbacks: list[Any] = []
    if link.way == "exception":
        callbacks = [OnExceptionCheckpoint(str(out), "stopped")]
    elif link.step < NEVER:
        when = {"every_n_train_steps": link.step} if link.way == "steps" else {"every_n_epochs": 1}
        callbacks = [ModelCheckpoint(str(out), filename="{step}", save_top_k=-1, **when)]
    if library == "ours":
        from lightning_stream import StreamingDataModule

        train = {"remote": job.folder / "samples", "shuffle": True}
        data = {"datamodule": StreamingDataModule(train=train, batch_size=BATCH)}
    else:
        data = {"train_dataloaders": LOADERS[library](job, "samples", BATCH)}
    noting = Noting()
    trainer = pl.Trainer(
        max_epochs=EPOCHS, max_steps=-1 if link.way == "exception" or link.step == NEVER else link.step + 2,
        callbacks=callbacks, accumulate_grad_batches=link.accumulate, enable_checkpointing=bool(callbacks),
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=out,
    )  # fmt: skip
    with suppress(StoppedError):
        trainer.fit(noting, ckpt_path=state, weights_only=False, **data)
    return noting.fed


def fit_composer(library: str, link: Link, job: Job, out: Path, state: str | None) -> Feed:
    import torch
    from composer import ComposerModel, Trainer

    class Noting(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
            self.fed: Feed = {}

        def forward(self, batch: Any) -> Any:
            return self.net(batch["x"])

        def loss(self, outputs: Any, batch: Any) -> Any:
            clock = trainer.state.timestamp
            self.fed[int(clock.batch)] = (int(clock.epoch), batch["id"].tolist())
            return outputs.square().mean()

    if library == "ours":
        from lightning_stream import data_spec

        data = data_spec(remote=job.folder / "samples", shuffle=True, global_batch_size=BATCH)
    else:
        data = LOADERS[library](job, "samples", BATCH)
    noting = Noting()
    duration = f"{EPOCHS}ep" if link.step == NEVER else f"{link.step}ba"
    trainer = Trainer(
        model=noting, train_dataloader=data, optimizers=torch.optim.SGD(noting.parameters(), lr=0.01), device="cpu",
        max_duration=duration, seed=1, progress_bar=False, save_folder=str(out), load_path=state,
        save_interval="1ep" if link.way == "epoch" else "1ba", save_filename="step={batch}.ckpt",
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    return noting.fed


def run(fit: Callable[..., Feed], library: str, link: Link, job: Job, state: str | None) -> tuple[Feed, str | None]:
    """Train to the link's step; what fed each step before it, and the checkpoint."""
    out = Path(tempfile.mkdtemp(dir=job.scratch))
    fed = fit(library, link, job, out, state)
    name = "stopped.ckpt" if link.way == "exception" else f"step={link.step}.ckpt"
    return {step: batch for step, batch in fed.items() if step < link.step}, str(next(iter(out.glob(name)), None))


def chain(fit: Callable[..., Feed], library: str, links: list[Link], job: Job) -> Result:
    """Compare a chain of runs with one that is never stopped."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if library == "litdata":
        loaders.write_litdata(job, "samples", chunk_size=16)
    last = Link(accumulate=links[0].accumulate)
    clock = Clock()
    whole, _ = run(fit, library, last, job, None)
    fed: Feed = {}
    state, problem = None, ""
    for link in [*links, last]:
        try:
            seen, state = run(fit, library, link, job, state)
        except Exception as error:  # noqa: BLE001 - a library that cannot resume is a finding
            problem = f"{type(error).__name__}: {error}"[:60]
            break
        fed |= seen
    lost, repeated, other = compare(whole, fed)
    text = f"{lost} / {repeated} / {other} of {len(whole)} {problem}"
    return {**clock.stop(len(whole)), "lost / repeated / other": text.strip()}


def compare(whole: Feed, resumed: Feed) -> tuple[int, int, int]:
    """Samples lost and repeated within their epochs, and steps of other samples."""
    lost = repeated = 0
    for epoch in range(EPOCHS):
        wanted, got = (
            Counter(sample for of, ids in feed.values() if of == epoch for sample in ids) for feed in (whole, resumed)
        )
        lost += (wanted - got).total()
        repeated += (got - wanted).total()
    nothing: tuple[int, list[int]] = (0, [])
    steps = {*whole, *resumed}
    other = sum(sorted(whole.get(k, nothing)[1]) != sorted(resumed.get(k, nothing)[1]) for k in steps)
    return lost, repeated, other


def groups_of(host: str, fit: Callable[..., Feed], chains: dict[str, list[Link]], *names: str) -> Iterator[Group]:
    """A group for each chain; the names of its cases choose the library, and the Python."""
    for title, links in chains.items():
        cases = {name: partial(chain, fit, name.split(",")[0], links) for name in names}
        yield Group(f"{host}: stopped {title}", cases, prepare)


if __name__ == "__main__":
    groups = [
        *groups_of("Lightning", fit_lightning, LIGHTNING, "ours", "mosaic", "litdata"),
        *groups_of("Composer", fit_composer, COMPOSER, "ours, under composer", "mosaic, under composer"),
    ]
    main(__doc__, groups)
