"""Odd ways of using the trainer: exact, or refused with the reason."""

from __future__ import annotations

import inspect
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.utilities import CombinedLoader
from support.chains import number_row, write_streams
from support.lightning_runs import (
    GLOBAL_BATCH,
    NUM_SAMPLES,
    QUIET,
    Recorder,
    Run,
    SavesAt,
    checkpoints,
    keep_all,
    write_shards,
)
from support.resume_contract import WARNINGS, At, Stopped, expect_exact, from_step, merged
from torch.optim.swa_utils import SWALR

from lightning_stream import (
    Packing,
    SampleLog,
    Schedule,
    Stream,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    read_position,
)
from lightning_stream.errors import StateError
from lightning_stream.trainers.lightning.callback import StreamingCallback

pytestmark = WARNINGS
VALIDATES_BY_TIME = "timedelta" in str(inspect.signature(pl.Trainer).parameters["val_check_interval"].annotation)


def module_over(shards: Path, **options: Any) -> StreamingDataModule:
    return StreamingDataModule(
        train={"remote": shards, "shuffle": True, **options}, val=shards, test=shards, global_batch_size=GLOBAL_BATCH
    )


class HasTest(Recorder):
    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._validating += batch["id"].tolist()

    def on_test_epoch_end(self) -> None:
        self.tested, self._validating = sorted(self._validating), []


def test_a_checkpoint_that_is_validated_and_tested_is_still_where_it_was(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path, save_at=(5,))
    step, path = checkpoints(tmp_path)[0]
    module, data, trainer = HasTest(), module_over(shards), pl.Trainer(max_epochs=3, **QUIET)
    trainer.validate(module, datamodule=data, ckpt_path=path, verbose=False)
    trainer.test(module, datamodule=data, ckpt_path=path, verbose=False)
    assert module.validations[0][1] == tuple(range(NUM_SAMPLES))
    assert module.tested == list(range(NUM_SAMPLES))
    trainer.fit(module, datamodule=data, ckpt_path=path)
    assert merged([module.steps]) == from_step(whole.steps, step)


class SkipsTheRest(Recorder):
    """Ends the first epoch by Lightning's own sign."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.current_epoch == 0 and batch_idx == 4 else None


def test_an_epoch_that_the_model_ends_early_is_over_after_a_resume_too(shards: Path, tmp_path: Path) -> None:
    ends = keep_all(tmp_path / "ends", every_n_epochs=1, save_on_train_epoch_end=True)
    whole = Run(shards, tmp_path, recorder=SkipsTheRest, save_at=range(3, 7), callbacks=[ends])
    plain = Run(shards, tmp_path / "plain")
    assert whole.steps[4] == plain.steps[11]
    for step, path in [*checkpoints(tmp_path / "ends"), *checkpoints(tmp_path)]:
        expect_exact(whole, Run(shards, tmp_path / "again", path, recorder=SkipsTheRest), step)


def test_a_second_data_module_continues_in_the_trainers_epoch(shards: Path, tmp_path: Path) -> None:
    other: dict[str, Any] = {"shuffle_seed": 3}
    whole = Run(shards, tmp_path, dataset=other)
    module, trainer = Recorder(), pl.Trainer(max_epochs=1, **QUIET)
    trainer.fit(module, datamodule=module_over(shards))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=module_over(shards, **other))
    assert [ids for s, ids in merged([module.steps]).items() if s >= 11] == [whole.steps[s] for s in range(11, 22)]
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    again = Run(shards, tmp_path / "again", tmp_path / "two.ckpt", dataset=other)
    assert again.steps == from_step(whole.steps, 22)


@pytest.mark.parametrize("at", [At("training_step", 14), At("on_train_epoch_end", 11)], ids=str)
def test_a_second_fit_after_an_error_and_its_resume_count_the_same_epochs(shards: Path, tmp_path: Path, at: At) -> None:
    """Lightning counts an epoch again in which an error ended the fit; the data begins its next one."""
    run = Run(shards, tmp_path, module={"at": at}, raises=Stopped, val=False)
    run.trainer.callbacks.append(SavesAt(tmp_path, (16, 22, 28)))
    run.fit(None)
    assert max(run.epochs.values()) == 2
    for step, path in checkpoints(tmp_path):
        expect_exact(run, Run(shards, tmp_path / "again", path, val=False), step)


@pytest.mark.parametrize("which", ["same trainer", "other trainer"])
@pytest.mark.parametrize("ending", ["error", "end"])
def test_after_a_fit_a_loader_begins_where_the_user_has_put_it(
    shards: Path, tmp_path: Path, ending: str, which: str
) -> None:
    whole = Run(shards, tmp_path, save_at=(5,))
    state = read_position(checkpoints(tmp_path)[0][1])
    loader = StreamingDataLoader(StreamingDataset(remote=shards, shuffle=True), global_batch_size=GLOBAL_BATCH)
    module = Recorder(at=At("training_step", 8) if ending == "error" else None)
    trainer = pl.Trainer(max_epochs=1, **QUIET)
    with pytest.raises(Stopped) if ending == "error" else nullcontext():
        trainer.fit(module, loader)
    loader.load_state_dict(state)
    done = trainer.global_step if which == "same trainer" else 0
    again = trainer if which == "same trainer" else pl.Trainer(**QUIET)
    again.fit_loop.max_epochs = again.current_epoch + 1
    module.steps.clear()
    again.fit(module, loader)
    assert [sorted(ids) for ids in module.steps.values()] == [whole.steps[step] for step in range(5, 11)]
    assert min(module.steps) == done


@pytest.mark.parametrize("evaluate", ["validate", "test", "predict"])
def test_an_evaluation_over_the_loader_of_a_training_run_has_a_whole_epoch_and_moves_nothing(
    shards: Path, tmp_path: Path, evaluate: str
) -> None:
    class Predicts(HasTest):
        def predict_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            self._validating += batch["id"].tolist()
            return batch["x"]

        on_predict_epoch_end = HasTest.on_test_epoch_end
        on_validation_epoch_end = HasTest.on_test_epoch_end

    loader = StreamingDataLoader(StreamingDataset(remote=shards, shuffle=True), GLOBAL_BATCH)
    module, trainer = Predicts(), pl.Trainer(max_steps=5, **QUIET)
    trainer.fit(module, loader)
    state = loader.state_dict()
    for other in (trainer, pl.Trainer(**QUIET)):
        getattr(other, evaluate)(module, loader)
        assert module.tested == list(range(NUM_SAMPLES))
        assert loader.state_dict() == state


def test_a_data_module_of_a_second_trainer_takes_no_validation_of_the_first_for_its_own(
    shards: Path, tmp_path: Path
) -> None:
    data, path = module_over(shards), tmp_path / "last.ckpt"

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.is_last_batch:  # and the validation comes next
                trainer.save_checkpoint(path)

    for callbacks in ([], [Saves()]):
        pl.Trainer(max_epochs=1, callbacks=callbacks, **QUIET).fit(Recorder(), datamodule=data)
    resumed = Recorder()
    pl.Trainer(max_epochs=1, **QUIET).fit(resumed, datamodule=module_over(shards), ckpt_path=path)
    assert len(resumed.validations) == 1


def test_a_state_that_a_loader_is_given_during_a_fit_is_refused(shards: Path, tmp_path: Path) -> None:
    class Gives(Recorder):
        def on_train_start(self) -> None:
            loader = self.trainer.train_dataloader
            loader.load_state_dict(loader.state_dict())

    with pytest.raises(StateError, match="ckpt_path= of Lightning's fit"):
        Run(shards, tmp_path, recorder=Gives)


def test_data_that_begins_again_inside_an_epoch_begins_an_epoch(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path, save_at=(14,))
    checkpoint = torch.load(checkpoints(tmp_path)[0][1], weights_only=True)
    del checkpoint["callbacks"]["lightning_stream"]
    torch.save(checkpoint, tmp_path / "bare.ckpt")
    with pytest.warns(UserWarning, match="The data begins from its start"):
        again = Run(shards, tmp_path, tmp_path / "bare.ckpt", data={"on_missing_state": "restart"})
    assert again.steps == {step: whole.steps[step - 14] for step in range(14, 36)}


def test_a_resume_with_fewer_epochs_than_were_begun_trains_on_nothing(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, save_at=(14,), max_steps=14)
    assert Run(shards, tmp_path, checkpoints(tmp_path)[0][1], max_epochs=1).steps == {}


def test_several_loaders_for_training_are_refused(shards: Path) -> None:
    loaders = {name: StreamingDataLoader(StreamingDataset(remote=shards), 16) for name in "ab"}
    for given in (loaders, CombinedLoader(loaders, "min_size"), [loaders["a"]]):
        with pytest.raises(TypeError, match="keeps the position of a StreamingDataLoader; the trainer trains on"):
            pl.Trainer(max_epochs=1, callbacks=[StreamingCallback()], **QUIET).fit(Recorder(), given)


@pytest.mark.parametrize("on_missing_state", ["error", "restart"])
def test_a_checkpoint_without_callbacks_is_not_passed_over_in_silence(
    shards: Path, tmp_path: Path, on_missing_state: str
) -> None:
    whole = Run(shards, tmp_path, save_at=(5,), max_epochs=1)
    checkpoint = torch.load(checkpoints(tmp_path)[0][1], weights_only=True)
    del checkpoint["callbacks"]
    torch.save(checkpoint, tmp_path / "bare.ckpt")
    options: dict[str, Any] = {"data": {"on_missing_state": on_missing_state}, "max_epochs": 1}
    with pytest.raises(StateError, match=r"this one holds none of ours: it has no 'callbacks'.*\['callbacks'\] = {}"):
        Run(shards, tmp_path / "again", tmp_path / "bare.ckpt", **options)
    if on_missing_state == "restart":  # the remedy that the error names
        torch.save({**checkpoint, "callbacks": {}}, tmp_path / "bare.ckpt")
        with pytest.warns(UserWarning, match="The data begins from its start"):
            again = Run(shards, tmp_path, tmp_path / "bare.ckpt", **options)
        assert [*again.steps.values()] == [*whole.steps.values()]


def test_a_tighter_limit_on_an_epoch_begins_the_next(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path, save_at=(5,))
    step, path = checkpoints(tmp_path)[0]
    resumed = Run(shards, tmp_path / "again", path, limit_train_batches=3)
    assert [resumed.steps[s] for s in range(step, step + 3)] == [whole.steps[s] for s in range(11, 14)]
    assert max(resumed.steps) == step + 5


def test_a_batch_size_found_by_trial_is_trained_with_from_the_first_sample_on(shards: Path, tmp_path: Path) -> None:
    module, data = Recorder(), StreamingDataModule(train=shards, val=shards, batch_size=2)
    finder = BatchSizeFinder(max_trials=2, init_val=2)
    trainer = pl.Trainer(max_epochs=1, callbacks=[finder], default_root_dir=tmp_path, **QUIET)
    trainer.fit(module, datamodule=data)
    size = data.batch_size
    assert size > 2
    ids = [number for step in sorted(module.steps) for number in module.steps[step][-size:]]  # without the trials'
    assert sorted(ids) == list(range(NUM_SAMPLES))


class InSecondEpoch(pl.Callback):
    """Lets a tuner look at the start of the second epoch, as Lightning's documentation shows."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trained = dict(pl_module.steps)
            super().on_fit_start(trainer, pl_module)
            pl_module.steps.clear()  # of those of its trials
            pl_module.steps.update(trained)


class FindsRate(InSecondEpoch, LearningRateFinder):
    pass


class FindsSize(InSecondEpoch, BatchSizeFinder):
    pass


def test_checkpoints_after_a_learning_rate_was_found_inside_a_run_continue_exactly(
    shards: Path, tmp_path: Path
) -> None:
    finds = FindsRate(num_training_steps=3, update_attr=False)
    whole = Run(shards, tmp_path, callbacks=[finds, SampleLog(tmp_path)], save_at=(13, 24))
    assert whole.steps == Run(shards, tmp_path / "plain").steps
    lines = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert {line["step"] - 1: sorted(line["ids"]) for line in lines} == whole.steps
    assert whole.data.stats().num_samples >= 3 * NUM_SAMPLES  # and those of the trial
    for step, path in checkpoints(tmp_path):
        expect_exact(whole, Run(shards, tmp_path / "again", path), step)


def test_a_batch_size_found_inside_a_run_is_that_of_its_rest(shards: Path, tmp_path: Path) -> None:
    data: dict[str, Any] = {"global_batch_size": None, "batch_size": 16}
    finds = FindsSize(max_trials=2, init_val=16, steps_per_trial=1)
    whole = Run(shards, tmp_path, callbacks=[finds], save_at=(13,), data=data)
    assert [len(whole.steps[step]) for step in (10, 11, 16, 17)] == [7, 32, 7, 32]
    resumed = Run(shards, tmp_path / "again", checkpoints(tmp_path)[0][1], data={**data, "batch_size": 32})
    expect_exact(whole, resumed, 13)


def test_an_epoch_longer_than_the_first_is_whole_after_a_learning_rate_was_found(tmp_path: Path) -> None:
    rows: dict[str, Any] = {"pack": Packing(row_length=40, window=50), "transform": number_row, "shuffle_seed": 3}
    data = write_streams(tmp_path) / "a"

    class OwnsLoader(Recorder):
        def train_dataloader(self) -> StreamingDataLoader:
            return StreamingDataLoader(StreamingDataset(remote=data, shuffle=True, **rows), 12)

    def steps(*callbacks: Any) -> dict[int, list[int]]:
        model = OwnsLoader()
        pl.Trainer(max_epochs=2, callbacks=list(callbacks), default_root_dir=tmp_path, **QUIET).fit(model)
        return model.steps

    loader = OwnsLoader().train_dataloader()
    assert loader.num_batches(0) < loader.num_batches(1)
    assert steps(FindsRate(num_training_steps=3, update_attr=False)) == steps()


class Normed(Recorder):
    """A model with a batch norm, which an averaged model must update."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net.append(torch.nn.BatchNorm1d(1))


@pytest.mark.filterwarnings("ignore:.*(scheduler|lr_schedul).*")
@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 refuses what Lightning's own callback keeps")
def test_averaged_weights_update_their_batch_norms_in_a_last_epoch(shards: Path, tmp_path: Path) -> None:
    def run(folder: Path, ckpt: Path | None = None, **options: Any) -> Run:
        averaging = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)
        return Run(shards, folder, ckpt, recorder=Normed, callbacks=[averaging], **options)

    plain = Run(shards, tmp_path / "plain")
    whole = run(tmp_path, save_at=(5, 15))
    assert {step: ids for step, ids in whole.steps.items() if step < 33} == plain.steps
    assert whole.steps[33] == list(range(NUM_SAMPLES))
    with torch.serialization.safe_globals([getattr, SWALR]):  # with torch 2.7, Lightning keeps a method of it
        for step, path in checkpoints(tmp_path):
            assert run(tmp_path / str(step), path).steps == from_step(whole.steps, step)


@pytest.mark.skipif(not VALIDATES_BY_TIME, reason="since Lightning 2.6")
def test_a_run_that_validates_by_time_resumes(shards: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"val_check_interval": "00:01:00:00", "check_val_every_n_epoch": None}
    whole = Run(shards, tmp_path, save_at=(5, 11, 15), **options)
    for step, path in checkpoints(tmp_path):
        assert Run(shards, tmp_path / str(step), path, **options).steps == from_step(whole.steps, step)


@pytest.mark.parametrize("nothing", [{"max_epochs": 0}, {"limit_train_batches": 0}])
def test_a_run_that_has_trained_on_nothing_begins_at_the_start(shards: Path, tmp_path: Path, nothing: Any) -> None:
    def fit(ckpt_path: Path | None, **options: Any) -> tuple[pl.Trainer, Recorder]:
        loader = StreamingDataLoader(StreamingDataset(remote=shards, shuffle=True), GLOBAL_BATCH)
        trainer, model = pl.Trainer(**{**QUIET, "max_steps": 3, **options}), Recorder()
        trainer.fit(model, loader, ckpt_path=ckpt_path)
        return trainer, model

    fit(None, **nothing)[0].save_checkpoint(tmp_path / "nothing.ckpt")
    assert fit(tmp_path / "nothing.ckpt")[1].steps == fit(None)[1].steps


@pytest.mark.parametrize("end", [{"max_epochs": 1}, {"max_steps": 5}])
def test_a_checkpoint_of_a_resume_with_nothing_left_to_train_keeps_the_position(
    shards: Path, tmp_path: Path, end: dict[str, Any]
) -> None:
    whole = Run(shards, tmp_path)
    first = Run(shards, tmp_path, **end)
    first.trainer.save_checkpoint(tmp_path / "0.ckpt")
    for k in range(2):
        again = Run(shards, tmp_path, tmp_path / f"{k}.ckpt", **end)
        assert again.steps == {}
        again.trainer.save_checkpoint(tmp_path / f"{k + 1}.ckpt")
    rest = Run(shards, tmp_path, tmp_path / "2.ckpt")
    assert rest.steps == from_step(whole.steps, len(first.steps))


def test_a_run_stopped_early_resumes_and_more_epochs_can_be_added(shards: Path, tmp_path: Path) -> None:
    class StopsEarly(Recorder):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.should_stop = self.trainer.global_step == 5

    whole = Run(shards, tmp_path / "whole")
    first = Run(shards, tmp_path, recorder=StopsEarly)
    first.trainer.save_checkpoint(tmp_path / "a.ckpt")
    second = Run(shards, tmp_path, tmp_path / "a.ckpt", max_epochs=1)
    second.trainer.save_checkpoint(tmp_path / "b.ckpt")
    third = Run(shards, tmp_path, tmp_path / "b.ckpt")
    assert first.steps | second.steps | third.steps == whole.steps
    assert [len(run.steps) for run in (first, second, third)] == [5, 6, 22]


@pytest.mark.parametrize("epoch_size", [160, 200])
def test_a_finished_run_whose_mixture_has_ended_ends_at_once(shards: Path, tmp_path: Path, epoch_size: int) -> None:
    other = write_shards(tmp_path / "other", first=1000)

    def run(folder: Path, ckpt: Path | None, max_epochs: int) -> Run:
        streams = [Stream(remote=shards, name="a"), Stream(remote=other, name="b")]
        schedule = Schedule([(0, {"a": 2, "b": 1})], exhausted="stop")
        mix = {"remote": None, "streams": streams, "schedule": schedule, "epoch_size": epoch_size}
        keep = keep_all(folder, every_n_epochs=1, save_on_train_epoch_end=True)
        return Run(None, folder, ckpt, dataset=mix, val=False, callbacks=[keep], max_epochs=max_epochs)  # type: ignore[arg-type]

    whole = run(tmp_path / "whole", None, 5)
    assert whole.trainer.current_epoch < 5, "the test needs a mixture that ends"
    for max_epochs in (1, 2, 3, 4):
        folder = tmp_path / str(max_epochs)
        finished = run(folder, None, max_epochs)
        step, last = checkpoints(folder)[-1]
        assert finished.trainer.global_step == step
        finished.trainer.save_checkpoint(tmp_path / "end.ckpt")
        for path in (last, tmp_path / "end.ckpt"):
            for more in (0, 3):
                again = run(tmp_path / "again", path, max_epochs + more)
                assert again.steps == (from_step(whole.steps, step) if more else {})
