"""Hugging Face Accelerate, which deals a loader's batches to processes unless they are dealt already.

`accelerator.prepare` leaves a loader as it is that has ``_is_accelerate_prepared``, and marks it; `save_state` and
`load_state` keep the state of a loader that has ``use_stateful_dataloader``. `StreamingDataLoader` has both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_stream.order import World

_MARK = "_is_accelerate_prepared"


def as_prepared(loader: Any, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches as Accelerate's own loaders do: on its device, the last one marked for gradient accumulation."""
    if _MARK not in vars(loader):  # `prepare` was not called with it
        yield from batches
        return
    from accelerate.state import GradientState, PartialState
    from accelerate.utils import send_to_device

    state, device = GradientState(), PartialState().device
    loader.remainder = -1  # of the last batch, nothing is left out by `gather_for_metrics`
    state._add_dataloader(loader)  # noqa: SLF001  # as its own loaders do
    try:
        for batch in batches:
            loader.end_of_dataloader = loader.last_batch.ends_epoch
            yield send_to_device(batch, device, non_blocking=loader.pin_memory)
    finally:
        state._remove_dataloader(loader)  # noqa: SLF001


def refuse_second_dealing(dataset: Any, world: World) -> None:
    """Refuse to iterate a dataset whose samples Accelerate would deal to the ranks after the dataset did.

    Raises:
        ValueError: A loader of Accelerate iterates the dataset, and there are several data replicas.
    """
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is None or world.num_replicas == 1:
        return
    dealt = getattr(accelerate.GradientState().active_dataloader, "dataset", None)
    if dataset is dealt or dataset is getattr(dealt, "dataset", None):
        raise ValueError(
            f"samples are dealt to the {world.num_replicas} data replicas once, but StreamingDataset and Accelerate "
            "would both deal them. Pass StreamingDataLoader(dataset, ...) to accelerator.prepare; with a Trainer of "
            "transformers, return it from get_train_dataloader and set ignore_data_skip=True"
        )
