"""Files of rows to MDS shards, in parallel processes: each row exactly once, the same bytes every time.

::

    from lightning_stream.convert import Inputs, convert, read_manifest

    result = convert("photos/", "shards/", val_fraction=0.1)  # class folders of images
    result = convert("rows/*.parquet", "s3://bucket/rows")  # columns from the schema
    result = convert("texts.jsonl.gz", "texts", columns={"text": "str"}, compression="zstd:7")
    result = convert(Inputs(paths, samples_of_path), "mine")  # the samples that a function returns for each path
    print(result)  # counts, bytes, seconds

See `convert` for all settings. Names are loaded on first use; Parquet, Arrow and CSV files need the ``convert`` extra
(pyarrow).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_stream.lazy import lazy_names

if TYPE_CHECKING:
    from lightning_stream.convert.api import convert
    from lightning_stream.convert.lengths import add_lengths
    from lightning_stream.convert.publish import ConversionResult, read_manifest
    from lightning_stream.sources.inputs import Inputs

_NAMES = {"api": "convert Inputs", "lengths": "add_lengths", "publish": "ConversionResult read_manifest"}
__getattr__, __dir__ = lazy_names(__name__, _NAMES, {"pyarrow": "convert"})

__all__ = ["ConversionResult", "Inputs", "add_lengths", "convert", "read_manifest"]
