"""Packed rows and budgets of tokens under Composer: all of them once, although the epochs differ in length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from composer import Callback, Trainer
from composer.models import ComposerModel
from support.uneven_documents import BUDGET, PACK, padded, write_documents

from lightning_stream import (
    MDSWriter,
    Schedule,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    World,
    data_spec,
)

pytestmark = pytest.mark.filterwarnings("ignore:Cannot split tensor")


class Model(ComposerModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(100, 4), torch.nn.Linear(4, 100)
        self.seen: list[Any] = []

    def forward(self, batch: Any) -> Any:
        self.seen += [tuple(row.tolist()) for row in batch["input_ids"]]
        return self.head(self.embedding(batch["input_ids"]))

    def loss(self, scores: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("documents"))


def dataset_of(folder: str, kind: Any) -> StreamingDataset:
    return StreamingDataset(local=folder, shuffle=True, shuffle_seed=1, **kind)


def loading(kind: Any) -> dict[str, Any]:
    return {"global_batch_size": 12 if kind is PACK else None, "collate_fn": padded}


def fit(
    folder: str, checkpoints: Path, kind: Any, load_path: str | None = None, bare: bool = False, **given: Any
) -> tuple[Any, int]:
    loader: Any = (StreamingDataLoader if bare else data_spec)(dataset_of(folder, kind), **loading(kind))
    model = Model()
    trainer = Trainer(
        model=model, train_dataloader=loader, optimizers=torch.optim.SGD(model.parameters(), lr=1e-3), device="cpu",
        save_folder=str(checkpoints), save_filename="step-{batch}.pt", save_interval="4ba", save_overwrite=True,
        save_num_checkpoints_to_keep=-1, load_path=load_path, progress_bar=False,
        **{"max_duration": "3ep", **given},
    )  # fmt: skip
    trainer.fit()
    steps = int(trainer.state.timestamp.batch)
    trainer.close()
    return model.seen, steps


@pytest.fixture(scope="module", params=[PACK, BUDGET], ids=["packed", "budget"])
def whole(folder: str, tmp_path_factory: pytest.TempPathFactory, request: Any) -> tuple[Any, int, Path, Any]:
    checkpoints = tmp_path_factory.mktemp("whole")
    return (*fit(folder, checkpoints, request.param), checkpoints, request.param)


def test_epochs_of_different_lengths_are_trained_to_their_ends(folder: str, whole: tuple[Any, int, Path, Any]) -> None:
    loader = StreamingDataLoader(dataset_of(folder, whole[3]), **loading(whole[3]))
    lengths = [loader.num_batches(epoch) for epoch in range(3)]
    assert len(set(lengths)) > 1, "the test needs epochs of different lengths"
    assert whole[1] == sum(lengths)


@pytest.mark.parametrize("step", [8, 40, 44, 84, 88, 124])
def test_a_resume_continues_at_the_next_row(
    folder: str, whole: tuple[Any, int, Path, Any], tmp_path: Path, step: int
) -> None:
    seen, steps, checkpoints, kind = whole
    resumed, again = fit(folder, tmp_path, kind, str(checkpoints / f"step-{step}.pt"))
    assert again == steps
    assert resumed == seen[len(seen) - len(resumed) :]
    assert len(seen) - len(resumed) <= step * (12 if kind is PACK else 1200)
    assert resumed


def test_a_bare_loader_is_trained_to_the_ends_too(
    folder: str, whole: tuple[Any, int, Path, Any], tmp_path: Path
) -> None:
    assert fit(folder, tmp_path, whole[3], bare=True) == whole[:2]


def test_a_subset_of_each_epoch_is_kept(folder: str, tmp_path: Path) -> None:
    assert fit(folder, tmp_path, PACK, train_subset_num_batches=5)[1] == 15


class Clock(Callback):  # type: ignore[misc]
    """The trainer's count of tokens after each step."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.tokens.append(int(state.timestamp.token))


def test_the_clock_counts_tokens_without_padding_also_after_a_resume_and_in_micro_batches(
    folder: str, tmp_path: Path
) -> None:
    rows, _ = fit(folder, tmp_path / "whole", PACK, max_duration="21ba")
    wanted = np.cumsum([np.count_nonzero(rows[k : k + 12]) for k in range(0, 20 * 12, 12)])
    clocks = [Clock(), Clock()]
    fit(folder, tmp_path / "a", PACK, max_duration="12ba", callbacks=clocks[:1], device_train_microbatch_size=5)
    last = f"{wanted[19]}tok"
    resumed = str(tmp_path / "a" / "step-12.pt")
    _, steps = fit(folder, tmp_path / "b", PACK, resumed, max_duration=last, callbacks=clocks[1:])
    assert steps == 20
    assert clocks[0].tokens + clocks[1].tokens == wanted[:20].tolist()


class Change(Callback):  # type: ignore[misc]
    """Changes the mixture, so that the epoch has more rows."""

    def batch_end(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) == 5:
            state.train_dataloader.change_mixture({"long": 1})


def fit_mix(mix: Path, out: Path, steps: int, *callbacks: Any, schedule: Any = None) -> tuple[list[Any], Any]:
    """The rows of a run up to this step, and its data state; resumes from `out` if that has a checkpoint."""
    model, last = Model(), out / "last.pt"
    trainer = Trainer(
        model=model, train_dataloader=data_spec(mix_of(mix, schedule), global_batch_size=8), device="cpu",
        optimizers=torch.optim.SGD(model.parameters(), lr=1e-3), max_duration=f"{steps}ba", progress_bar=False,
        load_path=str(last) if last.exists() else None, callbacks=[*callbacks],
    )  # fmt: skip
    trainer.fit()
    trainer.save_checkpoint(str(last))
    state = trainer.state.train_dataloader.state_dict()
    trainer.close()
    return model.seen, state


def mix_of(mix: Path, schedule: Any = None) -> StreamingDataset:
    streams = [Stream(local=mix / name) for name in ("short", "long")]
    schedule = schedule or Schedule([(0, {"short": 1})])
    return StreamingDataset(streams=streams, shuffle=True, schedule=schedule, **PACK, epoch_size=400)


def test_no_row_of_an_epoch_that_a_change_makes_longer_is_lost_also_after_a_resume(tmp_path: Path) -> None:
    rng, mix = np.random.default_rng(0), tmp_path / "mix"
    written: Any = {"columns": {"tokens": "ndarray:int32"}, "lengths": {"tokens": len}, "size_limit": 1 << 13}
    for name, most in (("short", 30), ("long", 120)):
        with MDSWriter(out=str(mix / name), **written) as writer:
            for size in rng.integers(1, most, 200):
                writer.write({"tokens": rng.integers(1, 100, size).astype(np.int32)})
    rows, state = fit_mix(mix, tmp_path / "whole", 60, Change())
    again = Schedule.from_state(state["order"]["schedule"])
    before, end = (StreamingDataLoader(mix_of(mix, one), 8, world=World()).num_batches(0) for one in (None, again))
    assert 10 < before < end < 60, "the test needs an epoch that becomes longer"
    assert fit_mix(mix, tmp_path / "again", 60, schedule=again) == (rows, state)
    for stop in (5, before, before + 1, end):
        first, _ = fit_mix(mix, tmp_path / str(stop), stop, Change())
        rest, last = fit_mix(mix, tmp_path / str(stop), 60)
        assert (first + rest, last) == (rows, state), stop
