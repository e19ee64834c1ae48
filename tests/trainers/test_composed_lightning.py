"""A schedule, a filter, packing and a balance together under Lightning: exact on another number of devices."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

L = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from support.documents import BATCH, composed, write  # noqa: E402
from support.lightning_chains import OneOf  # noqa: E402

from lightning_stream import World  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")
STEPS, STOP = 40, 17  # an epoch has about 25


class Model(L.LightningModule):  # type: ignore[misc, name-defined]
    """Notes the rows of each optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, 1)
        self.rows: dict[int, list[Any]] = defaultdict(list)

    def training_step(self, batch: Any, _: int) -> Any:
        self.rows[self.global_step] += batch["input_ids"].tolist()
        return self.head(batch["num_tokens"][:, None].float()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def fit(folder: Path, out: Path, world: World, accumulate: int = 1, ckpt_path: str | None = None) -> Model:
    data = OneOf(world, train=composed(folder), global_batch_size=BATCH, tail="drop")
    keep = ModelCheckpoint(dirpath=out, filename="{step}", every_n_train_steps=STOP, save_top_k=-1)
    model = Model()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, accumulate_grad_batches=accumulate, callbacks=[keep],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model


def test_a_composed_dataset_resumes_on_another_number_of_devices(tmp_path: Path) -> None:
    train = partial(fit, write(tmp_path / "documents"))
    whole = train(tmp_path / "whole", World()).rows
    first = [train(tmp_path / f"first{rank}", World(rank, 2, 2), 3).rows for rank in range(2)]
    steps = {step: first[0][step] + first[1][step] for step in range(STOP)}
    resumed = [
        train(tmp_path / f"rest{rank}", World(rank, 3, 3), 2, str(tmp_path / f"first{rank % 2}" / f"step={STOP}.ckpt"))
        for rank in range(3)
    ]
    assert all(min(model.rows) == STOP for model in resumed)
    steps |= {step: [row for model in resumed for row in model.rows[step]] for step in range(STOP, STEPS)}
    assert sorted(whole) == list(range(STEPS))
    assert all(sorted(steps[step]) == sorted(whole[step]) for step in whole)
