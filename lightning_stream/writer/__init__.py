"""Samples to shards to a store, the index last: without index.json there is no dataset, with it it is complete."""

from lightning_stream.writer.mds import MDSWriter
from lightning_stream.writer.merge import merge_index
from lightning_stream.writer.rows import CSVWriter, JSONWriter, TSVWriter, XSVWriter

__all__ = ["CSVWriter", "JSONWriter", "MDSWriter", "TSVWriter", "XSVWriter", "merge_index"]
