"""MDS shards: read in place, gathered as columns, and encoded."""
