"""Composer's trainer as a host of the resume contract: what its users do, and how its runs end."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from composer import Callback, DataSpec
from torch.utils.data import DataLoader

from lightning_stream import StreamingDataset, World, data_spec
from support import composer_runs
from support.chains import Chain, Link, User, use
from support.composer_runs import Run
from support.resume_contract import At, Stopped


class ComposerHost:
    """See `support.resume_contract.Host`, and `support.chains` for the rest."""

    name = "Composer"
    simulates_ranks = passes_over_empty_batches = False  # its clock adds up what all ranks count
    sources = ("spec", "bare", "DataSpec", "torch")
    ways = ("max_steps", "exception", "killed")
    stops_in = ("batch_start", "after_forward", "after_backward", "batch_end", "epoch_start")
    hooks = (
        "fit_start", "epoch_start", "before_dataloader", "after_dataloader", "batch_start", "after_forward",
        "after_loss", "after_backward", "batch_end", "batch_checkpoint", "epoch_end", "epoch_checkpoint", "eval_start",
        "eval_end", "fit_end",
    )  # fmt: skip
    uses = ()
    limits = (1, 4, 6)
    run = Run

    def checkpoints(self, folder: Path) -> list[tuple[int, Path]]:
        return list(composer_runs.checkpoints(folder).items())

    def is_due(self, evaluated_at: int, step: int, options: Mapping[str, Any]) -> bool:
        # An evaluation at an epoch's end comes after the checkpoint of its last batch.
        return evaluated_at >= step if options.get("evaluates") == "1ep" else evaluated_at > step

    def until(self, step: int) -> dict[str, Any]:
        return {"max_duration": f"{step}ba"}

    def saves_epochs(self, folder: Path) -> dict[str, Any]:
        return {"save_interval": "1ep"}

    def draw_options(self, rng: random.Random) -> dict[str, Any]:
        """Options of the trainer."""
        return {
            "save_interval": rng.choice(("1ba", "1ba", "3ba", "1ep")),
            "device_train_microbatch_size": rng.choice((16, 16, 5)),
        }

    def run_link(
        self, shards: Path, folder: Path, chain: Chain, link: Link, world: World, checkpoint: Path | None, loaders: Any
    ) -> Run:
        """One run of a chain."""
        key = (link.source, link.workers)
        is_new_run_of_torch = checkpoint is None and link.source == "torch"  # its dataset keeps counting epochs
        if not link.keeps_loader or key not in loaders or is_new_run_of_torch:
            loaders[key] = made(shards, link, chain)
        data = loaders[key]
        loader = getattr(data, "dataloader", data)
        kept = [one for kind in link.before for one in use(loader, kind)]
        options = {**link.options, "train_subset_num_batches": chain.limit or -1}
        if link.evaluates_on_train:
            options |= {"eval_dataloader": data, "eval_interval": "4ba"}
        stop: At | None = None
        if link.way == "exception":
            stop = link.at
        elif link.at is not None:
            options |= self.until(link.at.step + 2 * (link.way == "killed"))
        looks = Looks(User(link.looks, stop))
        run = Run(shards, folder, checkpoint, spec=data, callbacks=[looks], raises=Stopped, **options)
        kept += [one for kind in link.after for one in use(loader, kind)]
        return run


def made(shards: Path, link: Link, chain: Chain) -> Any:
    """What a trainer takes its data from."""
    if link.source == "bare":
        return chain.loader(shards, num_workers=link.workers)
    if link.source == "DataSpec":
        return DataSpec(chain.loader(shards, num_workers=link.workers))
    arguments = {"remote": shards, "shuffle": True, **chain.dataset}
    if link.source == "torch":
        return DataLoader(StreamingDataset(**arguments, batch_size=16), 16, num_workers=link.workers)
    loading = {"global_batch_size": 16, **chain.loading, "num_workers": link.workers}
    return data_spec(StreamingDataset(**arguments), **loading)


class Looks(Callback):
    """Lets a user act in the trainer's hooks."""

    def __init__(self, user: User) -> None:
        self.user = user


def _hook(name: str) -> Callable[..., None]:
    def on(self: Looks, state: Any, logger: Any) -> None:
        self.user.reaches(name, int(state.timestamp.batch), state.train_dataloader)

    return on


for _name in ComposerHost.hooks:
    setattr(Looks, _name, _hook(_name))
HOST = ComposerHost()
