"""Runs that move: from mosaicml-streaming to this package under Composer, and between the trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from support.composer_runs import GLOBAL_BATCH, STEPS_PER_EPOCH, Run, checkpoints  # noqa: E402
from support.launches import launch, under, worker  # noqa: E402
from support.resume_contract import WARNINGS, from_step, merged  # noqa: E402

from lightning_stream import StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.errors import StateError  # noqa: E402
from lightning_stream.trainers.checkpoints import read_position, start_at  # noqa: E402
from lightning_stream.trainers.composer.spec import data_spec  # noqa: E402

pytestmark = WARNINGS
MOSAIC = json.loads((Path(__file__).parent / "golden" / "mosaic_composer.json").read_text())


def _steps_from(first: int) -> dict[int, list[int]]:
    """What that library trained on from a step on, without its repeats at an epoch's end, which are filler here."""
    steps, seen = {}, set[int]()
    for step, ids in enumerate(MOSAIC["steps"]):
        seen = set() if step % STEPS_PER_EPOCH == 0 else seen
        steps[step] = sorted(set(ids) - seen)
        seen |= set(ids)
    return from_step(steps, first)


def _checkpoint_of_mosaic(shards: Path, folder: Path, step: int, state: dict[str, int], interval: str = "1ba") -> Path:
    """A checkpoint at this step as that library leaves it: with its state of the data in the place of ours."""
    Run(shards, folder, save_interval=interval, max_duration=f"{step + 1}ba")
    path = checkpoints(folder)[step]
    content = torch.load(path, weights_only=False)
    content["state"]["dataset_state"]["train"] = state
    torch.save(content, path)
    return path


@pytest.mark.parametrize("step", [4, 11, 14])
def test_a_run_of_mosaicml_streaming_continues_in_its_order(shards: Path, tmp_path: Path, step: int) -> None:
    path = _checkpoint_of_mosaic(shards, tmp_path, step, MOSAIC["states"][str(step)])
    resumed = Run(shards, tmp_path / "again", path, data=MOSAIC["arguments"])
    assert resumed.steps == _steps_from(step)


def test_mosaicml_streamings_checkpoint_at_an_epochs_end_continues_with_the_next(shards: Path, tmp_path: Path) -> None:
    """That library itself replays the epoch that is over: its state names it, at sample 0."""
    path = _checkpoint_of_mosaic(shards, tmp_path, STEPS_PER_EPOCH, MOSAIC["state_after_first_epoch"], "1ep")
    resumed = Run(shards, tmp_path / "again", path, data=MOSAIC["arguments"])
    assert resumed.steps == _steps_from(STEPS_PER_EPOCH)


@pytest.mark.parametrize(("file", "step"), [("mosaic_14ba.pt", 14), ("mosaic_1ep.pt", STEPS_PER_EPOCH)])
def test_a_file_that_mosaicml_streaming_left_continues_as_it_is(
    shards: Path, tmp_path: Path, file: str, step: int
) -> None:
    """Written in an environment of its own, by golden/make_mosaic_checkpoints.py."""
    resumed = Run(shards, tmp_path, Path(__file__).parent / "golden" / file, data=MOSAIC["arguments"])
    assert resumed.steps == _steps_from(step)


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_a_run_of_mosaicml_streaming_continues_on_two_devices(shards: Path, tmp_path: Path) -> None:
    path = _checkpoint_of_mosaic(shards, tmp_path, 4, MOSAIC["states"]["4"])
    command = worker("Composer", shards, tmp_path / "again", checkpoint=path, data=MOSAIC["arguments"])
    assert launch(tmp_path, under("composer", 2, command)).code == 0
    files = (tmp_path / "again").glob("rank*.json")
    assert merged(json.loads(file.read_text())["steps"] for file in files) == _steps_from(4)


def test_a_state_of_mosaicml_streaming_needs_the_algorithm_it_does_not_record(shards: Path) -> None:
    with pytest.raises(StateError, match="does not record its algorithm"):
        data_spec(remote=shards, shuffle=True, batch_size=16).dataloader.dataset.load_state_dict(MOSAIC["states"]["4"])


# Between the trainers


@pytest.mark.parametrize("step", [4, STEPS_PER_EPOCH, 14])
def test_a_run_stopped_under_lightning_resumes_under_composer(shards: Path, tmp_path: Path, step: int) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed: uv sync")
    from support import lightning_runs

    whole = Run(shards, tmp_path)
    first = lightning_runs.Run(shards, tmp_path, every_n_train_steps=1, max_steps=step, max_epochs=-1)
    state = read_position(dict(lightning_runs.checkpoints(tmp_path))[step])
    spec = data_spec(remote=shards, shuffle=True, global_batch_size=GLOBAL_BATCH)
    start_at(state, spec)
    second = Run(shards, tmp_path / "second", spec=spec, max_duration=f"{33 - step}ba")
    assert {k: first.steps[k] for k in range(step)} == {k: whole.steps[k] for k in range(step)}
    assert second.steps == {k - step: ids for k, ids in whole.steps.items() if k >= step}


@pytest.mark.parametrize("step", [4, STEPS_PER_EPOCH, 14])
def test_a_run_stopped_under_composer_resumes_under_lightning(shards: Path, tmp_path: Path, step: int) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed: uv sync")
    from support import lightning_runs

    whole = Run(shards, tmp_path, save_interval="1ba")
    state = read_position(checkpoints(tmp_path)[step])

    class Moved(lightning_runs.Recorder):
        def setup(self, stage: str) -> None:
            start_at(state, self.trainer.datamodule)

    second = lightning_runs.Run(shards, tmp_path / "second", recorder=Moved, max_steps=33 - step, max_epochs=-1)
    assert second.steps == {k - step: ids for k, ids in whole.steps.items() if k >= step}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_position_is_read_from_files_and_from_sharded_checkpoints(shards: Path, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    Run(shards, tmp_path, save_interval="4ba", max_duration="4ba")
    path = checkpoints(tmp_path)[4]
    state = read_position(path)
    assert (state["epoch"], state["position"]) == (0, 64)
    assert read_position(path, trusted=True) == state
    content = torch.load(path, weights_only=False)["state"]
    dcp.save({"state": {"dataset_state": content["dataset_state"]}}, checkpoint_id=tmp_path / "sharded", no_dist=True)
    assert read_position(tmp_path / "sharded") == state
    dcp.save({"state": {"x": 1}}, checkpoint_id=tmp_path / "empty", no_dist=True)
    torch.save({"state": {"dataset_state": {"train": None}}}, tmp_path / "none.pt")
    for other in (tmp_path / "empty", tmp_path / "none.pt"):
        with pytest.raises(StateError, match="holds none"):
            read_position(other)


def test_a_position_is_handed_to_a_bare_loader_and_to_nothing_else(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, save_interval="4ba", max_duration="4ba")
    state: Any = read_position(checkpoints(tmp_path)[4])
    loader = StreamingDataLoader(StreamingDataset(remote=shards, shuffle=True), global_batch_size=GLOBAL_BATCH)
    start_at(state, loader)
    assert loader.position.position == 64
    with pytest.raises(TypeError, match="found dict"):
        start_at(state, {})
