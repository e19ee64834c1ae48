"""``per_stream``: every global batch holds samples of one stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from lightning_stream.order.batching.base import BatchPlan
from lightning_stream.order.batching.interleave import InterleavedOrder

if TYPE_CHECKING:
    from lightning_stream.order.plan import RunOrder


class _PerStreamBatches(BatchPlan):
    order: PerStreamOrder

    def _remainder_ends(self, at: int) -> tuple[int, ...]:
        """Each stream's remainder is a batch; ``"exact"`` moves no border, for the batch before is another stream's."""
        return tuple(end for end in self.order.remainder_ends.tolist() if end > at)

    def _problems(self) -> list[str]:
        problems = [*super()._problems(), *self.order.start_problems(self.start)]
        length = self.order.stretch_length
        if length != self.batch_size:
            problems.append(
                f"per_stream fixes the global batch at the run's start: {length} samples then, {self.batch_size} now. "
                "Keep it, or choose another batching_method."
            )
        return problems


class PerStreamOrder(InterleavedOrder):
    """Global batches of B samples of one stream, interleaved; then each stream's remainder as a batch of its own."""

    plan_type: ClassVar[type[BatchPlan]] = _PerStreamBatches
    fixes: ClassVar[Mapping[str, str]] = {
        "batch_size": "per_stream makes every global batch from one stream: it needs a batch size from the start."
    }

    @classmethod
    def make(cls, run: RunOrder, epoch: int) -> PerStreamOrder:
        """The order of one epoch of a run."""
        config = run.config
        return cls(run, epoch, config.batch_size or 1, config.seed if config.shuffle else None)
