"""Runs `train.py`: in this process on a composed config, or as a user starts it."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.warm import python

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")
hydra = pytest.importorskip("hydra", reason="the configs are composed by Hydra: uv sync")

ROOT = Path(__file__).resolve().parents[2]


def composed(*overrides: str) -> Any:
    import train  # noqa: F401 - its types are a part of the config

    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return hydra.compose("train", overrides=list(overrides))


@pytest.fixture
def compose() -> Callable[..., Any]:
    """Composes a config from overrides."""
    return composed


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    """`train.py` sets what its process logs, and later tests are in this process, too."""
    ours = ("lightning_stream", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    before = {name: logging.getLogger(name).level for name in ours}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def run(tmp_path: Path, _logging_as_before: None) -> Callable[..., Any]:
    """Trains in this process, by overrides, in the folder of a name; gives what `train.py` gives a sweep."""
    import train

    def start(name: str, *overrides: str) -> Any:
        paths = (f"paths.root={tmp_path}", f"paths.output={tmp_path / name}")
        config = composed(*overrides, *paths)
        with train.environment(config):
            return train.run(config)

    return start


@pytest.fixture
def train_py(tmp_path: Path) -> Callable[..., Any]:
    """Starts `train.py` with arguments in an empty folder, as a user does."""

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [python(), str(ROOT / "train.py"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)

    return start
