"""Which checkpoint a run continues from, so that it has never seen some samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import Ints
from .forget import Forgotten
from .position import Position
from .run import RunOrder


@dataclass(frozen=True)
class Replay:
    """What it takes to forget samples.

    Attributes:
        epoch, position: The first position that a forgotten sample affects and that was trained on; None if there is
            none. Where samples are packed or sorted by length, it is the begin of the sample's window.
        checkpoint: The index, among those given, of the newest checkpoint before it; None to begin from the start.
        num_samples: Samples to train on again, up to the newest checkpoint.
        forgotten: These samples, and those that the run has forgotten before.
    """

    epoch: int | None
    position: int | None
    checkpoint: int | None
    num_samples: int
    forgotten: Forgotten


def plan_replay(run: RunOrder, ids: Iterable[int] | Ints, checkpoints: Sequence[Position]) -> Replay:
    """Which checkpoint a run must continue from, so that it has never seen some samples.

    ``run`` is the order that the checkpoints were written under; continue with its `forgetting`.

    Raises:
        ValueError: There is no checkpoint; or see `Forgotten`.

    Example::

        replay = plan_replay(run, [7], [Position.from_state(state) for state in states])
        states[replay.checkpoint]         # the newest one that has not seen sample 7
        run.forgetting(replay.forgotten)  # the order that continues from it
    """
    if not checkpoints:
        raise ValueError("A replay needs the states of the run's checkpoints; found none. Pass at least the newest.")
    reached = [(checkpoint.epoch, checkpoint.position) for checkpoint in checkpoints]
    newest = max(reached)
    forgotten = Forgotten.of(run.snapshot, ids)
    if run.forgotten is not None:
        forgotten = Forgotten.of(run.snapshot, np.concatenate([run.forgotten.ids, forgotten.ids]))
    first = run.first_seen(forgotten, newest)
    # A state with other forgotten samples does not tell what its run has not seen.
    known = [checkpoint.order.forgotten in (None, forgotten.digest) for checkpoint in checkpoints]
    clean = [i for i, place in enumerate(reached) if known[i] and (first is None or place <= first)]
    index = max(clean, key=reached.__getitem__, default=None)
    here = (0, 0) if index is None else reached[index]
    between = sum(run.epoch(epoch).num_samples for epoch in range(here[0], newest[0]))
    epoch, position = first or (None, None)
    return Replay(epoch, position, index, between + newest[1] - here[1], forgotten)
