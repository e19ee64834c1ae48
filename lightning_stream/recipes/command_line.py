"""The command line of training around Hydra: both ways to choose data, and advice where Hydra gives up."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra import compose
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_stream.recipes.nearest import close, nearest

_COMPOSED: list[bool] = []
_CHOSEN_BY_USER = ("data", "experiment")  # in the defaults, empty as they are
WITH_VALUE = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--package", "-p", "--cfg", "-c")
"""Flags that the next argument belongs to."""


def mark_composed() -> None:
    """Say that the config was composed: whatever fails from here on is not about names of settings."""
    _COMPOSED.append(True)


def run_application(
    task: Callable[[DictConfig], Any], configs: Path, arguments: Sequence[str], config_name: str = "train"
) -> None:
    """Run a Hydra application; where its config cannot be composed, add to Hydra's message what would have been right.

    While Hydra reads the command line, that is the program's name and `arguments`; while the task runs it is what it
    was before, since trainers start further processes with it.

    Args:
        task: Gets the config.
        configs: Folder of the configs.
        arguments: What the user wrote, without the names of program and subcommand.
        config_name: The topmost config.
    """
    whole, given = list(sys.argv), tidied(arguments)

    def with_command_line(config: DictConfig) -> None:
        sys.argv[:] = whole
        task(config)

    _COMPOSED.clear()
    sys.argv[1:] = given
    try:
        hydra.main(version_base="1.3", config_path=str(configs.absolute()), config_name=config_name)(
            with_command_line
        )()
    except SystemExit as end:
        if end.code == 1 and not _COMPOSED:
            for line in advise(given, configs, config_name):
                print(line, file=sys.stderr)
        raise
    finally:
        sys.argv[:] = whole


def tidied(arguments: Sequence[str]) -> list[str]:
    """Let ``+data=flowers`` and ``data=flowers`` mean the same: `data` has a place in the defaults, empty as it is.

    Flags come first, wherever they stood: Hydra takes no settings on both sides of them.
    """
    flags: list[str] = []
    settings: list[str] = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        of_flag = argument.startswith("-") or before in WITH_VALUE
        (flags if of_flag else settings).append(argument)
    chosen = tuple(f"+{group}=" for group in _CHOSEN_BY_USER)
    return flags + [one.removeprefix("+") if one.startswith(chosen) else one for one in settings]


def advise(arguments: Sequence[str], configs: Path, config_name: str = "train") -> list[str]:
    """What is wrong with arguments that Hydra refused: all of them, each with the nearest valid name.

    Args:
        arguments: ``key=value`` arguments, and options among which ``--config-dir`` is heeded.
        configs: Folder of the configs.
        config_name: The topmost one.
    """
    search_path = create_config_search_path(str(configs.absolute()))
    if (added := _option(arguments, "--config-dir", "-cd")) is not None:
        folder = Path(added).absolute()
        if not folder.is_dir():
            return ["", f"--config-dir: there is no folder at {folder}."]
        search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    overrides = [one for one in arguments if not one.startswith("-") and ("=" in one or one.startswith("~"))]
    stray = [one for one in arguments if one not in overrides and not one.startswith("-") and one != added]
    told = [f"{one!r}: an argument is a setting and its value, name=value.{_as_choice(one, configs)}" for one in stray]
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        loader = Hydra.create_main_hydra2("train", search_path).config_loader
        told += _advice(overrides, config_name, loader)
    finally:
        GlobalHydra.instance().hydra = before
    return ["", f"{len(told)} thing(s) to change:", *(f"  {line}" for line in told)] if told else []


def _advice(overrides: Sequence[str], config_name: str, loader: ConfigLoader) -> list[str]:
    told, parsed = [], []
    for one in overrides:
        try:
            parsed += OverridesParser.create().parse_overrides([one])
        except (HydraException, OmegaConfBaseException) as error:  # noqa: PERF203 (each argument's own)
            told.append(f"{one}: cannot be read: {str(error).splitlines()[0]}. Quote it: 'name=\"value\"'.")
    groups, wrong = _chosen(loader, parsed)
    try:
        base = compose(config_name, overrides=groups)
    except (HydraException, OmegaConfBaseException):
        base = compose(config_name)
    told += wrong
    unchosen: dict[str, list[str]] = {}
    good = list(groups)
    for override in parsed:
        group = override.key_or_group.partition(".")[0]
        if group in _CHOSEN_BY_USER and "." in override.key_or_group and base.get(group) is None:
            unchosen.setdefault(group, []).append(override.key_or_group)
        elif problems := _wrong_value(override, base, config_name, groups, loader):
            told += problems
        elif not loader.get_group_options(override.key_or_group, ObjectType.CONFIG):
            good.append(str(override.input_line))
    for group, keys in unchosen.items():
        options = loader.get_group_options(group, ObjectType.CONFIG)
        told.append(f"{', '.join(keys)}: no {group} is chosen yet. Add +{group}=<one of {', '.join(options)}>.")
    if not any(override.is_sweep_override() for override in parsed):
        told += _wrong_all_the_same(good, config_name)
    return told


def _wrong_all_the_same(overrides: Sequence[str], config_name: str) -> list[str]:
    """What is wrong with the config that the other arguments make: then all of it is told at once."""
    from lightning_stream.recipes.checks import find_problems  # not needed, and slow to import, where all is well

    data = next((one.removeprefix("data=") for one in overrides if one.startswith("data=")), None)
    if data is None:
        return []
    named = any(one.startswith("name=") for one in overrides)
    try:
        config = compose(config_name, overrides=[*overrides, *([] if named else [f"name={data}"])])
    except (HydraException, OmegaConfBaseException):
        return []
    return find_problems(config)


def _option(arguments: Sequence[str], *names: str) -> str | None:
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            return value if equals else next(iter(arguments[number + 1 :]), None)
    return None


def _as_choice(word: str, configs: Path) -> str:
    found = [path.parent.name for path in configs.glob(f"*/{Path(word).name}.yaml")]
    return f" Did you mean {found[0]}={word}?" if found else ""


def _chosen(loader: ConfigLoader, parsed: Sequence[Override]) -> tuple[list[str], list[str]]:
    """Arguments that choose files of groups, or what they may have meant, and sentences on those that name none."""
    good, told = [], []
    for override in parsed:
        group = override.key_or_group
        options = loader.get_group_options(group, ObjectType.CONFIG)
        if not options or override.is_delete():
            continue
        values = (
            [str(one) for one in override.sweep_string_iterator()]
            if override.is_sweep_override()
            else [str(override.value())]
        )
        for wanted in values:
            meant = [wanted] if wanted in options else close(wanted, options)
            if wanted not in options:
                told.append(
                    f"{group}={wanted}: there is no such choice; there are {', '.join(options)}."
                    + (nearest(wanted, options))
                )
        good += [f"{group}={one}" for one in meant]
    return good, told


def _wrong_value(
    override: Override, base: DictConfig, config_name: str, groups: list[str], loader: ConfigLoader
) -> list[str]:
    key = override.key_or_group
    if loader.get_group_options(key, ObjectType.CONFIG) or override.is_add() or override.is_force_add():
        return []
    if key.startswith("hydra"):
        return []
    names = list(_dotted(base))
    if key not in names:
        last = key.rpartition(".")[2]
        short = [name for name in names if last == "".join(part[:1] for part in name.rpartition(".")[2].split("_"))]
        hint = nearest(key, names) or nearest(last, [name.rpartition(".")[2] for name in names])
        hint = hint or (f" Did you mean {short[0]!r}?" if short and len(last) > 1 else "")
        return [f"{key}: there is no such setting.{hint} See all with --cfg job; a new one is added with +{key}=..."]
    if override.is_sweep_override():
        return []
    try:
        compose(config_name, overrides=[*groups, str(override.input_line)])
    except (HydraException, OmegaConfBaseException) as error:
        return [f"{key}: {str(error).splitlines()[0]}"]
    return []


def _dotted(config: Any, place: str = "") -> list[str]:
    """Names of all settings, as the command line writes them."""
    names: list[str] = []
    for key in config if OmegaConf.is_dict(config) else ():
        name = f"{place}.{key}" if place else str(key)
        names.append(name)
        if OmegaConf.is_dict(node := config._get_node(key)):  # noqa: SLF001 - reading the value would resolve it
            names += _dotted(node, name)
    return names


def fail(sentences: Sequence[str]) -> SystemExit:
    """Say on stderr why the run cannot start or go on; HYDRA_FULL_ERROR=1 shows where it was found."""
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    return SystemExit(2)


def wants_traceback() -> bool:
    """Whether the user asked for Hydra's full errors."""
    return os.environ.get("HYDRA_FULL_ERROR", "0") == "1"
