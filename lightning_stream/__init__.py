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
    from lightning_stream.formats.encodings.jpeg import decode_jpeg as decode_jpeg
    from lightning_stream.loader import StreamingDataLoader
    from lightning_stream.local_dataset import LocalDataset
    from lightning_stream.order import Position, World
    from lightning_stream.reading.stream import Stream
    from lightning_stream.spark import StreamToTorchDataset as StreamToTorchDataset
    from lightning_stream.spark import dataframe_to_mds as dataframe_to_mds
    from lightning_stream.trainers.audit import verify_delivery as verify_delivery
    from lightning_stream.trainers.checkpoints import read_position as read_position
    from lightning_stream.trainers.checkpoints import start_at as start_at
    from lightning_stream.trainers.composer.spec import data_spec as data_spec
    from lightning_stream.trainers.lightning.callback import StreamingCallback as StreamingCallback
    from lightning_stream.trainers.lightning.data_module import StreamingDataModule as StreamingDataModule
    from lightning_stream.trainers.tracker import PositionTracker as PositionTracker
    from lightning_stream.trainers.transformers import StreamingTrainerCallback as StreamingTrainerCallback
    from lightning_stream.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter, merge_index

__version__ = "0.1.0"

# Public name -> the module that has it.
_HOME = {
    "CSVWriter": "writer",
    "JSONWriter": "writer",
    "LocalDataset": "local_dataset",
    "MDSWriter": "writer",
    "Position": "order",
    "Stream": "reading.stream",
    "StreamToTorchDataset": "spark",
    "StreamingCallback": "trainers.lightning.callback",
    "StreamingDataLoader": "loader",
    "StreamingDataModule": "trainers.lightning.data_module",
    "StreamingDataset": "dataset",
    "TSVWriter": "writer",
    "World": "order",
    "XSVWriter": "writer",
    "PositionTracker": "trainers.tracker",
    "StreamingTrainerCallback": "trainers.transformers",
    "data_spec": "trainers.composer.spec",
    "decode_jpeg": "formats.encodings.jpeg",
    "dataframe_to_mds": "spark",
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

# What `import *` gives: nothing that needs a trainer or Spark.
__all__ = [
    "CSVWriter",
    "JSONWriter",
    "LightningStreamError",
    "LocalDataset",
    "MDSWriter",
    "Position",
    "PositionTracker",
    "Stream",
    "StreamingDataLoader",
    "StreamingDataset",
    "TSVWriter",
    "World",
    "XSVWriter",
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
