"""One iteration over a loader."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, Protocol

from lightning_stream.errors import StateError, StoreError
from lightning_stream.lazy import joining
from lightning_stream.loading.cursor import Cursor, Driver, State, Walk
from lightning_stream.loading.workers import MadeBatches
from lightning_stream.monitoring.meter import Made, Meter
from lightning_stream.order import Position
from lightning_stream.questions import Occurrence
from lightning_stream.questions.describe import Chain

# What Ray's `prepare_data_loader` returns, and timm's `PrefetchLoader`, take each batch a step ahead.
_ONE_AHEAD = ("ray.train.torch.train_loop_utils", "timm.data.loader")


class Loader(Protocol):
    """A `StreamingDataLoader`, which documents these methods, as its iterators and its dataset use it."""

    @property
    def position(self) -> Position: ...
    def __len__(self) -> int: ...

    evaluation: bool
    packs_states: bool

    cursor: Cursor

    @property
    def meter(self) -> Meter: ...
    def begin_iteration(self, iterator: LoaderIterator) -> tuple[Position, MadeBatches]: ...
    def batches_from(self, start: Position) -> MadeBatches: ...
    def note_batch(self, iterator: LoaderIterator, asked: float, got: float, made: Made) -> None: ...
    def compare_unverified(self, *, wait: bool = True) -> None: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_of(self, position: Position) -> dict[str, Any]: ...
    def state_after(self, num_samples: int | None) -> dict[str, Any]: ...
    def load_state_dict(self, state: State | None) -> None: ...
    def describe(self, count_rows: bool | None = None) -> Chain: ...
    def where(self, sample_id: int, epochs: Iterable[int] | None = None) -> list[Occurrence]: ...


class LoaderIterator(Walk):
    """One iteration over a `StreamingDataLoader`, with workers and a position of its own.

    It begins at the first ``next``. `close` or dropping it ends its workers and releases its shards.

    Its attributes are those of `Walk`: ``start``, ``last_batch``, ``num_batches``, ``is_exhausted``, ``failure``,
    ``limit``.

    Example::

        batches = iter(loader)
        first = next(batches)
        state = batches.state_dict()  # resumes at the second batch
        batches.close()
    """

    is_measured = False  # whether the loader measures its waits: not where somebody only looks at batches
    _is_over = True  # of a half-made one

    def __init__(self, loader: Loader, moves: bool = True) -> None:
        super().__init__(moves)
        self._loader = loader
        self._made: MadeBatches | None = None
        self._is_over = False

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self.failure:
            raise StateError(
                f"an iteration ends with its first error, and its epoch is not over then; found next() after a "
                f"{self.failure}. To go on at the batch that failed, iterate over the loader again; to go on "
                "elsewhere, call load_state_dict or set_epoch before"
            )
        if self._is_over:
            raise StopIteration
        asked = perf_counter()
        last = self.last_batch
        before_last = self.before_last
        num_batches = self.num_batches
        self._loader.cursor.asked(self)
        try:
            if self._made is None:
                self.start, self._made = self._loader.begin_iteration(self)
                self.is_measured = self.moves or self._loader.evaluation
                self.one_ahead = sys._getframe(1).f_globals.get("__name__") in _ONE_AHEAD  # noqa: SLF001
            if self.is_measured:
                self._loader.meter.asked(asked, is_first=not self.num_batches)
            if self.limit is not None and self.num_batches >= self.limit:
                raise StopIteration
            if self.is_outdated and (last is None or (last.completes_step and not last.ends_epoch)):
                self._made.close()
                self._made = self._loader.batches_from(self.upcoming or self.position)
                self.is_outdated = False
            batch, self.last_batch, made = next(self._made)
            self.before_last = last
            self.num_batches += 1
            self._loader.note_batch(self, asked, perf_counter(), made)
        except BaseException as error:
            if self.last_batch is not last:  # Ctrl-C came after it was made
                self.last_batch = last
                self.before_last = before_last
                self.num_batches = num_batches
            is_end = isinstance(error, StopIteration)
            self.failure = "" if is_end else type(error).__name__
            self.is_exhausted = is_end and self.num_batches != self.limit
            self._end(failed=not is_end)
            self._loader.meter.gave_up(perf_counter() if is_end else None)
            if is_end or isinstance(error, StoreError):  # that of a worker does not know the batches
                self._loader.compare_unverified(wait=is_end)
            raise
        return batch

    @property
    def position(self) -> Position:
        """Everything before it was handed out; inside an accumulation: the last whole optimizer step."""
        return self.reached or self._loader.position

    def state_dict(self) -> dict[str, Any]:
        """The position of this iteration as plain values; other iterations do not change it."""
        self._loader.cursor.warn_inside_step(self.trained, stacklevel=3)
        return self._loader.state_of(self.position)

    def close(self) -> None:
        """End the iteration and what it owns.

        Raises:
            StoreError: Samples that it delivered before their shards were verified had wrong bytes.
        """
        if not self._is_over:
            self._end()
            self._loader.compare_unverified()

    def _end(self, failed: bool = False) -> None:
        if not self._is_over:
            self._is_over = True
            made = self._made
            self._made = None
            if self.is_measured and self.trained is self._loader.cursor.last_batch:  # else another one trains by now
                self._loader.meter.stop(perf_counter())
            if made is not None:
                made.close(failed)
            self._loader.cursor.ended(self)

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ends():  # modules are gone then, and its workers too
            self._end()


def driver_of(loader: Loader) -> Driver | None:
    """The Composer trainer that asks for batches; None if another program does. Other trainers call `driven_by`."""
    join = joining("composer")
    driver: Driver | None = None if join is None else join.driver_of(loader)
    return driver
