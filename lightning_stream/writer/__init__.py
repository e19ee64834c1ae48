"""Samples to shards in a store; the index is put last, so a dataset with an index.json is complete.

Names are loaded on first use: those who only read need few of the modules here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_stream.lazy import lazy_names

if TYPE_CHECKING:
    from .merge import merge_index
    from .writers import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter

__getattr__, __dir__ = lazy_names(
    __name__, {"merge": "merge_index", "writers": "CSVWriter JSONWriter MDSWriter TSVWriter XSVWriter"}, {}
)

__all__ = ["CSVWriter", "JSONWriter", "MDSWriter", "TSVWriter", "XSVWriter", "merge_index"]
