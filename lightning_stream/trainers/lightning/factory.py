"""The entry point ``lightning.pytorch.callbacks_factory``: the callback that Lightning adds to every trainer.

A `StreamingDataLoader` handed to `Trainer.fit` is then resumed exactly without a change of the user's code. Trainers
over other data are not affected.
"""

from __future__ import annotations

import sys
from typing import Any

from lightning_stream.trainers.lightning.package import Callback


class JoinsTrainer(Callback):
    """Puts a passive `StreamingCallback` into a trainer that has none when a fit begins.

    It also lets evaluations, predictions too, over a loader of a training run have a whole epoch, and move nothing.
    """

    def __init__(self) -> None:
        self._evaluated: list[Any] = []  # the loaders

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace this callback by one that comes first, so that what ModelCheckpoint saves is up to date."""
        if stage != "fit":
            return
        from lightning_stream.trainers.lightning.callback import StreamingCallback

        if any(isinstance(other, StreamingCallback) for other in trainer.callbacks):
            return
        callback = StreamingCallback(is_passive=True)
        trainer.callbacks.insert(0, callback)
        callback.setup(trainer, pl_module, stage)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Let iterations over our loaders be looks."""
        if "lightning_stream.loader" not in sys.modules:  # there are none
            return
        from lightning_stream.trainers.lightning.loops import evaluated_loaders

        self._evaluated = evaluated_loaders(trainer)
        for loader in self._evaluated:
            loader.is_evaluated = True

    def on_validation_end(self, *_: Any, **__: Any) -> None:
        """Let them be those of training runs again."""
        for loader in self._evaluated:
            loader.is_evaluated = False
        self._evaluated = []

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_exception = on_validation_end


def callbacks() -> list[Any]:
    """Lightning calls this for each trainer that is made."""
    return [JoinsTrainer()]
