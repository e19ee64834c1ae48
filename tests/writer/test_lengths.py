"""Lengths of samples that writers put beside the shards: the same numbers however they are written, whole or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from writer.test_mosaic_reads import read_by_mosaic
from writer.test_place import killed_at

from lightning_stream.errors import ConflictError, FormatError
from lightning_stream.formats.index import Index
from lightning_stream.writer import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter, merge_index
from lightning_stream.writer.place import listed_files

TEXTS = ["", "a", "ärger", "a longer text", "€"]
LENGTHS = {"text": len, "both": lambda sample: len(sample["text"]) + sample["id"]}


def numbers(folder: Path, name: str) -> list[int]:
    """The lengths as the index lists them, with the hashes of their files checked elsewhere."""
    files = Index.from_file(folder / "index.json").lengths[name]
    return np.concatenate([np.fromfile(folder / file.basename, "<u4") for file in files] or [[]]).tolist()


def write(out: Path, ids: Any, kind: Any = MDSWriter, batch: bool = False, **options: Any) -> None:
    settings = {"columns": {"text": "str", "id": "int"}, "size_limit": 300, "lengths": LENGTHS, **options}
    with kind(out=out, **settings) as writer:
        rows = [{"text": TEXTS[k % len(TEXTS)], "id": k} for k in ids]
        if batch:
            writer.write_batch({name: [row[name] for row in rows] for name in ("text", "id")})
        for row in () if batch else rows:
            writer.write(row)


def expected(ids: Any) -> dict[str, list[int]]:
    lengths = [len(TEXTS[k % len(TEXTS)]) for k in ids]
    return {"text": lengths, "both": [length + k for length, k in zip(lengths, ids, strict=True)]}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(MDSWriter, {}), (JSONWriter, {}), (CSVWriter, {}), (TSVWriter, {}), (XSVWriter, {"separator": "|"})],
)
def test_every_writer_writes_the_same_lengths_by_sample_and_by_batch(
    tmp_path: Path, kind: Any, options: dict[str, Any], compression: str | None
) -> None:
    for batch in (False, True):
        write(tmp_path / str(batch), range(40), kind, batch, compression=compression, **options)
        assert {name: numbers(tmp_path / str(batch), name) for name in LENGTHS} == expected(range(40))
    files = [{path.name: path.read_bytes() for path in (tmp_path / each).iterdir()} for each in ("False", "True")]
    assert files[0] == files[1]
    assert len([name for name in files[0] if name.startswith("shard.")]) > 2


@pytest.mark.parametrize(
    "values",
    [
        [np.arange(k % 3 + 1, dtype=np.int32) for k in range(9)],
        np.arange(36, dtype=np.int32).reshape(9, 4),
        np.arange(72, dtype=np.int32).reshape(9, 4, 2),
        [np.full((k + 1, 2), k, np.int32) for k in range(9)],
    ],
    ids=["lists", "rows of one size", "more dimensions", "arrays"],
)
@pytest.mark.parametrize("function", [len, lambda value: value.shape[0]], ids=["len", "own"])
def test_arrays_of_a_batch_have_the_lengths_of_single_arrays(tmp_path: Path, values: Any, function: Any) -> None:
    with MDSWriter(out=tmp_path / "set", columns={"x": "ndarray:int32"}, lengths={"x": function}) as writer:
        writer.write_batch({"x": values})
    assert numbers(tmp_path / "set", "x") == [len(value) for value in values]


def test_arrow_columns_have_the_lengths_of_their_python_values(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": TEXTS, "data": [text.encode() for text in TEXTS], "id": [1, 2, 3, 4, 5]})
    kinds = []
    lengths = {
        "text": len,
        "data": len,
        "all": lambda sample: len(sample["text"]) + len(sample["data"]),
        "id": lambda value: kinds.append(type(value)) or value,
    }
    with MDSWriter(out=tmp_path / "set", columns={"text": "str", "data": "bytes", "id": "int"}, lengths=lengths) as out:
        out.write_batch(table)
    found = {name: numbers(tmp_path / "set", name) for name in lengths}
    characters, data = list(map(len, TEXTS)), [len(text.encode()) for text in TEXTS]
    assert characters != data
    assert found == {
        "text": characters,
        "data": data,
        "all": [a + b for a, b in zip(characters, data, strict=True)],
        "id": [1, 2, 3, 4, 5],
    }


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("wrong", [-1, 1 << 32, 2.5, None, "3"])
def test_a_length_that_is_no_whole_number_is_refused_with_its_name_and_value(
    tmp_path: Path, wrong: Any, batch: bool
) -> None:
    lengths = {"text": lambda text: wrong if text == "a" else 7}
    writer = MDSWriter(out=tmp_path / "set", columns={"text": "str"}, lengths=lengths)
    message = rf"lengths\['text'\] must give a whole number .*{str(wrong)[:4]}.* for str 'a'"
    with pytest.raises(ValueError, match=message):
        writer.write_batch({"text": TEXTS}) if batch else [writer.write({"text": text}) for text in TEXTS]


@pytest.mark.parametrize("batch", [False, True])
def test_a_refused_length_adds_no_sample(tmp_path: Path, batch: bool) -> None:
    with MDSWriter(out=tmp_path / "set", columns={"x": "int"}, lengths={"x": lambda x: x}) as writer:
        writer.write({"x": 3})
        with pytest.raises(ValueError, match="must give a whole number"):
            writer.write_batch({"x": [4, -1]}) if batch else writer.write({"x": -1})
        writer.write({"x": 5})
    assert numbers(tmp_path / "set", "x") == [3, 5]


def test_errors_of_a_function_name_the_length(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "set", columns={"x": "int"}, lengths={"x": len}) as writer:
        for add in (lambda: writer.write({"x": 3}), lambda: writer.write_batch({"x": np.arange(3)})):
            with pytest.raises(TypeError, match=r"lengths\['x'\] failed for .*int.*: .*no len"):
                add()
    other = MDSWriter(out=tmp_path / "other", columns={"x": "int"}, lengths={"tokns": len})
    for add in (lambda: other.write({"x": 3}), lambda: other.write_batch({"x": [3]})):
        with pytest.raises(ValueError, match=r"needs a column of that name; the columns are x\. Name one"):
            add()
    for wrong in ({"x": 3}, [len], {"": len}, "tokens"):
        with pytest.raises(TypeError, match=r"lengths must be functions by name, e\.g\. {'tokens': len}; got"):
            MDSWriter(out=tmp_path / "third", columns={"x": "int"}, lengths=wrong)  # type: ignore[arg-type]


def test_without_samples_there_are_no_files_but_names(tmp_path: Path) -> None:
    write(tmp_path / "set", [])
    assert {path.name for path in (tmp_path / "set").iterdir()} == {"index.json"}
    assert Index.from_file(tmp_path / "set" / "index.json").lengths == {"text": (), "both": ()}


def test_any_name_of_a_column_makes_a_file_of_its_own(tmp_path: Path) -> None:
    names = ["a/b", "a_b", "a b", "a.b", "../x", "A=1", "é"]
    with MDSWriter(out=tmp_path / "set", columns=dict.fromkeys(names, "str"), lengths=dict.fromkeys(names, len)) as out:
        out.write({name: "x" * k for k, name in enumerate(names)})
    assert [numbers(tmp_path / "set", name) for name in names] == [[k] for k in range(len(names))]
    assert all(path.parent == tmp_path / "set" for path in tmp_path.rglob("*.bin"))
    write(tmp_path / "set", range(3), overwrite=True)
    assert {path.name for path in (tmp_path / "set").iterdir()} == listed(tmp_path / "set")


def listed(folder: Path) -> set[str]:
    return listed_files((folder / "index.json").read_bytes()) | {"index.json"}


def test_appended_samples_add_a_file_and_the_former_version_keeps_its_lengths(tmp_path: Path) -> None:
    write(tmp_path / "set", range(10))
    first = Index.from_file(tmp_path / "set" / "index.json")
    write(tmp_path / "set", range(10, 15), append=True)
    write(tmp_path / "set", range(15, 40), append=True, batch=True)
    assert {name: numbers(tmp_path / "set", name) for name in LENGTHS} == expected(range(40))
    second = Index.from_file(tmp_path / "set" / "index.json")
    assert len(second.lengths["text"]) == 3
    assert second.lengths["text"][:1] == first.lengths["text"]
    kept = Index.from_file(tmp_path / "set" / f"index.{first.digest[:16]}.json")
    assert kept.lengths == first.lengths


@pytest.mark.parametrize("first", [range(10), []])
@pytest.mark.parametrize("given", [None, {"text": len}, {**LENGTHS, "more": lambda _: 1}])
def test_appended_samples_must_have_the_lengths_of_the_dataset(tmp_path: Path, given: Any, first: Any) -> None:
    write(tmp_path / "set", first)
    before = {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()}
    with pytest.raises(
        ValueError, match=r"appended samples must have the lengths that the dataset has; .* has both, text"
    ):
        write(tmp_path / "set", range(3), append=True, lengths=given)
    assert {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()} == before


def test_overwriting_replaces_the_lengths_and_deletes_the_former_files(tmp_path: Path) -> None:
    write(tmp_path / "set", range(10))
    write(tmp_path / "set", range(5), append=True)
    write(tmp_path / "set", range(3), overwrite=True)
    assert {name: numbers(tmp_path / "set", name) for name in LENGTHS} == expected(range(3))
    assert {path.name for path in (tmp_path / "set").iterdir()} == listed(tmp_path / "set")
    write(tmp_path / "set", range(3), overwrite=True, lengths=None)
    assert {path.name for path in (tmp_path / "set").iterdir()} == listed(tmp_path / "set")
    assert not list((tmp_path / "set").glob("*.bin"))


@pytest.mark.parametrize("how", ["new", "append", pytest.param("overwrite", marks=pytest.mark.nightly)])
def test_a_writer_killed_at_any_step_leaves_lengths_that_fit_the_samples(tmp_path: Path, how: str) -> None:
    options = {} if how == "new" else {how: True}
    wanted = {"new": range(20, 40), "append": [*range(15), *range(20, 40)], "overwrite": range(20, 40)}[how]
    died, step = True, 0
    while died:
        step += 1
        out = tmp_path / str(step)
        if how != "new":
            write(out, range(15), max_workers=1)
        died = killed_at(step, lambda out=out: write(out, range(20, 40), max_workers=1, **options))  # type: ignore[misc]
        found = {name: numbers(out, name) for name in LENGTHS} if (out / "index.json").exists() else None
        assert found in ([None, expected(wanted)] if how == "new" else [expected(range(15)), expected(wanted)])
    assert found == expected(wanted)
    assert step > 12


def test_of_two_writers_the_loser_leaves_no_lengths(tmp_path: Path) -> None:
    write(tmp_path / "set", range(10))
    settings = {"out": tmp_path / "set", "columns": {"text": "str", "id": "int"}, "lengths": LENGTHS, "overwrite": True}
    loser = MDSWriter(**settings)
    loser.write({"text": "x", "id": 99})
    write(tmp_path / "set", range(10, 20), overwrite=True)
    with pytest.raises((ConflictError, FileExistsError), match="another writer is or was at work"):
        loser.finish()
    assert numbers(tmp_path / "set", "both") == expected(range(10, 20))["both"]
    assert {path.name for path in (tmp_path / "set").iterdir()} == listed(tmp_path / "set")


def test_two_writers_that_append_lengths_at_once_both_win(tmp_path: Path) -> None:
    write(tmp_path / "set", range(10))
    settings = {"out": tmp_path / "set", "columns": {"text": "str", "id": "int"}, "lengths": LENGTHS, "append": True}
    late = MDSWriter(**settings)
    late.write({"text": "x", "id": 99})
    write(tmp_path / "set", range(10, 20), append=True)
    late.finish()
    found = numbers(tmp_path / "set", "both")
    assert found[:20] == expected(range(20))["both"]
    assert len(found) == 21


def test_a_writer_whose_lengths_cannot_be_put_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = MDSWriter(out=tmp_path / "set", columns={"text": "str", "id": "int"}, lengths=LENGTHS)
    writer.write({"text": "x", "id": 1})
    put = writer._place.part

    def failing(name: str, parts: Any) -> None:
        if name.startswith("lengths.both"):
            raise OSError("no space")
        put(name, parts)

    monkeypatch.setattr(writer._place, "part", failing)
    for _ in range(2):
        with pytest.raises(OSError, match="no space"):
            writer.finish()
    assert not (tmp_path / "set" / "index.json").exists()


@pytest.mark.parametrize("nested", [False, True])
def test_a_merged_index_has_the_lengths_of_its_partitions(tmp_path: Path, nested: bool) -> None:
    write(tmp_path / "part0", range(10))
    write(tmp_path / "part1", range(10, 15), JSONWriter if nested else MDSWriter)
    write(tmp_path / "part1", range(15, 20), JSONWriter if nested else MDSWriter, append=True)
    write(tmp_path / "part2", [], lengths=None)
    for _ in range(2):
        merge_index(tmp_path)
        assert {name: numbers(tmp_path, name) for name in LENGTHS} == expected(range(20))
    if nested:
        root = tmp_path.parent / f"{tmp_path.name}-above"
        root.mkdir()
        tmp_path.rename(root / "below")
        merge_index([root / "below"], root)
        assert {name: numbers(root, name) for name in LENGTHS} == expected(range(20))


def test_lengths_that_some_partitions_lack_are_dropped_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "part0", range(10))
    write(tmp_path / "part1", range(10, 20), lengths={"text": len})
    with pytest.warns(UserWarning, match="no lengths 'both', since 1 of 2 partitions have none: part1. Add them"):
        merge_index(tmp_path)
    assert numbers(tmp_path, "text") == expected(range(20))["text"]
    assert set(Index.from_file(tmp_path / "index.json").lengths) == {"text"}


def test_lengths_are_no_part_of_the_digest(tmp_path: Path) -> None:
    digests = set()
    for k, lengths in enumerate((None, LENGTHS, {"text": len})):
        write(tmp_path / str(k), range(10), lengths=lengths)
        digests.add(Index.from_file(tmp_path / str(k) / "index.json").digest)
    assert len(digests) == 1


def _changed(files: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    return [{**files[0], **changes}, *files[1:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: [], r"lengths 'text' \(no file\) have 0 numbers for 10 samples"),
        (lambda files: files * 2, "have 20 numbers for 10 samples"),
        (lambda files: _changed(files, bytes=44), r"lengths.text.00000.bin of lengths 'text' has 44 bytes for 10"),
        (
            lambda files: _changed(files, bytes=44, samples=11),
            r"\(lengths.text.00000.bin\) have 11 numbers for 10 samples",
        ),
        (lambda files: _changed(files, basename="../x"), "names of files must be relative"),
        (lambda files: _changed(files, samples=-1), "the lengths must list files by name"),
        (lambda files: "tokens", "the lengths must list files by name"),
    ],
)
def test_lengths_that_do_not_fit_are_an_error_when_they_are_used(tmp_path: Path, change: Any, message: str) -> None:
    write(tmp_path / "set", range(10))
    path = tmp_path / "set" / "index.json"
    index = json.loads(path.read_text())
    index["lengths"]["text"] = change(index["lengths"]["text"])
    path.write_text(json.dumps(index))
    damaged = Index.from_file(path)
    assert damaged.num_samples == 10
    with pytest.raises(FormatError, match=message):
        _ = damaged.lengths
    write(tmp_path / "set", range(3), overwrite=True)
    assert numbers(tmp_path / "set", "text") == expected(range(3))["text"]


def test_mosaicml_streaming_reads_a_dataset_with_lengths(mosaic_python: str, tmp_path: Path) -> None:
    for kind in (MDSWriter, JSONWriter):
        for how in ({}, {"append": True}):
            write(tmp_path / "in" / kind.__name__, range(1, 4), kind, **how)
    for part in ("part0", "part1"):
        write(tmp_path / "in" / "merged" / part, range(1, 4), compression="zstd")
    merge_index(tmp_path / "in" / "merged")
    read = read_by_mosaic(mosaic_python, tmp_path / "in", tmp_path / "cache")
    rows = [{"text": TEXTS[k], "id": repr(k)} for k in (1, 2, 3, 1, 2, 3)]
    assert read == {"MDSWriter": rows, "JSONWriter": rows, "merged": rows}
    assert os.path.isfile(tmp_path / "in" / "merged" / "part0" / "lengths.text.00000.bin")  # noqa: PTH113
