"""Feedback to a mixture, of both trainers: weights follow a metric, and a stopped run repeats them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.launches import launch, under
from support.resume_contract import WARNINGS, merged, write_shards
from support.warm import python

from lightning_stream import Schedule, Stream, StreamingDataset, read_position, verify_delivery

pytestmark = WARNINGS
SIZE, STEPS = 40, 15  # samples of each stream; an epoch has 10 steps of 8 samples
EACH = pytest.mark.parametrize("name", ["Lightning", "Composer"])
# Samples of "code" in each step, and where the mixture changed: under Lightning two steps after the metric.
WANTED = {
    "Lightning": ([4] * 6 + [6] * 8 + [8], [48, 112]),
    "Composer": ([4] * 4 + [6] * 8 + [8] * 3, [32, 96]),
}


def choose(metrics: Mapping[str, float]) -> dict[str, float] | None:
    at = metrics["at"] if "at" in metrics else metrics["eval/at"]
    return {4: {"web": 1.0, "code": 3.0}, 12: {"code": 1.0}}.get(int(at))


def data_of(mix: Path, schedule: Any, **given: Any) -> dict[str, Any]:
    streams = [Stream(remote=mix / name, name=name) for name in ("web", "code")]
    return {"remote": None, "streams": streams, "schedule": schedule, **given}


def lightning(
    mix: Path,
    out: Path,
    path: Path | None,
    feedback: bool,
    schedule: Any,
    steps: int,
    devices: int = 1,
    **data: Any,
) -> Any:
    from support.lightning_runs import Recorder, Run

    from lightning_stream import MixtureFeedback

    class Model(Recorder):
        """Its metric is the number of the step."""

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("at", float(self.trainer.global_step))

    return Run(
        mix / "web", out, path, dataset=data_of(mix, schedule), recorder=Model, max_steps=steps, max_epochs=-1,
        devices=devices, save_at=(steps,), val_check_interval=4,
        callbacks=[MixtureFeedback(choose)] if feedback else [],
        check_val_every_n_epoch=None, limit_val_batches=1, num_sanity_val_steps=1,
        data={"global_batch_size": 8, "record_delivery": out / "record", **data},
    )  # fmt: skip


def composer(mix: Path, out: Path, path: Path | None, feedback: bool, schedule: Any, steps: int, **data: Any) -> Any:
    from support.composer_runs import Recorder, Run
    from torchmetrics import MeanMetric

    from lightning_stream import ComposerMixtureFeedback, data_spec

    class Model(Recorder):
        """Its metric is the number of the step."""

        def __init__(self, dropout: float) -> None:
            super().__init__(dropout)
            self.at = MeanMetric()

        def get_metrics(self, is_train: bool) -> dict[str, Any]:
            return {} if is_train else {"at": self.at}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(int(self.trainer.state.timestamp.batch))

    return Run(
        None, out, path, dataset=data_of(mix, schedule), data={"global_batch_size": 8, **data}, recorder=Model,
        max_duration=f"{steps}ba", save_at=(steps,), callbacks=[ComposerMixtureFeedback(choose)] if feedback else [],
        eval_interval="4ba", eval_subset_num_batches=1,
        eval_dataloader=data_spec(remote=mix / "web", batch_size=8, evaluation=True),
    )  # fmt: skip


def fit(name: str, mix: Path, out: Path, path: Path | None = None, **given: Any) -> tuple[Any, Path, Any]:
    """What the steps of a run trained on, its last checkpoint, and the state in it."""
    run = {"Lightning": lightning, "Composer": composer}[name]
    settings = {"feedback": True, "schedule": ((0, {"web": 1, "code": 1}),), "steps": STEPS, **given}
    steps = run(mix, out, path, **settings).steps
    (saved,) = [file for file in (out / "ckpt").iterdir() if str(settings["steps"]) in file.name]
    return steps, saved, read_position(saved)


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mix")
    write_shards(root / "web", SIZE)
    write_shards(root / "code", SIZE, SIZE)
    return root


@pytest.fixture(scope="module")
def whole(mix: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path, Any]]:
    """An uninterrupted run of a trainer."""
    return cache(lambda name: fit(name, mix, tmp_path_factory.mktemp("whole")))


def expect_delivered(mix: Path, record: Path) -> None:
    found = verify_delivery(record, StreamingDataset(**data_of(mix, [(0, {"web": 1, "code": 1})], shuffle=True)))
    assert (found.num_steps, found.first_difference) == (STEPS, None), found.sentence


@EACH
@pytest.mark.parametrize("workers", [0, 2])
def test_weights_chosen_from_a_metric_hold_from_the_same_step_on(
    mix: Path, tmp_path: Path, whole: Any, name: str, workers: int
) -> None:
    steps, _, state = fit(name, mix, tmp_path, num_workers=workers) if workers else whole(name)
    counts = [sum(number >= SIZE for number in steps[step]) for step in range(STEPS)]
    assert (counts, [one[0] for one in state["order"]["schedule"]["changes"]]) == WANTED[name]
    if name == "Lightning" and workers:
        expect_delivered(mix, tmp_path / "record")


@EACH
@pytest.mark.parametrize("stop", [4, 7, 10, *(pytest.param(k, marks=pytest.mark.nightly) for k in (3, 5, 12, 13))])
def test_a_stopped_run_sees_what_an_uninterrupted_one_does(
    mix: Path, tmp_path: Path, whole: Any, name: str, stop: int
) -> None:
    first, path, _ = fit(name, mix, tmp_path, steps=stop)
    rest, _, state = fit(name, mix, tmp_path, path)
    assert (first | rest, state) == whole(name)[::2]
    if name == "Lightning":
        expect_delivered(mix, tmp_path / "record")


@EACH
def test_a_run_repeats_without_the_callback_from_its_last_state(
    mix: Path, tmp_path: Path, whole: Any, name: str
) -> None:
    steps, _, state = whole(name)
    again = Schedule.from_state(state["order"]["schedule"])
    assert fit(name, mix, tmp_path, feedback=False, schedule=again)[::2] == (steps, state)


@EACH
def test_a_dataset_without_a_schedule_is_refused_before_training(mix: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="Only a mixture with a schedule can change"):
        fit(name, mix, tmp_path, schedule=None)


def test_a_record_of_a_mixture_that_ends_says_that_all_steps_were_delivered(mix: Path, tmp_path: Path) -> None:
    from support.lightning_runs import Run

    dataset = data_of(mix, Schedule([(0, {"web": 1, "code": 1})], exhausted="stop"), epoch_size=48)
    data = {"record_delivery": tmp_path / "record", "global_batch_size": 8}
    steps = Run(mix / "web", tmp_path, dataset=dataset, data=data, max_epochs=2, val=False).steps
    assert sorted(number for ids in steps.values() for number in ids) == list(range(2 * SIZE))
    assert verify_delivery(tmp_path / "record", StreamingDataset(**dataset, shuffle=True)).first_difference is None


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_change_at_the_same_batch(mix: Path, tmp_path: Path, whole: Any) -> None:
    done = launch(tmp_path, under("torchrun", 2, [python(), __file__, str(mix), str(tmp_path / "two")]))
    assert done.code == 0, done.stderr[-5000:]
    ranks = [json.loads(path.read_text()) for path in (tmp_path / "two").glob("rank*.json")]
    assert merged(rank["steps"] for rank in ranks) == whole("Lightning")[0]
    expect_delivered(mix, tmp_path / "two" / "record")


if __name__ == "__main__":
    data, results = map(Path, sys.argv[1:])
    own = lightning(data, results, None, True, ((0, {"web": 1, "code": 1}),), STEPS, devices=2).steps
    (results / f"rank{os.environ['RANK']}.json").write_text(json.dumps({"steps": own}))
