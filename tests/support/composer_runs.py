"""A small run under Composer that writes down which samples fed which optimizer step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
composer = pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from composer import Callback, ComposerModel, Event, Trainer  # noqa: E402

from lightning_stream import Stream  # noqa: E402
from lightning_stream.trainers.composer.spec import data_spec  # noqa: E402
from support.resume_contract import (  # noqa: E402
    EPOCHS,
    GLOBAL_BATCH,
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    Steps,
    write_shards,
)

__all__ = ["NUM_SAMPLES", "STEPS_PER_EPOCH", "write_shards"]


class Recorder(ComposerModel):
    """A small net that notes the samples of every optimizer step, filler aside, and every evaluation."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        self.steps: Steps = defaultdict(list)
        self.epoch_of_step: dict[int, int] = {}
        self.evaluated: list[int] = []
        self.trainer: Any = None

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.net(batch["x"])

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Any:
        spec, clock = self.trainer._train_data_spec, self.trainer.state.timestamp
        if spec.get_num_samples_in_batch(batch):
            self.steps[int(clock.batch)] += batch["id"].tolist()
            self.epoch_of_step[int(clock.batch)] = int(clock.epoch)
        target = batch["x"].sum(dim=1, keepdim=True)
        return (outputs - target).square().mean()

    def eval_forward(self, batch: dict[str, Any], outputs: Any = None) -> Any:
        self.evaluated += batch["id"].tolist()
        return self.forward(batch)

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {}


class Losses(Callback):
    """Notes the loss of every step, and the evaluations."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.evaluations: list[tuple[int, tuple[int, ...]]] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.losses[int(state.timestamp.batch) - 1] = float(state.total_loss_dict["loss/train/total"])

    def eval_end(self, state: Any, logger: Any) -> None:
        model = getattr(state.model, "module", state.model)
        self.evaluations.append((int(state.timestamp.batch), tuple(sorted(model.evaluated))))
        model.evaluated = []


class Run:
    """One fit: its model afterwards, the steps it took, and the checkpoints it left.

    Args:
        data, dataset: Arguments of `data_spec`.
        spec: What the trainer takes its data from, instead.
        save_at: The optimizer steps after which a checkpoint is kept.
        evaluates: How often it evaluates.
        dropout, recorder: Of the model's hidden layer, and the model's class.
        fit: The arguments of each call of ``fit``.
        raises: Errors that are kept in `error`.
        options: Of Composer's trainer.
    """

    def __init__(self, shards: Path | None, folder: Path, load_path: Path | str | None = None, **options: Any) -> None:
        data = {
            "remote": shards, "shuffle": True, "global_batch_size": GLOBAL_BATCH, **options.pop("dataset", {}),
            **options.pop("data", {}),
        }  # fmt: skip
        if mixture := data.pop("mixture", None):
            data["streams"] = [Stream(remote=data["remote"] / name, proportion=p) for name, p in mixture.items()]
            del data["remote"]
        evaluates = options.pop("evaluates", None)
        if evaluates:
            options["eval_interval"] = evaluates
            options["eval_dataloader"] = data_spec(remote=shards, batch_size=32, evaluation=True)
        fit, raises = options.pop("fit", [{}]), options.pop("raises", None)
        if steps := options.pop("save_at", None):
            options["save_interval"] = saves_at(steps)
        torch.manual_seed(0)
        self.model = options.pop("recorder", Recorder)(options.pop("dropout", 0.0))
        self.noted = Losses()
        spec = options.pop("spec", None)  # has no truth value: a loader whose mixture has ended is empty
        self.spec = data_spec(**data) if spec is None else spec
        callbacks = [self.noted, *options.pop("callbacks", [])]
        if "save_interval" in options:
            options |= {"save_folder": str(folder / "ckpt"), "save_filename": "ba{batch}.pt", "save_overwrite": True}
        self.trainer = Trainer(
            **{
                "model": self.model,
                "train_dataloader": self.spec,
                "optimizers": torch.optim.Adam(self.model.parameters(), lr=0.01, fused=True),
                "max_duration": f"{EPOCHS}ep",
                "device": "cpu",
                "seed": 1,
                "progress_bar": False,
                "callbacks": callbacks,
                "load_path": None if load_path is None else str(load_path),
                **options,
            }
        )
        self.model.trainer = self.trainer
        self.error: BaseException | None = None
        try:
            for arguments in fit:
                self.trainer.fit(**arguments)
        except BaseException as error:  # whatever stops a run is what the test asked for
            if raises is None or not isinstance(error, raises):
                raise
            self.error = error
        finally:
            self.trainer.close()

    @property
    def steps(self) -> Steps:
        """Optimizer step -> sorted sample ids that fed it."""
        return {step: sorted(ids) for step, ids in self.model.steps.items()}

    @property
    def epochs(self) -> dict[int, int]:
        return self.model.epoch_of_step

    @property
    def losses(self) -> dict[int, float]:
        """Optimizer step -> its loss."""
        return self.noted.losses

    @property
    def evaluations(self) -> list[tuple[int, tuple[int, ...]]]:
        return self.noted.evaluations

    @property
    def clock(self) -> int:
        return int(self.trainer.state.timestamp.batch)

    @property
    def weights(self) -> list[float]:
        parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.model.parameters()]
        return torch.cat([p.detach().flatten() for p in parameters]).tolist()


def saves_at(steps: Collection[int]) -> Callable[[Any, Any], bool]:
    """A ``save_interval`` for these optimizer steps alone."""
    return lambda state, event: event == Event.BATCH_CHECKPOINT and int(state.timestamp.batch) in steps


def checkpoints(folder: Path) -> dict[int, Path]:
    """Optimizer step -> checkpoint written at it."""
    found = {int(path.stem.removeprefix("ba")): path for path in (folder / "ckpt").glob("ba*.pt")}
    return dict(sorted(found.items()))
