"""From Spark to PyTorch: conversion, a DataFrame as a dataset, and training on Spark's workers.

Names are loaded on first use: `dataframe_to_mds` needs pyspark and no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_stream.errors import missing_extra

if TYPE_CHECKING:
    from lightning_stream.spark.convert import dataframe_to_mds
    from lightning_stream.spark.distributor import carrying_env, distributor_env, trainer_devices
    from lightning_stream.spark.session import local_session
    from lightning_stream.spark.torch_dataset import StreamToTorchDataset, dataset_from_spark

_HOME = {
    "dataframe_to_mds": "convert",
    "carrying_env": "distributor",
    "distributor_env": "distributor",
    "trainer_devices": "distributor",
    "local_session": "session",
    "StreamToTorchDataset": "torch_dataset",
    "dataset_from_spark": "torch_dataset",
}
_EXTRA_OF = {"pyspark": "spark", "pyarrow": "spark", "pandas": "spark", "torch": "torch"}

__all__ = [
    "StreamToTorchDataset",
    "carrying_env",
    "dataframe_to_mds",
    "dataset_from_spark",
    "distributor_env",
    "local_session",
    "trainer_devices",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lightning_stream.spark' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"lightning_stream.spark.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _EXTRA_OF:
            raise
        raise missing_extra(package, _EXTRA_OF[package], f"lightning_stream.spark.{name}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
