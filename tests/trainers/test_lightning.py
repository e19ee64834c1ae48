"""A run stopped under Lightning, by whatever, continues exactly; one process, so that many ways fit into CI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.filter_runs import NotDivisible
from support.lightning_runs import EPOCHS, NUM_SAMPLES, Run, checkpoints, expect_exact, keep_all

STEPS_PER_EPOCH = 11

# The resumed runs write no checkpoints of their own; Lightning advises on manual optimization.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*"),
    pytest.mark.filterwarnings("ignore:.*Using ModelCheckpoint with manual optimization.*"),
]


def test_every_epoch_trains_on_every_sample_once(shards: Path, tmp_path: Path) -> None:
    run = Run(shards, tmp_path)
    assert len(run.steps) == EPOCHS * STEPS_PER_EPOCH
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        assert sorted(number for step in steps for number in run.steps[step]) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    "stops", [(4, 11, 14), pytest.param(range(1, 24), marks=pytest.mark.nightly)], ids=["few", "many"]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data": {"num_workers": 2}},
        {"data": {"num_workers": 2, "workers": "threads"}},
        {"data": {"num_workers": 2, "persistent_workers": True}},
        {"accumulate_grad_batches": 4},
        {"module": {"manual": True}},
        {"module": {"reads_stepping_batches": True}},
        {"max_steps": 2 * STEPS_PER_EPOCH + 5, "max_epochs": -1},
        {"limit_train_batches": 7},
        {"limit_train_batches": 0.5},
        {"val_check_interval": 3},
        {"val_check_interval": 0.5, "accumulate_grad_batches": 2},
        {"check_val_every_n_epoch": None, "val_check_interval": 5},
        {"reload_dataloaders_every_n_epochs": 1},
        {"module": {"dropout": 0.5}, "data": {"seed_steps": 1}},
        {"data": {"tail": "drop"}},
        {"dataset": {"filter": NotDivisible(5), "exclude_ids": range(7)}},
        {"val": False},
        {"val": False, "accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_a_run_resumed_from_any_of_its_checkpoints_continues_exactly(
    shards: Path, tmp_path: Path, options: dict[str, Any], stops: tuple[int, ...]
) -> None:
    whole = Run(shards, tmp_path, every_n_train_steps=1, **options)
    saved = checkpoints(tmp_path)
    assert len(saved) >= max(whole.steps)
    for step, path in [pair for pair in saved if pair[0] in stops]:
        resumed = Run(shards, tmp_path / "again", path, **options)
        expect_exact(whole, resumed, step)
        assert resumed.weights == whole.weights
        later = [v for v in whole.module.validations if v[0] >= step]
        assert resumed.module.validations == later, f"validations after step {step}"
        assert resumed.trainer.fit_loop.epoch_loop._batches_that_stepped == (
            whole.trainer.fit_loop.epoch_loop._batches_that_stepped
        )


def test_a_checkpoint_at_the_end_of_an_epoch_starts_the_next(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path, callbacks=[keep_all(tmp_path, every_n_epochs=1, save_on_train_epoch_end=True)])
    for step, path in checkpoints(tmp_path)[:-1]:
        resumed = Run(shards, tmp_path / "again", path)
        expect_exact(whole, resumed, step)
        assert resumed.module.validations == [v for v in whole.module.validations if v[0] > step]


@pytest.mark.skipif(pl.__version__ < "2.5", reason="Lightning 2.4 cannot tell that it has validated at this step")
def test_a_checkpoint_after_a_validation_does_not_validate_again(shards: Path, tmp_path: Path) -> None:
    options = {"val_check_interval": 4}
    whole = Run(shards, tmp_path, callbacks=[keep_all(tmp_path, save_on_train_epoch_end=False)], **options)
    for step, path in checkpoints(tmp_path):
        resumed = Run(shards, tmp_path / "again", path, **options)
        expect_exact(whole, resumed, step)
        assert resumed.module.validations == [v for v in whole.module.validations if v[0] > step]
