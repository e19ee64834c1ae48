"""A sweep's jobs: which there are, and what each one's folder is called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

_SWEPT: list[str] = []
"""The keys that the sweep varies, noted when it starts."""


def note_swept(config: DictConfig) -> None:
    """Remember which settings the sweep of this config varies."""
    _SWEPT[:] = [one.key_or_group for one in OverridesParser.create().parse_overrides(_all(config)) if _varies(one)]


def _all(config: DictConfig) -> list[str]:
    params = config.hydra.sweeper.get("params") or {}
    return [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]


def _varies(override: Any) -> bool:
    return bool(override.is_sweep_override())


def part_of(hydra: Any) -> str:
    """What tells a job's folder from those of the sweep's other jobs, e.g. ``seed-1_model-resnet18``.

    Args:
        hydra: Hydra's own part of the job's config.
    """
    number = OmegaConf.select(hydra, "job.num", default=None, throw_on_missing=False)
    if number is None:
        return ""  # the sweep itself
    given = dict(str(one).lstrip("+").partition("=")[::2] for one in hydra.overrides.task)
    parts = [f"{key.rpartition('.')[2]}-{given[key]}" for key in dict.fromkeys(_SWEPT) if key in given]
    return re.sub(r"[^\w.+_-]+", "-", "_".join(parts)).strip("-") or f"{number}"


def jobs_of(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """Each job of a sweep: its settings as written, and its whole config. Only for Hydra's own sweeper."""
    if config.hydra.sweeper._target_.rpartition(".")[2] != BasicSweeper.__name__:
        return
    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(_all(config))
    for number, overrides in enumerate(BasicSweeper.split_arguments(parsed, None)[0]):
        job = loader.load_sweep_config(config, list(overrides))
        with open_dict(job):
            job.hydra.job.id, job.hydra.job.num = f"{number}", number
        swept = [one for one in overrides if one.lstrip("+").partition("=")[0] in _SWEPT]
        yield " ".join(swept), job
