"""A run stopped under Composer continues exactly; one process, so that many ways fit into CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from support.composer_runs import (  # noqa: E402
    EPOCHS,
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    Run,
    checkpoints,
    expect_exact,
    write_shards,
)
from support.filter_runs import NotDivisible  # noqa: E402

from lightning_stream import Stream, StreamingDataset  # noqa: E402
from lightning_stream.errors import SettingsMismatch, SnapshotMismatch, StateError  # noqa: E402
from lightning_stream.trainers.composer.spec import data_spec  # noqa: E402

# What Composer itself says of small runs on a CPU; and torch of forks, which Composer's threads make.
pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning:composer"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]


def test_every_epoch_trains_on_every_sample_once(shards: Path, tmp_path: Path) -> None:
    run = Run(shards, tmp_path)
    assert len(run.steps) == EPOCHS * STEPS_PER_EPOCH
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        assert sorted(number for step in steps for number in run.steps[step]) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    "stops", [(4, 11, 14), pytest.param(range(1, 33), marks=pytest.mark.nightly)], ids=["few", "many"]
)
@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.5},
        {"dropout": 0.5, "evaluates": "4ba"},
        {"dropout": 0.5, "evaluates": "1ep"},
        {"dropout": 0.5, "data": {"num_workers": 2}},
        {"dropout": 0.5, "data": {"num_workers": 2, "workers": "threads"}},
        {"dropout": 0.5, "data": {"num_workers": 2, "persistent_workers": True}},
        {"dropout": 0.5, "device_train_microbatch_size": 5},
        {"train_subset_num_batches": 6},
        {"train_subset_num_batches": 1},
        {"data": {"tail": "drop"}},
        {"data": {"tail": "exact"}},
        {"data": {"filter": NotDivisible(5), "exclude_ids": range(7)}},
        {"max_duration": "400sp"},
        {"data": {"batch_size": 16, "global_batch_size": None}},
        {"data": {"shuffle_algo": "py1e"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_run_resumed_from_any_of_its_checkpoints_continues_exactly(
    shards: Path, tmp_path: Path, options: dict[str, Any], stops: tuple[int, ...]
) -> None:
    whole = Run(shards, tmp_path, save_interval="1ba", **options)
    last = max(whole.steps) + 1
    for step, path in checkpoints(tmp_path).items():
        if step in stops and step < last:
            resumed = Run(shards, tmp_path / "again", path, **options)
            expect_exact(whole, resumed, step)
            # An evaluation at an epoch's end comes after the checkpoint of its last batch.
            due = step if options.get("evaluates") == "1ep" else step + 1
            assert resumed.noted.evaluations == [e for e in whole.noted.evaluations if e[0] >= due]


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_may_be_started_by_any_method(shards: Path, tmp_path: Path, method: str) -> None:
    options = {"data": {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}}
    whole = Run(shards, tmp_path, save_interval="1ba", dropout=0.5, **options)
    for step in (4, 11):
        resumed = Run(shards, tmp_path / "again", checkpoints(tmp_path)[step], dropout=0.5, **options)
        expect_exact(whole, resumed, step)


@pytest.mark.parametrize("options", [{}, {"train_subset_num_batches": 6}, {"evaluates": "1ep"}], ids=str)
def test_a_checkpoint_at_the_end_of_an_epoch_starts_the_next(
    shards: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = Run(shards, tmp_path, save_interval="1ep", dropout=0.5, **options)
    for step, path in list(checkpoints(tmp_path).items())[:-1]:
        expect_exact(whole, Run(shards, tmp_path / "again", path, dropout=0.5, **options), step)


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


def test_a_clock_set_back_leaves_the_data_where_it_is(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path)
    parts = Run(shards, tmp_path, max_duration=None, fit=[{"duration": "4ba"}, {"duration": "9ba", "reset_time": True}])
    ids = [number for step in range(13) for number in whole.steps[step]]
    again = [number for _, step in sorted(parts.model.steps.items()) for number in step]
    assert sorted(again) == sorted(ids)


MIXTURES: list[dict[str, Any]] = [
    {"batching_method": "random"},
    {"batching_method": "stratified"},
    {"batching_method": "per_stream"},
    {"batching_method": "device_per_stream"},
]


@pytest.mark.parametrize("options", MIXTURES, ids=str)
def test_a_mixture_continues_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    write_shards(tmp_path / "a", 100)
    write_shards(tmp_path / "b", 67, first=100)
    data = {
        "streams": [Stream(remote=tmp_path / "a", proportion=0.3), Stream(remote=tmp_path / "b", proportion=0.7)],
        "remote": None,
        "epoch_size": 160,
        **options,
    }
    whole = Run(None, tmp_path, save_interval="1ba", dropout=0.5, data=data)
    for step in (4, 10, 14):
        resumed = Run(None, tmp_path / "again", checkpoints(tmp_path)[step], dropout=0.5, data=data)
        expect_exact(whole, resumed, step)


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
    with pytest.raises(TypeError, match="not both: found a StreamingDataset and shuffle"):
        data_spec(StreamingDataset(remote=shards), batch_size=16, shuffle=True)
    with pytest.raises(ValueError, match="on_missing_state"):
        data_spec(remote=shards, batch_size=16, on_missing_state="ignore")  # type: ignore[arg-type]


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
    from composer.loggers import InMemoryLogger

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
    from composer.loggers import InMemoryLogger

    shards, logger, silent = write_shards(tmp_path / "damaged"), InMemoryLogger(), InMemoryLogger()
    index = json.loads((shards / "index.json").read_text())
    num_bad = index["shards"][3]["samples"]
    (shards / index["shards"][3]["raw_data"]["basename"]).unlink()
    data = {"local": tmp_path / "cache", "on_bad_shard": "substitute", "quarantine": tmp_path / "bad"}
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
