"""Train from the command line: configs choose data, model, trainer, scale and store, and this runs them.

python train.py +data=flowers                                  drawings, no network needed
python train.py +data=flowers data.photos=/path/to/photos      a folder of class folders, or a .tgz of one
python train.py +data=flowers ckpt_path=last                   go on where the run was stopped
python train.py --help                                         all choices; docs/configs.md tells more

Installed from a wheel, ``lightning-stream train`` is the same with the configs that came with it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_stream.cli.train import run

if __name__ == "__main__":
    run(sys.argv[1:], Path(__file__).parent / "configs")
