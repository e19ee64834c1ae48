"""One process of a distributed run under Composer: trains, and writes down what this rank's samples were.

python -m support.composer_worker '{"shards": ..., "out": ..., "load_path": ..., ...}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from composer import Callback
from composer.utils import dist

from support.composer_runs import Run


class StopAt(Callback):
    """Ends the process by a signal in the middle of a given optimizer step."""

    def __init__(self, step: int, signum: int, out: Path) -> None:
        self.step, self.signum, self.out = step, signum, out

    def after_loss(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) == self.step:
            model = getattr(state.model, "module", state.model)
            _write(self.out, {"steps": model.steps})
            os.kill(os.getpid(), self.signum)


def _write(out: Path, content: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"rank{dist.get_global_rank()}of{dist.get_world_size()}.json").write_text(json.dumps(content))


def main() -> None:
    """Run what the argument describes."""
    warnings.simplefilter("ignore")
    options = json.loads(sys.argv[1])
    shards, out = Path(options.pop("shards")), Path(options.pop("out"))
    callbacks: list[Callback] = []
    if (stop := options.pop("stop_at", None)) is not None:
        callbacks.append(StopAt(stop, getattr(signal, options.pop("signal")), out))
    run = Run(shards, out, callbacks=callbacks, **options)
    content = {"steps": run.steps, "losses": run.losses, "weights": run.weights, "evaluations": run.noted.evaluations}
    _write(out, content)


if __name__ == "__main__":
    main()
