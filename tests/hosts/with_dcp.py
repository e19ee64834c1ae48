"""The loader as a `Stateful` of torch.distributed.checkpoint."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
import torch.distributed.checkpoint.state_dict_saver  # noqa: F401  # slow to import, so before ranks are forked

from hosts.run import Run
from hosts.with_torch import loop


def dcp(run: Run) -> None:
    dist.init_process_group("gloo", rank=run.rank, world_size=run.world)
    loader = run.loader()
    if run.checkpoint is not None:
        checkpoints.load({"loader": loader}, checkpoint_id=run.checkpoint)
    loop(run, loader, lambda name: checkpoints.save({"loader": loader}, checkpoint_id=run.saves / name))
