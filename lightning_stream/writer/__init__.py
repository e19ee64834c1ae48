"""Samples to shards to a store, the index last: without index.json there is no dataset, with it it is complete."""

from lightning_stream.writer.mds import MDSWriter

__all__ = ["MDSWriter"]
