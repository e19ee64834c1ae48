"""The validation split goes by what a row holds: other files, their order and processes do not matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream.convert import convert, read_manifest
from lightning_stream.convert.task import ValidationSplit

PLAIN: dict[str, Any] = {"compression": None, "num_workers": 1}


def rows_file(path: Path, numbers: range) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"k": k, "text": f"row {k}"}) + "\n" for k in numbers))
    return path


def split(source: Any, out: Path, samples_of: Any, column: str = "k", **settings: Any) -> tuple[set[Any], set[Any]]:
    convert(source, out, **PLAIN, val_fraction=0.3, **settings)
    train, val = ({sample[column] for sample in samples_of(out / name)} for name in ("train", "val"))
    return train, val


def test_added_files_and_another_order_move_no_row_between_the_splits(tmp_path: Path, samples_of: Any) -> None:
    first = rows_file(tmp_path / "in" / "b.jsonl", range(500))
    before = split(tmp_path / "in", tmp_path / "1", samples_of)
    rows_file(tmp_path / "in" / "a.jsonl", range(500, 900))
    after = split(tmp_path / "in", tmp_path / "2", samples_of, partition_bytes=1000)
    assert before[0] < after[0]
    assert before[1] < after[1]
    assert split([first, tmp_path / "in" / "a.jsonl"], tmp_path / "3", samples_of, shuffle=True) == after
    assert split(tmp_path / "in", tmp_path / "4", samples_of, transform=dict) == after
    assert split(tmp_path / "in", tmp_path / "5", samples_of, seed=1) != after


def test_an_added_class_moves_no_image_between_the_splits(tmp_path: Path, samples_of: Any) -> None:
    def image(name: str, data: bytes) -> None:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"\xff\xd8\xff" + data + b"\xff\xd9")

    chosen = {"columns": {"image": "bytes", "name": "str", "label": "int"}}
    for k in range(100):
        image(f"dog/{k}.jpg", b"%d" % k)
    image("owl/0.jpg", b"owl")
    before = split(tmp_path / "in", tmp_path / "1", samples_of, "name", **chosen)
    image("cat/0.jpg", b"cat")
    image("dog/copy.jpg", b"7")
    after = split(tmp_path / "in", tmp_path / "2", samples_of, "name", **chosen)
    assert before[0] < after[0]
    assert before[1] <= after[1]
    assert any({"dog/7.jpg", "dog/copy.jpg"} <= names for names in after)


def test_the_choice_never_changes_between_versions() -> None:
    rows = {"k": np.arange(20), "text": [f"row {k}" for k in range(20)]}
    chooser = ValidationSplit(0.3, 5, None, {"k": "int64", "text": "str"})
    found = chooser.of_rows(rows, 20)["val"].tolist()
    assert found == [6, 9, 10, 12, 15, 16]


def test_train_and_val_folders_become_two_datasets(tmp_path: Path, samples_of: Any) -> None:
    for k, name in enumerate(("train/dog", "train/cat", "validation/dog", "validation/cat", "validation/emu")):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / f"{k}.jpg").write_bytes(b"\xff\xd8\xff%d\xff\xd9" % k)
    (tmp_path / "in" / "README.md").write_text("splits")
    wanted = {"columns": {"label": "int", "name": "str"}}
    done = convert(tmp_path / "in", tmp_path / "out", **PLAIN, **wanted)
    assert done.num_samples == {"train": 2, "val": 3}
    assert done.classes == read_manifest(tmp_path / "out").classes == {"label": ["cat", "dog", "emu"]}
    assert samples_of(tmp_path / "out" / "val")[2] == {"label": 2, "name": "emu/4.jpg"}
    assert not convert(tmp_path / "in", tmp_path / "out", **PLAIN, **wanted).is_new
    with pytest.raises(ValueError, match="splits train, val already"):
        convert(tmp_path / "in", tmp_path / "out2", **PLAIN, val_fraction=0.1)
    (tmp_path / "in" / "more").mkdir()
    (tmp_path / "in" / "more" / "5.jpg").write_bytes(b"\xff\xd8\xff\xff\xd9")
    with pytest.raises(ValueError, match="beside them more"):
        convert(tmp_path / "in", tmp_path / "out2", **PLAIN)
    folders = [tmp_path / "in" / name for name in ("train", "validation")]
    assert convert(folders, tmp_path / "all", **PLAIN).num_samples == {"": 5}


def test_splits_that_files_are_named_by_have_the_columns_of_all_of_them(tmp_path: Path, samples_of: Any) -> None:
    (tmp_path / "in").mkdir()
    for name, value in (("train-1", "1"), ("val-1", "1.5")):
        (tmp_path / "in" / f"{name}.csv").write_text(f"x\n{value}\n")
    assert convert(tmp_path / "in", tmp_path / "out", **PLAIN).columns == {"x": "float64"}
    assert samples_of(tmp_path / "out" / "train") == [{"x": 1.0}]
    files = sorted((tmp_path / "in").iterdir())
    assert convert(files, tmp_path / "one", **PLAIN).num_samples == {"": 2}
