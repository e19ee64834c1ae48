"""What ordinary users do around `Trainer.fit` of Composer changes nothing of what is trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from support.composer_chains import HOOKS, Link, made, run_link  # noqa: E402
from support.composer_runs import Run, Steps, checkpoints, expect_exact  # noqa: E402
from support.looks import Look  # noqa: E402

from lightning_stream.trainers.checkpoints import read_position  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning:composer"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]
SHARED: dict[str, Any] = {"dataset": {"shuffle": True, "shuffle_seed": 3}, "tail": "pad", "limit": -1}
QUIET = Link(
    "spec", 0, "end", "batch_start", 0, (), (), (), False, False, {"save_interval": "1ba", "max_duration": "2ep"}
)
SOURCES = pytest.mark.parametrize("source", ["spec", "bare"])


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_link(shards, tmp_path_factory.mktemp("whole"), QUIET, SHARED, None, 0, {})


def positions(folder: Path) -> dict[int, tuple[int, int]]:
    states = {step: read_position(path) for step, path in checkpoints(folder).items()}
    return {step: (state["epoch"], state["position"]) for step, state in states.items()}


def expected_steps(whole: Run, begun: int) -> Steps:
    return {step: ids for step, ids in whole.steps.items() if step >= begun}


@SOURCES
@pytest.mark.parametrize("kind", ["look", "three", "pass"])
def test_a_look_before_fit_loses_nothing(shards: Path, tmp_path: Path, whole: Run, source: str, kind: str) -> None:
    link = replace(QUIET, source=source, before=(kind,))
    assert run_link(shards, tmp_path, link, SHARED, None, 0, {}).steps == whole.steps
    again = run_link(shards, tmp_path / "again", link, SHARED, checkpoints(tmp_path)[4], 4, {})
    assert again.steps == expected_steps(whole, 4)


@SOURCES
@pytest.mark.parametrize("hook", HOOKS)
def test_a_look_in_any_hook_changes_no_batch_and_no_checkpoint(
    shards: Path, tmp_path: Path, whole: Run, source: str, hook: str
) -> None:
    looks = tuple(Look(hook, step, kind) for step, kind in ((1, "look"), (2, "kept"), (11, "three"), (11, "pass")))
    link = replace(QUIET, source=source, looks=looks, evaluates_on_train=hook.startswith("eval"))
    run = run_link(shards, tmp_path, link, SHARED, None, 0, {})
    assert (run.steps, run.losses) == (whole.steps, whole.losses)
    assert positions(tmp_path) == {
        step: ((step - 1) // 11, min(167, ((step - 1) % 11 + 1) * 16)) for step in range(1, 23)
    }


@SOURCES
def test_the_training_loader_may_be_the_evaluation_loader(
    shards: Path, tmp_path: Path, whole: Run, source: str
) -> None:
    link = replace(QUIET, source=source, evaluates_on_train=True)
    run = run_link(shards, tmp_path, link, SHARED, None, 0, {})
    assert run.steps == whole.steps
    assert [step for step, _ in run.noted.evaluations] == [4, 8, 12, 16, 20, 22]
    assert all(ids == tuple(range(167)) for _, ids in run.noted.evaluations)


@SOURCES
def test_one_loader_serves_two_trainers_from_the_start_and_from_a_checkpoint(
    shards: Path, tmp_path: Path, whole: Run, source: str
) -> None:
    loaders: dict[Any, Any] = {}
    link = replace(QUIET, source=source, keeps_loader=True)
    for number, stop in enumerate((0, 0, 5, 11)):
        path = checkpoints(tmp_path / "0")[stop] if stop else None
        run = run_link(shards, tmp_path / str(number), link, SHARED, path, stop, loaders)
        assert run.steps == expected_steps(whole, stop)


@SOURCES
def test_a_look_between_loading_a_checkpoint_and_the_fit_keeps_the_position(
    shards: Path, tmp_path: Path, whole: Run, source: str
) -> None:
    run_link(shards, tmp_path, QUIET, SHARED, None, 0, {})
    link = replace(QUIET, source=source, looks=(Look("fit_start", 0, "look"), Look("fit_start", 0, "pass")))
    for stop in (4, 11, 12):
        path = checkpoints(tmp_path)[stop]
        assert run_link(shards, tmp_path / str(stop), link, SHARED, path, stop, {}).steps == expected_steps(whole, stop)


@pytest.mark.parametrize("limit", [1, 3])
def test_a_run_of_limited_epochs_continues_exactly_from_any_of_its_checkpoints(
    shards: Path, tmp_path: Path, limit: int
) -> None:
    """Also from one of an epoch's last batch, which Composer saves before it ends the epoch."""
    options = {"train_subset_num_batches": limit, "save_interval": "1ba"}
    full = Run(shards, tmp_path / "full", **options)
    saved = checkpoints(tmp_path / "full")
    assert list(saved) == list(range(1, 3 * limit + 1))
    for stop, path in saved.items():
        if stop < 3 * limit:
            again = Run(shards, tmp_path / str(stop), path, **options)
            expect_exact(full, again, stop)
            assert positions(tmp_path / str(stop)) == {
                step: where for step, where in positions(tmp_path / "full").items() if step > stop
            }


def test_a_second_loader_over_the_dataset_begins_at_its_start(shards: Path, tmp_path: Path, whole: Run) -> None:
    """What a checkpoint gave to the loader before it does not concern it."""
    spec = made(shards, "bare", 0, SHARED)
    run_link(shards, tmp_path, QUIET, SHARED, None, 0, {})
    first = {("bare", 0): spec}
    link = replace(QUIET, source="bare", keeps_loader=True)
    run_link(shards, tmp_path / "1", link, SHARED, checkpoints(tmp_path)[5], 5, first)
    other = type(spec)(spec.dataset, global_batch_size=16)
    assert run_link(shards, tmp_path / "2", link, SHARED, None, 0, {("bare", 0): other}).steps == whole.steps
