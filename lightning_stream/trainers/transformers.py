"""The data's position in the checkpoints of Transformers' `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from lightning_stream.errors import StateError
from lightning_stream.loader import StreamingDataLoader


class StreamingTrainerCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers may be absent
    """Keeps the position of a `StreamingDataLoader` in ``trainer_state.json``, and continues from there.

    Example: ``callbacks=[StreamingTrainerCallback()]``, and a `get_train_dataloader` that returns the loader.
    """

    _loader: StreamingDataLoader | None = None

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
        return {"args": {}, "attributes": {"position": position}}
