"""What is wrong with a config is told before work starts: all of it, each with its place and the nearest valid name."""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("torch", reason="the recipes need torch: uv sync")
pytest.importorskip("hydra", reason="configs are put together by Hydra: uv sync")
pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lightning_stream.recipes.check_targets import fits, told
from lightning_stream.recipes.checks import find_problems

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"


@cache
def _chosen(*groups: str) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=["data=flowers", "name=x", "scale=cpu", *groups])


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


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("+sede=3", "sede: there is no such setting. Did you mean 'seed'?"),
        ("seed=first", "seed: must be a whole number; found 'first'."),
        ("seed=-1", "seed: must be at least 0; found -1."),
        ("root=7", "root: must be text; found 7."),
        ("+scale.device=2", "scale.device: there is no such setting. Did you mean 'devices'?"),
        ("scale.accelerator=gup", "scale.accelerator: must be 'auto' or 'cpu' or 'gpu'"),
        ("scale.devices=0", "devices: is a number of devices; found 0."),
        ("trainer.max_epochs=many", "trainer.max_epochs: must be a whole number or null; found 'many'."),
        ("trainer.max_epochs=0", "trainer.max_epochs: must be at least 1; found 0."),
        ("+data.image_sise=3", "data.image_sise: flower_data has no such setting. Did you mean 'image_size'?"),
        ("data.hashes=[xxh]", "data.hashes: hashes must be among"),
        ("data.size_limit=5zb", "data.size_limit: "),
        ("data.cache_limit=100kb", "data.cache_limit: 100kb must hold several shards"),
        ("data.num_workers=-1", "data.num_workers: must be at least 0; found -1."),
        ("data.remote=???", "data.remote: needs a value. Add data.remote=..."),
        ("data.remote=${nowhere}", "data.remote: refers to what does not exist: "),
        ("data.persistent_workers=1", "data.persistent_workers: must be true or false; found 1."),
        ("data._target_=no.such.thing", "data._target_: 'no.such.thing' cannot be loaded"),
        ("trainer.accumulate_grad_batches=3", "use a multiple of 3"),
        ("scale.num_nodes=3", "data.global_batch_size: 16 samples do not divide by 1 devices x 3 nodes x 1"),
        ("ckpt_path=/none.ckpt", "ckpt_path: there is nothing at /none.ckpt."),
        ("ckpt_path=last", "ckpt_path: 'last' continues from "),
        ("model.network=resnet1", "no classification network 'resnet1'. Did you mean 'resnet1"),
        ("model.weights=/none.pt", "model.weights: there is no file at /none.pt."),
    ],
)
def test_one_mistake_is_one_sentence_with_its_place(override: str, sentence: str, tmp_path: Path) -> None:
    problems = find_problems(composed(f"root={tmp_path}", override))
    assert any(sentence in problem for problem in problems), problems
    assert len(problems) == 1  # told where it was set, not where it is referred to


def test_many_mistakes_are_told_at_once(tmp_path: Path) -> None:
    overrides = ["data.image_size=big", "seed=x", "ckpt_path=last", "data.remote=???", "store=s3", "data.held_out=3"]
    places = [problem.partition(":")[0] for problem in find_problems(composed(f"root={tmp_path}", *overrides))]
    assert {"data.image_size", "seed", "ckpt_path", "data.remote", "store.bucket", "data.held_out"} <= set(places)


def test_a_gpu_that_is_not_there_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    (told_,) = find_problems(composed("scale=one_gpu"))
    assert told_ == (
        "scale.accelerator: asks for a GPU, and torch finds none on this machine. Use scale=cpu, or scale=auto for a "
        "GPU where there is one."
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (told_,) = find_problems(composed("scale=one_gpu", "scale.devices=4"))
    assert told_ == "scale.devices: asks for 4 GPUs; torch finds 2 on this machine."
    (told_,) = find_problems(composed("scale=one_gpu", "scale.devices=[0,2]"))
    assert "torch finds GPUs 0 to 1" in told_
    assert find_problems(composed("scale=one_node")) == []


def test_a_checkpoint_must_be_one_and_of_this_trainer(tmp_path: Path) -> None:
    text = tmp_path / "notes.ckpt"
    text.write_text("no checkpoint")
    (problem,) = find_problems(composed(f"ckpt_path={text}"))
    assert "is not a checkpoint, or a damaged one" in problem
    others = tmp_path / "other.pt"
    torch.save({"lightning_stream.torch_run": 1}, others)
    assert zipfile.is_zipfile(others)
    (problem,) = find_problems(composed(f"ckpt_path={others}"))
    assert f"ckpt_path: {others} is a checkpoint of trainer=torch, and this run's trainer is lightning" in problem
    assert find_problems(composed(f"ckpt_path={others}", "trainer=torch")) == []


def test_checkpoints_that_could_be_meant_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "x" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "best.ckpt").write_bytes(b"")
    (problem,) = find_problems(composed(f"root={tmp_path}", "ckpt_path=last"))
    assert "in that folder there are best.ckpt" in problem


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        (["model=gpt"], "model: LanguageModel learns from TextData, and data gives PhotoData."),
        (
            ["data=text"],
            "model: ImageClassifier learns from ImageData, and data gives TextData. For this data: model=gpt.",
        ),
        (["data=table"], "For this data: model=mlp."),
        (["data=laion"], "For this data: model=text_to_image."),
        (["model=text_to_image"], "TextToImage learns from CaptionData, and data gives PhotoData."),
    ],
)
def test_a_model_for_other_data_is_told_with_one_that_fits(choices: list[str], sentence: str) -> None:
    (problem,) = find_problems(composed(*choices))
    assert sentence in problem
    assert find_problems(composed("data=text", "model=gpt")) == []


def test_composer_that_is_not_installed_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_stream.recipes import check_together

    monkeypatch.setattr(check_together, "find_spec", lambda _: None)
    (problem,) = find_problems(composed("trainer=composer"))
    assert "uv sync --no-dev --extra composer" in problem


@pytest.mark.parametrize(
    ("value", "hint", "fit"),
    [
        (3, int, True),
        (True, int, False),
        (3, float, True),
        ("3", float, False),
        (None, int | None, True),
        (["a"], Sequence[str], True),
        ([1], Sequence[str], False),
        ("a", Sequence[str], False),
        ({}, Mapping[str, Any], True),
        ("b", Literal["a"], False),
        (object, Any, True),
    ],
)
def test_a_value_fits_its_type(value: Any, hint: Any, fit: bool) -> None:
    assert fits(value, hint) is fit


def test_types_are_told_in_a_user_s_words() -> None:
    assert told(int | None) == "a whole number or null"
    assert told(str | Mapping[str, Any]) == "text or a group of settings"
    assert told(Literal["a", "b"]) == "'a' or 'b'"
