"""A schedule, a filter, packing and a balance together under Composer: exact on another number of devices."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from support.composer_chains import run_module
from support.documents import write

STEPS, STOP = 40, 17  # an epoch has about 25

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def train(folder: Path, out: Path, world: int, stop: int, load_path: Path | None = None) -> dict[int, list[Any]]:
    """Optimizer step -> the sorted rows of all ranks."""
    arguments = [str(folder), str(out), str(stop), *([] if load_path is None else [str(load_path)])]
    done = run_module("support.composed_worker", arguments, world, "torchrun")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found: dict[int, list[Any]] = defaultdict(list)
    for path in out.glob("rank*.json"):
        for step, rows in json.loads(path.read_text()).items():
            found[int(step)] += rows
    return {step: sorted(rows) for step, rows in found.items()}


def test_a_composed_dataset_resumes_on_another_number_of_devices(tmp_path: Path) -> None:
    folder = write(tmp_path / "documents")
    whole = train(folder, tmp_path / "whole", 1, STEPS)
    first = train(folder, tmp_path / "first", 2, STOP)
    rest = train(folder, tmp_path / "rest", 3, STEPS, tmp_path / "first" / "last.pt")
    assert sorted(rest) == list(range(STOP, STEPS))
    assert first | rest == whole
