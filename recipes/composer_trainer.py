"""A LightningModule on streamed data under MosaicML Composer, which resumes on any number of devices."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer import Callback, ComposerModel, Trainer
from composer.utils import dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_stream import data_spec
from lightning_stream.loading.loader_arguments import WorkerOptions, options_of
from lightning_stream.trainers.lightning.data_module import StreamingDataModule
from lightning_stream.trainers.options import RunOptions
from recipes.torch_loop import ModelTrainer, optimization

_PRECISIONS = {"32-true": "fp32", "bf16-mixed": "amp_bf16", "16-mixed": "amp_fp16"}


class ComposerTrainer(ModelTrainer, Callback):
    """Trains under Composer; ``configs/trainer/composer.yaml`` describes the settings, see `ModelTrainer` for most."""

    def __init__(
        self, *, accelerator: str = "auto", precision: str = "32-true", save_interval: str = "20ba",
        options: Mapping[str, Any] | None = None, **run: Any,
    ) -> None:  # fmt: skip
        super().__init__(**run)
        self.save_interval = save_interval
        device = {"auto": None, "cuda": "gpu"}.get(accelerator, accelerator)
        self.options = {"device": device, "precision": _PRECISIONS.get(precision, precision), **(options or {})}

    def fit(self, model: Any, datamodule: StreamingDataModule, ckpt_path: str | None = None) -> None:
        """Train, and evaluate after each epoch."""
        if self.world_size > 1:
            dist.initialize_dist(self.options["device"], timeout=86400.0)
        self.join(model, datamodule)
        run = {"seed_steps": self.seed, "report": self.path.parents[1], **options_of(RunOptions, datamodule.options)}
        workers = options_of(WorkerOptions, datamodule.options)
        loading = {"world": datamodule.world(), "pin_memory": datamodule.pin_memory, **workers}
        train = data_spec(
            datamodule.datasets["train"], global_batch_size=datamodule.global_batch_size,
            batch_size=datamodule.batch_size, tail=datamodule.tail, on_mismatch=datamodule.on_mismatch,
            **run, **loading,
        )  # fmt: skip
        val = None
        if datamodule.datasets["val"] is not None:
            loading |= {"num_workers": datamodule.eval_num_workers}
            size = datamodule.val_dataloader().batch_size
            val = data_spec(datamodule.datasets["val"], batch_size=size, evaluation=True, **loading)
        self.plan(train.dataloader)
        made = optimization(model)
        trainer = Trainer(
            model=_ComposerModel(model), train_dataloader=train, eval_dataloader=val, optimizers=made["optimizer"],
            schedulers=made.get("schedule"), step_schedulers_every_batch=True, load_path=ckpt_path,
            max_duration=f"{self.estimated_stepping_batches}ba", save_folder=str(self.path.parent),
            save_latest_filename="last.ckpt", save_interval=self.save_interval, save_overwrite=True,
            save_num_checkpoints_to_keep=2, seed=self.seed, callbacks=[self], **self.options,
        )  # fmt: skip
        self.plan(train.dataloader, int(trainer.state.timestamp.batch))
        trainer.state.max_duration = f"{self.estimated_stepping_batches}ba"  # it may continue with another batch size
        trainer.fit()
        trainer.close()

    def save_checkpoint(self, path: str | Path) -> None:
        """Nothing: Composer has saved one at the end of `fit`."""

    def eval_start(self, *_: Any) -> None:
        """Forget what was logged in training: Composer logs its loss itself."""
        self.logged.means()

    def eval_end(self, _state: Any, logger: Any) -> None:
        """Log the means over the samples of all processes."""
        self.callback_metrics = self.logged.means()
        logger.log_metrics(self.callback_metrics)


class _ComposerModel(ComposerModel):
    """A LightningModule as Composer trains it."""

    def __init__(self, model: LightningModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        loss: Any = self.model.training_step(batch, 0)
        return loss

    def loss(self, outputs: Tensor, _batch: Any) -> Tensor:
        return outputs

    def eval_forward(self, batch: Any, _outputs: Any = None) -> Any:
        return self.model.validation_step(batch, 0)

    def get_metrics(self, is_train: bool) -> dict[str, Any]:  # noqa: ARG002
        return {}
