"""The recipes' steps on small data, in the tests' own session."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lightning_stream import LocalDataset

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


def recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Rows whose label is a line in the features, with a header, a space in a name, and whole numbers among them."""
    rng = np.random.default_rng(1)
    x, whole = rng.normal(size=400), rng.integers(0, 10, 400)
    lines = [f"{a:.6f},{n},{3 * a + n:.6f}" for a, n in zip(x, whole, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["fixed acidity,count,label", *lines]))
    return str(tmp_path / "table.csv")


def test_the_table_is_learnt_by_a_loop_and_by_lightning_alike(
    spark: Any, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")
    import torch

    wine = recipe("wine_spark", monkeypatch)
    train_rows, held_rows = wine.load(spark, table, "label", 0.2)
    features = [name for name in train_rows.columns if name != "label"]
    assert features == ["fixed acidity", "count"]
    assert dict(train_rows.dtypes)["count"] == "int"
    train = wine.StreamToTorchDataset(train_rows, features, "label")
    held = wine.StreamToTorchDataset(held_rows, features, "label")
    assert len(train) + len(held) == 400
    assert 40 < len(held) < 120
    mean, deviation = wine.moments(train_rows, features)
    options = argparse.Namespace(device="cpu", epochs=8, workers=0)
    errors = []
    for learn in (wine.by_loop, wine.by_lightning):
        torch.manual_seed(1)
        model = wine.Regression(mean, deviation, 4.5)
        learn(model, train, options)
        errors.append(wine.mean_error(model, held.batches(64)))
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)
    assert errors[0] < wine.mean_error(wine.Constant(4.5), held.batches(64)) / 3


def test_a_class_of_ones_own_gives_the_same_samples(spark: Any, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    wine = recipe("wine_spark", monkeypatch)
    rows, _ = wine.load(spark, table, "label", 0.2)
    features = ["fixed acidity", "count"]
    own, ready = wine.Table(rows, features, "label"), wine.StreamToTorchDataset(rows, features, "label")
    assert len(own) == len(ready)
    for index in (0, 17, len(own) - 1):
        for mine, theirs in zip(own[index], ready[index], strict=True):
            assert torch.equal(mine, theirs)


def test_a_label_that_is_no_column_is_named(spark: Any, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wine = recipe("wine_spark", monkeypatch)
    with pytest.raises(SystemExit, match="no column 'quality'; it has fixed acidity, count, label"):
        wine.load(spark, table, "quality", 0.2)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Twelve drawn flowers, one of them in a file with a bracket in its name, beside a file of another class."""
    pytest.importorskip("PIL")
    from lightning_stream.recipes.photos import DrawnFlowers

    with DrawnFlowers(count=12).open() as drawn:
        for number, ((label, _), read) in enumerate(drawn.items()):
            path = tmp_path / "photos" / label / f"{number}[a].jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(read())
    (tmp_path / "photos" / "other").mkdir()
    (tmp_path / "photos" / "other" / "none.jpg").write_bytes(b"no picture")
    return tmp_path / "photos"


@pytest.mark.parametrize("num_train", [6, None], ids=["some", "all"])
def test_flowers_are_split_once_and_keep_their_pixels(
    spark: Any, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_train: int | None
) -> None:
    from PIL import Image

    flowers = recipe("flowers_spark", monkeypatch)
    flowers.save(flowers.load(spark, str(pictures), num_train, 3), str(tmp_path / "out"))
    saved = {name: LocalDataset(tmp_path / "out" / name) for name in ("train", "val")}
    assert {name: len(held) for name, held in saved.items()} == {"train": num_train or 9, "val": 3}
    samples = [sample for held in saved.values() for sample in held]
    assert len({sample["path"] for sample in samples}) == len(samples)
    for sample in samples:
        path = Path(sample["path"].removeprefix("file:"))
        assert flowers.CLASSES[sample["label"]] == path.parent.name
        assert sample["image"].tobytes() == Image.open(path).tobytes()
    again = flowers.load(spark, str(pictures), num_train, 3)
    for name, rows in again.items():
        assert {row["path"] for row in rows.select("path").collect()} == {sample["path"] for sample in saved[name]}


def test_pictures_that_all_would_be_held_out_are_an_error(
    spark: Any, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flowers = recipe("flowers_spark", monkeypatch)
    with pytest.raises(SystemExit, match=r"holds 12 pictures .* --val 12 takes them all"):
        flowers.load(spark, str(pictures), None, 12)
