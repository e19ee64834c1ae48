"""Texts in proportions: each batch has each part's share, and what is held out is counted once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from lightning_stream import StreamingDataLoader
from lightning_stream.recipes import training
from lightning_stream.recipes.mixture import TextPart, mixed_text_data
from lightning_stream.recipes.text import TextData

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def mixed(folder: Path, **settings: object) -> TextData:
    parts = {
        "much": TextPart(proportion=3, generated_count=60),
        "little": TextPart(generated_count=60, generated_seed=2),
    }
    places = {"remote": str(folder / "shards"), "local": str(folder / "cache")}
    return mixed_text_data(**{"parts": parts, "block": 32, "size_limit": "8kb", "num_workers": 0, **places, **settings})


def test_each_batch_has_each_parts_share_and_each_held_out_block_comes_once(tmp_path: Path) -> None:
    data = mixed(tmp_path, global_batch_size=8)
    data.prepare_data()
    train, val = data.datasets["train"], data.datasets["val"]
    assert train is not None
    assert val is not None
    assert 2 * len(val.streams) < val.size < train.size
    loader = StreamingDataLoader(train, 8)
    counts = Counter[int]()
    for _ in loader:
        assert loader.last_batch is not None
        ids = loader.last_batch.delivered[~loader.last_batch.filler]
        of_much = int((train.snapshot.streams_of(ids) == 0).sum())
        assert abs(of_much - 6 * len(ids) / 8) <= 2
        counts.update({0: of_much, 1: len(ids) - of_much})
    assert counts[0] == pytest.approx(3 * counts[1], rel=0.02)
    evaluation = StreamingDataLoader(val, 8, evaluation=True)
    seen = np.concatenate([evaluation.last_batch.delivered for _ in evaluation if evaluation.last_batch is not None])
    assert sorted(seen.tolist()) == list(range(val.size))


def test_a_part_that_can_have_no_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="above 0"):
        TextPart(proportion=0)
    with pytest.raises(ValueError, match="at least one part"):
        mixed(tmp_path, parts={})


def test_a_gpt_learns_from_a_mixture_under_train_py(tmp_path: Path) -> None:
    chosen = [
        "data=mix",
        "model=gpt",
        "scale=cpu",
        "num_threads=1",
        "data.parts.stories.generated_count=40",
        "data.parts.more_stories.generated_count=40",
        "data.block=64",
        "data.num_workers=0",
        "model.width=32",
        "model.depth=1",
        "model.heads=2",
        "model.sample_tokens=20",
        "trainer.max_epochs=1",
        "~callbacks.progress",
        "trainer.enable_progress_bar=false",
        f"root={tmp_path}",
        "name=mix",
    ]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("train", overrides=chosen)
    summary = training.train(config)
    assert summary is not None
    assert "a mixture: stories" in summary.to_text()
