"""A small run under Composer that writes down which samples fed which optimizer step."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
composer = pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

import numpy as np  # noqa: E402
from composer import Callback, ComposerModel, Trainer  # noqa: E402

from lightning_stream import MDSWriter, Stream  # noqa: E402
from lightning_stream.trainers.composer.spec import data_spec  # noqa: E402

NUM_SAMPLES, GLOBAL_BATCH, EPOCHS = 167, 16, 3
STEPS_PER_EPOCH = 11
Steps = dict[int, list[int]]


def write_shards(folder: Path, num_samples: int = NUM_SAMPLES, first: int = 0) -> Path:
    """Samples in shards of about a dozen, numbered from `first`."""
    with MDSWriter(out=str(folder), columns={"id": "int", "x": "ndarray:float32:4"}, size_limit=1000) as writer:
        for number in range(first, first + num_samples):
            writer.write({"id": number, "x": np.full(4, number / NUM_SAMPLES, np.float32)})
    return folder


class Recorder(ComposerModel):
    """A small net that notes the samples of every optimizer step, filler aside, and every evaluation."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        self.steps: Steps = defaultdict(list)
        self.evaluated: list[int] = []
        self.trainer: Any = None

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.net(batch["x"])

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Any:
        spec = self.trainer._train_data_spec
        if spec.get_num_samples_in_batch(batch):
            self.steps[int(self.trainer.state.timestamp.batch)] += batch["id"].tolist()
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
    """One fit: its model afterwards, the steps it took, and the checkpoints it left."""

    def __init__(self, shards: Path | None, folder: Path, load_path: Path | str | None = None, **options: Any) -> None:
        data = {"remote": shards, "shuffle": True, "global_batch_size": GLOBAL_BATCH, **options.pop("data", {})}
        if mixture := data.pop("mixture", None):
            data["streams"] = [Stream(remote=data["remote"] / name, proportion=p) for name, p in mixture.items()]
            del data["remote"]
        evaluates = options.pop("evaluates", None)
        if evaluates:
            options["eval_interval"] = evaluates
            options["eval_dataloader"] = data_spec(remote=shards, batch_size=32, evaluation=True)
        fit = options.pop("fit", [{}])
        torch.manual_seed(0)
        self.model = Recorder(options.pop("dropout", 0.0))
        self.noted = Losses()
        self.spec = options.pop("spec", None) or data_spec(**data)
        callbacks = [self.noted, *options.pop("callbacks", [])]
        if "save_interval" in options:
            options |= {"save_folder": str(folder / "ckpt"), "save_filename": "ba{batch}.pt", "save_overwrite": True}
        self.trainer = Trainer(
            **{
                "model": self.model,
                "train_dataloader": self.spec,
                "optimizers": torch.optim.Adam(self.model.parameters(), lr=0.01),
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
        try:
            for arguments in fit:
                self.trainer.fit(**arguments)
        finally:
            self.trainer.close()

    @property
    def steps(self) -> Steps:
        """Optimizer step -> sorted sample ids that fed it."""
        return {step: sorted(ids) for step, ids in self.model.steps.items()}

    @property
    def losses(self) -> dict[int, float]:
        """Optimizer step -> its loss."""
        return self.noted.losses

    @property
    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()


def checkpoints(folder: Path) -> dict[int, Path]:
    """Optimizer step -> checkpoint written at it."""
    found = {int(path.stem.removeprefix("ba")): path for path in (folder / "ckpt").glob("ba*.pt")}
    return dict(sorted(found.items()))


def expect_exact(whole: Run, resumed: Run, step: int) -> None:
    """The resumed run fed every step from `step` on with what the uninterrupted one did, and lost the same."""
    assert resumed.steps == {s: ids for s, ids in whole.steps.items() if s >= step}
    assert resumed.losses == {s: loss for s, loss in whole.losses.items() if s >= step}
    assert resumed.weights == whole.weights
