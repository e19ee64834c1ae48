"""Flowers that `flowers_spark.py` saved, learnt by Lightning on several of Spark's workers.

    python recipes/flowers_spark.py --out runs/flowers-shards
    python recipes/flowers_spark_lightning.py runs/flowers-shards --processes 2

TorchDistributor runs `train` in every process; inside it is an ordinary Lightning run, whose devices are those that
Spark gave, and whose data module streams each process its share.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from lightning_stream.spark import carrying_env, local_session

NUM_CLASSES = 5


def train(data: str, epochs: int, network: str) -> dict[str, Any]:
    """Train, and validate after every epoch. Runs in every process."""
    from lightning.pytorch import LightningModule, Trainer
    from torch.nn.functional import cross_entropy

    from lightning_stream import StreamingDataModule
    from lightning_stream.recipes.images import AugmentedImage, PlainImage
    from lightning_stream.recipes.weights import build_network
    from lightning_stream.spark import trainer_devices

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = build_network(network, NUM_CLASSES, {})
            self.seen = 0
            self.counts = torch.zeros(2)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            self.seen += len(batch["label"])
            return cross_entropy(self.network(batch["image"].float() / 128 - 1), batch["label"].long())

        def on_validation_epoch_start(self) -> None:
            self.counts = torch.zeros(2)

        def validation_step(self, batch: Any, _: int) -> None:
            right = self.network(batch["image"].float() / 128 - 1).argmax(1) == batch["label"]
            self.counts += torch.tensor([int(right.sum()), len(right)])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.001)

    torch.manual_seed(1)
    module = Classifier()
    streamed = StreamingDataModule(
        {"remote": f"{data}/train", "shuffle": True, "transform": AugmentedImage(64)},
        {"remote": f"{data}/val", "transform": PlainImage(64)},
        global_batch_size=16,  # of one optimizer step, over all processes
        eval_batch_size=16,
    )
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **trainer_devices(),
    )
    trainer.fit(module, datamodule=streamed)
    right, total = trainer.strategy.reduce(module.counts.to(module.device), reduce_op="sum").tolist()
    return {
        "processes": trainer.world_size,
        "steps": trainer.global_step,
        "seen_by_first": module.seen,
        "right": right,
        "of": total,
    }


def main() -> None:
    """Ask Spark for processes, and train in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder, volume or URL with the sets train and val")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--network", default="mobilenet_v2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--on-driver", action="store_true", help="run all processes on the driver's machine")
    options = parser.parse_args()
    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    session = local_session(options.master, conf=quiet)
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(
        num_processes=options.processes, local_mode=options.on_driver, use_gpu=torch.cuda.is_available()
    )
    print(json.dumps(distributor.run(carrying_env(train), options.data, options.epochs, options.network)))
    session.stop()


if __name__ == "__main__":
    main()
