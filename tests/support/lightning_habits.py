"""What ordinary users do beside training: looks at batches, passes, validation on training data, reused loaders."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_stream import StreamingCallback, StreamingDataLoader, StreamingDataset
from lightning_stream.loading.collate import collate_samples
from support.lightning_runs import EPOCHS, NUM_SAMPLES, Run
from support.lightning_stops import StopsIn
from support.looks import KINDS, Look, use

HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_save_checkpoint", "on_train_end",
)  # fmt: skip
SOURCES = ("module", "bare", "callback", "hook")


@dataclass(frozen=True)
class EmptyBatches:
    """A `collate_fn` that gives None for a batch with one of these samples."""

    ids: tuple[int, ...]

    def __call__(self, samples: list[Any]) -> Any:
        return None if {sample["id"] for sample in samples} & set(self.ids) else collate_samples(samples)


@dataclass(frozen=True)
class Surroundings:
    """What holds for all runs of a chain: options of each, and how they accumulate, where that must not change."""

    data: str
    options: dict[str, Any]
    data_options: dict[str, Any]
    accumulate: int  # 0 where it may change
    num_steps: int


@dataclass(frozen=True)
class Habits:
    """What a user does beside training in one run.

    Attributes:
        data: How the trainer gets the data: one of `SOURCES`.
        looks: What is done in the trainer's hooks.
        before: What is done with the loader before the fit.
        after: What is done with it after the fit, also after an error.
        validates_on_train: Whether the training loader is the validation loader, too.
        keeps_loader: Whether a loader of a run before is trained on again, where it has the same settings.
        looks_first: Whether the user's callbacks come before those of ours.
        num_sanity_val_steps: As in Lightning's trainer.
    """

    data: str
    looks: tuple[Look, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    validates_on_train: bool
    keeps_loader: bool
    looks_first: bool
    num_sanity_val_steps: int

    def __str__(self) -> str:
        looks = ", ".join(map(str, self.looks))
        flags = [name for name in ("validates_on_train", "keeps_loader", "looks_first") if getattr(self, name)]
        return f"{self.data} [{looks}] before {self.before} after {self.after} {flags} {self.num_sanity_val_steps}"


def draw_surroundings(rng: random.Random) -> Surroundings:
    """What holds for a whole chain."""
    options: dict[str, Any] = {}
    data_options: dict[str, Any] = {}
    accumulate, steps_per_epoch = 0, 10
    if rng.random() < 0.3:
        options["limit_train_batches"] = steps_per_epoch = rng.choice((4, 5, 7, 10))
    if rng.random() < 0.3:
        accumulate = 1  # else an empty batch leaves a gradient over at an epoch's end, which no checkpoint holds
        options["accumulate_grad_batches"] = accumulate
        data_options["collate_fn"] = EmptyBatches(tuple(rng.sample(range(NUM_SAMPLES), rng.choice((1, 2)))))
    return Surroundings(rng.choice(SOURCES), options, data_options, accumulate, EPOCHS * steps_per_epoch)


def draw_habits(rng: random.Random, around: Surroundings, way: str) -> Habits:
    """What a user does in one run of it."""
    kinds = [
        kind for kind in (*KINDS, "validate") if way != "signal" or kind != "validate"
    ]  # a trainer inside takes the signals
    looks = tuple(
        Look(rng.choice(HOOKS), rng.randrange(around.num_steps), rng.choice(kinds)) for _ in range(rng.randrange(5))
    )
    return Habits(
        around.data, looks,
        before=tuple(rng.choices(("look", "three", "pass", "validate", "state"), k=rng.choice((0, 0, 1, 2)))),
        after=tuple(rng.choices(("look", "three", "pass", "validate", "state"), k=rng.choice((0, 0, 0, 1)))),
        validates_on_train=rng.random() < 0.3,
        keeps_loader=rng.random() < 0.5,
        looks_first=rng.random() < 0.5,
        num_sanity_val_steps=rng.choice((0, 2)),
    )  # fmt: skip


class Ordinary(StopsIn):
    """A recorder that takes empty batches in validation, and may bring the training loader itself."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch is not None and self.trainer.state.fn == "fit":
            super().validation_step(batch, batch_idx)


class OwnsLoader(Ordinary):
    """A module with a `train_dataloader` of its own, which makes a loader each time that it is asked."""

    make_loader: Any = None

    def train_dataloader(self) -> StreamingDataLoader:
        return self.make_loader()


class Looks(Callback):
    """Does what a user does with the training loader, in the trainer's hooks."""

    def __init__(self, looks: tuple[Look, ...]) -> None:
        self.looks, self.kept = list(looks), []

    def _pass(self, hook: str, trainer: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        for look in [one for one in self.looks if one.hook == hook and one.step <= trainer.global_step]:
            self.looks.remove(look)
            self.kept += use_or_validate(trainer.train_dataloader, look.kind)


def _hook(name: str) -> Any:
    def on(self: Looks, trainer: Any, *_: Any, **__: Any) -> None:
        self._pass(name, trainer)

    return on


for _name in HOOKS:
    setattr(Looks, _name, _hook(_name))


def use_or_validate(loader: Any, kind: str) -> list[Any]:
    """Do something with a training loader, or let another trainer validate on it; gives what is kept open."""
    if kind != "validate":
        return use(loader, kind)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
    trainer.validate(Ordinary(None), loader, verbose=False)
    return []


class OrdinaryRun(Run):
    """A run with a user's habits."""

    def __init__(
        self, shards: Path, folder: Path, ckpt: Path | None, *, habits: Habits, loaders: dict[Any, Any], **options: Any
    ) -> None:
        self.habits, self.loaders, self.options = habits, loaders, options
        callbacks = list(options.pop("callbacks"))
        ours = [StreamingCallback()] if habits.data == "callback" else []
        looks = Looks(habits.looks)
        options["callbacks"] = [looks, *ours, *callbacks] if habits.looks_first else [*ours, *callbacks, looks]
        kind = OwnsLoader if habits.data == "hook" else Ordinary
        stops = options.pop("stops", (None,))
        options["recorder"] = lambda: kind(*stops)
        super().__init__(shards, folder, ckpt, num_sanity_val_steps=habits.num_sanity_val_steps, **options)

    def fit(self, ckpt_path: Path | None) -> None:
        """Train, and do what the user does before and after."""
        if self.habits.data == "module":
            train, handed = self.data.train_dataloader(), {"datamodule": self.data}
        else:
            train = self._loader()
            handed = {"train_dataloaders": train, "val_dataloaders": self._validation(train)}
        if self.habits.data == "hook":
            del handed["train_dataloaders"]
            self.module.make_loader = self._made
        kept = [one for kind in self.habits.before for one in use_or_validate(train, kind)]
        try:
            self.trainer.fit(self.module, ckpt_path=ckpt_path, **handed)
        finally:
            kept += [one for kind in self.habits.after for one in use_or_validate(train, kind)]

    def _loader(self) -> StreamingDataLoader:
        settings = (self.data.as_world, self.trainer.accumulate_grad_batches, self.data.num_workers)
        if not self.habits.keeps_loader or settings not in self.loaders:
            self.loaders[settings] = self._made()
        return self.loaders[settings]

    def _made(self) -> StreamingDataLoader:
        return StreamingDataLoader(
            self.data.datasets["train"], global_batch_size=self.data.global_batch_size,
            world=self.data.as_world, tail=self.data.tail, accumulate=self.trainer.accumulate_grad_batches,
            num_workers=self.data.num_workers, collate_fn=self.options["data"].get("collate_fn"),
        )  # fmt: skip

    def _validation(self, train: StreamingDataLoader) -> StreamingDataLoader:
        if self.habits.validates_on_train:
            return train
        dataset = StreamingDataset(remote=str(self.data.datasets["train"].streams[0].remote))
        return StreamingDataLoader(dataset, 32, evaluation=True, world=self.data.as_world)
