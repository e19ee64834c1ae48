"""What is wrong with a config: all of it at once, one sentence each, before anything starts."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

RENAMED = {
    "scale": "hardware", "canonical_nodes": "num_canonical_nodes", "environment": "env", "trained_ids": "sample_log",
    "held_out": "val_fraction", "held_out_by": "group_by", "boundary": "bos_token", "block": "seq_len",
    "moments": "num_frames", "width": "d_model", "depth": "n_layers", "heads": "n_heads",
    "reset_at_documents": "mask_documents", "captionless": "cond_dropout", "guidance": "guidance_scale",
    "drawing_steps": "num_inference_steps", "network": "arch", "network_options": "model_kwargs",
    "small_images": "cifar_stem", "photos_sha256": "source_sha256", "drawn_count": "synthetic_count",
    "generated_count": "synthetic_count", "smallest_crop": "crop_scale_min", "colour": "color_jitter",
    "margin": "padding", "save_every": "save_every_n_steps",
}  # fmt: skip
"""Settings and groups whose names have changed."""

_CHOICES = {
    "hardware=one_gpu": "hardware=gpu", "hardware=one_node": "hardware=ddp", "model=resnet18": "model=resnet",
    "hardware=two_nodes": "hardware=ddp hardware.num_nodes=2", "model=resnet50": "model=resnet model.arch=resnet50",
    "store=volume": "store=databricks", "data.photos=drawn": "data.photos=synthetic",
    "data.source=generated": "data.source=synthetic", "experiment=flowers_real": "experiment=flowers_photos",
    "experiment=flowers_wider": "experiment=flowers_two_devices",
}  # fmt: skip
_CHECKPOINTS = {"lightning": "checkpoints/last.ckpt", "torch": "torch/last.pt", "composer": "composer/latest-rank0.pt"}
_SECRET = re.compile(r"secret|password|passwd|token|access_?key|account_?key|credential|(^|_)key$|sas_", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s:]*:[^/@\s]+@")
_PLAIN_TYPES = {int, float, bool, str, list, dict, NoneType}


def renamed_arguments(arguments: Sequence[str]) -> list[str]:
    """Sentences on command line arguments whose names have changed, which Hydra would refuse without saying so."""
    problems = []
    for key, equals, value in (argument.lstrip("+~").partition("=") for argument in arguments if argument[0] != "-"):
        new = ".".join(RENAMED.get(part, part) for part in key.split(".")) + equals + value
        new = _CHOICES.get(new, new)
        if equals and new != key + equals + value:
            problems.append(f"{key}={value} is now {new}.")
    return problems


def trainer_kind(config: DictConfig) -> str:
    """``lightning``, ``torch`` or ``composer``."""
    module = str(config.trainer.get("_target_", "")).rpartition(".")[0]
    return {"recipes.trainers.torch_loop": "torch", "recipes.trainers.composer": "composer"}.get(module, "lightning")


def last_checkpoint(config: DictConfig) -> Path:
    """What ``ckpt_path=last`` resumes from."""
    return Path(config.folder) / _CHECKPOINTS[trainer_kind(config)]


def resumes_itself(config: DictConfig) -> bool:
    """Whether a run resumes from its own folder. Any other run must not replace the checkpoints there."""
    wanted = config.ckpt_path
    if wanted in (None, "last") or "://" in wanted:
        return bool(wanted == "last")
    return Path(wanted).expanduser().resolve().is_relative_to(last_checkpoint(config).parent.resolve())


def find_problems(config: DictConfig) -> list[str]:
    """Everything that is wrong with a config of ``train.py``, one sentence each; empty where nothing is."""
    if not config.get("data"):
        choices = sorted(path.stem for path in (Path(__file__).parent.parent / "configs/data").glob("*.yaml"))
        return [f"no dataset selected; choose one with +data=NAME ({', '.join(choices)})."]
    if trainer_kind(config) == "composer" and find_spec("composer") is None:
        return ["trainer: Composer is not installed. In its own environment: pip install 'lightning-stream[composer]'."]
    if missing := [key for key, value in _nodes(OmegaConf.to_container(config), "") if str(value) == "???"]:
        return [f"{key}: needs a value; add {key}=..." for key in missing]
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        return [str(error).splitlines()[0]]
    nodes = list(_nodes(values, ""))
    problems = [*_secrets(nodes), *_pair(values), *_hardware(config), *_checkpoint(config)]
    return [sentence for where, node in nodes if isinstance(node, dict) for sentence in _target(node, where)] + problems


def _nodes(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    """All values of a config, each with its name, e.g. ``data.source``."""
    yield where, node
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in children:
        yield from _nodes(value, f"{where}.{key}".lstrip("."))


def _target(node: Mapping[str, Any], where: str) -> Iterator[str]:
    """Compare a node that has a `_target_` with the signature of what it builds."""
    if "_target_" not in node:
        return
    try:
        target = get_object(str(node["_target_"]))
    except (HydraException, ImportError) as error:
        yield f"{where}._target_: {str(error).splitlines()[0]}"
        return
    known, hints, takes_any = _parameters(target)
    for key, value in ((str(key), value) for key, value in node.items() if not str(key).startswith("_")):
        accepted = get_args(hints.get(key)) or (hints.get(key),)
        is_float = type(value) is int and float in accepted
        if key not in known and not takes_any:
            near = [RENAMED[key]] if RENAMED.get(key) in known else difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            yield f"{where}.{key}: {target.__name__} has no such setting.{hint}"
        elif set(accepted) <= _PLAIN_TYPES and type(value) not in accepted and not is_float:
            names = " or ".join("null" if one is NoneType else one.__name__ for one in accepted)
            yield f"{where}.{key}: must be {names}; found {value!r}."
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in node:
            yield f"{where}.{name}: needs a value; add {where}.{name}=..."


def _parameters(target: Any) -> tuple[dict[str, inspect.Parameter], dict[str, Any], bool]:
    """Parameters and type hints of a class and of those that its ``**kwargs`` go to; whether it takes any others."""
    known: dict[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {}
    for function in (vars(one)["__init__"] for one in target.__mro__ if "__init__" in vars(one)):
        parameters = list(inspect.signature(function).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                known.setdefault(parameter.name, parameter)
        with suppress(NameError, TypeError):  # an annotation that cannot be evaluated: its values are not checked
            hints = get_type_hints(function) | hints
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return known, hints, False
    return known, hints, True


def _pair(values: Mapping[str, Any]) -> Iterator[str]:
    with suppress(HydraException, ImportError, KeyError, TypeError):  # `_target` reports these
        model, data = (get_object(values[group]["_target_"]) for group in ("model", "data"))
        if not issubclass(data, model.data_type):
            found = f"{model.__name__} learns from {model.data_type.__name__}, and data is {data.__name__}"
            yield f"model: {found}. Omit model=: a data choice brings its own."


def _hardware(config: DictConfig) -> Iterator[str]:
    kind, hardware, trainer = trainer_kind(config), config.hardware, config.trainer
    accelerator = str(trainer.get("accelerator", hardware.accelerator))
    devices, nodes = trainer.get("devices", hardware.devices), trainer.get("num_nodes", hardware.num_nodes)
    known = ("auto", "cpu", "gpu", "cuda") + (("mps", "tpu", "xla") if kind == "lightning" else ())
    if accelerator not in known:
        yield f"hardware.accelerator: trainer={kind} runs on {', '.join(known)}; found {accelerator!r}."
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        yield "hardware.accelerator: no GPU is available. Use hardware=cpu, or hardware=auto."
    gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()
    if isinstance(devices, int) and (devices < -1 or devices == 0 or (devices == -1 and not gpus)):
        yield f"hardware.devices: must be 1 or more, or -1 for all GPUs; found {devices}."
    elif kind != "lightning" and isinstance(devices, int):
        wanted, started = (gpus if devices == -1 else devices) * nodes, int(os.environ.get("WORLD_SIZE") or 1)
        if wanted != started:
            launcher = "composer -n" if kind == "composer" else "torchrun --nproc-per-node"
            yield (
                f"hardware.devices: {wanted} processes are wanted, and {started} started. Start with {launcher} "
                f"{devices} train.py ..., or set hardware.devices and hardware.num_nodes to what was started."
            )


def _checkpoint(config: DictConfig) -> Iterator[str]:
    wanted, last = config.ckpt_path, last_checkpoint(config)
    if not resumes_itself(config):
        found = sorted(each.name for each in last.parent.glob("*") if each.is_file())
        is_first = not int(os.environ.get("LOCAL_RANK") or 0)
        if found and is_first and not config.overwrite and not config.prepare_only:
            yield (
                f"{last.parent} holds checkpoints of an earlier run ({', '.join(found[:3])}). Resume it with "
                "ckpt_path=last, choose another name=..., or start over with overwrite=true, which keeps them under "
                "another name."
            )
    if wanted is not None and "://" not in wanted:
        path = last if wanted == "last" else Path(wanted).expanduser()
        if not path.exists():
            yield f"ckpt_path: {path.absolute()} does not exist. Omit ckpt_path to start, or set name=."
        elif path.is_file() and not zipfile.is_zipfile(path):
            yield f"ckpt_path: {path.absolute()} is damaged, or is no checkpoint that torch wrote."


def _secrets(nodes: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """A config is kept beside its run, so it must not hold credentials."""
    for where, value in nodes:
        group, _, key = where.rpartition(".")
        if group == "store" and _SECRET.search(key) and isinstance(value, (str, int)):
            yield f"{where}: configs must not hold secrets. Set the variable that the store's config file names."
        if isinstance(value, str) and _URL_WITH_PASSWORD.search(value):
            yield f"{where}: this URL has a password in it, and configs are kept. Use the store's credentials."
