"""`convert: spark` makes the sets that the local conversion makes, with the same bytes, and says what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_stream import LocalDataset
from lightning_stream.errors import MissingExtraError

pytest.importorskip("PIL")
pytest.importorskip("tqdm")
from lightning_stream.recipes.photo_conversion import Conversion, ConversionConfig, Description
from lightning_stream.recipes.photos import DrawnFlowers, PhotoFolder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Drawn flowers in class folders: one is a png, one cannot be decoded, one name stands under two classes."""
    from io import BytesIO

    from PIL import Image

    with DrawnFlowers(count=30).open() as drawn:
        for (label, name), read in drawn.items():
            path = tmp_path / "photos [1]" / label / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(read())
    first, second, *_ = sorted((tmp_path / "photos [1]" / "roses").iterdir())
    out = BytesIO()
    Image.open(first).save(out, "PNG")
    first.with_suffix(".png").write_bytes(out.getvalue())
    second.write_bytes(b"\xff\xd8 broken")
    return tmp_path / "photos [1]"


def sets_of(conversion: Conversion) -> tuple[Description, dict[str, dict[str, tuple[int, bytes]]]]:
    done = conversion.run().description
    sets = {}
    for split in ("train", "val"):
        dataset = LocalDataset(f"{conversion.place}/{split}")
        samples = [(sample["name"], sample["label"], sample["image"].tobytes()) for sample in dataset]
        assert len({name for name, _, _ in samples}) == len(samples)
        sets[split] = {name: (label, data) for name, label, data in samples}
    return done, sets


def test_spark_makes_the_sets_that_this_process_makes(spark: Any, photos: Path, tmp_path: Path) -> None:
    plans = {
        engine: Conversion.plan(PhotoFolder(photos), tmp_path / "out", ConversionConfig(held_out=0.3, convert=engine))
        for engine in ("local", "spark")
    }
    assert plans["local"].place != plans["spark"].place
    told, made = sets_of(plans["local"])
    told_by_spark, made_by_spark = sets_of(plans["spark"])
    assert made_by_spark == made
    assert told_by_spark == told
    assert [name.partition("/")[0] for name in told.unreadable] == ["roses"]
    assert spark.range(3).count() == 3  # a session that was there before goes on


def test_drawings_are_unpacked_for_spark(spark: Any, tmp_path: Path) -> None:
    config = ConversionConfig(held_out=0.3, convert="spark")
    done, sets = sets_of(Conversion.plan(DrawnFlowers(count=15), tmp_path / "out", config))
    assert done.num_train + done.num_val == 15
    assert {name: len(samples) for name, samples in sets.items()} == {"train": done.num_train, "val": done.num_val}


def test_a_place_that_is_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="'local' or 'spark'; found 'dask'"):
        ConversionConfig(convert="dask")


def test_without_pyspark_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("pyspark", "pyspark.sql"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    conversion = Conversion.plan(DrawnFlowers(count=15), tmp_path / "out", ConversionConfig(convert="spark"))
    with pytest.raises(MissingExtraError, match=r"lightning-stream\[spark\]"):
        conversion.run()
    assert conversion.describe() is None
