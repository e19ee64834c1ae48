"""Train from the command line: configs choose data, model, trainer and scale, and this runs them.

python train.py +data=flowers                                  drawings, no network needed
python train.py +data=flowers data.photos=/path/to/photos      a folder of class folders, or a .tgz of one
python train.py +data=flowers ckpt_path=last                   go on where the run was stopped
"""

from __future__ import annotations

from pathlib import Path

import hydra
from omegaconf import DictConfig

from lightning_stream.recipes.command_line import run_with_advice


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> None:
    """Train what the config describes."""
    from lightning_stream.recipes.training import train  # not needed, and slow to import, for --help and --cfg

    train(config)


if __name__ == "__main__":
    run_with_advice(main, Path(__file__).parent / "configs")
