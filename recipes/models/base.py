"""What all models of the recipes share: exact losses and metrics on any number of devices, and the optimizer."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric

from recipes.data.base import RecipeData

Batch = Mapping[str, Any]
_UNIT = 2**24  # losses are added as whole numbers of this part of 1: finer than float32 near 1; 5e11 fit into int64


@dataclass(frozen=True)
class LossOutput:
    """What a model makes of a batch of n samples."""

    losses: Tensor  # float[n], with gradient: training lowers their mean over the samples of an optimizer step
    updates: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)  # by metric, the arguments of its `update`

    def metric_arguments(self, name: str) -> tuple[Tensor, ...]:
        """What updates the metric of this name, without a gradient."""
        return tuple(value.detach() for value in {"loss": (self.losses,), **self.updates}[name])


class ExactMean(Metric):
    """A weighted mean that is the same to the last bit on any number of devices: it adds whole numbers of 2**-24."""

    full_state_update = False
    sums: Tensor  # int64[3]: values in parts of 1, weights, weights of values that are not finite

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(3, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Add values, float[n, ...], each counted by its weight, int64 or bool of the same shape; by default, 1."""
        values = values.float()
        weights = torch.ones_like(values, dtype=torch.int64) if weights is None else weights.long()
        finite = values.isfinite()
        units = (torch.where(finite, values, 0.0) * _UNIT).round().long()
        self.sums += torch.stack([(units * weights).sum(), weights.sum(), (~finite * weights).sum()])

    def compute(self) -> Tensor:
        """The mean, float64; not a number where one value was none, or nothing was added."""
        units, weight, not_finite = self.sums.tolist()
        mean = math.nan if not_finite or not weight else units / weight / _UNIT
        return torch.tensor(mean, dtype=torch.float64)


class RecipeModule(LightningModule):
    """A model of a recipe. A subclass defines `make_network`, `compute_loss`, `make_metrics` and `show`."""

    data_type: type[RecipeData] = RecipeData  # what it learns from: a config that pairs it with other data is refused
    shown: tuple[str, ...] = ("train/accuracy", "val/accuracy")  # the metrics in the summary's table
    betas: tuple[float, float] = (0.9, 0.999)  # of AdamW

    def __init__(
        self, learning_rate: float = 0.002, weight_decay: float = 0.01, warmup: float = 0.1, seed: int = 1
    ) -> None:
        super().__init__()
        self.learning_rate, self.weight_decay, self.warmup, self.seed = learning_rate, weight_decay, warmup, seed
        self.history: dict[int, dict[str, float]] = {}  # by epoch, the metrics, under train/... and val/...
        self.metrics = nn.ModuleDict({f"{stage}_": nn.ModuleDict(self.make_metrics()) for stage in ("train", "val")})
        self.network: Any = None

    def make_network(self, data: Any) -> nn.Module:
        """A network with random weights for this data, which is converted by now."""
        raise NotImplementedError

    def compute_loss(self, batch: Batch) -> LossOutput:
        """Compute each sample's loss, and what updates the metrics."""
        raise NotImplementedError

    def make_metrics(self) -> dict[str, Metric]:
        """New metrics of one pass, by name. A constructor's attributes are not there yet."""
        return {"accuracy": ExactMean(), "loss": ExactMean()}

    def describe(self, data: Any) -> str:  # noqa: ARG002
        """The result in one sentence, for the summary."""
        latest = {name: value for _, values in sorted(self.history.items()) for name, value in values.items()}
        found = [f"{name} {latest[name]:.4g}" for name in self.shown if name in latest]
        return f"At the end: {', '.join(found)}." if found else "No epoch was completed or validated."

    def show(self, data: Any, folder: Path) -> dict[str, Path]:  # noqa: ARG002
        """Write files into `folder` that show the trained model at work; their paths, by a word for each."""
        return {}

    # Used by every trainer

    def build(self, data: RecipeData) -> None:
        """Make the network, unless that was done. Its weights depend on the seed alone."""
        if self.network is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                self.network = self.make_network(data)

    def training_loss(self, batch: Batch, keep: Tensor, total: int) -> Tensor:
        """This micro-batch's part of the mean loss of its optimizer step; also updates the training metrics.

        The sum over ranks and micro-batches is the mean over the step's samples, each counted once. A trainer that
        averages gradients over ranks or micro-batches multiplies by their number. `keep`, bool[n], is False where a
        sample is padding; `total` counts the samples of the step over all ranks.
        """
        output = self.compute_loss(batch)
        self.update_metrics("train", output, keep)
        return (output.losses * keep).sum() / total

    def evaluate(self, batch: Batch) -> None:
        self.update_metrics("val", self.compute_loss(batch))

    def update_metrics(self, stage: str, output: LossOutput, keep: Tensor | None = None) -> None:
        """Update the metrics of a stage with the samples that count."""
        for name, metric in self.metrics_of(stage).items():
            metric.update(*(value if keep is None else value[keep] for value in output.metric_arguments(name)))

    def metrics_of(self, stage: str) -> dict[str, Metric]:
        """The metrics of ``train`` or ``val``, by name."""
        found: Any = self.metrics[f"{stage}_"]
        return dict(found.items())

    def end_pass(self, stage: str, epoch: int) -> dict[str, float]:
        """The metrics of a pass over all ranks, which all call this; into the history. Nothing without samples."""
        with warnings.catch_warnings():  # a rank without samples must take part in the sum all the same
            warnings.filterwarnings("ignore", ".*``compute`` method of metric.*before the ``update`` method.*")
            found = {f"{stage}/{name}": float(metric.compute()) for name, metric in self.metrics_of(stage).items()}
        for metric in self.metrics_of(stage).values():
            metric.reset()
        if all(math.isnan(value) for value in found.values()):
            return {}
        self.history.setdefault(epoch, {}).update(found)
        return found

    def optimizer(self) -> Optimizer:
        """AdamW; biases and norms are not decayed."""
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        decayed = {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": self.weight_decay}
        others = {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0}
        return AdamW([decayed, others], self.learning_rate, self.betas)

    def schedule(self, optimizer: Optimizer, total_steps: float) -> LambdaLR:
        """Linear warmup, then cosine decay, over the optimizer steps of the run; constant where these are inf."""

        def multiplier(step: int) -> float:
            done = step / max(1, total_steps)
            if math.isinf(total_steps):  # a run that max_time alone limits
                return 1.0
            if done < self.warmup:
                return 0.04 + 0.96 * done / self.warmup
            fallen = min(1.0, (done - self.warmup) / max(1e-9, 1 - self.warmup))
            return 0.002 + 0.998 * 0.5 * (1 + math.cos(math.pi * fallen))

        return LambdaLR(optimizer, multiplier)

    def metric_state(self) -> dict[str, Any]:
        """History and unfinished metrics over all ranks, as plain values for a checkpoint. All ranks call this."""
        unfinished: dict[str, dict[str, Any]] = {}
        for name, metric in self.metrics_of("train").items():
            with metric.sync_context():
                unfinished[name] = {key: torch.as_tensor(value).tolist() for key, value in metric.metric_state.items()}
        return {"history": {epoch: dict(values) for epoch, values in self.history.items()}, "unfinished": unfinished}

    def load_metric_state(self, state: Mapping[str, Any], is_first_rank: bool) -> None:
        """Continue from a checkpoint's metrics; the first rank takes the sums of all."""
        self.history = {int(epoch): dict(values) for epoch, values in state.get("history", {}).items()}
        for name, metric in self.metrics_of("train").items():
            metric.reset()
            held = state.get("unfinished", {}).get(name, {}) if is_first_rank else {}
            for key, value in held.items():
                setattr(metric, key, torch.as_tensor(value, device=metric.device))

    # Lightning's hooks

    def configure_model(self) -> None:
        trainer: Any = self.trainer
        self.build(trainer.datamodule)

    def training_step(self, batch: Batch, _batch_idx: int) -> Tensor:
        """The loss, times what Lightning divides by: ranks and accumulated micro-batches."""
        trainer: Any = self.trainer
        info = trainer.train_dataloader.last_batch
        keep = torch.from_numpy(~info.filler).to(self.device)
        parts = trainer.world_size * trainer.accumulate_grad_batches
        loss = self.training_loss(batch, keep, info.end - info.begin) * parts
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(keep), sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, _batch_idx: int) -> None:
        self.evaluate(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = self.schedule(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_epoch_start(self) -> None:
        """Note what a checkpoint at an epoch's very end had not computed yet: it belongs to the epoch before."""
        if self.current_epoch:
            self.end_pass("train", self.current_epoch - 1)

    def on_validation_epoch_start(self) -> None:
        for metric in self.metrics_of("val").values():
            metric.reset()  # Lightning's check before training has updated it

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            computed = {**self.end_pass("train", self.current_epoch), **self.end_pass("val", self.current_epoch)}
            computed.pop("train/loss", None)  # in the log this is each step's
            for name, value in computed.items():
                self.log(name, value, prog_bar=name in self.shown)

    def on_train_epoch_end(self) -> None:
        self.end_pass("train", self.current_epoch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["recipe_metrics"] = self.metric_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.load_metric_state(checkpoint.get("recipe_metrics", {}), self.trainer.is_global_zero)
