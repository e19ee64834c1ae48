"""`Feedback` changes a scheduled mixture by metrics, for the callbacks of all trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_stream.trainers.agreement import made_by_ranks
from lightning_stream.trainers.run import streaming_loader


class Feedback:
    """Changes the weights of a training loader's streams by the metrics of an evaluation.

    Args:
        choose: From the metrics (name to float) to the weights of all streams, or None to keep those in use. It is
            called on rank 0; all ranks get its result, or its error.
    """

    after_steps = 0  # for which the trainer holds batches that it has not trained on

    def __init__(self, choose: Callable[[dict[str, float]], Mapping[str, float] | None]) -> None:
        self.choose = choose

    def check(self, loader: Any) -> None:
        """Refuse data without a schedule, before hours of training."""
        _ = streaming_loader(loader, type(self).__name__).schedule

    def change(self, loader: Any, metrics: dict[str, float]) -> None:
        """Ask for weights, and change the mixture on all ranks alike. Collective."""
        training = streaming_loader(loader, type(self).__name__)
        is_first = training.detect_world().rank == 0
        weights = made_by_ranks(lambda: self.choose(metrics) if is_first else None)[0]
        if weights is not None:
            training.change_mixture(dict(weights), after_steps=self.after_steps)
