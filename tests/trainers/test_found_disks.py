"""A restarted cluster reads what its disks hold, in whichever order its nodes come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launches import launch
from support.warm import python

torch = pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.order import World  # noqa: E402

SHARDS, PER_SHARD, NODES = 64, 12, 4
RUNS = [(0, 1, 2, 3), (2, 0, 3, 1), (1, 3, 0, 2), (3, 2, 1, 0)]  # the rank of each node, in each of four runs
REPLACED = 2  # the run before which node 1 gets another disk

NODE = """
import json, os, sys, torch
from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.trainers.tracker import PositionTracker
base, remote, node, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
os.environ.update(WORLD_SIZE=str(len(ranks)), LOCAL_WORLD_SIZE="1")
state = None
for run, (rank, disk) in enumerate(ranks):
    os.environ["RANK"] = str(rank)
    torch.distributed.init_process_group("gloo", init_method=f"file://{base}/meeting{run}", rank=rank, world_size=4)
    shards = lambda: [name for name in os.listdir(disk) if name.endswith(".mds")] if os.path.isdir(disk) else []
    before = len(shards())
    dataset = StreamingDataset(remote=remote, local=disk, shuffle=True)
    loader = StreamingDataLoader(dataset, global_batch_size=48)
    tracker = PositionTracker(loader)
    if state is not None:
        tracker.load(state)
    steps = []
    for batch in tracker:
        steps.append(batch["number"].tolist())
        if tracker.current.completes_step:
            tracker.stepped()
        if len(steps) == 11:
            break  # in the middle of an epoch
    state = tracker.state()
    print(json.dumps([run, node, state["epoch"], state["position"], len(shards()) - before, len(shards()), steps]))
    sys.stdout.flush()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
os._exit(0)
"""


def write(folder: Path) -> str:
    with MDSWriter(out=str(folder), columns={"number": "int64"}, size_limit=PER_SHARD * 12 + 100) as writer:
        for number in range(SHARDS * PER_SHARD):
            writer.write({"number": number})
    return str(folder)


@pytest.mark.distributed
def test_nodes_that_come_back_with_other_ranks_fetch_nothing_and_a_new_one_its_part(tmp_path: Path) -> None:
    remote = write(tmp_path / "data")
    num_shards = len([*(tmp_path / "data").glob("*.mds")])
    disks = [[str(tmp_path / f"disk{node}")] * len(RUNS) for node in range(NODES)]
    disks[1][REPLACED:] = [str(tmp_path / "new")] * (len(RUNS) - REPLACED)
    commands = [
        [
            python(),
            "-c",
            NODE,
            str(tmp_path),
            remote,
            str(node),
            json.dumps([*zip(ranks, disks[node], strict=True)]),
        ]
        for node, ranks in enumerate(zip(*RUNS, strict=True))
    ]
    done = launch(tmp_path, *commands, envs=[{}] * NODES)
    assert done.code == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(reports) == len(RUNS) * NODES
    loader = StreamingDataLoader(StreamingDataset(remote=remote, shuffle=True), global_batch_size=48, world=World())
    wanted = iter([{*batch["number"].tolist()} for _ in range(3) for batch in loader])
    for run in range(len(RUNS)):
        of_run = [report for report in reports if report[0] == run]
        fetched = {report[1]: report[4] for report in of_run}
        if run == 0:
            assert sum(fetched.values()) <= num_shards + NODES * 4  # shards that canonical nodes share
        for node, count in fetched.items():
            if run and (run, node) != (REPLACED, 1):
                assert count <= 0.02 * num_shards, (run, fetched)
        if run == REPLACED:
            assert fetched[1] <= num_shards / NODES + 4
        for parts in zip(*(report[6] for report in of_run), strict=True):
            assert set().union(*parts) == next(wanted)
            assert sum(map(len, parts)) == 48
