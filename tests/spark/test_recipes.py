"""The Spark recipes' steps on small data, in the tests' own session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import LocalDataset

torch = pytest.importorskip("torch")
pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("pyspark", reason="the Spark recipes need pyspark: uv sync --extra spark")
from recipes.spark import flowers, wine  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Rows whose label is linear in the features, with a header, a space in a name, and a column of whole numbers."""
    rng = np.random.default_rng(1)
    x, whole = rng.normal(size=400), rng.integers(0, 10, 400)
    lines = [f"{a:.6f},{n},{3 * a + n:.6f}" for a, n in zip(x, whole, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["fixed acidity,count,label", *lines]))
    return str(tmp_path / "table.csv")


def test_a_plain_loop_learns_the_table(spark: Any, table: str) -> None:
    train_rows, val_rows = wine.load(spark, table, "label", 0.2)
    features = [name for name in train_rows.columns if name != "label"]
    assert features == ["fixed acidity", "count"]
    assert dict(train_rows.dtypes)["count"] == "int"
    train, val = (wine.StreamToTorchDataset(rows, features, "label") for rows in (train_rows, val_rows))
    assert len(train) + len(val) == 400
    assert 40 < len(val) < 120
    model = wine.regression(len(features))
    before = wine.mean_error(model, val.batches(64))
    wine.learn(model, torch.utils.data.DataLoader(train, 64, shuffle=True, drop_last=True), epochs=30)
    assert wine.mean_error(model, val.batches(64)) < before / 3


def test_a_label_that_is_not_a_column_is_an_error(spark: Any, table: str) -> None:
    with pytest.raises(SystemExit, match="no column 'quality'; it has fixed acidity, count, label"):
        wine.load(spark, table, "quality", 0.2)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Forty synthetic flowers whose names have brackets, beside a file of another class."""
    pytest.importorskip("PIL")
    from recipes.data.synthetic import write_flowers

    write_flowers(tmp_path / "photos", 40)
    for file in sorted((tmp_path / "photos").glob("*/*.jpg")):
        file.rename(file.with_name(f"{file.stem}[a].jpg"))
    (tmp_path / "photos" / "other").mkdir()
    (tmp_path / "photos" / "other" / "none.jpg").write_bytes(b"no picture")
    return tmp_path / "photos"


def test_photos_are_in_one_split_and_keep_their_pixels(spark: Any, photos: Path, tmp_path: Path) -> None:
    from PIL import Image

    flowers.save(flowers.load(spark, str(photos)), str(tmp_path / "out"))
    saved = {split: LocalDataset(tmp_path / "out" / split) for split in ("train", "val")}
    samples = [sample for dataset in saved.values() for sample in dataset]
    assert len({sample["path"] for sample in samples}) == len(samples) == 40
    for sample in samples:
        path = Path(sample["path"].removeprefix("file:"))
        assert flowers.CLASSES[sample["label"]] == path.parent.name
        assert sample["image"].tobytes() == Image.open(path).tobytes()
    for split, rows in flowers.load(spark, str(photos)).items():
        assert {row["path"] for row in rows.select("path").collect()} == {one["path"] for one in saved[split]}
