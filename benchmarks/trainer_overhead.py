"""What following Lightning adds to a training step over a bare DataLoader with the same batches.

python benchmarks/trainer_overhead.py [--steps 3000]

"hooks us": processor time of the training thread in the callbacks of this package, per step, the median; timed in a
run. "per CPU-s": steps of the whole run, which has the loader and its measuring in it; noisier.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from frame import Clock, Group, Job, Result, main

BATCH = 16
HOOKS = ("on_train_batch_start", "on_train_batch_end")


def prepare(job: Job) -> None:
    from lightning_stream import MDSWriter

    with MDSWriter(out=job.folder / "ids", columns={"id": "int"}) as writer:
        for k in range(job.sizes.steps * BATCH):
            writer.write({"id": k})


def time_hooks(callbacks: Sequence[Any]) -> dict[str, list[float]]:
    """Time the hooks of this package's callbacks from now on: microseconds of each call, by name."""
    elapsed_us: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, original: Callable[..., None]) -> Callable[..., None]:
        def hook(*arguments: Any, **named: Any) -> None:
            began = time.thread_time()  # other threads and processes do not count
            original(*arguments, **named)
            elapsed_us[name].append(1e6 * (time.thread_time() - began))

        return hook

    for callback in callbacks:
        if type(callback).__module__.startswith("lightning_stream"):
            for name in HOOKS:
                setattr(callback, name, timed(f"{type(callback).__name__}.{name}", getattr(callback, name)))
    return elapsed_us


def train(job: Job, options: dict[str, Any] | None) -> Result:
    import lightning.pytorch as pl
    import torch

    from lightning_stream import StreamingDataModule

    class Nothing(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
            return self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_start(self) -> None:  # after Lightning has added the callbacks of the data
            self.elapsed_us = time_hooks(self.trainer.callbacks)
            self.clock = Clock()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    module = Nothing()
    trainer = pl.Trainer(
        max_steps=job.sizes.steps, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=job.scratch,
    )  # fmt: skip
    if options is None:
        batches: Any = [{"id": torch.arange(BATCH)} for _ in range(job.sizes.steps)]
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    else:
        trainer.fit(module, datamodule=StreamingDataModule(train=job.folder / "ids", batch_size=BATCH, **options))
    result = module.clock.stop(job.sizes.steps)
    return {**result, "hooks us": sum(map(statistics.median, module.elapsed_us.values()))}


if __name__ == "__main__":
    settings: dict[str, dict[str, Any] | None] = {
        "ours, metrics and report": {},
        "ours, metrics": {"report": False},
        "ours, position alone": {"report": False, "monitor": False},
        "bare DataLoader": None,
    }
    cases = {name: partial(train, options=options) for name, options in settings.items()}
    main(__doc__, [Group("Lightning", cases, prepare)], steps=(3000, 20))
