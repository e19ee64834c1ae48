"""Runs `train.py`'s recipes in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QUIET = ("hardware=cpu", "num_threads=1", "~callbacks.progress", "trainer.enable_progress_bar=false")


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    """Train with some overrides of the config, in a folder; gives the run's summary.json."""
    from hydra import compose, initialize_config_dir

    from recipes.train import main

    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        root = f"root={folder.parent}"
        config = compose("train", overrides=[*QUIET, root, f"folder={folder}", "data.conversion_workers=1", *overrides])
    main(config)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary
