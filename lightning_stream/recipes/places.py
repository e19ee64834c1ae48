"""Where things lie in a run's folder."""

from __future__ import annotations

from pathlib import Path

LAST = "last.ckpt"
LIGHTNING, COMPOSER, TORCH = "lightning", "composer", "torch"
_KINDS = {
    "lightning_stream.recipes.composer_run.ComposerRun": COMPOSER,
    "lightning_stream.recipes.torch_run.TorchRun": TORCH,
}


def trainer_of(target: object) -> str:
    """Which trainer a config's `_target_` is."""
    return _KINDS.get(str(target), LIGHTNING)


def checkpoints(folder: Path, kind: str = LIGHTNING) -> Path:
    """The folder of a run's checkpoints under a trainer."""
    return folder / ("checkpoints" if kind == LIGHTNING else kind)


def last_checkpoint(folder: Path, kind: str = LIGHTNING) -> Path:
    """The checkpoint that ``ckpt_path=last`` goes on from."""
    return checkpoints(folder, kind) / {COMPOSER: "latest-rank0.pt", TORCH: "last.pt"}.get(kind, LAST)


def composer_checkpoints(folder: Path) -> Path:
    """The folder of a run's checkpoints under Composer."""
    return checkpoints(folder, COMPOSER)


def last_of_composer(folder: Path) -> Path:
    """The checkpoint that ``ckpt_path=last`` goes on from under Composer: of the first rank, which has all."""
    return last_checkpoint(folder, COMPOSER)


def checkpoint_meant(ckpt_path: str, folder: Path, kind: str = LIGHTNING) -> Path:
    """The checkpoint that `ckpt_path` means: ``last`` is the newest of the run's own folder."""
    return last_checkpoint(folder, kind) if ckpt_path == "last" else Path(ckpt_path).expanduser()
