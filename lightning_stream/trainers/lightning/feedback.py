"""`MixtureFeedback` changes a scheduled mixture by the metrics of a validation, under Lightning."""

from __future__ import annotations

from typing import Any

from lightning_stream.trainers.feedback import Feedback
from lightning_stream.trainers.lightning.package import Callback


class MixtureFeedback(Feedback, Callback):
    """Changes the weights of the streams after each validation.

    States record the changes: a resumed run keeps them, and a run can be repeated from its last state without this
    callback, see `StreamingDataLoader.change_mixture`.

    Args:
        choose: From the logged metrics (name to float) to the weights of all streams, or None to keep those in use.
            It is called on rank 0 after each validation of a `fit`; all ranks get its result.

    Example::

        def by_loss(metrics):
            return {"web": 1.0, "code": 2.0} if metrics["val_loss_code"] > metrics["val_loss_web"] else None

        trainer = Trainer(callbacks=[MixtureFeedback(by_loss)])
    """

    after_steps = 2  # Lightning holds one batch that it has not trained on

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse data without a schedule, before hours of training."""
        self.check(trainer.train_dataloader)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Ask for weights, and change the mixture on all ranks two steps later. Collective."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.change(trainer.train_dataloader, {name: float(value) for name, value in trainer.callback_metrics.items()})
