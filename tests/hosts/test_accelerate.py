"""A loader that Accelerate has prepared serves it as one of its own does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")

import torch  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402


@pytest.fixture(autouse=True)
def no_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_gradients_are_synchronised_at_each_step_and_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"id": "int"}) as writer:
        for number in range(10):
            writer.write({"id": number})
    loader = StreamingDataLoader(StreamingDataset(remote=str(tmp_path)), global_batch_size=4, accumulate=2)
    host = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    model, prepared = host.prepare(model, loader)
    assert prepared is loader
    for _ in range(2):
        synchronised = []
        for _ in prepared:
            with host.accumulate(model):
                synchronised.append(host.sync_gradients)
        assert synchronised == [False, True, False, True, True]
        assert host.gradient_state.active_dataloader is None
