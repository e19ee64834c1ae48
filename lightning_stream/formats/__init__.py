"""Bytes to samples and back: the index, MDS and row shards, encodings, compressions and hashes.

Nothing here moves bytes over a network, and nothing needs torch. Byte-for-byte facts are those of the MDS format,
version 2: mosaicml-streaming reads the shards written here, and the shards that it writes are read here.
"""
