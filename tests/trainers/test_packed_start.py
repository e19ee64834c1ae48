"""What a trainer plans of packed rows before its first step: it counts an epoch, and makes few rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chains import number_row

from lightning_stream import MDSWriter, Packing, StreamingDataLoader, StreamingDataset
from lightning_stream.order import micro_batches
from lightning_stream.order import rows as rows_module
from lightning_stream.order.packing import PackedWindow, RowSpans

WINDOWS, WINDOW = 300, 10
Fit = Callable[[int, "Path | None"], Path]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the rows of a window were counted, and how often they were made."""
    counts: Counter[str] = Counter()

    class Logged(PackedWindow):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            counts["counted"] += 1

        def rows(self) -> RowSpans:
            counts["made"] += 1
            return super().rows()

    monkeypatch.setattr(rows_module, "PackedWindow", Logged)
    monkeypatch.setattr(micro_batches, "_PLANNED_SAMPLES", 64)  # in proportion to the small data
    return counts


def dataset_of(folder: Path) -> StreamingDataset:
    """Rows of 300 windows of one canonical node."""
    if not folder.exists():
        with MDSWriter(out=str(folder), columns={"tokens": "ndarray:int32"}, lengths={"tokens": len}) as writer:
            for number in range(WINDOWS * WINDOW):
                writer.write({"tokens": np.full(1 + number % 9, number, np.int32)})
    pack = Packing(row_length=64, window=WINDOW)
    options: dict[str, Any] = {"transform": number_row, "num_canonical_nodes": 1, "predownload": 4}
    return StreamingDataset(local=folder, shuffle=True, pack=pack, **options)


def expect_few(planned: Counter[str], fit: Fit) -> None:
    saved = fit(2, None)
    assert 0 < planned["made"] < 60
    assert planned["counted"] < WINDOWS + 60, "the trainer asks for the length of the epoch: each window counts once"
    planned.clear()
    fit(3, saved)
    assert 0 < planned["made"] < 60
    assert planned["counted"] < WINDOWS + 60, "and once where it resumes"


@pytest.mark.filterwarnings("ignore")  # Lightning has advice for so short a run
@pytest.mark.parametrize("has_module", [False, True])
def test_lightning_counts_an_epoch_once_and_makes_the_rows_that_it_needs(
    tmp_path: Path, planned: Counter[str], has_module: bool
) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from support.lightning_runs import QUIET, Recorder

    from lightning_stream import StreamingCallback, StreamingDataModule

    def fit(max_steps: int, saved: Path | None) -> Path:
        callbacks = [] if has_module else [StreamingCallback()]
        trainer = pl.Trainer(**{**QUIET, "max_epochs": -1, "max_steps": max_steps, "callbacks": callbacks})
        dataset = dataset_of(tmp_path / "data")
        data = StreamingDataModule(dataset, batch_size=4) if has_module else StreamingDataLoader(dataset, 4)
        trainer.fit(Recorder(), data, ckpt_path=saved)
        trainer.save_checkpoint(tmp_path / f"{max_steps}.ckpt")
        return tmp_path / f"{max_steps}.ckpt"

    expect_few(planned, fit)


def test_composer_counts_an_epoch_once_and_makes_the_rows_that_it_needs(tmp_path: Path, planned: Counter[str]) -> None:
    pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")
    from support.composer_runs import Run

    from lightning_stream.trainers.composer.spec import data_spec

    def fit(max_steps: int, saved: Path | None) -> Path:
        spec = data_spec(dataset_of(tmp_path / "data"), global_batch_size=4)
        Run(None, tmp_path, saved, spec=spec, max_duration=f"{max_steps}ba", save_at=(max_steps,))
        return tmp_path / "ckpt" / f"ba{max_steps}.pt"

    expect_few(planned, fit)
