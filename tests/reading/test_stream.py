"""A stream as users of mosaicml-streaming know and subclass it."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

pytest.importorskip("torch")

from support.data import write_ids

from lightning_stream import MDSWriter, Stream, StreamingDataLoader, StreamingDataset, versions
from lightning_stream.errors import DigestError, NotFoundError

NUM_SAMPLES = 60


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        write_ids(tmp_path / "remote" / split, range(NUM_SAMPLES), size_limit=200)
    return tmp_path / "remote"


def test_what_a_stream_was_given_are_its_attributes() -> None:
    stream = Stream("s3://bucket/set", local=Path("/cache/x"), split="train", repeat=2.0, keep_zip=True)
    assert (stream.remote, stream.local, stream.split) == ("s3://bucket/set", "/cache/x", "train")
    assert (stream.proportion, stream.repeat, stream.choose) == (None, 2.0, None)
    assert (stream.download_retry, stream.download_timeout, stream.validate_hash) == (None, None, None)
    assert (stream.keep_zip, stream.safe_keep_zip, stream.options) == (True, True, {})
    assert repr(stream) == "Stream('s3://bucket/set/train')"
    with pytest.raises(TypeError, match="remoet"):
        Stream(remoet="x")  # type: ignore[call-arg]


class Named(Stream):
    """Uses names of its own for what the library has, or had, names for."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name in ("name", "weights", "options", "cache", "store", "defaults", "snapshot", "reader", "order"):
            setattr(self, name, f"my {name}")


def test_a_subclass_may_use_any_name_of_its_own(shards: Path, tmp_path: Path) -> None:
    stream = Named(remote=shards, split="train", local=tmp_path / "cache", repeat=0.5)
    loader = StreamingDataLoader(StreamingDataset(streams=[stream]), 5)
    assert len([number for batch in loader for number in batch["id"].tolist()]) == NUM_SAMPLES // 2
    assert stream.name == "my name"  # type: ignore[attr-defined]


class Own(Stream):
    """Downloads by itself."""

    calls: list[tuple[str, str | None]] = []  # noqa: RUF012

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        self.calls.append((from_basename, to_basename))
        assert self.remote is not None
        assert self.local is not None
        to = Path(self.local, self.split, to_basename or from_basename)
        shutil.copy(Path(self.remote, self.split, from_basename), to)
        return str(to)


class Watching(Own):
    """Lets the library download."""

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        self.calls.append((from_basename, to_basename))
        return Stream._download_file(self, from_basename, to_basename)


class ToItsPlace(Own):
    """Ignores the name it is to use."""

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        return super()._download_file(from_basename)


@pytest.mark.parametrize("kind", [Own, Watching, ToItsPlace])
@pytest.mark.parametrize("has_local", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_download_hook_gets_every_file(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Own], has_local: bool, num_workers: int
) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "private"))
    monkeypatch.setattr(Own, "calls", [])
    stream = kind(remote=str(shards), split="train", local=str(tmp_path / "cache") if has_local else None)
    stream = pickle.loads(pickle.dumps(stream))
    dataset = StreamingDataset(streams=[stream], shuffle=True)
    files = {path.name for path in (shards / "train").glob("*.*")}
    seen = [n for b in StreamingDataLoader(dataset, 5, num_workers=num_workers) for n in b["id"].tolist()]
    assert sorted(seen) == list(range(NUM_SAMPLES))
    assert {name for name, _ in kind.calls} == ({"index.json"} if num_workers else files)
    cache = dataset.reader.caches[0].folder
    assert files <= {path.name for path in cache.iterdir()}
    assert cache.is_relative_to(tmp_path / ("cache" if has_local else "private"))


def test_the_indexes_of_many_streams_are_fetched_side_by_side(shards: Path, tmp_path: Path) -> None:
    together = Barrier(4)

    class Meets(Own):
        def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
            together.wait(30)
            return super()._download_file(from_basename, to_basename)

    streams = [Meets(str(shards), split="train", local=str(tmp_path / f"cache{k}")) for k in range(4)]
    assert StreamingDataset(streams=streams).size == 4 * NUM_SAMPLES


def test_what_a_download_hook_brings_is_verified(shards: Path, tmp_path: Path) -> None:
    class Spoils(Own):
        def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
            path = Path(super()._download_file(from_basename, to_basename))
            content = path.read_bytes()
            path.write_bytes(content if "index" in from_basename else content[:-1] + b"!")
            return str(path)

    dataset = StreamingDataset(streams=[Spoils(remote=str(shards), split="val", local=str(tmp_path / "cache"))])
    with pytest.raises(DigestError, match=r"shard\.00000\.mds"):
        dataset[0]


@pytest.mark.parametrize("name", ["get_shards", "prepare_shard", "_prepare_shard_part", "_decompress_shard_part"])
def test_an_override_that_would_never_be_called_is_refused(name: str) -> None:
    kind = type("Mine", (Stream,), {name: lambda *_: None})
    with pytest.raises(TypeError, match=rf"found Mine\.{name}, which would never be called. Instead, "):
        kind(remote="s3://bucket/set")


def test_a_stream_has_one_weight_at_most() -> None:
    with pytest.raises(ValueError, match="proportion"):
        Stream(remote="s3://bucket/set", proportion=1.0, repeat=2.0)


@pytest.mark.parametrize("settings", [{"options": {"endpoint_url": "x"}}, {"credentials": "mine:keys"}])
def test_options_of_a_store_are_refused_where_there_is_none(settings: dict[str, Any], shards: Path) -> None:
    with pytest.raises(ValueError, match="options are those of the store of remote="):
        Stream(local=shards, **settings)


@pytest.mark.parametrize("place", ["remote", "local"])
def test_a_format_is_refused_where_an_mds_dataset_would_be_read_instead(place: str, shards: Path) -> None:
    with pytest.raises(ValueError, match=r"index\.json is an MDS dataset; found 'parquet'. Omit format"):
        StreamingDataset(format="parquet", **{place: shards / "train"})[0]


def test_what_a_store_lacks_is_a_file_not_found_too(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"index\.json") as caught:
        StreamingDataset(remote=tmp_path / "none", local=tmp_path / "cache")[0]
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), NotFoundError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_stream_is_a_value_that_several_datasets_may_read_each_with_a_split_of_its_own(tmp_path: Path) -> None:
    for first, split in ((0, "train"), (1000, "val")):
        with MDSWriter(out=tmp_path / "data" / split, columns={"id": "int"}) as writer:
            for number in range(4):
                writer.write({"id": first + number})
    stream = Stream(tmp_path / "data")
    before = dict(vars(stream))
    datasets = [StreamingDataset(streams=[stream], split=split) for split in ("train", "val")]
    assert [[dataset[k]["id"] for k in range(4)] for dataset in datasets] == [[0, 1, 2, 3], [1000, 1001, 1002, 1003]]
    assert [dataset.streams[0].split for dataset in datasets] == ["train", "val"]
    assert vars(stream) == before


def test_a_dataset_writes_nothing_into_a_stream_with_a_download_hook(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "private"))
    stream = Watching(remote=str(shards))
    before = dict(vars(stream))
    folders = []
    for split in ("train", "val"):
        dataset = StreamingDataset(streams=[stream], split=split)
        assert dataset[7]["id"] == 7
        folders.append(dataset.reader.caches[0].folder)
    assert vars(stream) == before
    assert folders[0] != folders[1]


def test_files_in_another_format_are_read_from_the_split_of_the_dataset(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir(parents=True)
        (tmp_path / "data" / split / "rows.jsonl").write_text(f'{{"from": "{split}"}}\n')
    stream = Stream(f"file://{tmp_path}/data")
    datasets = [StreamingDataset(streams=[stream], split=f"{split}/*.jsonl") for split in ("train", "val")]
    assert [dataset[0]["from"] for dataset in datasets] == ["train", "val"]


def test_a_stream_without_samples_is_mixed_with_one_that_has_an_added_column(tmp_path: Path) -> None:
    write_ids(tmp_path / "empty", [])
    write_ids(tmp_path / "full", range(5))
    versions.add_column(tmp_path / "full", "twice", "int", lambda sample: 2 * sample["id"])
    streams = [Stream(local=tmp_path / name) for name in ("empty", "full")]
    dataset = StreamingDataset(streams=streams)
    assert [dataset[k]["twice"] for k in range(5)] == [0, 2, 4, 6, 8]
    (batch,) = StreamingDataLoader(dataset, 5, num_workers=0)
    assert batch["twice"].tolist() == [0, 2, 4, 6, 8]
