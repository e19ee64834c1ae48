"""The orders of mosaicml-streaming 0.13, bit for bit: an island of materialised arrays, apart from the native order.

For runs that continue or compare with one of that library. Made from its documented behaviour and from experiments with
what it gives out; repeats, dropped batches and quirks of the original are kept, for they are what it delivers.
"""

from lightning_stream.order.mosaic.epoch import (
    SAMPLING_METHODS,
    MosaicEpoch,
    MosaicOrder,
    MosaicSettings,
    MosaicState,
    MosaicWorld,
    epoch_work,
)
from lightning_stream.order.mosaic.partitions import PARTITIONS, global_batches, partition
from lightning_stream.order.mosaic.samplings import sampling
from lightning_stream.order.mosaic.shuffles import SHUFFLES, shuffle
from lightning_stream.order.mosaic.stream_weights import StreamDraws, stream_draws
from lightning_stream.order.mosaic.stream_weights import stream_draws as weights
from lightning_stream.order.mosaic.work import BATCHING_METHODS

__all__ = [
    "shuffle", "partition", "sampling", "weights", "epoch_work",
    "MosaicOrder", "MosaicEpoch", "MosaicSettings", "MosaicState", "MosaicWorld",
    "StreamDraws", "stream_draws", "global_batches",
    "SHUFFLES", "PARTITIONS", "BATCHING_METHODS", "SAMPLING_METHODS",
]  # fmt: skip
