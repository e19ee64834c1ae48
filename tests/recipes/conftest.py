"""Runs recipes in this process, on tiny data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")
hydra = pytest.importorskip("hydra", reason="the configs are composed by Hydra: uv sync")

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = (
    "data=flowers", "data.synthetic_count=64", "data.val_fraction=0.2", "data.size_limit=16kb", "data.image_size=32",
    "data.global_batch_size=8", "data.num_workers=0", "data.conversion_workers=1", "hardware=cpu", "num_threads=1",
    "+model.model_kwargs.width_mult=0.25", "trainer.max_epochs=2", "trainer.enable_progress_bar=false",
)  # fmt: skip


def compose(*overrides: str) -> Any:
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return hydra.compose("train", overrides=list(overrides))


@pytest.fixture
def composed() -> Callable[..., Any]:
    """Composes a config from overrides."""
    return compose


@pytest.fixture(scope="module")
def flowers_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the runs of a module, and the one converted dataset that they share."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def flowers(flowers_root: Path) -> Callable[..., Path]:
    """Trains on tiny flowers under a name; gives the run's folder."""
    from recipes.train import main

    def run(name: str, *more: str) -> Path:
        folder = flowers_root / name
        main(compose(*TINY, f"root={flowers_root}", f"name={name}", f"folder={folder}", *more))
        return folder

    return run
