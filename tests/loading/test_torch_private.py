"""What we rely on inside torch and multiprocessing: this file fails when a new version lays it out otherwise."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # noqa: E402

from lightning_stream import MDSWriter, Packing, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.errors import SettingsMismatch  # noqa: E402
from lightning_stream.loading import torch_private  # noqa: E402


class Seeds(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield seen()


def seen() -> tuple[Any, ...]:
    info = get_worker_info()
    drawn = torch.randint(1 << 40, (2,)).tolist()
    return drawn, info.id, info.num_workers, info.seed, torch.initial_seed(), torch.get_num_threads()


def be_worker(index: int, seed: int, results: Any) -> None:
    torch_private.become_worker(index, 2, seed, "the dataset")
    results.put((seen(), get_worker_info().dataset))


def as_it_is(value: Any) -> Any:
    return value


def test_a_worker_is_as_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Seeds(), batch_size=None, num_workers=2, collate_fn=as_it_is, generator=generator)
    torchs = list(loader)
    context, seed = multiprocessing.get_context("fork"), torchs[0][3]
    results = context.SimpleQueue()
    for index in range(2):
        process = context.Process(target=be_worker, args=(index, seed, results))
        process.start()
        assert results.get() == (torchs[index], "the dataset")
        process.join()


def test_an_error_of_a_worker_is_raised_with_its_traceback() -> None:
    def fail() -> None:
        raise KeyError("no such column")

    try:
        fail()
    except KeyError as error:
        sent = torch_private.pickled_error(error, 3)
    with pytest.raises(KeyError, match=r"(?s)in DataLoader worker process 3.*in fail.*no such column"):
        torch_private.raise_error(sent)


def test_a_forkserver_preloads_the_package_unless_the_program_chose_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    monkeypatch.setattr(forkserver, "set_forkserver_preload", server.set_forkserver_preload)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: None)
    torch_private.start_servers(multiprocessing.get_context("fork"))
    assert server._preload_modules == ["__main__"]
    torch_private.start_servers(multiprocessing.get_context("forkserver"))
    assert server._preload_modules == ["__main__", "lightning_stream.loading.in_forkserver", "lightning_stream.loader"]
    server.set_forkserver_preload(["json"])
    torch_private.start_servers(multiprocessing.get_context("forkserver"))
    assert server._preload_modules == ["json"]


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")  # the latter in torch 2.6
def test_a_sharded_checkpoint_gives_a_state_back_with_keys_that_a_new_loader_has_not(tmp_path: Path) -> None:
    """Of packed rows, a state holds what was counted; and other settings are named, where keys would be missing."""
    from torch.distributed import checkpoint

    with MDSWriter(out=str(tmp_path / "data"), columns={"tokens": "ndarray:int32"}, lengths={"tokens": len}) as writer:
        for number in range(60):
            writer.write({"tokens": np.zeros(3 + number % 17, np.int32)})

    def loader(**options: Any) -> StreamingDataLoader:
        return StreamingDataLoader(StreamingDataset(tmp_path / "data", shuffle=True, **options), 2)

    trained = loader(pack=Packing(row_length=40))
    batches = iter(trained)
    for _ in range(3):
        next(batches)
    state = trained.state_dict()
    resumed = loader(pack=Packing(row_length=40))
    assert "landmark" in state.keys() - resumed.state_dict().keys()
    checkpoint.save({"data": trained}, checkpoint_id=tmp_path / "ckpt")
    checkpoint.load({"data": resumed}, checkpoint_id=tmp_path / "ckpt")
    assert resumed.state_dict() == state
    with pytest.raises(SettingsMismatch, match="packing was"):
        checkpoint.load({"data": loader()}, checkpoint_id=tmp_path / "ckpt")
