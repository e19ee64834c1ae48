"""Ranks with different data or settings are an error before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.launches import launch
from support.warm import python

torch = pytest.importorskip("torch")

from lightning_stream import (  # noqa: E402
    MDSWriter,
    PositionTracker,
    StreamingDataLoader,
    StreamingDataset,
    World,
    add_lengths,
)
from lightning_stream.errors import StateError  # noqa: E402
from lightning_stream.trainers import agreement  # noqa: E402
from lightning_stream.trainers.agreement import check_ranks_agree, compare, compare_worlds  # noqa: E402

RANK = """
import os, sys, torch
from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.errors import StateError
from lightning_stream.trainers.agreement import check_ranks_agree
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
for folder in sys.argv[3:]:
    try:
        position = StreamingDataLoader(StreamingDataset(remote=folder), 4).position
        check_ranks_agree(lambda: (position, None, None, None))
        print("agreed", flush=True)
    except StateError as error:
        print(error, flush=True)
torch.distributed.barrier()
os._exit(0)  # gloo's own end may abort where the other rank has ended already
"""


def write(folder: Path, count: int, **options: Any) -> Path:
    with MDSWriter(out=str(folder), columns={"number": "int"}, **options) as writer:
        for number in range(count):
            writer.write({"number": number})
    return folder


@pytest.mark.distributed
def test_ranks_over_the_same_data_agree_and_an_index_replaced_while_they_begin_is_an_error_on_all(
    tmp_path: Path,
) -> None:
    former, latter = write(tmp_path / "former", 40), write(tmp_path / "latter", 48)
    ranks = [(former, former), (former, latter)]
    meeting = str(tmp_path / "meeting")
    done = launch(
        tmp_path,
        *(
            [python(), "-c", RANK, meeting, str(rank), *map(str, folders)]
            for rank, folders in enumerate(zip(*ranks, strict=True))
        ),
        envs=({}, {}),
    )
    assert done.code == 0, done.stderr
    assert done.stdout.count("agreed") == 2
    assert done.stdout.count("ranks 0 and 1 differ in snapshot") == 2
    assert done.stdout.count("replaced while the run began") == 2


FAILS = """
import sys, torch
from lightning_stream.trainers.agreement import made_by_ranks
rank = int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
for value in (1, KeyError("val_loss"), lambda: None, 2):
    def make():
        if isinstance(value, Exception) and rank == 0:
            raise value
        return value if rank == 0 else None
    try:
        print(made_by_ranks(make), flush=True)
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
torch.distributed.barrier()
"""


@pytest.mark.distributed
def test_what_one_rank_cannot_make_is_an_error_on_all(tmp_path: Path) -> None:
    """A metric that is missing in `choose`, say, or lengths that one node cannot fetch; the others waited for ever."""
    meeting = str(tmp_path / "meeting")
    done = launch(tmp_path, *([python(), "-c", FAILS, meeting, str(rank)] for rank in range(2)), envs=({}, {}))
    assert done.code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("[1, None]") == lines.count("[2, None]") == 2
    assert "rank 0: KeyError: 'val_loss'" in lines
    assert any(
        line.startswith("rank 1: RuntimeError: all ranks continue together, but rank 0 cannot: KeyEr") for line in lines
    )
    assert sum("Can't pickle" in line or "Can't get local" in line for line in lines) == 2


def test_a_seed_that_depends_on_the_rank_is_an_error(tmp_path: Path) -> None:
    data = write(tmp_path / "data", 40)
    states = [
        StreamingDataLoader(StreamingDataset(remote=data, shuffle=True, shuffle_seed=seed), 4).state_dict()
        for seed in (1, 1, 2)
    ]
    with pytest.raises(StateError, match=r"ranks 0 and 2 differ in order: .*'seed': 1.* and .*'seed': 2"):
        compare(states)
    compare(states[:2])


def test_ranks_that_balance_by_other_lengths_or_another_cost_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would be right alone; together they lose and repeat samples of each step."""
    values: list[Any] = []
    monkeypatch.setattr(agreement, "gathered", lambda value: values.append(value) or values)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    data = write(tmp_path / "data", 40, lengths={"tokens": lambda sample: sample["number"]})

    def begin(rank: int, balance: Any) -> None:
        values[rank:] = []
        dataset = StreamingDataset(remote=data, local=tmp_path / f"cache{rank}", balance=balance)
        tracker = PositionTracker(StreamingDataLoader(dataset, 4, world=World(rank, 2, 2)))
        next(iter(tracker))

    for balance in ("tokens", "tokens * 2", lambda tokens: tokens**2):
        begin(0, balance)
        begin(1, balance)
        for other in (None, "tokens + 1", lambda tokens: tokens + 1):
            with pytest.raises(StateError, match="ranks 0 and 1 differ in balance: "):
                begin(1, other)
    begin(0, "tokens")
    add_lengths(data, {"tokens": lambda sample: min(sample["number"], 38)}, overwrite=True, num_workers=1)
    with pytest.raises(StateError, match="ranks 0 and 1 differ in balance: "):
        begin(1, "tokens")


def test_a_single_process_asks_no_other(tmp_path: Path) -> None:
    loader = StreamingDataLoader(StreamingDataset(remote=write(tmp_path / "data", 40)), 4)
    check_ranks_agree(lambda: (loader.position, None, None, None))


def test_ranks_that_see_different_worlds_or_leave_one_out_are_an_error() -> None:
    """Each would be right alone; together they lose and repeat samples."""
    for worlds in (
        [World(0, 3, 3), World(1, 3, 3), World(2, 3, 1)],  # nodes of different sizes
        [World(0, 2), World(0, 2)],  # the rank on its node in the place of that among all
        [World(0, 4, 1, 2), World(1, 4, 1, 2), World(2, 4), World(3, 4)],
    ):
        with pytest.raises(StateError, match="all ranks of a world train together"):
            compare_worlds(worlds)
    compare_worlds([World(rank, 4, 2, 2, disks=((rank,),)) for rank in range(4)])
    compare_worlds([World(rank // 2, 2) for rank in range(4)])  # of a mesh: ranks that share samples
    compare_worlds([World(1, 2)])
