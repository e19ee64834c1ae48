"""``lengths``, and what ``inspect``, ``verify`` and ``convert`` do with lengths."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_stream.cli import main

Answer = Callable[..., tuple[int, Any]]


@pytest.fixture
def copied(shards: Path, tmp_path: Path) -> Path:
    shutil.copytree(shards, tmp_path / "copied")
    return tmp_path / "copied"


def test_lengths_are_added_to_every_split_and_shown(
    copied: Path, capsys: pytest.CaptureFixture[str], answer: Answer
) -> None:
    code, done = answer("lengths", str(copied), "--column", "name", "--num-workers", "1")
    total = sum(len(f"n{k}") for k in range(64))
    assert code == 0
    assert done["datasets"][0] == {
        "url": str(copied / "train"),
        "lengths": {"name": {"sum": total, "mean": total / 64, "max": 3}},
    }
    assert [one["url"] for one in done["datasets"]] == [str(copied / "train"), str(copied / "val")]
    _, about = answer("inspect", str(copied), "--samples", "1")
    assert [one["lengths"] for one in about["datasets"]] == [one["lengths"] for one in done["datasets"]]
    assert about["datasets"][0]["sample_0"]["name"] == "n0"
    assert main(["inspect", str(copied / "train")]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["name", f"{total} sum, {total / 64:.1f} mean, 3 max"] in lines
    assert main(["lengths", str(copied), "--column", "name"]) == 2
    assert "has the lengths name already. Pass --overwrite to measure again" in capsys.readouterr().err
    assert main(["lengths", str(copied), "--column", "name", "--overwrite", "--num-workers", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(copied / "train")


def test_a_function_of_a_module_in_the_folder_measures(
    copied: Path, capsys: pytest.CaptureFixture[str], answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copied.parent)
    monkeypatch.syspath_prepend("")  # taken back after the test, with what the command adds
    (copied.parent / "my_measures.py").write_text(
        "def total(x):\n    return int(x.sum())\n\ndef whole(sample):\n    return sample['label'] + len(sample['x'])\n"
    )
    for column, function, largest in (("x", "total", 28 + 8 * 15), ("cost", "whole", 3 + 8)):
        given = ["lengths", str(copied / "val"), "--column", column, "--by", f"my_measures:{function}"]
        code, done = answer(*given)
        assert (code, done["datasets"][0]["lengths"][column]["max"]) == (0, largest)
    for wrong, message in (
        ("my_measures", "--by takes MODULE:FUNCTION"),
        ("my_measures:none", "cannot be imported: module 'my_measures' has no attribute 'none'"),
        ("no_such_module:total", "cannot be imported: No module named 'no_such_module'"),
    ):
        assert main(["lengths", str(copied / "val"), "--column", "y", "--by", wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_misspelled_column_is_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lengths", str(copied / "val"), "--column", "nme", "--num-workers", "1"]) == 2
    assert "needs a column of that name; the columns are label, name, x." in capsys.readouterr().err
    assert not list(copied.rglob("*.bin"))
    assert main(["lengths", str(copied / "val")]) == 2
    assert "--column" in capsys.readouterr().err


def test_verify_checks_the_files_of_lengths(copied: Path, capsys: pytest.CaptureFixture[str], answer: Answer) -> None:
    train = copied / "train"
    assert main(["lengths", str(train), "--column", "name", "--num-workers", "1"]) == 0
    (path,) = train.glob("*.bin")
    data = path.read_bytes()
    assert main(["verify", str(train)]) == 0
    for damage, message in (
        (b"\1" + data[1:], "the index says sha1"),
        (data[:-4], f"the index says {len(data)} bytes, the file has {len(data) - 4}"),
        (None, "no such file"),
    ):
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        capsys.readouterr()
        code, about = answer("verify", str(train))
        (corrupt,) = about["datasets"][0]["corrupt"]
        assert (code, corrupt["lengths"]) == (1, "name")
        assert message in corrupt["error"]
        assert main(["verify", str(train), "--shards", "0:2"]) == 0
        if damage is None:
            path.write_bytes(data)
    index = train / "index.json"
    index.write_text(index.read_text().replace('"samples": 64}]', '"samples": 65}]'))
    capsys.readouterr()
    assert main(["verify", str(train)]) == 1
    assert "of lengths 'name' has 256 bytes for 65 samples" in capsys.readouterr().out


def test_convert_takes_columns_to_measure(tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"a": {k}, "text": "{"x" * k}"}}\n' for k in range(20)))
    arguments = [str(tmp_path / "rows.jsonl"), str(tmp_path / "out"), "--num-workers", "1", "--lengths", "text"]
    assert answer("convert", *arguments)[0] == 0
    _, about = answer("inspect", str(tmp_path / "out"))
    assert about["datasets"][0]["lengths"] == {"text": {"sum": 190, "mean": 9.5, "max": 19}}
