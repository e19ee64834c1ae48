"""The arguments of `convert`, and what it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_stream.convert import Inputs, convert, read_manifest
from lightning_stream.errors import NotFoundError

PLAIN: dict[str, Any] = {"compression": None, "num_workers": 1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"val_fraction": 20}, "val_fraction must be between 0 and 1"),
        ({"val_fraction": 0.5, "group_by": "author"}, "group_by='author' is not a column; the columns are k"),
        ({"columns": ["k"]}, "columns must be a dict of encodings by name"),
        ({"columns": {"k": "int99"}}, "no encoding 'int99'"),
        ({"lengths": {"n": 3}}, "lengths must be functions by name"),
    ],
)
def test_a_wrong_argument_leaves_nothing_in_the_way_of_the_right_call(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"k": 1}\n' * 50)
    settings: dict[str, Any] = {"num_workers": 1}
    with pytest.raises((ValueError, TypeError), match=message):
        convert(tmp_path / "rows.jsonl", tmp_path / "out", **settings, **wrong)
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
    assert convert(tmp_path / "rows.jsonl", tmp_path / "out", **settings).total == 50


def test_a_name_of_a_cluster_is_no_session(rows_file: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"spark must be a Spark session, such as local_session\('local\[2\]'\)"):
        convert(rows_file, tmp_path / "out", spark="local[2]")  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [None, 3, [], {"train": "rows.jsonl"}, [None]])
def test_what_is_no_source_is_refused(tmp_path: Path, source: Any) -> None:
    with pytest.raises(ValueError, match="a source must be a path, a URL, a pattern, or a list of these; got"):
        convert(source, tmp_path / "out")


def test_a_mistyped_argument_is_refused_with_the_one_that_was_meant(rows_file: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"convert\(\) got .* argument 'colums'\. Did you mean 'columns'\?"):
        convert(rows_file, tmp_path / "out", colums={})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Its arguments are source, out, columns, "):
        convert(rows_file, tmp_path / "out", x=1)  # type: ignore[call-arg]
    assert not (tmp_path / "out").exists()


def test_a_mistyped_url_is_not_written_as_a_folder(
    rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"Did you mean s3://BUCKET/FOLDER\?"):
        convert(rows_file, "s3:/bucket/train", **PLAIN)
    assert not (tmp_path / "s3:").exists()


def test_a_manifest_gives_what_the_conversion_returned(rows_file: Path, tmp_path: Path) -> None:
    done = convert(rows_file, tmp_path / "out", **PLAIN, val_fraction=0.2)
    found = read_manifest(tmp_path / "out")
    assert (found.num_samples, found.num_shards, found.columns) == (done.num_samples, done.num_shards, done.columns)
    assert read_manifest(tmp_path / "out" / "val").total == done.num_samples["val"]
    with pytest.raises(NotFoundError, match="has none"):
        read_manifest(tmp_path)


def test_a_dataset_is_reused_with_a_word_and_written_again_by_force(rows_file: Path, tmp_path: Path) -> None:
    assert convert(rows_file, tmp_path / "out", **PLAIN).is_new
    again = convert(rows_file, tmp_path / "out", **PLAIN)
    assert str(again).startswith(f"Reusing the existing dataset at {tmp_path / 'out'}")
    written = (tmp_path / "out" / "index.json").stat().st_mtime_ns
    assert convert(rows_file, tmp_path / "out", **PLAIN, force=True).is_new
    assert (tmp_path / "out" / "index.json").stat().st_mtime_ns > written
    convert(rows_file, tmp_path / "split", **PLAIN, val_fraction=0.1)
    with pytest.raises(FileExistsError, match=r"val_fraction was 0\.1, now 0\.2\. Write to another folder, or pass"):
        convert(rows_file, tmp_path / "split", **PLAIN, val_fraction=0.2)


def read(each: Any) -> list[dict[str, int]]:
    return [{"n": len(each) if isinstance(each, tuple) else each.number}]


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number


def test_inputs_count_by_all_of_their_value_and_not_by_their_address(tmp_path: Path) -> None:
    long = tuple(f"path {k}" for k in range(100))
    assert convert(Inputs([long], read), tmp_path / "out", **PLAIN).is_new
    assert not convert(Inputs([tuple(f"path {k}" for k in range(100))], read), tmp_path / "out", **PLAIN).is_new
    with pytest.raises(FileExistsError):
        convert(Inputs([(*long[:-1], "another path")], read), tmp_path / "out", **PLAIN)
    assert convert(Inputs([Thing(1)], read), tmp_path / "things", **PLAIN).is_new
    assert not convert(Inputs([Thing(1)], read), tmp_path / "things", **PLAIN).is_new
    with pytest.raises(FileExistsError):
        convert(Inputs([Thing(2)], read), tmp_path / "things", **PLAIN)
    with (tmp_path / "file").open("w") as file, pytest.raises(ValueError, match="stable description"):
        convert(Inputs([file], read), tmp_path / "files", **PLAIN)


def test_shards_are_compressed_unless_they_hold_images(rows_file: Path, tmp_path: Path, files_of: Any) -> None:
    convert(rows_file, tmp_path / "rows", num_workers=1)
    assert any(name.endswith(".mds.zstd") for name in files_of(tmp_path / "rows"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"\xff\xd8\xff\xff\xd9")
    convert(tmp_path / "in", tmp_path / "images", num_workers=1)
    assert any(name.endswith(".mds") for name in files_of(tmp_path / "images"))
