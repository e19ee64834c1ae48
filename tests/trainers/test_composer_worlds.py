"""Chains of runs over different worlds under Composer: its own launcher, and torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the trainers need torch: uv sync")
pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from support.composer_chains import launch, newest, ranks_of, steps_of  # noqa: E402
from support.composer_runs import (  # noqa: E402
    EPOCHS,
    GLOBAL_BATCH,
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    Run,
    checkpoints,
    write_shards,
)

from lightning_stream.trainers.checkpoints import read_position  # noqa: E402

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("default::UserWarning:composer"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]
STEPS = EPOCHS * STEPS_PER_EPOCH
STOPS = [7, 11, 25, STEPS]


def run_chain(
    tmp_path: Path, shards: Path, worlds: list[int], launcher: str, stops: list[int], **options: Any
) -> dict[int, list[int]]:
    """Stop after every few steps and continue in the next world; each step gets the samples of an uninterrupted run."""
    load_path, seen, losses = None, {}, {}
    for link, (world, stop) in enumerate(zip(worlds, stops, strict=True)):
        out = tmp_path / f"link{link}"
        launch(
            out, shards, world, launcher,
            load_path=load_path, max_duration=f"{stop}ba", **{"save_interval": "100ba", **options},
        )  # fmt: skip
        seen |= steps_of(out)
        losses |= {int(step): loss for step, loss in ranks_of(out)[0]["losses"].items()}
        last, path = newest(out)
        assert last == stop
        load_path = str(path)
    data = options.get("data", {})
    if data.get("batching_method") == "device_per_stream":  # its blocks are the first run's batch on one device
        launch(tmp_path / "whole", shards, worlds[0], launcher, data=data, max_duration=f"{stops[-1]}ba")
        assert seen == steps_of(tmp_path / "whole")
        return seen
    whole = Run(shards, tmp_path / "whole", data=data, max_duration=f"{stops[-1]}ba")
    assert seen == whole.steps
    assert losses == pytest.approx(whole.losses, abs=1e-6)
    return seen


def test_a_chain_over_1_2_and_1_devices_is_exact_and_evaluates_each_sample_once(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path / "whole", max_duration="14ba")
    first = Run(shards, tmp_path / "first", max_duration="4ba", save_interval="4ba")
    load_path = str(checkpoints(tmp_path / "first")[4])
    launch(
        tmp_path / "second", shards, 2, load_path=load_path, max_duration="11ba", save_interval="11ba", evaluates="5ba"
    )
    last = Run(shards, tmp_path / "last", newest(tmp_path / "second")[1], max_duration="14ba")
    assert first.steps | steps_of(tmp_path / "second") | last.steps == whole.steps
    assert last.losses == pytest.approx({step: whole.losses[step] for step in (11, 12, 13)}, abs=1e-6)

    ranks = [rank["evaluations"] for rank in ranks_of(tmp_path / "second")]
    assert [step for step, _ in ranks[0]] == [step for step, _ in ranks[1]] == [5, 10, 11]
    for (_, one), (_, other) in zip(*ranks, strict=True):
        assert sorted(one + other) == list(range(NUM_SAMPLES))


def test_torchrun_continues_at_the_end_of_an_epoch(shards: Path, tmp_path: Path) -> None:
    """Right after the tail, and without NODE_RANK, which Composer needs to load."""
    options: dict[str, Any] = {"save_interval": "1ep", "data": {"num_workers": 2, "persistent_workers": True}}
    first = Run(shards, tmp_path / "first", max_duration="1ep", save_interval="1ep")
    path = checkpoints(tmp_path / "first")[STEPS_PER_EPOCH]
    launch(tmp_path / "second", shards, 2, "torchrun", load_path=str(path), max_duration="2ep", **options)
    whole = Run(shards, tmp_path / "whole", max_duration="2ep")
    assert first.steps | steps_of(tmp_path / "second") == whole.steps


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("launcher", ["composer", "torchrun"])
@pytest.mark.parametrize("worlds", [[1, 2, 4, 1], [4, 1, 2]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data": {"num_workers": 2}, "device_train_microbatch_size": 3},
        {"data": {"num_workers": 2, "persistent_workers": True}, "evaluates": "5ba"},
    ],
    ids=str,
)
def test_longer_chains_are_exact(
    shards: Path, tmp_path: Path, worlds: list[int], launcher: str, options: dict[str, Any]
) -> None:
    run_chain(tmp_path, shards, worlds, launcher, STOPS[-len(worlds) :], **options)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["random", "stratified", "per_stream", "device_per_stream"])
def test_mixtures_are_exact_over_worlds(tmp_path: Path, method: str) -> None:
    write_shards(tmp_path / "mix" / "a", 100)
    write_shards(tmp_path / "mix" / "b", 67, first=100)
    data = {"mixture": {"a": 0.3, "b": 0.7}, "epoch_size": 160, "batching_method": method}
    run_chain(tmp_path, tmp_path / "mix", [4, 1, 2], "torchrun", [7, 10, 23], data=data)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_autoresume_continues_in_another_world(shards: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_name": "run", "autoresume": True, "save_interval": "7ba"}
    launch(tmp_path, shards, 1, max_duration="15ba", **options)
    first = steps_of(tmp_path)
    (tmp_path / "rank0of1.json").unlink()
    launch(tmp_path, shards, 2, **options)
    whole = Run(shards, tmp_path / "whole")
    assert first | steps_of(tmp_path) == whole.steps


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("signum", ["SIGTERM", "SIGKILL"])
def test_a_stopped_run_continues_from_its_last_checkpoint_in_another_world(
    shards: Path, tmp_path: Path, signum: str
) -> None:
    killed = tmp_path / "killed"
    assert launch(killed, shards, 2, stop_at=14, signal=signum, save_interval="3ba", data={"num_workers": 2})
    step, path = newest(killed)
    assert step == 12
    launch(tmp_path / "again", shards, 1, load_path=str(path))
    whole = Run(shards, tmp_path / "whole").steps
    assert steps_of(killed, below=step) | steps_of(tmp_path / "again") == whole


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ranks_that_share_samples_stop_and_resume_also_right_after_the_tail(shards: Path, tmp_path: Path) -> None:
    load_path, seen = None, {}
    for stop in (4, STEPS_PER_EPOCH, 14):
        out = tmp_path / str(stop)
        options = {"load_path": load_path, "max_duration": f"{stop}ba", "save_interval": "100ba"}
        launch(out, shards, 4, data={"replication": 2}, **options)
        assert steps_of(out, ranks=slice(0, 4, 2)) == steps_of(out, ranks=slice(1, 4, 2))
        seen |= steps_of(out, ranks=slice(0, 4, 2))
        load_path = str(newest(out)[1])
    whole = Run(shards, tmp_path / "whole", max_duration="14ba")
    assert seen == whole.steps
    state = torch.load(load_path, weights_only=False)["state"]["timestamp"]
    assert state["Timestamp"]["sample"] == sum(len(ids) for ids in seen.values())


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_sharded_checkpoints_continue_over_2_4_and_1_devices(shards: Path, tmp_path: Path) -> None:
    """FSDP2, which Composer runs on a CPU too; its optimizer's state over other worlds is not ours to compare."""
    options = {"parallelism_config": {"fsdp": {"state_dict_type": "sharded"}}, "save_interval": "100ba"}
    load_path, seen = None, {}
    for world, stop, epoch in ((2, 4, 0), (4, 14, 1), (1, 18, 1)):
        out = tmp_path / str(stop)
        launch(out, shards, world, "torchrun", load_path=load_path, max_duration=f"{stop}ba", **options)
        seen |= steps_of(out)
        load_path = str(out / "ckpt" / f"ep{epoch}-ba{stop}")
        assert read_position(load_path)["position"] == GLOBAL_BATCH * (stop - STEPS_PER_EPOCH * epoch)
    assert seen == Run(shards, tmp_path / "whole", max_duration="18ba").steps


def test_an_evaluation_of_fewer_samples_than_devices_is_refused(tmp_path: Path) -> None:
    from lightning_stream import World
    from lightning_stream.trainers.composer.spec import data_spec

    write_shards(tmp_path, 3)
    with pytest.raises(ValueError, match="3 samples do not suffice for 4 devices"):
        data_spec(remote=tmp_path, batch_size=2, evaluation=True, world=World(0, 4, 4))
