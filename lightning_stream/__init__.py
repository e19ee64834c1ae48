"""Stream training data from object storage into PyTorch trainers, exactly.

Public names are loaded on first use (PEP 562), so that importing the package pulls in neither torch, nor a
trainer, nor Spark, nor a cloud client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_stream.errors import LightningStreamError, missing_extra

if TYPE_CHECKING:
    from lightning_stream.dataset import StreamingDataset
    from lightning_stream.formats.encodings import register_encoding
    from lightning_stream.formats.encodings.jpeg import decode_jpeg
    from lightning_stream.loader import StreamingDataLoader
    from lightning_stream.local_dataset import LocalDataset
    from lightning_stream.order import Position, World
    from lightning_stream.reading.stream import Stream
    from lightning_stream.spark import StreamToTorchDataset, dataframe_to_mds
    from lightning_stream.trainers.audit import verify_delivery
    from lightning_stream.trainers.checkpoints import read_position, start_at
    from lightning_stream.trainers.composer.spec import data_spec
    from lightning_stream.trainers.lightning.callback import StreamingCallback
    from lightning_stream.trainers.lightning.data_module import StreamingDataModule
    from lightning_stream.trainers.lightning.graceful_stop import GracefulStop, TrainingInterrupted
    from lightning_stream.trainers.lightning.monitor import RunMonitor
    from lightning_stream.trainers.lightning.sample_log import SampleLog
    from lightning_stream.trainers.tracker import PositionTracker
    from lightning_stream.trainers.transformers import StreamingTrainerCallback
    from lightning_stream.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter, merge_index

__version__ = "0.1.0"

# Public name -> the module that has it.
_HOME = {
    "CSVWriter": "writer",
    "GracefulStop": "trainers.lightning.graceful_stop",
    "JSONWriter": "writer",
    "LocalDataset": "local_dataset",
    "MDSWriter": "writer",
    "Position": "order",
    "PositionTracker": "trainers.tracker",
    "RunMonitor": "trainers.lightning.monitor",
    "SampleLog": "trainers.lightning.sample_log",
    "Stream": "reading.stream",
    "StreamToTorchDataset": "spark",
    "StreamingCallback": "trainers.lightning.callback",
    "StreamingDataLoader": "loader",
    "StreamingDataModule": "trainers.lightning.data_module",
    "StreamingDataset": "dataset",
    "StreamingTrainerCallback": "trainers.transformers",
    "TSVWriter": "writer",
    "TrainingInterrupted": "trainers.lightning.graceful_stop",
    "World": "order",
    "XSVWriter": "writer",
    "data_spec": "trainers.composer.spec",
    "dataframe_to_mds": "spark",
    "decode_jpeg": "formats.encodings.jpeg",
    "merge_index": "writer",
    "read_position": "trainers.checkpoints",
    "register_encoding": "formats.encodings",
    "start_at": "trainers.checkpoints",
    "verify_delivery": "trainers.audit",
}
# What an absent package means: the extra of ours that brings it.
_EXTRA_OF = {
    "torch": "torch",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "composer": "composer",
    "transformers": "transformers",
    "pyspark": "spark",
}

__all__ = [
    "CSVWriter",
    "GracefulStop",
    "JSONWriter",
    "LightningStreamError",
    "LocalDataset",
    "MDSWriter",
    "Position",
    "PositionTracker",
    "RunMonitor",
    "SampleLog",
    "Stream",
    "StreamToTorchDataset",
    "StreamingCallback",
    "StreamingDataLoader",
    "StreamingDataModule",
    "StreamingDataset",
    "StreamingTrainerCallback",
    "TSVWriter",
    "TrainingInterrupted",
    "World",
    "XSVWriter",
    "data_spec",
    "dataframe_to_mds",
    "decode_jpeg",
    "merge_index",
    "read_position",
    "register_encoding",
    "start_at",
    "verify_delivery",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning_stream' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"lightning_stream.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _EXTRA_OF:
            raise
        raise missing_extra(package, _EXTRA_OF[package], f"lightning_stream.{name}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
