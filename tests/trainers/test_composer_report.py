"""Under Composer a run leaves a report of its data beside its checkpoints, also where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

composer: Any = pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from support.composer_runs import EPOCHS, NUM_SAMPLES, STEPS_PER_EPOCH, Run, checkpoints, write_shards  # noqa: E402

from lightning_stream.pages import embedded  # noqa: E402


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("composer_report") / "data")


class Raises(composer.Callback):  # type: ignore[misc]  # Composer has no types
    def __init__(self, step: int) -> None:
        self.step = step

    def batch_end(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) == self.step:
            raise ValueError("no more")


def values_in(path: Path) -> dict[str, Any]:
    return embedded(path.read_text(encoding="utf-8"))


def test_a_run_leaves_its_report_beside_its_checkpoints(shards: Path, tmp_path: Path) -> None:
    run = Run(shards, tmp_path, save_interval="1ep")
    values, stats = values_in(tmp_path / "ckpt" / "data_report.html"), run.trainer.state.callbacks[0].monitor.stats()
    assert sum(values["columns"]["samples"]) == stats.num_samples == EPOCHS * NUM_SAMPLES
    assert values["columns"]["step"][-1] == EPOCHS * STEPS_PER_EPOCH
    assert values["kept"]["launches"][0]["ended"] == "finished"


def test_a_run_that_fails_names_the_error_and_the_resumed_run_continues_its_page(shards: Path, tmp_path: Path) -> None:
    page = tmp_path / "ckpt" / "data_report.html"
    with pytest.raises(ValueError, match="no more"):
        Run(shards, tmp_path, save_interval="4ba", callbacks=[Raises(7)])
    assert values_in(page)["kept"]["launches"][0]["ended"] == "ValueError: no more"
    Run(shards, tmp_path, checkpoints(tmp_path)[4], save_interval="4ba")
    launches = values_in(page)["kept"]["launches"]
    assert [one["ended"] for one in launches] == ["ValueError: no more", "finished"]
    assert [one["from"] for one in launches] == [[0, 0], [0, 64]]


def test_no_report_is_written_without_a_folder_of_checkpoints(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, max_duration="2ba")
    Run(shards, tmp_path, max_duration="2ba", save_interval="1ba", data={"report": False})
    assert list(tmp_path.rglob("*.html")) == []
    Run(shards, tmp_path, max_duration="2ba", data={"report": tmp_path / "run.html"})
    assert sum(values_in(tmp_path / "run.html")["columns"]["samples"]) == 32
