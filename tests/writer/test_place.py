"""What the commit protocol promises: a dataset is whole at every instant, whatever happens to its writers."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_stream.convert import convert
from lightning_stream.errors import AccessError, ConflictError, StoreError
from lightning_stream.formats.index import Index, version_name
from lightning_stream.formats.shard import open_shard
from lightning_stream.shared_files import locked_draft, sweep_drafts
from lightning_stream.stores import LocalStore
from lightning_stream.version_log import read_newest
from lightning_stream.writer import JSONWriter, MDSWriter, base, merge_index, place

STEPS = {"os.link", "os.rename", "os.remove", "os.truncate", "os.mkdir"}


def write(out: Path, values: Any, kind: Any = MDSWriter, **how: Any) -> None:
    with kind(out=out, columns={"x": "int"}, size_limit=260, max_workers=1, **how) as writer:
        for value in values:
            writer.write({"x": value})


def read(folder: Path) -> list[int]:
    index = read_newest(LocalStore(folder)).index
    shards = [open_shard(index.entry(k), folder) for k in range(len(index))]
    return [shard.sample(i)["x"] for shard in shards for i in range(shard.num_samples)]


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def listed(folder: Path) -> set[str]:
    newest = read_newest(LocalStore(folder))
    changes = {f"versions/{newest.root}/{number:08}.json" for number in range(1, newest.number + 1)}
    return place.listed_files(newest.index.data) | {"index.json"} | changes


def killed_at(step: int, work: Callable[[], None]) -> bool:
    """Run `work` in a child that is killed just before its n-th change of the file system; False if it had fewer."""
    if (child := os.fork()) == 0:
        seen = 0

        def hook(event: str, arguments: Any) -> None:
            nonlocal seen
            if event in STEPS or (event == "open" and str(arguments[0]).count(".draft-")):
                seen += 1
                if seen == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("how", ["new", "append", "overwrite"])
def test_a_writer_killed_at_any_step_leaves_the_old_dataset_or_the_new_one(tmp_path: Path, how: str) -> None:
    old, wanted = list(range(30)), {"new": [7] * 20, "append": [*range(30), *[7] * 20], "overwrite": [7] * 20}[how]
    options: dict[str, Any] = {} if how == "new" else {how: True}
    options |= {"key": "only once"} if how == "append" else {}
    for step in range(1, 200):
        out = tmp_path / str(step)
        if how != "new":
            write(out, old)
        died = killed_at(step, lambda out=out: write(out, [7] * 20, **options))  # type: ignore[misc]
        if (out / "index.json").exists():
            assert read(out) in ([wanted] if how == "new" else [old, wanted])
        else:
            assert how == "new"
        if not died:
            break
        if how == "append":
            write(out, [7] * 20, **options)
        else:
            write(out, wanted, overwrite=True)
        assert read(out) == wanted
        kept = {name for name in names(out) if name.startswith(("index.", ".lock-"))}
        assert names(out) - kept == listed(out) - kept
    assert not died
    assert step > 10


def test_an_overwritten_dataset_is_the_old_one_until_the_writer_finishes(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    write(tmp_path / "out", range(30), exist_ok=True)
    write(tmp_path / "out", [30], append=True)
    with MDSWriter(out=tmp_path / "out", columns={"y": "str"}, size_limit=260, overwrite=True) as writer:
        for _ in range(100):
            writer.write({"y": "new"})
            assert read(tmp_path / "out") == list(range(31))
    assert Index.from_file(tmp_path / "out" / "index.json").columns == {"y": "str"}
    assert names(tmp_path / "out") == listed(tmp_path / "out") | {"notes.txt"}


def test_an_overwriter_that_fails_leaves_the_old_dataset(tmp_path: Path) -> None:
    write(tmp_path / "out", range(30))
    before = {name: (tmp_path / "out" / name).read_bytes() for name in names(tmp_path / "out")}
    with pytest.raises(TypeError):
        write(tmp_path / "out", [*range(100), "no number"], overwrite=True)
    assert before.items() <= {name: (tmp_path / "out" / name).read_bytes() for name in names(tmp_path / "out")}.items()
    write(tmp_path / "out", [1], overwrite=True)
    assert names(tmp_path / "out") == listed(tmp_path / "out")


def test_datasets_in_folders_below_survive_when_the_one_above_is_overwritten(tmp_path: Path) -> None:
    for part in ("part0", "part1"):
        write(tmp_path / part, [1, 2])
    merge_index(tmp_path)
    assert read(tmp_path) == [1, 2, 1, 2]
    write(tmp_path, [3], overwrite=True)
    assert (read(tmp_path), read(tmp_path / "part0")) == ([3], [1, 2])


def test_a_merge_does_not_replace_an_index_that_was_put_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "part0", [1])
    entries = merge_index.__globals__["_entries"]

    def slow(*given: Any) -> Any:
        monkeypatch.setitem(merge_index.__globals__, "_entries", entries)
        write(tmp_path / "part1", [2])
        merge_index(tmp_path)
        return entries(*given)

    monkeypatch.setitem(merge_index.__globals__, "_entries", slow)
    with pytest.raises(FileExistsError, match="another writer is or was at work"):
        merge_index(tmp_path)
    assert read(tmp_path) == [1, 2]
    merge_index(tmp_path)
    merge_index(tmp_path)
    assert read(tmp_path) == [1, 2]


@pytest.mark.parametrize("kind", [MDSWriter, JSONWriter])
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("fails", [0, 2])
def test_a_shard_that_was_not_put_is_never_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, workers: int, fails: int
) -> None:
    calls = itertools.count()
    put = place.write_file

    def flaky(*given: Any, **how: Any) -> None:
        if next(calls) == fails:
            raise StoreError("the store is away for a moment")
        put(*given, **how)

    monkeypatch.setattr(place, "write_file", flaky)
    writer = kind(out=tmp_path / "out", columns={"x": "int"}, size_limit=260, max_workers=workers)
    for k in range(200):
        with contextlib.suppress(StoreError):
            writer.write({"x": k})
    for _ in range(2):
        with pytest.raises(StoreError, match="away"):
            writer.finish()
    assert not (tmp_path / "out" / "index.json").exists()


def test_nothing_is_put_after_finish_has_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, started, go = place.write_file, threading.Event(), threading.Event()

    def flaky(path: Path, *given: Any, **how: Any) -> None:
        if path.name.startswith("shard.00002"):
            started.set()
            go.wait(30)
            put(path, *given, **how)
        elif path.name.startswith("shard.00001"):
            started.wait(30)
            raise StoreError("the store is away for a moment")
        else:
            put(path, *given, **how)

    monkeypatch.setattr(place, "write_file", flaky)
    writer = MDSWriter(out=tmp_path / "out", columns={"x": "int"}, size_limit=260, max_workers=2)
    with contextlib.suppress(StoreError):
        writer.write_batch({"x": list(range(200))})
    threading.Timer(0.2, go.set).start()
    with pytest.raises(StoreError, match="away"):
        writer.finish()
    assert go.is_set()  # finish has waited for what had begun
    assert not any(thread.name.startswith("shard-writer") for thread in threading.enumerate())


def test_a_writer_whose_context_raised_puts_no_index_later(tmp_path: Path) -> None:
    writer = MDSWriter(out=tmp_path / "out", columns={"x": "int"})
    with pytest.raises(TypeError), writer:
        writer.write_batch([{"x": 1}])
    writer.write({"x": 1})
    with pytest.raises(TypeError):
        writer.finish()
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_thread_that_cannot_start_fails_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_stream.writer import pipeline

    def no_thread(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    writer = MDSWriter(out=tmp_path / "out", columns={"x": "int"}, max_workers=1)
    writer.write({"x": 1})
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.ThreadPoolExecutor, "submit", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            writer.flush_shard()
    with pytest.raises(RuntimeError, match="new thread"):
        writer.finish()


@pytest.mark.parametrize(("limit", "message"), [(600, "one sample has 1,004 bytes"), (None, "all samples go to one")])
def test_a_batch_that_is_refused_leaves_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, message: str
) -> None:
    monkeypatch.setattr(base, "MAX_FILE_BYTES", 1000)
    with MDSWriter(out=tmp_path / "out", columns={"b": "bytes"}, size_limit=limit) as writer:
        writer.write_batch({"b": [b"first"]})
        sizes = [100, 100, 1000] if limit else [300] * 4
        with pytest.raises(ValueError, match=message):
            writer.write_batch({"b": [b"x" * size for size in sizes]})
        assert writer.num_samples == 1
        writer.write_batch({"b": [b"last"]})
    index = Index.from_file(tmp_path / "out" / "index.json")
    shard = open_shard(index.entry(0), tmp_path / "out")
    assert [shard.sample(k)["b"] for k in range(shard.num_samples)] == [b"first", b"last"]


def test_drafts_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    def write_draft(name: str = "shard.00000.mds") -> None:
        with locked_draft(tmp_path / name) as draft:
            draft.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    killed_at(0, write_draft)
    assert len(names(tmp_path)) == 1
    with locked_draft(tmp_path / "shard.00001.mds") as draft:
        sweep_drafts(tmp_path)
        assert names(tmp_path) == {draft.name}
    assert not names(tmp_path)
    killed_at(0, write_draft)
    write(tmp_path, [1])
    assert names(tmp_path) == listed(tmp_path)
    killed_at(0, lambda: write_draft("part-00000/shard.00000.mds"))
    write(tmp_path, [1], overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == listed(tmp_path)


def test_the_versions_of_a_dataset_are_kept_by_appending_and_go_by_overwriting(tmp_path: Path) -> None:
    write(tmp_path, [0])
    first = Index.from_file(tmp_path / "index.json").digest
    for k in range(3):
        write(tmp_path, [k], append=True)
    assert names(tmp_path) == listed(tmp_path) | {version_name(first)}
    assert sum(name.startswith("versions/") for name in names(tmp_path)) == 3
    write(tmp_path, [9], overwrite=True)
    assert names(tmp_path) == listed(tmp_path)


def test_a_pair_is_appended_to_only_where_both_places_hold_the_dataset(tmp_path: Path) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    pair: Any = (local, f"file://{remote}")
    write(pair, range(30), keep_local=True)
    write(pair, [30], keep_local=True, append=True)
    assert read(local) == read(remote) == list(range(31))
    write(pair, [31], append=True)
    with pytest.raises(ValueError, match="both places of a pair"):
        write(pair, [32], keep_local=True, append=True)
    write(pair, [33], keep_local=True, overwrite=True)
    assert read(local) == read(remote) == [33]
    assert names(local) == names(remote) == listed(local)


@pytest.mark.parametrize("how", ["overwrite", "append, then overwrite"])
def test_the_manifest_of_a_conversion_is_deleted_with_its_dataset(tmp_path: Path, how: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    convert(tmp_path / "rows.jsonl", tmp_path / "out", num_workers=1)
    if how != "overwrite":
        with MDSWriter(out=tmp_path / "out", append=True) as writer:
            writer.write({"x": 3})
    assert "manifest.json" in names(tmp_path / "out")
    write(tmp_path / "out", [4], overwrite=True)
    assert names(tmp_path / "out") == listed(tmp_path / "out")
    convert(tmp_path / "rows.jsonl", tmp_path / "out", num_workers=1, overwrite=True)
    assert "manifest.json" in names(tmp_path / "out")


@pytest.mark.parametrize("content", ["mine", "[]", '{"fingerprint": 1}'])
def test_a_manifest_of_another_program_is_not_deleted(tmp_path: Path, content: str) -> None:
    write(tmp_path, [1])
    (tmp_path / "manifest.json").write_text(content)
    write(tmp_path, [2], overwrite=True)
    assert (tmp_path / "manifest.json").read_text() == content


def test_a_manifest_stays_with_the_datasets_in_folders_that_it_describes(tmp_path: Path) -> None:
    write(tmp_path / "part-00000", [1])
    (tmp_path / "manifest.json").write_text('{"fingerprint": "a", "index": "b", "partitions": {"part-00000": 1}}')
    write(tmp_path, [2], overwrite=True)
    assert (tmp_path / "manifest.json").exists()


def test_of_a_pair_each_place_loses_the_files_of_its_own_former_dataset_alone(tmp_path: Path) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    for part in ("a", "b"):
        write(local / part, range(9))
    merge_index(local)
    for part in ("a", "b"):
        (local / part / "index.json").unlink()
    (remote / "a").mkdir(parents=True)
    (remote / "a" / "shard.00000.mds").write_bytes(b"of somebody else")
    write((local, f"file://{remote}"), range(5), keep_local=True, overwrite=True)
    assert (remote / "a" / "shard.00000.mds").read_bytes() == b"of somebody else"
    assert not (local / "a").exists()
    assert read(local) == read(remote) == list(range(5))


def test_a_pair_whose_second_swap_is_lost_names_the_place_that_was_changed(tmp_path: Path) -> None:
    pair: Any = (tmp_path / "local", f"file://{tmp_path / 'remote'}")
    write(pair, [0], keep_local=True)
    late = MDSWriter(out=pair, columns={"x": "int"}, keep_local=True, overwrite=True)
    late.write({"x": 1})
    write(tmp_path / "local", [2], overwrite=True)
    with pytest.raises(ConflictError, match=r"another writer .*remote was changed before, and holds"):
        late.finish()
    assert (read(tmp_path / "local"), read(tmp_path / "remote")) == ([2], [1])


def test_appending_and_overwriting_at_once_is_refused(tmp_path: Path) -> None:
    for word in ("overwrite", "exist_ok"):
        with pytest.raises(ValueError, match="append=True adds"):
            MDSWriter(out=tmp_path, append=True, **{word: True})


def test_a_loser_gets_the_same_error_each_time_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    write(tmp_path, [0])
    late = MDSWriter(out=tmp_path, append=True)
    late.write({"x": 1})
    write(tmp_path, [2], overwrite=True)
    for _ in range(2):
        with pytest.raises(ConflictError, match="another writer is or was at work"):
            late.finish()
    assert read(tmp_path) == [2]
    assert names(tmp_path) == listed(tmp_path)


def test_an_error_after_finish_does_not_call_the_dataset_unfinished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_late() -> None:
        with MDSWriter(out=tmp_path / "out", columns={"x": "int"}) as writer:
            writer.write({"x": 1})
            writer.finish()
            raise KeyError("later")

    with pytest.raises(KeyError):
        fail_late()
    assert not caplog.records
    assert read(tmp_path / "out") == [1]


@pytest.mark.parametrize("out", ["", ("s3://me:S3CRET@bucket/x", "a"), ("a", "a"), ("a", ""), ("a", "b", "c"), None])
def test_a_place_is_a_folder_or_a_url_or_a_pair_with_the_folder_first(out: Any) -> None:
    with pytest.raises(ValueError, match="out") as caught:
        MDSWriter(out=out, columns={"x": "int"})
    assert "S3CRET" not in str(caught.value)


def test_a_place_that_is_a_file_or_below_one_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=r"must be a folder.*Use another folder"):
            write(out, range(3))


def test_an_empty_dataset_takes_the_columns_of_the_first_sample_appended(tmp_path: Path) -> None:
    write(tmp_path, [])
    with MDSWriter(out=tmp_path, append=True) as writer:
        writer.write({"x": 1})
    assert read(tmp_path) == [1]


@pytest.mark.parametrize("answer", [AccessError, StoreError])
def test_a_new_dataset_needs_no_right_to_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def refuse(*_: Any) -> Any:
        raise answer("no right to list")

    monkeypatch.setattr("lightning_stream.stores.local.LocalStore.list", refuse)
    write(tmp_path, range(50))
    assert read(tmp_path) == list(range(50))
    with pytest.raises(FileExistsError, match=r"it holds 'index\.json'"):
        write(tmp_path, range(50))
    assert read(tmp_path) == list(range(50))


@pytest.mark.parametrize("word", ["overwrite", "exist_ok", "keep_local", "append"])
def test_text_is_no_yes_that_replaces_a_dataset(tmp_path: Path, word: str) -> None:
    options: dict[str, Any] = {word: "false"}
    with pytest.raises(ValueError, match=f"{word} must be True or False; found 'false'"):
        MDSWriter(out=tmp_path / "out", columns={"id": "int"}, **options)
