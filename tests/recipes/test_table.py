"""A table is foretold from its columns of numbers; what is none is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lightning_stream.recipes import training
from lightning_stream.recipes.table import TableData, table_data

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def table(folder: Path, **settings: object) -> TableData:
    places = {"remote": str(folder / "shards"), "local": str(folder / "cache")}
    return table_data(**{"conversion_workers": 1, **places, **settings})


def write_csv(path: Path, rows: int = 200) -> Path:
    lines = ["city,rooms,area,price", *(f"town {n % 3},{n % 5 + 1},{20 + n},{3 * n + 7}" for n in range(rows))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_features_are_the_other_columns_of_numbers(tmp_path: Path) -> None:
    csv = write_csv(tmp_path / "flats.csv")
    data = table(tmp_path, source=str(csv), label="price")
    assert data.features == ("area", "rooms")
    train, val = data.datasets["train"], data.datasets["val"]
    assert train is not None
    assert val is not None
    assert train.size + val.size == 200
    assert 5 < val.size < 40
    mean, deviation = data.moments()
    prices = [row["price"] for row in train[:]]
    assert mean[-1] == pytest.approx(sum(prices) / len(prices))
    assert deviation[-1] > 100
    for wrong in ({"label": "prize"}, {"label": "price", "features": ["city"]}):
        with pytest.raises(ValueError, match="columns of numbers are area, price, rooms"):
            table(tmp_path, source=str(csv), **wrong).features  # noqa: B018


def test_a_changed_file_is_another_table(tmp_path: Path) -> None:
    csv = write_csv(tmp_path / "flats.csv")
    before = table(tmp_path, source=str(csv), label="price")
    before.prepare_data()
    write_csv(csv, rows=250)
    after = table(tmp_path, source=str(csv), label="price")
    assert after.place != before.place
    assert after.features == ("area", "rooms")
    sizes = [sum(one.datasets[split].size for split in ("train", "val")) for one in (before, after)]  # type: ignore[union-attr]
    assert sizes == [200, 250]


def test_train_py_explains_most_of_a_made_up_table(tmp_path: Path) -> None:
    chosen = [
        "data=table",
        "model=mlp",
        "scale=cpu",
        "num_threads=1",
        "data.conversion_workers=1",
        "trainer.max_epochs=4",
        "~callbacks.progress",
        "trainer.enable_progress_bar=false",
        f"root={tmp_path}",
        "name=table",
    ]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("train", overrides=chosen)
    training.train(config)
    told = json.loads((tmp_path / "table" / "summary.json").read_text())
    assert told["history"]["3"]["val/explained"] > 0.6
    assert Path(told["places"]["picture"]).read_bytes().startswith(b"\x89PNG")
    assert any("made up by this package" in note for note in told["notes"])
