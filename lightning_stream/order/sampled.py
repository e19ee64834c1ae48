"""The order of a user's sampler: it lists the samples of each epoch, and the position counts them."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from .arrays import Ints
from .orders import Listed, Order
from .run import RunOrder


class Lists(Protocol):
    """Lists the samples of an epoch, each time the same ones."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""

    def epoch(self, epoch: int) -> Ints:
        """The samples of an epoch, in order: int64[num_samples]."""


class SampledRun(RunOrder):
    """The order of a run that samplers list; `config.algorithm` is ``"sampler"``."""

    def __init__(self, *args: Any, lists: Lists, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lists = lists

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return partial(SampledRun, lists=self._lists, **rebuild.keywords), arguments

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self._lists.num_samples

    def order_of_samples(self, epoch: int) -> Order:
        """The samples of an epoch, before they are packed or sorted by length."""
        return Listed(self._draw.delivered(epoch, self._lists.epoch(epoch)))
