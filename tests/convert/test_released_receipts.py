"""A conversion that a former release began is continued: its receipts are read."""

from __future__ import annotations

import json

import zstandard

from lightning_stream.convert.partition import Receipt, index_bytes
from lightning_stream.formats.index import Index


def test_a_receipt_with_lengths_of_a_former_release_gives_the_same_index() -> None:
    raw = {"basename": "part-00000/shard.00000.mds", "bytes": 56, "hashes": {}}
    shard = {
        "column_encodings": ["int"], "column_names": ["id"], "column_sizes": [8], "compression": None, "format": "mds",
        "hashes": [], "raw_data": raw, "samples": 3, "size_limit": 100, "version": 2, "zip_data": None,
    }  # fmt: skip
    file = {"basename": "lengths.id.bin", "hashes": {"sha1": "ab"}, "mark": "", "num_bytes": 12, "origin": None}
    released = {
        "lengths": {"id": [file]},
        "num_samples": 3,
        "nulls": {},
        "partition": 0,
        "begins": "",
        "rows": [3],
        "shards": [shard],
    }
    receipt = Receipt.from_bytes(zstandard.compress(json.dumps(released).encode()))
    again = Receipt.from_bytes(receipt.to_bytes())
    assert receipt == again
    (entry,) = Index.from_bytes(index_bytes([again]), "here").lengths["id"]
    assert (entry.basename, entry.num_bytes, entry.num_samples, entry.hashes) == (
        "lengths.id.bin",
        12,
        3,
        {"sha1": "ab"},
    )
