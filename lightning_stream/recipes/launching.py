"""A job and the processes that Lightning's own launcher starts for it: those do this job, no more, in its folder.

Lightning starts a child process with its parent's command line. In a sweep that is the whole sweep, which each child
would run anew; and what one job leaves in the environment makes the next believe that its processes exist already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from lightning_stream.recipes.command_line import WITH_VALUE

_LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
_SWEEP = ("-m", "--multirun")


@contextmanager
def one_job(config: DictConfig) -> Iterator[None]:
    """Within this, child processes do the job of this config; afterwards, nothing of them is left.

    In a sweep, `config.folder` becomes the job's own.
    """
    if not HydraConfig.initialized():
        yield
        return
    arguments, environment = sys.argv, {name: os.environ.get(name) for name in _LAUNCHED}
    sweeps = HydraConfig.get().mode is RunMode.MULTIRUN
    if sweeps:
        _settle(config)
    sys.argv = [arguments[0], *child_arguments(arguments[1:], config.folder if sweeps else None)]
    try:
        yield
    finally:
        sys.argv = arguments
        if sweeps and environment["LOCAL_RANK"] is None:  # else the launcher, and its processes, outlive the job
            _forget(environment)


def child_arguments(arguments: Sequence[str], job_folder: str | None) -> list[str]:
    """The command line that repeats this job, without a log file of its own.

    Args:
        arguments: Those of this process.
        job_folder: Where a sweep's job lies; None outside of sweeps.
    """
    hydra = HydraConfig.get()
    if job_folder is None:
        kept = list(arguments)
    else:
        own = [one for one in hydra.overrides.hydra if not one.startswith(("hydra.mode=", "hydra.run.dir="))]
        folder = f"folder={_quoted(job_folder)}"
        kept = [*flags_of(arguments), *hydra.overrides.task, *own, folder, "hydra.mode=RUN"]
    if any(one.startswith("hydra/job_logging=") for one in kept):
        return kept
    return [*kept, "hydra/job_logging=stdout"]


def flags_of(arguments: Sequence[str]) -> list[str]:
    """A command line's flags with their values, and a subcommand, less what asks for a sweep."""
    kept: list[str] = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        subcommand = "=" not in argument and not argument.startswith(("-", "~"))
        if before in WITH_VALUE or subcommand or (argument.startswith("-") and argument not in _SWEEP):
            kept.append(argument)
    return kept


def _settle(config: DictConfig) -> None:
    """Move a sweep's job into its own folder, for this process and, by Hydra's `run.dir`, for Lightning's children."""
    config.folder = HydraConfig.get().runtime.output_dir
    hydra: Any = HydraConfig.instance().cfg
    with read_write(hydra.hydra):
        OmegaConf.update(hydra, "hydra.run.dir", config.folder)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _forget(environment: dict[str, str | None]) -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
