"""``lightning-stream train``: what ``train.py`` does, with the configs that came with the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from lightning_stream.errors import NotFoundError
from lightning_stream.recipes import resolvers
from lightning_stream.recipes.command_line import run_application

_PACKAGE = Path(__file__).resolve().parent.parent


def run(arguments: Sequence[str], configs: Path) -> None:
    """Train what the arguments choose.

    Args:
        arguments: As Hydra takes them.
        configs: Folder of the configs.
    """
    resolvers.register()
    run_application(_train, configs, arguments)


def packaged_configs() -> Path:
    """The folder of the configs: within an installed package, or beside it in a checkout.

    Raises:
        NotFoundError: In neither place.
    """
    for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs"):
        if (folder / "train.yaml").is_file():
            return folder
    raise NotFoundError(
        f"the configs come with the package, in {_PACKAGE / 'configs'}; there are none. Install it anew."
    )


def _train(config: DictConfig) -> None:
    from lightning_stream.recipes.training import train  # not needed, and slow to import, for --help and --cfg

    train(config)
