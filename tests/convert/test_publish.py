"""Two conversions into one place: one is published, the other gets an error and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_stream.convert import convert
from lightning_stream.convert.partition import OutputSpec, PartitionWriter, Receipt
from lightning_stream.convert.publish import MANIFEST, Publication, cancel
from lightning_stream.errors import StoreError
from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import open_shard
from lightning_stream.writer import MDSWriter
from lightning_stream.writer.place import listed_files


def begun(out: Path, values: list[int], overwrite: bool = True) -> tuple[Publication, list[Receipt]]:
    spec = OutputSpec(str(out), False, None, {"x": "int"}, {"size_limit": 260, "max_workers": 1}, "0123456789abcdef")
    publication = Publication.begin(spec, overwrite)
    with PartitionWriter(spec, 0) as writer:
        writer.write_batch({"x": values})
    return publication, [Receipt(0, "", writer.num_samples, tuple(writer.shards))]


def read(folder: Path) -> list[int]:
    index = Index.from_file(folder / "index.json")
    shards = [open_shard(index.entry(k), folder) for k in range(len(index))]
    return [shard.sample(i)["x"] for shard in shards for i in range(shard.num_samples)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("merge_index", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_of_two_conversions_that_have_begun_the_first_to_publish_wins(
    tmp_path: Path, old: bool, merge_index: bool
) -> None:
    if old:
        publication, receipts = begun(tmp_path, [0] * 50)
        publication.publish(receipts, True, {})
    one, first = begun(tmp_path, [1] * 50)
    two, second = begun(tmp_path, [2] * 60)
    one.publish(first, merge_index, {})
    place = tmp_path if merge_index else tmp_path / "part-00000"
    assert read(place) == [1] * 50
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=r"another writer is or was at work|are not seen"):
        two.publish(second, merge_index, {})
    assert contents(tmp_path) == before
    assert (tmp_path / "index.json").exists() == merge_index


@pytest.mark.parametrize("old", [True, False])
def test_a_conversion_that_is_cancelled_leaves_the_dataset_of_one_that_was_published_meanwhile(
    tmp_path: Path, old: bool
) -> None:
    if old:
        publication, receipts = begun(tmp_path, [0] * 50)
        publication.publish(receipts, True, {})
    one, first = begun(tmp_path, [1] * 50)
    two, _ = begun(tmp_path, [2] * 60)
    one.publish(first, True, {})
    cancel(two.place)  # it had nulls
    assert read(tmp_path) == [1] * 50


def test_a_writer_that_wins_against_a_conversion_keeps_its_dataset(tmp_path: Path) -> None:
    one, receipts = begun(tmp_path, [1] * 50)
    with MDSWriter(out=tmp_path, columns={"x": "int"}, overwrite=True) as writer:
        writer.write({"x": 7})
    with pytest.raises(FileExistsError, match="another writer is or was at work"):
        one.publish(receipts, True, {})
    assert read(tmp_path) == [7]


def test_a_writer_that_overwrites_leaves_nothing_of_a_conversion_that_was_cut_short(tmp_path: Path) -> None:
    begun(tmp_path, [1] * 50)
    with MDSWriter(out=tmp_path / "part-00007", columns={"x": "int"}) as writer:
        writer.write({"x": 6})
    assert "_conversion/0123456789abcdef/begun" in contents(tmp_path)
    with MDSWriter(out=tmp_path, columns={"x": "int"}, overwrite=True) as writer:
        writer.write({"x": 7})
    listed = listed_files((tmp_path / "index.json").read_bytes())
    other = {"part-00007/index.json", "part-00007/shard.00000.mds"}  # another dataset
    assert contents(tmp_path).keys() == listed | {"index.json"} | other


def test_a_conversion_that_overwrites_leaves_nothing_of_the_writers_dataset(tmp_path: Path) -> None:
    for k in range(2):
        with MDSWriter(out=tmp_path, columns={"x": "int"}, append=k > 0) as writer:
            writer.write({"x": k})
    publication, receipts = begun(tmp_path, [1] * 50)
    publication.publish(receipts, True, {})
    assert read(tmp_path) == [1] * 50
    listed = listed_files((tmp_path / "index.json").read_bytes())
    assert contents(tmp_path).keys() == listed | {"index.json", MANIFEST}


def test_what_is_refused_before_the_local_folder_of_a_pair_exists_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": null}\n')
    pair = (str(tmp_path / "local"), str(tmp_path / "remote"))
    with pytest.raises(ValueError, match="null values found, by column: x: 1"):
        convert(tmp_path / "rows.jsonl", pair, columns={"x": "int64"}, keep_local=True, num_workers=1)
    assert not contents(tmp_path / "remote")
