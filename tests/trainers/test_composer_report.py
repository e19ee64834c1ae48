"""Under Composer a run leaves a log of its data and a page beside its checkpoints, also where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

composer: Any = pytest.importorskip("composer", reason="Composer is not installed: uv sync --no-dev --extra composer")

from support.composer_runs import EPOCHS, NUM_SAMPLES, STEPS_PER_EPOCH, Run, checkpoints, write_shards  # noqa: E402

from lightning_stream.run_log import LOG_NAME, PAGE_NAME, read_run  # noqa: E402


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("composer_report") / "data")


class Raises(composer.Callback):  # type: ignore[misc]  # Composer has no types
    def __init__(self, step: int) -> None:
        self.step = step

    def batch_end(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) == self.step:
            raise ValueError("no more")


def test_a_run_leaves_its_log_and_its_page_beside_its_checkpoints(shards: Path, tmp_path: Path) -> None:
    run = Run(shards, tmp_path, save_interval="1ep")
    (launch,) = read_run(tmp_path / "ckpt").launches
    stats = run.trainer.state.callbacks[0].monitor.stats()
    assert launch.stats.num_samples == stats.num_samples == EPOCHS * NUM_SAMPLES
    assert launch.stats.wait_s == pytest.approx(stats.wait_s, abs=1e-4)
    assert (launch.rows[-1].step, launch.how) == (EPOCHS * STEPS_PER_EPOCH, "finished")
    assert (tmp_path / "ckpt" / PAGE_NAME).is_file()


def test_a_run_that_fails_names_the_error_and_the_resumed_run_continues_its_log(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no more"):
        Run(shards, tmp_path, save_interval="4ba", callbacks=[Raises(7)])
    assert [launch.how for launch in read_run(tmp_path / "ckpt").launches] == ["ValueError: no more"]
    Run(shards, tmp_path, checkpoints(tmp_path)[4], save_interval="4ba")
    launches = read_run(tmp_path / "ckpt").launches
    assert [launch.how for launch in launches] == ["ValueError: no more", "finished"]
    assert [launch.start.place for launch in launches] == [(0, 0), (0, 64)]


def test_no_log_is_written_without_a_folder_of_checkpoints(shards: Path, tmp_path: Path) -> None:
    Run(shards, tmp_path, max_duration="2ba")
    Run(shards, tmp_path, max_duration="2ba", save_interval="1ba", data={"report": False})
    assert list(tmp_path.rglob(LOG_NAME)) == []
    Run(shards, tmp_path, max_duration="2ba", data={"report": tmp_path / "run"})
    assert read_run(tmp_path / "run").stats.num_samples == 32
