"""What is wrong with a composed config, all of it at once, each with its place and the nearest valid name.

The schema of what a config builds is the signature of what it builds: a setting that is added to a class can be set,
with its type, and nothing is written twice. Only what builds nothing has a schema here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from omegaconf import DictConfig, ListConfig
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from lightning_stream.recipes import resolvers
from lightning_stream.recipes.check_targets import UNKNOWN, schema_problems, target_problems
from lightning_stream.recipes.check_together import problems_together
from lightning_stream.recipes.check_values import value_problems

resolvers.register()

GROUPS = {"data": "+data=flowers", "model": "model=mobilenet_v2", "trainer": "trainer=lightning"}
"""What every run needs, with an example of it."""

_RUN: Mapping[str, Any] = {
    **dict.fromkeys((*GROUPS, "store", "scale"), Any),
    "name": str,
    "root": str,
    "folder": str,
    "ckpt_path": str | None,
    "seed": int,
    "num_threads": int | None,
}
_SCALE: Mapping[str, Any] = {
    "accelerator": Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu", "xla"],
    "devices": int | str | list[int],
    "num_nodes": int,
    "strategy": str | Mapping[str, Any],
    "precision": str | int,
    "canonical_nodes": int | None,
}
_OPTIONAL = ("callbacks", "vars")  # vars: values of the user's own, for other settings to refer to
_SECRET = re.compile(r"secret|password|passwd|token|access_?key|account_?key|credential|(^|_)key$|sas_", re.IGNORECASE)
_WITH_PASSWORD = re.compile(r"://[^/@\s:]*:[^/@\s]+@")


def refusal(config: DictConfig) -> list[str]:
    """What to tell a user whose config cannot be run, line by line; empty where it can."""
    problems = find_problems(config)
    return ["This config cannot be run:", *(f"  {problem}" for problem in problems)] if problems else []


def find_problems(config: DictConfig) -> list[str]:
    """Everything wrong with a config of ``train.py``, one sentence each; empty where nothing is."""
    problems = [
        f"{group}: nothing is chosen. Add {example}." for group, example in GROUPS.items() if not config.get(group)
    ]
    referring: set[str] = set()
    values = {str(key): _value(config, key, str(key), problems, referring) for key in config if key != "hydra"}
    told = [group for group in GROUPS if group not in values]
    if "data" in told:
        told.append("name")  # is the data's
        values.pop("name", None)
    schema = {name: hint for name, hint in _RUN.items() if name not in told} | {
        name: Any for name in _OPTIONAL if name in values
    }
    problems += schema_problems("", values, schema)
    if "scale" in values:
        problems += schema_problems("scale", values["scale"], _SCALE)
    problems += _store_problems(values.get("store")) + _secrets(values, "")
    problems += target_problems(values)
    return _once(problems + value_problems(values) + problems_together(values), referring)


def _once(problems: list[str], referring: set[str]) -> list[str]:
    """Without what is told of a place that only refers to another of which the same is told."""
    told = {problem.partition(": ")[2] for problem in problems if problem.partition(": ")[0] not in referring}
    parts = [(problem, *problem.partition(": ")[::2]) for problem in dict.fromkeys(problems)]
    return [problem for problem, place, sentence in parts if place not in referring or sentence not in told]


def _value(parent: Any, key: Any, place: str, problems: list[str], referring: set[str]) -> Any:
    """The value at a place, plain, interpolations resolved; `UNKNOWN`, and a problem told, where it has none.

    Places that refer to others are noted.
    """
    node = parent._get_node(key)  # noqa: SLF001 - reading the value would resolve it
    if node is not None and node._is_interpolation():  # noqa: SLF001
        referring.add(place)
    try:
        value = parent[key]
    except MissingMandatoryValue:
        problems.append(f"{place}: needs a value. Add {place}=...")
        return UNKNOWN
    except InterpolationToMissingValueError:
        return UNKNOWN  # told where it is missing
    except InterpolationKeyError as error:
        problems.append(f"{place}: refers to what does not exist: {_first_line(error)}")
        return UNKNOWN
    except OmegaConfBaseException as error:
        if not _comes_of_a_missing_value(error):
            problems.append(f"{place}: {_first_line(error)}")
        return UNKNOWN
    if isinstance(value, DictConfig):
        return {str(one): _value(value, one, f"{place}.{one!s}", problems, referring) for one in value}
    if isinstance(value, ListConfig):
        return [_value(value, index, f"{place}[{index}]", problems, referring) for index in range(len(value))]
    return value


def _comes_of_a_missing_value(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (MissingMandatoryValue, InterpolationToMissingValueError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _store_problems(store: Any) -> list[str]:
    if not isinstance(store, Mapping):
        return ["store: must be a group of settings. Choose one, e.g. store=local."] if store is not None else []
    if missing := [name for name in ("root", "environment") if name not in store]:
        return [f"store.{name}: is missing." for name in missing]
    wrong = [] if isinstance(store["root"], str) or store["root"] is UNKNOWN else ["store.root: must be text."]
    if not isinstance(store["environment"], Mapping):
        return [*wrong, "store.environment: must name variables and their values."]
    return wrong


def _secrets(node: Any, place: str) -> list[str]:
    """A config is written down beside the run: what it must not hold."""
    problems = []
    if isinstance(node, Mapping):
        for key, value in node.items():
            where = f"{place}.{key}" if place else str(key)
            if _SECRET.search(str(key)) and place.split(".")[0] == "store" and isinstance(value, (str, int)):
                problems.append(
                    f"{where}: a secret must not stand in a config, which is kept beside the run. Leave it away, and "
                    "set the variable that the store's own tools read (the store's config file names it)."
                )
            problems += _secrets(value, where)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            problems += _secrets(value, f"{place}[{index}]")
    elif isinstance(node, str) and _WITH_PASSWORD.search(node):
        problems.append(f"{place}: this URL has a password in it, and configs are kept beside the run. Use a key file.")
    return problems
