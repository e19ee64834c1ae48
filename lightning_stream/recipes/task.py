"""What a recipe's data and model promise each other and the trainers, so that one `train.py` runs any of them.

A recipe brings a `TaskData` and a `TaskModel`. What learns from what is said there once; Lightning calls the hooks
below, and other trainers (`composer_model`, a plain loop) call the methods above them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_stream.errors import LightningStreamError
from lightning_stream.recipes.callbacks import batch_in_training
from lightning_stream.recipes.converted_set import TRAIN, VAL
from lightning_stream.recipes.evaluation import WIDTH, Tally
from lightning_stream.trainers.lightning.data_module import StreamingDataModule

Batch = Mapping[str, Any]
_Data = TypeVar("_Data", bound="TaskData")


class TaskData(StreamingDataModule):
    """Streamed data of a recipe: a ``train`` and a ``val`` dataset, converted by `prepare_data` where that is needed.

    A trainer without a Lightning trainer calls `prepare_data` once per node, and makes loaders from `datasets` with
    `global_batch_size`, `eval_batch_size`, `num_workers` and `tail`.

    Args:
        datasets: Arguments of the two datasets, see `split_datasets`.
        convert: Makes their shards, unless that was done.
        global_batch_size: Samples of an optimizer step over all devices.
        eval_batch_size: Samples per device in validation.
        num_workers: Processes per device that read.
        persistent_workers: Whether they live on from epoch to epoch.
        seed: Of what samples' transforms and the model's steps draw.
    """

    token_column: str = "input_ids"
    """Whose elements are tokens, for trainers that count them; a batch without it has none."""

    def __init__(
        self,
        datasets: Mapping[str, Mapping[str, Any]],
        convert: Callable[[], object],
        *,
        global_batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        persistent_workers: bool,
        seed: int,
    ) -> None:
        super().__init__(
            datasets[TRAIN],
            datasets[VAL],
            prepare=convert,
            global_batch_size=global_batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers and num_workers > 0,
            seed_steps=seed,
        )

    @property
    def place(self) -> str:
        """Folder or URL of the shards, for people."""
        raise NotImplementedError

    def notes(self, history: Mapping[int, Mapping[str, float]]) -> tuple[str, ...]:
        """Sentences to read first in a run's summary.

        Args:
            history: What the model has measured, see `TaskModel`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Judged:
    """What a model makes of a batch of n samples.

    Attributes:
        losses: float[n], with a gradient: training lowers their mean over the samples of an optimizer step.
        tally: int64[n, 4], see `evaluation.tally`.
    """

    losses: Tensor
    tally: Tensor


@dataclass(frozen=True)
class Shown:
    """A trained model at work.

    Attributes:
        files: What was drawn or written, by a word for it.
        notes: Sentences and samples for the summary.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class TaskModel(LightningModule):
    """A model of a recipe. It defines `build` and `judge`; `measures` and `show` where it has more to tell.

    Args:
        learning_rate: Its highest value.
        weight_decay: Of all weights with more than one dimension.
        warmup: Share of all steps in which the learning rate rises; it falls along a cosine after.

    Attributes:
        history: By epoch, the measures under ``train/...`` and ``val/...``.
    """

    shown: tuple[str, ...] = ("train/accuracy", "val/accuracy")
    """The measures that a summary lists."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    learns_from: type[TaskData] = TaskData
    """The data it can be built for: a config that pairs it with other data is refused."""

    def __init__(self, learning_rate: float, weight_decay: float, warmup: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.history: dict[int, dict[str, float]] = {}
        self._counted = {TRAIN: _nothing(), VAL: _nothing()}  # in the current pass, by this process

    def build(self, data: TaskData) -> None:
        """Make the weights, from this model's own seed, unless that was done. The data is converted by now."""
        raise NotImplementedError

    def judge(self, batch: Batch) -> Judged:
        """Look at a batch, with or without a gradient; gives each sample's own loss and counts."""
        raise NotImplementedError

    @staticmethod
    def measures(counted: Tally) -> dict[str, float]:
        """What is told of a pass over samples."""
        return {"accuracy": counted.accuracy, "loss": counted.loss}

    def show(self, data: TaskData, folder: Path) -> Shown:  # noqa: ARG002
        """Draw or write into `folder` what shows the trained model at work. Nothing, by default."""
        return Shown()

    # For any trainer

    def loss(self, batch: Batch, keep: Tensor, total: int) -> Tensor:
        """This micro-batch's part of the mean loss of its optimizer step; what it has of the measures is counted.

        Summed over ranks and micro-batches this is the mean over the step's samples, each counted once. A trainer that
        averages gradients over ranks or micro-batches multiplies by how many there are.

        Args:
            batch: n samples.
            keep: bool[n]; False where a sample only fills up and must not count.
            total: Samples of the step over all ranks, filler left out.
        """
        judged = self.judge(batch)
        self._count(TRAIN, judged.tally * keep[:, None])
        return (judged.losses * keep).sum() / total

    def evaluate(self, batch: Batch) -> None:
        """Count a batch of the val set."""
        self._count(VAL, self.judge(batch).tally)

    def end_pass(self, stage: str, epoch: int, over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Put what a pass measured into the history, and give it; nothing where no sample was counted.

        Args:
            stage: ``"train"`` or ``"val"``.
            epoch: Which.
            over_ranks: Sums an int64 tensor over all ranks; all of them call this.
        """
        counted = Tally.of(over_ranks(self._counted[stage].clone()))
        if not counted.total:
            return {}
        measured = {f"{stage}/{name}": value for name, value in self.measures(counted).items()}
        self.history.setdefault(epoch, {}).update(measured)
        return measured

    def begin_pass(self, stage: str) -> None:
        """Count from zero."""
        self._counted[stage] = _nothing()

    def optimizer(self) -> Optimizer:
        """AdamW over the weights."""
        return AdamW(decayed(self.parameters(), self.weight_decay), self.learning_rate, self.betas)

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """The learning rate of each step: it rises, then falls along a cosine, over all steps of the run."""
        total, warmup = max(1, total_steps), self.warmup
        return LambdaLR(optimizer, lambda step: rise_and_fall(step / total, warmup))

    def measured_state(self, over_ranks: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """What was measured so far, over all ranks, as plain values for a checkpoint; all ranks call this."""
        counts = {stage: over_ranks(counted.clone()).tolist() for stage, counted in self._counted.items()}
        return {"history": self.history, "counts": counts}

    def go_on_measuring(self, state: Mapping[str, Any], is_first_rank: bool) -> None:
        """Take up what a checkpoint holds; one rank takes the counts of all."""
        self.history = {int(epoch): dict(values) for epoch, values in state.get("history", {}).items()}
        counts = state.get("counts", {})
        for stage in self._counted:
            known = is_first_rank and len(counts.get(stage, ())) == WIDTH
            self._counted[stage] = torch.tensor(counts[stage]) if known else _nothing()

    def _count(self, stage: str, rows: Tensor) -> None:
        self._counted[stage] = self._counted[stage].to(rows.device) + rows.detach().sum(0)

    # Lightning's hooks

    def configure_model(self) -> None:
        """Make the weights."""
        self.build(self.trainer.datamodule)  # type: ignore[attr-defined]

    def training_step(self, batch: Batch, _batch_idx: int) -> Tensor:
        """The loss, times what Lightning divides by: ranks and accumulated micro-batches."""
        made_of = batch_in_training(self.trainer)
        parts = self.trainer.world_size * self.trainer.accumulate_grad_batches
        keep = torch.from_numpy(~made_of.filler).to(self.device)
        loss = self.loss(batch, keep, made_of.end - made_of.begin) * parts
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(keep))
        return loss

    def validation_step(self, batch: Batch, _batch_idx: int) -> None:
        """Count."""
        self.evaluate(batch)

    def configure_optimizers(self) -> Any:
        """The optimizer, and its learning rate by steps."""
        optimizer = self.optimizer()
        schedule = self.schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_epoch_start(self) -> None:
        """Count from zero; what a checkpoint at an epoch's very end left uncounted belongs to the one before."""
        if self.current_epoch:
            self.end_pass(TRAIN, self.current_epoch - 1, self._over_ranks)
        self.begin_pass(TRAIN)

    def on_validation_epoch_start(self) -> None:
        """Count from zero."""
        self.begin_pass(VAL)

    def on_validation_epoch_end(self) -> None:
        """Measure both passes, before any checkpoint of this validation is written."""
        if self.trainer.sanity_checking:
            return
        measured = {}
        for stage in (TRAIN, VAL):
            measured.update(self.end_pass(stage, self.current_epoch, self._over_ranks))
        measured.pop("train/loss", None)  # in the log this is each step's
        for name, value in measured.items():
            self.log(name, value, prog_bar=name in self.shown)

    def on_train_epoch_end(self) -> None:
        """Measure the training, also where this epoch had no validation."""
        self.end_pass(TRAIN, self.current_epoch, self._over_ranks)
        self.begin_pass(TRAIN)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what was measured."""
        checkpoint["measured"] = self.measured_state(self._over_ranks)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on measuring."""
        self.go_on_measuring(checkpoint.get("measured", {}), self.trainer.is_global_zero)

    def _over_ranks(self, counted: Tensor) -> Tensor:
        summed: Tensor = self.trainer.strategy.reduce(counted.to(self.device), reduce_op="sum")
        return summed


def fitting(data: TaskData, kind: type[_Data], advice: str) -> _Data:
    """The data, where it is of the kind that a model learns from.

    Raises:
        LightningStreamError: It is not; with the advice what to choose.
    """
    if not isinstance(data, kind):
        raise LightningStreamError(f"this model learns from {kind.__name__}; found {type(data).__name__}. {advice}")
    return data


def _nothing() -> Tensor:
    return torch.zeros(WIDTH, dtype=torch.int64)


def decayed(weights: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices shrink, all else does not."""
    all_weights = [weight for weight in weights if weight.requires_grad]
    matrices = [weight for weight in all_weights if weight.ndim > 1]
    others = [weight for weight in all_weights if weight.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def rise_and_fall(done: float, warmup: float) -> float:
    """The share of the highest learning rate once `done` of the run is over, both in [0, 1]."""
    if done < warmup:
        return 0.04 + 0.96 * done / warmup
    fallen = min(1.0, (done - warmup) / max(1e-9, 1 - warmup))
    return 0.002 + 0.998 * 0.5 * (1 + math.cos(math.pi * fallen))
