"""One process of a distributed run under Composer over a composed dataset: trains, and writes down its rows.

python -m support.composed_worker FOLDER OUT STOP [LOAD_PATH]
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Trainer
from composer.models import ComposerModel
from composer.utils import dist

from lightning_stream import data_spec
from support.documents import BATCH, composed


class Model(ComposerModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, 1)

    def forward(self, batch: Any) -> Any:
        return self.head(batch["num_tokens"][:, None].float())

    def loss(self, scores: Any, _: Any) -> Any:
        return scores.mean()


class Rows(Callback):  # type: ignore[misc]
    """Notes the rows of each optimizer step."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Any]] = defaultdict(list)

    def batch_start(self, state: Any, _: Any) -> None:
        self.rows[int(state.timestamp.batch)] += state.batch["input_ids"].tolist()


def main(folder: str, out: str, stop: str, load_path: str | None = None) -> None:
    """Train up to a step, and save a checkpoint there."""
    warnings.simplefilter("ignore")
    model, rows = Model(), Rows()
    trainer = Trainer(
        model=model, train_dataloader=data_spec(composed(Path(folder)), global_batch_size=BATCH, tail="drop"),
        optimizers=torch.optim.SGD(model.parameters(), lr=1e-6), device="cpu", max_duration=f"{stop}ba",
        save_folder=out, save_filename="last.pt", save_interval=f"{stop}ba", load_path=load_path, progress_bar=False,
        callbacks=[rows],
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    Path(out, f"rank{dist.get_global_rank()}.json").write_text(json.dumps(rows.rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
