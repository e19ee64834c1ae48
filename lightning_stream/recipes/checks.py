"""What is wrong with a composed config, all of it at once, each with its place and the nearest valid name."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_stream.formats.compression import check_compression
from lightning_stream.formats.hashing import check_hashes
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.recipes.command_line import nearest
from lightning_stream.recipes.places import last_checkpoint, last_of_composer

_HYDRA_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_"})
_AT_LEAST_ONE = (
    "drawn_count",
    "global_batch_size",
    "eval_batch_size",
    "image_size",
    "max_epochs",
    "accumulate_grad_batches",
)


def find_problems(config: DictConfig) -> list[str]:
    """Everything wrong with a config of ``train.py``, one sentence each; empty where nothing is."""
    problems = [
        f"{group}: nothing is chosen. Add {example}." for group, example in _GROUPS.items() if not config.get(group)
    ]
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        return [*problems, str(error).splitlines()[0]]
    assert isinstance(plain, dict)
    values = {str(key): value for key, value in plain.items()}
    problems += [problem for place, node in _targets(values, "") for problem in _check_target(place, node)]
    return problems + _check_values(values) + _check_together(values)


_GROUPS = {"data": "+data=flowers", "model": "model=mobilenet_v2", "trainer": "trainer=lightning"}


def _targets(node: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All nodes that build something, each with its place in the config."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield place, dict(node)
        for key, value in node.items():
            yield from _targets(value, f"{place}.{key}" if place else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _targets(value, f"{place}[{index}]")


def _check_target(place: str, node: Mapping[str, Any]) -> list[str]:
    try:
        target: Callable[..., Any] = get_object(str(node["_target_"]))
        parameters = inspect.signature(target).parameters
    except (HydraException, ImportError, ValueError, TypeError) as error:
        return [f"{place}._target_: {node['_target_']!r} cannot be loaded: {str(error).splitlines()[0]}"]
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    hints = _hints(target)
    problems = []
    for key, value in node.items():
        if key in _HYDRA_KEYS:
            continue
        if key not in parameters:
            if not open_ended:
                problems.append(f"{place}.{key}: {target.__name__} has no such setting.{nearest(key, parameters)}")
        elif not fits(value, hints.get(key, Any)):
            problems.append(f"{place}.{key}: must be {_told(hints[key])}; found {value!r}.")
    required = [n for n, one in parameters.items() if one.default is one.empty and one.kind is one.KEYWORD_ONLY]
    if node.get("_partial_"):
        required = []
    return problems + [
        f"{place}.{name}: is missing; {target.__name__} needs it." for name in required if name not in node
    ]


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):
        return {}  # names that exist for type checkers only: its values go unchecked


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of a config can be of a type; types that configs cannot hold are let through."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if origin in (list, tuple, Sequence, Iterable):
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value if inner)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    return True


def _told(hint: Any) -> str:
    parts = list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]
    names: dict[Any, str] = {
        type(None): "null",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
    }
    return " or ".join(names[part] if part in names else str(getattr(part, "__name__", part)) for part in parts)


def _check_values(values: Mapping[str, Any]) -> list[str]:
    """Values of the right type that are wrong all the same."""
    data, trainer, model = ({**(values.get(group) or {})} for group in ("data", "trainer", "model"))
    problems = []
    for group, node in (("data", data), ("trainer", trainer)):
        for name in _AT_LEAST_ONE:
            number = node.get(name)
            if isinstance(number, int) and number < 1 and not (name == "max_epochs" and number == -1):
                problems.append(f"{group}.{name}: must be at least 1; found {number}.")
    if isinstance(data.get("num_workers"), int) and data["num_workers"] < 0:
        problems.append(f"data.num_workers: must be at least 0; found {data['num_workers']}.")
    problems += _refused("data.compression", check_compression, data.get("compression"))
    problems += _refused("data.hashes", check_hashes, data.get("hashes"))
    for name in ("size_limit", "cache_limit"):
        if data.get(name) is not None:
            problems += _refused(f"data.{name}", parse_bytes, data[name])
    if isinstance(data.get("held_out"), (int, float)) and not 0 < data["held_out"] < 1:
        problems.append(f"data.held_out: is a share of the photos, between 0 and 1; found {data['held_out']}.")
    if isinstance(data.get("photos"), str):
        problems += _check_photos(data["photos"])
    if isinstance(model.get("weights"), str) and not Path(model["weights"]).expanduser().is_file():
        problems.append(f"model.weights: there is no file at {Path(model['weights']).expanduser().absolute()}.")
    return problems


def _refused(place: str, check: Callable[[Any], object], value: Any) -> list[str]:
    try:
        check(value)
    except (ValueError, TypeError) as error:
        return [f"{place}: {error}"]
    return []


def _check_photos(photos: str) -> list[str]:
    from lightning_stream.recipes.photos import DOWNLOAD, DRAWN

    if photos in (DRAWN, DOWNLOAD) or Path(photos).expanduser().exists():
        return []
    hint = nearest(photos, (DRAWN, DOWNLOAD))
    where = Path(photos).expanduser().absolute()
    return [f"data.photos: is 'drawn', 'download', or a path; there is nothing at {where}.{hint}"]


def _check_together(values: Mapping[str, Any]) -> list[str]:
    """Settings that are right alone, and cannot be together."""
    data, trainer = values.get("data") or {}, values.get("trainer") or {}
    problems = []
    devices: Any = trainer.get("devices")
    batch: Any = data.get("global_batch_size")
    nodes, accumulate = trainer.get("num_nodes") or 1, trainer.get("accumulate_grad_batches") or 1
    counts = (devices, nodes, accumulate, batch)
    if all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in counts):
        parts = devices * nodes * accumulate
        if batch % parts:
            problems.append(
                f"data.global_batch_size: {batch} samples do not divide by {devices} devices x {nodes} nodes x "
                f"{accumulate} accumulated micro-batches; use a multiple of {parts}."
            )
    if values.get("ckpt_path") == "last" and isinstance(values.get("folder"), str):
        under_composer = str(trainer.get("_target_")).endswith(".ComposerRun")
        last = (last_of_composer if under_composer else last_checkpoint)(Path(values["folder"]))
        if not last.is_file():
            problems.append(
                f"ckpt_path: 'last' continues from {last.absolute()}, which does not exist. Leave ckpt_path away to "
                "start, or set name= (or folder=) to those of the run to continue."
            )
    return problems
