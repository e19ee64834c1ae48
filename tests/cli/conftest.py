"""Datasets for the tests of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import MDSWriter
from lightning_stream.cli import main


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A train and a val dataset of small shards, compressed and hashed."""
    root = tmp_path_factory.mktemp("cli") / "shards"
    for split, count in (("train", 64), ("val", 16)):
        with MDSWriter(
            out=str(root / split),
            columns={"x": "ndarray:int32:8", "label": "int", "name": "str"},
            compression="zstd",
            hashes=["sha1", "xxh3_64"],
            size_limit=1 << 10,
        ) as writer:
            for number in range(count):
                writer.write({"x": np.arange(8, dtype=np.int32) + number, "label": number % 4, "name": f"n{number}"})
    return root


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Run a command with ``--json``: its exit code, and the one JSON object on stdout."""

    def run(*arguments: str) -> tuple[int, Any]:
        code = main([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run
