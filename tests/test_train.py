"""train.py, from the command line to the picture: on tiny settings, stopped and resumed, and told nonsense."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Callback
from omegaconf import DictConfig
from PIL import Image

from lightning_stream.recipes import training
from lightning_stream.recipes.checks import find_problems
from lightning_stream.recipes.command_line import advise, tidied

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
TINY = [
    "data=flowers",
    "data.drawn_count=60",
    "data.held_out=0.2",
    "data.size_limit=64kb",
    "data.image_size=32",
    "data.global_batch_size=8",
    "data.num_workers=0",
    "+model.network_options.width_mult=0.25",
    "trainer.max_epochs=3",
    "callbacks=trained_ids",
    "callbacks.last.every_n_train_steps=4",
    "scale=cpu",
    "num_threads=1",
]
NO_PROGRESS = ["~callbacks.progress", "trainer.enable_progress_bar=false"]


def run_train(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONWARNINGS": "default"}
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=list(overrides))


class Alarm(Callback):
    """Sends this process a signal during a step, or during a validation."""

    def __init__(self, signum: int, step: int, in_validation: bool) -> None:
        self.signum, self.step, self.in_validation = signum, step, in_validation

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and not self.in_validation:
            os.kill(os.getpid(), self.signum)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        if self.in_validation:
            os.kill(os.getpid(), self.signum)


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `instantiate` add an alarm to the next run."""
    waiting: list[Callback] = []
    real = training.instantiate

    def with_alarm(node: Any, **kwargs: Any) -> Any:
        if "callbacks" in kwargs:
            kwargs["callbacks"] = [*kwargs["callbacks"], *waiting]
            waiting.clear()
        return real(node, **kwargs)

    monkeypatch.setattr(training, "instantiate", with_alarm)
    return lambda *args: waiting.append(Alarm(*args))


def train(root: Path, name: str, *more: str) -> Path:
    training.train(composed(*TINY, *NO_PROGRESS, f"root={root}", f"name={name}", *more))
    return root / name


def trained_ids(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trained_ids" / "rank-0.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    held = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert isinstance(held, dict)
    return held


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    return train(root, "whole")


def test_the_command_of_the_readme_ends_with_a_trained_model_and_a_summary(tmp_path: Path) -> None:
    done = run_train("+data=flowers", *TINY[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]
    folder = tmp_path / "runs" / "flowers"
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("shards", "checkpoint", "log", "picture"):
        assert (tmp_path / summary["places"][name]).exists()
        assert summary["places"][name] in done.stdout
    assert len(summary["accuracies"]) == 3
    assert all(0 <= values[stage] <= 1 for values in summary["accuracies"].values() for stage in ("train", "val"))
    assert summary["samples_per_s"] > 0
    assert 0 <= summary["waiting_share"] <= 1
    assert "drawings made by this package, not photos" in done.stdout
    assert "Warning" not in done.stderr
    with Image.open(folder / "predictions.png") as picture:
        assert picture.format == "PNG"
        assert picture.size[0] > 600


def test_every_sample_is_trained_on_once_an_epoch(uninterrupted: Path) -> None:
    lines = trained_ids(uninterrupted)
    for epoch in range(3):
        ids = [one for line in lines if line["epoch"] == epoch for one in line["ids"]]
        assert sorted(ids) == list(range(len(ids)))
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_goes_on_exactly(
    uninterrupted: Path, alarm: Any, signum: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    root, name = uninterrupted.parent, f"stopped-{signum.name}"
    alarm(signum, 8, False)
    with pytest.raises(SystemExit) as ended:
        train(root, name)
    assert ended.value.code == 128 + signum
    assert "ckpt_path=last" in capsys.readouterr().out
    assert len(trained_ids(root / name)) == 9
    folder = train(root, name, "ckpt_path=last")
    assert trained_ids(folder) == trained_ids(uninterrupted)
    resumed = weights(folder)
    assert all(torch.equal(value, resumed[key]) for key, value in weights(uninterrupted).items())
    accuracies = [json.loads((one / "summary.json").read_text())["accuracies"] for one in (folder, uninterrupted)]
    assert accuracies[0] == accuracies[1]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_stopped_during_validation_goes_on_exactly(uninterrupted: Path, alarm: Any) -> None:
    alarm(signal.SIGTERM, 0, True)
    with pytest.raises(SystemExit):
        train(uninterrupted.parent, "stopped-in-validation")
    folder = train(uninterrupted.parent, "stopped-in-validation", "ckpt_path=last")
    assert trained_ids(folder) == trained_ids(uninterrupted)


class Crash(Callback):
    """Fails in the middle of a step."""

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 10:
            raise ZeroDivisionError("power cut")


def test_steps_after_the_last_checkpoint_are_taken_back_on_resume(
    uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = training.instantiate

    def with_crash(node: Any, **kwargs: Any) -> Any:
        if "callbacks" in kwargs:
            kwargs["callbacks"] = [*kwargs["callbacks"], Crash()]
        return real(node, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(training, "instantiate", with_crash)
        with pytest.raises(ZeroDivisionError):
            train(uninterrupted.parent, "crashed")
    assert len(trained_ids(uninterrupted.parent / "crashed")) == 10  # the checkpoint knows 8 of them
    folder = train(uninterrupted.parent, "crashed", "ckpt_path=last")
    assert trained_ids(folder) == trained_ids(uninterrupted)


def test_workers_do_not_outlive_a_run_stopped_or_over(uninterrupted: Path, alarm: Any) -> None:
    with_workers = ("data.num_workers=1", "data.persistent_workers=true")
    alarm(signal.SIGTERM, 8, False)
    with pytest.raises(SystemExit):
        train(uninterrupted.parent, "with-workers", *with_workers)
    assert multiprocessing.active_children() == []
    folder = train(uninterrupted.parent, "with-workers", *with_workers, "ckpt_path=last")
    assert multiprocessing.active_children() == []
    assert trained_ids(folder) == trained_ids(uninterrupted)


def test_a_run_that_is_over_only_sums_up(uninterrupted: Path) -> None:
    before = trained_ids(uninterrupted)
    train(uninterrupted.parent, "whole", "ckpt_path=last")
    assert trained_ids(uninterrupted) == before


def test_a_new_run_of_the_same_name_keeps_the_earlier_checkpoints_aside(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for content in ("first", "second"):
        folder.mkdir()
        (folder / "last.ckpt").write_text(content)
        training.put_aside(folder)
    assert (tmp_path / "checkpoints.earlier" / "last.ckpt").read_text() == "second"
    assert not folder.exists()


# What is wrong with a config


def test_all_problems_are_named_at_once_each_with_its_place(tmp_path: Path) -> None:
    config = composed(
        "data=flowers",
        "data.compression=zst",
        "data.photos=drwn",
        "data.held_out=2",
        "data.image_size=big",
        "data.global_batch_size=30",
        "trainer.devices=4",
        "+trainer.max_epoch=3",
        "model.weights=/none/at.all",
        "ckpt_path=last",
        f"root={tmp_path}",
        "name=x",
    )
    problems = "\n".join(find_problems(config))
    for part in (
        "data.compression: ",
        "data.photos: is 'drawn', 'download', or a path; there is nothing at ",
        "Did you mean 'drawn'?",
        "data.held_out: is a share",
        "data.image_size: must be a whole number; found 'big'",
        "trainer.max_epoch: Trainer has no such setting. Did you mean 'max_epochs'?",
        "use a multiple of 4",
        "model.weights: there is no file at /none/at.all",
        "ckpt_path: 'last' continues from ",
    ):
        assert part in problems
    assert problems.count("\n") == 7


def test_a_right_config_has_no_problems(tmp_path: Path) -> None:
    assert find_problems(composed(*TINY, f"root={tmp_path}", "name=x")) == []


def test_nothing_chosen_says_what_to_add(tmp_path: Path) -> None:
    assert find_problems(composed(f"root={tmp_path}", "name=x")) == ["data: nothing is chosen. Add +data=flowers."]


def test_wrong_names_get_the_nearest_valid_ones_all_together() -> None:
    told = "\n".join(advise(["data=flowers", "data.phots=x", "model=mobilenet", "trainer.max_epocs=3"], CONFIGS))
    assert "3 thing(s) to change" in told
    assert "data.phots: there is no such setting. Did you mean 'data.photos'?" in told
    assert "Did you mean 'mobilenet_v2'?" in told
    assert "Did you mean 'trainer.max_epochs'?" in told


def test_wrong_names_and_wrong_values_are_told_together() -> None:
    wrong = ["data=flowers", "data.phots=x", "data.image_size=big", "scale=cpu", "scale.devices=3", "seed=-1"]
    told = "\n".join(advise(wrong, CONFIGS))
    assert "4 thing(s) to change" in told
    assert "Did you mean 'data.photos'?" in told
    assert "data.image_size: must be a whole number; found 'big'." in told
    assert "use a multiple of 3" in told
    assert "seed: must be at least 0; found -1." in told


def test_a_wrong_name_on_the_command_line_gets_hydras_message_and_ours(tmp_path: Path) -> None:
    done = run_train("+data=flowers", "data.phots=/x", cwd=tmp_path)
    assert done.returncode == 1
    assert "Could not override 'data.phots'" in done.stderr
    assert "Did you mean 'data.photos'?" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_value_on_the_command_line_ends_before_any_work(tmp_path: Path) -> None:
    done = run_train("data=flowers", "data.compression=zst", "ckpt_path=last", cwd=tmp_path)
    assert done.returncode == 2
    assert "data.compression: " in done.stderr
    assert "ckpt_path: 'last' continues from " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "shards").exists()


def test_weights_of_another_model_are_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(_: object) -> None:
        torch.nn.Linear(2, 2).load_state_dict(torch.nn.Conv2d(2, 2, 3).state_dict())

    monkeypatch.setattr(training, "_run", load)
    with pytest.raises(SystemExit) as ended:
        training.train(composed(*TINY, f"root={tmp_path}", "name=x"))
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "this checkpoint's weights do not fit ImageClassifier with these settings" in told
    assert "The first that differs: size mismatch for weight" in told


def test_both_ways_to_choose_data_are_one() -> None:
    assert tidied(["+data=flowers", "+data.x=1", "+x=1"]) == ["data=flowers", "+data.x=1", "+x=1"]


def test_flags_may_stand_between_settings() -> None:
    given = ["+data=flowers", "-m", "seed=1,2", "--config-dir", "mine", "x=1"]
    assert tidied(given) == ["-m", "--config-dir", "mine", "data=flowers", "seed=1,2", "x=1"]


def test_help_and_cfg_show_what_can_be_set(tmp_path: Path) -> None:
    shown = run_train("--help", cwd=tmp_path).stdout
    assert re.search(r"^data: .*\bflowers\b", shown, re.MULTILINE)
    assert "ckpt_path=last" in shown
    config = run_train("+data=flowers", "--cfg", "job", cwd=tmp_path).stdout
    assert "photos: drawn" in config
    assert "_target_: lightning.pytorch.Trainer" in config
    assert list(tmp_path.iterdir()) == []


FILES = [file for file in sorted(CONFIGS.rglob("*.yaml")) if file.parent.name not in ("store", "scale", "trainer")]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_every_config_file_can_be_chosen_and_has_no_problems(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    # stores, scales and trainers: tests/recipes/test_configs.py
    group, name = file.parent.name, file.stem
    chosen = [] if group == "configs" else [f"{group}={name}"]
    base = [] if group in ("data", "experiment") else ["data=flowers"]
    config = composed(*base, *chosen, f"root={tmp_path}", *([] if group == "experiment" else ["name=x"]))
    # of a run that is not there, and of the default data or model beside another's
    expected = ("ckpt_path: 'last' continues", "model: ")
    assert [problem for problem in find_problems(config) if not problem.startswith(expected)] == []


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_train_on_what_one_does_and_go_on_where_it_was_stopped(uninterrupted: Path, alarm: Any) -> None:
    root = uninterrupted.parent
    alarm(signal.SIGTERM, 8, False)
    with pytest.raises(SystemExit):
        train(root, "widened")
    arguments = [*TINY, f"root={root}", "name=widened", "ckpt_path=last", "trainer.devices=2"]
    done = run_train(*arguments, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    lines = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted((root / "widened" / "trained_ids").iterdir())
    ]
    together = [{**line, "ids": sorted(line["ids"])} for line in lines[0][:9]]
    for one, other in zip(lines[0][9:], lines[1], strict=True):
        assert one["step"] == other["step"]
        together.append({**one, "ids": sorted(one["ids"] + other["ids"])})
    assert together == [{**line, "ids": sorted(line["ids"])} for line in trained_ids(uninterrupted)]
    assert done.stdout.count("epoch   train accuracy") == 1
