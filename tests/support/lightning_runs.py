"""A small run under Lightning that writes down which samples fed which optimizer step."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: uv sync")

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402

from lightning_stream import StreamingDataModule, World  # noqa: E402
from support.resume_contract import EPOCHS, GLOBAL_BATCH, NUM_SAMPLES, At, Steps, raise_stopped, write_shards  # noqa: E402

__all__ = ["EPOCHS", "GLOBAL_BATCH", "NUM_SAMPLES", "write_shards"]
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "num_sanity_val_steps": 0,
}  # fmt: skip

for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Recorder(pl.LightningModule):
    """A small net that notes the samples of every optimizer step, filler aside, and every validation.

    Args:
        dropout: Of its hidden layer.
        manual: Whether it steps its optimizer by hand.
        reads_stepping_batches: Whether its schedule asks the trainer for the number of all steps.
        at, act: Where in the run it acts, and what it does there.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        manual: bool = False,
        reads_stepping_batches: bool = False,
        at: At | None = None,
        act: Callable[[], None] = raise_stopped,
    ) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        self.steps: Steps = defaultdict(list)
        self.validations: list[tuple[int, tuple[int, ...]]] = []
        self.epoch_of_step: dict[int, int] = {}
        self._validating: list[int] = []
        self.automatic_optimization = not manual
        self.reads_stepping_batches = reads_stepping_batches
        self.at, self.act, self._step, self._micro = at, act, -1, 0

    def reaches(self, hook: str) -> None:
        """Act, if this is the place."""
        if self.at == At(hook, self.trainer.global_step, self._micro):
            self.at = None
            self.act()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        step = self.trainer.global_step
        self._micro = self._micro + 1 if self._step == step else 0
        self._step = step
        self.reaches("training_step")
        filler = self.trainer.train_dataloader.last_batch.filler
        self.steps[step] += batch["id"][~torch.from_numpy(filler)].tolist()
        self.epoch_of_step[step] = self.trainer.current_epoch
        loss = self.net(batch["x"]).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_zero_grad(self, *_: Any) -> None:
        self.reaches("on_before_zero_grad")

    def on_train_batch_end(self, *_: Any) -> None:
        self.reaches("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.reaches("on_train_epoch_end")

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        if batch_idx == 1 and not self.trainer.sanity_checking:
            self.reaches("validation_step")
        self._validating += batch["id"].tolist()

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations.append((self.trainer.global_step, tuple(sorted(self._validating))))
        self._validating = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01, fused=True)
        if not self.reads_stepping_batches:
            return optimizer
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OneOf(StreamingDataModule):
    """A data module that takes its process for one of several."""

    def __init__(self, as_world: World, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.as_world = as_world

    def world(self) -> World:
        return self.as_world


class Run:
    """One fit: its module afterwards, the steps it took, and the checkpoints it left.

    Args:
        save_at: The optimizer steps after which a checkpoint is kept.
        every_n_train_steps: After how many steps each a `ModelCheckpoint` keeps one.
        data, dataset: Arguments of the data module, and of its training data.
        module, recorder: Arguments of the module, and its class.
        world: The rank that the process is taken for.
        val: Whether there is validation data.
        raises: Errors that are kept in `error`.
        options: Of Lightning's trainer.
    """

    def __init__(self, shards: Path | None, folder: Path, ckpt_path: Path | None = None, **options: Any) -> None:
        module_options = options.pop("module", {})
        data_options = {"global_batch_size": GLOBAL_BATCH, **options.pop("data", {})}
        dataset_options = options.pop("dataset", {})
        callbacks = options.pop("callbacks", [])
        if every := options.pop("every_n_train_steps", None):
            callbacks = [*callbacks, keep_all(folder, every_n_train_steps=every)]
        if steps := options.pop("save_at", None):
            callbacks = [*callbacks, SavesAt(folder, steps)]
        torch.manual_seed(0)
        self.module = options.pop("recorder", Recorder)(**module_options)
        world = options.pop("world", None)
        make_data = StreamingDataModule if world is None else OneOf
        self.data = make_data(
            **({} if world is None else {"as_world": world}),
            train={"remote": shards, "shuffle": True, **dataset_options},
            val={"remote": shards} if options.pop("val", True) else None,
            eval_batch_size=32,
            **data_options,
        )
        self.losses: dict[int, float] = {}
        raises = options.pop("raises", None)
        settings = {"max_epochs": EPOCHS, "enable_checkpointing": bool(callbacks), "default_root_dir": folder}
        self.trainer = pl.Trainer(**{**QUIET, **settings, "callbacks": callbacks, **options})
        self.error: BaseException | None = None
        try:
            self.fit(ckpt_path)
        except BaseException as error:  # whatever stops a run is what the test asked for
            if raises is None or not isinstance(error, raises):
                raise
            self.error = error

    def fit(self, ckpt_path: Path | None) -> None:
        """Train, as a user would write it."""
        self.trainer.fit(self.module, datamodule=self.data, ckpt_path=ckpt_path)

    @property
    def steps(self) -> Steps:
        """Optimizer step -> sorted sample ids that fed it."""
        return {step: sorted(ids) for step, ids in self.module.steps.items()}

    @property
    def epochs(self) -> dict[int, int]:
        return self.module.epoch_of_step

    @property
    def evaluations(self) -> list[tuple[int, tuple[int, ...]]]:
        return self.module.validations

    @property
    def clock(self) -> int:
        return self.trainer.fit_loop.epoch_loop._batches_that_stepped

    @property
    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.module.parameters()]).tolist()


class SavesAt(Checkpoint):
    """Keeps a checkpoint after each of these optimizer steps."""

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        self.folder, self.steps = folder / "ckpt", set(steps)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in self.steps:
            self.steps.remove(trainer.global_step)
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def keep_all(folder: Path, **when: Any) -> ModelCheckpoint:
    """A ModelCheckpoint that keeps every checkpoint it writes, named by step."""
    return ModelCheckpoint(
        dirpath=folder / "ckpt", filename="{step}-{epoch}", save_top_k=-1, auto_insert_metric_name=False, **when
    )


# Since Lightning 2.5.
SAVES_ON_EXCEPTION = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters
KINDS = ["OnExceptionCheckpoint", "ModelCheckpoint"] if SAVES_ON_EXCEPTION else ["OnExceptionCheckpoint"]


def saved_on_exception(folder: Path, kind: str = "OnExceptionCheckpoint") -> ModelCheckpoint | OnExceptionCheckpoint:
    """A callback that saves when an exception ends the run."""
    if kind == "OnExceptionCheckpoint":
        return OnExceptionCheckpoint(folder)
    return ModelCheckpoint(folder, filename="on_exception", save_on_exception=True, save_top_k=-1, every_n_epochs=99)


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(optimizer step, file) of the checkpoints of a run, in order."""
    found = []
    for path in (folder / "ckpt").glob("*.ckpt"):
        file = path / "meta.pt" if path.is_dir() else path  # sharded ones are folders
        found.append((torch.load(file, weights_only=True)["global_step"], path))
    return sorted(found, key=lambda pair: (pair[0], pair[1].name))
