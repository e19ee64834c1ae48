"""The recipes' models and data under MosaicML Composer: the same streamed samples, another trainer.

Composer is imported when a run begins: a config that names this file can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_stream.errors import missing_extra
from lightning_stream.recipes.converted_set import TRAIN, VAL
from lightning_stream.recipes.places import composer_checkpoints, last_of_composer
from lightning_stream.recipes.task import TaskData, TaskModel

_PATIENCE_S = 3600.0  # of all processes for each other; a conversion may take its time


class ComposerRun:
    """Trains a recipe's model on its data under Composer; stands where Lightning's `Trainer` does.

    Args:
        folder: Checkpoints go into its ``composer``.
        max_epochs: Epochs of the whole run; -1 for as many as `max_steps` takes.
        max_steps: Optimizer steps of the whole run, where these are fewer; -1 for no such limit.
        val_check_interval: Optimizer steps between validations, over epochs.
        check_val_every_n_epoch: Epochs between validations, where `val_check_interval` does not say.
        save_every: How often a checkpoint is written, in Composer's words.
        num_kept: Checkpoints that are kept.
        seed: Of dropout.
        options: More arguments of Composer's `Trainer`.
    """

    def __init__(
        self,
        *,
        folder: str,
        max_epochs: int = 12,
        max_steps: int = -1,
        val_check_interval: int | None = None,
        check_val_every_n_epoch: int | None = 1,
        save_every: str = "20ba",
        num_kept: int = 2,
        seed: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = composer_checkpoints(Path(folder))
        self.max_epochs = max_epochs
        self.max_steps = max_steps
        self.eval_interval = f"{val_check_interval}ba" if val_check_interval else f"{check_val_every_n_epoch or 1}ep"
        self.save_every = save_every
        self.num_kept = num_kept
        self.seed = seed
        self.options = dict(options or {})

    def fit(self, model: TaskModel, datamodule: TaskData, ckpt_path: str | None = None) -> dict[str, float]:
        """Train; gives the last measures, under names such as ``val/accuracy``.

        Args:
            model: What to train.
            datamodule: On what.
            ckpt_path: ``"last"`` goes on from the newest checkpoint of this folder; else a file of Composer's, or None.
        """
        if find_spec("composer") is None:
            raise missing_extra("mosaicml", "composer", "trainer=composer")
        self._prepare(datamodule)
        latest = last_of_composer(self.folder.parent)
        trainer = self._trainer(model, datamodule, str(latest) if ckpt_path == "last" else ckpt_path)
        trainer.fit()
        state = trainer.state
        measured = {
            f"{stage}/{name}": float(metric.compute())
            for stage, metrics in ((TRAIN, state.train_metrics), (VAL, state.eval_metrics["eval"]))
            for name, metric in metrics.items()
        }
        trainer.close()
        return measured

    def _prepare(self, data: Any) -> None:
        """Convert on one process of each node, while the others wait."""
        from composer.utils import dist

        from lightning_stream.trainers.composer.spec import name_node

        name_node()
        if dist.get_world_size() > 1:
            dist.initialize_dist(self.options.get("device"), float(self.options.get("dist_timeout", _PATIENCE_S)))
        with dist.run_local_rank_zero_first():
            data.prepare_data()

    def _trainer(self, model: TaskModel, data: TaskData, load_path: str | None) -> Any:
        from composer import Trainer

        from lightning_stream.recipes.composer_model import ComposerTask
        from lightning_stream.trainers.composer.spec import data_spec

        model.build(data)
        optimizer = model.optimizer()
        workers: dict[str, Any] = {"num_workers": data.num_workers, "persistent_workers": data.num_workers > 0}
        train = data_spec(
            data.datasets["train"],
            global_batch_size=data.global_batch_size,
            tail=data.tail,
            token_column=data.token_column,
            **workers,
        )
        held_out = data_spec(data.datasets["val"], batch_size=data.eval_batch_size, evaluation=True, **workers)
        total = self.max_epochs * len(train.dataloader)
        limited = self.max_steps >= 0 and (self.max_epochs < 0 or self.max_steps < total)
        total = self.max_steps if limited else total
        return Trainer(
            model=ComposerTask(model),
            train_dataloader=train,
            eval_dataloader=held_out,
            optimizers=optimizer,
            schedulers=model.schedule(optimizer, total),
            step_schedulers_every_batch=True,
            max_duration=f"{self.max_steps}ba" if limited else f"{self.max_epochs}ep",
            eval_interval=self.eval_interval,
            save_folder=str(self.folder),
            save_interval=self.save_every,
            save_overwrite=True,
            save_latest_filename="latest-rank{rank}.pt",
            save_num_checkpoints_to_keep=self.num_kept,
            load_path=load_path,
            seed=self.seed,
            **self.options,
        )
