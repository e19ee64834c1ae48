"""Whether the workers delivered what was planned: each batch is compared with the order as it is trained on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_stream.dataset import StreamingDataset
from lightning_stream.errors import LedgerError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.settings import BatchSettings
from lightning_stream.loading.shared_position import Start
from lightning_stream.order import BatchPlan, Position
from lightning_stream.order.micro_batches import BatchInfo, pieces_of

_CHUNK_STEPS = 64
_SHARE_EVERY = 64


class DeliveryCheck:
    """Compares one rank's batches with the order, which this process computes for itself.

    Every batch must begin where the last optimizer step ended and hold, at its positions, the samples of the order;
    at the first step and every 64th it must also be this rank's own share. The order is asked for 64 steps at a time.

    Args:
        loader: Whose batches they are; asked only when the first one comes.
    """

    def __init__(self, loader: StreamingDataLoader) -> None:
        assert isinstance(loader.dataset, StreamingDataset)
        self._loader, self._dataset = loader, loader.dataset
        self._settings: BatchSettings | None = None
        self._piece = 0
        self._step = (-1, 0)
        self._steps = 0
        self._planned: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._planned_from = (-1, 0)

    def compare(self, info: BatchInfo, due: Position | None) -> None:
        """Take up the next batch.

        Args:
            info: What it is made of.
            due: Where it must begin; None where the user's own optimization decides that.

        Raises:
            LedgerError: It is not the one that was planned.
        """
        if due is not None and (info.begin != due.position or info.epoch != due.epoch):
            raise _differs(info, f"the one at epoch {due.epoch}, position {due.position} was due")
        if (info.epoch, info.begin) != self._step:  # an epoch may be cut short inside a step
            self._step, self._piece = (info.epoch, info.begin), 0
        if self._steps % _SHARE_EVERY == 0:
            self._compare_share(info)
        elif not np.array_equal(self._planned_ids(info)[~info.filler], info.ids[~info.filler]):
            raise _differs(info, "the order has other samples at its positions")
        self._piece += 1
        if info.completes_step:
            self._steps += 1

    def _plan(self, info: BatchInfo) -> BatchPlan:
        if self._settings is None:
            self._settings = self._loader.settings()
        return self._settings.plan(self._dataset, Start(info.epoch, info.begin))

    def _compare_share(self, info: BatchInfo) -> None:
        plan = self._plan(info)
        assert self._settings is not None
        pieces = plan.share(0).micro_batches(pieces_of(plan, 0, self._settings.device_batch_size))
        if self._piece >= len(pieces):
            raise _differs(info, f"its step has {len(pieces)} micro-batches, and all of them came already")
        share = pieces[self._piece]
        if not (np.array_equal(share.positions, info.positions) and np.array_equal(share.ids, info.ids)):
            raise _differs(info, f"this rank's share is samples {_short(share.ids)}")

    def _planned_ids(self, info: BatchInfo) -> NDArray[np.int64]:
        """The order's ids at the batch's positions; -1 at a position outside its step."""
        if info.positions.min() < info.begin or info.positions.max() >= info.end:
            return np.full(len(info.ids), -1, dtype=np.int64)
        epoch, first = self._planned_from
        if epoch != info.epoch or not first <= info.begin or info.end > first + len(self._planned):
            plan = self._plan(info)
            first, end = info.begin, min(info.begin + _CHUNK_STEPS * plan.batch_size, plan.order.num_samples)
            self._planned, self._planned_from = plan.order.ids(first, end), (info.epoch, first)
        return self._planned[info.positions - first]


def _differs(info: BatchInfo, reason: str) -> LedgerError:
    return LedgerError(
        f"a batch trained on must be the one planned, but at epoch {info.epoch}, position {info.begin} the loader "
        f"delivered samples {_short(info.ids)}: {reason}. The weights of the last checkpoint are still right; resume "
        "from it, and please report this"
    )


def _short(ids: NDArray[np.int64]) -> str:
    return f"{ids[:8].tolist()}{' and more' if len(ids) > 8 else ''}"
