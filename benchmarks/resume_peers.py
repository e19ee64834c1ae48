"""Runs stopped and resumed under Lightning: samples lost and repeated, with the loader of each library.

python benchmarks/resume_peers.py [--only "twice in a row"] [--mosaic-python PATH]     each Python needs Lightning too

Each library is used as its own documentation says: its loader, with its state, handed to the trainer. A run trains 3
epochs of 176 samples in batches of 16. A chain of runs is compared, epoch by epoch, with the same library's own run
without a stop: "lost / repeated / other" are samples lost, samples repeated, and optimizer steps of other samples.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import loaders
import numpy as np
from frame import Clock, Group, Job, Result, main

NUM_SAMPLES = 176
BATCH = 16
EPOCHS = 3
NEVER = 1 << 30  # a step that no run reaches
Feed = dict[int, tuple[int, list[int]]]  # optimizer step -> its epoch, and its samples


@dataclass(frozen=True)
class Chain:
    """Runs, each of which resumes the one before it.

    Attributes:
        steps: Where they are stopped; the last run ends by itself.
        way: What saves: "steps", "epoch" (its end) or "exception" (in this step).
        accumulate: Batches of a step.
    """

    steps: tuple[int, ...]
    way: str = "steps"
    accumulate: int = 1


CHAINS = {
    "in the middle of an epoch": Chain((4,)),
    "twice in a row": Chain((4, 8)),
    "in the middle of the second epoch": Chain((15,)),
    "at the last batch of an epoch": Chain((11,)),
    "at the end of an epoch": Chain((11,), "epoch"),
    "by an exception in a step": Chain((5,), "exception"),
    "inside an accumulation of 4": Chain((2,), "exception", accumulate=4),
}


class StoppedError(Exception):
    """The exception in a step."""


def prepare(job: Job) -> None:
    from lightning_stream import MDSWriter

    columns = {"id": "int", "x": "ndarray:float32:4"}
    with MDSWriter(out=job.folder / "samples", columns=columns, size_limit=1000) as writer:
        for k in range(NUM_SAMPLES):
            writer.write({"id": k, "x": np.full(4, k / NUM_SAMPLES, np.float32)})


def data_of(library: str, job: Job) -> dict[str, Any]:
    """What `Trainer.fit` gets."""
    if library != "ours":
        return {"train_dataloaders": getattr(loaders, library)(job, "samples", BATCH)}
    from lightning_stream import StreamingDataModule

    train = {"remote": job.folder / "samples", "shuffle": True}
    return {"datamodule": StreamingDataModule(train=train, batch_size=BATCH)}


def fit(library: str, chain: Chain, stop: int, job: Job, state: Path | None) -> tuple[Feed, Path | None]:
    """Train until a step; what fed each step before it, and the checkpoint."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    fed: Feed = {}
    raises = chain.way == "exception"

    class Noting(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:  # noqa: ARG002
            step = self.trainer.global_step
            if raises and step == stop and (chain.accumulate == 1 or step in fed):
                raise StoppedError
            _, ids = fed.get(step, (0, []))
            fed[step] = (self.trainer.current_epoch, [*ids, *map(int, batch["id"])])
            return self.net(batch["x"]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    out = Path(tempfile.mkdtemp(dir=job.scratch))
    callbacks: list[Any] = []
    if raises:
        callbacks = [OnExceptionCheckpoint(str(out), "stopped")]
    elif stop < NEVER:
        when = {"every_n_train_steps": stop} if chain.way == "steps" else {"every_n_epochs": 1}
        callbacks = [ModelCheckpoint(str(out), filename="{step}", save_top_k=-1, **when)]
    trainer = pl.Trainer(
        max_epochs=EPOCHS, max_steps=-1 if raises or stop == NEVER else stop + 2,
        callbacks=callbacks, accumulate_grad_batches=chain.accumulate, enable_checkpointing=bool(callbacks),
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=out,
    )  # fmt: skip
    with suppress(StoppedError):
        trainer.fit(Noting(), ckpt_path=state, weights_only=False, **data_of(library, job))
    saved = out.glob("stopped.ckpt" if raises else f"step={stop}.ckpt")
    return {step: batch for step, batch in fed.items() if step < stop}, next(saved, None)


def compare(library: str, chain: Chain, job: Job) -> Result:
    """Compare a chain of runs with one that is never stopped."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if library == "litdata":
        loaders.write_litdata(job, "samples", chunk_size=16)
    clock = Clock()
    unbroken, _ = fit(library, chain, NEVER, job, None)
    fed: Feed = {}
    state = None
    problem = ""
    for stop in (*chain.steps, NEVER):
        try:
            seen, state = fit(library, chain, stop, job, state)
        except Exception as error:  # noqa: BLE001 - a library that cannot resume is a finding
            problem = f" {type(error).__name__}: {error}"[:60]
            break
        fed |= seen
    changes = " / ".join(map(str, changes_of(unbroken, fed)))
    return clock.stop(len(unbroken), **{"lost / repeated / other": f"{changes} of {len(unbroken)}{problem}"})


def changes_of(unbroken: Feed, resumed: Feed) -> tuple[int, int, int]:
    """Samples lost and repeated within their epochs, and steps of other samples."""
    wanted = counted(unbroken)
    got = counted(resumed)
    nothing: tuple[int, list[int]] = (0, [])
    steps = {*unbroken, *resumed}
    other = sum(sorted(unbroken.get(k, nothing)[1]) != sorted(resumed.get(k, nothing)[1]) for k in steps)
    return (wanted - got).total(), (got - wanted).total(), other


def counted(feed: Feed) -> Counter[tuple[int, int]]:
    """How often each epoch had each sample."""
    return Counter((epoch, sample) for epoch, ids in feed.values() for sample in ids)


if __name__ == "__main__":
    groups = []
    for title, chain in CHAINS.items():
        cases = {library: partial(compare, library, chain) for library in ("ours", "mosaic", "litdata")}
        groups.append(Group(f"stopped {title}", cases, prepare))
    main(__doc__, groups)
