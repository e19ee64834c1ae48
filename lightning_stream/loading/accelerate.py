"""Hugging Face Accelerate, and `datasets`, which divide batches or samples unless that was done already.

`accelerator.prepare` marks a loader that has ``_is_accelerate_prepared``, and does not wrap it; `save_state` and
`load_state` keep the state of a loader that has ``use_stateful_dataloader``. `StreamingDataLoader` has both.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from lightning_stream.errors import StateError
from lightning_stream.order import World

_ACCELERATE = "accelerate.data_loader"
_DATASETS = "datasets.iterable_dataset"


def is_prepared(loader: Any) -> bool:
    """Whether `accelerator.prepare` was called with this loader."""
    return "_is_accelerate_prepared" in vars(loader)


def keeps_state(loader: Any) -> bool:
    """Whether Accelerate is to save and load the state of a loader.

    Raises:
        StateError: It asks to load a checkpoint that has none. It would pass over the loader, which would begin its
            data again.
    """
    asking = sys._getframe(1)  # noqa: SLF001  # of Accelerate
    folder = asking.f_locals.get("input_dir")
    if loader.evaluation or asking.f_code.co_name != "load_accelerator_state" or folder is None:
        return True
    loader_index = asking.f_locals.get("i")
    name = f"dl_state_dict_{loader_index}.bin" if loader_index else "dl_state_dict.bin"
    if not folder.joinpath(name).exists():
        raise StateError(
            f"a training run continues from the data position in its checkpoint, but {folder} has no {name}: it was "
            "saved before this loader was prepared, or with fewer loaders. Load one that was saved after prepare(); to "
            "begin the data from its start, prepare the loader after load_state"
        )
    return True


class Prepared:
    """One iteration over a prepared loader: what it hands out is on Accelerate's device, all else is the iterator's."""

    def __init__(self, loader: Any, batches: Any) -> None:
        self._batches = batches
        self._moved = _as_prepared(loader, batches)

    def __iter__(self) -> Prepared:
        return self

    def __next__(self) -> Any:
        return next(self._moved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def close(self) -> None:
        """End the iteration and what it owns."""
        self._moved.close()
        self._batches.close()


def _as_prepared(loader: Any, batches: Any) -> Generator[Any, None, None]:
    """Yield batches as Accelerate's own loaders do: on its device, the last one marked for gradient accumulation."""
    from accelerate.state import GradientState, PartialState
    from accelerate.utils import send_to_device

    state = GradientState()
    device = PartialState().device
    batches.remainder = -1  # `gather_for_metrics` drops nothing of the last batch
    state._add_dataloader(batches)  # noqa: SLF001  # not the loader: a look would take that one away at its end
    is_first_step = state.num_steps > 1
    try:
        for batch in batches:
            last = batches.last_batch
            batches.end_of_dataloader = last.ends_epoch
            is_first_step &= not last.completes_step
            synchronised = state.sync_gradients
            if is_first_step:
                state._set_sync_gradients(1)  # noqa: SLF001  # true, but not what `accumulate` sets, to see that
            try:
                yield send_to_device(batch, device, non_blocking=loader.pin_memory)
            finally:
                has_stepped = is_first_step and state.sync_gradients is True
                if is_first_step:
                    state._set_sync_gradients(synchronised)  # noqa: SLF001
            if has_stepped:
                raise StateError(
                    "an optimizer step must use up whole global batches, but Accelerate stepped in the middle of the "
                    f"one at positions {last.begin} to {last.end}: it accumulates {state.num_steps} micro-batches and "
                    f"the loader {loader.accumulate}, or it counts on from a run that accumulated others, or was saved "
                    "inside an accumulation. Give both the same number, and set accelerator.step = 0 after load_state"
                )
    finally:
        state._remove_dataloader(batches)  # noqa: SLF001


def _takers() -> Iterator[tuple[str, Any]]:
    """The module of each function that waits for the iteration that begins, from the inner one on, and its object."""
    worker = get_worker_info()
    accelerate: Any = sys.modules.get("accelerate.state")
    if worker is not None and accelerate is not None:
        divided = getattr(accelerate.GradientState().active_dataloader, "dataset", None)
        if divided is not None and worker.dataset is divided:
            yield _ACCELERATE, None  # whose functions wait in the trainer's process
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_locals.get("self")
        frame = frame.f_back


def warn_of_another_order(epoch: int) -> None:
    """Warn, once, where a package that counts samples takes those of an epoch that a resume would not find."""
    if epoch == 1 and any(module in (_ACCELERATE, _DATASETS) for module, _ in _takers()):
        warnings.warn(
            "Accelerate, and datasets.IterableDataset, resume by counting samples from the start of an epoch, but each "
            "epoch of a StreamingDataset has an order of its own, and a dataset around it did not say which one "
            "begins; found the second epoch here. A run that resumes after its first epoch loses samples and repeats "
            "others. Use StreamingDataLoader: with a Trainer of transformers or TRL, return it from "
            "get_train_dataloader, and add StreamingTrainerCallback; or give the dataset around it a set_epoch that "
            "calls set_epoch of the StreamingDataset",
            stacklevel=3,
        )


def refuse_second_dealing(world: World, num_workers: int = 1, *, has_loader: bool) -> None:
    """Refuse an iteration whose samples, or batches, another package divides again, or skips by itself.

    A dataset of another kind around this one hides it, so the functions that take its samples are looked at, too.

    Raises:
        ValueError: A loader of Accelerate iterates the dataset, and there are several data replicas, or the dataset
            has a `StreamingDataLoader`, which alone can skip batches exactly; or an `IterableDataset` of `datasets`
            divides what it yields among replicas or workers.
    """
    is_divided = world.num_replicas > 1
    for module, taker in _takers():
        if module == _ACCELERATE and has_loader:
            raise ValueError(
                "a StreamingDataLoader reads its dataset itself, and alone continues exactly, but a loader of "
                "Accelerate reads this one too, such as skip_first_batches makes. Leave skip_first_batches out: "
                "load_state, or loader.load_state_dict, lets the loader begin where the state stands; a Trainer "
                "of transformers needs callbacks=[StreamingTrainerCallback()] when it is made: add_callback is too late"
            )
        if module == _ACCELERATE and is_divided:
            raise _dealt_twice("Accelerate", world, num_workers)
        if module == _DATASETS and (num_workers > 1 or (is_divided and getattr(taker, "_distributed", None))):
            raise _dealt_twice("datasets.IterableDataset", world, num_workers)


def _dealt_twice(other: str, world: World, num_workers: int) -> ValueError:
    workers = f" and {num_workers} workers" if num_workers > 1 else ""
    return ValueError(
        f"samples are divided once, but StreamingDataset and {other} would both divide them among "
        f"{world.num_replicas} data replicas{workers}. Pass StreamingDataLoader(dataset, ...) to accelerator.prepare, "
        "and resume with load_state; with a Trainer of transformers or TRL, return it from get_train_dataloader, and "
        "add StreamingTrainerCallback; in your own loop, iterate over it"
    )
