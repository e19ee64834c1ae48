"""The position in the progress bar, at the cost of nothing between two of its refreshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_stream.dataset import StreamingDataset
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.order import Position


def show_in_progress_bar(
    trainer: Any, loader: StreamingDataLoader, position: Callable[[], Position]
) -> Callable[[], None]:
    """Let the trainer's progress bar, if it has one, show ``samples=trained on/of an epoch``.

    The bar asks for its metrics only when it refreshes; logging a value each step would cost each step.

    Returns:
        What puts the bar back as it was.
    """
    bar = trainer.progress_bar_callback
    if bar is None:
        return lambda: None
    metrics = bar.get_metrics
    assert isinstance(loader.dataset, StreamingDataset)
    whole = loader.dataset.order(loader.settings().order).num_samples

    def with_position(*arguments: Any) -> dict[str, Any]:
        here = position()
        has_ended = not here.position and here.epoch > trainer.current_epoch
        return {**metrics(*arguments), "samples": f"{whole if has_ended else here.position}/{whole}"}

    def restore() -> None:
        vars(bar).pop("get_metrics", None)

    bar.get_metrics = with_position
    return restore
