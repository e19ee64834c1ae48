"""Recipes from config to picture: on tiny flowers, stopped and resumed, under every trainer and logger."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")

from lightning.pytorch import Callback

from recipes import train as frame
from recipes.report import loss_curve

ROOT = Path(__file__).resolve().parent.parent.parent
Flowers = Callable[..., Path]
LOGGED = ("callbacks=sample_log", "callbacks.last.every_n_train_steps=4", "trainer.log_every_n_steps=1")


class Alarm(Callback):
    """Sends this process a signal in the middle of a step."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGINT)


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples" / "rank-0.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return state


def train_py(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


def test_a_run_ends_with_a_summary_and_a_picture(flowers: Flowers, capsys: pytest.CaptureFixture[str]) -> None:
    folder = flowers("whole", *LOGGED)
    out = capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    assert "synthetic flowers, not photos" in out
    assert f"Validation accuracy {summary['history']['1']['val/accuracy']:.1%} on " in out
    assert set(summary["paths"]) == {"shards", "checkpoint", "best", "log", "picture", "report"}
    for path in summary["paths"].values():
        assert Path(path).exists()
        assert path in out
    with Image.open(folder / "predictions.png") as picture:
        assert picture.size[0] > 500
    for epoch in (0, 1):
        ids = [one for line in samples(folder) if line["epoch"] == epoch for one in line["ids"]]
        assert sorted(ids) == list(range(len(ids)))
    assert len(loss_curve(folder)) == len(samples(folder))


def test_a_run_stopped_by_ctrl_c_resumes_exactly(
    flowers: Flowers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    whole = flowers("exact", *LOGGED)
    real = frame.instantiate

    def with_alarm(node: Any, **more: Any) -> Any:
        return real(node, **{**more, "callbacks": [*more["callbacks"], Alarm()]} if "callbacks" in more else more)

    with monkeypatch.context() as patched:
        patched.setattr(frame, "instantiate", with_alarm)
        with pytest.raises(SystemExit) as end:
            flowers("stopped", *LOGGED)
    assert end.value.code == 128 + signal.SIGINT
    assert "Stopped. Last checkpoint: " in capsys.readouterr().out
    resumed = flowers("stopped", *LOGGED, "ckpt_path=last")
    assert samples(resumed) == samples(whole)
    curve, expected = loss_curve(resumed), loss_curve(whole)
    assert curve == pytest.approx({step: expected[step] for step in curve}, abs=1e-6)
    assert len(curve) >= len(expected) - 1  # Lightning does not log the step that a signal ends
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], value)
    assert "Resumed at epoch " in caplog.text


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # Lightning's, of a checkpoint of another run
def test_a_run_never_replaces_the_checkpoints_of_an_earlier_one(
    flowers: Flowers, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("trainer.max_steps=1", "~callbacks.best")
    folder = flowers("kept", *short)
    before = (folder / "checkpoints" / "last.ckpt").read_bytes()
    with pytest.raises(SystemExit) as end:
        flowers("kept", *short)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert all(way in message for way in ("ckpt_path=last", "name=", "overwrite=true"))
    other = flowers("other", *short) / "checkpoints" / "last.ckpt"
    with pytest.raises(SystemExit):
        flowers("kept", *short, f"ckpt_path={other}")
    assert (folder / "checkpoints" / "last.ckpt").read_bytes() == before
    flowers("kept", *short, "overwrite=true")
    flowers("kept", "trainer.max_steps=2", "~callbacks.best", "overwrite=true", f"ckpt_path={other}")
    kept = sorted(folder.glob("checkpoints-*"))
    assert len(kept) == 2
    assert before in [(each / "last.ckpt").read_bytes() for each in kept]


_OF_MLFLOW = pytest.mark.filterwarnings("default::DeprecationWarning")  # SQLAlchemy's, inside it


@pytest.mark.parametrize(
    "changed", ["logger=none", "+trainer.fast_dev_run=true", pytest.param("logger=mlflow", marks=_OF_MLFLOW)]
)
def test_a_logger_without_a_folder_is_no_error(flowers: Flowers, changed: str) -> None:
    if changed == "logger=mlflow":
        pytest.importorskip("mlflow", reason="no mlflow: pip install mlflow")
    folder = flowers(changed.strip("+").replace("=", "-"), changed, "trainer.max_steps=1", "~callbacks.best")
    assert (folder / "summary.json").exists()


def test_a_run_limited_by_time_alone_trains(flowers: Flowers) -> None:
    folder = flowers("timed", "trainer.max_epochs=-1", "trainer.max_time=00:00:00:02", "~callbacks.best")
    assert json.loads((folder / "summary.json").read_text())["figures"]["num_steps"] > 0


def test_prepare_only_converts_and_ends(flowers: Flowers, capsys: pytest.CaptureFixture[str]) -> None:
    folder = flowers("prepared", "prepare_only=true", "data.synthetic_count=20")
    assert "written to" in capsys.readouterr().out
    assert not folder.exists()


def test_a_plain_loop_trains_as_lightning_does_and_resumes(
    flowers: Flowers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipes.trainers import torch_loop

    lightning = flowers("by-lightning", *LOGGED)
    torch_options = ("trainer=torch", "trainer.log_every_n_steps=1", "trainer.save_every_n_steps=4")
    plain = flowers("by-torch", *torch_options)
    assert loss_curve(plain) == pytest.approx(loss_curve(lightning), abs=1e-6)
    backward = torch_loop.TorchTrainer._backward

    def interrupted(self: Any, *arguments: Any) -> Any:
        if self.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(torch_loop.TorchTrainer, "_backward", interrupted)
        with pytest.raises(SystemExit) as end:
            flowers("torch-stopped", *torch_options)
    assert end.value.code == 128 + signal.SIGTERM
    resumed = flowers("torch-stopped", *torch_options, "ckpt_path=last")
    assert "Resumed at epoch 1, step 8" in capsys.readouterr().out
    assert loss_curve(resumed) == pytest.approx(loss_curve(plain), abs=1e-6)
    history = [json.loads((each / "summary.json").read_text())["history"] for each in (plain, resumed)]
    assert history[0] == history[1]


def test_a_bucket_holds_shards_and_the_checkpoint_to_resume_from(
    flowers: Flowers, flowers_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boto3 = pytest.importorskip("boto3", reason="s3:// needs boto3: uv sync")
    from servers import processes

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "TESTKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "TESTSECRET")
    with processes.moto(flowers_root) as endpoint:
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="flowers")
        store = ("store=minio", "store.bucket=flowers", f"store.endpoint={endpoint}", "trainer=torch")
        folder = flowers("bucket", *store, "trainer.max_steps=2")
        listed = client.list_objects_v2(Bucket="flowers", Prefix="lightning_stream/flowers/")["Contents"]
        assert sum(each["Key"].endswith("/index.json") for each in listed) == 2
        client.upload_file(str(folder / "torch" / "last.pt"), "flowers", "run/last.pt")
        resumed = flowers("from-s3", *store, "ckpt_path=s3://flowers/run/last.pt", "trainer.max_steps=3")
    assert json.loads((resumed / "summary.json").read_text())["figures"]["num_steps"] == 1
    assert "S3_ENDPOINT_URL" not in os.environ


def test_only_the_first_process_sees_the_source_and_others_wait_for_days(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes.trainers import torch_loop

    limits: list[Any] = []
    done: list[int] = []
    barriers: list[Any] = []

    def new_group(**given: Any) -> str:
        limits.append(given["timeout"])
        return "group"

    monkeypatch.setattr(torch_loop.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_loop.dist, "new_group", new_group)
    monkeypatch.setattr(torch_loop.dist, "barrier", barriers.append)
    monkeypatch.setattr(torch_loop.dist, "get_rank", lambda: 1)
    torch_loop.on_first_rank(lambda: done.append(1))
    assert not done
    assert barriers == ["group"]
    assert limits[0].days >= 7


@pytest.mark.slow
@pytest.mark.distributed
def test_a_sweep_trains_each_job_in_its_own_folder_and_on_two_devices(tmp_path: Path) -> None:
    tiny = ("data.synthetic_count=40", "data.image_size=32", "trainer.max_steps=1", "hardware.devices=2")
    done = train_py(tmp_path, "-m", "experiment=flowers_quick", "hardware=cpu", "num_threads=1", *tiny, "seed=1,2")
    assert done.returncode == 0, done.stderr[-3000:]
    jobs = sorted(tmp_path.glob("runs/flowers_quick/*/summary.json"))
    assert len(jobs) == 2
    assert all(json.loads(job.read_text())["figures"]["num_steps"] == 1 for job in jobs)
    assert ["seed-1" in jobs[0].parent.name, "seed-2" in jobs[1].parent.name] == [True, True]


def test_hydras_own_flags_work_wherever_they_are(tmp_path: Path) -> None:
    done = train_py(tmp_path, "+data=flowers", "--info", "searchpath")
    assert done.returncode == 0, done.stderr
    assert "configs" in done.stdout
    composed = train_py(tmp_path, "--cfg", "job", "+data=text")
    assert "recipes.models.gpt" in composed.stdout
    assert not list(tmp_path.iterdir())


_INTERRUPTED = """
import os, runpy, signal, sys, threading
sys.path.insert(0, sys.argv[1])
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
path, sys.argv = sys.argv[1] + "/train.py", ["train.py", "experiment=flowers_quick"]
runpy.run_path(path, run_name="__main__")
"""


def test_ctrl_c_before_training_ends_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _INTERRUPTED, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130
    assert done.stderr.strip() == "Stopped."
