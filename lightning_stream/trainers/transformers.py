"""The data's position in the checkpoints of Transformers' `Trainer`, and in its logs where the time went."""

from __future__ import annotations

import inspect
import logging
from time import perf_counter
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from lightning_stream.errors import StateError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.monitoring.meter import Mark
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.trainers.monitor import DataMonitor

_log = logging.getLogger(__name__)


class StreamingTrainerCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers may be absent
    """Keeps the position of a `StreamingDataLoader` in ``trainer_state.json``, and continues from there.

    Args:
        monitor, watch_after_s: See `StreamingCallback`; what to change is logged at INFO.

    Example: ``callbacks=[StreamingTrainerCallback()]``, and a `get_train_dataloader` that returns the loader.
    """

    def __init__(self, monitor: bool = True, watch_after_s: float | None = 120.0) -> None:
        self._arguments: dict[str, Any] = {"monitor": monitor, "watch_after_s": watch_after_s}
        self.monitor = DataMonitor(_log.info, **self._arguments)  # of the latest training
        self._loader: StreamingDataLoader | None = None
        self._since: Mark | None = None  # when the trainer's latest event was over

    def stats(self) -> LoaderStats:
        """Where the time of the latest training has gone so far, see `StreamingDataLoader.stats`."""
        return self.monitor.stats()

    def on_init_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Keep the trainer from reading the batches again that a checkpoint is past."""
        args.ignore_data_skip = True

    def on_train_begin(self, _: Any, state: Any, *__: Any, train_dataloader: Any = None, **___: Any) -> None:
        """Continue from the checkpoint's position.

        Raises:
            TypeError: The trainer has another loader.
            StateError: The checkpoint holds no position.
        """
        if not isinstance(train_dataloader, StreamingDataLoader):
            raise TypeError(
                "StreamingTrainerCallback keeps the position of a StreamingDataLoader; found "
                f"{type(train_dataloader).__name__}. Return one from the trainer's get_train_dataloader"
            )
        self._loader = train_dataloader
        self.monitor.detach()
        is_first = train_dataloader.detect_world().rank == 0
        self.monitor = DataMonitor(_log.info if is_first else _log.debug, **self._arguments)
        self.monitor.attach(train_dataloader)
        self._come_first()
        position = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("position")
        if position is not None:
            train_dataloader.load_state_dict(position)
        elif state.global_step:
            raise StateError(
                f"a run continues from the data's position, but the checkpoint of step {state.global_step} holds none: "
                "it was written without StreamingTrainerCallback. Start a new run, or take a checkpoint that has it"
            )

    def state(self) -> dict[str, Any]:
        """The position, as the trainer saves it."""
        position = None if self._loader is None else self._loader.state_dict()
        return {"args": self._arguments, "attributes": {"position": position}}

    def _come_first(self) -> None:
        """Let the trainer call this before the callbacks that write logs: they get the metrics too."""
        frame = inspect.currentframe()
        while frame is not None:
            callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
            if isinstance(callbacks, list) and self in callbacks:
                callbacks.insert(0, callbacks.pop(callbacks.index(self)))
                return
            frame = frame.f_back

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note when the step was over: what the trainer does next may be an evaluation or a checkpoint."""
        self._since = Mark.of(perf_counter())

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Note that training stops."""
        self.monitor.end_epoch()
        self.on_step_end()

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float] | None = None, **___: Any) -> None:
        """Add the metrics of the data to those of the training."""
        if logs is None or "loss" not in logs:  # an evaluation's, before `on_evaluate`
            return
        if self.monitor.is_on:
            found = self.monitor.metrics(state.global_step)
            logs.update(found)
            state.log_history[-1].update(found)
        self.on_step_end()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Measure training without its evaluations."""
        self._spent("validation")

    def on_save(self, *_: Any, **__: Any) -> None:
        """Measure how long checkpoints are written."""
        self._spent("checkpoint")

    def _spent(self, what: str) -> None:
        if self._since is not None and self._loader is not None:
            self._loader.meter.spent(what, self._since, perf_counter())
            self.on_step_end()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Tell what to change if training waited for its data."""
        if self.monitor.is_on and self._loader is not None:
            self.monitor.end()
        self.monitor.detach()
        self._since = None
