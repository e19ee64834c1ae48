"""`Signalled`: a model whose process gets SIGTERM in one of its steps, other processes in other ones or in none."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from recipes.models.mlp import Regressor


class Signalled(Regressor):
    """Sends its process SIGTERM in the step that the list has for its rank, counted from 1; 0 for none."""

    def __init__(self, in_steps: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.step = int(in_steps[int(os.environ["RANK"])])

    def measure(self, batch: Any) -> Any:
        self.step -= 1
        if self.step == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().measure(batch)
