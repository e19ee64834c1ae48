"""The config files: every choice goes with every other, stores need what they say, each job of a sweep has a folder."""

from __future__ import annotations

import copy
import os
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the recipes need torch: uv sync")
pytest.importorskip("hydra", reason="configs are put together by Hydra: uv sync")
pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lightning_stream.recipes import resolvers
from lightning_stream.recipes.checks import find_problems
from lightning_stream.recipes.command_line import run_application
from lightning_stream.recipes.stores import reaching

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
NEEDED = {
    "s3": ["bucket=b"],
    "r2": ["bucket=b", "account=a"],
    "minio": ["bucket=b"],
    "gcs": ["bucket=b"],
    "azure": ["account=a", "container=c"],
    "oci": ["bucket=b", "namespace=n"],
    "volume": ["catalog=c", "schema=s", "volume=v"],
    "hf": ["repository=org/name"],
    "sftp": ["host=h"],
    "local": [],
}
ROOTS = {
    "s3": "s3://b/lightning_stream",
    "r2": "s3://b/lightning_stream",
    "minio": "s3://b/lightning_stream",
    "gcs": "gs://b/lightning_stream",
    "azure": "azure://c/lightning_stream",
    "oci": "oci://b@n/lightning_stream",
    "volume": "dbfs:/Volumes/c/s/v/lightning_stream",
    "hf": "hf://datasets/org/name@main",
    "sftp": "sftp://u@h:22/lightning_stream",
    "local": "runs/shards",
}


@cache
def _chosen(*groups: str) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=["data=flowers", "name=x", *groups])


def composed(*overrides: str) -> DictConfig:
    """A config of these choices and settings; the choices are composed once."""
    groups = [one for one in overrides if (CONFIGS / one.partition("=")[0]).is_dir()]
    config = copy.deepcopy(_chosen(*groups))
    OmegaConf.set_struct(config, False)
    settings = [one.lstrip("+") for one in overrides if one not in groups]
    for one in OmegaConf.from_dotlist(settings), *(one for one in settings if one.endswith("=???")):
        if isinstance(one, str):
            OmegaConf.update(config, one.partition("=")[0], "???")
        else:
            config.merge_with(one)
    return config


def names_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


# Scales and trainers


@pytest.mark.parametrize("scale", names_of("scale"))
@pytest.mark.parametrize("trainer", names_of("trainer"))
def test_every_scale_fits_every_trainer_once_its_processes_are_started(
    scale: str, trainer: str, eight_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed(f"scale={scale}", f"trainer={trainer}", "data.global_batch_size=64")
    devices = {"one_node": 8, "two_nodes": 16}.get(scale, 1)
    if trainer != "lightning":
        monkeypatch.setenv("WORLD_SIZE", str(devices))
    problems = [one for one in find_problems(config) if "Composer is not installed" not in one]
    assert problems == []


def test_a_trainer_that_starts_no_processes_says_what_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (told,) = find_problems(composed("trainer=torch", "scale=cpu", "scale.devices=2"))
    assert told.startswith("scale.devices: 2 devices on 1 node(s) are 2 processes, and 1 was started.")
    assert "torchrun --nproc-per-node 2 train.py" in told
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert find_problems(composed("trainer=torch", "scale=cpu", "scale.devices=2")) == []


def test_the_shards_of_all_data_lie_in_the_store() -> None:
    remotes = {name: composed(f"data={name}", "store=s3", "store.bucket=b").data.remote for name in names_of("data")}
    assert remotes == {name: f"s3://b/lightning_stream/{name}" for name in names_of("data")}


def test_the_canonical_nodes_of_a_scale_are_those_of_its_data() -> None:
    given = {name: composed(f"data={name}", "scale.canonical_nodes=4").data for name in names_of("data")}
    assert {name for name, data in given.items() if data.get("num_canonical_nodes") != 4} == set()


def test_composer_gets_device_and_precision_in_its_own_words() -> None:
    options = composed("trainer=composer", "scale=one_gpu").trainer.options
    assert OmegaConf.to_container(options, resolve=True) == {"device": "gpu", "precision": "amp_bf16"}
    options = composed("trainer=composer", "scale=auto").trainer.options
    assert OmegaConf.to_container(options, resolve=True) == {"device": None, "precision": "fp32"}


def test_slurm_gives_nodes_and_devices(eight_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    config = composed("scale=slurm", "data.global_batch_size=20")
    assert (config.trainer.devices, config.trainer.num_nodes) == (4, 2)
    assert "use a multiple of 8" in " ".join(find_problems(config))


# Stores


@pytest.mark.parametrize("store", names_of("store"))
def test_every_store_has_its_root_and_names_what_it_needs(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "u")
    lacking = sorted(f"store.{one.partition('=')[0]}" for one in NEEDED[store])
    told = sorted(problem.partition(":")[0] for problem in find_problems(composed(f"store={store}")))
    assert told == lacking
    config = composed(f"store={store}", *(f"store.{one}" for one in NEEDED[store]))
    assert find_problems(config) == []
    assert config.data.remote == f"{ROOTS[store]}/flowers"


def test_a_store_s_settings_are_variables_while_the_run_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "before")
    monkeypatch.delenv("S3_ENDPOINT_URL", raising=False)
    config = composed("store=r2", "store.bucket=b", "store.account=abc")
    store: Any = OmegaConf.to_container(config.store, resolve=True)
    with reaching(store):
        assert os.environ["S3_ENDPOINT_URL"] == "https://abc.r2.cloudflarestorage.com"
        assert os.environ["AWS_REGION"] == "auto"
    assert os.environ["AWS_REGION"] == "before"
    assert "S3_ENDPOINT_URL" not in os.environ


@pytest.mark.parametrize(
    "given",
    [
        "+store.environment.AWS_SECRET_ACCESS_KEY=hush",
        "+store.secret_access_key=hush",
        "data.remote=sftp://me:hush@host/folder",
    ],
)
def test_a_secret_in_a_config_is_refused_and_not_repeated(given: str) -> None:
    problems = find_problems(composed("store=s3", "store.bucket=b", given))
    assert len(problems) == 1
    assert "hush" not in problems[0]
    assert problems[0].startswith(given.lstrip("+").partition("=")[0])


def test_a_config_is_kept_without_what_it_takes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lightning_stream.recipes.training import keep_config

    monkeypatch.setenv("MY_TOKEN", "hush")
    keep_config(composed("+vars.header=${oc.env:MY_TOKEN}"), tmp_path)
    assert "hush" not in (tmp_path / "config.yaml").read_text()


# What configs may compute


def test_sizes_and_paths_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    resolvers.register()
    monkeypatch.setenv("HOME", "/home/me")
    config = OmegaConf.create(
        {"size": "${bytes:1.5kb}", "path": "${path:'~/data'}", "url": "${path:'s3://bucket/folder'}"}
    )
    assert OmegaConf.to_container(config, resolve=True) == {
        "size": 1536,
        "path": "/home/me/data",
        "url": "s3://bucket/folder",
    }


def ran(*arguments: str) -> list[DictConfig]:
    configs: list[DictConfig] = []

    def remember(config: DictConfig) -> None:
        OmegaConf.resolve(config)
        configs.append(config)

    run_application(remember, CONFIGS, arguments)
    return configs


def test_each_job_of_a_sweep_has_a_folder_named_by_what_it_varies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = ran("-m", "+data=flowers", "seed=1,2", "model.learning_rate=0.1,0.2", "scale=cpu")
    assert [job.folder for job in jobs] == [
        f"runs/flowers/seed-{seed}_learning_rate-{rate}" for seed in (1, 2) for rate in (0.1, 0.2)
    ]
    assert all((tmp_path / job.folder / ".hydra" / "overrides.yaml").is_file() for job in jobs)
    assert [job.callbacks.last.dirpath for job in jobs] == [f"{job.folder}/checkpoints" for job in jobs]


def test_an_experiment_may_be_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [job.folder for job in ran("experiment=flowers_sweep", "scale=cpu")]
    assert len(set(folders)) == 4
    assert "runs/flowers_sweep/seed-2_learning_rate-0.004" in folders


def test_what_is_wrong_with_any_job_of_a_sweep_is_told_before_the_first_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        ran("-m", "+data=flowers", "scale=cpu", "data.global_batch_size=16,0", "seed=1,-1")
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "data.global_batch_size=0 seed=1: This config cannot be run:" in told
    assert "data.global_batch_size=16 seed=-1: This config cannot be run:" in told
    assert list(tmp_path.iterdir()) == []


PAGE = (CONFIGS.parent / "docs" / "configs.md").read_text()
COMMANDS = [
    line.partition("#")[0]
    for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_page_on_configs_is_one_that_runs(
    line: str, eight_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("lightning-stream", "train")
    monkeypatch.chdir(tmp_path)
    for name in ("flowers", *(f"flowers/seed-{seed}" for seed in (1, 2, 3))):
        checkpoint = tmp_path / "runs" / name / "checkpoints" / "last.ckpt"
        checkpoint.parent.mkdir(parents=True)
        torch.save({}, checkpoint)
    assert ran(*arguments)


def test_the_page_on_configs_names_every_choice() -> None:
    for group in ("data", "model", "trainer", "scale", "store", "callbacks"):
        (row,) = re.findall(rf"^\| `{group}` \|.*$", PAGE, flags=re.MULTILINE)
        missing = [name for name in names_of(group) if f"`{name}`" not in row]
        assert missing == []


def test_a_run_without_data_is_told_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        ran("scale=cpu")
    assert capsys.readouterr().err == "This config cannot be run:\n  data: nothing is chosen. Add +data=flowers.\n"
    with pytest.raises(SystemExit):
        ran("+experiment=flower_quick")
    assert "Did you mean 'flowers_quick'?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_user_s_own_adds_data_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "data").mkdir(parents=True)
    (tmp_path / "mine" / "data" / "mine.yaml").write_text("defaults: [flowers]\nimage_size: 48\n")
    (config,) = ran("--config-dir", "mine", "+data=mine", "scale=cpu")
    assert (config.data.image_size, config.folder) == (48, "runs/mine")
