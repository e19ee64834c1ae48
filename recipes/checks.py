"""What is wrong with a config: all of it at once, one sentence each, before anything starts."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

RENAMED = {
    "scale": "hardware",
    "held_out": "val_fraction",
    "held_out_by": "group_by",
    "boundary": "bos_token",
    "block": "seq_len",
    "canonical_nodes": "num_canonical_nodes",
    "moments": "num_frames",
    "width": "d_model",
    "depth": "n_layers",
    "heads": "n_heads",
    "reset_at_documents": "mask_documents",
    "captionless": "cond_dropout",
    "guidance": "guidance_scale",
    "drawing_steps": "num_inference_steps",
    "network": "arch",
    "network_options": "model_kwargs",
    "small_images": "cifar_stem",
    "photos_sha256": "source_sha256",
    "drawn_count": "synthetic_count",
    "generated_count": "synthetic_count",
    "smallest_crop": "crop_scale_min",
    "colour": "color_jitter",
    "margin": "padding",
    "environment": "env",
    "trained_ids": "sample_log",
    "save_every": "save_every_n_steps (torch) or save_interval (composer)",
}
"""Names of settings and groups that changed."""

_CHOICES = {
    "hardware=one_gpu": "hardware=gpu",
    "hardware=one_node": "hardware=ddp",
    "hardware=two_nodes": "hardware=ddp hardware.num_nodes=2",
    "model=resnet18": "model=resnet",
    "model=resnet50": "model=resnet model.arch=resnet50",
    "store=volume": "store=databricks",
    "data.photos=drawn": "data.photos=synthetic",
    "data.source=generated": "data.source=synthetic",
    "experiment=flowers_real": "experiment=flowers_photos",
    "experiment=flowers_wider": "experiment=flowers_two_devices",
}
_CHECKPOINTS = {"lightning": "checkpoints/last.ckpt", "torch": "torch/last.pt", "composer": "composer/latest-rank0.pt"}
_SECRET = re.compile(r"secret|password|passwd|token|access_?key|account_?key|credential|(^|_)key$|sas_", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s:]*:[^/@\s]+@")
_PLAIN_TYPES = {int, float, bool, str, list, dict, NoneType}


def renamed_arguments(arguments: Sequence[str]) -> list[str]:
    """Sentences on command line arguments whose names have changed, before Hydra refuses them."""
    problems = []
    for argument in arguments:
        key, equals, value = argument.lstrip("+~").partition("=")
        if not equals or argument.startswith("-"):
            continue
        parts = [RENAMED.get(part, part) if part != "width" or "model" in key else part for part in key.split(".")]
        new = ".".join(parts) + "=" + value
        new = _CHOICES.get(new, new)
        if new != f"{key}={value}":
            problems.append(f"{key}={value} is now {new}.")
    return problems


def trainer_kind(config: DictConfig) -> str:
    """``lightning``, ``torch`` or ``composer``."""
    module = str(config.trainer.get("_target_", "")).rpartition(".")[0]
    return {"recipes.trainers.torch_loop": "torch", "recipes.trainers.composer": "composer"}.get(module, "lightning")


def last_checkpoint(config: DictConfig) -> Path:
    """What ``ckpt_path=last`` resumes from."""
    return Path(config.folder) / _CHECKPOINTS[trainer_kind(config)]


def find_problems(config: DictConfig) -> list[str]:
    """Everything that is wrong with a config of ``train.py``, one sentence each; empty where nothing is."""
    if not config.get("data"):
        choices = sorted(path.stem for path in (Path(__file__).parent.parent / "configs/data").glob("*.yaml"))
        return [f"no dataset selected; choose one with +data=NAME ({', '.join(choices)})."]
    missing = [f"{key}: needs a value; add {key}=..." for key in sorted(OmegaConf.missing_keys(config))]
    if missing:
        return missing
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        return [str(error).splitlines()[0]]
    problems = [*_secrets(values, ""), *_targets(values, ""), *_pair(values), *_hardware(config), *_checkpoint(config)]
    return list(dict.fromkeys(problems))


def _targets(node: Any, where: str) -> Iterator[str]:
    """Check every node that has a `_target_` against the signature of what it builds."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield from _target(node, where)
        for key, value in node.items():
            yield from _targets(value, f"{where}.{key}" if where else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _targets(value, f"{where}[{index}]")


def _target(node: Mapping[str, Any], where: str) -> Iterator[str]:
    try:
        target = get_object(str(node["_target_"]))
    except (HydraException, ImportError) as error:
        yield f"{where}._target_: {str(error).splitlines()[0]}"
        return
    known, hints, takes_any = _parameters(target)
    for key, value in node.items():
        if str(key).startswith("_"):
            continue
        if key in known:
            yield from _type_problem(f"{where}.{key}", hints.get(key), value)
        elif not takes_any:
            near = difflib.get_close_matches(str(key), known, n=1)
            new = RENAMED.get(str(key))
            hint = f" It is now {new}." if new in known else f" Did you mean {near[0]!r}?" if near else ""
            yield f"{where}.{key}: {target.__name__} has no such setting.{hint}"
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in node and where != "callbacks":
            yield f"{where}.{name}: needs a value; add {where}.{name}=..."


def _parameters(target: Any) -> tuple[dict[str, inspect.Parameter], dict[str, Any], bool]:
    """Parameters and type hints of a function, or of a class and of those that its ``**kwargs`` go to."""
    known: dict[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {}
    functions = (
        [vars(one)["__init__"] for one in target.__mro__ if "__init__" in vars(one)]
        if inspect.isclass(target)
        else [target]
    )
    for function in functions:
        parameters = inspect.signature(function).parameters
        for name, parameter in parameters.items():
            if name != "self" and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                known.setdefault(name, parameter)
        try:
            hints = get_type_hints(function) | hints
        except (NameError, TypeError):
            pass  # a third party's annotation that cannot be evaluated: its values are not checked here
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return known, hints, False
    return known, hints, True


def _type_problem(where: str, hint: Any, value: Any) -> Iterator[str]:
    """Compare a value with a hint made of plain types; other hints are left to the constructor."""
    accepted = get_args(hint) or (hint,)
    if hint is None or not set(accepted) <= _PLAIN_TYPES or type(value) in accepted:
        return
    if not (type(value) is int and float in accepted):
        names = " or ".join("null" if one is NoneType else one.__name__ for one in accepted)
        yield f"{where}: must be {names}; found {value!r}."


def _pair(values: Mapping[str, Any]) -> Iterator[str]:
    try:
        model, data = (get_object(values[group]["_target_"]) for group in ("model", "data"))
    except (HydraException, ImportError, KeyError, TypeError):
        return  # reported by `_target`
    wanted = getattr(model, "data_type", None)
    if isinstance(wanted, type) and not issubclass(data, wanted):
        yield f"model: {model.__name__} learns from {wanted.__name__}, and data is {data.__name__}. Do not set model=: data brings one."


def _hardware(config: DictConfig) -> Iterator[str]:
    import torch

    kind, hardware, trainer = trainer_kind(config), config.hardware, config.trainer
    accelerator = str(trainer.get("accelerator", hardware.accelerator))
    known = ("auto", "cpu", "gpu", "cuda") + (("mps", "tpu", "xla") if kind == "lightning" else ())
    if accelerator not in known:
        yield f"hardware.accelerator: trainer={kind} runs on {', '.join(known)}; found {accelerator!r}."
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        yield "hardware.accelerator: no GPU is available. Use hardware=cpu, or hardware=auto for a GPU where there is one."
    if kind == "composer" and find_spec("composer") is None:
        yield "trainer: Composer is not installed: pip install 'lightning-stream[composer]' in an environment of its own."
    devices, nodes = trainer.get("devices", hardware.devices), trainer.get("num_nodes", hardware.num_nodes)
    gpus = torch.cuda.device_count() if accelerator in ("auto", "gpu", "cuda") else 0
    if isinstance(devices, int) and (devices < -1 or devices == 0 or (devices == -1 and not gpus)):
        yield f"hardware.devices: must be 1 or more, or -1 for all GPUs; found {devices}."
    if kind == "lightning" or not isinstance(devices, int):
        return
    wanted, started = (gpus if devices == -1 else devices) * nodes, int(os.environ.get("WORLD_SIZE") or 1)
    if wanted != started:
        launcher = "composer -n" if kind == "composer" else "torchrun --nproc-per-node"
        yield (
            f"hardware.devices: {wanted} processes are wanted, and {started} were started. Start with {launcher} "
            f"{devices} train.py ..., or set hardware.devices and hardware.num_nodes to what was started."
        )


def _checkpoint(config: DictConfig) -> Iterator[str]:
    path, last = config.ckpt_path, last_checkpoint(config)
    if path is None:
        found = sorted(each.name for each in last.parent.glob("*") if each.is_file())
        if found and not config.overwrite and not config.prepare_only and not int(os.environ.get("LOCAL_RANK") or 0):
            yield (
                f"{last.parent} holds checkpoints of an earlier run ({', '.join(found[:3])}). Resume it with "
                "ckpt_path=last, choose another name=..., or start over with overwrite=true, which keeps them under "
                "another name."
            )
        return
    if "://" in path:
        return
    path = last if path == "last" else Path(path).expanduser()
    if not path.exists():
        yield f"ckpt_path: {path.absolute()} does not exist. Omit ckpt_path to start, or set name= to the run to resume."
    elif path.is_file() and not zipfile.is_zipfile(path):
        yield f"ckpt_path: {path.absolute()} is damaged, or is no checkpoint that torch wrote."


def _secrets(node: Any, where: str) -> Iterator[str]:
    """A config is kept beside its run, so it must not hold credentials."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            inner = f"{where}.{key}" if where else str(key)
            if where == "store" and _SECRET.search(str(key)) and isinstance(value, (str, int)):
                yield f"{inner}: configs must not hold secrets. Set the variable that the store's config file names."
            yield from _secrets(value, inner)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _secrets(value, f"{where}[{index}]")
    elif isinstance(node, str) and _URL_WITH_PASSWORD.search(node):
        yield f"{where}: this URL has a password in it, and configs are kept beside the run. Use the store's credentials."
