"""A run stopped under Composer continues exactly; one process, so that many ways fit into CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from composer import Algorithm, Callback, DataSpec, Event, Trainer  # noqa: E402
from composer.checkpoint import get_resumption_state_dict  # noqa: E402
from composer.loggers import InMemoryLogger  # noqa: E402
from composer.utils.checkpoint import load_checkpoint  # noqa: E402
from support.chains import SIZES, Chain, Link, number_row, without_tokens, write_streams  # noqa: E402
from support.composer_host import HOST, made  # noqa: E402
from support.composer_runs import NUM_SAMPLES, STEPS_PER_EPOCH, Recorder, Run, checkpoints  # noqa: E402
from support.resume_contract import (  # noqa: E402
    EPOCHS,
    WARNINGS,
    Stopped,
    expect_every_resume_exact,
    expect_exact,
    from_step,
    raise_stopped,
    write_shards,
)

from lightning_stream import (  # noqa: E402
    Packing,
    Schedule,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    World,
    data_spec,
)
from lightning_stream.dataset import source_of  # noqa: E402
from lightning_stream.errors import SettingsMismatch, SnapshotMismatch, StateError  # noqa: E402

pytestmark = WARNINGS


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_may_be_started_by_any_method(shards: Path, tmp_path: Path, method: str) -> None:
    data = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    expect_every_resume_exact(HOST, shards, tmp_path, (4, 11), dropout=0.5, data=data)


@pytest.mark.parametrize("limit", [1, 3])
def test_limited_epochs_of_torchs_loader_continue_exactly(shards: Path, tmp_path: Path, limit: int) -> None:
    chain, link = Chain(0, {}, {}, limit=limit), Link("torch", options={"save_interval": "1ba"})
    whole = HOST.run_link(shards, tmp_path, chain, link, World(), None, {})
    for stop, path in checkpoints(tmp_path).items():
        if stop < 3 * limit:
            again = HOST.run_link(shards, tmp_path / str(stop), chain, link, World(), path, {})
            assert again.steps == from_step(whole.steps, stop)


@pytest.mark.parametrize("algorithm", ["py1s", "py2s"])
def test_an_order_that_repeats_samples_takes_as_many_batches_of_an_epoch_after_a_resume_as_without(
    shards: Path, tmp_path: Path, algorithm: str
) -> None:
    """Its 64 canonical nodes deliver 192 samples of 167 in 12 batches, some inside the epoch; Composer takes 11."""
    chain, link = Chain(0, {"shuffle_algo": algorithm}, {}), Link("torch", options={"save_interval": "1ba"})
    whole = HOST.run_link(shards, tmp_path, chain, link, World(), None, {})
    assert len(whole.steps) == EPOCHS * STEPS_PER_EPOCH
    saved = checkpoints(tmp_path)
    for stop in (4, 9, 10, 11, 20, 32):
        path = saved[stop]
        again = HOST.run_link(shards, tmp_path / str(stop), chain, link, World(), path, {})
        assert again.steps == from_step(whole.steps, stop)


@pytest.mark.parametrize("hook", ["before_dataloader", "batch_start", "after_forward"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_checkpoint_in_an_epochs_first_batch_of_torchs_loader_is_refused(
    shards: Path, tmp_path: Path, epoch: int, hook: str
) -> None:
    """Composer tells the dataset that no sample of the epoch was trained on, as it does at the end of an epoch."""

    class Saves(Callback):
        def run_event(self, event: Any, state: Any, logger: Any) -> None:
            if event.value == hook and int(state.timestamp.epoch) == epoch:
                state.state_dict()

    dataset = StreamingDataset(remote=shards, shuffle=True, batch_size=16)
    next(iter(dataset))
    loader = torch.utils.data.DataLoader(dataset, 16)
    run = Run(shards, tmp_path, max_duration="2ep", spec=loader, callbacks=[Saves()], raises=StateError)
    assert isinstance(run.error, StateError)
    assert "in an epoch's first one" in str(run.error)


@pytest.mark.parametrize("counted", [16, 8])
def test_a_checkpoint_that_counts_the_samples_of_torchs_loader_once_for_each_rank_that_shares_them_is_refused(
    shards: Path, tmp_path: Path, counted: int
) -> None:
    dataset = StreamingDataset(remote=shards, shuffle=True, batch_size=16, world=World(0, 2, 2, replication=2))
    loader = torch.utils.data.DataLoader(dataset, 16)
    # As the clock of two ranks adds it up: 32 samples of a batch that has 16, or each rank's half of them.
    spec = DataSpec(loader, get_num_samples_in_batch=lambda _: 2 * counted)
    run = Run(shards, tmp_path, max_duration="2ba", spec=spec, save_interval="1ba", raises=StateError)
    assert (run.error is None) == (counted == 8)
    assert counted == 8 or "found 32 samples in a batch of 16. Train on data_spec" in str(run.error)


@pytest.mark.parametrize("corrects", [True, False])
def test_a_checkpoint_that_counts_rows_in_place_of_samples_is_warned_of_unless_the_dataset_corrects_them(
    shards: Path, tmp_path: Path, corrects: bool, recwarn: pytest.WarningsRecorder
) -> None:
    class Corrects(StreamingDataset):
        def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:  # type: ignore[override]
            return super().state_dict(4 * num_samples, from_beginning)

    dataset = (Corrects if corrects else StreamingDataset)(remote=shards, shuffle=True, batch_size=16)
    packed = DataSpec(torch.utils.data.DataLoader(dataset, 16), get_num_samples_in_batch=lambda _: 4)
    Run(shards, tmp_path, max_duration="3ba", spec=packed, save_interval="1ba")
    assert any("found 4 of a batch of 16 samples" in str(one.message) for one in recwarn) is not corrects


def test_batches_that_ranks_share_may_become_smaller_inside_an_epoch(shards: Path, tmp_path: Path) -> None:
    def halved(batch_size: int) -> DataSpec:
        world = World(0, 2, 2, replication=2)
        dataset = StreamingDataset(remote=shards, shuffle=True, batch_size=batch_size, world=world)
        loader = torch.utils.data.DataLoader(dataset, batch_size)
        return DataSpec(loader, get_num_samples_in_batch=lambda _: batch_size)

    Run(shards, tmp_path, max_duration="2ba", spec=halved(16), save_interval="1ba")
    checkpoint = next(tmp_path.rglob("*ba2*"))
    run = Run(shards, tmp_path / "on", checkpoint, max_duration="4ba", spec=halved(8), save_interval="1ba")
    assert run.error is None


@pytest.mark.parametrize("source", ["torch", "bare", "spec"])
def test_composers_functions_for_checkpoints_hold_the_position_that_its_trainer_saves(
    shards: Path, tmp_path: Path, source: str
) -> None:
    """They ask the dataset without the trainer's state, also between epochs that end before their data."""
    compared: list[str] = []

    class Compares(Callback):
        def run_event(self, event: Any, state: Any, logger: Any) -> None:
            if event.value in ("fit_start", "batch_end", "epoch_end", "epoch_checkpoint"):
                saved = state.state_dict()["dataset_state"]["train"]
                assert get_resumption_state_dict(state)["dataset_state"]["train"] == saved
                compared.append(event.value)

    spec = made(shards, Link(source), Chain(0, {"shuffle_algo": "py1s"}, {}))
    Run(shards, tmp_path, max_duration="2ep", spec=spec, callbacks=[Compares()], train_subset_num_batches=3)
    assert len(compared) == 1 + 2 * (3 + 1 + 1)


@pytest.mark.parametrize("source", ["bare", "DataSpec", "spec"])
def test_a_checkpoint_from_before_the_first_batch_resumes_exactly(shards: Path, tmp_path: Path, source: str) -> None:
    class Saves(Callback):
        def epoch_start(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 0:
                next(iter(state.train_dataloader))
                run.trainer.save_checkpoint(str(tmp_path / "ba0.pt"))

    class Started(Run):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal run
            run = self
            super().__init__(*arguments, **options)

    def made() -> Any:
        dataset = StreamingDataset(remote=shards, shuffle=True)
        if source == "spec":
            return data_spec(dataset, global_batch_size=16)
        loader = StreamingDataLoader(dataset, global_batch_size=16)
        return DataSpec(loader) if source == "DataSpec" else loader

    run: Any = None
    whole = Started(shards, tmp_path, spec=made(), callbacks=[Saves()], max_duration="6ba")
    expect_exact(whole, Run(shards, tmp_path, tmp_path / "ba0.pt", spec=made(), max_duration="6ba"), 0)


def test_batches_of_a_budget_are_evaluated_whole_by_composers_own_cutting(tmp_path: Path) -> None:
    folder = write_streams(tmp_path / "data") / "a"
    dataset = StreamingDataset(remote=folder, transform=without_tokens, batch_tokens=700)
    loader = StreamingDataLoader(dataset, evaluation=True)
    seen: list[int] = []

    class Notes(Callback):
        def eval_batch_start(self, state: Any, logger: Any) -> None:
            seen.extend(state.batch["id"].tolist())

    options: dict[str, Any] = {"eval_dataloader": loader, "eval_interval": "1ba", "max_duration": "1ba"}
    Run(folder, tmp_path, dataset={"transform": without_tokens}, callbacks=[Notes()], **options)
    assert sorted(seen) == list(range(SIZES["a"]))


@pytest.mark.parametrize("is_bare", [True, False])
def test_training_ends_where_all_streams_of_a_mixture_have_ended(tmp_path: Path, is_bare: bool) -> None:
    write_streams(tmp_path / "data")
    streams = [Stream(remote=tmp_path / "data" / name, name=name) for name in SIZES]
    schedule = Schedule([(0, {"a": 1, "b": 1})], exhausted="stop")
    dataset = StreamingDataset(streams=streams, schedule=schedule, epoch_size=152, transform=without_tokens)
    spec = (StreamingDataLoader if is_bare else data_spec)(dataset, global_batch_size=16)
    run = Run(tmp_path, tmp_path, spec=spec, max_duration="100ba")
    assert sorted(one for ids in run.steps.values() for one in ids) == [*range(260), *range(1000, 1140)]


@pytest.mark.parametrize("is_bare", [True, False])
def test_the_dataset_may_be_evaluated_by_a_loader_of_its_own(shards: Path, tmp_path: Path, is_bare: bool) -> None:
    def run(folder: Path, path: Path | None = None, **options: Any) -> Run:
        dataset = StreamingDataset(remote=shards, shuffle=True)
        spec = (StreamingDataLoader if is_bare else data_spec)(dataset, global_batch_size=16)
        evaluation = StreamingDataLoader(getattr(spec, "dataloader", spec).dataset, 8)
        options |= {"eval_dataloader": evaluation, "eval_interval": "2ba", "max_duration": "5ba"}
        return Run(shards, folder, path, spec=spec, **options)

    whole = run(tmp_path, save_at=(2, 3))
    for stop, path in checkpoints(tmp_path).items():
        expect_exact(whole, run(tmp_path / str(stop), path), stop)


def test_the_clock_counts_tokens_without_padding_also_after_a_resume_and_in_micro_batches(tmp_path: Path) -> None:
    folder = write_streams(tmp_path / "data") / "a"
    rows = {"pack": Packing(row_length=40, window=50), "transform": with_tokens}

    class Clock(Callback):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def batch_end(self, state: Any, logger: Any) -> None:
            self.tokens.append(int(state.timestamp.token))

    loader = StreamingDataLoader(StreamingDataset(remote=folder, shuffle=True, **rows), 16)
    counts = [int((batch["input_ids"] != 0).sum()) for _ in range(3) for batch in loader][:20]
    wanted = [sum(counts[: number + 1]) for number in range(20)]
    clocks = [Clock(), Clock()]
    options = {"dataset": rows, "save_at": (12,)}
    Run(folder, tmp_path, max_duration="12ba", callbacks=clocks[:1], device_train_microbatch_size=5, **options)
    path = checkpoints(tmp_path)[12]
    Run(folder, tmp_path / "b", path, dataset=rows, max_duration=f"{wanted[19]}tok", callbacks=clocks[1:])
    assert clocks[0].tokens + clocks[1].tokens == wanted


@pytest.mark.parametrize("source", ["loader", "spec"])
def test_a_duration_in_tokens_is_an_error_where_batches_have_none(shards: Path, tmp_path: Path, source: str) -> None:
    class Ends(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 3:
                state.stop_training()

    loader = StreamingDataLoader(StreamingDataset(remote=shards), 16)
    spec = loader if source == "loader" else data_spec(remote=shards, batch_size=16)
    run = Run(shards, tmp_path, spec=spec, max_duration="90tok", callbacks=[Ends()], raises=ValueError)
    assert "max_duration=90tok counts tokens, and the batch had none. Name their column" in str(run.error)


def with_tokens(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **number_row(row)}


def test_autoresume_continues_where_the_run_was_left(shards: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_name": "run", "autoresume": True, "save_interval": "7ba", "dropout": 0.5}
    whole = Run(shards, tmp_path / "whole", **options)
    first = Run(shards, tmp_path, max_duration="15ba", **options)
    second = Run(shards, tmp_path, **options)
    assert first.steps | second.steps == whole.steps
    assert second.weights == whole.weights


def test_fitting_in_parts_equals_fitting_at_once(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path, dropout=0.5)
    parts = Run(
        shards, tmp_path, dropout=0.5, max_duration=None, fit=[{"duration": f"{n}ba"} for n in (4, 7, 11, 3, 8)]
    )
    assert parts.steps == whole.steps
    assert parts.weights == whole.weights


def test_a_second_fit_may_take_another_loader_which_begins_at_its_start(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path, max_duration="1ep").steps
    other = data_spec(remote=shards, shuffle=True, global_batch_size=16)
    both = Run(shards, tmp_path, max_duration="5ba", fit=[{}, {"train_dataloader": other, "duration": "1ep"}]).steps
    assert [both[step] for step in range(5)] == [whole[step] for step in range(5)]
    assert [both[step] for step in range(5, len(both))] == list(whole.values())


class SavesAfterABatch(Algorithm):  # type: ignore[misc]  # Composer has no types
    """Saves when Composer's clock has counted a batch: algorithms are asked before all callbacks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def match(self, event: Event, state: Any) -> bool:
        return event == Event.BATCH_END and int(state.timestamp.batch) == 5

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        state.model.trainer.save_checkpoint(str(self.path))


def test_a_checkpoint_from_before_our_own_event_has_the_batch_that_the_clock_has(shards: Path, tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    whole = Run(shards, tmp_path, algorithms=[SavesAfterABatch(path)]).steps
    assert Run(shards, tmp_path, path).steps == from_step(whole, 5)


class FailsOnce(Recorder):
    """Ends its first evaluation by an error."""

    has_failed = False

    def eval_forward(self, batch: dict[str, Any], outputs: Any = None) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise_stopped()
        return super().eval_forward(batch, outputs)


@pytest.mark.parametrize("during", ["fit", "eval"])
def test_no_fit_trains_on_the_data_of_an_evaluation_that_an_error_ended(
    shards: Path, tmp_path: Path, during: str
) -> None:
    """Composer leaves the loader of that evaluation in the place of its training loader."""
    whole = Run(shards, tmp_path, max_duration="6ba").steps
    spec = data_spec(remote=shards, shuffle=True, global_batch_size=16)
    other = data_spec(remote=shards, batch_size=32, evaluation=True)
    model = FailsOnce()
    options = {"device": "cpu", "progress_bar": False, "eval_interval": "4ba", "eval_dataloader": other}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.trainer = Trainer(model=model, train_dataloader=spec, optimizers=optimizer, max_duration="6ba", **options)
    with pytest.raises(Stopped):
        model.trainer.fit() if during == "fit" else model.trainer.eval()
    with pytest.raises(StateError, match="train_dataloader= to fit"):
        model.trainer.fit()
    model.trainer.fit(train_dataloader=spec)
    model.trainer.close()
    assert {step: sorted(ids) for step, ids in model.steps.items()} == whole


def test_a_loader_continues_where_it_was_left_while_its_trainer_trained_on_another(
    shards: Path, tmp_path: Path
) -> None:
    whole = Run(shards, tmp_path, max_duration="12ba").steps
    spec, other = (data_spec(remote=shards, shuffle=True, global_batch_size=16) for _ in range(2))
    fit = [{"duration": "5ba"}, {"train_dataloader": other, "duration": "13ba"}]
    fit += [{"train_dataloader": spec, "duration": "7ba"}]
    parts = Run(shards, tmp_path, spec=spec, max_duration=None, fit=fit).steps
    assert [parts[step] for step in (*range(5), *range(18, 25))] == list(whole.values())


def test_a_checkpoint_of_a_later_epoch_may_be_loaded_between_two_fits(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path, save_at=(14,), max_duration="23ba").steps

    class Loads(Callback):
        def fit_end(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 3:
                load_checkpoint(str(checkpoints(tmp_path)[14]), state, logger)

    fit = [{"duration": "3ba"}, {"duration": "9ba"}]
    parts = Run(shards, tmp_path, max_duration=None, fit=fit, callbacks=[Loads()])
    assert from_step(parts.steps, 3) == from_step(whole, 14)
    assert Run(shards, tmp_path, spec=parts.spec, max_duration="3ba").steps == {step: whole[step] for step in range(3)}


def with_token(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "input_ids": 1}


def test_iterations_of_tokens_end_anywhere_in_an_epoch(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path, max_duration="14ba").steps

    class Iterations(Callback):
        num_asked = 0

        def init(self, state: Any, logger: Any) -> None:
            state._iteration_length = "50tok"

        def before_dataloader(self, state: Any, logger: Any) -> None:
            self.num_asked += 1
            assert self.num_asked < 50, "it asks for ever"

    dataset = {"transform": with_token}
    assert Run(shards, tmp_path, dataset=dataset, callbacks=[Iterations()], max_duration="14ba").steps == whole


def test_a_clock_set_back_leaves_the_data_where_it_is(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path)
    parts = Run(shards, tmp_path, max_duration=None, fit=[{"duration": "4ba"}, {"duration": "9ba", "reset_time": True}])
    ids = [number for step in range(13) for number in whole.steps[step]]
    again = [number for _, step in sorted(parts.model.steps.items()) for number in step]
    assert sorted(again) == sorted(ids)


def test_a_closed_trainer_keeps_no_shard_open_though_composer_keeps_it(shards: Path, tmp_path: Path) -> None:
    run = Run(shards, tmp_path, max_duration="1ep")
    run.trainer.close()
    assert len(source_of(run.spec.dataloader.streaming).reader.shards.pool.open) == 0


# What a checkpoint holds


def test_the_data_state_is_json_under_one_key_at_any_time(shards: Path, tmp_path: Path) -> None:
    spec = data_spec(remote=shards, shuffle=True, batch_size=16)
    fresh = spec.dataloader.dataset.state_dict(0, True)
    run = Run(shards, tmp_path, save_interval="4ba", spec=spec)
    for path in checkpoints(tmp_path).values():
        saved = torch.load(path, weights_only=False)["state"]["dataset_state"]["train"]
        assert saved.keys() == fresh.keys() == {"lightning_stream"}
        assert isinstance(saved["lightning_stream"], str)
    assert json.loads(fresh["lightning_stream"])["position"] == 0
    assert run.trainer.state.dataset_resumption["train"]


def test_without_a_trainer_the_protocol_counts_samples_of_the_epoch(shards: Path) -> None:
    spec = data_spec(remote=shards, shuffle=True, batch_size=16)
    batches = iter(spec.dataloader)
    for _ in range(3):
        next(batches)
    state = spec.dataloader.dataset.state_dict(32, True)
    expected = next(batches := iter(_positioned(shards, 32)))
    other = data_spec(remote=shards, shuffle=True, batch_size=16)
    other.dataloader.dataset.load_state_dict(state)
    assert next(iter(other.dataloader))["id"].tolist() == expected["id"].tolist()
    assert json.loads(spec.dataloader.dataset.state_dict(0, True)["lightning_stream"])["epoch"] == 1


def _positioned(shards: Path, position: int) -> Any:
    loader = data_spec(remote=shards, shuffle=True, batch_size=16).dataloader
    for count, batch in enumerate(loader):
        if count * 16 >= position:
            yield batch


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_holds_the_position(shards: Path, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    def state_of(spec: Any) -> dict[str, Any]:
        return {"state": {"dataset_state": {"train": spec.dataloader.dataset.state_dict(48, True), "eval": {}}}}

    saving = data_spec(remote=shards, shuffle=True, batch_size=16)
    next(iter(saving.dataloader))
    dcp.save(state_of(saving), checkpoint_id=tmp_path, no_dist=True)
    loading = data_spec(remote=shards, shuffle=True, batch_size=16)
    template = {"state": {"dataset_state": {"train": loading.dataloader.dataset.state_dict(0, True), "eval": {}}}}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    loading.dataloader.dataset.load_state_dict(template["state"]["dataset_state"]["train"])
    assert loading.dataloader.position.position == 48


def test_the_data_state_loads_with_weights_only(shards: Path, tmp_path: Path) -> None:
    state = data_spec(remote=shards, batch_size=16).dataloader.dataset.state_dict(0, True)
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state


def test_a_damaged_state_is_refused(shards: Path) -> None:
    dataset = data_spec(remote=shards, batch_size=16).dataloader.dataset
    for state in ({"lightning_stream": "{"}, {"lightning_stream": "{}"}, {"lightning_stream": 3}, {}):
        with pytest.raises(StateError):
            dataset.load_state_dict(state)


def test_other_data_or_settings_are_refused(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, save_interval="4ba", max_duration="8ba")
    path = checkpoints(tmp_path)[4]
    with pytest.raises(SettingsMismatch, match="seed was 9176 and is 7 now"):
        Run(shards, tmp_path / "again", path, data={"shuffle_seed": 7})
    write_shards(tmp_path / "other", 100)
    with pytest.raises(SnapshotMismatch, match="167 samples"):
        Run(tmp_path / "other", tmp_path / "again", path)


# What is missing is said


def test_a_checkpoint_without_a_position_restarts_the_data_with_a_warning(shards: Path) -> None:
    dataset = data_spec(remote=shards, batch_size=16, on_missing_state="restart").dataloader.dataset
    with pytest.warns(UserWarning, match="this one holds none.* The data begins from its start"):
        dataset.load_state_dict(None)
    dataset = data_spec(remote=shards, batch_size=16).dataloader.dataset
    with pytest.raises(StateError, match="on_missing_state='restart'"):
        dataset.load_state_dict(None)


@pytest.mark.parametrize("source", ["data_spec", "torch"])
def test_a_position_whose_keys_are_ignored_is_missing(shards: Path, tmp_path: Path, source: str) -> None:
    def spec(**options: Any) -> Any:
        if source == "data_spec":
            return data_spec(remote=shards, shuffle=True, batch_size=16, **options)
        return torch.utils.data.DataLoader(StreamingDataset(remote=shards, shuffle=True, batch_size=16), batch_size=16)

    first = Run(shards, tmp_path, spec=spec(), save_interval="3ba", max_duration="3ba")
    options = {"load_ignore_keys": ["state/dataset_state/train/*"], "max_duration": "6ba"}
    with pytest.raises(StateError, match="this one holds none"):
        Run(shards, tmp_path / "again", checkpoints(tmp_path)[3], spec=spec(), **options)
    if source == "data_spec":
        restarted = spec(on_missing_state="restart")
        with pytest.warns(UserWarning, match="The data begins from its start"):
            again = Run(shards, tmp_path / "again", checkpoints(tmp_path)[3], spec=restarted, **options)
        assert list(again.steps.values()) == list(first.steps.values())


@pytest.mark.parametrize("step", [14, 22])
def test_a_position_that_was_not_loaded_restarts_the_data_with_a_warning(
    shards: Path, tmp_path: Path, step: int
) -> None:
    whole = Run(shards, tmp_path, save_interval="1ba")
    options = {"load_ignore_keys": ["state/dataset_state"], "max_duration": f"{step + 3}ba"}
    restart = {"data": {"on_missing_state": "restart"}}
    with pytest.warns(UserWarning, match="loaded without its data position.* The data begins from its start"):
        run = Run(shards, tmp_path / "again", checkpoints(tmp_path)[step], **options, **restart)
    first = min(run.steps)
    assert [run.steps[first + k] for k in range(2)] == [whole.steps[k] for k in range(2)]
    with pytest.raises(StateError, match="loaded without"):
        Run(shards, tmp_path / "b", checkpoints(tmp_path)[step], **options)


def test_only_the_weights_may_be_loaded(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path, save_interval="5ba")
    again = Run(shards, tmp_path / "again", checkpoints(tmp_path)[5], load_weights_only=True)
    assert again.steps == whole.steps


# Around it


def test_a_spec_is_made_from_a_dataset_a_mapping_streams_or_keywords(shards: Path) -> None:
    made: list[Any] = [
        data_spec(StreamingDataset(remote=shards), batch_size=16),
        data_spec({"remote": shards}, batch_size=16),
        data_spec([Stream(remote=shards)], batch_size=16),
        data_spec(remote=shards, batch_size=16),
    ]
    assert {spec.num_samples for spec in made} == {NUM_SAMPLES}
    assert len({tuple(next(iter(spec.dataloader))["id"].tolist()) for spec in made}) == 1
    with pytest.raises(TypeError, match=r"data_spec takes a StreamingDataset, .* found StreamingDataLoader"):
        data_spec(StreamingDataLoader(StreamingDataset(remote=shards), 8), global_batch_size=16)
    with pytest.raises(TypeError, match="not both: found a StreamingDataset and shuffle"):
        data_spec(StreamingDataset(remote=shards), batch_size=16, shuffle=True)
    with pytest.raises(ValueError, match="on_missing_state"):
        data_spec(remote=shards, batch_size=16, on_missing_state="ignore")


def test_the_dataset_is_reached_through_the_loader(shards: Path) -> None:
    dataset = data_spec(remote=shards, batch_size=16).dataloader.dataset
    assert (len(dataset), dataset.size, dataset[3]["id"]) == (NUM_SAMPLES, NUM_SAMPLES, 3)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = dataset.no_such_thing


def test_transforms_see_batches_and_micro_batches(shards: Path, tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {"batch": [], "micro": []}

    def note(name: str) -> Any:
        def transform(batch: dict[str, Any]) -> dict[str, Any]:
            seen[name].append(len(batch["id"]))
            return {**batch, "x": batch["x"] * 2}

        return transform

    data = {"batch_transforms": note("batch"), "microbatch_transforms": note("micro")}
    Run(shards, tmp_path, max_duration="2ba", device_train_microbatch_size=6, data=data)
    assert seen["batch"] == [16, 16]
    assert sorted(set(seen["micro"])) == [4, 6]


def test_the_position_is_logged_and_in_the_progress_bar(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = InMemoryLogger()
    (tmp_path / "console").mkdir()
    with (tmp_path / "console" / "log").open("w+") as stream:
        Run(shards, tmp_path, max_duration="13ba", loggers=[logger], progress_bar=True, console_stream=stream)
        stream.seek(0)
        shown = stream.read()
    positions = [(int(time.batch), value) for time, value in logger.data["stream/position"]]
    assert positions[9:] == [(10, 160), (11, 167), (12, 16), (13, 32)]
    assert [value for _, value in logger.data["stream/epoch"]][10:] == [0, 1, 1]
    assert "at=0:160" in shown
    assert "at=1:32" in shown


def test_what_was_delivered_in_place_of_bad_samples_is_logged(tmp_path: Path) -> None:
    shards, logger, silent = write_shards(tmp_path / "damaged"), InMemoryLogger(), InMemoryLogger()
    index = json.loads((shards / "index.json").read_text())
    num_bad = index["shards"][3]["samples"]
    (shards / index["shards"][3]["raw_data"]["basename"]).unlink()
    data = {"local": tmp_path / "cache", "on_bad": {"shard": "substitute", "quarantine": tmp_path / "bad"}}
    Run(shards, tmp_path, max_duration="2ep", loggers=[logger], data=data)
    logged = [(int(time.epoch), value) for time, value in logger.data["stream/num_substituted"]]
    assert logged == [(1, num_bad), (2, 2 * num_bad), (2, 2 * num_bad)]  # as each epoch ended, and the fit
    Run(write_shards(tmp_path / "whole"), tmp_path, max_duration="1ba", loggers=[silent])
    assert "stream/num_substituted" not in silent.data


def test_torchruns_name_for_the_node_is_given_to_composer(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("NODE_RANK", "")
    monkeypatch.delenv("NODE_RANK")
    data_spec(remote=shards, batch_size=16)
    import os

    assert os.environ["NODE_RANK"] == "3"


def test_an_evaluation_of_fewer_samples_than_devices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 samples do not suffice for 4 devices"):
        data_spec(remote=write_shards(tmp_path, 3), batch_size=2, evaluation=True, world=World(0, 4, 4))
