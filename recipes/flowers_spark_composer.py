"""Flowers that `flowers_spark.py` saved, learnt by MosaicML Composer on several of Spark's workers.

    python recipes/flowers_spark.py --out runs/flowers-shards
    python recipes/flowers_spark_composer.py runs/flowers-shards --processes 2

TorchDistributor runs `train` in every process; inside it is an ordinary Composer run. Its checkpoints hold the
position in the data: pass ``--checkpoints`` a folder that all machines share, and the same command goes on where it
was stopped, also with another number of processes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from lightning_stream.spark import carrying_env, local_session

NUM_CLASSES = 5
LATEST = "latest-rank0.pt"


def train(data: str, epochs: int, network: str, checkpoints: str | None) -> dict[str, Any]:
    """Train, and evaluate after every epoch. Runs in every process."""
    from composer import Trainer
    from composer.models import ComposerClassifier
    from torch import nn

    from lightning_stream import data_spec
    from lightning_stream.recipes.images import AugmentedImage, PlainImage
    from lightning_stream.recipes.weights import build_network

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = build_network(network, NUM_CLASSES, {})

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.network(images.float() / 128 - 1)

    class Classifier(ComposerClassifier):
        def forward(self, batch: Any) -> torch.Tensor:
            return self.module(batch["image"])

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(outputs, batch["label"].long())

        def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Any) -> None:
            metric.update(outputs, batch["label"].long())

    # not by autoresume: its processes, each alone on a node of its own, would delete one file twice in a shared folder
    latest = None if checkpoints is None else Path(checkpoints) / LATEST
    torch.manual_seed(1)
    model = Classifier(Scaled(), num_classes=NUM_CLASSES)
    trainer = Trainer(
        model=model,
        train_dataloader=data_spec(
            remote=f"{data}/train",
            shuffle=True,
            transform=AugmentedImage(64),
            global_batch_size=16,  # of one optimizer step, over all processes
        ),
        eval_dataloader=data_spec(remote=f"{data}/val", transform=PlainImage(64), batch_size=16, evaluation=True),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.001),
        max_duration=f"{epochs}ep",
        device="gpu" if torch.cuda.is_available() else "cpu",
        progress_bar=False,
        run_name="flowers",
        save_folder=checkpoints,
        save_latest_filename=LATEST.replace("0", "{rank}"),
        save_overwrite=True,
        load_path=str(latest) if latest is not None and latest.exists() else None,
        seed=1,
    )
    trainer.fit()
    clock = trainer.state.timestamp
    measured = trainer.state.eval_metrics["eval"]
    result = {
        "processes": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "steps": int(clock.batch),
        "samples": int(clock.sample),
        "measured": {name: float(metric.compute()) for name, metric in measured.items()},
    }
    trainer.close()
    return result


def main() -> None:
    """Ask Spark for processes, and train in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder, volume or URL with the sets train and val")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--network", default="mobilenet_v2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--checkpoints", help="folder for Composer's checkpoints, shared by all machines; none are written without it"
    )
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--on-driver", action="store_true", help="run all processes on the driver's machine")
    options = parser.parse_args()
    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    session = local_session(options.master, conf=quiet)
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(
        num_processes=options.processes, local_mode=options.on_driver, use_gpu=torch.cuda.is_available()
    )
    done = distributor.run(carrying_env(train), options.data, options.epochs, options.network, options.checkpoints)
    print(json.dumps(done))
    session.stop()


if __name__ == "__main__":
    main()
