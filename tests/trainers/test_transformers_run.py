"""Under Transformers' Trainer a run is checked, recorded, seeded and logged as under every other trainer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="pip install 'lightning-stream[transformers]'")

import numpy as np  # noqa: E402

from lightning_stream import (  # noqa: E402
    MDSWriter,
    StreamingDataLoader,
    StreamingDataset,
    read_position,
    verify_delivery,
    versions,
)
from lightning_stream.errors import LedgerError, StateError  # noqa: E402
from lightning_stream.run_log import read_run  # noqa: E402
from lightning_stream.trainers.transformers import StreamingTrainerCallback  # noqa: E402

NUM_SAMPLES, GLOBAL_BATCH, EPOCHS = 64, 8, 2
NUM_STEPS = EPOCHS * NUM_SAMPLES // GLOBAL_BATCH
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Model(torch.nn.Module):
    """Notes the samples of each micro-batch, and draws as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.ids: list[list[int]] = []
        self.drawn: list[float] = []
        self.steps: list[int] = []
        self.fails_at = -1
        self.state: Any = None  # the trainer's

    def forward(self, id: Any) -> dict[str, Any]:  # noqa: A002 - the column's name
        if len(self.ids) == self.fails_at - 1:
            self.fails_at = -1
            raise ArithmeticError
        self.ids.append(id.tolist())
        self.steps.append(self.state.global_step)
        self.drawn.append(float(torch.rand(())))
        return {"loss": self.net(id.float()[:, None]).square().mean()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers_run") / "data"
    with MDSWriter(out=str(folder), columns={"id": "int64"}) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"id": np.int64(number)})
    return folder


class Begins(transformers.TrainerCallback):  # type: ignore[misc]  # it may be absent
    """Gives the model the trainer's state."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.state = state


def train(data: Path, folder: Path, callback: StreamingTrainerCallback, *, resume: bool = False, **how: Any) -> Model:
    """Train a new model; see `make`."""
    host = make(data, folder, callback, **how)
    host.train(resume_from_checkpoint=resume)
    return host.model  # type: ignore[no-any-return]


def make(
    data: Path, folder: Path, callback: StreamingTrainerCallback, *, accumulate: int = 1, knows: bool = True,
    max_steps: int = -1, others: Sequence[Any] = (), epochs: int = EPOCHS, **dataset: Any,
) -> Any:  # fmt: skip
    """A trainer of a new model; `knows`: whether the loader knows of the accumulation."""

    class Host(transformers.Trainer):  # type: ignore[misc]  # it may be absent
        def get_train_dataloader(self) -> Any:
            size = {"global_batch_size": GLOBAL_BATCH, "accumulate": accumulate} if knows else {}
            streamed = StreamingDataset(local=data, shuffle=True, **dataset)
            return StreamingDataLoader(streamed, **(size or {"batch_size": GLOBAL_BATCH // accumulate}))

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, per_device_train_batch_size=GLOBAL_BATCH // accumulate,
        gradient_accumulation_steps=accumulate, max_steps=max_steps, save_steps=3, use_cpu=True, report_to=[],
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    return Host(Model(), arguments, callbacks=[callback, Begins(), *others])


def stopped_at(data: Path, folder: Path, num_steps: int, **options: Any) -> Model:
    """Train for some steps: what is saved last is the end of the last step."""
    callback = StreamingTrainerCallback(seed_steps=options.pop("seed_steps", None), record_delivery=folder / "record")
    return train(data, folder, callback, max_steps=num_steps, **options)


@pytest.mark.parametrize(("accumulate", "knows"), [(1, True), (2, True), (2, False)])
def test_a_record_over_a_stop_says_that_all_steps_were_delivered(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, accumulate: int, knows: bool
) -> None:
    caplog.set_level(logging.INFO, "lightning_stream")
    first = stopped_at(data, tmp_path, 5, accumulate=accumulate, knows=knows)
    callback = StreamingTrainerCallback(record_delivery=str(tmp_path / "record"))
    second = train(data, tmp_path, callback, accumulate=accumulate, knows=knows, resume=True)
    assert "0 lost, 0 repeated" in caplog.text
    found = verify_delivery(tmp_path / "record", StreamingDataset(local=data, shuffle=True))
    recorded = NUM_STEPS if knows else NUM_STEPS * accumulate
    assert (found.num_steps, found.first_difference) == (recorded, None)
    folder = tmp_path / "checkpoint-5"
    assert read_position(folder) == read_position(folder / "trainer_state.json")
    seen = [number for ids in first.ids + second.ids for number in ids]
    assert sorted(seen) == sorted([*range(NUM_SAMPLES)] * EPOCHS)
    assert sorted(seen[:NUM_SAMPLES]) == [*range(NUM_SAMPLES)]


GROWS = [(0, 0), (4, 1)]  # 32 samples in the first epoch, 64 in the others


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of three versions: of 32 samples, of 64, and of 32 again."""
    folder = tmp_path_factory.mktemp("transformers_run") / "growing"
    for numbers in (range(NUM_SAMPLES // 2), range(NUM_SAMPLES // 2, NUM_SAMPLES)):
        with MDSWriter(out=str(folder), columns={"id": "int64"}, append=numbers.start > 0) as writer:
            for number in numbers:
                writer.write({"id": np.int64(number)})
    versions.delete_rows(folder, range(NUM_SAMPLES // 2, NUM_SAMPLES))
    return folder


@pytest.mark.parametrize(("accumulate", "stops"), [(1, ()), (1, (3, 6)), (2, ()), (2, (4, 11))])
def test_epochs_of_other_lengths_than_the_first_are_read_to_their_ends(
    growing: Path, tmp_path: Path, accumulate: int, stops: tuple[int, ...]
) -> None:
    """The trainer's own epochs are all as long as it took the first one to be: 4 steps."""
    options: dict[str, Any] = {"accumulate": accumulate, "epochs": 6, "version": GROWS}
    parts = [stopped_at(growing, tmp_path, stop, resume=k > 0, **options) for k, stop in enumerate(stops)]
    callback = StreamingTrainerCallback(record_delivery=tmp_path / "record")
    parts.append(train(growing, tmp_path, callback, resume=bool(stops), **options))
    seen = [ids for part in parts for ids in part.ids]
    loader = StreamingDataLoader(StreamingDataset(local=growing, shuffle=True, version=GROWS), GLOBAL_BATCH)
    planned = [number for _ in range(4) for batch in loader for number in batch["id"].tolist()]
    assert len(seen) == 24 * accumulate
    assert [number for ids in seen for number in ids] == planned[: 24 * GLOBAL_BATCH]
    dataset = StreamingDataset(local=growing, shuffle=True, version=GROWS)
    found = verify_delivery(tmp_path / "record", dataset)
    assert (found.num_steps, found.first_difference) == (24, None)


@pytest.mark.parametrize(("accumulate", "fill"), [(2, 1), (4, 1), (4, 3)])
def test_a_last_step_of_fewer_batches_is_a_step_of_its_own_after_a_resume(
    data: Path, tmp_path: Path, accumulate: int, fill: int
) -> None:
    """Each epoch has five whole steps, and one that has `fill` micro-batches of `accumulate`."""
    size = GLOBAL_BATCH * 5 + GLOBAL_BATCH // accumulate * fill
    options: dict[str, Any] = {"accumulate": accumulate, "epochs": 3, "epoch_size": size}
    whole = train(data, tmp_path / "whole", StreamingTrainerCallback(), **options)
    parts = [stopped_at(data, tmp_path, stop, resume=stop > 2, **options) for stop in (2, 9, 11)]
    parts.append(train(data, tmp_path, StreamingTrainerCallback(), resume=True, **options))
    assert [step for part in parts for step in part.steps] == whole.steps
    assert sorted(set(whole.steps)) == [*range(18)]
    assert [ids for part in parts for ids in part.ids] == whole.ids


def test_training_ends_with_its_last_epoch_where_later_ones_are_shorter(growing: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 3, "version": [(0, 1), (8, 2)]}
    first = stopped_at(growing, tmp_path, 10, **options)
    second = train(growing, tmp_path, StreamingTrainerCallback(), resume=True, **options)
    seen = [number for ids in first.ids + second.ids for number in ids]
    half = [*range(NUM_SAMPLES // 2)]
    assert sorted(seen) == sorted([*range(NUM_SAMPLES), *half, *half])
    assert second.steps[-1] == 15


@pytest.mark.parametrize(("batch", "step", "max_steps"), [(16, 3, 10), (32, 12, 13), (4, 6, None), (8, 9, None)])
def test_a_run_resumed_with_other_batches_trains_on_all_of_its_epochs_or_says_how(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, step: int, max_steps: int | None
) -> None:
    """The trainer divides the steps of a checkpoint by those that an epoch has now: it ended without a word."""
    whole = train(data, tmp_path, StreamingTrainerCallback())
    monkeypatch.setitem(globals(), "GLOBAL_BATCH", batch)
    saved = str(tmp_path / f"checkpoint-{step}")
    if max_steps is not None:
        with pytest.raises(StateError, match=f"Pass max_steps={max_steps}, or"):
            make(data, tmp_path, StreamingTrainerCallback()).train(resume_from_checkpoint=saved)
    host = make(data, tmp_path, StreamingTrainerCallback(), max_steps=max_steps or -1)
    host.train(resume_from_checkpoint=saved)
    seen = [number for ids in whole.ids[:step] + host.model.ids for number in ids]
    assert sorted(seen) == sorted([*range(NUM_SAMPLES)] * EPOCHS)
    if max_steps is not None:
        ended = make(data, tmp_path, StreamingTrainerCallback())
        ended.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{max_steps}"))
        assert ended.model.ids == []


class Ends(transformers.TrainerCallback):  # type: ignore[misc]  # it may be absent
    """Ends an epoch after the third step."""

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        control.should_epoch_stop = state.global_step == 3


def test_an_epoch_that_a_callback_ends_is_followed_by_the_next(data: Path, tmp_path: Path) -> None:
    whole = train(data, tmp_path / "whole", StreamingTrainerCallback())
    cut = train(data, tmp_path / "cut", StreamingTrainerCallback(), others=[Ends()])
    assert cut.ids == whole.ids[:3] + whole.ids[NUM_SAMPLES // GLOBAL_BATCH :]


@pytest.mark.parametrize(("accumulate", "step"), [(1, 3), (1, 6), (2, 3), (2, 9)])
def test_a_run_resumed_at_or_after_an_epoch_that_a_callback_ended_trains_on_what_the_whole_one_did(
    data: Path, tmp_path: Path, accumulate: int, step: int
) -> None:
    """The trainer would count that epoch's other steps among those to come, and train on a part of a third epoch."""
    options: dict[str, Any] = {"accumulate": accumulate, "others": [Ends()]}
    whole = train(data, tmp_path, StreamingTrainerCallback(), **options)
    host = make(data, tmp_path, StreamingTrainerCallback(), **options)
    host.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert host.model.ids == whole.ids[step * accumulate :]
    assert host.state.global_step == NUM_STEPS - 5


@pytest.mark.parametrize(("fails_at", "is_short"), [(16, False), (23, True)])
def test_after_an_error_the_arguments_are_the_users(data: Path, tmp_path: Path, fails_at: int, is_short: bool) -> None:
    """An error in the last micro-batch of a step; the epoch's last step has three of them, the others four."""
    size = GLOBAL_BATCH * 5 + GLOBAL_BATCH // 4 * 3
    options: dict[str, Any] = {"accumulate": 4, "epochs": 2, "epoch_size": size}
    whole = train(data, tmp_path / "whole", StreamingTrainerCallback(), **options)
    host = make(data, tmp_path, StreamingTrainerCallback(), **options)
    host.model.fails_at = fails_at
    with pytest.raises(ArithmeticError):
        host.train()
    del host.model.ids[12:]  # the checkpoint is that of step 3
    if is_short:
        with pytest.raises(StateError, match="call train"):
            host.train(resume_from_checkpoint=True)
    host.train(resume_from_checkpoint=True)
    assert host.model.ids == whole.ids


def test_where_epochs_differ_the_loader_must_know_what_a_step_takes(growing: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Pass accumulate=2"):
        train(growing, tmp_path, StreamingTrainerCallback(), accumulate=2, knows=False, version=GROWS)


class Looks(transformers.TrainerCallback):  # type: ignore[misc]  # it may be absent
    """Looks at batches of the training's loader."""

    def on_epoch_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        next(iter(train_dataloader))

    on_step_end = on_substep_end = on_epoch_end = on_epoch_begin


@pytest.mark.parametrize("accumulate", [1, 2])
def test_looks_at_batches_change_nothing(data: Path, tmp_path: Path, accumulate: int) -> None:
    options: dict[str, Any] = {"accumulate": accumulate, "others": [Looks()]}
    whole = train(data, tmp_path / "whole", StreamingTrainerCallback(), accumulate=accumulate)
    first = stopped_at(data, tmp_path, 5, **options)
    callback = StreamingTrainerCallback(record_delivery=tmp_path / "record")
    second = train(data, tmp_path, callback, resume=True, **options)
    assert first.ids + second.ids == whole.ids
    found = verify_delivery(tmp_path / "record", StreamingDataset(local=data, shuffle=True))
    assert (found.num_steps, found.first_difference) == (NUM_STEPS, None)


def test_batches_from_elsewhere_are_an_error(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(self: Any, iterator: Any, num_batches: int, *_: Any) -> Any:
        return [{"id": torch.zeros(GLOBAL_BATCH)}], None

    monkeypatch.setattr(transformers.Trainer, "get_batch_samples", elsewhere)
    with pytest.raises(StateError, match="must come from its StreamingDataLoader"):
        train(data, tmp_path, StreamingTrainerCallback())


def test_a_second_training_begins_where_the_first_did(data: Path, tmp_path: Path) -> None:
    callback = StreamingTrainerCallback()
    assert train(data, tmp_path / "1", callback).ids == train(data, tmp_path / "2", callback).ids


@pytest.mark.parametrize("accumulate", [1, 2])
def test_seeded_steps_draw_the_same_after_a_resume(data: Path, tmp_path: Path, accumulate: int) -> None:
    whole = train(data, tmp_path / "whole", StreamingTrainerCallback(seed_steps=7), accumulate=accumulate)
    first = stopped_at(data, tmp_path, 5, accumulate=accumulate, seed_steps=7)
    callback = StreamingTrainerCallback(seed_steps=7)
    second = train(data, tmp_path, callback, accumulate=accumulate, resume=True)
    assert first.drawn + second.drawn == whole.drawn
    assert len(set(whole.drawn)) == len(whole.drawn)


def test_a_batch_that_is_not_the_planned_one_is_an_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = StreamingDataLoader.note_batch

    def noted(self: StreamingDataLoader, iterator: Any, *times: Any) -> None:
        if iterator.num_batches == 4:
            iterator.last_batch = replace(iterator.last_batch, ids=iterator.last_batch.ids[::-1])
        note(self, iterator, *times)

    monkeypatch.setattr(StreamingDataLoader, "note_batch", noted)
    with pytest.raises(LedgerError, match="micro-batch 3"):
        train(data, tmp_path, StreamingTrainerCallback())
    train(data, tmp_path, StreamingTrainerCallback(check_delivery=False))


def test_a_checkpoint_without_a_position_is_refused_or_begins_the_data(data: Path, tmp_path: Path) -> None:
    class Other(StreamingTrainerCallback):
        """Its state has another name."""

    train(data, tmp_path, Other(), max_steps=3)
    with pytest.raises(StateError, match="step 3 was written without StreamingTrainerCallback"):
        train(data, tmp_path, StreamingTrainerCallback(), resume=True)
    model = train(data, tmp_path, StreamingTrainerCallback(on_missing_state="restart"), resume=True)
    first_epoch = model.ids[: NUM_SAMPLES // GLOBAL_BATCH]
    assert sorted(number for ids in first_epoch for number in ids) == [*range(NUM_SAMPLES)]


def test_the_log_of_the_run_is_written_beside_its_checkpoints(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "out", StreamingTrainerCallback(), max_steps=3)
    train(data, tmp_path / "out", StreamingTrainerCallback(), resume=True)
    run = read_run(tmp_path / "out")
    assert [launch.how for launch in run.launches] == ["finished", "finished"]
    assert (run.stats.num_samples, run.lost, run.repeated) == (EPOCHS * NUM_SAMPLES, 0, 0)
    train(data, tmp_path / "without", StreamingTrainerCallback(report=False))
    assert not list((tmp_path / "without").glob("data_*"))
