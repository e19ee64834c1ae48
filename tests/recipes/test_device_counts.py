"""The same command on any number of devices, however its processes are started: one run, its samples once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")

from support.launches import LIGHTNING, ROOT, TINY, Launched, launch, planned_ids, slurm, torchrun, train, trained_ids

from lightning_stream.recipes.launching import flags_of
from lightning_stream.recipes.loss_curve import Link, Step, StepRecord, compare, read_record, table

RUN = [*TINY, *LIGHTNING]


def expect_one_run(cwd: Path, done: Launched, num_ranks: int, place: str = "runs/flowers", seed: int = 1) -> None:
    """One folder, one log, one conversion, and each step of the samples that the order gives it."""
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-4000:]
    folder = cwd / place
    assert [entry.name for entry in cwd.iterdir()] == ["runs"]
    assert not list(folder.glob("*_process_*"))  # a log of each child's own
    assert [entry.name for entry in (folder / "log").iterdir()] == ["version_0"]
    assert len(list((folder / "checkpoints").glob("last*.ckpt"))) == 1
    assert trained_ids(folder, num_ranks) == planned_ids(cwd / "runs", seed=seed)


def expect_one_conversion(cwd: Path, done: Launched) -> None:
    assert done.stderr.count("Converted: ") == 1
    assert len(list((cwd / "runs" / "shards" / "flowers").glob("[0-9a-f]*"))) == 1


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_lightnings_own_launcher_makes_one_run(tmp_path: Path) -> None:
    done = launch(tmp_path, train(*RUN, "trainer.devices=2"))
    expect_one_run(tmp_path, done, 2)
    expect_one_conversion(tmp_path, done)
    assert (tmp_path / "runs" / "flowers" / "summary.json").is_file()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_torchrun_makes_one_run_and_another_goes_on(tmp_path: Path) -> None:
    done = launch(tmp_path, torchrun(2, *RUN, "trainer.devices=2"))
    expect_one_run(tmp_path, done, 2)
    expect_one_conversion(tmp_path, done)
    again = launch(tmp_path, torchrun(2, *RUN, "trainer.devices=2", "trainer.max_epochs=2", "ckpt_path=last"))
    assert again.code == 0, again.stderr[-4000:]
    steps = trained_ids(tmp_path / "runs" / "flowers", 2)
    per_epoch = len(planned_ids(tmp_path / "runs"))
    assert sorted(chain.from_iterable(steps[per_epoch:])) == sorted(chain.from_iterable(steps[:per_epoch]))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_slurms_tasks_make_one_run(tmp_path: Path) -> None:
    command = train(*RUN, "trainer.devices=2")
    done = launch(tmp_path, command, command, envs=slurm(2))
    expect_one_run(tmp_path, done, 2)
    expect_one_conversion(tmp_path, done)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_each_job_of_a_sweep_is_done_once_on_two_devices(tmp_path: Path) -> None:
    """A child process once got the parent's command line, and ran the whole sweep again beside it."""
    done = launch(tmp_path, train("--multirun", *RUN, "trainer.devices=2", "seed=1,2"))
    for seed in (1, 2):
        expect_one_run(tmp_path, done, 2, f"runs/flowers/seed-{seed}", seed)
    expect_one_conversion(tmp_path, done)
    assert done.stdout.count("Launching 2 jobs") == 1
    assert sorted(one.parent.name for one in (tmp_path / "runs" / "flowers").glob("*/summary.json")) == [
        "seed-1",
        "seed-2",
    ]


def test_a_childs_flags_are_its_parents_less_the_sweep() -> None:
    assert flags_of(["-m", "+data=flowers", "--config-dir", "/my/configs", "seed=1,2"]) == [
        "--config-dir",
        "/my/configs",
    ]
    assert flags_of(["--multirun", "-cn", "train", "--config-path=x", "~callbacks.best"]) == [
        "-cn", "train", "--config-path=x",
    ]  # fmt: skip


# Two machines, as far as one can play two: a network namespace each, joined by a cable


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def two_nodes() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces that reach each other as 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2: apt-get install iproute2, and run as root")
    tag = uuid.uuid4().hex[:6]
    names = (f"a{tag}", f"b{tag}")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", f"v{names[0]}", "type", "veth", "peer", "name", f"v{names[1]}")
        for number, name in enumerate(names, 1):
            _ip("link", "set", f"v{name}", "netns", name)
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"v{name}")
            _ip("-n", name, "link", "set", f"v{name}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _remove(names)
        pytest.skip(
            f"network namespaces are not allowed here ({error.stderr.strip()}): run as root, with CAP_NET_ADMIN"
        )
    yield names
    _remove(names)


def _remove(names: tuple[str, str]) -> None:
    for name in names:  # a cable goes with the namespace of either end
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_two_nodes_of_two_processes_make_one_run_and_fetch_each_shard_once(
    tmp_path: Path, two_nodes: tuple[str, str]
) -> None:
    """Each node has a cache of its own; the shards lie where both reach them."""
    commands, envs = [], []
    for rank, node in enumerate(two_nodes):
        more = ["--nnodes=2", f"--node-rank={rank}", "--master-addr=10.77.0.1", "--master-port=29511"]
        local = f"data.local={tmp_path / f'cache-{rank}'}"
        arguments = [*RUN, "trainer.devices=2", "trainer.num_nodes=2", "trainer.strategy=ddp", local]
        commands.append(["ip", "netns", "exec", node, *torchrun(2, *arguments, f"root={tmp_path / 'runs'}", more=more)])
        envs.append({"GLOO_SOCKET_IFNAME": f"v{node}"})
    done = launch(tmp_path, *commands, envs=envs)
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-4000:]
    folder = tmp_path / "runs" / "flowers"
    assert [entry.name for entry in (folder / "log").iterdir()] == ["version_0"]
    assert trained_ids(folder, 4) == planned_ids(tmp_path / "runs")
    assert len(list((tmp_path / "runs" / "shards" / "flowers").iterdir())) <= 2  # the set, and its lock
    index = json.loads(next((tmp_path / "runs" / "shards" / "flowers").glob("*/train/index.json")).read_text())
    cached = [len(list((tmp_path / f"cache-{rank}").glob("*/train/*.mds"))) for rank in range(2)]
    assert min(cached) > 0
    # the shards that the border between the nodes cuts are needed on both
    assert len(index["shards"]) <= sum(cached) <= len(index["shards"]) + 1


# The figure


def _record(steps: dict[int, tuple[list[int], float]]) -> dict[int, Step]:
    return {number: Step(0, tuple(ids), loss) for number, (ids, loss) in steps.items()}


def test_a_chain_that_equals_the_whole_run_is_exact() -> None:
    whole = _record({1: ([1, 2], 2.0), 2: ([3, 4], 1.0)})
    links = [Link(1, 0, _record({1: ([1, 2], 2.0)})), Link(2, 1, _record({2: ([3, 4], 1.0 + 1e-6)}))]
    found = compare(whole, links)
    assert found.exact
    assert found.differences[1] == 0
    assert found.differences[2] == pytest.approx(1e-6)
    assert "| 2 devices, 1 worker | 2-2 | 2 | 0 | 1.0e-06 | 1.0e-06 |" in table(whole, links)


def test_lost_repeated_and_swapped_samples_are_found() -> None:
    whole = _record({1: ([1, 2], 2.0), 2: ([3, 4], 1.0), 3: ([5, 6], 0.5)})
    missing = compare(whole, [Link(1, 0, _record({1: ([1, 2], 2.0)})), Link(2, 0, _record({3: ([5, 6], 0.5)}))])
    assert (missing.missing, missing.lost, missing.extra) == ((2,), 2, 0)
    swapped = compare(whole, [Link(1, 0, _record({1: ([1, 3], 2.0), 2: ([2, 4], 1.0), 3: ([5, 6], 0.5)}))])
    assert (swapped.wrong, swapped.lost, swapped.extra) == ((1, 2), 0, 0)
    twice = compare(whole, [Link(1, 0, whole), Link(2, 0, _record({3: ([5, 6], 0.5)}))])
    assert (twice.repeated, twice.extra) == ((3,), 2)
    assert not any(found.exact for found in (missing, swapped, twice))


def test_a_record_with_a_ranks_line_missing_is_refused(tmp_path: Path) -> None:
    line = {"step": 1, "epoch": 0, "ids": [2, 1], "loss": 2.0, "ranks": 2}
    (tmp_path / "rank-0.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"step 1 in .* has 1 of 2"):
        read_record(tmp_path)
    (tmp_path / "rank-1.jsonl").write_text(json.dumps({**line, "ids": [3], "loss": 1.0}) + "\n")
    assert read_record(tmp_path) == {1: Step(0, (1, 2, 3), 1.5)}


def test_a_record_says_what_it_writes_and_where(tmp_path: Path) -> None:
    record = StepRecord(str(tmp_path), stop_after=3)
    assert record._checkpoint == tmp_path / "stopped.ckpt"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_the_recipe_shows_that_a_chain_over_1_2_and_1_devices_is_exact(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib: uv sync")
    command = [
        sys.executable, str(ROOT / "recipes" / "device_counts.py"), "--out", str(tmp_path), "--devices", "1", "2", "1",
        "--workers", "0", "1", "2", "--", "data.drawn_count=60", "data.image_size=32", "trainer.max_epochs=2",
    ]  # fmt: skip
    done = launch(tmp_path, command)
    assert done.code == 0, done.stdout + done.stderr[-4000:]
    assert "Samples lost: 0, repeated: 0; steps missing: 0, done twice: 0, of other samples: 0." in done.stdout
    assert re.search(r"\| 2 devices, 1 worker \| \d+-\d+ \| \d+ \| 0 \|", done.stdout)
    assert (tmp_path / "device_counts.png").read_bytes().startswith(b"\x89PNG")
