"""The entry point ``lightning.pytorch.callbacks_factory``: the callback that Lightning adds to every trainer.

A `StreamingDataLoader` handed to `Trainer.fit` is then resumed exactly without a change of the user's code. Trainers
over other data are not affected.
"""

from __future__ import annotations

from typing import Any

from lightning_stream.trainers.lightning.package import Callback


class JoinsTrainer(Callback):
    """Puts a passive `StreamingCallback` into a trainer that has none when a fit begins."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace this callback by one that comes first, so that what ModelCheckpoint saves is up to date."""
        if stage != "fit":
            return
        from lightning_stream.trainers.lightning.callback import StreamingCallback

        if any(isinstance(other, StreamingCallback) for other in trainer.callbacks):
            return
        callback = StreamingCallback(is_passive=True)
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, callback)
        callback.setup(trainer, pl_module, stage)


def callbacks() -> list[Any]:
    """Lightning calls this for each trainer that is made."""
    return [JoinsTrainer()]
