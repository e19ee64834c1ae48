"""Samples to shards to a store, the index last: a dataset without index.json does not exist, one with it is complete."""

from lightning_stream.writer.mds import MDSWriter

__all__ = ["MDSWriter"]
