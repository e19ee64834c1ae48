"""Checks, once at the start of training, that all ranks train on the same run of the same data.

Each rank reads the index, computes the order and knows its place for itself. Samples would be lost and repeated without
an error if one of them had other settings, saw another world, or read another index because the dataset was replaced in
the meantime.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_stream.errors import StateError, redact
from lightning_stream.order import Position, World

T = TypeVar("T")


def check_ranks_agree(make: Callable[[], tuple[Position, T, World | None, str | None]]) -> list[T]:
    """Compare what each rank makes: its position, a report, its world and balance; returns the reports. Collective.

    Raises:
        StateError: They differ; on every rank.
        RuntimeError: Another rank raises an error instead.
    """
    positions, reports, worlds, balances = zip(*made_by_ranks(make), strict=True)
    states = zip(positions, balances, strict=True)
    try:
        compare([{**position.to_state(), "balance": balance} for position, balance in states])
        compare_worlds([seen for seen in worlds if seen is not None])
    except StateError:
        _leave_together()
        raise
    return list(reports)


def made_by_ranks(make: Callable[[], T]) -> list[T]:
    """What each rank makes, by rank; where one of them raises an error, all do. Collective."""
    made: tuple[Any, str | None] = None, None
    failure: Exception | None = None
    try:
        made = make(), None
        pickle.dumps(made)  # what cannot be sent is an error of this rank, too
    except Exception as error:  # noqa: BLE001 - of the user's code
        failure = error
        made = None, redact(f"{type(error).__name__}: {error}")
    values, problems = zip(*gathered(made), strict=True)
    failed = [rank for rank, problem in enumerate(problems) if problem is not None]
    if failed:
        _leave_together()
        raise failure or RuntimeError(
            f"all ranks continue together, but rank {failed[0]} cannot: {problems[failed[0]]}. Correct that and start "
            "again"
        )
    return list(values)


def _leave_together() -> None:
    """Wait for all ranks: one that ends while another still gathers would break its connection. Collective."""
    if not _is_alone():
        torch.distributed.barrier()


def gathered(value: T) -> list[T]:
    """A value of each rank, by rank. Collective."""
    if _is_alone():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def gathered_numbers(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """The numbers of each rank, float64[ranks, n], by one collective and without pickling. Collective."""
    if _is_alone():
        return numbers[np.newaxis]
    backends = torch.distributed.get_backend_config()  # e.g. "cpu:gloo,cuda:nccl"
    device = "cpu" if "cpu:" in backends else backends.partition(":")[0]
    local = torch.from_numpy(numbers).to(device)
    ranks = [torch.empty_like(local) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(ranks, local)
    return torch.stack(ranks).cpu().numpy()


def _is_alone() -> bool:
    distributed = torch.distributed
    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1


def compare(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise StateError unless all ranks' states are the same."""
    for rank, state in enumerate(states):
        differs = [name for name, value in state.items() if value != states[0].get(name)]
        if differs:
            values = ", ".join(f"{name}: {states[0].get(name)} and {state[name]}" for name in differs)
            raise StateError(
                f"all ranks train on one run of the same data, but ranks 0 and {rank} differ in {values}. The data was "
                "replaced while the run began, or a setting depends on the rank: correct that and start again"
            )


def compare_worlds(worlds: Sequence[World]) -> None:
    """Raise StateError unless several ranks are all of one world."""
    sizes = {replace(world, rank=0, disks=()) for world in worlds}
    ranks = {world.rank for world in worlds}
    if len(worlds) > 1 and (len(sizes) > 1 or len(ranks) < worlds[0].num_ranks):
        raise StateError(
            f"all ranks of a world train together, but the {len(worlds)} processes here are {list(worlds)}. Each would "
            "read samples of others, or some nobody: omit world=, or pass the rank among all"
        )
