"""A disk that fills up while a shard is unpacked is said in the cache's words."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers.shards import make_dataset

from lightning_stream.cache import ShardCache, shards
from lightning_stream.errors import CacheFullError
from lightning_stream.formats.codecs import decompress_file
from lightning_stream.stores import LocalStore


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("compression", ["zstd", "gz", "bz2"])
def test_a_disk_that_fills_up_during_decompression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    make_dataset(tmp_path / "remote", 1, 100_000, compression=compression)

    def onto_a_full_disk(name: str, source: Path, target: Path, num_bytes: int) -> None:
        target.symlink_to("/dev/full")
        decompress_file(name, source, target, num_bytes)

    monkeypatch.setattr(shards, "decompress_file", onto_a_full_disk)
    cache = ShardCache(LocalStore(str(tmp_path / "remote")), tmp_path / "cache")
    entry = cache.index().entry(0)
    with pytest.raises(CacheFullError, match=r"the disk of the cache .* is full: .* are free.* raise your quota"):
        cache.ensure(entry)
    assert not cache.present(entry)
    assert Path("/dev/full").exists()
