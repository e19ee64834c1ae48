"""What configs may compute: ``${bytes:10gb}``, ``${path:'~/data'}``, the folders of runs, and other trainers' words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.recipes.sweeps import part_of

_COMPOSER_DEVICES = {"auto": None, "cuda": "gpu"}
_COMPOSER_PRECISIONS = {"32-true": "fp32", "bf16-mixed": "amp_bf16", "16-mixed": "amp_fp16"}


def register() -> None:
    """Make the resolvers known. Called again, it changes nothing."""
    known: dict[str, Callable[..., Any]] = {
        "bytes": parse_bytes,
        "path": absolute,
        "run_folder": run_folder,
        "swept_folder": swept_folder,
        "composer_device": lambda name: _COMPOSER_DEVICES.get(name, name),
        "composer_precision": lambda name: _COMPOSER_PRECISIONS.get(name, name),
        "command": command,
    }
    for name, resolver in known.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def absolute(path: str) -> str:
    """A path of this machine, absolute and with ``~`` told; a URL as it is."""
    return path if "://" in path or path.startswith("dbfs:") else str(Path(path).expanduser().absolute())


def run_folder(root: str, name: str) -> str:
    """The folder of a run; in a sweep, that of the sweep's present job."""
    return f"{root}/{swept_folder(name)}"


def swept_folder(name: str) -> str:
    """The same, below the folder of all runs."""
    if not HydraConfig.initialized():
        return name
    hydra = HydraConfig.get()
    part = part_of(hydra) if hydra.mode == RunMode.MULTIRUN else ""
    return f"{name}/{part}" if part else name


def command() -> str:
    """How this program was called, for its help."""
    called = Path(sys.argv[0])
    return f"python {called.name}" if called.suffix == ".py" else "lightning-stream train"


register()
