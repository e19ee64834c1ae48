"""Samples to shards in a store; the index is put last, so a dataset with an index.json is complete."""

from lightning_stream.writer.merge import merge_index
from lightning_stream.writer.writers import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter

__all__ = ["CSVWriter", "JSONWriter", "MDSWriter", "TSVWriter", "XSVWriter", "merge_index"]
