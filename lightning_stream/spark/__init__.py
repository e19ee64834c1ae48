"""From Spark to PyTorch: Spark's own verbs, conversion, a DataFrame as a dataset, and training on Spark's workers.

Names are loaded on first use: `dataframe_to_mds` needs pyspark and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_stream.lazy import lazy_names

if TYPE_CHECKING:
    from lightning_stream.spark.convert import dataframe_to_mds
    from lightning_stream.spark.datasource import MDSDataSource, register
    from lightning_stream.spark.distributor import distributor_env, lightning_trainer_kwargs, with_env
    from lightning_stream.spark.filter import excluded_ids
    from lightning_stream.spark.session import local_session
    from lightning_stream.spark.torch_dataset import StreamToTorchDataset, dataset_from_spark

_NAMES = {
    "convert": "dataframe_to_mds",
    "datasource": "MDSDataSource register",
    "distributor": "with_env distributor_env lightning_trainer_kwargs",
    "filter": "excluded_ids",
    "session": "local_session",
    "torch_dataset": "StreamToTorchDataset dataset_from_spark",
}
_EXTRAS = {"pyspark": "spark", "pyarrow": "spark", "pandas": "spark", "torch": "torch"}
__getattr__, __dir__ = lazy_names(__name__, _NAMES, _EXTRAS)

__all__ = [
    "StreamToTorchDataset", "MDSDataSource", "with_env", "dataframe_to_mds", "dataset_from_spark", "distributor_env",
    "excluded_ids", "local_session", "lightning_trainer_kwargs", "register",
]  # fmt: skip
