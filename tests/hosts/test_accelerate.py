"""A loader that Accelerate has prepared serves it as one of its own does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")

import torch  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.errors import StateError  # noqa: E402


def no_accelerator_now() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def no_accelerator() -> Iterator[None]:
    yield
    no_accelerator_now()


def write(folder: Path, count: int) -> str:
    with MDSWriter(out=str(folder), columns={"id": "int"}) as writer:
        for number in range(count):
            writer.write({"id": number})
    return str(folder)


def begin(data: str, accumulate: int, counts: int) -> tuple[Any, Any, Any]:
    """An accelerator that accumulates `counts` micro-batches, and its model and loader."""
    no_accelerator_now()
    host = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=counts)
    loader = StreamingDataLoader(StreamingDataset(remote=data), global_batch_size=4, accumulate=accumulate)
    model, prepared = host.prepare(torch.nn.Linear(1, 1), loader)
    return host, model, prepared


def steps_of(host: Any, model: Any, loader: Any) -> list[list[int]]:
    """The samples of each optimizer step of an epoch."""
    steps: list[list[int]] = [[]]
    for batch in loader:
        with host.accumulate(model):
            steps[-1] += batch["id"].tolist()
            if host.sync_gradients:
                steps.append([])
    return steps[:-1]


def test_steps_in_the_middle_of_a_global_batch_are_an_error(tmp_path: Path) -> None:
    """A run with another accumulation continues where Accelerate's count of micro-batches is set back."""
    data = write(tmp_path / "data", 40)
    host, model, loader = begin(data, 1, 1)
    for k, _ in enumerate(loader):
        with host.accumulate(model):
            pass
        if k == 2:
            host.save_state(str(tmp_path / "three"))
            break
    host, model, loader = begin(data, 2, 2)
    host.load_state(str(tmp_path / "three"))
    with pytest.raises(StateError, match=r"accelerator.step = 0"):
        steps_of(host, model, loader)
    host, model, loader = begin(data, 2, 2)
    assert len(list(loader)) == 20  # a pass without training
    host.load_state(str(tmp_path / "three"))
    host.step = 0
    assert steps_of(host, model, loader) == [[*range(first, first + 4)] for first in range(12, 40, 4)]


def test_a_loader_that_accumulates_otherwise_is_an_error(tmp_path: Path) -> None:
    host, model, loader = begin(write(tmp_path / "data", 40), 4, 2)
    with pytest.raises(StateError, match="accumulates 2 micro-batches and the loader 4"):
        steps_of(host, model, loader)


def test_batches_that_accelerate_would_skip_are_refused_with_the_name_of_what_would_skip_them(tmp_path: Path) -> None:
    host, _, loader = begin(write(tmp_path, 10), 1, 1)
    with pytest.raises(ValueError, match="Leave skip_first_batches out"):
        next(iter(host.skip_first_batches(loader, 2)))


def test_gradients_are_synchronised_at_each_step_and_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    host, model, prepared = begin(write(tmp_path, 10), 2, 2)
    assert isinstance(prepared, StreamingDataLoader)
    for _ in range(2):
        synchronised = []
        for _ in prepared:
            with host.accumulate(model):
                synchronised.append(host.sync_gradients)
        assert synchronised == [False, True, False, True, True]
        assert host.gradient_state.active_dataloader is None


def test_looks_at_the_loader_change_no_synchronisation(tmp_path: Path) -> None:
    host, model, prepared = begin(write(tmp_path, 10), 2, 2)
    synchronised = []
    for _ in prepared:
        next(iter(prepared))
        with host.accumulate(model):
            synchronised.append(host.sync_gradients)
    assert synchronised == [False, True, False, True, True]
    assert host.gradient_state.active_dataloader is None


def test_a_loop_without_accumulate_steps_as_with_accelerates_own_loaders(tmp_path: Path) -> None:
    host, model, prepared = begin(write(tmp_path, 8), 2, 2)
    optimizer = host.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    biases = [model.bias.item()]
    for batch in prepared:
        host.backward(model(batch["id"][:, None].float()).sum())
        optimizer.step()
        optimizer.zero_grad()
        biases.append(model.bias.item())
    assert len(set(biases)) == 5


def test_a_checkpoint_without_the_loaders_state_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "data", 40)
    host = accelerate.Accelerator(cpu=True)
    host.prepare(torch.nn.Linear(1, 1))
    host.save_state(str(tmp_path / "no loader"))
    host, _, loader = begin(data, 1, 1)
    host.prepare(StreamingDataLoader(StreamingDataset(remote=data), 4, evaluation=True))
    with pytest.raises(StateError, match=r"no loader has no dl_state_dict\.bin.*prepare the loader after load_state"):
        host.load_state(str(tmp_path / "no loader"))
    next(iter(loader))
    host.save_state(str(tmp_path / "saved"))
    (tmp_path / "saved" / "dl_state_dict_1.bin").unlink()  # an evaluation has no position
    host.load_state(str(tmp_path / "saved"))
    assert next(iter(loader))["id"].tolist() == [4, 5, 6, 7]
