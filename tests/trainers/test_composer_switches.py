"""A Composer run switches versions at its step, and so it does resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")
from support.composer_runs import Run, checkpoints, expect_exact, write_shards

from lightning_stream import MDSWriter, versions

DECLARED = [(0, 0), (17, 2)]  # in the second epoch, whose steps are 11 to 25


def test_a_run_and_its_resumes_see_each_sample_of_the_new_version_once(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "set")
    with MDSWriter(out=str(shards), columns={"id": "int", "x": "ndarray:float32:4"}, append=True) as writer:
        writer.write_batch({"id": np.arange(167, 240), "x": np.ones((73, 4), np.float32)})
    versions.delete_rows(shards, range(20, 50))
    whole = Run(shards, tmp_path / "whole", data={"version": DECLARED}, save_interval="4ba")
    plain = Run(shards, tmp_path / "plain", data={"version": 0}, save_interval="4ba", max_duration="16ba")
    assert {step: whole.steps[step] for step in range(16)} == plain.steps
    second = [one for step in range(11, 26) for one in whole.steps[step]]
    assert {*second} >= {*range(240)} - {*range(20, 50)}
    third = [one for step in range(26, max(whole.steps) + 1) for one in whole.steps[step]]
    assert {*third} == {*range(240)} - {*range(20, 50)}
    for folder in ("whole", "plain"):
        for step, path in checkpoints(tmp_path / folder).items():
            if step <= max(whole.steps):
                resumed = Run(shards, tmp_path / folder / str(step), path, data={"version": DECLARED})
                expect_exact(whole, resumed, step)
