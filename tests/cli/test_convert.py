"""``convert``, the lengths that it adds, and ``log --merge``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_stream import MDSWriter
from lightning_stream.cli import main

Answer = Callable[..., tuple[int, Any]]


def test_a_conversion_is_reused_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"a": {number}}}\n' for number in range(20)))
    arguments = ["convert", str(tmp_path / "rows.jsonl"), str(tmp_path / "out"), "--num-workers", "1"]
    assert main([*arguments, "--val-fraction", "0.2"]) == 0
    assert "val in 2 shards" in capsys.readouterr().out
    assert main([*arguments, "--val-fraction", "0.2"]) == 0
    assert capsys.readouterr().out.startswith("Reusing the existing dataset at ")
    assert main([*arguments, "--val-fraction", "0.3"]) == 2
    text = capsys.readouterr().err
    assert "val_fraction was " in text
    assert "overwrite" in text


def test_a_column_may_have_the_name_of_a_secret(tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "rows.jsonl").write_text('{"token_ids": 1, "b": 2}\n')
    arguments = [str(tmp_path / "rows.jsonl"), str(tmp_path / "out"), "--num-workers", "1"]
    code, done = answer("convert", *arguments, "--columns", "token_ids=int32")
    assert (code, done["columns"]) == (0, {"token_ids": "int32"})


def test_merge_writes_one_index(tmp_path: Path, answer: Answer) -> None:
    for part in ("0", "1"):
        with MDSWriter(out=str(tmp_path / "parts" / part), columns={"a": "int"}) as writer:
            writer.write({"a": 1})
    code, about = answer("log", str(tmp_path / "parts"), "--merge")
    assert (code, about["samples"], about["shards"], len(about["versions"])) == (0, 2, 2, 1)
    assert answer("check", str(tmp_path / "parts"))[0] == 0


@pytest.fixture
def copied(shards: Path, tmp_path: Path) -> Path:
    shutil.copytree(shards, tmp_path / "copied")
    return tmp_path / "copied"


def test_lengths_are_added_to_every_split_and_shown(
    copied: Path, capsys: pytest.CaptureFixture[str], answer: Answer
) -> None:
    code, done = answer("convert", str(copied), "--lengths", "name", "--num-workers", "1")
    total = sum(len(f"n{k}") for k in range(64))
    assert code == 0
    assert done["datasets"][0] == {
        "url": str(copied / "train"),
        "lengths": {"name": {"sum": total, "mean": total / 64, "max": 3}},
    }
    assert [one["url"] for one in done["datasets"]] == [str(copied / "train"), str(copied / "val")]
    _, about = answer("show", str(copied))
    assert [one["lengths"] for one in about["datasets"]] == [one["lengths"] for one in done["datasets"]]
    assert main(["show", str(copied / "train")]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["name", f"sum {total}, mean {total / 64:.4g}, max 3"] in lines
    assert main(["convert", str(copied), "--lengths", "name"]) == 2
    assert "has the lengths name already. Pass overwrite=True to measure again" in capsys.readouterr().err
    assert main(["convert", str(copied), "--lengths", "name", "--overwrite", "--num-workers", "1"]) == 0
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
        given = ["convert", str(copied / "val"), "--lengths", f"{column}=my_measures:{function}"]
        code, done = answer(*given)
        assert (code, done["datasets"][0]["lengths"][column]["max"]) == (0, largest)
    for wrong, message in (
        ("my_measures", "--lengths COLUMN= takes MODULE:FUNCTION"),
        ("my_measures:none", "cannot be imported from here: module 'my_measures' has no attribute 'none'"),
        ("no_such_module:total", "cannot be imported from here: No module named 'no_such_module'"),
    ):
        assert main(["convert", str(copied / "val"), "--lengths", f"y={wrong}"]) == 2
        assert message in capsys.readouterr().err


def test_a_misspelled_column_is_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(copied / "val"), "--lengths", "nme", "--num-workers", "1"]) == 2
    assert "needs a column of that name; the columns are label, name, x." in capsys.readouterr().err
    assert not list(copied.rglob("*.bin"))
    assert main(["convert", str(copied / "val"), "--lengths", "name", "--val-fraction", "0.1"]) == 2
    assert "found one path val_fraction" in capsys.readouterr().err


def test_convert_takes_columns_to_measure(tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"a": {k}, "text": "{"x" * k}"}}\n' for k in range(20)))
    arguments = [str(tmp_path / "rows.jsonl"), str(tmp_path / "out"), "--num-workers", "1", "--lengths", "text"]
    assert answer("convert", *arguments)[0] == 0
    _, about = answer("show", str(tmp_path / "out"))
    assert about["datasets"][0]["lengths"] == {"text": {"sum": 190, "mean": 9.5, "max": 19}}
