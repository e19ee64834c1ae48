"""Lengths of all samples before any sample is read: from files, fetched once, or from the offsets in the shards."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

pytest.importorskip("torch")

from servers.web import WebServer

from lightning_stream import JSONWriter, LocalDataset, MDSWriter, Stream, StreamingDataset, add_lengths
from lightning_stream.errors import DigestError, FormatError, NotFoundError
from lightning_stream.formats.index import Index
from lightning_stream.formats.mds.encode import MdsEncoder

NUM_SAMPLES = 60


def tokens(k: int) -> np.ndarray[Any, Any]:
    return np.full(1 + (k * 37) % 600, k, np.int32)


TRUTH = np.array([len(tokens(k)) for k in range(NUM_SAMPLES)], np.uint32)


def write(out: Path, ids: Any = range(NUM_SAMPLES), lengths: Any = None, **options: Any) -> Path:
    columns = {"tokens": "ndarray:int32", "id": "int"}
    with MDSWriter(out=out, columns=columns, lengths=lengths, **{"size_limit": 1 << 13, **options}) as writer:
        for k in ids:
            writer.write({"tokens": tokens(k), "id": k})
    return out


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer() as started:
        yield started


def serve(server: WebServer, folder: Path) -> str:
    paths = (path for path in folder.rglob("*") if path.is_file())
    server.objects.update(
        {f"/{folder.name}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in paths}
    )
    return f"{server.url}/{folder.name}"


def asked(server: WebServer) -> list[str]:
    """What was asked for since the last call, but the index and its versions."""
    found = [path for _, path in server.asked if "/versions/" not in path]
    server.asked.clear()
    return [path.rpartition("/")[2] for path in found if not path.endswith("/index.json")]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_reader_has_the_lengths_that_were_written(tmp_path: Path, compression: str | None) -> None:
    folder = write(tmp_path / "set", lengths={"tokens": len}, compression=compression)
    for dataset in (StreamingDataset(local=folder), LocalDataset(folder)):
        found = dataset.lengths("tokens")
        assert (found.dtype, found.flags.writeable) == (np.uint32, False)
        np.testing.assert_array_equal(found, TRUTH)
        assert dataset.lengths("tokens") is found


def test_remote_lengths_are_fetched_once_per_machine_and_nothing_else_is(tmp_path: Path, server: WebServer) -> None:
    url = serve(server, write(tmp_path / "set", lengths={"tokens": len}))
    dataset = StreamingDataset(remote=url, local=tmp_path / "cache", cache_limit=1)
    np.testing.assert_array_equal(dataset.lengths("tokens"), TRUTH)
    assert asked(server) == ["lengths.tokens.00000.bin"]
    others = [pickle.loads(pickle.dumps(dataset)), StreamingDataset(remote=url, local=tmp_path / "cache")]
    for other in others:
        np.testing.assert_array_equal(other.lengths("tokens"), TRUTH)
    assert asked(server) == []
    code = (
        "import sys; from lightning_stream import StreamingDataset\n"
        "print(StreamingDataset(remote=sys.argv[1], local=sys.argv[2]).reader.lengths_digest('tokens'))"
    )
    command = [sys.executable, "-c", code, url, str(tmp_path / "cache")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [dataset.reader.lengths_digest("tokens")]
    assert asked(server) == []


@pytest.mark.parametrize("count", [1, 60, 61, 500])  # 240 bytes are the most that have an xxh3_64 of their own
@pytest.mark.parametrize("hashes", [("xxh3_64",), ("sha1", "xxh3_64"), ("md5",), ()])
def test_the_digest_of_lengths_is_that_of_all_their_bytes(tmp_path: Path, count: int, hashes: tuple[str, ...]) -> None:
    columns = {"tokens": "ndarray:int32"}
    with MDSWriter(out=str(tmp_path), columns=columns, lengths={"tokens": len}, hashes=hashes) as writer:
        for length in range(count):
            writer.write({"tokens": np.zeros(length, np.int32)})
    wanted = xxhash.xxh3_128(np.arange(count, dtype="<u4").tobytes()).hexdigest()
    reader = StreamingDataset(local=tmp_path).reader
    assert reader.lengths_digest("tokens") == wanted
    chosen = StreamingDataset(local=tmp_path, filter={"lengths": {"tokens": (0, 0)}}).reader
    assert chosen.lengths_digest("tokens") == xxhash.xxh3_128(bytes(4)).hexdigest()


def test_the_digest_of_lengths_is_not_that_of_a_damaged_file_in_the_cache(tmp_path: Path, server: WebServer) -> None:
    url = serve(server, write(tmp_path / "set", lengths={"tokens": len}))
    dataset = StreamingDataset(remote=url, local=tmp_path / "cache")
    wanted = dataset.reader.lengths_digest("tokens")
    (file,) = (tmp_path / "cache").glob("lengths.*.bin")
    file.write_bytes(bytes(file.stat().st_size))
    again = StreamingDataset(remote=url, local=tmp_path / "cache").reader
    assert again.lengths_digest("tokens") == wanted
    np.testing.assert_array_equal(again.lengths("tokens"), TRUTH)


class Hooked(Stream):
    """A stream that downloads files in its own way."""

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        downloaded.append(from_basename)
        return super()._download_file(from_basename, to_basename)


downloaded: list[str] = []


def test_a_stream_that_downloads_by_itself_gets_the_files_of_lengths_too(tmp_path: Path) -> None:
    for name, lengths in (("with", {"tokens": len}), ("without", None)):
        write(tmp_path / name, lengths=lengths)
    downloaded.clear()
    dataset = StreamingDataset(streams=[Hooked(tmp_path / "with", local=tmp_path / "cache")])
    np.testing.assert_array_equal(dataset.lengths("tokens"), TRUTH)
    assert downloaded == ["index.json", "lengths.tokens.00000.bin"]
    with pytest.raises(NotFoundError, match="a store that reads ranges"):
        StreamingDataset(streams=[Hooked(tmp_path / "without", local=tmp_path / "other")]).lengths("tokens")


def test_lengths_stay_in_the_cache_while_shards_are_evicted(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", lengths={"tokens": len}, hashes=["sha1", "xxh3_64"])
    options = {"cache_limit": 30_000, "validate_hash": "sha1"}
    dataset = StreamingDataset(remote=folder, local=tmp_path / "cache", **options)
    found = dataset.lengths("tokens")
    for k in range(NUM_SAMPLES):
        assert len(dataset[k]["tokens"]) == found[k]
    assert len(list((tmp_path / "cache").glob("*.mds"))) < dataset.num_shards
    assert (tmp_path / "cache" / "lengths.tokens.00000.bin").stat().st_size == 4 * NUM_SAMPLES


def test_a_pickled_reader_does_not_carry_the_numbers(tmp_path: Path) -> None:
    dataset = StreamingDataset(local=write(tmp_path / "set", lengths={"tokens": len}))
    before = len(pickle.dumps(dataset.reader))
    dataset.lengths("tokens")
    assert len(pickle.dumps(dataset.reader)) - before < len(pickle.dumps(dataset.reader.indexes)) + 2000
    assert pickle.loads(pickle.dumps(dataset.reader))._lengths == {}


def test_lengths_that_were_damaged_in_the_cache_are_fetched_again(tmp_path: Path, server: WebServer) -> None:
    url = serve(server, write(tmp_path / "set", lengths={"tokens": len}))
    StreamingDataset(remote=url, local=tmp_path / "cache").lengths("tokens")
    path = tmp_path / "cache" / "lengths.tokens.00000.bin"
    for damage in (path.read_bytes()[:-4], b"\0" * path.stat().st_size):
        path.write_bytes(damage)
        dataset = StreamingDataset(remote=url, local=tmp_path / "cache")
        asked(server)
        np.testing.assert_array_equal(dataset.lengths("tokens"), TRUTH)
        assert asked(server) == ["lengths.tokens.00000.bin"]


def test_wrong_bytes_in_the_store_are_an_error_that_names_the_file(tmp_path: Path, server: WebServer) -> None:
    folder = write(tmp_path / "set", lengths={"tokens": len})
    path = folder / "lengths.tokens.00000.bin"
    wrong = path.read_bytes()[:-1] + b"\x01"
    path.write_bytes(wrong)
    url = serve(server, folder)
    for dataset in (StreamingDataset(local=folder), StreamingDataset(remote=url, local=tmp_path / "cache")):
        with pytest.raises(DigestError, match=r"lengths\.tokens\.00000\.bin: the index promises xxh3_64"):
            dataset.lengths("tokens")
        assert dataset[3]["id"] == 3
    path.unlink()
    del server.objects["/set/lengths.tokens.00000.bin"]
    for dataset in (StreamingDataset(local=folder), StreamingDataset(remote=url, local=tmp_path / "cache")):
        with pytest.raises(NotFoundError, match=r"lengths\.tokens\.00000\.bin.* index lists"):
            dataset.lengths("tokens")


def test_lengths_of_another_dataset_at_the_same_url_are_not_used(tmp_path: Path, server: WebServer) -> None:
    for k, ids in enumerate((range(30), range(30, 60))):
        url = serve(server, write(tmp_path / str(k) / "set", ids, {"tokens": len}, hashes=[]))
        found = StreamingDataset(remote=url, local=tmp_path / "cache").lengths("tokens")
        np.testing.assert_array_equal(found, TRUTH[list(ids)])


def test_several_streams_have_their_lengths_one_after_another(tmp_path: Path) -> None:
    parts = [range(20), range(20, 25), range(25, 60)]
    for k, ids in enumerate(parts):
        write(tmp_path / str(k), ids, {"tokens": len} if k != 1 else None)
    write(tmp_path / "2", range(5), {"tokens": len}, append=True)
    write(tmp_path / "empty", [])
    streams = [Stream(local=tmp_path / name) for name in ("0", "empty", "1", "2")]
    dataset = StreamingDataset(streams=streams)
    np.testing.assert_array_equal(dataset.lengths("tokens"), np.concatenate([TRUTH, TRUTH[:5]]))
    assert not dataset.lengths("tokens").flags.writeable
    assert [len(dataset[k]["tokens"]) for k in (0, 22, 64)] == dataset.lengths("tokens")[[0, 22, 64]].tolist()


def test_a_subset_has_the_lengths_of_its_samples_and_a_digest_of_its_own(tmp_path: Path) -> None:
    dataset = StreamingDataset(local=write(tmp_path / "set", lengths={"tokens": len}))
    part = dataset.subset([50, 3, 7])
    assert part.lengths("tokens").tolist() == [len(sample["tokens"]) for sample in part[:]]
    assert not part.lengths("tokens").flags.writeable
    digests = {each.reader.lengths_digest("tokens") for each in (dataset, part, part.subset([0]))}
    assert len(digests) == 3
    assert all(len(digest) == 32 for digest in digests)


def test_the_digest_is_that_of_the_numbers_however_they_are_stored(tmp_path: Path) -> None:
    write(tmp_path / "whole", lengths={"tokens": len})
    write(tmp_path / "parts", range(30), {"tokens": len})
    write(tmp_path / "parts", range(30, NUM_SAMPLES), {"tokens": len}, append=True)
    write(tmp_path / "none")
    found = [StreamingDataset(local=tmp_path / name).reader for name in ("whole", "parts", "none")]
    assert len({reader.lengths_digest("tokens") for reader in found}) == 1


def test_a_version_has_the_lengths_that_it_had(tmp_path: Path) -> None:
    write(tmp_path / "set", range(20), {"tokens": len})
    version = Index.from_file(tmp_path / "set" / "index.json").digest[:16]
    write(tmp_path / "set", range(20, 30), {"tokens": len}, append=True)
    assert len(StreamingDataset(local=tmp_path / "set").lengths("tokens")) == 30
    found = StreamingDataset(local=tmp_path / "set", version=version).lengths("tokens")
    np.testing.assert_array_equal(found, TRUTH[:20])


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("cached", [False, True])
def test_lengths_that_are_added_to_a_version_are_those_of_its_digest_and_number(
    tmp_path: Path, number: int, cached: bool
) -> None:
    write(tmp_path / "set", range(20))
    if number:
        write(tmp_path / "set", range(20, 30), append=True)
    digest = Index.from_file(tmp_path / "set" / "index.json").digest
    place = {"remote": tmp_path / "set", **({"local": tmp_path / "cache"} if cached else {})}
    assert StreamingDataset(**place, version=digest).size == 20 + 10 * number  # its index is in the cache now
    add_lengths(tmp_path / "set", {"tokens": lambda value: 7})
    for version in (number, digest[:6], digest):
        lengths = StreamingDataset(**place, version=version).lengths("tokens")
        assert lengths.tolist() == [7] * (20 + 10 * number)
    add_lengths(tmp_path / "set", {"tokens": lambda value: 8}, overwrite=True)
    dataset = StreamingDataset(**place, version=digest)
    assert dataset.lengths("tokens").tolist() == [8] * (20 + 10 * number)
    in_worker = pickle.dumps(dataset)
    add_lengths(tmp_path / "set", {"tokens": lambda value: 9}, overwrite=True)
    if cached:
        assert pickle.loads(in_worker).lengths("tokens")[0] == 8, "a worker has the lengths of its trainer"
    assert StreamingDataset(**place, version=digest).lengths("tokens")[0] == 9


# Without files: from the offsets in the shards


def test_the_only_column_of_variable_size_needs_one_range_per_shard_once(tmp_path: Path, server: WebServer) -> None:
    url = serve(server, write(tmp_path / "set"))
    server.headers.clear()
    found = StreamingDataset(remote=url, local=tmp_path / "cache").lengths("tokens")
    np.testing.assert_array_equal(found, TRUTH)
    ranges = [headers.get("Range") for headers in server.headers]
    names = asked(server)
    num_shards = len(Index.from_file(tmp_path / "set" / "index.json"))
    assert num_shards > 5
    assert {names.count(name) for name in names} == {2}  # the table, and a byte that shows one dimension
    assert len(set(names)) == num_shards
    assert None not in ranges[-len(names) :]
    again = StreamingDataset(remote=url, local=tmp_path / "cache").lengths("tokens")
    np.testing.assert_array_equal(again, TRUTH)
    assert asked(server) == []
    assert not list((tmp_path / "cache").glob("*.mds"))


def test_lengths_from_shards_without_hashes_are_never_those_of_other_data(tmp_path: Path, server: WebServer) -> None:
    for sizes in ([3, 9], [9, 3]):
        with MDSWriter(out=tmp_path / str(sizes) / "set", columns={"x": "bytes"}, hashes=[]) as writer:
            writer.write_batch({"x": [b"x" * size for size in sizes]})
        dataset = StreamingDataset(remote=serve(server, tmp_path / str(sizes) / "set"), local=tmp_path / "cache")
        assert dataset.lengths("x").tolist() == sizes
        assert not dataset.lengths("x").flags.writeable


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float64"])
def test_arrays_of_every_size_have_their_number_of_items(tmp_path: Path, dtype: str) -> None:
    sizes = [1, 2, 254, 255, 256, 257, 258, 259, 260, 65534, 65535, 65536, 65537, 65538, 3]
    with MDSWriter(out=tmp_path / "set", columns={"a": "int", "x": f"ndarray:{dtype}", "z": "int8"}) as writer:
        for size in sizes:
            writer.write({"a": 1, "x": np.zeros(size, dtype), "z": 1})
    assert StreamingDataset(local=tmp_path / "set").lengths("x").tolist() == sizes


def test_text_and_bytes_have_their_number_of_bytes(tmp_path: Path) -> None:
    for encoding, values in (("str", ["", "ä", "text"]), ("bytes", [b"", b"\xc3\xa4", b"text"])):
        with MDSWriter(out=tmp_path / encoding, columns={"x": encoding}) as writer:
            writer.write_batch({"x": values})
        assert StreamingDataset(local=tmp_path / encoding).lengths("x").tolist() == [0, 2, 4]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_arrays_of_a_fixed_shape_need_no_request(tmp_path: Path, server: WebServer, compression: str | None) -> None:
    columns = {"x": "ndarray:int32:16,2", "name": "str", "y": "str"}
    with MDSWriter(out=tmp_path / "set", columns=columns, compression=compression) as writer:
        for _ in range(5):
            writer.write({"x": np.zeros((16, 2), np.int32), "name": "n", "y": ""})
    dataset = StreamingDataset(remote=serve(server, tmp_path / "set"), local=tmp_path / "cache")
    assert dataset.lengths("x").tolist() == [16] * 5
    assert asked(server) == []


@pytest.mark.parametrize("shape", [(2, 3), (100, 100), (1, 1), (300, 70000), (5, 5, 5)])
def test_arrays_of_several_dimensions_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with MDSWriter(out=tmp_path / "set", columns={"x": "ndarray:uint8"}) as writer:
        writer.write({"x": np.zeros(shape, np.uint8)})
    with pytest.raises(FormatError, match=r"not those of ndarray:uint8 of one dimension.*lightning-stream convert"):
        StreamingDataset(local=tmp_path / "set").lengths("x")


def test_a_dataset_without_lengths_names_both_remedies_and_what_there_is(tmp_path: Path) -> None:
    write(tmp_path / "good", lengths={"tokens": len, "other": lambda _: 1})
    write(tmp_path / "packed", compression="zstd")
    with MDSWriter(out=tmp_path / "two", columns={"tokens": "ndarray:int32", "text": "str"}) as writer:
        writer.write({"tokens": tokens(3), "text": "x"})
    with JSONWriter(out=tmp_path / "rows", columns={"tokens": "str"}) as rows:
        rows.write({"tokens": "x"})
    with MDSWriter(out=tmp_path / "json", columns={"tokens": "json"}) as others:
        others.write({"tokens": [1]})
    folders = [tmp_path / name for name in ("good", "packed", "two", "rows", "json")]
    with pytest.raises(NotFoundError) as caught:
        StreamingDataset(streams=[Stream(local=folder) for folder in folders]).lengths("tokens")
    text = str(caught.value)
    assert "good" not in text
    assert f"{folders[1]} has none, and its compressed shards would have to be read whole" in text
    assert "'tokens' is ndarray:int32 beside text" in text
    assert f"{folders[3]} has none, and they follow" in text
    assert "'tokens' is json" in text
    assert "Add them with `lightning-stream convert PATH --lengths tokens`" in text
    assert "lengths={'tokens': len}" in text
    assert text.endswith("Known lengths: other, tokens.")
    with pytest.raises(NotFoundError, match="has no lengths and no column of this name, but id, tokens"):
        StreamingDataset(local=folders[0]).lengths("frames")
    for folder in folders[1:4]:
        add_lengths(folder, {"tokens": len}, num_workers=1)
    found = StreamingDataset(streams=[Stream(local=folder) for folder in folders[1:4]]).lengths("tokens")
    np.testing.assert_array_equal(found, [*TRUTH, len(tokens(3)), 1])


def test_shards_that_do_not_fit_their_index_give_no_lengths(tmp_path: Path) -> None:
    folder = write(tmp_path / "set")
    path = folder / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    data[8] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"shard\.00000\.mds: its offsets are not those of"):
        StreamingDataset(local=folder).lengths("tokens")


def test_the_golden_datasets_of_mosaicml_streaming_have_lengths_from_their_offsets(shared_golden: Path) -> None:
    checked = 0
    for path in sorted(shared_golden.rglob("index.json")):
        dataset = LocalDataset(path.parent, allow_unsafe_types=True)
        index = Index.from_file(path)
        for name, encoding in index.columns.items():
            if encoding not in ("str", "bytes") and not encoding.startswith("ndarray:"):
                continue
            try:
                found = dataset.lengths(name)
            except (NotFoundError, FormatError):
                continue
            values = [dataset[k][name] for k in range(len(dataset))]
            assert found.tolist() == [len(v.encode() if isinstance(v, str) else v) for v in values], (path, name)
            checked += 1
    assert checked > 0


def test_a_head_of_a_sample_is_as_the_lengths_assume() -> None:
    encoder = MdsEncoder({"a": "int", "x": "ndarray:int32"}, None, (), None)
    head, a, x = encoder.encode({"a": 1, "x": np.arange(300, dtype=np.int32)})
    assert (len(head), len(a), x[0] >> 2, len(x)) == (4, 8, 1, 1 + 2 + 1200)


def test_lengths_of_files_in_another_format_are_those_of_the_encoding_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "part.tar", "w") as archive:
        for number in range(3):
            content = "\u00e4".encode() * number
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    for encoding in ("str", "bytes", "str"):
        stream = Stream(tmp_path / "data", local=tmp_path / "cache", columns={"txt": encoding})
        dataset = StreamingDataset(streams=[stream])
        assert dataset.lengths("txt").tolist() == [len(sample["txt"]) for sample in dataset]
