"""Stream training data from object storage into PyTorch trainers, exactly.

The same samples in the same global batches on any number of nodes, devices and workers. One thing depends on the number
of data replicas: with ``tail="exact"`` (evaluation), the border between an epoch's last two batches.

Public names are loaded on first use (PEP 562), so that importing the package pulls in neither torch, nor a
trainer, nor Spark, nor a cloud client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_stream.errors import LightningStreamError
from lightning_stream.lazy import JOINING, lazy_names

if TYPE_CHECKING:
    from lightning_stream.convert.lengths import add_lengths
    from lightning_stream.dataset import LocalDataset, StreamingDataset
    from lightning_stream.formats.encodings import register_encoding
    from lightning_stream.loader import StreamingDataLoader
    from lightning_stream.loading.packing import Packing
    from lightning_stream.map_style import MapDataset, StatefulDataLoader
    from lightning_stream.media.crops import DecodeCenterCrop, DecodeRandomCrop
    from lightning_stream.media.jpeg import decode_jpeg
    from lightning_stream.monitoring.exporters import export_prometheus
    from lightning_stream.order import Position, Schedule, World
    from lightning_stream.reading.stream import Stream
    from lightning_stream.spark import StreamToTorchDataset as StreamToTorchDataset
    from lightning_stream.spark import dataframe_to_mds as dataframe_to_mds
    from lightning_stream.trainers.audit import verify_delivery
    from lightning_stream.trainers.checkpoints import read_position, start_at
    from lightning_stream.trainers.composer.feedback import ComposerMixtureFeedback as ComposerMixtureFeedback
    from lightning_stream.trainers.composer.spec import data_spec as data_spec
    from lightning_stream.trainers.lightning.callback import StreamingCallback as StreamingCallback
    from lightning_stream.trainers.lightning.data_module import StreamingDataModule as StreamingDataModule
    from lightning_stream.trainers.lightning.feedback import MixtureFeedback as MixtureFeedback
    from lightning_stream.trainers.lightning.graceful_stop import GracefulStop as GracefulStop
    from lightning_stream.trainers.lightning.graceful_stop import TrainingInterrupted as TrainingInterrupted
    from lightning_stream.trainers.lightning.sample_log import SampleLog as SampleLog
    from lightning_stream.trainers.report import RunReport
    from lightning_stream.trainers.tracker import PositionTracker
    from lightning_stream.trainers.transformers import StreamingTrainerCallback as StreamingTrainerCallback
    from lightning_stream.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter, merge_index

__version__ = "0.1.0"

JOINING["composer"] = "lightning_stream.trainers.composer.callback"

# The names of each module, and the extra that installs what it needs.
_NAMES = {
    "convert.lengths": "add_lengths",
    "dataset": "LocalDataset StreamingDataset",
    "formats.encodings": "register_encoding",
    "media.jpeg": "decode_jpeg",
    "loader": "StreamingDataLoader",
    "map_style": "MapDataset StatefulDataLoader",
    "monitoring.exporters": "export_prometheus",
    "media.crops": "DecodeCenterCrop DecodeRandomCrop",
    "loading.packing": "Packing",
    "order": "Position Schedule World",
    "reading.stream": "Stream",
    "spark": "StreamToTorchDataset dataframe_to_mds",
    "trainers.audit": "verify_delivery",
    "trainers.checkpoints": "read_position start_at",
    "trainers.composer.feedback": "ComposerMixtureFeedback",
    "trainers.composer.spec": "data_spec",
    "trainers.lightning.callback": "StreamingCallback",
    "trainers.lightning.data_module": "StreamingDataModule",
    "trainers.lightning.feedback": "MixtureFeedback",
    "trainers.lightning.graceful_stop": "GracefulStop TrainingInterrupted",
    "trainers.lightning.sample_log": "SampleLog",
    "trainers.report": "RunReport",
    "trainers.tracker": "PositionTracker",
    "trainers.transformers": "StreamingTrainerCallback",
    "writer": "CSVWriter JSONWriter MDSWriter TSVWriter XSVWriter merge_index",
}
_EXTRAS = {
    "torch": "torch", "lightning": "lightning", "pytorch_lightning": "lightning", "composer": "composer",
    "transformers": "transformers", "pyspark": "spark",
}  # fmt: skip
__getattr__, __dir__ = lazy_names(__name__, _NAMES, _EXTRAS)

# Those of `import *`, which must not fail where a trainer or Spark is not installed; `dir()` has all names.
__all__ = [
    "CSVWriter", "DecodeCenterCrop", "DecodeRandomCrop", "JSONWriter", "LightningStreamError", "LocalDataset",
    "MDSWriter", "MapDataset", "Packing", "Position", "PositionTracker", "RunReport", "Schedule", "StatefulDataLoader",
    "Stream", "StreamingDataLoader", "StreamingDataset", "TSVWriter", "World", "XSVWriter", "add_lengths",
    "decode_jpeg", "export_prometheus", "merge_index", "read_position", "register_encoding", "start_at",
    "verify_delivery",
]  # fmt: skip
