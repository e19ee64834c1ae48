"""The steps and the optimizer that the models of the recipes share; `train.py` takes any other LightningModule, too."""

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

Batch = Mapping[str, Tensor]


class Task(LightningModule):
    """A model whose subclass defines `measure`.

    Args:
        learning_rate, weight_decay: Of AdamW.
        warmup: Share of the run in which the learning rate rises; then it falls as a cosine does.
    """

    def __init__(self, learning_rate: float = 0.003, weight_decay: float = 0.01, warmup: float = 0.1) -> None:
        super().__init__()
        for name, value in {"learning_rate": learning_rate, "weight_decay": weight_decay, "warmup": warmup}.items():
            if not isinstance(value, int | float) or value < 0 or (name == "warmup" and value > 1):
                raise ValueError(f"{name} is a number of at least 0, and warmup at most 1; found {name}={value!r}")
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup = warmup

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        """The loss, under ``loss``, and other metrics: means over the samples of a batch."""
        raise NotImplementedError

    def training_step(self, batch: Batch, _batch_idx: int) -> Tensor:
        return self._step(batch, "train")

    def validation_step(self, batch: Batch, _batch_idx: int) -> None:
        self._step(batch, "val")

    def test_step(self, batch: Batch, _batch_idx: int) -> None:  # noqa: PT019
        self._step(batch, "test")

    def _step(self, batch: Batch, stage: str) -> Tensor:
        try:
            measured = self.measure(batch)
        except KeyError as error:
            raise ValueError(
                f"{type(self).__name__} trains on batches with {error}; found {', '.join(batch)}. Choose the model "
                "that the data brings (omit model=), or other data"
            ) from error
        # Lightning divides the samples of all ranks by their number, and cuts a whole number: 5 of 2 would count as 4.
        size: Any = float(len(batch.get("num_tokens", next(iter(batch.values())))))
        values = {f"{stage}/{name}": value.detach() for name, value in measured.items()}
        self.log_dict(values, prog_bar=True, batch_size=size, sync_dist=stage != "train")
        return measured["loss"]

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        total = float(self.trainer.estimated_stepping_batches)

        def multiplier(step: int) -> float:
            if math.isinf(total):  # a run that max_time alone limits
                return 1.0
            done = (step + 1) / (total + 1)
            if done < self.warmup:
                return done / self.warmup
            return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (done - self.warmup) / (1 - self.warmup)))

        schedule = LambdaLR(optimizer, multiplier)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
