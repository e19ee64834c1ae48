"""From sample ids to samples: streams, their shards, fetching ahead, and what to do with bad data."""
