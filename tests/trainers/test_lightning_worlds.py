"""Chains of runs over different worlds: torchrun, and Lightning's own launchers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support.lightning_runs import EPOCHS, NUM_SAMPLES, Run, checkpoints

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*"),
]
TESTS = Path(__file__).resolve().parent.parent
STEPS = EPOCHS * 11


def launch(out: Path, shards: Path, world: int, torchrun: bool, **options: Any) -> None:
    """Run one link of a chain to its end, or to where it kills itself."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        env.pop(name, None)
    argument = json.dumps({"shards": str(shards), "out": str(out), "devices": world, **options})
    program = ["-m", "support.lightning_worker", argument]
    if torchrun and world > 1:
        program = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}", *program]
    elif world > 1:
        env["MASTER_PORT"] = str(free_port())
    done = subprocess.run([sys.executable, *program], env=env, capture_output=True, text=True, timeout=480, check=False)
    if "kill_at" not in options:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def steps_of(out: Path, below: int = STEPS) -> dict[int, list[int]]:
    """Optimizer step -> sorted sample ids over all ranks."""
    steps: dict[int, list[int]] = defaultdict(list)
    for path in out.glob("rank*.json"):
        for step, ids in json.loads(path.read_text())["steps"].items():
            if int(step) < below:
                steps[int(step)] += ids
    return {step: sorted(ids) for step, ids in steps.items()}


def run_chain(tmp_path: Path, shards: Path, worlds: list[int], torchrun: bool, **options: Any) -> None:
    """Stop after every few steps and continue in the next world; each step gets the samples of an uninterrupted run."""
    whole = Run(shards, tmp_path / "whole", every_n_train_steps=STEPS).steps
    ckpt, seen = None, {}
    stops = [7, 11, 25, STEPS][-len(worlds) :]
    strategy = options.pop("strategy", "ddp")
    early = options.pop("early", False)  # stop by a callback, not by max_steps
    for link, (world, stop) in enumerate(zip(worlds, stops, strict=True)):
        out = tmp_path / f"link{link}"
        accumulate = options.get("accumulate", {}).get(str(world), 1)
        extra = {k: v for k, v in options.items() if k != "accumulate"}
        launch(
            out, shards, world, torchrun, ckpt=ckpt, accumulate_grad_batches=accumulate,
            strategy=strategy if world > 1 or strategy == "fsdp2" else "auto",
            **({"stop_at": stop} if early else {"max_steps": stop, "max_epochs": -1}), **extra,
        )  # fmt: skip
        seen |= steps_of(out)
        last_step, path = checkpoints(out)[-1]
        assert last_step == stop
        ckpt = str(path)
    assert seen == whole


@pytest.mark.slow
def test_a_chain_over_1_2_and_1_devices_under_torchrun_is_exact(shards: Path, tmp_path: Path) -> None:
    run_chain(tmp_path, shards, [1, 2, 1], torchrun=True)


@pytest.mark.slow
def test_a_chain_with_balanced_shares_has_the_steps_of_a_run_without(shards: Path, tmp_path: Path) -> None:
    run_chain(tmp_path, shards, [2, 1, 2], torchrun=True, dataset={"balance": "tokens"}, accumulate={"1": 4, "2": 2})


@pytest.mark.slow
def test_a_chain_under_lightnings_own_launcher_with_workers_is_exact(shards: Path, tmp_path: Path) -> None:
    run_chain(tmp_path, shards, [2, 1], torchrun=False, data={"num_workers": 2, "persistent_workers": True})


@pytest.mark.nightly
@pytest.mark.parametrize("torchrun", [True, False], ids=["torchrun", "popen"])
@pytest.mark.parametrize("worlds", [[1, 2, 4, 1], [4, 1, 2, 4]], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_longer_chains_are_exact(shards: Path, tmp_path: Path, worlds: list[int], torchrun: bool, workers: int) -> None:
    accumulate = {"1": 4, "2": 2, "4": 1} if workers else {}
    run_chain(tmp_path, shards, worlds, torchrun, data={"num_workers": workers}, accumulate=accumulate)


@pytest.mark.slow
def test_a_killed_run_continues_from_its_last_checkpoint_in_another_world(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path / "whole", every_n_train_steps=STEPS).steps
    launch(tmp_path / "killed", shards, 1, torchrun=False, every=3, kill_at=14)
    step, path = checkpoints(tmp_path / "killed")[-1]
    assert step == 12
    launch(tmp_path / "again", shards, 2, torchrun=True, ckpt=str(path), strategy="ddp")
    assert steps_of(tmp_path / "killed", below=step) | steps_of(tmp_path / "again") == whole


@pytest.mark.slow
def test_validation_sees_every_sample_once_on_two_devices(shards: Path, tmp_path: Path) -> None:
    launch(tmp_path, shards, 2, torchrun=True, strategy="ddp", max_epochs=1)
    ranks = [json.loads(path.read_text())["validations"] for path in sorted(tmp_path.glob("rank*.json"))]
    (_, first), (_, second) = ranks[0][0], ranks[1][0]
    assert sorted(first + second) == list(range(NUM_SAMPLES))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
@pytest.mark.parametrize("workers", [0, 1])
def test_chains_under_launchers_that_copy_the_trainer_are_exact(
    shards: Path, tmp_path: Path, strategy: str, workers: int
) -> None:
    spawned = {"persistent_workers": True, "multiprocessing_context": "spawn"} if workers else {}
    run_chain(tmp_path, shards, [2, 1, 2], torchrun=False, strategy=strategy, data={"num_workers": workers, **spawned})


@pytest.mark.nightly
@pytest.mark.parametrize("worlds", [[2, 1, 2], [2, 4, 2]], ids=str)
def test_chains_of_sharded_checkpoints_under_fsdp2_are_exact(shards: Path, tmp_path: Path, worlds: list[int]) -> None:
    module = {"reads_stepping_batches": True}
    run_chain(tmp_path, shards, worlds, torchrun=False, strategy="fsdp2", early=True, module=module)


@pytest.mark.nightly
def test_ranks_of_tensor_parallel_pairs_see_the_same_samples_over_a_chain(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path / "whole").steps
    ckpt, seen = None, {}
    for world, stop in ((2, 7), (4, 15), (2, STEPS)):
        out = tmp_path / f"{world} to {stop}"
        launch(out, shards, world, torchrun=True, ckpt=ckpt, strategy="pairs", stop_at=stop)
        ranks = [json.loads((out / f"rank{rank}of{world}.json").read_text())["steps"] for rank in range(world)]
        assert ranks[::2] == ranks[1::2]
        for rank in ranks[::2]:
            for step, ids in rank.items():
                seen[int(step)] = sorted([*seen.get(int(step), []), *ids])
        last_step, path = checkpoints(out)[-1]
        assert last_step == stop
        ckpt = str(path)
    assert seen == whole


@pytest.mark.nightly
def test_an_accumulation_that_follows_the_world_is_exact_with_validations(shards: Path, tmp_path: Path) -> None:
    run_chain(tmp_path, shards, [4, 1, 2, 1], torchrun=True, accumulate={"4": 1, "2": 2, "1": 4}, early=True)


@pytest.mark.slow
def test_replicas_of_two_ranks_see_the_same_samples_and_continue_alone(shards: Path, tmp_path: Path) -> None:
    whole = Run(shards, tmp_path / "whole", max_epochs=1).steps
    launch(tmp_path / "two", shards, 2, torchrun=True, strategy="ddp", stop_at=5, data={"replication": 2})
    ranks = [json.loads(path.read_text())["steps"] for path in sorted((tmp_path / "two").glob("rank*.json"))]
    assert ranks[0] == ranks[1] == {str(step): ids for step, ids in whole.items() if step < 5}
    _, path = checkpoints(tmp_path / "two")[-1]
    launch(tmp_path / "one", shards, 1, torchrun=False, ckpt=str(path), max_epochs=1)
    assert steps_of(tmp_path / "one") == {step: ids for step, ids in whole.items() if step >= 5}


@pytest.mark.slow
def test_prediction_and_test_see_every_sample_once_on_two_devices(shards: Path, tmp_path: Path) -> None:
    launch(tmp_path, shards, 2, torchrun=True, evaluate=True, strategy="ddp")
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    for what in ("predicted", "tested"):
        assert sorted(number for rank in ranks for number in rank[what]) == list(range(NUM_SAMPLES))


@pytest.mark.nightly
def test_dropout_draws_the_same_after_a_resume_with_workers_under_ddp(shards: Path, tmp_path: Path) -> None:
    options = {"strategy": "ddp", "module": {"dropout": 0.5}, "data": {"seed_steps": 5, "num_workers": 1}}
    launch(tmp_path / "whole", shards, 2, torchrun=True, every=9, **options)
    step, path = checkpoints(tmp_path / "whole")[1]
    assert step == 18
    launch(tmp_path / "again", shards, 2, torchrun=True, ckpt=str(path), **options)
    weights = [json.loads((tmp_path / run / "rank0of2.json").read_text())["weights"] for run in ("whole", "again")]
    assert weights[0] == weights[1]
