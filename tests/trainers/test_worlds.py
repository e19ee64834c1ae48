"""Runs of several processes, as their launchers start them: over other worlds, and after bad ends, they stay exact."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from servers.ports import free_port
from support import documents
from support.chains import composed
from support.launches import Launched, launch, slurm, under, worker
from support.resume_contract import (
    EPOCHS,
    GLOBAL_BATCH,
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    WARNINGS,
    Steps,
    before_step,
    from_step,
    host_named,
    merged,
    write_shards,
)

from lightning_stream import read_position

pytestmark = [*WARNINGS, pytest.mark.distributed, pytest.mark.timeout(3600)]
slow, nightly = pytest.mark.slow, pytest.mark.nightly
STEPS = EPOCHS * STEPS_PER_EPOCH
STOPS = (7, 11, 25, STEPS)


def start(name: str, out: Path, shards: Path, world: int, launcher: str = "", **options: Any) -> Launched:
    """Run one link of a chain to its end: under torchrun, Composer's launcher, SLURM, or Lightning's own ("")."""
    host_named(name)  # or else it is skipped
    if name == "Lightning":
        options |= {"devices": world}
        options.setdefault("strategy", "ddp" if world > 1 else "auto")
    command = worker(name, shards, out, **options)
    if launcher == "slurm":
        return launch(out.parent, *[command] * world, envs=slurm(world), timeout_s=400)
    if world > 1 and launcher:
        command = under(launcher, world, command)
    return launch(out.parent, command, envs=[{"MASTER_PORT": str(free_port())}], timeout_s=400)


def run(name: str, out: Path, shards: Path, world: int, launcher: str = "", **options: Any) -> Path:
    """The same, which must end well; gives the last checkpoint."""
    done = start(name, out, shards, world, launcher, **options)
    assert done.code == 0, done.stdout[-3000:] + done.stderr[-5000:]
    saved = host_named(name).checkpoints(out)
    return saved[-1][1] if saved else out


def ranks_of(out: Path) -> list[dict[str, Any]]:
    """What each rank wrote."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]


def steps_of(out: Path, ranks: slice = slice(None)) -> Steps:
    """What fed the steps, over all ranks."""
    return merged(rank["steps"] for rank in ranks_of(out)[ranks])


def until(name: str, stop: int) -> dict[str, Any]:
    """Options that end a run after a step, with a checkpoint."""
    if name == "Lightning":
        return {"max_steps": stop, "max_epochs": -1}
    return {"max_duration": f"{stop}ba", "save_interval": "100ba"}


def expect_chain_exact(
    name: str, folder: Path, shards: Path, worlds: list[int], launcher: str = "torchrun", **options: Any
) -> None:
    """Stop after some steps and continue in the next world; each step gets the samples of an uninterrupted run.

    ``accumulate`` is by the number of devices; ``early`` stops by a callback; ``whole`` are the options of that run,
    and ``whole_on`` is its number of devices.
    """
    accumulate, early = options.pop("accumulate", {}), options.pop("early", False)
    stops, whole_on = options.pop("stops", STOPS[-len(worlds) :]), options.pop("whole_on", 1)
    alone = {**until(name, stops[-1]), **options.pop("whole", {})}
    if whole_on == 1:
        whole = host_named(name).run(shards, folder / "whole", **alone)
        expected, expected_losses = whole.steps, whole.losses
    else:
        run(name, folder / "whole", shards, whole_on, launcher, **alone)
        expected, expected_losses = steps_of(folder / "whole"), None
    path, seen, losses = None, {}, {}
    for number, (world, stop) in enumerate(zip(worlds, stops, strict=True)):
        out = folder / f"link{number}"
        link = {"stop_at": stop} if early else until(name, stop)
        if name == "Lightning":
            link["accumulate_grad_batches"] = accumulate.get(world, 1)
        path = run(name, out, shards, world, launcher, checkpoint=path, **{**link, **options})
        seen |= steps_of(out)
        losses |= {int(step): loss for step, loss in ranks_of(out)[0].get("losses", {}).items()}
        assert host_named(name).checkpoints(out)[-1][0] == stop
    assert seen == expected
    assert expected_losses is None or losses == pytest.approx(expected_losses, abs=1e-6)


# Chains over worlds

CHAINS = [
    pytest.param("Lightning", [1, 2, 1], "torchrun", {}, marks=nightly),
    pytest.param(
        "Lightning", [2, 1, 2], "torchrun", {"dataset": {"balance": "tokens"}, "accumulate": {1: 4, 2: 2}}, marks=slow
    ),
    pytest.param("Lightning", [2, 1], "", {"data": {"num_workers": 2, "persistent_workers": True}}, marks=slow),
    *(
        pytest.param("Lightning", worlds, launcher, options, marks=nightly)
        for launcher in ("torchrun", "")
        for worlds in ([1, 2, 4, 1], [4, 1, 2, 4])
        for options in ({}, {"data": {"num_workers": 2}, "accumulate": {1: 4, 2: 2}})
    ),
    *(
        pytest.param("Lightning", [2, 1, 2], "", {"strategy": strategy, "data": data}, marks=nightly)
        for strategy in ("ddp_spawn", "ddp_fork")
        for data in ({}, {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"})
    ),
    *(
        pytest.param(
            "Lightning", worlds, "", {"strategy": "fsdp2", "early": True, "module": {"reads_stepping_batches": True}},
            marks=nightly,
        )
        for worlds in ([2, 1, 2], [2, 4, 2])
    ),
    pytest.param("Lightning", [4, 1, 2, 1], "torchrun", {"early": True, "accumulate": {2: 2, 1: 4}}, marks=nightly),
    *(
        pytest.param("Composer", worlds, launcher, options, marks=nightly)
        for launcher in ("composer", "torchrun")
        for worlds in ([1, 2, 4, 1], [4, 1, 2])
        for options in (
            {},
            {"data": {"num_workers": 2}, "device_train_microbatch_size": 3},
            {"data": {"num_workers": 2, "persistent_workers": True}, "evaluates": "5ba"},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "worlds", "launcher", "options"), CHAINS, ids=str)
def test_a_chain_over_worlds_is_exact(
    shards: Path, tmp_path: Path, name: str, worlds: list[int], launcher: str, options: dict[str, Any]
) -> None:
    expect_chain_exact(name, tmp_path, shards, worlds, launcher, **options)


@slow
def test_composers_launcher_and_torchrun_continue_exactly_and_evaluate_each_sample_once(
    shards: Path, tmp_path: Path
) -> None:
    """Right after the tail too, and under torchrun without NODE_RANK, which Composer needs to load."""
    host = host_named("Composer")
    whole = host.run(shards, tmp_path / "whole", max_duration="16ba")
    host.run(shards, tmp_path / "first", save_at=(4,), max_duration="4ba")
    path: Path = host.checkpoints(tmp_path / "first")[0][1]
    options: dict[str, Any] = {"data": {"num_workers": 2, "persistent_workers": True}}
    seen = before_step(whole.steps, 4)
    for launcher, stop in (("composer", 11), ("torchrun", 16)):
        out = tmp_path / launcher
        path = run(
            "Composer", out, shards, 2, launcher, checkpoint=path, evaluates="5ba", **until("Composer", stop), **options
        )
        seen |= steps_of(out)
    assert seen == whole.steps
    ranks = [rank["evaluations"] for rank in ranks_of(tmp_path / "composer")]
    assert [step for step, _ in ranks[0]] == [step for step, _ in ranks[1]] == [5, 10, 11]
    for (_, one), (_, other) in zip(*ranks, strict=True):
        assert sorted(one + other) == list(range(NUM_SAMPLES))


@nightly
@pytest.mark.parametrize("method", ["random", "stratified", "per_stream", "device_per_stream"])
def test_mixtures_are_exact_over_worlds(tmp_path: Path, method: str) -> None:
    write_shards(tmp_path / "mix" / "a", 100)
    write_shards(tmp_path / "mix" / "b", 67, first=100)
    data = {"mixture": {"a": 0.3, "b": 0.7}, "epoch_size": 160, "batching_method": method}
    # The blocks of "device_per_stream" are the first run's batch on one device.
    whole = {"whole": {"data": data}, "whole_on": 4 if method == "device_per_stream" else 1}
    expect_chain_exact("Composer", tmp_path, tmp_path / "mix", [4, 1, 2], stops=(7, 10, 23), data=data, **whole)


@slow
def test_data_of_several_stages_continues_on_other_numbers_of_devices_under_composer(tmp_path: Path) -> None:
    folder = documents.write(tmp_path / "documents")
    dataset, data = composed(folder)
    options = {"stops": (17, 40), "composed": folder, "whole": {"dataset": dataset, "data": data}}
    expect_chain_exact("Composer", tmp_path, folder / "web", [2, 3], **options)


@nightly
def test_autoresume_continues_in_another_world(shards: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_name": "run", "autoresume": True, "save_interval": "7ba"}
    out = tmp_path / "run"
    run("Composer", out, shards, 1, "composer", max_duration="15ba", **options)
    first = steps_of(out)
    (out / "rank0of1.json").unlink()
    run("Composer", out, shards, 2, "composer", **options)
    assert first | steps_of(out) == host_named("Composer").run(shards, tmp_path / "whole").steps


@nightly
def test_sharded_checkpoints_of_composer_continue_over_2_4_and_1_devices(shards: Path, tmp_path: Path) -> None:
    """FSDP2, which Composer runs on a CPU too; its optimizer's state over other worlds is not ours to compare."""
    options = {"parallelism_config": {"fsdp": {"state_dict_type": "sharded"}}}
    path, seen = None, {}
    for world, stop, epoch in ((2, 4, 0), (4, 14, 1), (1, 18, 1)):
        out = tmp_path / str(stop)
        run("Composer", out, shards, world, "torchrun", checkpoint=path, **until("Composer", stop), **options)
        seen |= steps_of(out)
        path = out / "ckpt" / f"ep{epoch}-ba{stop}"
        assert read_position(path)["position"] == GLOBAL_BATCH * (stop - STEPS_PER_EPOCH * epoch)
    assert seen == host_named("Composer").run(shards, tmp_path / "whole", max_duration="18ba").steps


SHARES = [
    pytest.param("Lightning", [2, 2, 2], {"data": {"replication": 2}}, marks=slow),
    pytest.param("Lightning", [2, 4, 2], {"strategy": "pairs"}, marks=nightly),
    pytest.param("Composer", [4, 4, 4], {"data": {"replication": 2}}, marks=nightly),
]


@pytest.mark.parametrize(("name", "worlds", "options"), SHARES, ids=str)
def test_ranks_that_share_samples_see_the_same_ones_and_stop_and_resume_also_right_after_the_tail(
    shards: Path, tmp_path: Path, name: str, worlds: list[int], options: dict[str, Any]
) -> None:
    path, seen, stops = None, {}, (4, STEPS_PER_EPOCH, 14)
    for world, stop in zip(worlds, stops, strict=True):
        out = tmp_path / str(stop)
        path = run(name, out, shards, world, "torchrun", checkpoint=path, **until(name, stop), **options)
        assert steps_of(out, slice(0, world, 2)) == steps_of(out, slice(1, world, 2))
        seen |= steps_of(out, slice(0, world, 2))
    whole = host_named(name).run(shards, tmp_path / "whole", **until(name, 16))
    assert seen == before_step(whole.steps, 14)
    if name == "Composer":
        clock = torch.load(path, weights_only=False)["state"]["timestamp"]["Timestamp"]
        assert clock["sample"] == sum(len(ids) for ids in seen.values())
    if "replication" in options.get("data", {}):
        run(name, tmp_path / "alone", shards, 1, checkpoint=path, **until(name, 16))
        assert steps_of(tmp_path / "alone") == from_step(whole.steps, 14)


# Bad ends


ENDS = [
    pytest.param("Lightning", 1, "", [14, [0], 9], 12, marks=slow),
    *(
        pytest.param("Lightning", 2, launcher, ends, step, marks=nightly)
        for launcher in ("torchrun", "")
        for ends, step in (
            ([8, [1], "an exception"], 6),
            ([8, [0], "an exception"], 6),
            ([8, [1], 9], 6),
            ([8, [0, 1], 15], 9),  # a SIGTERM lets the step be finished
        )
    ),
    pytest.param("Lightning", 2, "torchrun", [8, [0, 1], 2], 6, marks=nightly),
    *(pytest.param("Composer", 2, "composer", [14, [0, 1], how], 12, marks=nightly) for how in (15, 9)),
]


@pytest.mark.parametrize(("name", "world", "launcher", "ends", "saved_step"), ENDS, ids=str)
def test_a_run_that_ends_badly_ends_and_continues_from_its_last_checkpoint_in_another_world(
    shards: Path, tmp_path: Path, name: str, world: int, launcher: str, ends: list[Any], saved_step: int
) -> None:
    every = {"every": 3} if name == "Lightning" else {"save_interval": "3ba"}
    ended = start(name, tmp_path / "bad", shards, world, launcher, ends=ends, **every)
    step, path = host_named(name).checkpoints(tmp_path / "bad")[-1]
    assert step == saved_step, ended.stderr[-3000:]
    run(name, tmp_path / "again", shards, 3 - world, launcher or "torchrun", checkpoint=path)
    whole = host_named(name).run(shards, tmp_path / "whole").steps
    assert before_step(steps_of(tmp_path / "bad"), step) | steps_of(tmp_path / "again") == whole


@nightly
@pytest.mark.parametrize(("launcher", "signalled"), [("torchrun", [1]), ("", [0]), ("torchrun", [0, 1])])
def test_a_signal_to_any_rank_lets_all_ranks_save_the_same_step(
    shards: Path, tmp_path: Path, launcher: str, signalled: list[int]
) -> None:
    ends = [5, signalled, int(signal.SIGTERM)]
    ended = start("Lightning", tmp_path / "bad", shards, 2, launcher, every=99, graceful=4, ends=ends)
    assert ended.code != 0, ended.stderr[-3000:]
    path = tmp_path / "bad" / "graceful" / "last.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == 8, ended.stderr[-3000:]
    run("Lightning", tmp_path / "again", shards, 2, launcher, checkpoint=path)
    whole = host_named("Lightning").run(shards, tmp_path / "whole").steps
    assert before_step(steps_of(tmp_path / "bad"), 8) | steps_of(tmp_path / "again") == whole


@nightly
def test_two_tasks_of_a_requeued_slurm_job_continue_by_themselves(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "job"
    run("Lightning", out, shards, 2, "slurm", every=99, ends=[5, [0, 1], int(signal.SIGUSR1)], max_steps=7)
    (hpc,) = out.glob("hpc_ckpt_*.ckpt")
    assert torch.load(hpc, weights_only=True)["global_step"] == 5
    first = before_step(steps_of(out), 5)
    run("Lightning", out, shards, 2, "slurm", every=99)
    again = steps_of(out)
    assert min(again) == 5
    assert first | again == host_named("Lightning").run(shards, tmp_path / "whole").steps


# Two devices under Lightning


@slow
def test_validation_prediction_and_test_see_every_sample_once_on_two_devices(shards: Path, tmp_path: Path) -> None:
    run("Lightning", tmp_path / "fit", shards, 2, "torchrun", max_epochs=1)
    ranks = [rank["evaluations"][0][1] for rank in ranks_of(tmp_path / "fit")]
    assert sorted(ranks[0] + ranks[1]) == list(range(NUM_SAMPLES))
    command = worker("predict and test", shards, tmp_path / "others", devices=2, strategy="ddp")
    assert launch(tmp_path, under("torchrun", 2, command)).code == 0
    for what in ("predicted", "tested"):
        ids = [number for rank in ranks_of(tmp_path / "others") for number in rank[what]]
        assert sorted(ids) == list(range(NUM_SAMPLES))


@slow
@pytest.mark.parametrize("tail", ["exact", pytest.param("pad", marks=nightly)])
def test_the_last_partial_step_weighs_the_same_on_any_number_of_devices(
    shards: Path, tmp_path: Path, tail: str
) -> None:
    options = {"max_epochs": 1, "val": False, "data": {"tail": tail}}
    run("Lightning", tmp_path / "two", shards, 2, "torchrun", **options)
    alone = host_named("Lightning").run(shards, tmp_path / "alone", **options)
    assert ranks_of(tmp_path / "two")[0]["weights"] == pytest.approx(alone.weights, abs=1e-5)


@nightly
def test_dropout_draws_the_same_after_a_resume_with_workers_under_ddp(shards: Path, tmp_path: Path) -> None:
    options = {"module": {"dropout": 0.5}, "data": {"seed_steps": 5, "num_workers": 1}}
    run("Lightning", tmp_path / "whole", shards, 2, "torchrun", every=9, **options)
    step, path = host_named("Lightning").checkpoints(tmp_path / "whole")[1]
    assert step == 18
    run("Lightning", tmp_path / "again", shards, 2, "torchrun", checkpoint=path, **options)
    first, again = (ranks_of(tmp_path / name)[0]["weights"] for name in ("whole", "again"))
    assert first == again
