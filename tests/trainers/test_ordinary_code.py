"""What ordinary users do around `Trainer.fit` of Lightning changes nothing of what is trained on."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.chains import Chain, EmptyBatches, Link, Look
from support.lightning_host import HOST
from support.lightning_runs import NUM_SAMPLES, QUIET, Recorder, Run, checkpoints, keep_all, pl, write_shards
from support.resume_contract import WARNINGS, from_step, planned
from torch.utils.data import DataLoader

from lightning_stream import (
    StreamingCallback,
    StreamingDataLoader,
    StreamingDataModule,
    StreamingDataset,
    World,
    verify_delivery,
)
from lightning_stream.errors import SettingsMismatch, StateError

pytestmark = WARNINGS
QUIET_TRAINER = {name: value for name, value in QUIET.items() if name != "enable_checkpointing"}


def fit(shards: Path, folder: Path, link: Link, path: Path | None = None, **loading: Any) -> Run:
    """A run of three epochs by a user, whose checkpoints are kept after some steps."""
    return HOST.run_link(shards, folder, Chain(0, {}, loading), link, World(), path, {})


def test_a_pass_for_statistics_leaves_the_record_of_deliveries_true(shards: Path, tmp_path: Path) -> None:
    looks = (Look("on_train_start", 0, "pass"), Look("on_train_batch_end", 5, "pass"))
    run = fit(shards, tmp_path, Link("module", looks=looks), record_delivery=tmp_path / "record")
    verdict = verify_delivery(tmp_path / "record", StreamingDataset(remote=shards, shuffle=True))
    assert verdict.sentence == "all 33 recorded steps saw exactly the planned samples"
    assert len(run.steps) == 33


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("source", ["module", "bare"])
def test_an_empty_batch_is_passed_over_and_none_is_trained_on_twice(
    shards: Path, tmp_path: Path, source: str, accumulate: int
) -> None:
    whole = planned(Chain(0, {}, {}).loader(shards))
    collate = EmptyBatches((whole[2][0], whole[7][3]))
    link = Link(source, accumulate=accumulate, options={"save_at": (2, 3, 7, 9), "max_epochs": 2})
    full = fit(shards, tmp_path, link, collate_fn=collate)
    assert len({number for ids in full.steps.values() for number in ids}) > NUM_SAMPLES - 2 * 16
    for step, path in checkpoints(tmp_path):
        assert fit(shards, tmp_path / str(step), link, path, collate_fn=collate).steps == from_step(full.steps, step)


def test_nothing_asks_a_loader_for_its_length_at_each_step(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its truth value would; with an order of mosaicml-streaming that took 6 ms a step."""
    length, calls = StreamingDataLoader.__len__, [0]

    def counted(self: StreamingDataLoader) -> int:
        calls[0] += 1
        return length(self)

    monkeypatch.setattr(StreamingDataLoader, "__len__", counted)
    counts = []
    for steps in (2, 9):
        calls[0] = 0
        Run(shards, tmp_path, max_steps=steps, val=False)
        counts.append(calls[0])
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("tail", ["pad", "exact", "drop"])
def test_the_last_partial_step_weighs_the_same_for_any_accumulation(shards: Path, tmp_path: Path, tail: str) -> None:
    runs = [
        Run(shards, tmp_path, max_epochs=1, accumulate_grad_batches=accumulate, val=False, data={"tail": tail})
        for accumulate in (1, 2, 4, 8)
    ]
    for run in runs[1:]:
        assert run.steps == runs[0].steps
        assert run.weights == pytest.approx(runs[0].weights, abs=1e-5)


class Plateau(Recorder):
    """Its learning rate halves at the end of each epoch, by a metric of training or validation that never falls."""

    def __init__(self, monitor: str) -> None:
        super().__init__()
        self.monitor, self.rates, self.ends = monitor, {}, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates[self.trainer.global_step] = self.optimizers().param_groups[0]["lr"]
        self.log("train", torch.tensor(1.0), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", torch.tensor(1.0), batch_size=1)

    def on_train_epoch_end(self) -> None:
        self.ends.append(self.trainer.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.monitor}}


@pytest.mark.parametrize("monitor", ["train", "val"])
def test_schedulers_and_epoch_ends_come_after_a_resume_as_without_it(
    shards: Path, tmp_path: Path, monitor: str
) -> None:
    """From a checkpoint of an epoch's last batch, and from one in the middle."""

    def run(folder: Path, ckpt: Path | None = None) -> Plateau:
        module: Plateau = Run(
            shards, folder, ckpt, recorder=lambda: Plateau(monitor), save_at=(11, 16, 22), max_epochs=4
        ).module
        return module

    full = run(tmp_path / "full")
    assert [full.rates[step] for step in (0, 11, 22, 33)] == [0.1, 0.1, 0.05, 0.025]
    assert full.ends == [0, 1, 2, 3]
    for step, path in checkpoints(tmp_path / "full"):
        if monitor == "train" and step != 16:  # the mean of the epoch that ends is in no checkpoint
            with pytest.warns(UserWarning, match="a scheduler on plateaus needs the metric of the whole epoch"):
                again = run(tmp_path / str(step), path)
        else:
            again = run(tmp_path / str(step), path)
            assert again.rates == from_step(full.rates, step)
        assert again.ends == full.ends[(step - 1) // 11 :]


def test_torchs_loader_over_a_dataset_says_once_what_to_write_instead(shards: Path, tmp_path: Path) -> None:
    loader = DataLoader(StreamingDataset(remote=shards, batch_size=16), 16)
    trainer = pl.Trainer(max_steps=2, enable_checkpointing=False, default_root_dir=tmp_path, **QUIET_TRAINER)
    with pytest.warns(UserWarning, match=r"Replace it by StreamingDataLoader\(dataset, batch_size=\.\.\.\)") as caught:
        trainer.fit(Plain(), loader)
    assert sum("StreamingDataLoader" in str(one.message) for one in caught) == 1


class Plain(Recorder):
    """Trains on batches in whatever collection they come."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        while "x" not in batch:
            batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        self.steps[self.global_step] += batch["id"].tolist()
        return self.net(batch["x"]).square().mean()


COLLECTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "torch": (lambda dataset: DataLoader(dataset, 16), "Replace it by StreamingDataLoader"),
    "torch in a dict": (lambda dataset: {"a": DataLoader(dataset, 16)}, "Replace it by StreamingDataLoader"),
    "a dict of one": (lambda dataset: {"a": StreamingDataLoader(dataset, 16)}, "Pass one loader to fit"),
    "a list of two": (lambda dataset: [StreamingDataLoader(dataset, 16) for _ in "ab"], "Pass one loader to fit"),
    "combined": (lambda dataset: CombinedLoader({"a": StreamingDataLoader(dataset, 16)}), "Pass one loader to fit"),
}


@pytest.mark.filterwarnings("ignore:.*no checkpoint of this run can be resumed")
@pytest.mark.parametrize("name", COLLECTIONS)
def test_what_lightning_cannot_resume_exactly_is_refused_at_the_resume(shards: Path, tmp_path: Path, name: str) -> None:
    make, cure = COLLECTIONS[name]

    def fit(ckpt_path: Path | None = None, **options: Any) -> Plain:
        module = Plain()
        trainer = pl.Trainer(max_epochs=2, **QUIET_TRAINER, **{"enable_checkpointing": False, **options})
        dataset = StreamingDataset(remote=shards, shuffle=True, batch_size=16)
        trainer.fit(module, make(dataset), ckpt_path=ckpt_path)
        return module

    keep = keep_all(tmp_path, every_n_train_steps=3)
    assert len(fit(enable_checkpointing=True, callbacks=[keep]).steps) == 22
    for step, path in checkpoints(tmp_path)[:5]:
        with pytest.raises(StateError, match=f"a resumed run must train on what its checkpoint has not seen.*{cure}"):
            fit(path)
        assert step > 0


@pytest.mark.filterwarnings("ignore:.*no checkpoint of this run can be resumed")
@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
def test_the_rest_of_an_epoch_that_max_steps_cut_is_not_taken_for_trained(shards: Path, tmp_path: Path) -> None:
    def fit(max_steps: int, ckpt_path: Path | None = None) -> pl.Trainer:
        trainer = pl.Trainer(max_epochs=1, max_steps=max_steps, enable_checkpointing=False, **QUIET_TRAINER)
        dataset = StreamingDataset(remote=shards, shuffle=True, batch_size=16)
        trainer.fit(Plain(), DataLoader(dataset, 16), ckpt_path=ckpt_path)
        return trainer

    for steps in (3, 11):
        fit(steps).save_checkpoint(tmp_path / f"{steps}.ckpt")
    fit(3, tmp_path / "3.ckpt")  # both runs are over
    fit(-1, tmp_path / "11.ckpt")
    with pytest.raises(StateError, match="a resumed run must train on what its checkpoint has not seen"):
        fit(-1, tmp_path / "3.ckpt")


@pytest.mark.filterwarnings("ignore:.*no checkpoint of this run can be resumed")
@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
def test_a_dataset_that_the_users_code_resumes_is_left_to_it(shards: Path, tmp_path: Path) -> None:
    class KeepsState(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.dataset = StreamingDataset(remote=shards, shuffle=True, batch_size=16)

        def train_dataloader(self) -> Any:
            return DataLoader(self.dataset, 16)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["data"] = self.dataset.state_dict(16 * (self.trainer.global_step % 11), True)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.dataset.load_state_dict(checkpoint["data"])

    modules = [KeepsState(), KeepsState()]
    for module, ckpt_path in zip(modules, (None, tmp_path / "ckpt" / "4-0.ckpt"), strict=True):
        keep = keep_all(tmp_path, every_n_train_steps=4)
        pl.Trainer(max_epochs=1, callbacks=[keep], **QUIET_TRAINER).fit(module, ckpt_path=ckpt_path)
    assert modules[1].steps == {step: ids for step, ids in modules[0].steps.items() if step >= 4}


def test_persistent_workers_end_with_the_fit(shards: Path, tmp_path: Path) -> None:
    for steps in (3, -1):
        Run(shards, tmp_path, max_epochs=2, max_steps=steps, data={"num_workers": 1, "persistent_workers": True})
        assert not multiprocessing.active_children()


OTHERS = [{"shuffle_seed": 5}, {"shuffle": False}, {"num_canonical_nodes": 3}]


@pytest.mark.parametrize("first", [0, 1000], ids=["same data", "other data"])
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_second_fit_over_another_loader_trains_on_it_and_its_state_is_of_it(
    tmp_path: Path, shards: Path, first: int, other: dict[str, Any]
) -> None:
    others = write_shards(tmp_path / "others", first=first)

    def loader() -> StreamingDataLoader:
        return StreamingDataLoader(StreamingDataset(remote=others, **{"shuffle": True, **other}), 16)

    callback, module = StreamingCallback(), Recorder()
    trainer = pl.Trainer(**{**QUIET, "max_epochs": 1, "callbacks": [callback]})
    trainer.fit(module, StreamingDataLoader(StreamingDataset(remote=shards, shuffle=True), 32))
    module.steps.clear()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    expected = loader()
    expected.set_epoch(1)
    assert list(module.steps.values()) == [batch["id"].tolist() for batch in expected]
    again = loader()
    again.load_state_dict(callback.state_dict()["position"])
    assert (again.position.epoch, again.position.position) == (2, 0)


def test_the_data_module_of_the_fit_before_has_no_part_in_a_resume_over_a_loader(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path, val=False, save_at=(11,), max_steps=14)
    path = checkpoints(tmp_path)[0][1]

    def resume(first: dict[str, Any], then: dict[str, Any]) -> Any:
        """The steps over a loader, by a trainer that has trained on a module before."""
        run = Run(shards, tmp_path / "first", val=False, dataset=first, max_steps=1)
        run.module.steps.clear()
        run.trainer.fit_loop.epoch_loop.max_steps = 14
        dataset = StreamingDataset(remote=shards, shuffle=True, **then)
        run.trainer.fit(run.module, StreamingDataLoader(dataset, global_batch_size=16), ckpt_path=path)
        return run.steps

    assert resume(first={"shuffle_seed": 5}, then={}) == from_step(whole.steps, 11)
    with pytest.raises(SettingsMismatch, match="shuffle_seed was 9176 and is 5 now"):
        resume(first={}, then={"shuffle_seed": 5})


@pytest.mark.parametrize("callbacks", [list, lambda: [StreamingCallback()]], ids=["none", "ours"])
def test_a_loader_made_for_each_epoch_continues_the_run(shards: Path, callbacks: Callable[[], list[Any]]) -> None:
    class OwnLoader(Recorder):
        def train_dataloader(self) -> StreamingDataLoader:
            return StreamingDataLoader(StreamingDataset(remote=shards, shuffle=True), 16)

    module = OwnLoader()
    trainer = pl.Trainer(
        max_epochs=2, reload_dataloaders_every_n_epochs=1, enable_checkpointing=False, limit_val_batches=0,
        callbacks=callbacks(), **QUIET_TRAINER,
    )  # fmt: skip
    trainer.fit(module)
    whole = planned(Chain(0, {}, {}).loader(shards), epochs=2)
    assert {step: sorted(ids) for step, ids in module.steps.items()} == whole


LATER = {
    "data": lambda epoch, shards: ({"remote": shards, "filter": {"exclude_ids": range(40 * epoch)}}, 16),
    "seed": lambda epoch, shards: ({"remote": shards, "shuffle_seed": epoch}, 16),
    "batch": lambda epoch, shards: ({"remote": shards, "num_canonical_nodes": 8}, 8 * 2**epoch),
}


@pytest.mark.parametrize("change", LATER.values(), ids=LATER)
def test_loaders_that_change_with_the_epoch_are_trained_on_and_resumed_as_they_are(
    shards: Path, tmp_path: Path, change: Callable[[int, Path], tuple[dict[str, Any], int]]
) -> None:
    def loader(epoch: int) -> StreamingDataLoader:
        arguments, size = change(epoch, shards)
        return StreamingDataLoader(StreamingDataset(shuffle=True, **arguments), size)

    class Changing(Recorder):
        def train_dataloader(self) -> StreamingDataLoader:
            return loader(self.trainer.current_epoch)

    def fit(path: Path | None = None, *callbacks: Any) -> dict[int, list[int]]:
        module = Changing()
        options = {**QUIET_TRAINER, "limit_val_batches": 0, "default_root_dir": tmp_path / "root"}
        options["reload_dataloaders_every_n_epochs"] = 1
        pl.Trainer(max_epochs=3, callbacks=list(callbacks), **options).fit(module, ckpt_path=path)
        return module.steps

    whole = fit(None, keep_all(tmp_path, every_n_train_steps=5))
    batches = []
    for epoch in range(3):
        due = loader(epoch)
        due.set_epoch(epoch)
        batches += [batch["id"][~torch.from_numpy(due.last_batch.filler)].tolist() for batch in due]
    assert list(whole.values()) == batches
    for step, path in checkpoints(tmp_path):
        assert fit(path) == from_step(whole, step)


def test_a_data_module_whose_loader_changes_with_the_epoch_is_not_resumed_inside_one(
    shards: Path, tmp_path: Path
) -> None:
    class Growing(StreamingDataModule):
        def train_dataloader(self) -> StreamingDataLoader:
            self.global_batch_size = 8 * 2**self.trainer.current_epoch
            return super().train_dataloader()

    def fit(path: Path | None = None, *callbacks: Any) -> None:
        data = Growing(train={"remote": shards, "shuffle": True}, global_batch_size=8)
        options = {**QUIET_TRAINER, "reload_dataloaders_every_n_epochs": 1, "default_root_dir": tmp_path / "root"}
        pl.Trainer(max_epochs=2, callbacks=list(callbacks), **options).fit(Recorder(), data, ckpt_path=path)

    fit(None, keep_all(tmp_path, every_n_train_steps=1))
    with pytest.raises(StateError, match="make the same loader"):
        fit(checkpoints(tmp_path)[-2][1])


@pytest.mark.parametrize("algorithm", ["py1e", "naive"])
def test_an_order_of_mosaicml_streaming_is_accumulated_as_it_was_planned(
    shards: Path, tmp_path: Path, algorithm: str
) -> None:
    dataset = {"shuffle_algo": algorithm, "num_canonical_nodes": 1}
    runs = [Run(shards, tmp_path, max_epochs=1, accumulate_grad_batches=k, dataset=dataset, val=False) for k in (1, 2)]
    for run in runs:
        assert sorted(number for ids in run.steps.values() for number in ids) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_broken_off_early_under_a_cache_limit_hold_no_shard(tmp_path: Path, workers: int) -> None:
    shards = write_shards(tmp_path / "set")
    size = max(path.stat().st_size for path in shards.glob("*.mds"))
    dataset = StreamingDataset(
        remote=shards, local=tmp_path / "cache", shuffle=True, cache_limit=12 * size, num_canonical_nodes=1, window=2
    )
    loader = StreamingDataLoader(dataset, 8, num_workers=workers)
    for _ in range(6 if workers else 20):
        for number, batch in enumerate(loader):
            assert len(batch["id"]) == 8
            if number == 1:
                break


def draws(_: list[Any]) -> Any:
    return torch.rand(2)


def test_what_a_collate_fn_draws_repeats_in_no_epoch_and_on_no_rank_and_is_the_same_for_any_workers(
    shards: Path,
) -> None:
    def drawn(workers: int, rank: int) -> list[Any]:
        loader = StreamingDataLoader(
            StreamingDataset(remote=shards, shuffle=True), 16, num_workers=workers, collate_fn=draws,
            world=World(rank, 2, 2),
        )  # fmt: skip
        return [batch.tolist() for _ in range(2) for batch in loader]

    first, second = drawn(0, 0), drawn(0, 1)
    assert drawn(1, 0) == first
    assert len({str(one) for one in first + second}) == len(first) + len(second)
