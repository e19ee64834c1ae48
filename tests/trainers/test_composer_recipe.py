"""The recipes' classifier and photos train under Composer too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")
pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync --extra lightning")

from recipes.data.images import ImageData
from recipes.data.text import TextData
from recipes.models.gpt import LanguageModel
from recipes.models.image_classifier import ImageClassifier
from recipes.trainers.composer import ComposerTrainer

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]


def _fit(folder: Path, max_epochs: int, ckpt_path: str | None = None) -> dict[str, float]:
    data: Any = ImageData(
        source="synthetic", synthetic_count=40, image_size=32, size_limit="64kb", num_workers=0, global_batch_size=16,
        remote=str(folder / "shards"), local=str(folder / "cache"), downloads=str(folder / "downloads"),
    )  # fmt: skip
    run = ComposerTrainer(folder=str(folder), max_epochs=max_epochs, options={"device": "cpu", "progress_bar": False})
    model = ImageClassifier(learning_rate=0.002)
    figures = run.fit(model, data, ckpt_path)
    assert figures.num_samples > 0
    return model.history[max_epochs - 1]


def test_flowers_are_learnt_and_a_finished_run_resumes(tmp_path: Path) -> None:
    assert set(_fit(tmp_path, 1)) == {"train/accuracy", "train/loss", "val/accuracy", "val/loss"}
    measured = _fit(tmp_path, 2, ckpt_path=str(tmp_path / "composer" / "latest-rank0.pt"))
    assert all(0 <= measured[name] <= 1 for name in ("train/accuracy", "val/accuracy"))
    assert measured["val/loss"] > 0


def test_a_gpt_learns_from_text_for_a_number_of_steps(tmp_path: Path) -> None:
    data = TextData(
        source="synthetic", synthetic_count=30, seq_len=32, num_workers=0, global_batch_size=16,
        remote=str(tmp_path / "shards"), local=str(tmp_path / "cache"),
    )  # fmt: skip
    options = {"device": "cpu", "progress_bar": False}
    run = ComposerTrainer(folder=str(tmp_path), max_epochs=-1, max_steps=6, val_check_interval=3, options=options)
    model = LanguageModel(d_model=16, n_layers=1, n_heads=2, learning_rate=0.02)
    run.fit(model, data)
    measured = model.history[max(model.history)]
    assert measured["val/loss"] < math.log(257)
    assert measured["val/perplexity"] == pytest.approx(math.exp(measured["val/loss"]))
