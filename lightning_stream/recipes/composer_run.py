"""The recipes' classifier and data under MosaicML Composer: the same streamed photos, another trainer.

Composer is imported when a run begins: a config that names this file can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lightning_stream.errors import missing_extra
from lightning_stream.recipes.classifier import ImageClassifier, rise_and_fall
from lightning_stream.recipes.flowers import PhotoData
from lightning_stream.recipes.places import composer_checkpoints, last_of_composer

_PATIENCE_S = 3600.0  # of all processes for each other; a conversion may take its time


class ComposerRun:
    """Trains the recipes' classifier on the recipes' data under Composer; stands where Lightning's `Trainer` does.

    Args:
        folder: Checkpoints go into its ``composer``.
        max_epochs: Epochs of the whole run.
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
        save_every: str = "20ba",
        num_kept: int = 2,
        seed: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = composer_checkpoints(Path(folder))
        self.max_epochs = max_epochs
        self.save_every = save_every
        self.num_kept = num_kept
        self.seed = seed
        self.options = dict(options or {})

    def fit(self, model: ImageClassifier, datamodule: PhotoData, ckpt_path: str | None = None) -> dict[str, float]:
        """Train; gives the last accuracies by stage.

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
        found = {
            "train": trainer.state.train_metrics["MulticlassAccuracy"],
            "val": trainer.state.eval_metrics["eval"]["MulticlassAccuracy"],
        }
        accuracies = {stage: float(metric.compute()) for stage, metric in found.items()}
        trainer.close()
        return accuracies

    def _prepare(self, data: Any) -> None:
        """Convert on one process of each node, while the others wait."""
        from composer.utils import dist

        from lightning_stream.trainers.composer import name_node

        name_node()
        if dist.get_world_size() > 1:
            dist.initialize_dist(self.options.get("device"), float(self.options.get("dist_timeout", _PATIENCE_S)))
        with dist.run_local_rank_zero_first():
            data.prepare_data()

    def _trainer(self, model: ImageClassifier, data: PhotoData, load_path: str | None) -> Any:
        from composer import Trainer

        from lightning_stream.recipes.composer_model import ComposerClassifier
        from lightning_stream.trainers.composer import data_spec

        classifier = ComposerClassifier(model, len(data.classes))
        optimizer = torch.optim.AdamW(classifier.parameters(), model.learning_rate, weight_decay=model.weight_decay)
        workers: dict[str, Any] = {"num_workers": data.num_workers, "persistent_workers": data.num_workers > 0}
        train = data_spec(data.datasets["train"], global_batch_size=data.global_batch_size, tail=data.tail, **workers)
        held_out = data_spec(data.datasets["val"], batch_size=data.eval_batch_size, evaluation=True, **workers)
        total = self.max_epochs * len(train.dataloader)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rise_and_fall(step / total, model.warmup))
        return Trainer(
            model=classifier,
            train_dataloader=train,
            eval_dataloader=held_out,
            optimizers=optimizer,
            schedulers=schedule,
            step_schedulers_every_batch=True,
            max_duration=f"{self.max_epochs}ep",
            save_folder=str(self.folder),
            save_interval=self.save_every,
            save_overwrite=True,
            save_latest_filename="latest-rank{rank}.pt",
            save_num_checkpoints_to_keep=self.num_kept,
            load_path=load_path,
            seed=self.seed,
            **self.options,
        )
