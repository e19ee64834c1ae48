"""Changing a scheduled mixture while training, at the same global batch on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from lightning_stream.loading.batches import BatchMaker
from lightning_stream.loading.iteration import Driver, Progress
from lightning_stream.loading.randomness import SeededCall
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.source import BatchSettings, SampleSource
from lightning_stream.loading.workers import MadeBatches, Workers
from lightning_stream.order import Position, Schedule


class MixtureChanges:
    """The part of a `StreamingDataLoader` that changes its mixture."""

    _source: SampleSource
    _collate: SeededCall | None
    _workers: Workers
    _driver: Driver | None
    _progress: Progress
    position: Any
    settings: Any
    continue_from: Any

    @property
    def schedule(self) -> Schedule:
        """The schedule of the mixture, with the changes made so far.

        Raises:
            ValueError: The dataset has none.
        """
        schedule: Schedule | None = self.position.order.schedule
        if schedule is None:
            raise ValueError(
                "Only a mixture with a schedule can change, but the dataset has none. Pass "
                "StreamingDataset(schedule=[(0, {name: weight})]) from the start of the run."
            )
        return schedule

    def change_mixture(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        skip: Mapping[str, int] | None = None,
        after_steps: int = 0,
    ) -> int:
        """Change the weights of the streams, or skip samples, from the first batch that was not handed out on.

        Where samples are packed into rows, the window that this batch begins in keeps its rows: the change holds from
        the next window on.

        Workers that have read further ahead begin again there. Call it on all ranks after the same step with the same
        values: they take effect at the same global batch. States record the change, and a resumed run keeps it. With
        the changes of its last state (``Schedule.from_state(state["order"]["schedule"])``) a run repeats exactly.

        Where documents are packed into rows, the rows of a window are planned together: a change takes effect with the
        documents of the next window, see `Packing`.

        Args:
            weights: The weights by stream names, for the rest of the run: they replace what the schedule had. A stream
                with weight 0, or without one, is dropped; one that had none so far is added.
            skip: How many of its next samples each of these streams omits; rounded up to whole batches or device blocks
                where the batching method keeps these together.
            after_steps: Optimizer steps from the last one trained on that the change waits for at least. A trainer may
                hold a batch that it has not trained on, which a resumed run has not: with 2, both change alike.

        Returns:
            The global sample number, counted through all epochs, from which on the change holds.

        Raises:
            ValueError: The dataset has no schedule, or the weights do not suit it.

        Example::

            loader.change_mixture({"web": 0.2, "code": 0.8}, skip={"web": 10_000})
        """
        here: Position = self.position
        order, schedule = here.order, self.schedule
        iteration = self._progress.leading if self._driver is None else self._driver.iteration
        if after_steps < 0:
            raise ValueError(f"after_steps counts steps from the last one trained on, from 0; found {after_steps}")
        run, waited = self._source.order(order), after_steps * self.settings().global_batch_size
        landmark = here.order_in(run).landmark(here.position)  # holds after the change too, and saves counting again
        seen = [here, replace(here, position=here.position + waited)]
        seen += [iteration.upcoming] if iteration is not None and iteration.upcoming else []
        earliest = [run.settled(one.epoch, one.position) for one in seen]
        at = max(earliest + [change.at for change in schedule.changes])
        order = structs.replace(order, schedule=schedule.changed(at, weights, skip))
        if iteration is not None:
            iteration.reorder(order, landmark)
        if self._driver is not None:
            self._driver.reorder(order)
        elif iteration is None:
            self.continue_from(replace(here, order=order, landmark=landmark))
        return at

    def batches_from(self, start: Position, settings: BatchSettings | None = None) -> MadeBatches:
        """Start making the batches from a position to the end of its epoch."""
        maker = BatchMaker(self._source, self._collate)
        return self._workers.batches(maker, settings or self.settings(), Start.of(start), self)
