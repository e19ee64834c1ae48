"""The script of docs/multi_node.md in a cluster whose size changes: 4, 2 and 3 workers, killed in mid-epoch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
from servers.ports import free_port
from support.elastic_notes import STEPS, WAITS, read_notes
from support.launches import ROOT
from support.pages import blocks_of

pytest.importorskip("torch")

from lightning_stream import StreamingDataLoader, StreamingDataset

DEADLINE_S = 240
BLOCKS = {block.title: block.text for block in blocks_of("docs/multi_node.md") if block.language == "python"}
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's data and scripts."""
    (tmp_path / "notes").mkdir()
    for name, text in BLOCKS.items():
        (tmp_path / (name or "write.py")).write_text(text)
    subprocess.run([sys.executable, "write.py"], cwd=tmp_path, env=environment(tmp_path), check=True, timeout=120)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "LOCAL_"))}
    return environ | {"PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a command in the folder; all that is started ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(name: str, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            env = environment(folder) | dict(environ)
            started.append(subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log))
        return started[-1]

    yield run
    for process in started:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """A process and its children at once, as if their machine had failed."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], check=False, stdout=subprocess.PIPE)
    for pid in [process.pid, *map(int, listed.stdout.split())]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def wait_for(folder: Path, what: str, is_so: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + DEADLINE_S
    while not is_so():
        said = {log.name: log.read_text(errors="replace")[-1500:] for log in folder.glob("*.log")}
        assert time.monotonic() < ends_at, f"waited for {what}: {said}"
        time.sleep(0.2)


def wait_until_it_waits(folder: Path, size: int) -> None:
    """Until all workers of a world of this size have trained on the step at which they wait."""
    last = f"[{WAITS[size] - 1}, "
    notes = folder / "notes"
    wait_for(
        folder,
        f"{size} workers at step {WAITS[size]}",
        lambda: sum(last in path.read_text() for path in notes.glob(f"*-of-{size}-*.jsonl")) >= size,
    )


def expect_exact(folder: Path) -> None:
    """The steps that count are those of one uninterrupted run, and each epoch's have each sample once."""
    dataset = StreamingDataset(remote=str(folder / "data"), shuffle=True)
    loader = StreamingDataLoader(dataset, global_batch_size=48)
    planned = [sorted(batch["x"][:, 0].int().tolist()) for _ in range(3) for batch in loader]
    sizes, trained = read_notes(folder / "notes")
    assert trained == planned
    assert len(trained) == STEPS
    assert [*dict.fromkeys(sizes)] == [4, 2, 3]
    assert all(sorted(chain(*trained[k : k + 20])) == [*range(960)] for k in (0, 20, 40))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_under_torchrun_nodes_come_and_go_and_no_sample_is_lost_or_repeated(folder: Path, start: Start) -> None:
    port = free_port()

    def node(number: int) -> subprocess.Popen[bytes]:
        options = ["--nnodes", "2:4", "--nproc-per-node", "1", "--max-restarts", "100", "--monitor-interval", "0.2"]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "run7", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        waits = f"is_host={number == 0},last_call_timeout=3,join_timeout=300,keep_alive_interval=2"
        command = [sys.executable, "-m", "torch.distributed.run", *options, *meeting, "--rdzv-conf", waits]
        script = ["-m", "support.elastic_job"]
        environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LIGHTNING_STREAM_CACHE": str(folder / f"disk{number}")}
        return start(f"node{number}", [*command, *script], environ)

    nodes = [node(number) for number in range(4)]
    wait_until_it_waits(folder, 4)
    for lost in nodes[2:]:
        kill(lost)
    wait_until_it_waits(folder, 2)
    node(4)
    wait_for(folder, "the end of the run", lambda: nodes[0].poll() is not None)
    assert nodes[0].returncode == 0
    expect_exact(folder)


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: uv pip install 'ray[train]>=2.60' brings it")
def test_under_ray_nodes_come_and_go_and_no_sample_is_lost_or_repeated(
    folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)  # the nodes' workers get it
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    text = BLOCKS["train_ray.py"].replace("import FOLDER, train", "import FOLDER")
    text = text.replace("num_workers=(2, 4)", "num_workers=(2, 4), elastic_resize_monitor_interval_s=2")
    (folder / "train_ray.py").write_text(f"from support.elastic_job import train\n{text}")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(4)]
        environ = {"RAY_ADDRESS": cluster.address, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60"}
        driver = start("driver", [sys.executable, "train_ray.py", str(STEPS)], environ)
        wait_until_it_waits(folder, 4)
        for lost in nodes[2:]:
            cluster.remove_node(lost, allow_graceful=True)
        wait_until_it_waits(folder, 2)
        cluster.add_node(num_cpus=1)
        wait_for(folder, "the end of the run", lambda: driver.poll() is not None)
    finally:
        cluster.shutdown()
    assert driver.returncode == 0
    expect_exact(folder)
