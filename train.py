"""Train on streamed shards: configs choose data, model, trainer, hardware and store.

python train.py +data=flowers                              synthetic flowers, no network needed
python train.py +data=flowers data.photos=/path/to/photos  a folder of class folders, or a .tgz of one
python train.py +data=flowers ckpt_path=last               resume the run where it was stopped
python train.py --help                                     all choices; see also docs/configs.md
"""

from __future__ import annotations

import sys


def start() -> None:
    """Compose the config with Hydra, and run it. Exit codes: 1 error in the run, 2 config or data unusable."""
    import hydra
    from omegaconf import DictConfig

    @hydra.main(version_base="1.3", config_path="configs", config_name="train")
    def run(config: DictConfig) -> None:
        from recipes.train import main

        main(config)

    # `data` and `experiment` are in the defaults, empty: Hydra takes data=flowers, and people write +data=flowers.
    sys.argv[1:] = [each[each.startswith(("+data=", "+experiment=")) :] for each in sys.argv[1:]]
    try:
        run()
    except SystemExit as end:  # Hydra ends with 1 also where it cannot compose the config
        sys.exit(2 if end.code == 1 and "recipes.train" not in sys.modules else end.code)


if __name__ == "__main__":
    try:
        start()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(130)
