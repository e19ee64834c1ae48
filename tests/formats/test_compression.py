"""Every compression name and hash, and decompression that is bounded by what the index promises."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stream.errors import FormatError, MissingExtraError
from lightning_stream.formats.codecs import (
    COMPRESSIONS,
    check_compression,
    compress,
    decompress_file,
)
from lightning_stream.formats.hashing import FASTEST_FIRST, check_hashes, digest, digest_file

DATA = b"some text that repeats, " * 400 + bytes(range(256))
HASHES = tuple(sorted(FASTEST_FIRST))
FAMILIES = ("br", "bz2", "gz", "lz4", "snappy", "zstd")


def decompress(name: str, data: bytes, num_bytes: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "packed"), Path(folder, "raw")
        source.write_bytes(data)
        decompress_file(name, source, target, num_bytes)
        return target.read_bytes()


def test_the_names_are_those_of_mds(shared_golden: Path) -> None:
    assert sorted(json.loads((shared_golden / "compressions.json").read_text())) == list(COMPRESSIONS)
    assert len(COMPRESSIONS) == 58


@pytest.mark.parametrize("name", [*COMPRESSIONS, "lz4"])
def test_every_compression_gives_its_data_back(name: str, tmp_path: Path) -> None:
    packed = compress(name, DATA)
    assert len(packed) < len(DATA) or name == "gz:0"
    assert decompress(name, packed, len(DATA)) == DATA
    (tmp_path / "packed").write_bytes(packed)
    decompress_file(name, tmp_path / "packed", tmp_path / "raw", len(DATA))
    assert (tmp_path / "raw").read_bytes() == DATA


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10)
@given(data=st.binary(max_size=4000))
def test_any_data_comes_back(name: str, data: bytes) -> None:
    assert decompress(name, compress(name, data), len(data)) == data


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_that_holds_more_or_less_than_promised_is_refused(name: str, tmp_path: Path) -> None:
    packed = compress(name, DATA)
    (tmp_path / "packed").write_bytes(packed)
    for promised in (len(DATA) - 1, len(DATA) + 1, 0):
        with pytest.raises(FormatError, match=r"must hold|not a readable"):
            decompress(name, packed, promised)
        with pytest.raises(FormatError, match="packed: "):
            decompress_file(name, tmp_path / "packed", tmp_path / "raw", promised)
        assert not (tmp_path / "raw").exists()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "flipped"])
def test_damaged_files_are_a_format_error(name: str, damage: str) -> None:
    packed = bytearray(compress(name, DATA))
    if damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
        packed[len(packed) // 3] ^= 0xFF
    data = {
        "truncated": bytes(packed[: len(packed) // 2]),
        "garbage": b"\x07" * 50,
        "empty": b"",
        "flipped": bytes(packed),
    }[damage]
    try:
        result = decompress(name, data, len(DATA))
    except FormatError:
        return
    assert damage == "flipped"
    assert len(result) == len(DATA)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_promise_beyond_any_shard_takes_no_memory(name: str) -> None:
    with pytest.raises(FormatError):
        decompress(name, compress(name, DATA), 1 << 61)


@pytest.mark.parametrize("name", ["br", "bz2", "gz", "zstd"])
def test_a_bomb_is_refused_in_bounded_memory(name: str) -> None:
    bomb = compress(name if name != "br" else "br:5", bytes(60 << 20))
    tracemalloc.start()
    with pytest.raises(FormatError, match="it holds more"):
        decompress(name, bomb, 100)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "data"), [("snappy", b"\x80\x80\x80\x80\x04" + bytes(20)), ("lz4", b"\x04\x22\x4d\x18" + bytes(21))]
)
def test_a_few_bytes_that_claim_a_gibibyte_take_no_memory(name: str, data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(FormatError, match=r"25 compressed bytes cannot hold 1073741824"):
        decompress(name, data, 1 << 30)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["snappy", "lz4"])
def test_the_best_that_a_block_codec_can_do_is_within_its_bound(name: str) -> None:
    for num_bytes in (1, 100, 1 << 22):
        assert decompress(name, compress(name, bytes(num_bytes)), num_bytes) == bytes(num_bytes)


def test_a_full_disk_is_not_taken_for_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(compress("zstd", DATA))
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    (tmp_path / "raw").symlink_to(full)
    with pytest.raises(OSError, match="No space left"):
        decompress_file("zstd", tmp_path / "packed", tmp_path / "raw", len(DATA))


@pytest.mark.parametrize("name", ["snappy", "lz4"])
def test_codecs_that_are_not_installed_name_their_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cramjam", None)
    for action in (lambda: compress(name, DATA), lambda: decompress(name, b"xx", 2)):
        with pytest.raises(MissingExtraError, match=r"lightning-stream\[codecs\]"):
            action()


@pytest.mark.parametrize(
    "name", ["zip", "zstd:0", "zstd:23", "zstd:03", "gz:10", "bz2:0", "br:12", "snappy:1", "zstd:", "zstd:x", ""]
)
def test_unknown_compressions_say_what_exists(name: str) -> None:
    with pytest.raises(ValueError, match="compression"):
        check_compression(name)


def test_hashes_equal_the_golden_digests(shared_golden: Path, tmp_path: Path) -> None:
    golden = json.loads((shared_golden / "hashes.json").read_text())["digests"]
    blob = bytes(range(256)) * 3
    (tmp_path / "blob").write_bytes(blob)
    assert {name: digest(name, blob) for name in HASHES} == golden
    assert digest_file(HASHES, tmp_path / "blob") == golden
    assert len(HASHES) == 17


def test_hashes_are_sorted_unique_and_known() -> None:
    assert check_hashes(["sha1", "md5", "sha1"]) == ("md5", "sha1")
    assert check_hashes("sha1") == ("sha1",)
    assert check_hashes(None) == ()
    assert digest("sha256", b"x") == hashlib.sha256(b"x").hexdigest()
    with pytest.raises(ValueError, match=r"must be among blake2b, .*: got 'crc32c'"):
        check_hashes(["crc32c"])
