"""The recipes' models and data under MosaicML Composer: the same streamed samples, another trainer."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer import ComposerModel, Trainer
from composer.utils import dist
from torch import Tensor
from torchmetrics import Metric

from lightning_stream.trainers.composer.spec import data_spec, name_node
from recipes.data.base import RecipeData
from recipes.models.base import Batch, LossOutput, RecipeModule
from recipes.report import RunFigures
from recipes.trainers.torch_loop import on_first_rank

_PRECISIONS = {"32-true": "fp32", "bf16-mixed": "amp_bf16", "16-mixed": "amp_fp16"}


@dataclass(kw_only=True)
class ComposerTrainer:
    """Trains a recipe's model on its data under Composer; see configs/trainer/composer.yaml for the settings."""

    folder: str
    max_epochs: int = 10
    max_steps: int = -1
    accelerator: str = "auto"
    precision: str = "32-true"
    val_check_interval: int | None = None
    save_interval: str = "20ba"
    num_kept: int = 2
    seed: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    logger: Any = None  # one of Lightning's; Composer's own loggers are in `options`

    def fit(self, model: RecipeModule, data: RecipeData, ckpt_path: str | None = None) -> RunFigures:
        """Train; the model's `history` holds the last metrics afterwards."""
        name_node()
        every = f"{self.val_check_interval}ba" if self.val_check_interval else "1ep"
        device = {"auto": None, "cuda": "gpu"}.get(self.accelerator, self.accelerator)
        options = {"device": device, "precision": _PRECISIONS.get(self.precision, self.precision), **self.options}
        if dist.get_world_size() > 1:
            dist.initialize_dist(options["device"])
        on_first_rank(data.prepare_data)
        model.build(data)
        workers: dict[str, Any] = {"num_workers": data.num_workers, "persistent_workers": data.num_workers != 0}
        sizes: dict[str, Any] = {"global_batch_size": data.global_batch_size, "tail": data.tail}
        train = data_spec(data.train_dataset, token_column=data.token_column, report=self.folder, **sizes, **workers)
        val = data_spec(data.val_dataset, batch_size=data.eval_batch_size, evaluation=True, **workers)
        optimizer, steps = model.optimizer(), sum(map(train.dataloader.num_batches, range(self.max_epochs)))
        is_limited = self.max_steps >= 0 and (self.max_epochs < 0 or self.max_steps < steps)
        steps = self.max_steps if is_limited else steps
        trainer = Trainer(
            model=_ComposerRecipe(model), train_dataloader=train, eval_dataloader=val, optimizers=optimizer,
            schedulers=model.schedule(optimizer, steps), step_schedulers_every_batch=True, eval_interval=every,
            max_duration=f"{self.max_steps}ba" if is_limited else f"{self.max_epochs}ep", load_path=ckpt_path,
            save_folder=str(Path(self.folder) / "composer"), save_interval=self.save_interval, save_overwrite=True,
            save_latest_filename="latest-rank{rank}.pt", save_num_checkpoints_to_keep=self.num_kept, seed=self.seed,
            **options,
        )  # fmt: skip
        state = trainer.state
        first, began = state.timestamp, time.perf_counter()
        trainer.fit()
        last, seconds = state.timestamp, time.perf_counter() - began
        found = (("train", state.train_metrics), ("val", state.eval_metrics["eval"]))
        computed = {
            f"{stage}/{name}": float(metric.compute()) for stage, metrics in found for name, metric in metrics.items()
        }
        model.history[max(0, int(last.epoch) - (int(last.batch_in_epoch) == 0))] = computed
        if self.logger:
            self.logger.log_metrics(computed, step=int(last.batch))
        trainer.close()
        return RunFigures(int(last.sample) - int(first.sample), int(last.batch) - int(first.batch), seconds)


class _ComposerRecipe(ComposerModel):
    """A recipe's model, built already, as Composer trains it."""

    def __init__(self, model: RecipeModule) -> None:
        super().__init__()
        self.model = model
        for stage in ("train", "val"):
            for name, metric in model.metrics_of(stage).items():
                metric.recipe_name = name  # survives the copies that Composer makes

    def forward(self, batch: Batch) -> LossOutput:
        return self.model.compute_loss(batch)

    def loss(self, outputs: LossOutput, _batch: Batch) -> Tensor:
        # Composer weighs the mean of a micro-batch by the samples that count.
        return outputs.losses.mean()

    def eval_forward(self, batch: Batch, outputs: LossOutput | None = None) -> LossOutput:
        return self.forward(batch) if outputs is None else outputs

    def update_metric(self, _batch: Batch, outputs: LossOutput, metric: Any) -> None:
        metric.update(*outputs.metric_arguments(metric.recipe_name))

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return self.model.metrics_of("train" if is_train else "val")
