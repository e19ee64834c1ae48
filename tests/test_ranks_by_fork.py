"""Ranks that a launcher forks or spawns: each trains on its own, and all of them together read each sample once."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable
from itertools import chain
from multiprocessing import context, popen_spawn_posix, reduction
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from servers.ports import free_port  # noqa: E402
from support.data import write_ids  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_stream import StreamingDataLoader, StreamingDataset, World  # noqa: E402
from lightning_stream.loading.torch_private import become_worker  # noqa: E402

NUM_SAMPLES, BATCH = 144, 4
Epochs = list[list[int]]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("shards"))
    write_ids(folder, range(NUM_SAMPLES), size_limit=300)
    return folder


def dataset_of(shards: str, world: World | None = None) -> StreamingDataset:
    return StreamingDataset(shards, shuffle=True, batch_size=BATCH, world=world)


def expected(shards: str, num_ranks: int) -> list[Epochs]:
    loaders = [StreamingDataLoader(dataset_of(shards, World(r, num_ranks, num_ranks))) for r in range(num_ranks)]
    return [[[i for batch in loader for i in batch["id"].tolist()] for _ in range(2)] for loader in loaders]


def ids_of(items: Any) -> list[int]:
    return [number for item in items for number in torch.as_tensor(item["id"]).reshape(-1).tolist()]


def loop(dataset: StreamingDataset) -> Any:
    return dataset


def workers(dataset: StreamingDataset) -> Any:
    return DataLoader(dataset, BATCH, num_workers=2)


def spawned_workers(dataset: StreamingDataset) -> Any:
    return DataLoader(dataset, BATCH, num_workers=2, multiprocessing_context="spawn")


def two_epochs(rank: int, dataset: StreamingDataset, kind: Callable[..., Any], port: int, results: Any) -> None:
    torch.manual_seed(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    items = kind(dataset)
    results.put((rank, [ids_of(items) for _ in range(2)]))
    dist.barrier()
    os._exit(0)  # without the threads of gloo, which can abort a process at its end


def in_ranks(method: str, target: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """What each rank puts, by rank."""
    processes = multiprocessing.get_context(method)
    results = processes.SimpleQueue()
    ranks = [processes.Process(target=target, args=(rank, *args, results)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    seen = dict(results.get() for _ in ranks)
    for rank in ranks:
        rank.join()
    return [seen[rank] for rank in range(num_ranks)]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fork", loop),
        ("fork", workers),
        pytest.param("fork", spawned_workers, marks=pytest.mark.nightly),
        pytest.param("spawn", workers, marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_get_one_dataset_read_the_same_epochs(shards: str, method: str, kind: Callable[..., Any]) -> None:
    """Its position is shared by the workers of each rank, not by the ranks; and they know the world of their rank."""
    dataset = dataset_of(shards)
    assert in_ranks(method, two_epochs, 2, dataset, kind, free_port()) == expected(shards, 2)


@pytest.mark.distributed
def test_a_rank_that_is_forked_in_an_epoch_continues_as_the_process_it_comes_from(shards: str) -> None:
    dataset = dataset_of(shards)
    assert len(ids_of(DataLoader(dataset, BATCH, num_workers=2))) == NUM_SAMPLES
    second = expected(shards, 1)[0][1]
    processes = multiprocessing.get_context("fork")
    results = processes.SimpleQueue()
    process = processes.Process(target=lambda: results.put(ids_of(dataset)))
    process.start()
    assert results.get() == second
    process.join()
    assert ids_of(dataset) == second


def world_in_worker(sent: bytes, results: Any) -> None:
    become_worker(0, 1, 0, None)
    results.put(len(ids_of(pickle.loads(sent))))


def test_a_spawned_worker_of_torch_has_the_world_of_its_trainer(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Popen:
        """What multiprocessing notes while it pickles for a process; a forked one has all descriptors."""

        DupFd = popen_spawn_posix._DupFd

        def duplicate_for_child(self, fd: int) -> int:
            return fd

    processes = multiprocessing.get_context("fork")
    results = processes.SimpleQueue()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    dataset = dataset_of(shards)
    context.set_spawning_popen(Popen())
    try:
        sent = bytes(reduction.ForkingPickler.dumps(dataset))
    finally:
        context.set_spawning_popen(None)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    process = processes.Process(target=world_in_worker, args=(sent, results))
    process.start()
    assert results.get() == NUM_SAMPLES // 3
    process.join()
    assert len(ids_of(pickle.loads(pickle.dumps(dataset)))) == NUM_SAMPLES


def on_unequal_nodes(rank: int, shards: str, port: int, results: Any) -> None:
    os.environ |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "12"[rank < 2]}  # two ranks on the first node, then one
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    results.put((rank, ids_of(StreamingDataLoader(dataset_of(shards)))))
    dist.barrier()
    os._exit(0)


@pytest.mark.distributed
def test_nodes_of_different_sizes_read_each_sample_once(shards: str) -> None:
    """Each launcher process says the size of its own node alone."""
    ids = in_ranks("fork", on_unequal_nodes, 3, shards, free_port())
    assert sorted(chain(*ids)) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_a_copy_of_a_dataset_in_an_epoch_stands_where_it_does(
    shards: str, copied: Callable[[StreamingDataset], StreamingDataset]
) -> None:
    dataset = dataset_of(shards)
    items = iter(dataset)
    for _ in range(10):
        next(items)
    other = copied(dataset)
    assert other.state_dict() == dataset.state_dict()
    assert other.state_dict()["position"] == 10
    assert ids_of(other) == expected(shards, 1)[0][1]
