"""`ComposerMixtureFeedback` changes a scheduled mixture by the metrics of an evaluation, under Composer."""

from __future__ import annotations

from composer import Callback, Logger, State

from lightning_stream.trainers.feedback import Feedback


class ComposerMixtureFeedback(Feedback, Callback):  # type: ignore[misc]  # Composer has no types
    """Changes the weights of the streams after each evaluation during training.

    States record the changes: a resumed run keeps them, and a run can be repeated from its last state without this
    callback, see `StreamingDataLoader.change_mixture`.

    Args:
        choose: From the metrics (``"evaluator/metric"`` to float) to the weights of all streams, or None to keep those
            in use. It is called on rank 0 after each evaluation; all ranks get its result.

    Example::

        Trainer(..., callbacks=[ComposerMixtureFeedback(lambda metrics: {"web": 1, "code": metrics["eval/loss"]})])
    """

    def fit_start(self, state: State, logger: Logger) -> None:  # noqa: ARG002 - Composer's signature
        """Refuse data without a schedule, before hours of training."""
        self.check(state.train_dataloader)

    def eval_after_all(self, state: State, logger: Logger) -> None:  # noqa: ARG002
        """Ask for weights, and change the mixture on all ranks from the next batch on. Collective."""
        metrics = {
            f"{label}/{name}": float(metric.compute())
            for label, label_metrics in state.eval_metrics.items()
            for name, metric in label_metrics.items()
        }  # collective where there are several ranks
        self.change(state.train_dataloader, metrics)
