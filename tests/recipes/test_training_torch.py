"""trainer=torch: the plain loop trains what Lightning trains, bit for bit, and is as exact over stops and processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the recipes need torch: uv sync")
pytest.importorskip("hydra", reason="configs are put together by Hydra: uv sync")
pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")

import torch
from hydra import compose, initialize_config_dir

from lightning_stream.recipes import torch_run, training
from lightning_stream.trainers.checkpoints import read_position

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = [
    "data=flowers",
    "data.drawn_count=40",
    "data.held_out=0.2",
    "data.size_limit=64kb",
    "data.image_size=32",
    "data.global_batch_size=8",
    "data.num_workers=0",
    "+model.network_options.width_mult=0.25",
    "trainer.max_epochs=2",
    "scale=cpu",
    "num_threads=1",
]
PLAIN = ["trainer=torch", "trainer.trained_ids=true", "trainer.progress=false", "trainer.save_every=2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def train(root: Path, name: str, *more: str) -> Path:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("train", overrides=[*TINY, *more, f"root={root}", f"name={name}"])
    training.train(config)
    return root / name


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    return train(root, "whole", *PLAIN)


def ids(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    lines = (folder / "trained_ids" / f"rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def state(folder: Path) -> dict[str, Any]:
    held: dict[str, Any] = torch.load(folder / "torch" / "last.pt", weights_only=True)
    return held


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def test_the_plain_loop_trains_what_lightning_trains_bit_for_bit(root: Path, whole: Path) -> None:
    quiet = ["~callbacks.progress", "trainer.enable_progress_bar=false", "callbacks=trained_ids"]
    lightning = train(root, "lightning", *quiet)
    assert ids(lightning) == ids(whole)
    held = torch.load(lightning / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert same(held, state(whole)["state_dict"])
    told = [json.loads((one / "summary.json").read_text()) for one in (lightning, whole)]
    assert told[0]["accuracies"] == told[1]["accuracies"]
    assert told[0]["num_samples"] == told[1]["num_samples"]
    assert set(told[0]["places"]) - {"best"} == set(told[1]["places"])


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sends this process a signal in the step after so many."""
    real = torch_run._Loop._step
    wanted: list[tuple[int, int]] = []

    def step(loop: Any) -> None:
        real(loop)
        if wanted and loop.step == wanted[0][0]:
            os.kill(os.getpid(), wanted.pop()[1])

    monkeypatch.setattr(torch_run._Loop, "_step", step)
    yield lambda number, signum: wanted.append((number, signum))
    assert wanted == []


@pytest.mark.parametrize(("step", "signum"), [(3, signal.SIGTERM), (4, signal.SIGINT), (5, signal.SIGTERM)])
def test_a_stopped_loop_goes_on_exactly(
    root: Path, whole: Path, stop_after: Any, step: int, signum: signal.Signals
) -> None:
    stop_after(step, signum)
    with pytest.raises(SystemExit) as ended:
        train(root, f"stopped-{step}", *PLAIN)
    assert ended.value.code == 128 + signum
    assert state(root / f"stopped-{step}")["step"] == step
    folder = train(root, f"stopped-{step}", *PLAIN, "ckpt_path=last")
    assert ids(folder) == ids(whole)
    assert same(state(folder)["state_dict"], state(whole)["state_dict"])
    assert state(folder)["measured"] == state(whole)["measured"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_accumulated_micro_batches_train_on_the_same_samples(root: Path, whole: Path) -> None:
    folder = train(root, "accumulated", *PLAIN, "trainer.accumulate_grad_batches=2")
    assert [(one["step"], one["ids"]) for one in ids(folder)] == [(one["step"], one["ids"]) for one in ids(whole)]


def test_the_position_moves_to_other_trainers(whole: Path) -> None:
    position = read_position(whole / "torch" / "last.pt")
    assert position["epoch"] == 2


def test_steps_may_end_a_run_and_validate_it(root: Path) -> None:
    limits = ["trainer.max_epochs=-1", "trainer.max_steps=3", "trainer.val_check_interval=2"]
    folder = train(root, "steps", *PLAIN, *limits, "trainer.check_val_every_n_epoch=null")
    assert state(folder)["step"] == 3
    lines = [json.loads(line) for line in (folder / "torch" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "epoch/val/accuracy" in line] == [2, 3]


def test_a_checkpoint_of_other_data_is_refused_without_a_traceback(
    root: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(root, "other", *PLAIN, "data.drawn_count=41", f"ckpt_path={whole / 'torch' / 'last.pt'}")
    assert ended.value.code == 2
    assert "A run must continue over the data it began with" in capsys.readouterr().err


def test_a_refused_run_leaves_the_earlier_ones_config_and_names_it(
    root: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = (whole / "config.yaml").read_text()
    with pytest.raises(SystemExit):
        train(root, "whole", *PLAIN, "data.drawn_count=41", "ckpt_path=last")
    assert (whole / "config.yaml").read_text() == began
    assert f"that the run began with (they are in {whole / 'config.yaml'})" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_go_on_where_one_was_stopped_and_one_where_two_were(
    root: Path, whole: Path, stop_after: Any
) -> None:
    stop_after(3, signal.SIGTERM)
    with pytest.raises(SystemExit):
        train(root, "widened", *PLAIN)
    arguments = [*TINY, *PLAIN, f"root={root}", "name=widened", "ckpt_path=last", "scale.devices=2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        # larger pictures: an epoch's last batch leaves each process one, of which batch norm needs several pixels
        [*command, str(ROOT / "train.py"), *arguments, "data.image_size=64", "trainer.max_steps=6"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch   train accuracy") == 1
    both = [ids(root / "widened", rank) for rank in (0, 1)]
    train(root, "widened", *PLAIN, "ckpt_path=last")
    last = [one for one in ids(root / "widened") if one["step"] > 6]
    together = {one["step"]: one["ids"] for one in [*both[0][:3], *last]}
    together |= {a["step"]: a["ids"] + b["ids"] for a, b in zip(both[0][3:], both[1], strict=True)}
    assert {one["step"]: sorted(one["ids"]) for one in ids(whole)} == {
        step: sorted(found) for step, found in together.items()
    }


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("trainer.precision=fp8", "trainer: ValueError: precision is one of 32-true"),
        ("data.photos=FILE", "data: ValueError: a file given as photos must be a .tgz, .tar.gz or .tar"),
        ("data.remote=FILE/below", "FileExistsError: "),
        ("data.remote=s4://bucket", "ValueError: no store is known for s4://"),
    ],
)
def test_what_only_a_run_can_find_out_is_told_without_a_traceback(
    root: Path, given: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no photos\n")
    with pytest.raises(SystemExit) as ended:
        train(root, "told", *PLAIN, given.replace("FILE", str(file)))
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "Traceback" not in told
