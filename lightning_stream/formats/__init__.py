"""Bytes to samples and back: the index, MDS and row shards, encodings, compressions and hashes.

Nothing here moves bytes over a network, and nothing needs torch. Byte-for-byte facts are those of the MDS format,
version 2, so that shards written here are read by mosaicml-streaming and the other way round.
"""
