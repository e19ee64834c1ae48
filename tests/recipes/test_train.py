"""`train.py` trains any module on any data, never loses a checkpoint, resumes exactly, and says what is wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")

from hydra.utils import instantiate
from omegaconf import OmegaConf

import train
from lightning_stream import StreamingDataModule, StreamingDataset, World, verify_delivery
from lightning_stream.errors import SettingsMismatch
from lightning_stream.trainers.lightning.graceful_stop import TrainingInterrupted
from recipes.models.gpt import GPT

Run = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
QUIET = ("hardware=cpu", "trainer.enable_progress_bar=false")
TABLE = ("+data=table", "data.synthetic_count=300", "data.conversion_workers=1", "trainer.max_epochs=2", *QUIET)
GROUPS = [
    f"{group.name}={file.stem}"
    for group in sorted((ROOT / "configs").iterdir())
    if group.is_dir() and group.name not in ("data", "hparams_search")
    for file in sorted(group.glob("*.yaml"))
]
DATA = sorted(file.stem for file in (ROOT / "configs/data").glob("*.yaml"))
STRANGER = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=8)
    test_dataloader = train_dataloader

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()
    def test_step(self, batch):
        self.log("test", self.training_step(batch))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@pytest.mark.timeout(900)
def test_a_strangers_module_and_data_train_by_two_overrides_and_are_tested(train_py: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STRANGER)
    own = ("+data._target_=mine.Data", "+model._target_=mine.Net")
    done = train_py(*own)
    assert done.returncode == 0, done.stderr
    checkpoints = tmp_path / "runs" / "train" / "checkpoints"
    before = (checkpoints / "last.ckpt").read_bytes()
    tested = train_py(*own, "mode=test", "ckpt_path=last")
    assert tested.returncode == 0, tested.stderr
    assert "test" in tested.stdout
    again = train_py(*own, "debug=limit", "task_name=train")
    assert "earlier checkpoints are now in" in again.stdout
    assert (checkpoints.with_name("checkpoints-1") / "last.ckpt").read_bytes() == before
    assert "mine.Net" in (checkpoints.with_name("checkpoints-1") / "config.yaml").read_text()


def test_a_run_that_fails_before_its_first_checkpoint_leaves_the_earlier_ones_and_their_config(
    run: Run, tmp_path: Path
) -> None:
    last = tmp_path / "again" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.write_bytes(b"of a day of training")
    (tmp_path / "again" / "config.yaml").write_text("of that day")
    with pytest.raises(ValueError, match="accumulat"):
        run("again", *TABLE, "trainer.accumulate_grad_batches=3", "data.global_batch_size=16")
    assert last.read_bytes() == b"of a day of training"
    assert (tmp_path / "again" / "config.yaml").read_text() == "of that day"
    assert [path.name for path in last.parent.iterdir()] == ["last.ckpt"]
    assert not last.parent.with_name("checkpoints-1").exists()


def test_a_refused_resume_leaves_the_run_as_it_was(run: Run, tmp_path: Path) -> None:
    run("once", *TABLE, "trainer.max_steps=1", "logger=none")
    folder = tmp_path / "once"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SettingsMismatch):
        run("once", *TABLE, "data.seed=7", "trainer.max_steps=2", "logger=none", "ckpt_path=last")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("trainer", ["lightning", "torch", "composer"])
@pytest.mark.parametrize("data", DATA)
def test_every_data_choice_brings_its_model_under_every_trainer(data: str, trainer: str, compose: Run) -> None:
    config = compose(f"+data={data}", f"trainer={trainer}", "paths.output=run")
    instantiate(config.data, _convert_="all")
    instantiate(config.model, _convert_="all")
    if trainer == "torch":
        instantiate(config.trainer)


@pytest.mark.parametrize("choice", GROUPS)
def test_every_choice_composes(choice: str, compose: Run) -> None:
    data = () if choice.startswith("experiment") else ("+data=flowers",)
    config = compose(*data, choice, "paths.output=run")
    OmegaConf.resolve(config.logger)


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_run_stopped_by_ctrl_c_resumes_exactly_on_two_devices(run: Run, train_py: Run, tmp_path: Path) -> None:
    record = "data.record_delivery=record"
    stopped = train_py(*TABLE, record, "+callbacks.alarm={_target_: support.alarm.Alarm, step: 5}")
    assert stopped.returncode == 130, stopped.stderr
    assert stopped.stdout.rstrip().endswith("Resume with the same command and ckpt_path=last.")
    resumed = train_py(*TABLE, record, "ckpt_path=last", "hardware.devices=2")
    assert resumed.returncode == 0, resumed.stderr
    assert "Resumed at epoch 0, step 6" in resumed.stdout
    assert "0 lost, 0 repeated" in resumed.stdout
    (shards,) = (tmp_path / "runs/shards/table").iterdir()
    dataset = StreamingDataset(remote=str(shards / "train"), local=str(tmp_path / "cache"), shuffle=True)
    assert "exactly the planned samples" in verify_delivery(tmp_path / "record", dataset).sentence
    assert _loss(resumed.stdout) == pytest.approx(run("whole", *TABLE), abs=1e-3)


def _loss(printed: str) -> float:
    return next(float(line.split()[1]) for line in printed.splitlines() if line.startswith("val/loss"))


def test_a_plain_loop_trains_as_lightning_does_and_resumes_exactly(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipes.models.mlp import Regressor

    measure, measured = Regressor.measure, []

    def interrupted(self: Any, batch: Any) -> Any:
        measured.append(batch)
        if len(measured) == 8:
            signal.raise_signal(signal.SIGINT)
        return measure(self, batch)

    expected = run("lightning", *TABLE)
    plain = [setting for setting in TABLE if "progress_bar" not in setting]
    plain += ["trainer=torch", "trainer.save_every_n_steps=3"]
    assert run("whole", *plain) == pytest.approx(expected, rel=1e-4)
    with monkeypatch.context() as patched:
        patched.setattr(Regressor, "measure", interrupted)
        with pytest.raises(TrainingInterrupted):
            run("stopped", *plain)
    capsys.readouterr()
    assert run("stopped", *plain, "ckpt_path=last") == pytest.approx(expected, rel=1e-4)
    assert "Resumed at epoch 0, step 8" in capsys.readouterr().out


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plain_loop_takes_the_mean_over_the_samples_that_count(
    run: Run, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """270 samples: the last step of an epoch has 14 of 32, and the first rank of four 3 of them, without padding."""
    from recipes.models.mlp import Regressor

    measure = Regressor.measure
    sizes: list[tuple[int, int]] = []

    def noted(self: Any, batch: Any) -> Any:
        sizes.append((len(next(iter(batch.values()))), self.trainer.tracker.current.num_samples))
        return measure(self, batch)

    monkeypatch.setattr(StreamingDataModule, "world", lambda _: World(rank, 4, 4))
    monkeypatch.setattr(Regressor, "measure", noted)
    monkeypatch.setattr(Regressor, "validation_step", lambda *_: None)
    plain = [setting for setting in TABLE if "progress_bar" not in setting]
    run("one", *plain, "trainer=torch", "data.tail=pad", "trainer.max_epochs=1")
    assert all(rows == counted for rows, counted in sizes)
    assert len({rows for rows, _ in sizes}) == 2


def test_ctrl_c_saves_and_says_where(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted) as stop:
        run("stopped", *TABLE, "+callbacks.alarm={_target_: support.alarm.Alarm, step: 2}")
    assert Path(str(stop.value.saved)) == tmp_path / "stopped" / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("data and model", "+data=NAME")),
        (("+data.size=1", "+model._target_=builtins.dict"), ("_target_",)),
        (("data=flowers",), ("use +data=flowers",)),
        (("+data=flower",), ("flowers", "imagefolder")),
        (("+data=table", "model.widht=3"), ("Key 'widht' is not in struct",)),
        (("+data=table", "+data.no=1"), ("data: ", "'no'")),
        (("+data=table", "seed=abc"), ("'abc'", "Integer")),
        (("+data=table", "mode=tst"), ("expected one of [train, validate, test, prepare]",)),
        (("+data=table", "mode=test"), ("ckpt_path=last",)),
        (("+data=table", "ckpt_path=last"), ("last.ckpt does not exist",)),
        (("+data=table", "data.source=none.csv"), ("none.csv",)),
        (("+data=table", "store=s3"), ("store.bucket",)),
        (("+data._target_=mine.Nothing", "+model._target_=mine.Net"), ("mine",)),
        (("+data=table", "trainer=torch", "logger=csv"), ("trainer: ", "'logger'")),
        (("+data=table", "trainer.max_epochs=two"), ("trainer.max_epochs takes a whole number or null; found 'two'",)),
        (("+data=table", "trainer.limit_train_batches=all"), ("trainer.limit_train_batches", "'all'")),
        (("+data=table", "trainer=torch", "+trainer.gradient_clip_val=1"), ("trainer: ", "'gradient_clip_val'")),
        (("+data=table", "model.learning_rate=-1"), ("model: ", "learning_rate")),
        (("+data=table", "model.widths=[0]"), ("model: ", "widths")),
        (("+data=text", "model.n_heads=3"), ("model: ", "n_heads=3")),
        (("+data=image_chats", "data.patch_size=0"), ("data: ", "patch_size")),
        (("+data=flowers", "model.arch=resnet1"), ("model: ", "resnet1")),
        (("+data=table", f"ckpt_path={__file__}"), ("ckpt_path", "checkpoint of PyTorch")),
        (("+data=table", "trainer=torch", "trainer.max_steps=abc"), ("trainer: ", "max_steps")),
        (("+data=table", "trainer=torch", "trainer.save_every_n_steps=0"), ("trainer: ", "save_every_n_steps")),
        (("+data=table", "trainer=torch", "hardware.devices=2"), ("torchrun",)),
        (("+data=table", "trainer=torch", "hardware.precision=16-mixed"), ("32-true or bf16-mixed",)),
        (("+data=table", "trainer=torch", "mode=test", "ckpt_path=."), ("trainer=lightning",)),
        (
            ("+data._target_=builtins.dict", "+model._target_=builtins.dict", "trainer=torch"),
            ("Streaming",),
        ),
    ],
)
def test_a_mistake_is_one_error_that_names_it(arguments: tuple[str, ...], words: tuple[str, ...], run: Run) -> None:
    with pytest.raises(train.UNUSABLE) as error:
        run("wrong", *arguments, "hardware=cpu")
    said = f"{train.sentence(error.value)} {error.value.__cause__}"
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("data.global_batch_size=0",), "global_batch_size"),
        (("data.eval_batch_size=0", "data.global_batch_size=256"), "batch_size"),
        (("data.num_workers=-1",), "num_workers is a number"),
        (("data.features=[]",), "data.features"),
        (("model=caption_matcher",), "Choose the model"),
        (("model=mobilenet_v2",), "classes"),
        (("model=gpt", "model.seq_len=8"), "vocab_size"),
    ],
)
def test_a_mistake_that_the_run_finds_is_one_sentence_too(arguments: tuple[str, ...], words: str, run: Run) -> None:
    with pytest.raises(Exception, match=words) as error:
        run("wrong", *TABLE, *arguments, "trainer.max_epochs=1")
    assert train.is_refusal(error.value)


def test_a_mistake_in_a_users_code_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="invalid literal") as error:
        int("x")
    assert not train.is_refusal(error.value)


def test_settings_of_one_dataset_come_before_those_of_both(compose: Run) -> None:
    overrides = ("+data=text", "+data.dataset.predownload=8", "+data.val.predownload=9", "+data.train.shuffle=false")
    data = instantiate(compose(*overrides, "+data.seed_steps=3", "paths.output=.").data, _convert_="all")
    assert [data.datasets[name].predownload for name in ("train", "val", "test")] == [8, 9, 9]
    assert data.datasets["train"].shuffle is False
    assert data.options["seed_steps"] == 3


def test_rows_that_do_not_fit_the_model_are_refused() -> None:
    network = GPT(257, 16, 32, 1, 2)
    rows = torch.zeros((1, 17), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rows of 17 tokens, and seq_len=16.*data\.seq_len"):
        network(rows, rows, rows)


def test_a_refused_run_ends_with_2_and_one_sentence(train_py: Run) -> None:
    done = train_py("+data=table", "+data.no=1", "hardware=cpu")
    assert done.returncode == 2
    assert "data: " in done.stderr
    assert "Traceback" not in done.stderr


def test_composer_that_is_missing_is_named(run: Run) -> None:
    try:
        import composer  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(Exception, match="composer"):
            run("composer", "+data=table", "trainer=composer", "hardware=cpu")
    else:
        pytest.skip("Composer is installed")


def test_no_secret_is_kept_with_a_run(run: Run, tmp_path: Path) -> None:
    secrets = ("+store.env.AWS_SECRET_ACCESS_KEY=S3CRET", "+paths.url='sftp://me:S3CRET@host/x'")
    run("secret", *TABLE, *secrets, "trainer.max_steps=1", "logger=none")
    kept = (tmp_path / "secret" / "config.yaml").read_text()
    assert "S3CRET" not in kept
    assert yaml.safe_load(kept)["store"]["env"]["AWS_SECRET_ACCESS_KEY"] == "(secret)"


@pytest.mark.parametrize("debug", ["fast_dev_run", "limit", "overfit"])
def test_debug_runs_have_a_name_of_their_own(debug: str, run: Run, compose: Run) -> None:
    settings = (
        *(setting for setting in TABLE if "epochs" not in setting),
        f"debug={debug}",
        "trainer.max_epochs=2",
        "data.shuffle=false",
    )
    assert compose(*settings, "paths.output=run").task_name == "debug"
    run(debug, *settings)


def test_prepare_only_converts(run: Run, tmp_path: Path) -> None:
    run("prepared", *TABLE, "mode=prepare")
    assert list(tmp_path.glob("shards/table/*/train/index.json"))
    assert not (tmp_path / "prepared").exists()


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # Lightning's, of a checkpoint of another run
def test_a_bucket_holds_shards_and_the_checkpoint_to_resume_from(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boto3 = pytest.importorskip("boto3", reason="s3:// needs boto3: uv sync")
    from servers import processes

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "TESTKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "TESTSECRET")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with processes.moto(tmp_path) as endpoint:
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="runs")
        store = ("store=minio", "store.bucket=runs", f"store.endpoint={endpoint}", "trainer.max_epochs=1")
        run("bucket", *TABLE, *store)
        listed = client.list_objects_v2(Bucket="runs", Prefix="lightning_stream/table/")["Contents"]
        assert sum(each["Key"].endswith("/index.json") for each in listed) == 2
        client.upload_file(str(tmp_path / "bucket/checkpoints/last.ckpt"), "runs", "run/last.ckpt")
        assert run("from-s3", *TABLE, *store, "ckpt_path=s3://runs/run/last.ckpt", "trainer.max_epochs=2") is not None
    assert not list((tmp_path / "tmp").glob("checkpoint-*"))  # what was downloaded


@pytest.mark.slow
@pytest.mark.distributed
def test_a_sweep_trains_each_job_in_its_own_folder_and_on_two_devices(train_py: Run, tmp_path: Path) -> None:
    done = train_py("-m", *TABLE, "hardware.devices=2", "seed=1,2")
    assert done.returncode == 0, done.stderr[-3000:]
    folders = sorted(path.parent.parent.name for path in tmp_path.glob("runs/table/*/checkpoints/last.ckpt"))
    assert ["seed-1" in folders[0], "seed-2" in folders[1]] == [True, True]
    assert not list(tmp_path.glob("runs/table/multirun.yaml"))  # it repeats all overrides


def test_a_store_names_what_returns_its_keys() -> None:
    config = OmegaConf.create({"store": {"root": "s3://bucket/x", "credentials": "my_keys:ask", "env": {"A_B": None}}})
    with train.environment(config):
        assert os.environ["LIGHTNING_STREAM_CREDENTIALS"] == "s3://bucket/x=my_keys:ask"
    assert "LIGHTNING_STREAM_CREDENTIALS" not in os.environ
