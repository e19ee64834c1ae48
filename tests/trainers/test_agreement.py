"""Ranks with different data or settings are an error before training."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launches import launch
from support.warm import python

torch = pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.errors import StateError  # noqa: E402
from lightning_stream.trainers.agreement import check_ranks_agree, compare  # noqa: E402

RANK = """
import os, sys, torch
from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.errors import StateError
from lightning_stream.trainers.agreement import check_ranks_agree
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
for folder in sys.argv[3:]:
    try:
        check_ranks_agree(StreamingDataLoader(StreamingDataset(remote=folder), 4).position)
        print("agreed", flush=True)
    except StateError as error:
        print(error, flush=True)
torch.distributed.barrier()
os._exit(0)  # gloo's own end may abort where the other rank has ended already
"""


def write(folder: Path, count: int) -> Path:
    with MDSWriter(out=str(folder), columns={"number": "int"}) as writer:
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


def test_a_seed_that_depends_on_the_rank_is_an_error(tmp_path: Path) -> None:
    data = write(tmp_path / "data", 40)
    states = [
        StreamingDataLoader(StreamingDataset(remote=data, shuffle=True, shuffle_seed=seed), 4).state_dict()
        for seed in (1, 1, 2)
    ]
    with pytest.raises(StateError, match=r"ranks 0 and 2 differ in order: .*'seed': 1.* and .*'seed': 2"):
        compare(states)
    compare(states[:2])


def test_a_single_process_asks_no_other(tmp_path: Path) -> None:
    loader = StreamingDataLoader(StreamingDataset(remote=write(tmp_path / "data", 40)), 4)
    check_ranks_agree(loader.position)
