"""`ComposerMixtureFeedback`: weights follow a metric, and a stopped run sees what an uninterrupted one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from composer import Trainer  # noqa: E402
from support.composer_runs import Recorder, write_shards  # noqa: E402
from torchmetrics import MeanMetric  # noqa: E402

from lightning_stream import (  # noqa: E402
    ComposerMixtureFeedback,
    Schedule,
    Stream,
    StreamingDataset,
    data_spec,
)

SIZE, STEPS = 40, 15  # samples of each stream; an epoch has 10 steps of 8 samples
pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning:composer"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]


class Model(Recorder):
    """Its metric is the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.at = MeanMetric()

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {} if is_train else {"at": self.at}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(int(self.trainer.state.timestamp.batch))


def choose(metrics: dict[str, float]) -> dict[str, float] | None:
    return {4: {"web": 1.0, "code": 3.0}, 12: {"code": 1.0}}.get(
        int(metrics["eval/at"])
    )  # it also evaluates at the end


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mix")
    write_shards(root / "web", SIZE)
    write_shards(root / "code", SIZE, SIZE)
    return root


def spec_of(mix: Path, schedule: Any = ((0, {"web": 1, "code": 1}),), **options: Any) -> Any:
    streams = [Stream(remote=mix / name) for name in ("web", "code")]
    dataset = StreamingDataset(streams=streams, shuffle=True, schedule=schedule)
    return data_spec(dataset, global_batch_size=8, **options)


def fit(mix: Path, out: Path, steps: int, *, feedback: bool = True, **options: Any) -> tuple[dict[int, list[int]], Any]:
    """What each step of a run up to this one trained on, and its data state; resumes from `out` if that has one."""
    torch.manual_seed(0)
    model, last = Model(), out / "last.pt"
    model.trainer = Trainer(
        model=model, train_dataloader=spec_of(mix, **options), max_duration=f"{steps}ba", device="cpu", seed=1,
        optimizers=torch.optim.SGD(model.parameters(), 1e-6), progress_bar=False, eval_interval="4ba",
        eval_dataloader=spec_of(mix, evaluation=True), eval_subset_num_batches=1,
        callbacks=[ComposerMixtureFeedback(choose)] if feedback else [], load_path=str(last) if last.exists() else None,
    )  # fmt: skip
    model.trainer.fit()
    model.trainer.save_checkpoint(str(last))
    state = model.trainer.state.train_dataloader.state_dict()
    model.trainer.close()
    return {step: sorted(ids) for step, ids in model.steps.items()}, state


@pytest.mark.parametrize("stop", [4, 7, *(pytest.param(k, marks=pytest.mark.nightly) for k in (3, 10, 13))])
def test_weights_follow_a_metric_and_a_stopped_run_repeats_them(mix: Path, tmp_path: Path, stop: int) -> None:
    wanted, state = fit(mix, tmp_path / "whole", STEPS)
    assert [sum(one >= SIZE for one in wanted[step]) for step in range(STEPS)] == [4] * 4 + [6] * 8 + [8] * 3
    assert [one[0] for one in state["order"]["schedule"]["changes"]] == [32, 96]
    first, _ = fit(mix, tmp_path / "parts", stop)
    rest, _ = fit(mix, tmp_path / "parts", STEPS)
    assert {**first, **rest} == wanted
    again = Schedule.from_state(state["order"]["schedule"])
    assert fit(mix, tmp_path / "again", STEPS, feedback=False, schedule=again)[0] == wanted


def test_a_dataset_without_a_schedule_is_refused_before_training(mix: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Only a mixture with a schedule can change"):
        fit(mix, tmp_path, 4, schedule=None)
