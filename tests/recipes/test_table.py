"""A column of a table is predicted from its other columns of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
from support.recipe_runs import train

from recipes.data.table import TableData


def table(folder: Path, csv: Path, **settings: Any) -> TableData:
    paths = {"remote": str(folder / "shards"), "local": str(folder / "cache"), "conversion_workers": 1}
    data = TableData(source=str(csv), label="price", **paths, **settings)
    data.prepare_data()
    return data


def write_csv(path: Path, rows: int = 200) -> Path:
    lines = ["city,rooms,area,price", *(f"town {n % 3},{n % 5 + 1},{20 + n},{3 * n + 7}" for n in range(rows))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_features_are_the_other_columns_of_numbers(tmp_path: Path) -> None:
    csv = write_csv(tmp_path / "flats.csv")
    data = table(tmp_path, csv)
    assert set(data.features) == {"area", "rooms"}
    assert data.train_dataset.size + data.val_dataset.size == 200
    assert 5 < data.val_dataset.size < 40
    mean, std = data.feature_stats()
    prices = [row["price"] for row in data.train_dataset[:]]
    assert mean[-1] == pytest.approx(sum(prices) / len(prices))
    assert std[-1] > 100
    data.label = "prize"
    with pytest.raises(ValueError, match=r"prize is not one.*price"):
        data.features  # noqa: B018
    with pytest.raises(ValueError, match="city is not one"):
        table(tmp_path, csv, features=["city"]).features  # noqa: B018


def test_empty_cells_are_filled_or_their_rows_dropped(tmp_path: Path) -> None:
    csv = tmp_path / "flats.csv"
    csv.write_text(write_csv(csv).read_text().replace("town 0,1,20,", "town 0,1,,"))
    with pytest.raises(ValueError, match="area"):
        table(tmp_path, csv)
    sizes = []
    for settings in ({"drop_nulls": True}, {"fill_nulls": {"area": 0}}):
        data = table(tmp_path, csv, **settings)
        sizes.append(data.train_dataset.size + data.val_dataset.size)
    assert sizes == [199, 200]


def test_rows_stay_in_their_split_when_the_table_grows(tmp_path: Path) -> None:
    csv = write_csv(tmp_path / "flats.csv")
    before = {row["area"] for row in table(tmp_path, csv).val_dataset[:]}
    write_csv(csv, rows=250)
    with pytest.raises(FileExistsError):
        table(tmp_path, csv)
    after = {row["area"] for row in table(tmp_path, csv, overwrite=True).val_dataset[:]}
    assert {area for area in after if area < 220} == before


def test_train_py_explains_most_of_the_synthetic_rows(tmp_path: Path) -> None:
    summary = train(tmp_path / "table", "data=table", "trainer.max_epochs=4")
    assert summary["history"]["3"]["val/r2"] > 0.6
