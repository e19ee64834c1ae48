"""The arguments of a `StreamingDataLoader` that trainers pass on to it, and the checks of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

from lightning_stream.order.rules import count, violations


class WorkerOptions(TypedDict, total=False):
    """How batches are made: see `StreamingDataLoader`."""

    num_workers: int | Literal["auto"]
    workers: Literal["processes", "threads"] | None
    collate_fn: Callable[[list[Any]], Any] | None
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    prefetch_factor: int | None
    persistent_workers: bool
    multiprocessing_context: Any


def options_of(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that a kind (a TypedDict) has."""
    return {name: value for name, value in options.items() if name in kind.__annotations__}


def check_arguments(
    sizes: tuple[int | None, int | None],
    in_dataset: int | None,
    batch_tokens: int | None,
    accumulate: int,
    tail: str | None,
    drop_last: bool | None,
) -> None:
    """Refuse a loader's numbers; all problems are named together.

    `sizes` are its batch size and global batch size, and `in_dataset` and `batch_tokens` what its dataset has.
    """
    problems = []
    batch_size, global_batch_size = sizes
    if tail is not None and drop_last is not None and drop_last != (tail == "drop"):
        problems.append(f"pass tail= or drop_last=, not both: found tail={tail!r}, drop_last={drop_last!r}.")
    if tail not in (None, "pad", "drop", "exact"):
        problems.append(f"tail is 'pad', 'drop' or 'exact'; found {tail!r}.")
    either = "pass batch_size= (per device) or global_batch_size= (of an optimizer step)"
    if None not in sizes:
        problems.append(f"{either}, not both.")
    unknown = sizes == (None, None) and in_dataset is None
    if batch_tokens is not None and not unknown:
        problems.append(f"the dataset's batch_tokens={batch_tokens} decides the batch sizes: pass no other.")
    if batch_tokens is None and unknown:
        problems.append(f"{either}.")
    if batch_size is not None and in_dataset not in (None, batch_size):
        problems.append(f"batch_size is {batch_size} for the loader and {in_dataset} for its dataset: make them one.")
    numbers = {"batch_size": batch_size, "global_batch_size": global_batch_size, "accumulate": accumulate}
    problems += violations(numbers, {name: count(1, optional=name != "accumulate") for name in numbers})
    if problems:
        raise ValueError(" ".join(problems))


def refuse_order(arguments: tuple[Any, ...], in_order: bool, workers: str | None, for_processes: Any) -> None:
    """Raise ValueError for arguments of torch's loader that choose an order, or that threads cannot have."""
    if workers == "threads" and for_processes is not None:
        raise ValueError("worker_init_fn and multiprocessing_context are for processes; workers='threads' starts none")
    if any(arguments) or not in_order:
        raise ValueError(
            "StreamingDataLoader does not take shuffle, sampler, batch_sampler, generator or in_order: the dataset "
            "has the order. Pass shuffle=True and shuffle_seed= to the StreamingDataset"
        )


def device_batch(global_batch_size: int, num_replicas: int, accumulate: int) -> int:
    """Samples per device and micro-batch; raise ValueError where a global batch does not divide."""
    divisor = num_replicas * accumulate
    if global_batch_size % divisor:
        raise ValueError(
            f"a global batch divides over replicas and accumulation: {global_batch_size} samples do not divide by "
            f"{num_replicas} replicas x {accumulate} accumulated micro-batches. Choose a global_batch_size that is a "
            f"multiple of {divisor}, or another number of devices"
        )
    return global_batch_size // divisor
