"""Where things lie in a run's folder."""

from __future__ import annotations

from pathlib import Path

LAST = "last.ckpt"


def checkpoints(folder: Path) -> Path:
    """The folder of a run's checkpoints."""
    return folder / "checkpoints"


def last_checkpoint(folder: Path) -> Path:
    """The checkpoint that ``ckpt_path=last`` goes on from."""
    return checkpoints(folder) / LAST


def composer_checkpoints(folder: Path) -> Path:
    """The folder of a run's checkpoints under Composer."""
    return folder / "composer"


def last_of_composer(folder: Path) -> Path:
    """The checkpoint that ``ckpt_path=last`` goes on from under Composer: of the first rank, which has all."""
    return composer_checkpoints(folder) / "latest-rank0.pt"
