"""The recipes' classifier and photos train under Composer too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")
pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync --extra lightning")

from lightning_stream.recipes.composer_run import ComposerRun
from lightning_stream.recipes.flowers import flower_data
from lightning_stream.recipes.image_classifier import ImageClassifier
from lightning_stream.recipes.language_model import LanguageModel
from lightning_stream.recipes.text import text_data

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]


def _fit(folder: Path, max_epochs: int, ckpt_path: str | None = None) -> dict[str, float]:
    data: Any = flower_data(
        drawn_count=40, image_size=32, remote=str(folder / "shards"), local=str(folder / "cache"), num_workers=0
    )
    run = ComposerRun(folder=str(folder), max_epochs=max_epochs, options={"device": "cpu", "progress_bar": False})
    return run.fit(ImageClassifier(learning_rate=0.002), data, ckpt_path)


def test_flowers_are_learnt_from_and_a_finished_run_goes_on(tmp_path: Path) -> None:
    assert set(_fit(tmp_path, 1)) == {"train/accuracy", "train/loss", "val/accuracy", "val/loss"}
    measured = _fit(tmp_path, 2, ckpt_path="last")
    assert all(0 <= measured[name] <= 1 for name in ("train/accuracy", "val/accuracy"))
    assert measured["val/loss"] > 0


def test_a_gpt_learns_from_text_for_a_number_of_steps(tmp_path: Path) -> None:
    data = text_data(
        generated_count=30, block=32, num_workers=0, remote=str(tmp_path / "shards"), local=str(tmp_path / "cache")
    )
    options = {"device": "cpu", "progress_bar": False}
    run = ComposerRun(folder=str(tmp_path), max_epochs=-1, max_steps=6, val_check_interval=3, options=options)
    model = LanguageModel(width=16, depth=1, heads=2, learning_rate=0.02)
    measured = run.fit(model, data)
    assert measured["val/loss"] < math.log(257)
    assert measured["val/perplexity"] == pytest.approx(math.exp(measured["val/loss"]))
