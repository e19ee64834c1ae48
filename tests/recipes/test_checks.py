"""What is wrong with a config is reported at once, with the way out, before anything starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("torchvision", reason="the recipes need torchvision: uv sync")

from recipes.checks import find_problems, wrong_types
from recipes.train import build

ROOT = Path(__file__).resolve().parent.parent.parent
Composed = Callable[..., Any]
GROUPS = [
    f"{group.name}={file.stem}"
    for group in sorted((ROOT / "configs").iterdir())
    if group.is_dir() and group.name != "shared"
    for file in sorted(group.glob("*.yaml"))
]


def problems_of(config: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `train.py` would refuse, one sentence each."""
    if problems := find_problems(config):
        return problems
    with suppress(SystemExit):
        build(config)
    return [line.strip() for line in capsys.readouterr().err.splitlines()[1:-1]]


@pytest.mark.parametrize("choice", GROUPS)
def test_every_config_fits_what_it_builds(
    choice: str, composed: Composed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = choice.partition("=")[0]
    data = () if group in ("data", "experiment") else ("data=flowers",)
    expected = ("composer", "GPU", "mandatory", "wanted", "learns from", "ckpt_path", "pip install", "not met")
    found = problems_of(composed(f"folder={tmp_path}", f"root={tmp_path}", *data, choice), capsys)
    assert not [each for each in found if not any(word.lower() in each.lower() for word in expected)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), ("no dataset selected", "+data=NAME", "flowers")),
        (("data=flowers", "+data.image_sise=3"), ("data: ", "image_sise")),
        (("data=flowers", "data.num_workers=abc"), ("data.num_workers must be int or 'auto'", "'abc'")),
        (("data=flowers", "data.cache_limit=[1]"), ("data.cache_limit must be int or str or null", "[1]")),
        (("data=flowers", "model.learning_rate=fast"), ("model.learning_rate must be float", "'fast'")),
        (("data=flowers", "model.arch=resnet81"), ("model: ", "resnet18", "'resnet81'")),
        (("data=flowers", "model=gpt"), ("learns from", "Omit model=")),
        (("data=flowers", "hardware.accelerator=quantum"), ("trainer: ", "quantum")),
        (("data=flowers", "trainer=torch", "hardware.accelerator=mps"), ("trainer=torch", "'mps'")),
        (("data=flowers", "trainer=torch", "hardware.devices=2"), ("2 processes are wanted", "torchrun")),
        (("data=flowers", "hardware.devices=0"), ("trainer: ", "devices", "0")),
        (("data=flowers", "ckpt_path=last"), ("ckpt_path", "does not exist")),
        (("data=flowers", "data.remote=sftp://me:pw@host/x"), ("data.remote", "password")),
        (("data=flowers", "+store.secret_key=abc"), ("store.secret_key", "must not hold secrets")),
        (("data=flowers", "store=s3"), ("Missing mandatory value: store.bucket",)),
    ],
)
def test_a_problem_names_the_setting_and_the_way_out(
    overrides: tuple[str, ...], words: tuple[str, ...], composed: Composed, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = problems_of(composed(f"folder={tmp_path}", "hardware=cpu", *overrides), capsys)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


def test_all_problems_are_reported_together(
    composed: Composed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ("data=flowers", "+data.no=1", "+model.no=1", "+trainer.no=1", "+callbacks.last.no=1")
    found = problems_of(composed(f"folder={tmp_path}", "hardware=cpu", *wrong), capsys)
    assert [each.partition(":")[0] for each in found] == ["data", "model", "callbacks.last", "trainer"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_a_problem(composed: Composed, tmp_path: Path) -> None:
    found = find_problems(composed(f"folder={tmp_path}", "data=flowers", "hardware=gpu"))
    assert [each for each in found if "no GPU is available" in each]


def test_a_file_that_is_no_checkpoint_is_a_problem(composed: Composed, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    path.write_bytes(b"half")
    found = find_problems(composed(f"folder={tmp_path / 'run'}", "hardware=cpu", "data=flowers", f"ckpt_path={path}"))
    assert "damaged" in found[0]


@pytest.mark.parametrize("override", ["model.depth=50", "+data.scale=2", "trainer.logger.margin=3", "+model.width=8"])
def test_a_setting_of_the_users_own_class_may_have_any_name(override: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "data=flowers", override, "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "is now" not in done.stderr


@pytest.mark.parametrize(
    "override",
    [
        "+store.env.AWS_SECRET_ACCESS_KEY=S3CRET", "+store.env.AZURE_STORAGE_KEY=S3CRET", "+store.env.HF_TOKEN=S3CRET",
        "+data.store_options.secret_access_key=S3CRET", "+data.store_options={nested:[{sas_token:S3CRET}]}",
        "+data.options.account_key=S3CRET", "+logger.api_key=S3CRET", "+data.x='AccountName=a;AccountKey=S3CRET=='",
        "+data.x='https://host/x?sv=1&sig=S3CRET'", "+data.connection_string=S3CRET", "data.remote=sftp://me:S3CRET@h/x",
    ],
)  # fmt: skip
def test_a_config_with_a_secret_is_refused_and_the_secret_is_not_shown(
    override: str, composed: Composed, tmp_path: Path
) -> None:
    (found,) = find_problems(composed(f"folder={tmp_path}", "hardware=cpu", "data=flowers", override))
    assert "must not hold secrets" in found
    assert "S3CRET" not in found


@pytest.mark.parametrize(
    "override",
    [
        "+data.bos_token=bos", "+model.sample_tokens=300", "+data.key=caption",
        "+data.store_options.key_filename=/x/id",
        "+data.store_options.credentials_file=/x/key.json", "+store.env.TOKENIZERS_PARALLELISM=false",
        "data.remote=sftp://me@host/x",
    ],
)  # fmt: skip
def test_a_setting_that_only_sounds_like_a_secret_is_taken(override: str, composed: Composed, tmp_path: Path) -> None:
    assert not find_problems(composed(f"folder={tmp_path}", "hardware=cpu", "data=flowers", override))


def test_the_command_line_ends_with_two_and_all_reasons(tmp_path: Path) -> None:
    for arguments, words in ((("+data=flower",), ("flowers",)),):
        command = [sys.executable, str(ROOT / "train.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert all(word in done.stderr for word in words)
        assert "Traceback" not in done.stderr


def test_a_refused_config_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "+data=flowers", "hardware=cpu", "+data.no=1", "+model.no=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "Invalid config:\n  data: " in done.stderr
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]
    assert not (tmp_path / "runs" / "flowers").exists()


@pytest.mark.parametrize("target", ["no.such.Logger", "recipes.checks.wrong_types"])
def test_a_target_that_is_no_class_is_left_to_hydra(target: str) -> None:
    assert wrong_types(OmegaConf.create({"_target_": target, "where": 1}), "logger") == []
