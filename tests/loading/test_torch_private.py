"""What we rely on inside torch and multiprocessing: this file fails when a new version lays it out otherwise."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # noqa: E402

from lightning_stream.loading import torch_private  # noqa: E402


class Seen(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield get_worker_info().dataset


def show(_: int) -> None:
    torch_private.set_worker_dataset(get_worker_info(), "another")


def as_it_is(value: Any) -> Any:
    return value


def test_a_workers_dataset_can_be_replaced_and_its_processes_ended() -> None:
    batches = iter(DataLoader(Seen(), batch_size=None, num_workers=1, worker_init_fn=show, collate_fn=as_it_is))
    (process,) = torch_private.worker_processes(batches)
    assert next(batches) == "another"
    assert process.is_alive()
    torch_private.end_workers(batches)
    assert not process.is_alive()
    assert torch_private.worker_processes(iter([])) == []


def test_a_forkserver_preloads_the_package_unless_the_program_chose_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    monkeypatch.setattr(forkserver, "set_forkserver_preload", server.set_forkserver_preload)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: None)
    torch_private.start_servers("fork")
    assert server._preload_modules == ["__main__"]
    torch_private.start_servers(multiprocessing.get_context("forkserver"))
    assert server._preload_modules == ["__main__", "lightning_stream.loading.in_forkserver", "lightning_stream.loader"]
    server.set_forkserver_preload(["json"])
    torch_private.start_servers("forkserver")
    assert server._preload_modules == ["json"]
