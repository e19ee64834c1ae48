"""What is wrong with a config: all of it at once, one sentence each, before anything starts."""

import os
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_stream.errors import is_secret

_CHECKPOINTS = {"lightning": "checkpoints/last.ckpt", "torch": "torch/last.pt", "composer": "composer/latest-rank0.pt"}
_OF_STORES = {"store", "store_options", "options", "storage_options", "env", "headers"}  # groups that stores get


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
    """What is wrong with a config of ``train.py``, one sentence each; Hydra finds the rest when it builds the parts."""
    if not config.get("data"):
        choices = sorted(path.stem for path in (Path(__file__).parent.parent / "configs/data").glob("*.yaml"))
        return [f"no dataset selected. Add +data=NAME with one of: {', '.join(choices)}."]
    if trainer_kind(config) == "composer" and find_spec("composer") is None:
        return ["trainer: Composer is not installed. In its own environment: pip install 'lightning-stream[composer]'."]
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        return [str(error).splitlines()[0].rpartition("interpolation: ")[2]]
    return [*_secrets(values, ""), *_hardware(config), *_checkpoint(config)]


def wrong_types(node: DictConfig, where: str) -> list[str]:
    """Settings whose types are not those that the constructor's annotations name; only plain types are compared."""
    hints: dict[str, Any] = {}
    with suppress(ImportError, AttributeError, ValueError, TypeError):  # Hydra reports a target that cannot be found
        for one in reversed(resolve_name(node.get("_target_")).__mro__):  # a function's types are not compared
            with suppress(NameError, TypeError):  # an annotation that cannot be evaluated
                hints |= get_type_hints(vars(one).get("__init__", object.__init__))
    problems = []
    for key in hints.keys() & node.keys():
        hint, value = hints[key], node[key]
        accepted = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        words = [word for one in accepted if get_origin(one) is Literal for word in get_args(one)]
        types = dict.fromkeys(one for one in accepted if get_origin(one) is not Literal)
        is_right = value in words or type(value) in types or (type(value) is int and float in types)
        if types and types.keys() <= {bool, int, float, str, NoneType} and not is_right:
            names = " or ".join(["null" if one is NoneType else one.__name__ for one in types] + list(map(repr, words)))
            problems.append(f"{where}.{key} must be {names}; found {value!r}.")
    return sorted(problems)


def _hardware(config: DictConfig) -> Iterator[str]:
    """What is not there, and what a launcher started in another number than the config has."""
    kind, hardware = trainer_kind(config), config.hardware
    accelerator = str(config.trainer.get("accelerator", hardware.accelerator))
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        yield "hardware.accelerator: no GPU is available. Use hardware=cpu, or hardware=auto."
    if kind == "lightning":
        return  # it checks the others itself
    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        yield f"hardware.accelerator: trainer={kind} runs on auto, cpu or gpu; found {accelerator!r}."
    gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()
    wanted = (gpus if hardware.devices == -1 else hardware.devices) * hardware.num_nodes
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if wanted != started:
        start = (
            f"{'composer -n' if kind == 'composer' else 'torchrun --nproc-per-node'} {hardware.devices} train.py ..."
        )
        yield f"hardware.devices: {wanted} processes are wanted, and {started} started. Start them with {start}"


def _checkpoint(config: DictConfig) -> Iterator[str]:
    wanted, last = config.ckpt_path, last_checkpoint(config)
    if not resumes_itself(config):
        found = sorted(each.name for each in last.parent.glob("*") if each.is_file())
        is_first = not int(os.environ.get("LOCAL_RANK") or 0)
        if found and is_first and not config.overwrite and not config.prepare_only:
            ways = "ckpt_path=last, choose another name=..., or start over with overwrite=true, which keeps them"
            yield f"{last.parent} holds checkpoints of an earlier run ({', '.join(found[:3])}). Resume it with {ways}."
    if wanted is not None and "://" not in wanted:
        path = last if wanted == "last" else Path(wanted).expanduser()
        if not path.exists():
            yield f"ckpt_path: {path.absolute()} does not exist. Omit ckpt_path to start, or set name=."
        elif path.is_file() and not zipfile.is_zipfile(path):
            yield f"ckpt_path: {path.absolute()} is damaged, or is no checkpoint that torch wrote."


def _secrets(value: Any, where: str) -> Iterator[str]:
    """A config is kept beside its run, so it must not hold credentials."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _secrets(child, f"{where}.{key}".lstrip("."))
    *groups, name = where.split(".")
    if isinstance(value, (str, int)) and is_secret(name, value, of_store=bool(_OF_STORES & set(groups))):
        yield (
            f"{where}: configs must not hold secrets, nor a URL with a password, since they are kept. Set the variable "
            "of the credentials, which the store's config file names."
        )
