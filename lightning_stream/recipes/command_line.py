"""The command line of ``train.py`` around Hydra: both ways to choose data, and advice where Hydra gives up."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

_STARTED: list[bool] = []


def mark_started() -> None:
    """Say that the config was composed: whatever fails from here on is not about names of settings."""
    _STARTED.append(True)


def run_with_advice(main: Callable[[], Any], configs: Path, config_name: str = "train") -> None:
    """Run a Hydra application; where its config cannot be composed, add to Hydra's message what would have been right.

    Args:
        main: The decorated function.
        configs: Folder of the configs.
        config_name: The topmost one.
    """
    sys.argv[1:] = tidied(sys.argv[1:])
    try:
        main()
    except SystemExit as end:
        if end.code == 1 and not _STARTED:
            overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-") and "=" in argument]
            for line in advise(overrides, configs, config_name):
                print(line, file=sys.stderr)
        raise


def tidied(arguments: Sequence[str]) -> list[str]:
    """Let ``+data=flowers`` and ``data=flowers`` mean the same: `data` has a place in the defaults, empty as it is."""
    return [
        argument.removeprefix("+") if argument.startswith(("+data=", "+experiment=")) else argument
        for argument in arguments
    ]


def advise(overrides: Sequence[str], configs: Path, config_name: str = "train") -> list[str]:
    """What is wrong with overrides that Hydra refused: all of them, each with the nearest valid name.

    Args:
        overrides: ``key=value`` arguments.
        configs: Folder of the configs.
        config_name: The topmost one.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(configs.absolute()), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            parsed = OverridesParser.create().parse_overrides(list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            return [
                "",
                f"One of the arguments cannot be read: {str(error).splitlines()[0]}. Quote it: 'key=\"value\"'.",
            ]
        groups, told = _chosen(hydra.config_loader, parsed)
        try:
            base = compose(config_name, overrides=groups)
        except (HydraException, OmegaConfBaseException):
            base = compose(config_name)
        for override in parsed:
            told += _wrong_value(override, base, config_name, groups, hydra.config_loader)
    return ["", f"{len(told)} thing(s) to change:", *(f"  {line}" for line in told)] if told else []


def _chosen(loader: ConfigLoader, parsed: Sequence[Override]) -> tuple[list[str], list[str]]:
    """Arguments that choose files of groups, or what they may have meant, and sentences on those that name none."""
    good, told = [], []
    for override in parsed:
        group = override.key_or_group
        options = loader.get_group_options(group, ObjectType.CONFIG)
        if not options or override.is_delete():
            continue
        wanted = str(override.value())
        close = [wanted] if wanted in options else _close(wanted, options)
        good += [f"{group}={one}" for one in close]
        if wanted not in options:
            told.append(f"{group}={wanted}: is one of {', '.join(options)}.{nearest(wanted, options)}")
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
        hint = nearest(key, names) or nearest(key.rpartition(".")[2], [name.rpartition(".")[2] for name in names])
        return [f"{key}: there is no such setting.{hint} See all with --cfg job; a new one is added with +{key}=..."]
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


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint at the valid name that is most like this one; empty if none is."""
    close = _close(name, valid)
    return f" Did you mean {close[0]!r}?" if close else ""


def _close(name: str, valid: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(valid), n=1, cutoff=0.55)


def fail(sentences: Sequence[str]) -> SystemExit:
    """Say on stderr why the run cannot start or go on; HYDRA_FULL_ERROR=1 shows where it was found."""
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    return SystemExit(2)


def wants_traceback() -> bool:
    """Whether the user asked for Hydra's full errors."""
    return os.environ.get("HYDRA_FULL_ERROR", "0") == "1"
