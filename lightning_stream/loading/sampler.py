"""A user's sampler, as the list of each epoch: the same in every process, world and resumed run."""

from __future__ import annotations

import copy
from functools import cached_property
from hashlib import sha256
from itertools import islice
from operator import index
from typing import Any

import numpy as np
import torch

from lightning_stream.loading.randomness import PreservedGenerators, sample_seed, seed_globals
from lightning_stream.order.arrays import Ints

_SAMPLER = 0x73616D706C6572  # what its seed is mixed with, so that it does not draw what a sample does


class SamplerLists:
    """The lists of a sampler of torch's kind. What it draws from random, numpy, torch or its ``generator`` is seeded.

    Raises:
        TypeError: It has no length.
        ValueError: It divides its samples among ranks itself.
    """

    def __init__(self, sampler: Any, seed: int, num_indices: int) -> None:
        if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
            raise TypeError(f"a sampler has __iter__ and __len__; found {type(sampler).__name__}. Add its length")
        if getattr(sampler, "num_replicas", 1) > 1:
            raise ValueError(
                f"a sampler lists all samples of an epoch, since the loader divides them among the ranks; found "
                f"{type(sampler).__name__}, which lists those of one rank. Omit it, and pass shuffle=True"
            )
        self._given = sampler  # which its owner may change
        self._sampler = copy.copy(sampler)
        self._seed = seed
        self._num_indices = num_indices
        self._has_generator = isinstance(getattr(sampler, "generator", None), torch.Generator)
        if self._has_generator:  # a seeded one takes its place, and a worker cannot be sent one
            self._sampler.generator = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_given": self._sampler}  # which has no generator

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return len(self._sampler)

    @cached_property
    def _first_digest(self) -> bytes | None:
        """The digest of what it lists for epoch 0; None if that differs each time."""
        sampler = copy.copy(self._sampler)  # the same one twice: it may count its epochs itself
        digest = self._digest(sampler)
        return digest if digest == self._digest(sampler) else None

    def _digest(self, sampler: Any) -> bytes:
        return sha256(self._listed(sampler, 0).tobytes()).digest()

    def epoch(self, epoch: int) -> Ints:
        """The samples of an epoch, in order: int64[num_samples].

        Raises:
            ValueError: They are others each time, not as many as its length, or not of the dataset; or the sampler was
                changed.
        """
        if self._first_digest != self._digest(copy.copy(self._given)):
            raise ValueError(
                "a sampler lists the same samples each time that it is asked for an epoch, or a run could not be "
                f"continued; {type(self._sampler).__name__} lists others, or was changed after its loader was made. "
                "Draw from random, numpy's or torch's global generators or from an attribute `generator`, which are "
                "seeded, and take the epoch, and what changes with it, from set_epoch"
            )
        listed = self._listed(copy.copy(self._sampler), epoch)
        if len(listed) != len(self._sampler) or not (listed.view(np.uint64) < self._num_indices).all():
            raise ValueError(
                f"a sampler lists len(sampler) indices of the dataset's {self._num_indices} samples; found "
                f"{len(listed)} indices of {len(self._sampler)} from {type(self._sampler).__name__}, or others"
            )
        return listed

    def _listed(self, sampler: Any, epoch: int) -> Ints:
        """The samples that it lists for an epoch; TypeError where they are no numbers."""
        seed = sample_seed(self._seed ^ _SAMPLER, epoch, 0)
        if self._has_generator:
            sampler.generator = torch.Generator().manual_seed(seed)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with PreservedGenerators():
            seed_globals(seed)
            try:
                return np.fromiter(map(index, islice(sampler, len(sampler) + 1)), np.int64)
            except TypeError as error:
                raise TypeError(
                    f"a sampler lists indices of samples, which are whole numbers; found others ({error}) from "
                    f"{type(sampler).__name__}. Of a batch sampler, pass its sampler"
                ) from error
