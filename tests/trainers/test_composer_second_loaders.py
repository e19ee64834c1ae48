"""A checkpoint of Composer holds the position of the loader that trains, whatever else reads the dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from composer import Callback, DataSpec  # noqa: E402
from support.composer_runs import Run, checkpoints, expect_exact  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_stream import StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.trainers.composer.spec import data_spec  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning:composer"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*"),
]


def made(shards: Path, source: str) -> Any:
    """What the trainer trains on."""
    dataset = StreamingDataset(remote=str(shards), shuffle=True, batch_size=16 if source == "torch" else None)
    if source == "data_spec":
        return data_spec(dataset, global_batch_size=16)
    loader = DataLoader(dataset, 16) if source == "torch" else StreamingDataLoader(dataset, global_batch_size=16)
    return DataSpec(loader) if source == "DataSpec" else loader


class Habits(Callback):
    """Saves before the first batch, and makes a second loader over the training dataset."""

    def __init__(self, folder: Path, *, looks: bool) -> None:
        self.path, self.looks, self.save = folder / "ckpt" / "ba0.pt", looks, lambda path: None
        self.kept: list[Any] = []

    def epoch_start(self, state: Any, logger: Any) -> None:
        if self.looks and int(state.timestamp.batch) == 0:
            next(iter(state.train_dataloader))
        if int(state.timestamp.batch) == 0:
            self.save(str(self.path))

    def batch_start(self, state: Any, logger: Any) -> None:
        if self.looks and int(state.timestamp.batch) == 1:
            second = StreamingDataLoader(state.train_dataloader.dataset, batch_size=4)
            batches = iter(second)
            next(batches), next(batches)
            self.kept.append(batches)
            next(iter(StreamingDataLoader(state.train_dataloader.dataset, batch_size=3)))

    def init(self, state: Any, logger: Any) -> None:
        self.kept.clear()


class Saved(Run):
    """A run whose callback may save."""

    def __init__(self, *arguments: Any, habits: Habits, **options: Any) -> None:
        class Joins(Callback):
            def fit_start(joins, state: Any, logger: Any) -> None:  # noqa: N805
                habits.save = self.trainer.save_checkpoint

        super().__init__(*arguments, callbacks=[Joins(), habits], **options)


@pytest.mark.parametrize("source", ["bare", "DataSpec", "data_spec"])
def test_checkpoints_before_the_first_batch_and_beside_second_loaders_resume_exactly(
    shards: Path, tmp_path: Path, source: str
) -> None:
    whole = Run(shards, tmp_path / "whole", spec=made(shards, source), max_duration="6ba")
    habits = Habits(tmp_path, looks=True)
    run = Saved(shards, tmp_path, spec=made(shards, source), habits=habits, save_interval="1ba", max_duration="6ba")
    assert run.steps == whole.steps
    for stop in (0, 2, 4):
        path = checkpoints(tmp_path)[stop]
        again = Run(shards, tmp_path / str(stop), path, spec=made(shards, source), max_duration="6ba")
        expect_exact(run, again, stop)  # saving before the first batch has begun the optimizer's own count of steps


@pytest.mark.parametrize("source", ["bare", "data_spec"])
def test_the_dataset_may_be_evaluated_by_a_loader_of_its_own(shards: Path, tmp_path: Path, source: str) -> None:
    def evaluated() -> dict[str, Any]:
        spec = made(shards, source)
        loader = getattr(spec, "dataloader", spec)
        return {"spec": spec, "eval_dataloader": StreamingDataLoader(loader.dataset, 8), "eval_interval": "2ba"}

    options = {"max_duration": "5ba", "save_interval": "1ba"}
    whole = Run(shards, tmp_path, **evaluated(), **options)
    for stop in (2, 3):
        again = Run(shards, tmp_path / str(stop), checkpoints(tmp_path)[stop], **evaluated(), **options)
        expect_exact(whole, again, stop)


@pytest.mark.parametrize("limit", [1, 3])
def test_limited_epochs_of_torchs_loader_continue_exactly(shards: Path, tmp_path: Path, limit: int) -> None:
    options = {"train_subset_num_batches": limit, "save_interval": "1ba"}
    whole = Run(shards, tmp_path, spec=made(shards, "torch"), **options)
    for stop, path in checkpoints(tmp_path).items():
        if stop < 3 * limit:
            again = Run(shards, tmp_path / str(stop), path, spec=made(shards, "torch"), **options)
            assert again.steps == {step: ids for step, ids in whole.steps.items() if step >= stop}
