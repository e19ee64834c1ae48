"""Random numbers for a sample's transform that depend on the sample's place in the run, and on nothing else.

A transform that draws from the global generators of `random`, `numpy` or `torch` draws the same for a sample
whatever process, worker, world or resumed run it happens in, because they are seeded from (seed, epoch, position)
just before it. The generators of the surrounding program are put back afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = (1 << 64) - 1


def sample_seed(seed: int, epoch: int, position: int) -> int:
    """Mix three integers into 63 bits (the finaliser of SplitMix64, Steele et al. 2014, applied in turn)."""
    state = 0
    for word in (seed, epoch, position):
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_sample(seed: int, epoch: int, position: int) -> None:
    """Seed the global CPU generators for the transform of one sample."""
    mixed = sample_seed(seed, epoch, position)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    # torch.manual_seed would also reach for the GPUs, which a worker must not touch.
    torch.default_generator.manual_seed(mixed)


@contextmanager
def undisturbed_generators() -> Iterator[None]:
    """Put the global CPU generators back as they were."""
    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)
