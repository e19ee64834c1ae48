"""A map-style dataset stopped and resumed: samples lost and repeated, beside torchdata's; and a batch's overhead.

python benchmarks/map_style.py [--only "in another world"]

Each library is used as its own documentation says. A run has 3 epochs of 192 samples in global batches of 16; it is
stopped after some batches and continued to its end. Samples are counted epoch by epoch.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice, product
from time import perf_counter
from typing import Any

import numpy as np
from frame import Clock, Group, Job, Result, main

NUM_SAMPLES = 192
BATCH = 16
EPOCHS = 3
SEED = 3
PER_EPOCH = NUM_SAMPLES // BATCH
PAIR = (np.ones(64, np.float32), 1)
# Batches before the stop; the ranks before and after it; workers of each.
STOPS = {
    "in the same world": (5, 1, 1, 0),
    "on two ranks": (5, 2, 2, 0),
    "with two workers": (5, 1, 1, 2),
    "in another world": (5, 1, 2, 0),
    "in another world, with two workers": (17, 2, 1, 2),
    "at the end of an epoch": (PER_EPOCH, 1, 1, 0),
}


class Numbers:
    """A map-style dataset."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Pairs(Numbers):
    """A map-style dataset of small arrays and their labels, which are there already."""

    def __getitem__(self, index: int) -> Any:
        return PAIR


def ours(rank: int, world: int, num_workers: int) -> tuple[Any, Any]:
    from lightning_stream import StatefulDataLoader

    options: dict[str, Any] = {"shuffle": True, "seed": SEED, "world": (rank, world), "num_workers": num_workers}
    return StatefulDataLoader(Numbers(NUM_SAMPLES), BATCH // world, **options), None


def torchdata(rank: int, world: int, num_workers: int) -> tuple[Any, Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = Numbers(NUM_SAMPLES)
    options = {"batch_size": BATCH // world, "num_workers": num_workers}
    sampler = StatefulDistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=SEED)
    return StatefulDataLoader(data, sampler=sampler, **options), sampler


def epochs_of(loader: Any, sampler: Any, first: int) -> Iterator[tuple[int, list[int], Any]]:
    """The epoch, the samples and the loader of each batch, from a loader that may continue."""
    for epoch in range(first, EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch.tolist(), loader


def resumed(library: Any, stop: tuple[int, int, int, int], job: Job) -> Result:  # noqa: ARG001
    """Run to the stop, continue from its states, and compare what each epoch had with the dataset."""
    num_batches, before, after, workers = stop
    clock = Clock()
    seen = Counter[tuple[int, int]]()
    states = []
    for rank in range(before):
        for epoch, ids, loader in islice(epochs_of(*library(rank, before, workers), 0), num_batches):
            seen.update((epoch, sample_id) for sample_id in ids)
            state = loader
        states.append(copy.deepcopy(state.state_dict()))
    for rank in range(after):
        loader, sampler = library(rank, after, workers)
        loader.load_state_dict(states[rank % before])
        first = num_batches // PER_EPOCH
        for epoch, ids, _ in epochs_of(loader, sampler, first):
            seen.update((epoch, sample_id) for sample_id in ids)
    wanted = Counter((epoch, sample_id) for epoch in range(EPOCHS) for sample_id in range(NUM_SAMPLES))
    lost = (wanted - seen).total()
    repeated = (seen - wanted).total()
    return clock.stop(seen.total(), **{"lost / repeated": f"{lost} / {repeated} of {wanted.total()}"})


def overhead(library: str, num_workers: int, dataset: type[Numbers], job: Job) -> Result:
    """The time of a batch whose samples cost nothing."""
    import torch

    import lightning_stream

    data = dataset(job.sizes.batches * 32)
    size = 32
    kind = torch.utils.data.DataLoader if library == "torch" else lightning_stream.StatefulDataLoader
    batches = iter(kind(data, batch_size=size, shuffle=True, num_workers=num_workers))
    next(batches)
    clock = Clock()
    began = perf_counter()
    count = sum(1 for _ in batches)
    batch_us = (perf_counter() - began) / count * 1e6
    return clock.stop(count * size, **{"us a batch": f"{batch_us:.0f}"})


if __name__ == "__main__":
    groups = [
        Group(f"stopped {title}", {library.__name__: partial(resumed, library, stop) for library in (ours, torchdata)})
        for title, stop in STOPS.items()
    ]
    for num_workers, (samples, dataset) in product((0, 1), {"numbers": Numbers, "arrays and labels": Pairs}.items()):
        cases = {library: partial(overhead, library, num_workers, dataset) for library in ("ours", "torch")}
        groups.append(Group(f"a batch of 32 {samples}, {num_workers} workers", cases))
    main(__doc__, groups, batches=(2000, 20))
