"""What one training run may choose, under every trainer."""

from __future__ import annotations

import os
from typing import TypedDict


class PositionOptions(TypedDict, total=False):
    """The options of a `PositionTracker`, which documents them."""

    seed_steps: int | None
    on_missing_state: str
    check_delivery: bool
    record_delivery: str | os.PathLike[str] | None


class RunOptions(PositionOptions, total=False):
    """The options of a training run; the doors of all trainers pass them on.

    `seed_steps`, `on_missing_state`, `check_delivery` and `record_delivery` are those of `PositionTracker`.

    * `monitor`: log ``data/wait_share`` and other metrics of the data, show the part of the time spent waiting for data
      and the downloads in the progress bar, and tell what to change if training waits for data.
    * `watch_after_s`: seconds without a batch after which the stacks of all threads and workers are written to stderr;
      None: never, and nothing is reported while the first shards arrive.
    * `report`: the folder for the log of the run's data and its page, see `RunReport`. True takes the trainer's own
      local one; False writes none. It needs the monitor.
    """

    monitor: bool
    watch_after_s: float | None
    report: bool | str | os.PathLike[str]
