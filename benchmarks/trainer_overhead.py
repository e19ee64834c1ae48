"""What following the trainer adds to a training step over a bare DataLoader with the same batches.

python benchmarks/trainer_overhead.py [--steps 3000] [--composer-python PATH]

"hooks us": processor time of the training thread in the callbacks of this package, per step, the median; timed in a
run. "step us": CPU of the whole run per step, which has the loader and its measuring in it; noisier.
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
LIGHTNING_HOOKS = ("on_train_batch_start", "on_train_batch_end")
COMPOSER_HOOKS = ("batch_start", "batch_end", "batch_checkpoint", "before_dataloader")


def prepare(job: Job) -> None:
    from lightning_stream import MDSWriter

    with MDSWriter(out=job.folder / "ids", columns={"id": "int"}) as writer:
        for number in range(job.sizes.steps * BATCH):
            writer.write({"id": number})


def bare_loader(job: Job) -> Any:
    import torch
    from torch.utils.data import DataLoader

    batches: Any = [{"id": torch.arange(BATCH)} for _ in range(job.sizes.steps)]
    return DataLoader(batches, batch_size=None)


def time_hooks(callbacks: Sequence[Any], names: Sequence[str]) -> dict[str, list[float]]:
    """Time these methods of the callbacks of this package from now on: microseconds of each call, by name."""
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, original: Callable[..., None]) -> Callable[..., None]:
        def hook(*arguments: Any, **named: Any) -> None:
            began = time.thread_time()  # other threads and processes do not count
            original(*arguments, **named)
            spent[name].append(1e6 * (time.thread_time() - began))

        return hook

    for callback in callbacks:
        if type(callback).__module__.startswith("lightning_stream"):
            for name in names:
                setattr(callback, name, timed(f"{type(callback).__name__}.{name}", getattr(callback, name)))
    return spent


def result_of(clock: Clock, job: Job, spent: dict[str, list[float]]) -> Result:
    result = clock.stop(job.sizes.steps)
    hooks = sum(map(statistics.median, spent.values()))
    return {**result, "hooks us": hooks, "step us": 1e6 * result["cpu_s"] / job.sizes.steps}


def lightning(job: Job, options: dict[str, Any] | None) -> Result:
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
            self.spent = time_hooks(self.trainer.callbacks, LIGHTNING_HOOKS)
            self.clock = Clock()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    module = Nothing()
    trainer = pl.Trainer(
        max_steps=job.sizes.steps, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=job.scratch,
    )  # fmt: skip
    if options is None:
        trainer.fit(module, bare_loader(job))
    else:
        trainer.fit(module, datamodule=StreamingDataModule(train=job.folder / "ids", batch_size=BATCH, **options))
    return result_of(module.clock, job, module.spent)


def composer(job: Job, options: dict[str, Any] | None) -> Result:
    import torch
    from composer import ComposerModel, DataSpec, Trainer

    from lightning_stream import data_spec

    class Nothing(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.spent: dict[str, list[float]] | None = None

        def forward(self, batch: Any) -> torch.Tensor:  # noqa: ARG002
            return self.weight.sum()

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:  # noqa: ARG002
            if self.spent is None:  # the data's callback has joined by now
                self.spent = time_hooks(trainer.state.callbacks, COMPOSER_HOOKS)
            return outputs

    warnings.simplefilter("ignore")
    if options is None:
        count = {"get_num_samples_in_batch": lambda _: BATCH, "split_batch": lambda batch, _: [batch]}
        data = DataSpec(bare_loader(job), **count)
    else:
        data = data_spec(remote=job.folder / "ids", batch_size=BATCH, **options)
    model = Nothing()
    trainer = Trainer(
        model=model, train_dataloader=data, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), device="cpu",
        max_duration=f"{job.sizes.steps}ba", progress_bar=False, device_train_microbatch_size=BATCH,
    )  # fmt: skip
    clock = Clock()
    trainer.fit()
    result = result_of(clock, job, model.spent or {})
    trainer.close()
    return result


def cases(host: Callable[[Job, Any], Result], suffix: str = "") -> dict[str, Any]:
    settings: dict[str, dict[str, Any] | None] = {
        "ours, metrics and report": {},
        "ours, metrics": {"report": False},
        "ours, position alone": {"report": False, "monitor": False},
        "bare DataLoader": None,
    }
    return {f"{name}{suffix}": partial(host, options=options) for name, options in settings.items()}


if __name__ == "__main__":
    groups = [
        Group("Lightning", cases(lightning), prepare),
        Group("Composer", cases(composer, ", under composer"), prepare),
    ]
    main(__doc__, groups, steps=(3000, 20))
