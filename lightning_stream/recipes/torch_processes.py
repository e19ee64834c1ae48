"""The processes of a plain torch run: which this is, its device, and what all of them do together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_stream.loading.distributed import detect_world
from lightning_stream.order import World


@dataclass(frozen=True)
class Processes:
    """This process among those that a launcher such as torchrun started; alone, where none did.

    Attributes:
        world: All of them.
        device: Where this one computes.
    """

    world: World
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.world.rank == 0

    @property
    def are_many(self) -> bool:
        """Whether there are others."""
        return self.world.num_ranks > 1

    def summed(self, counted: Tensor) -> Tensor:
        """The sum over all processes; all of them call this."""
        if not self.are_many:
            return counted
        there = counted.to(self.device, copy=True)
        dist.all_reduce(there)
        return there

    def any(self, here: bool) -> bool:
        """Whether it is so in any process; all of them call this."""
        return bool(self.summed(torch.tensor(int(here), dtype=torch.int64)).item())

    def wait_for_all(self) -> None:
        """Go on once all processes have come here."""
        self.any(False)

    def moved(self, batch: Any) -> Any:
        """A batch with its tensors on this process's device."""
        if isinstance(batch, Tensor):
            return batch.to(self.device, non_blocking=True)
        if isinstance(batch, Mapping):
            return {name: self.moved(value) for name, value in batch.items()}
        if isinstance(batch, (list, tuple)):
            return type(batch)(self.moved(value) for value in batch)
        return batch


@contextmanager
def started(accelerator: str) -> Iterator[Processes]:
    """Join the processes that a launcher started, for as long as the context lasts.

    Args:
        accelerator: ``"cpu"``, ``"gpu"``, or ``"auto"`` for a GPU where there is one.
    """
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    joins = detect_world().num_ranks > 1 and not dist.is_initialized()
    if joins and "MASTER_ADDR" not in os.environ:
        raise ValueError(
            "several processes must know where to meet: MASTER_ADDR is not set. Start them with torchrun (under SLURM: "
            "srun torchrun --nnodes ... --rdzv-endpoint ...)"
        )
    if joins:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield Processes(detect_world(), device)
    finally:
        if joins:
            dist.destroy_process_group()
