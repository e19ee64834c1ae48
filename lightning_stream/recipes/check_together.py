"""Settings of a config that are right alone and cannot be together, or not on this machine."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from hydra.errors import HydraException
from hydra.utils import get_object

from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.recipes.places import COMPOSER, LIGHTNING, TORCH, checkpoint_meant, trainer_of

_MODELS = {
    "TextData": "model=gpt",
    "TableData": "model=mlp",
    "ImageData": "model=mobilenet_v2 or model=resnet18",
    "CaptionData": "model=text_to_image",
    "SoundData": "model=sound_classifier",
}
_MARKS = {TORCH: b"lightning_stream.torch_run", LIGHTNING: b"pytorch-lightning_version", COMPOSER: b"train_metrics"}


def problems_together(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with settings beside each other, one sentence each."""
    data, trainer, scale = (_group(values, name) for name in ("data", "trainer", "scale"))
    kind = trainer_of(trainer.get("_target_"))
    problems = []
    if kind == COMPOSER and find_spec("composer") is None:
        problems.append(
            "trainer: Composer is not installed. In an environment of its own: uv sync --no-dev --extra composer "
            "(or pip install 'lightning-stream[composer]'); it holds torch at 2.7."
        )
    own = {name: trainer[name] for name in ("accelerator", "devices", "num_nodes") if name in trainer}
    settings = {**scale, **own}
    place = "scale" if all(scale.get(name) == value for name, value in own.items()) else "trainer"
    devices, found = _devices(settings, place)
    problems += found
    nodes = settings.get("num_nodes")
    if isinstance(devices, int) and isinstance(nodes, int):
        problems += _started(kind, devices, nodes) + _batch(data, trainer, devices, nodes)
    return problems + _pair(data, _group(values, "model")) + _cache(data) + _checkpoint(values, kind)


def _group(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    node = values.get(name)
    return node if isinstance(node, Mapping) else {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _devices(settings: Mapping[str, Any], place: str) -> tuple[int | None, list[str]]:
    """How many devices of a node the settings mean, as far as that is known; and what is wrong with them."""
    import torch

    accelerator = settings.get("accelerator")
    devices: Any = settings.get("devices")
    there = torch.cuda.device_count() or int(torch.backends.mps.is_available())
    if accelerator in ("gpu", "cuda", "mps") and not there:
        advice = "Use scale=cpu, or scale=auto for a GPU where there is one."
        return None, [f"{place}.accelerator: asks for a GPU, and torch finds none on this machine. {advice}"]
    on_gpu = accelerator in ("gpu", "cuda", "mps") or (accelerator == "auto" and there > 0)
    if isinstance(devices, str):
        devices = int(devices) if devices.lstrip("-").isdigit() else devices
    if isinstance(devices, list):
        absent = [one for one in devices if on_gpu and isinstance(one, int) and not 0 <= one < there]
        told = f"{place}.devices: torch finds GPUs 0 to {there - 1} on this machine; found {devices}."
        return (None, [told]) if absent else (len(devices), [])
    if devices == "auto" or (devices == -1 and on_gpu):
        return (there if on_gpu else 1), []
    if _is_count(devices) and on_gpu and devices > there:
        return None, [f"{place}.devices: asks for {devices} GPUs; torch finds {there} on this machine."]
    if _is_count(devices):
        return devices, []
    wrong = isinstance(devices, (int, str)) and not isinstance(devices, bool)
    all_of = ", -1 for all GPUs" if on_gpu else ""
    return None, [f"{place}.devices: is a number of devices{all_of}; found {devices!r}."] if wrong else []


def _started(kind: str, devices: int, nodes: int) -> list[str]:
    """Whether the processes that the trainer does not start itself were started."""
    wanted = devices * nodes
    given = os.environ.get("WORLD_SIZE", "")
    if kind == LIGHTNING:
        outside = "TORCHELASTIC_RUN_ID" in os.environ and given.isdigit() and int(given) != wanted
    else:
        outside = (int(given) if given.isdigit() else 1) != wanted
    if not outside:
        return []
    starter = "composer -n" if kind == COMPOSER else "torchrun --nproc-per-node"
    more = f" --nnodes {nodes} --node-rank ..." if nodes > 1 else ""
    told = (
        f"scale.devices: {devices} devices on {nodes} node(s) are {wanted} processes, and {given or 1} "
        f"{'was' if given in ('', '1') else 'were'} started. Start with {starter} {devices}{more} train.py ..., or set "
        "scale.devices and scale.num_nodes to what was started."
    )
    return [told]


def _batch(data: Mapping[str, Any], trainer: Mapping[str, Any], devices: int, nodes: int) -> list[str]:
    batch: Any = data.get("global_batch_size")
    accumulate = trainer.get("accumulate_grad_batches") or 1
    if not all(_is_count(one) for one in (devices, nodes, accumulate, batch)):
        return []
    parts = devices * nodes * accumulate
    if batch % parts == 0:
        return []
    told = (
        f"data.global_batch_size: {batch} samples do not divide by {devices} devices x {nodes} nodes x "
        f"{accumulate} accumulated micro-batches; use a multiple of {parts}."
    )
    return [told]


def _pair(data: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """Whether the model learns from such data: by what the one says and the other's signature returns."""
    try:
        learner, source = (get_object(str(node["_target_"])) for node in (model, data))
        given = source if isinstance(source, type) else get_type_hints(source).get("return")
    except (KeyError, HydraException, ImportError, NameError, TypeError):
        return []  # told elsewhere, or not to be known
    wanted = getattr(learner, "learns_from", None)
    if not isinstance(wanted, type) or not isinstance(given, type) or issubclass(given, wanted):
        return []
    fitting = next((told for name, told in _MODELS.items() if name in {base.__name__ for base in given.__mro__}), "")
    advice = f" For this data: {fitting}." if fitting else ""
    return [f"model: {learner.__name__} learns from {wanted.__name__}, and data gives {given.__name__}.{advice}"]


def _cache(data: Mapping[str, Any]) -> list[str]:
    """A cache that cannot hold one shard. What more it needs, the order says when the run starts."""
    try:
        limit, shard = parse_bytes(data["cache_limit"]), parse_bytes(data["size_limit"])
    except (KeyError, ValueError):
        return []
    if limit >= shard:
        return []
    told = (
        f"data.cache_limit: {data['cache_limit']} must hold several shards, and one alone may have "
        f"data.size_limit={data['size_limit']}. Raise the one, or lower the other."
    )
    return [told]


def _checkpoint(values: Mapping[str, Any], kind: str) -> list[str]:
    wanted, folder = values.get("ckpt_path"), values.get("folder")
    if not isinstance(wanted, str) or not isinstance(folder, str) or "://" in wanted:
        return []
    path = checkpoint_meant(wanted, Path(folder), kind)
    if not path.exists():
        told = (
            f"'last' continues from {path.absolute()}, which does not exist"
            if wanted == "last"
            else (f"there is nothing at {path.absolute()}")
        )
        sentence = (
            f"ckpt_path: {told}. Leave ckpt_path away to start, or set name= (or folder=) to those of the run to "
            f"continue{_others(path, kind)}."
        )
        return [sentence]
    if path.is_file() and not zipfile.is_zipfile(path):
        return [f"ckpt_path: {path.absolute()} is not a checkpoint, or a damaged one: torch did not write it so."]
    if path.is_file() and (other := _kind_of(path)) not in (None, kind):
        told = f"{path} is a checkpoint of trainer={other}, and this run's trainer is {kind}"
        return [f"ckpt_path: {told}. Choose trainer={other}, or another checkpoint."]
    return []


def _kind_of(path: Path) -> str | None:
    """Whose checkpoint a file is, by words that only that trainer writes: no tensor is read, and nothing unpickled."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("data.pkl")]
        text = archive.read(names[0]) if names else b""
    return next((kind for kind, word in _MARKS.items() if word in text), None)


def _others(path: Path, kind: str) -> str:
    """What could be meant instead."""
    pattern = "*.pt" if kind != LIGHTNING else "*.ckpt"
    beside = sorted(one.name for one in path.parent.glob(pattern)) if path.parent.is_dir() else []
    return f"; in that folder there are {', '.join(beside[:5])}" if beside else ""
