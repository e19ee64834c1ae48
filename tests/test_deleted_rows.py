"""Deleted samples: a newer version does not have them, the versions before do, and no shard is changed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import Stream, StreamingDataLoader, StreamingDataset, add_lengths, merge_index, versions
from lightning_stream.cli import main
from lightning_stream.errors import ConflictError, DigestError, NotFoundError, SnapshotMismatch
from lightning_stream.formats.index import Index
from lightning_stream.stores import LocalStore
from lightning_stream.version_log import read_newest
from lightning_stream.writer import MDSWriter


def write(out: Path, first: int, count: int = 60, **how: Any) -> None:
    with MDSWriter(out=out, columns={"id": "int", "text": "str"}, size_limit=300, **how) as writer:
        for number in range(first, first + count):
            writer.write({"id": number, "text": "x" * (number % 7)})


def ids(dataset: StreamingDataset) -> list[int]:
    return [sample["id"] for sample in dataset[:]]


@pytest.mark.parametrize("cached", [False, True])
def test_deleted_samples_are_in_no_sample_batch_or_length_of_the_newer_version(tmp_path: Path, cached: bool) -> None:
    place: dict[str, Any] = {"remote": tmp_path / "set", **({"local": tmp_path / "cache"} if cached else {})}
    write(tmp_path / "set", 0, lengths={"text": len})
    shards = {path: path.read_bytes() for path in (tmp_path / "set").glob("shard.*")}
    assert versions.delete_rows(tmp_path / "set", [3, 17, 59, 3], message="doubles") == 3
    kept = [number for number in range(60) if number not in (3, 17, 59)]
    dataset = StreamingDataset(**place, shuffle=True)
    assert ids(dataset) == kept
    assert len(dataset) == 57
    reader = dataset._streaming_source.reader
    assert reader.original_ids(np.arange(57)).tolist() == kept
    assert dataset.lengths("text").tolist() == [number % 7 for number in kept]
    batches = [batch["id"].tolist() for batch in StreamingDataLoader(dataset, 10)]
    assert sorted(number for batch in batches for number in batch) == kept
    assert ids(StreamingDataset(**place, version=0)) == list(range(60))
    assert {path: path.read_bytes() for path in (tmp_path / "set").glob("shard.*")} == shards
    assert versions.delete_rows(tmp_path / "set", [3]) == 0
    assert [entry.num_samples for entry in versions.log(tmp_path / "set")] == [None, 57, 57]


def test_ids_in_the_shards_stay_after_deletions_and_appends(tmp_path: Path) -> None:
    write(tmp_path, 0)
    versions.delete_rows(tmp_path, range(10))
    write(tmp_path, 60, 10, append=True)
    versions.delete_rows(tmp_path, [61])
    dataset = StreamingDataset(local=tmp_path, filter={"exclude_ids": [12, 69]})
    wanted = [number for number in range(10, 70) if number not in (12, 61, 69)]
    assert ids(dataset) == wanted
    add_lengths(tmp_path, {"text": len}, num_workers=1)
    dataset = StreamingDataset(local=tmp_path, filter={"lengths": {"text": (3, None)}})
    assert ids(dataset) == [number for number in range(10, 70) if number != 61 and number % 7 >= 3]


def test_ids_belong_to_the_version_for_which_they_were_noted(tmp_path: Path) -> None:
    write(tmp_path, 0)
    noted = versions.log(tmp_path)[-1].digest
    write(tmp_path, 60, 10, append=True)
    versions.add_column(tmp_path, "half", "float64", lambda sample: sample["id"] / 2)
    assert versions.delete_rows(tmp_path, [5, 59], version=noted) == 2
    assert versions.delete_rows(tmp_path, where=lambda sample: sample["id"] > 57, version=noted) == 1
    with pytest.raises(ValueError, match="ids are those of samples, 0 to 59; found 1 others"):
        versions.delete_rows(tmp_path, [60], version=noted)
    left = [number for number in range(70) if number not in (5, 58, 59)]
    assert ids(StreamingDataset(local=tmp_path)) == left
    versions.compact(tmp_path)
    with pytest.raises(ConflictError, match="other ids"):
        versions.delete_rows(tmp_path, [6], version=noted)  # now it is sample 7
    assert ids(StreamingDataset(local=tmp_path)) == left


def test_samples_are_deleted_by_a_function_of_them(tmp_path: Path) -> None:
    write(tmp_path / "set", 0)
    assert versions.delete_rows(tmp_path / "set", where=lambda sample: sample["id"] % 3 == 0) == 20
    assert versions.delete_rows(tmp_path / "set", where=lambda sample: sample["id"] % 2 == 0) == 20
    assert ids(StreamingDataset(local=tmp_path / "set")) == [n for n in range(60) if n % 3 and n % 2]


def test_a_function_of_samples_chooses_none_where_all_are_deleted(tmp_path: Path) -> None:
    write(tmp_path / "set", 0)
    versions.delete_rows(tmp_path / "set", range(60))
    assert versions.delete_rows(tmp_path / "set", where=bool) == 0


def test_a_dataset_without_samples_is_compacted_and_takes_others(tmp_path: Path) -> None:
    write(tmp_path, 0, 60, lengths={"text": len})
    versions.delete_rows(tmp_path, range(60))
    assert versions.compact(tmp_path) > 0
    assert versions.delete_rows(tmp_path, [], key="none") == 0
    assert versions.compact(tmp_path) == 0
    write(tmp_path, 60, 3, append=True, lengths={"text": len})
    dataset = StreamingDataset(local=tmp_path)
    assert ids(dataset) == [60, 61, 62]
    assert dataset.lengths("text").tolist() == [4, 5, 6]


def test_a_training_run_resumes_with_the_version_that_had_the_deleted_samples(tmp_path: Path) -> None:
    write(tmp_path, 0)
    loader = StreamingDataLoader(StreamingDataset(local=tmp_path, shuffle=True), 5)
    batches = iter(loader)
    seen = [next(batches)["id"].tolist() for _ in range(4)]
    state = loader.state_dict()
    del batches
    version = versions.log(tmp_path)[0].digest[:16]
    versions.delete_rows(tmp_path, [1])
    with pytest.raises(SnapshotMismatch, match=f"version='{version}'"):
        StreamingDataLoader(StreamingDataset(local=tmp_path, shuffle=True), 5).load_state_dict(state)
    later = StreamingDataLoader(StreamingDataset(local=tmp_path, shuffle=True, version=version), 5)
    later.load_state_dict(state)
    rest = [batch["id"].tolist() for batch in later]
    assert sorted(number for batch in seen + rest for number in batch) == list(range(60))


def test_a_mixture_with_deleted_samples_in_one_stream_reads_the_others(tmp_path: Path) -> None:
    for k, name in enumerate("abc"):
        write(tmp_path / name, 100 * k, 10)
    versions.delete_rows(tmp_path / "b", [0, 9])
    dataset = StreamingDataset(streams=[Stream(tmp_path / name) for name in "abc"])
    assert ids(dataset) == [*range(10), *range(101, 109), *range(200, 210)]


def test_writers_that_delete_and_append_at_the_same_time_all_win(tmp_path: Path) -> None:
    write(tmp_path, 0)
    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(versions.delete_rows, tmp_path, [k, 20 + k]) for k in range(12)]
        appends = [pool.submit(write, tmp_path, 100 + k, 1, append=True) for k in range(6)]
        assert [one.result() for one in done] == [2] * 12
        for one in appends:
            one.result()
    assert sorted(ids(StreamingDataset(local=tmp_path))) == [*range(12, 20), *range(32, 60), *range(100, 106)]


def test_a_deletion_with_a_key_is_made_once_and_wrong_ids_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 0)
    assert [versions.delete_rows(tmp_path, [1], key="first") for _ in range(2)] == [1, 0]
    assert read_newest(LocalStore(tmp_path)).number == 1
    with pytest.raises(ValueError, match="0 to 59"):
        versions.delete_rows(tmp_path, [60])
    with pytest.raises(TypeError, match="whole numbers"):
        versions.delete_rows(tmp_path, [0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="either ids or where"):
        versions.delete_rows(tmp_path)
    with pytest.raises(TypeError, match="as where="):
        versions.delete_rows(tmp_path, lambda sample: True)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="no dataset"):
        versions.compact(tmp_path / "none")


def test_a_damaged_file_of_deleted_samples_and_a_merge_of_them_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "part", 0)
    versions.delete_rows(tmp_path / "part", [1])
    with pytest.raises(ValueError, match="a merged index has no deleted samples"):
        merge_index(tmp_path)
    versions.compact(tmp_path / "part")
    merge_index(tmp_path)
    versions.delete_rows(tmp_path, [0])
    write(tmp_path / "new", 60)
    with pytest.raises(ValueError, match=r"index\.json would be there again"):
        merge_index(tmp_path)
    assert len(StreamingDataset(local=tmp_path)) == 58
    versions.delete_rows(tmp_path / "part", [1])
    (file,) = (tmp_path / "part").glob("deleted.*.bin")
    file.write_bytes(b"\2" + bytes(7))
    with pytest.raises(DigestError, match="deleted"):
        len(StreamingDataset(local=tmp_path / "part"))
    write(tmp_path / "part", 0, overwrite=True)
    assert not file.exists()


def test_the_command_lists_the_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0)
    write(tmp_path, 60, append=True, message="May")
    versions.delete_rows(tmp_path, [1], message="a request")
    assert main(["log", str(tmp_path)]) == 0
    header, newest, appended, first = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header[:4] == ["number", "digest", "operation", "time"]
    assert [line[0] for line in (newest, appended, first)] == ["2", "1", "0"]
    assert {"delete", "119", "request"} <= set(newest)
    assert {"append", "120", "May"} <= set(appended)
    assert main(["show", str(tmp_path)]) == 0
    assert "deleted samples        1" in capsys.readouterr().out


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_compacting_writes_only_the_shards_with_deleted_samples_and_other_readers_see_none(
    tmp_path: Path, compression: str | None
) -> None:
    write(tmp_path, 0, lengths={"text": len}, compression=compression)
    first = Index.from_file(tmp_path / "index.json")
    size = int(first.shard_sizes[0])
    gone = {*range(size), size + 1, 58}  # a whole shard, and one sample each of two others
    versions.delete_rows(tmp_path, sorted(gone))
    before = read_newest(LocalStore(tmp_path)).index.digest
    assert versions.compact(tmp_path, message="smaller") == 3
    kept = [number for number in range(60) if number not in gone]
    index = Index.from_file(tmp_path / "index.json")
    assert (index.num_samples, index.deleted, len(index)) == (len(kept), None, len(first) - 1)
    dataset = StreamingDataset(local=tmp_path)
    assert ids(dataset) == kept
    assert dataset.lengths("text").tolist() == [number % 7 for number in kept]
    assert [sample["text"] for sample in dataset[:]] == ["x" * (number % 7) for number in kept]
    write(tmp_path, 60, 3, append=True, lengths={"text": len})
    assert ids(StreamingDataset(local=tmp_path)) == [*kept, 60, 61, 62]
    assert ids(StreamingDataset(local=tmp_path, version=before)) == kept
    assert ids(StreamingDataset(local=tmp_path, version=0)) == list(range(60))
    assert versions.compact(tmp_path) == 0


def test_compacting_and_deleting_are_refused_where_the_other_was_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0)
    versions.delete_rows(tmp_path, [1])
    real = versions.finalize_shard

    def late(*given: Any) -> Any:
        monkeypatch.setattr(versions, "finalize_shard", real)
        versions.delete_rows(tmp_path, [2])
        return real(*given)

    monkeypatch.setattr(versions, "finalize_shard", late)
    with pytest.raises(ConflictError, match="another writer"):
        versions.compact(tmp_path)
    assert ids(StreamingDataset(local=tmp_path)) == [0, *range(3, 60)]
    read = versions.ids_below

    def compacted(*given: Any) -> Any:
        versions.compact(tmp_path)
        return read(*given)

    monkeypatch.setattr(versions, "ids_below", compacted)
    with pytest.raises(ConflictError, match="was compacted meanwhile"):
        versions.delete_rows(tmp_path, [5])
    assert ids(StreamingDataset(local=tmp_path)) == [0, *range(3, 60)]


@pytest.mark.parametrize("former", [False, True])
@pytest.mark.parametrize("hashes", [None, ["sha1"], ["md5", "xxh64"]])
def test_a_dataset_with_deleted_samples_opens_with_the_hash_that_its_shards_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashes: list[str] | None, former: bool
) -> None:
    write(tmp_path / "set", 0, hashes=hashes, lengths={"text": len})
    with monkeypatch.context() as patch:
        if former:  # former releases gave the file one hash, whatever the shards have
            patch.setattr(versions, "hashes_to_write", lambda _: ("xxh3_128",))
        versions.delete_rows(tmp_path / "set", [3])
    for change in (lambda: None, lambda: versions.compact(tmp_path / "set")):
        change()
        for number, name in enumerate(hashes or ["xxh3_64"]):
            place: dict[str, Any] = {"remote": tmp_path / "set", "validate_hash": name}
            for cached in ({}, {"local": tmp_path / f"cache-{number}"}):
                dataset = StreamingDataset(**place, **cached)
                assert ids(dataset) == [number for number in range(60) if number != 3]
                assert len(dataset.lengths("text")) == 59
    with pytest.raises(ValueError, match="asks for a hash that the index must have"):
        StreamingDataset(remote=tmp_path / "set", validate_hash="sha512")[0]
