"""Merged indexes: every shard once, in a stable order, named relative to the root."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_stream import versions
from lightning_stream.errors import ConflictError, FormatError, NotFoundError
from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import open_shard
from lightning_stream.stores import LocalStore
from lightning_stream.version_log import read_newest
from lightning_stream.writer import JSONWriter, MDSWriter, merge_index
from lightning_stream.writer.place import Transaction


def partition(folder: Path, begin: int, writer: Any = MDSWriter, num_samples: int = 10) -> None:
    with writer(out=folder, columns={"x": "int"}, size_limit=250) as shards:
        for k in range(begin, begin + num_samples):
            shards.write({"x": k})


def read(root: Path) -> list[int]:
    index = Index.from_file(root / "index.json")
    shards = [open_shard(index.entry(k), root) for k in range(len(index))]
    return [shard.sample(i)["x"] for shard in shards for i in range(shard.num_samples)]


def test_the_golden_merged_index_is_made_again_byte_for_byte(shared_golden: Path, tmp_path: Path) -> None:
    for name in ("part0", "part1"):
        (tmp_path / name).mkdir()
        shutil.copy(shared_golden / "merged" / name / "index.json", tmp_path / name)
    merge_index(tmp_path)
    assert (tmp_path / "index.json").read_bytes() == (shared_golden / "merged" / "index.json").read_bytes()


def test_partitions_at_any_depth_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for begin, name in ((0, "a/b/part2"), (10, "a/b/part10"), (20, "c"), (30, "part1")):
        partition(tmp_path / name, begin)
    partition(tmp_path / "part0", 90, num_samples=0)
    merge_index(str(tmp_path))
    assert read(tmp_path) == list(range(40))
    merge_index(tmp_path)
    assert read(tmp_path) == list(range(40))


def test_a_list_is_merged_in_its_order_with_whole_paths(tmp_path: Path) -> None:
    partition(tmp_path / "x" / "part0", 0)
    partition(tmp_path / "y" / "part0", 10, JSONWriter)
    merge_index([str(tmp_path / "y" / "part0" / "index.json"), str(tmp_path / "x" / "part0")], str(tmp_path))
    assert read(tmp_path) == [*range(10, 20), *range(10)]
    with pytest.raises(ValueError, match="all indexes must be below"):
        merge_index([str(tmp_path.parent / "elsewhere")], str(tmp_path))


@pytest.mark.parametrize("out_is_pair", [False, True])
def test_of_a_pair_in_a_list_the_place_below_the_root_is_merged(tmp_path: Path, out_is_pair: bool) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    for k in range(2):
        partition((remote if out_is_pair else local) / f"part{k}", 10 * k)
    pairs = [(f"{local}/part{k}/index.json", f"{remote}/part{k}/index.json") for k in (1, 0)]
    merge_index(pairs, (str(local), str(remote)) if out_is_pair else str(local))
    assert read(remote if out_is_pair else local) == [*range(10, 20), *range(10)]
    if not out_is_pair:
        merge_index([(pair[0], f"s3://bucket/part{k}/index.json") for k, pair in enumerate(pairs)], str(local))
        assert read(local) == [*range(10, 20), *range(10)]


def test_an_index_that_a_list_names_twice_is_refused(tmp_path: Path) -> None:
    partition(tmp_path / "part0", 0)
    with pytest.raises(ValueError, match="each index once"):
        merge_index([str(tmp_path / "part0"), str(tmp_path / "part0" / "index.json")], str(tmp_path))
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize("name", [".hidden", "p:1", "a\\b", "a/.b"])
def test_a_partition_that_no_index_can_name_is_refused_and_nothing_is_put(tmp_path: Path, name: str) -> None:
    partition(tmp_path / "part0", 0)
    partition(tmp_path / name, 10)
    with pytest.raises(ValueError, match="Rename it"):
        merge_index(tmp_path)
    assert not (tmp_path / "index.json").exists()


def test_partitions_of_a_file_url_have_the_names_of_their_folders(tmp_path: Path) -> None:
    for begin, name in enumerate(("p%41", "pA", "p q#1?")):
        partition(tmp_path / name, 10 * begin)
    merge_index(tmp_path.as_uri())
    assert read(tmp_path) == [*range(20, 30), *range(20)]


def test_an_index_covers_the_folders_below_it(tmp_path: Path) -> None:
    for name in ("a/part0", "a/part1"):
        partition(tmp_path / name, 0)
    merge_index(tmp_path / "a")
    partition(tmp_path / "b", 10)
    merge_index(tmp_path)
    assert read(tmp_path) == [*range(10), *range(10), *range(10, 20)]


def test_a_remote_root_is_merged_there_and_kept_locally_if_asked(tmp_path: Path) -> None:
    partition(tmp_path / "remote" / "p", 0)
    for keep in (False, True):
        merge_index((str(tmp_path / "local"), f"file://{tmp_path}/remote"), keep_local=keep)
        assert read(tmp_path / "remote") == list(range(10))
        assert (tmp_path / "local" / "index.json").exists() == keep
    urls = [(str(tmp_path / "local" / "p"), f"file://{tmp_path}/remote/p/index.json")]
    merge_index(urls, (str(tmp_path / "local"), f"file://{tmp_path}/remote"))


def test_a_root_may_be_followed_by_keep_local_and_timeout_as_in_mosaicml_streaming(tmp_path: Path) -> None:
    partition(tmp_path / "remote" / "p", 0)
    for arguments, kept in (((False,), False), ((False, 30), False), ((True, 30), True)):
        merge_index((str(tmp_path / "local"), f"file://{tmp_path}/remote"), *arguments)
        assert (tmp_path / "local" / "index.json").exists() == kept
        assert read(tmp_path / "remote") == list(range(10))
    with pytest.raises(ValueError, match="takes a root, or a list"):
        merge_index([str(tmp_path / "remote" / "p")], True)


def test_a_place_may_begin_with_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    partition("~/set/p", 0)  # type: ignore[arg-type]
    merge_index(["~/set/p/index.json"], "~/set")
    merge_index("~/set")
    assert read(tmp_path / "set") == list(range(10))


def test_nothing_to_merge_and_a_damaged_partition_are_errors_and_put_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no index\.json in any folder below"):
        merge_index(tmp_path)
    partition(tmp_path / "part0", 0)
    (tmp_path / "part1").mkdir()
    (tmp_path / "part1" / "index.json").write_text('{"shards": [')
    with pytest.raises(FormatError, match=r"part1/index\.json"):
        merge_index(tmp_path)
    with pytest.raises(ValueError, match="takes a root, or a list"):
        merge_index([])
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize("listed", [False, True])
def test_a_merge_never_loses_shards_that_lie_beside_the_roots_index(tmp_path: Path, listed: bool) -> None:
    indexes = [str(tmp_path / name) for name in ("part0", "part1")]
    for number, folder in enumerate(indexes):
        partition(Path(folder), 10 * number)
    arguments: Any = (indexes, str(tmp_path)) if listed else (str(tmp_path),)
    merge_index(*arguments)
    merge_index(*arguments)  # what a merge listed is no obstacle to the next
    with MDSWriter(out=tmp_path, append=True) as writer:
        writer.write({"x": 20})
    with pytest.raises(ValueError, match=r"also lists 1 files.*shard\.00000.*Move them"):
        merge_index(*arguments)
    assert read(tmp_path) == list(range(21))


def test_an_append_that_a_merge_did_not_see_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_index = Transaction.commit_index

    def append_before(place: Transaction, index: bytes) -> None:
        with MDSWriter(out=tmp_path, append=True) as writer:
            writer.write({"x": 20})
        commit_index(place, index)

    def merge_beside_an_append() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("lightning_stream.writer.place.publish", lambda *args, **options: None)  # killed before that
            patch.setattr(Transaction, "commit_index", append_before)
            merge_index(tmp_path)

    partition(tmp_path / "part0", 0)
    merge_index(tmp_path)
    merge_beside_an_append()  # of the same partitions: it changes nothing
    assert read_newest(LocalStore(tmp_path)).index.num_samples == 11
    shutil.rmtree(tmp_path / "versions")
    partition(tmp_path / "part1", 10)
    with pytest.raises(ConflictError, match="was changed meanwhile, and stays as that change left it"):
        merge_beside_an_append()
    assert read_newest(LocalStore(tmp_path)).index.num_samples == 11
    with pytest.raises(ValueError, match="also lists 1 files"):
        merge_index(tmp_path)


@pytest.mark.parametrize("is_published", [True, False])
def test_of_two_appends_around_a_merge_none_is_lost_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_published: bool
) -> None:
    def append_before(name: str, publishes: bool) -> None:
        call = getattr(Transaction, name)

        def appended(place: Transaction, *given: Any) -> None:
            with monkeypatch.context() as patch:
                if not publishes:
                    patch.setattr("lightning_stream.writer.place.publish", lambda *args, **options: None)
                with MDSWriter(out=tmp_path, append=True) as writer:
                    writer.write({"x": 20})
            call(place, *given)

        monkeypatch.setattr(Transaction, name, appended)

    partition(tmp_path / "part0", 0)
    merge_index(tmp_path)
    partition(tmp_path / "part1", 10)
    append_before("commit_index", False)
    append_before("swap_back", is_published)
    with pytest.raises(ConflictError, match=r"one index cannot have both. Write again what .*log.* does not list"):
        merge_index(tmp_path)
    assert read_newest(LocalStore(tmp_path)).index.num_samples == (21 if is_published else 11)


def test_shards_beside_the_roots_index_are_gone_once_what_the_error_names_is_deleted(tmp_path: Path) -> None:
    partition(tmp_path / "part0", 0)
    merge_index(tmp_path)
    with MDSWriter(out=tmp_path, append=True) as writer:
        writer.write({"x": 20})
    with pytest.raises(ValueError, match=r"delete that index and the folder versions/"):
        merge_index(tmp_path)
    (tmp_path / "index.json").unlink()
    shutil.rmtree(tmp_path / "versions")
    merge_index(tmp_path)
    assert read_newest(LocalStore(tmp_path)).index.num_samples == 10
    assert read(tmp_path) == list(range(10))


def test_a_sample_whose_shard_went_with_a_compaction_of_the_root_is_not_there_again(tmp_path: Path) -> None:
    for number in range(3):
        partition(tmp_path / f"part{number}", number, num_samples=1)
        if number == 1:
            merge_index(tmp_path)
    versions.delete_rows(tmp_path, [1])
    versions.compact(tmp_path)
    with pytest.raises(ValueError, match="would be there again"):
        merge_index(tmp_path)
    assert read(tmp_path) == [0]


def test_an_index_outside_the_root_is_refused_without_showing_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="all indexes must be below") as caught:
        merge_index(["s3://me:S3CRET@bucket/x/index.json"], str(tmp_path))
    assert "S3CRET" not in str(caught.value)
