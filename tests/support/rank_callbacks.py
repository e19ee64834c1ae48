"""What one rank of a run under Lightning adds to it; at the top of a module, so that it can be sent to a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from support.lightning_runs import Recorder
from support.worker import write


class WritesDown(Callback):
    """Writes what this rank saw, in whichever process it runs, however it ends."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        module = trainer.lightning_module
        parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
        weights = torch.cat([p.detach().flatten() for p in parameters]).tolist()
        content = {"steps": module.steps, "weights": weights, "evaluations": module.validations}
        write(self.out, trainer.global_rank, trainer.world_size, content)

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        self.on_train_batch_end(trainer)


class Ends(Callback):
    """Brings some ranks to an end before an optimizer step, by an exception or a signal; or stops the run early."""

    def __init__(self, ends: Sequence[Any], stop_at: int) -> None:
        self.ends = [*ends]
        self.stop_at = stop_at

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.ends and trainer.global_step == self.ends[0] and trainer.global_rank in self.ends[1]:
            self.ends[0] = -1
            if isinstance(self.ends[2], int):
                os.kill(os.getpid(), self.ends[2])
            else:
                raise RuntimeError(self.ends[2])

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step == self.stop_at


class Sharded(Recorder):
    """A `Recorder` whose parameters are sharded by FSDP2; its layers may be split over pairs of ranks before."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = self.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(self.net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.net, mesh=mesh["data_parallel"])
