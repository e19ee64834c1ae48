"""What the recipes train on: each module converts its sources to MDS shards and streams them."""
