"""`LoaderIterator`: one iteration over a loader, with workers and a position of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from time import perf_counter
from typing import Any, Protocol

from lightning_stream.loading.progress import position_after
from lightning_stream.loading.workers import MadeBatches
from lightning_stream.order import Position
from lightning_stream.order.micro_batches import MicroBatch


class Driver(Protocol):
    """A trainer that drives a loader: it has the training run's position, and recognises its own iteration."""

    padding: bool  # whether a rank gets padding beside samples of its own
    counts: bool  # whether a trainer reports what was trained on
    takes_states: bool  # whether the trainer loads states through the loader

    @property
    def known(self) -> Position | None:
        """Everything before it was trained on; None where the run begins at its start."""

    @property
    def current(self) -> MicroBatch | None:
        """The micro-batch in training."""

    def begin(self, iterator: LoaderIterator) -> Position | None:
        """Where the trainer's own iteration begins; None for an iteration that the trainer does not train on."""

    def note_batch(self, iterator: LoaderIterator) -> None:
        """Note a batch that is about to be handed out."""

    def state(self) -> dict[str, Any]:
        """The position as plain values."""

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue where a state stands."""


class Loader(Protocol):
    """A `StreamingDataLoader`, as its iterators and its dataset use it."""

    @property
    def position(self) -> Position:
        """Where the training run is."""

    def __len__(self) -> int: ...

    def begin_iteration(self, iterator: LoaderIterator) -> tuple[Position, MadeBatches]:
        """Start making an iteration's batches; returns where it begins."""

    def note_batch(self, iterator: LoaderIterator, waited_s: float) -> None:
        """Note a batch that is about to be handed out, and the seconds that its consumer waited for it."""

    def note_end(self, iterator: LoaderIterator) -> None:
        """Note the end of an iteration."""

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch."""

    def state_of(self, position: Position) -> dict[str, Any]:
        """A position as a state."""

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values."""

    def state_after(self, num_samples: int | None) -> dict[str, Any]:
        """The position after so many samples of the epoch; the caller counts them if no trainer does."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state."""


class LoaderIterator:
    """One iteration over a `StreamingDataLoader`, with workers and a position of its own.

    It begins at the first ``next``. `close` or dropping it ends its workers and releases its shards.

    Attributes:
        start: Where it began; None before its first batch.
        last_batch: The samples of the batch that it handed out last.
        num_batches: How many it handed out.
        limit: How many it hands out at most; None for all of the epoch.

    Example::

        batches = iter(loader)
        first = next(batches)
        state = batches.state_dict()  # resumes at the second batch
        batches.close()
    """

    def __init__(self, loader: Loader, moves: bool = True) -> None:
        self._loader, self.moves = loader, moves
        self._made: MadeBatches | None = None
        self._is_over = False
        self.start: Position | None = None
        self.last_batch: MicroBatch | None = None
        self.num_batches = 0
        self.limit: int | None = None

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        began = perf_counter()
        try:
            if self._made is None:
                self.start, self._made = self._loader.begin_iteration(self)
            if self.limit is not None and self.num_batches >= self.limit:
                raise StopIteration
            batch, self.last_batch = next(self._made)
        except BaseException:
            self.close()
            raise
        self.num_batches += 1
        self._loader.note_batch(self, perf_counter() - began)
        return batch

    @property
    def position(self) -> Position:
        """Everything before it was handed out; inside an accumulation: the last whole optimizer step."""
        return self._loader.position if self.start is None else position_after(self.start, self.last_batch)

    def state_dict(self) -> dict[str, Any]:
        """The position of this iteration as plain values; other iterations do not change it."""
        return self._loader.state_of(self.position)

    def close(self) -> None:
        """End the iteration and what it owns."""
        if not self._is_over:
            self._is_over = True
            made, self._made = self._made, None
            if made is not None:
                made.close()
            self._loader.note_end(self)

    def __del__(self) -> None:
        with suppress(AttributeError):  # a half-made one
            self.close()


def driver_of(loader: Loader) -> Driver | None:
    """The Composer trainer that asks for batches; None if another program does. Other trainers call `driven_by`."""
    if "composer" not in sys.modules:
        return None
    join = import_module("lightning_stream.trainers.composer.callback")  # a higher layer, imported only if Composer is
    found: Driver | None = join.driver_of(loader)
    return found
