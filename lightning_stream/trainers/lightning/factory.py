"""What Lightning adds to every trainer: the entry point ``lightning.pytorch.callbacks_factory``.

A `StreamingDataLoader` handed to `Trainer.fit` is then resumed exactly without a word in the user's code. It does
nothing for trainers over other data.
"""

from __future__ import annotations

from typing import Any

from lightning_stream.trainers.lightning.package import Callback


class JoinsTrainer(Callback):
    """Puts a passive `StreamingCallback` into a trainer that has none when a fit begins."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the place of this one; first among the callbacks, so that what ModelCheckpoint saves is up to date."""
        if stage != "fit":
            return
        from lightning_stream.trainers.lightning.callback import StreamingCallback

        if any(isinstance(one, StreamingCallback) for one in trainer.callbacks):
            return
        callback = StreamingCallback(is_passive=True)
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, callback)
        callback.setup(trainer, pl_module, stage)


def callbacks() -> list[Any]:
    """What Lightning calls for each trainer that is made."""
    return [JoinsTrainer()]
