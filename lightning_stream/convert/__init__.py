"""Conversion of datasets to MDS shards, in parts that are each written whole or not at all."""
