"""Photos of a Spark DataFrame to shards, and training from them on Spark's workers.

    python -m recipes.spark.flowers                                          # 90 synthetic flowers, 10 for validation
    python -m recipes.spark.flowers --photos /data/flower_photos --train all --out dbfs:/Volumes/main/ml/flowers
    python -m recipes.spark.flowers --data runs/shards --trainer composer    # these shards exist already

1. Spark reads the images by its binary file source.  2. `dataframe_to_mds` writes shards to a folder, volume or URL.
3. `TorchDistributor` trains in several processes, by Lightning or Composer; each process streams its share. The
notebook `flowers.ipynb` shows the same step by step, by a plain loop.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from lightning_stream.spark import carrying_env, dataframe_to_mds, local_session, trainer_devices

CLASSES = ("daisy", "dandelion", "roses", "sunflowers", "tulips")
COLUMNS = {"image": "jpeg", "label": "int32", "path": "str"}
GLOBAL_BATCH = 16  # samples of one optimizer step over all processes


def load(session: Any, folder: str, num_train: int | None, num_val: int) -> dict[str, Any]:
    """The DataFrames ``train`` and ``val`` of images, labels and paths, divided by a hash of the files' names."""
    from pyspark.sql import functions as f

    files = session.read.format("binaryFile").option("pathGlobFilter", "*.jpg").option("recursiveFileLookup", "true")
    numbers = f.create_map(*(f.lit(one) for pair in enumerate(CLASSES) for one in reversed(pair)))
    label = numbers[f.element_at(f.split("path", "/"), -2)]
    listed = files.load(folder).select("path", label.alias("label")).where("label >= 0")
    name = f.array_join(f.slice(f.split("path", "/"), -2, 2), "/")
    mixed = listed.orderBy(f.xxhash64(name), "path")
    chosen = (mixed if num_train is None else mixed.limit(num_val + num_train)).collect()
    if len(chosen) <= num_val:
        raise SystemExit(f"{folder} has {len(chosen)} photos of {', '.join(CLASSES)}; --val {num_val} takes them all.")
    parts = {}
    for split, rows in (("train", chosen[num_val:]), ("val", chosen[:num_val])):
        paths = [re.sub(r"([\\{}\[\]*?])", r"\\\1", row["path"]) for row in rows]  # Spark reads these as patterns
        contents = session.read.format("binaryFile").load(paths).select("path", f.col("content").alias("image"))
        labels = f.broadcast(session.createDataFrame(rows, "path string, label int"))
        parts[split] = contents.join(labels, "path").select("image", "label", "path")
    return parts


def save(parts: dict[str, Any], out: str) -> None:
    """Write each DataFrame as an MDS dataset; the images' bytes stay as they are."""
    for split, rows in parts.items():
        rows = rows.repartition(2, "path").sortWithinPartitions("path")
        dataframe_to_mds(rows, mds_kwargs={"out": f"{out}/{split}", "columns": COLUMNS, "hashes": ["xxh3_64"]})


def stream(data: str, split: str) -> dict[str, Any]:
    """The arguments of a `StreamingDataset` of float[3, 64, 64] images in [0, 1]; those to train on are augmented."""
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(64, scale=(0.4, 1.0)) if split == "train" else v2.Resize((64, 64))
    to_float = v2.ToDtype(torch.float32, scale=True)
    pixels = v2.Compose([v2.PILToTensor(), crop, *([v2.RandomHorizontalFlip()] if split == "train" else []), to_float])

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {"image": pixels(sample["image"].convert("RGB")), "label": int(sample["label"])}

    return {"remote": f"{data}/{split}", "shuffle": split == "train", "transform": transform}


def network(arch: str) -> torch.nn.Module:
    from torchvision.models import get_model

    torch.manual_seed(1)
    model: torch.nn.Module = get_model(arch, weights=None, num_classes=len(CLASSES))
    return model


def train_lightning(data: str, epochs: int, arch: str, _checkpoints: str | None = None) -> dict[str, Any]:
    """An ordinary Lightning run on the devices that Spark gave."""
    from lightning.pytorch import LightningModule, Trainer

    from lightning_stream import StreamingDataModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network(arch)
            self.counts = torch.zeros(2)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return cross_entropy(self.network(batch["image"]), batch["label"])

        def on_validation_epoch_start(self) -> None:
            self.counts = torch.zeros(2, device=self.device)

        def validation_step(self, batch: Any, _: int) -> None:
            correct = self.network(batch["image"]).argmax(1) == batch["label"]
            self.counts += torch.tensor([int(correct.sum()), len(correct)], device=self.device)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.001)

    trainer = Trainer(
        max_epochs=epochs, accelerator="auto" if torch.cuda.is_available() else "cpu", strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        **trainer_devices(),
    )  # fmt: skip
    module = Classifier()
    splits = (stream(data, "train"), stream(data, "val"))
    trainer.fit(module, datamodule=StreamingDataModule(*splits, global_batch_size=GLOBAL_BATCH, eval_batch_size=16))
    correct, total = trainer.strategy.reduce(module.counts, reduce_op="sum").tolist()
    return {"processes": trainer.world_size, "steps": trainer.global_step, "correct": int(correct), "of": int(total)}


def train_composer(data: str, epochs: int, arch: str, checkpoints: str | None) -> dict[str, Any]:
    """An ordinary Composer run, which resumes from the latest checkpoint in the folder if there is one."""
    from composer import Trainer
    from composer.models import ComposerClassifier

    from lightning_stream import data_spec

    class Classifier(ComposerClassifier):
        def forward(self, batch: Any) -> torch.Tensor:
            return self.module(batch["image"])

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return cross_entropy(outputs, batch["label"])

        def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Any) -> None:
            metric.update(outputs, batch["label"])

    # Not by autoresume: each process is a node of its own to Composer, and they would delete one file twice.
    latest = None if checkpoints is None else Path(checkpoints) / "latest-rank0.pt"
    model = Classifier(network(arch), num_classes=len(CLASSES))
    trainer = Trainer(
        model=model, train_dataloader=data_spec(**stream(data, "train"), global_batch_size=GLOBAL_BATCH),
        eval_dataloader=data_spec(**stream(data, "val"), batch_size=16, evaluation=True),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.001), max_duration=f"{epochs}ep", progress_bar=False,
        device="gpu" if torch.cuda.is_available() else "cpu", run_name="flowers", save_folder=checkpoints, seed=1,
        save_latest_filename="latest-rank{rank}.pt", save_overwrite=True,
        load_path=str(latest) if latest is not None and latest.exists() else None,
    )  # fmt: skip
    trainer.fit()
    clock, metrics = trainer.state.timestamp, trainer.state.eval_metrics["eval"]
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    done = {"processes": world, "steps": int(clock.batch), "samples": int(clock.sample)}
    done |= {name: float(metric.compute()) for name, metric in metrics.items()}
    trainer.close()
    return done


TRAINERS = {"lightning": train_lightning, "composer": train_composer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", default="synthetic", help="a folder of class folders; default: synthetic flowers")
    parser.add_argument("--out", help="folder, volume or URL for the shards; default: a new temporary folder")
    parser.add_argument("--data", help="shards that exist already; nothing is converted")
    parser.add_argument("--train", default="90", help="photos to train on, or 'all'")
    parser.add_argument("--val", type=int, default=10, help="photos in the validation split")
    parser.add_argument("--trainer", choices=[*TRAINERS], default="lightning")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--arch", default="mobilenet_v2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--checkpoints", help="Composer: folder of the checkpoints, shared by all machines")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--on-driver", action="store_true", help="run the processes on the driver's machine")
    options = parser.parse_args()
    session = local_session(options.master, conf={"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"})
    from pyspark.ml.torch.distributor import TorchDistributor

    data = options.data
    if data is None:
        num_train = None if options.train == "all" else int(options.train)
        data, photos = options.out or tempfile.mkdtemp(prefix="flowers-shards-"), options.photos
        if photos == "synthetic":
            from recipes.data.synthetic import write_flowers

            photos = tempfile.mkdtemp(prefix="flowers-")
            write_flowers(Path(photos), (num_train or 1000) + options.val)
        save(load(session, photos, num_train, options.val), data)
        print(f"Shards: {data}")
    distributor = TorchDistributor(options.processes, local_mode=options.on_driver, use_gpu=torch.cuda.is_available())
    train = carrying_env(TRAINERS[options.trainer])
    print(json.dumps(distributor.run(train, data, options.epochs, options.arch, options.checkpoints)))
    session.stop()


if __name__ == "__main__":
    main()
