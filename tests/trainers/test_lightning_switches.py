"""A Lightning run switches versions at its step: the samples are those of the loader alone, and so they are resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

L = pytest.importorskip("lightning")
from support.lightning_runs import GLOBAL_BATCH, Run, checkpoints, expect_exact, write_shards  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset, versions  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")
DECLARED = [(0, 0), (17, 2)]  # in the second epoch, whose steps are 11 to 25


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset to which samples were appended, and from which others were deleted."""
    folder = write_shards(tmp_path_factory.mktemp("switch") / "set")
    columns, lengths = {"id": "int", "x": "ndarray:float32:4"}, {"tokens": lambda sample: 1}
    with MDSWriter(out=str(folder), columns=columns, lengths=lengths, append=True) as writer:
        writer.write_batch({"id": np.arange(167, 240), "x": np.ones((73, 4), np.float32)})
    versions.delete_rows(folder, range(20, 50))
    return folder


def resumed(shards: Path, folder: Path, path: Path) -> Run:
    return Run(shards, folder, path, every_n_train_steps=4, dataset={"version": DECLARED})


def test_a_run_and_its_resumes_see_each_sample_of_the_new_version_once(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path, every_n_train_steps=4, dataset={"version": DECLARED})
    loader = StreamingDataLoader(StreamingDataset(shards, shuffle=True, version=DECLARED), GLOBAL_BATCH)
    real = lambda batch: sorted(batch["id"][np.flatnonzero(~loader.last_batch.filler)].tolist())  # noqa: E731
    alone = [real(batch) for _ in range(3) for batch in loader]
    assert whole.steps == dict(enumerate(alone))
    second = [one for step, ids in whole.steps.items() if whole.module.epoch_of_step[step] == 1 for one in ids]
    assert len(second) == len({*second})
    assert {*second} >= {*range(240)} - {*range(20, 50)}
    for step, path in checkpoints(tmp_path):
        expect_exact(whole, resumed(shards, tmp_path / str(step), path), step)


def test_a_run_over_one_version_is_continued_with_a_switch(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path / "whole", dataset={"version": DECLARED})
    Run(shards, tmp_path, every_n_train_steps=4, dataset={"version": 0}, max_steps=16)
    for step, path in checkpoints(tmp_path):
        expect_exact(whole, resumed(shards, tmp_path / str(step), path), step)
