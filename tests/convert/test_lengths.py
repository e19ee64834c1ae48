"""Lengths of converted rows, and lengths that are added to a dataset that exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.convert_inputs import doubled, letters
from writer.test_place import killed_at

from lightning_stream import StreamingDataset
from lightning_stream.convert import add_lengths, convert
from lightning_stream.errors import ConflictError, FormatError, NotFoundError
from lightning_stream.formats.index import Index, version_name
from lightning_stream.stores import LocalStore, open_store
from lightning_stream.version_log import read_index
from lightning_stream.writer import CSVWriter, MDSWriter, merge_index
from lightning_stream.writer.place import listed_files

LENGTHS = {"tokens": len, "text": len, "letters": letters}


def measured(samples: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The lengths of samples as they are read back."""
    by = {"tokens": lambda one: len(one["tokens"]), "text": lambda one: len(one["text"]), "letters": letters}
    return {name: [function(sample) for sample in samples] for name, function in by.items()}


def numbers(folder: Path) -> dict[str, list[int]]:
    index = read_index(LocalStore(folder))
    return {
        name: np.concatenate([np.fromfile(folder / file.basename, "<u4") for file in files]).tolist()
        for name, files in index.lengths.items()
    }


def test_the_lengths_of_converted_rows_are_those_of_the_samples_in_their_order(
    rows_file: Path, tmp_path: Path, samples_of: Any, files_of: Any
) -> None:
    settings: dict[str, Any] = {"compression": None, "partition_bytes": "30kb", "lengths": LENGTHS}
    for name, others in {
        "plain": {},
        "shuffled": {"shuffle": True},
        "split": {"val_fraction": 0.2},
        "both": {"val_fraction": 0.2, "shuffle": True},
        "made": {"transform": doubled},
    }.items():
        result = convert(rows_file, tmp_path / name, num_workers=1, **settings, **others)
        for split, count in result.num_samples.items():
            folder = tmp_path / name / split
            samples = samples_of(folder)
            assert numbers(folder) == measured(samples)
            assert len(samples) == count
            assert result.num_shards[split] == len(Index.from_file(folder / "index.json"))
    convert(rows_file, tmp_path / "again", num_workers=2, **settings, shuffle=True, val_fraction=0.2)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "both")


def test_arrow_rows_have_the_same_lengths_as_json_rows(rows_file: Path, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for source in (rows_file, tmp_path / "rows.parquet"):
        convert(source, tmp_path / source.suffix[1:], num_workers=1, lengths=LENGTHS)
    assert numbers(tmp_path / "jsonl") == numbers(tmp_path / "parquet")
    assert sum(numbers(tmp_path / "parquet")["text"]) == sum(len(row["text"]) for row in rows)


def test_lengths_decide_whether_a_dataset_is_reused(rows_file: Path, tmp_path: Path) -> None:
    out, settings = tmp_path / "out", {"num_workers": 1, "lengths": {"text": len}}
    assert convert(rows_file, out, **settings).is_new
    assert not convert(rows_file, out, **settings).is_new
    for other in (None, {"text": letters}):
        with pytest.raises(FileExistsError, match="another conversion's dataset: lengths was "):
            convert(rows_file, out, num_workers=1, lengths=other)
    with pytest.raises(
        ValueError, match=r"lengths={'txt': len} needs a column of that name; the columns are k, x, text"
    ):
        convert(rows_file, tmp_path / "other", num_workers=1, lengths={"txt": len})
    with pytest.raises(TypeError, match="lengths must be functions by name"):
        convert(rows_file, tmp_path / "other", lengths={"text": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"lengths\['text'\] must give a whole number.*Nothing was published"):
        convert(rows_file, tmp_path / "wrong", num_workers=1, lengths={"text": lambda text: -len(text)})


def test_a_conversion_that_was_cut_short_continues_with_its_lengths(
    rows_file: Path, tmp_path: Path, samples_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"num_workers": 1, "partition_bytes": "30kb", "compression": None, "lengths": LENGTHS}
    with monkeypatch.context() as patch:
        patch.setattr("lightning_stream.convert.publish.Publication.publish", _stopped)
        with pytest.raises(RuntimeError, match="stopped"):
            convert(rows_file, tmp_path / "out", **settings)
    assert len(list((tmp_path / "out").glob("part-*/lengths.*.bin"))) > 6
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*/*")}
    convert(rows_file, tmp_path / "out", **settings)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*/*")} == before
    assert numbers(tmp_path / "out") == measured(samples_of(tmp_path / "out"))


def _stopped(*_: Any) -> None:
    raise RuntimeError("stopped")


# Added to a dataset that exists


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_added_lengths_are_those_that_a_writer_would_have_put(
    rows_file: Path, tmp_path: Path, num_workers: int, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_stream.convert.lengths._PARTITION_BYTES", 30_000)
    settings: dict[str, Any] = {"num_workers": 1, "compression": compression, "size_limit": "20kb"}
    convert(rows_file, tmp_path / "written", **settings, lengths=LENGTHS)
    convert(rows_file, tmp_path / "out", **settings)
    before = Index.from_file(tmp_path / "out" / "index.json")
    files = {path.name for path in (tmp_path / "out").rglob("*")}
    added = add_lengths(tmp_path / "out", LENGTHS, num_workers=num_workers)
    assert {name: found.tolist() for name, found in added.items()} == numbers(tmp_path / "written")
    assert numbers(tmp_path / "out") == numbers(tmp_path / "written")
    index = Index.from_file(tmp_path / "out" / "index.json")
    assert (index.digest, len(index)) == (before.digest, len(before))
    log = {version_name(before.digest), "versions", before.digest[:16], "00000001.json"}
    assert {path.name for path in (tmp_path / "out").rglob("*") if path.suffix != ".bin"} == files | log
    assert not convert(rows_file, tmp_path / "out", **settings).is_new


def test_an_appended_dataset_keeps_its_versions_when_lengths_are_added(tmp_path: Path) -> None:
    for how in ({}, {"append": True}):
        with MDSWriter(out=tmp_path / "set", columns={"text": "str"}, **how) as writer:
            writer.write_batch({"text": ["a", "bb", "ccc"]})
    add_lengths(tmp_path / "set", {"text": len}, num_workers=1)
    with MDSWriter(out=tmp_path / "set", columns={"text": "str"}, append=True, lengths={"text": len}) as writer:
        writer.write({"text": "dddd"})
    assert numbers(tmp_path / "set") == {"text": [1, 2, 3, 1, 2, 3, 4]}
    assert [len(StreamingDataset(remote=tmp_path / "set", version=k)) for k in range(4)] == [3, 6, 6, 7]


def test_lengths_that_are_there_are_kept_unless_they_are_to_be_replaced(tmp_path: Path) -> None:
    with CSVWriter(out=tmp_path / "set", columns={"text": "str", "id": "int"}, lengths={"text": len}) as writer:
        writer.write_batch({"text": ["a", "bb"], "id": [5, 6]})
    before = (tmp_path / "set" / "index.json").read_bytes()
    with pytest.raises(FileExistsError, match=r"has the lengths text already\. Pass overwrite=True"):
        add_lengths(tmp_path / "set", {"id": lambda k: k, "text": len})
    assert (tmp_path / "set" / "index.json").read_bytes() == before
    add_lengths(tmp_path / "set", {"id": lambda k: k}, num_workers=1)
    assert numbers(tmp_path / "set") == {"text": [1, 2], "id": [5, 6]}
    add_lengths(tmp_path / "set", {"text": lambda text: 10 * len(text)}, num_workers=1, overwrite=True)
    assert numbers(tmp_path / "set") == {"text": [10, 20], "id": [5, 6]}
    assert (tmp_path / "set" / "lengths.text.00000.bin").exists()  # a reader may still use it
    with CSVWriter(out=tmp_path / "set", columns={"text": "str"}, overwrite=True) as writer:
        writer.write({"text": "x"})
    listed = listed_files((tmp_path / "set" / "index.json").read_bytes())
    assert {path.name for path in (tmp_path / "set").iterdir()} == listed | {"index.json"}


def test_damaged_lengths_are_replaced_if_that_is_asked_for(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "set", columns={"text": "str"}, lengths={"text": len}) as writer:
        writer.write_batch({"text": ["a", "bb"]})
    path = tmp_path / "set" / "index.json"
    path.write_text(path.read_text().replace('"samples": 2}]', '"samples": 3}]'))
    with pytest.raises(FormatError, match="--overwrite"):
        add_lengths(tmp_path / "set", {"text": len}, num_workers=1)
    add_lengths(tmp_path / "set", {"text": len}, num_workers=1, overwrite=True)
    assert numbers(tmp_path / "set") == {"text": [1, 2]}


def test_a_writer_that_comes_between_makes_adding_fail_and_nothing_stays(tmp_path: Path) -> None:
    def append(text: str) -> int:
        if text == "a":
            with MDSWriter(out=tmp_path / "set", columns={"text": "str"}, append=True) as writer:
                writer.write({"text": "later"})
        return len(text)

    with MDSWriter(out=tmp_path / "set", columns={"text": "str"}) as writer:
        writer.write_batch({"text": ["a", "bb"]})
    with pytest.raises((FileExistsError, ConflictError), match="another writer is or was at work"):
        add_lengths(tmp_path / "set", {"text": append}, num_workers=1)
    assert numbers(tmp_path / "set") == {}
    assert not list((tmp_path / "set").glob("*.bin"))
    assert add_lengths(tmp_path / "set", {"text": len}, num_workers=1)["text"].tolist() == [1, 2, 5]


def test_adding_that_is_killed_at_any_step_leaves_the_dataset_with_or_without_lengths(tmp_path: Path) -> None:
    died, step = True, 0
    while died:
        step += 1
        out = tmp_path / str(step)
        with MDSWriter(out=out, columns={"text": "str"}, max_workers=0) as writer:
            writer.write_batch({"text": ["a", "bb"]})
        died = killed_at(step, lambda out=out: add_lengths(out, {"text": len}, num_workers=1))  # type: ignore[misc]
        assert numbers(out) in ({}, {"text": [1, 2]})
        if died and not numbers(out):
            add_lengths(out, {"text": len}, num_workers=1)
        assert numbers(out) == {"text": [1, 2]}
        index = read_index(LocalStore(out))
        visible = {path.name for path in out.iterdir() if not path.name.startswith(".")}  # a lock may stay
        log = {version_name(index.digest), "versions"}
        assert visible | log == listed_files(index.data) | {"index.json"} | log
    assert step > 4


def test_only_a_dataset_gets_lengths_and_only_of_its_columns(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"has no index\.json\. Check the path"):
        add_lengths(tmp_path / "none", {"text": len})
    with MDSWriter(out=tmp_path / "set", columns={"text": "str", "p": "pkl"}) as writer:
        writer.write({"text": "abc", "p": {1, 2}})
    with pytest.raises(ValueError, match=r"needs a column of that name; the columns are p, text\."):
        add_lengths(tmp_path / "set", {"txt": len, "text": len}, num_workers=1)
    with pytest.raises(ValueError, match="If you trust it, pass allow_unsafe_types=True"):
        add_lengths(tmp_path / "set", {"p": len}, num_workers=1)
    assert add_lengths(tmp_path / "set", {"p": len}, num_workers=1, allow_unsafe_types=True)["p"].tolist() == [2]
    with MDSWriter(out=tmp_path / "empty", columns={"text": "str"}) as writer:
        pass
    assert add_lengths(tmp_path / "empty", {"text": len}, num_workers=1)["text"].tolist() == []


def test_lengths_are_added_in_a_store_without_a_copy_of_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec: uv sync --group test")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    url = "memory://lengths-added"
    for part in ("part0", "part1"):
        with MDSWriter(out=f"{url}/{part}", columns={"text": "str"}, compression="zstd", size_limit=200) as writer:
            writer.write_batch({"text": ["x" * k for k in range(50)]})
    merge_index(url)
    assert add_lengths(url, {"text": len}, num_workers=1)["text"].tolist() == [*range(50), *range(50)]
    assert list(tmp_path.iterdir()) == []
    assert set(Index.from_bytes(open_store(url).read("index.json"), url).lengths) == {"text"}
    with pytest.warns(UserWarning, match="of the former one are not among them. Add them again"):
        merge_index(url)
    assert Index.from_bytes(open_store(url).read("index.json"), url).lengths == {}
