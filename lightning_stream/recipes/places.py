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
