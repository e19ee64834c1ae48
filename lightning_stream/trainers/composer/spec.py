"""`data_spec`: streamed datasets in MosaicML Composer, with the position inside the trainer's checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from lightning_stream.dataset import plain_iterations_of
from lightning_stream.distributed import WorldLike
from lightning_stream.errors import checking, missing_extra
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.loader_arguments import WorkerOptions, options_of
from lightning_stream.map_style import dataset_of
from lightning_stream.order import Tail
from lightning_stream.trainers.composer.counting import BatchCounter
from lightning_stream.trainers.options import RunOptions

try:
    from composer import DataSpec

    from lightning_stream.trainers.composer.callback import StreamingPosition
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "composer":
        raise
    raise missing_extra("mosaicml", "composer", "lightning_stream.data_spec") from error


@checking
def data_spec(
    dataset: Any = None,
    *,
    global_batch_size: int | None = None,
    batch_size: int | None = None,
    evaluation: bool = False,
    tail: Tail | None = None,
    pin_memory: bool | None = None,
    world: WorldLike = None,
    batch_transforms: Callable[[Any], Any] | None = None,
    microbatch_transforms: Callable[[Any], Any] | None = None,
    token_column: str = "input_ids",
    padding_id: int | None = None,
    num_tokens: int | None = None,
    get_num_samples_in_batch: Callable[[Any], int | float] | None = None,
    get_num_tokens_in_batch: Callable[[Any], int | dict[str, int]] | None = None,
    split_batch: Callable[[Any, int | float], Sequence[Any]] | None = None,
    on_mismatch: Literal["error", "warn"] = "error",
    **options: Any,
) -> DataSpec:
    """Make a Composer `DataSpec` that streams data, and continues a stopped run exactly.

    The position goes into Composer's checkpoints as one JSON string and counts optimizer steps, never fetches; a run
    may continue on another number of nodes, devices and workers. Nothing has to be added to the trainer.

    Args:
        dataset: A `StreamingDataset`, its keyword arguments as a mapping, its path or URL, or a list of streams; or any
            map-style dataset, which is shuffled by ``shuffle=True``. None takes the keyword arguments that are left,
            e.g. ``data_spec(remote=..., shuffle=True, global_batch_size=512)``.
        global_batch_size: Samples of one optimizer step over all devices; each gets an even part of them, which
            Composer cuts into micro-batches by `device_train_microbatch_size`.
        batch_size: Samples per device and step, instead.
        evaluation: Whether this is for evaluation: each sample once, always in the same order, no position.
        tail: What happens to an epoch's last partial batch: ``"pad"`` (training; padding has no weight in the loss),
            ``"drop"`` or ``"exact"`` (evaluation).
        pin_memory: None pins where there is CUDA.
        world: Which processes train together; None to detect it when needed.
        batch_transforms: Called with each batch in host memory, before it is cut into micro-batches.
        microbatch_transforms: Called with each micro-batch on the device.
        token_column: Column whose elements are tokens, for Composer's clock and for durations in tokens.
        padding_id: Tokens of this value do not count.
        num_tokens: Tokens of an epoch, where known.
        get_num_samples_in_batch, get_num_tokens_in_batch, split_batch: Instead of ours, which read tensors, arrays,
            lists, and dicts or tuples of them, and do not count padding.
        on_mismatch: What to do where data or settings differ from the checkpoint's: ``"error"`` or ``"warn"``.
        options: `num_workers`, `workers`, `collate_fn`, `timeout`, `worker_init_fn`, `prefetch_factor`,
            `persistent_workers` and `multiprocessing_context` of a `StreamingDataLoader`; those of a run, see
            `RunOptions` (`seed_steps`, `monitor`, `report`, ...); all others are arguments of a `StreamingDataset`, or
            of a `MapDataset`.

    Raises:
        ValueError: Settings that contradict each other.
        MissingExtraError: Composer is not installed.
    """
    name_node()
    workers = options_of(WorkerOptions, options)
    run = options_of(RunOptions, options)
    of_dataset = {name: options[name] for name in options.keys() - workers.keys() - run.keys()}
    loader = StreamingDataLoader(
        dataset_of("data_spec", dataset, of_dataset),
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        evaluation=evaluation,
        tail=tail,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        world=world,
        on_mismatch=on_mismatch,
        **workers,
    )
    if evaluation:
        if loader.num_samples < (replicas := loader.detect_world().num_replicas):
            raise ValueError(
                f"an evaluation has at least one sample for each device, since Composer's metrics count "
                f"padding; {loader.num_samples} samples do not suffice for {replicas} devices. Evaluate on fewer "
                "devices, or on more samples"
            )
    else:
        StreamingPosition(loader, **run)
        loader.packs_states = True
        plain_iterations_of(loader.streaming).belongs_to(loader)
    counter = BatchCounter(loader, token_column, padding_id)
    return DataSpec(
        loader,
        num_samples=loader.num_samples,
        num_tokens=num_tokens,
        batch_transforms=batch_transforms,
        microbatch_transforms=microbatch_transforms,
        split_batch=split_batch or counter.split,
        get_num_samples_in_batch=get_num_samples_in_batch or counter.num_samples,
        get_num_tokens_in_batch=get_num_tokens_in_batch or counter.num_tokens,
    )


def name_node() -> None:
    """Give NODE_RANK, which Composer asks for to load a checkpoint, where torchrun has named it GROUP_RANK."""
    if "GROUP_RANK" in os.environ:
        os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])
