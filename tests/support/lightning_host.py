"""Lightning's trainer as a host of the resume contract: what its users do, and how its runs end."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_stream import StreamingCallback, StreamingDataLoader, StreamingDataset, World
from support import lightning_runs
from support.chains import Chain, Link, User, use
from support.lightning_runs import QUIET, Recorder, Run, keep_all, pl, saved_on_exception
from support.resume_contract import Stopped, raise_stopped


class LightningHost:
    """See `support.resume_contract.Host`, and `support.chains` for the rest."""

    name = "Lightning"
    simulates_ranks = passes_over_empty_batches = True
    sources = ("module", "bare", "callback", "hook")
    ways = ("max_steps", "killed", "exception", "signal", "clock", "epoch end", "validation")
    stops_in = ("training_step", "training_step", "on_train_batch_end", "on_before_zero_grad")
    hooks = (
        "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
        "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
        "on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_save_checkpoint", "on_train_end",
    )  # fmt: skip
    uses = ("validate",)
    limits = (4, 5, 7, 10)
    run = Run
    checkpoints = staticmethod(lightning_runs.checkpoints)

    def is_due(self, evaluated_at: int, step: int, options: Mapping[str, Any]) -> bool:
        return evaluated_at >= step

    def until(self, step: int) -> dict[str, Any]:
        return {"max_steps": step}

    def saves_epochs(self, folder: Path) -> dict[str, Any]:
        return {"callbacks": [keep_all(folder, every_n_epochs=1, save_on_train_epoch_end=True)]}

    def draw_options(self, rng: random.Random) -> dict[str, Any]:
        """Options of the trainer."""
        return {
            "val_check_interval": rng.choice((1.0, 0.5)),
            "reload_dataloaders_every_n_epochs": rng.choice((0, 0, 1)),
            "num_sanity_val_steps": rng.choice((0, 2)),
        }

    def run_link(
        self, shards: Path, folder: Path, chain: Chain, link: Link, world: World, checkpoint: Path | None, loaders: Any
    ) -> Run:
        """One run of a chain, on one of its ranks."""
        ending = _ending(link, folder)
        callbacks = [StreamingCallback()] if link.source == "callback" else []
        callbacks += ending.pop("callbacks", [])
        looks = Looks(User(link.looks, use=use_or_validate))
        limit = {} if chain.limit is None else {"limit_train_batches": chain.limit * link.accumulate}
        kind: Any = OwnsLoader if link.source == "hook" else Ordinary
        return UserRun(
            shards, folder, checkpoint, link=link, chain=chain, loaders=loaders, world=world, dataset=chain.dataset,
            data={**chain.loading, "num_workers": link.workers}, accumulate_grad_batches=link.accumulate, recorder=kind,
            callbacks=[looks, *callbacks] if link.looks_first else [*callbacks, looks],
            **link.options, **limit, **ending,
        )  # fmt: skip


def _ending(link: Link, folder: Path) -> dict[str, Any]:
    at = link.at
    if link.way == "end" or at is None:
        return {}
    if link.way in ("exception", "signal"):
        act: Callable[[], None] = raise_stopped
        if link.way == "signal":
            act = lambda: signal.raise_signal(signal.SIGTERM)  # noqa: E731
        return {
            "module": {"at": at, "act": act}, "raises": (Stopped, SystemExit),
            "callbacks": [saved_on_exception(folder / "ckpt")],
        }  # fmt: skip
    when: dict[str, Any] = {
        "max_steps": {"every_n_train_steps": 1}, "killed": {"every_n_train_steps": 3},
        "clock": {"train_time_interval": timedelta(microseconds=1)},
        "epoch end": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        "validation": {"save_on_train_epoch_end": False},
    }[link.way]  # fmt: skip
    return {"callbacks": [keep_all(folder, **when)], "max_steps": at.step + (2 if link.way == "killed" else 0)}


class Ordinary(Recorder):
    """A recorder that takes empty batches in validation, and is validated by other trainers too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch is not None and self.trainer.state.fn == "fit":
            super().validation_step(batch, batch_idx)


class OwnsLoader(Ordinary):
    """A module with a `train_dataloader` of its own, which makes a loader each time that it is asked."""

    make_loader: Any = None

    def train_dataloader(self) -> StreamingDataLoader:
        return self.make_loader()


class Looks(pl.Callback):
    """Lets a user act in the trainer's hooks."""

    def __init__(self, user: User) -> None:
        self.user = user


def _hook(name: str) -> Callable[..., None]:
    def on(self: Looks, trainer: Any, *_: Any, **__: Any) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self.user.reaches(name, trainer.global_step, trainer.train_dataloader)

    return on


for _name in LightningHost.hooks:
    setattr(Looks, _name, _hook(_name))


def use_or_validate(loader: Any, kind: str) -> list[Any]:
    """Do something with a training loader, or let another trainer validate on it; gives what is kept open."""
    if kind != "validate":
        return use(loader, kind)
    if len(loader):  # a schedule's data may be over
        pl.Trainer(**QUIET).validate(Ordinary(), loader, verbose=False)
    return []


class UserRun(Run):
    """A run by a user who hands the data over in one of Lightning's ways, and does what a link says."""

    def __init__(self, *places: Any, link: Link, chain: Chain, loaders: dict[Any, Any], **options: Any) -> None:
        self.link, self.chain, self.loaders, self.shards = link, chain, loaders, places[0]
        super().__init__(*places, **options)

    def fit(self, ckpt_path: Path | None) -> None:
        """Train, and do what the user does before and after."""
        if self.link.source == "module":
            train, handed = self.data.train_dataloader(), {"datamodule": self.data}
        else:
            train = self._loader()
            handed = {"train_dataloaders": train, "val_dataloaders": self._validation(train)}
        if self.link.source == "hook":
            del handed["train_dataloaders"]
            self.module.make_loader = self._made
        kept = [one for kind in self.link.before for one in use_or_validate(train, kind)]
        try:
            self.trainer.fit(self.module, ckpt_path=ckpt_path, **handed)
        finally:
            kept += [one for kind in self.link.after for one in use_or_validate(train, kind)]

    def _loader(self) -> StreamingDataLoader:
        settings = (self.data.as_world, self.link.accumulate, self.link.workers)
        if not self.link.keeps_loader or settings not in self.loaders:
            self.loaders[settings] = self._made()
        return self.loaders[settings]

    def _made(self) -> StreamingDataLoader:
        settings = {"accumulate": self.link.accumulate, "num_workers": self.link.workers}
        return self.chain.loader(self.shards, world=self.data.as_world, **settings)

    def _validation(self, train: StreamingDataLoader) -> StreamingDataLoader:
        if self.link.evaluates_on_train:
            return train
        return StreamingDataLoader(StreamingDataset(remote=self.shards), 32, evaluation=True, world=self.data.as_world)


HOST = LightningHost()
