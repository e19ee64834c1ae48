"""`Alarm`: Ctrl-C in the middle of a training step."""

from __future__ import annotations

import os
import signal
from typing import Any

from lightning.pytorch import Callback


class Alarm(Callback):
    """Sends this process SIGINT in the step of a number."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)
