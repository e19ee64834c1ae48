"""Single settings of a config that have the right type and are wrong all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_stream.formats.codecs import check_compression
from lightning_stream.formats.hashing import check_hashes
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.recipes.check_targets import UNKNOWN
from lightning_stream.recipes.nearest import nearest

_AT_LEAST_ONE = (
    "drawn_count",
    "generated_count",
    "played_count",
    "conversion_workers",
    "global_batch_size",
    "eval_batch_size",
    "image_size",
    "caption_length",
    "moments",
    "block",
    "max_epochs",
    "accumulate_grad_batches",
    "num_nodes",
    "num_canonical_nodes",
    "save_every",
)
_NOT_NEGATIVE = ("num_workers", "seed")
_SOURCES = {  # what is made by this package, by the function that knows the word
    "text_data": ("generated",),
    "image_data": (),
    "caption_data": ("drawn",),
    "sound_data": ("played",),
}


def value_problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with single values, one sentence each."""
    groups = {name: dict(node) for name in ("data", "trainer", "model", "scale") if (node := _group(values, name))}
    data, model = groups.get("data", {}), groups.get("model", {})
    problems = _counts({**groups, "": {"num_threads": values.get("num_threads"), "seed": values.get("seed")}})
    if "compression" in data:
        problems += _refused("data.compression", check_compression, data["compression"])
    if "hashes" in data:
        problems += _refused("data.hashes", check_hashes, data["hashes"])
    for name in ("size_limit", "cache_limit"):
        if data.get(name) is not None:
            problems += _refused(f"data.{name}", parse_bytes, data[name])
    if _is_number(data.get("held_out")) and not 0 < data["held_out"] < 1:
        problems.append(f"data.held_out: is a share of the data, between 0 and 1; found {data['held_out']}.")
    if isinstance(data.get("photos"), str):
        problems += _check_photos(data["photos"])
    problems += _check_source(data)
    if isinstance(model.get("weights"), str) and not Path(model["weights"]).expanduser().is_file():
        problems.append(f"model.weights: there is no file at {Path(model['weights']).expanduser().absolute()}.")
    if isinstance(model.get("network"), str) and str(model.get("_target_")).endswith(".ImageClassifier"):
        problems += _check_network(model["network"])
    return problems


def _check_network(name: str) -> list[str]:
    if find_spec("torchvision") is None:
        return ["model.network: needs torchvision, which is not installed: pip install 'lightning-stream[recipes]'."]
    from torchvision import models

    known = models.list_models(module=models)
    if name.lower() in known:
        return []
    return [f"model.network: torchvision has no classification network {name!r}.{nearest(name, known)}"]


def _group(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    node = values.get(name)
    return node if isinstance(node, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _counts(groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    problems = []
    for group, node in groups.items():
        for name, number in node.items():
            place = f"{group}.{name}" if group else name
            if not isinstance(number, int) or isinstance(number, bool):
                continue
            if name in (*_AT_LEAST_ONE, "num_threads") and number < 1 and not (name == "max_epochs" and number == -1):
                problems.append(f"{place}: must be at least 1; found {number}.")
            if name in _NOT_NEGATIVE and number < 0:
                problems.append(f"{place}: must be at least 0; found {number}.")
    return problems


def _refused(place: str, check: Callable[[Any], object], value: Any) -> list[str]:
    if value is UNKNOWN:
        return []
    try:
        check(value)
    except (ValueError, TypeError) as error:
        return [f"{place}: {error}"]
    return []


def _check_source(data: Mapping[str, Any]) -> list[str]:
    """What is a file of this machine, or a word; other data says itself where it may lie."""
    source, target = data.get("source"), str(data.get("_target_"))
    words = _SOURCES.get(target.rpartition(".")[2])
    if words is None or not isinstance(source, str) or source in words or Path(source).expanduser().exists():
        return []
    said = "".join(f"is {word!r} or a path; " for word in words)
    return [f"data.source: {said}there is nothing at {Path(source).expanduser().absolute()}.{nearest(source, words)}"]


def _check_photos(photos: str) -> list[str]:
    from lightning_stream.recipes.photos import DOWNLOAD, DRAWN

    if photos in (DRAWN, DOWNLOAD) or Path(photos).expanduser().exists():
        return []
    hint = nearest(photos, (DRAWN, DOWNLOAD))
    where = Path(photos).expanduser().absolute()
    return [f"data.photos: is 'drawn', 'download', or a path; there is nothing at {where}.{hint}"]
