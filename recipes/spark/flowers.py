"""Photos of a Spark DataFrame to shards, and training from them on Spark's workers.

    python -m recipes.spark.flowers                                          # 90 synthetic flowers, 10 for validation
    python -m recipes.spark.flowers --photos /data/flower_photos --train all --out dbfs:/Volumes/main/ml/flowers
    python -m recipes.spark.flowers --data runs/shards --trainer composer    # these shards exist already

`TorchDistributor` trains in several processes, by Lightning, or by Composer, which resumes from its checkpoints in
--folder. The notebook `flowers.ipynb` shows the same step by step, with a model and a plain loop of its own.
"""

import argparse
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from lightning_stream.spark import lightning_trainer_kwargs, local_session, register, with_env

CLASSES = ("daisy", "dandelion", "roses", "sunflowers", "tulips")
COLUMNS = {"image": "jpeg", "label": "int32", "path": "str"}
GLOBAL_BATCH = 16  # samples of one optimizer step over all processes


def load(session: Any, folder: str, num_train: int | None, num_val: int) -> dict[str, Any]:
    """The DataFrames ``train`` and ``val`` of images, labels and paths, divided by a hash of the files' names."""
    from pyspark.sql import functions as f

    register(session)
    files = session.read.format("binaryFile").option("pathGlobFilter", "*.jpg").option("recursiveFileLookup", "true")
    numbers = f.create_map(*(f.lit(one) for pair in enumerate(CLASSES) for one in reversed(pair)))
    label = numbers[f.element_at(f.split("path", "/"), -2)]
    photos = (
        files.load(folder).select(f.col("content").alias("image"), label.alias("label"), "path").where("label >= 0")
    )
    name = f.array_join(f.slice(f.split("path", "/"), -2, 2), "/")
    mixed = photos.select("path").orderBy(f.xxhash64(name), "path")
    chosen = (mixed if num_train is None else mixed.limit(num_val + num_train)).collect()
    if len(chosen) <= num_val:
        raise SystemExit(f"{folder} has {len(chosen)} photos of {', '.join(CLASSES)}; --val {num_val} takes them all.")
    parts = {"train": chosen[num_val:], "val": chosen[:num_val]}
    paths = {split: f.broadcast(session.createDataFrame(rows, "path string")) for split, rows in parts.items()}
    return {split: photos.join(paths[split], "path").select("image", "label", "path") for split in parts}


def save(parts: dict[str, Any], out: str) -> None:
    """Write each DataFrame as an MDS dataset; the images' bytes stay as they are."""
    for split, rows in parts.items():
        rows = rows.repartition(2, "path").sortWithinPartitions("path")
        options = {"columns": json.dumps(COLUMNS), "if_exists": "error"}
        rows.write.format("mds").mode("append").options(**options).save(f"{out}/{split}")


def train(trainer: str, data: str, epochs: int, arch: str, folder: str) -> dict[str, Any]:
    """Train the classifier of the recipes in one of the processes that Spark started; each streams its share."""
    from lightning.pytorch import Trainer

    from recipes.data.images import ImageData
    from recipes.models.image_classifier import ImageClassifier

    model = ImageClassifier(arch=arch, num_classes=len(CLASSES))
    cache = Path(tempfile.gettempdir()) / "flowers-cache" / re.sub(r"\W+", "-", data)
    images = ImageData(remote=data, local=str(cache), global_batch_size=GLOBAL_BATCH)
    accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    if trainer == "lightning":
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "num_sanity_val_steps"), 0)
        given: dict[str, Any] = {"accelerator": accelerator, "strategy": "ddp", **quiet, **lightning_trainer_kwargs()}
        run = Trainer(max_epochs=epochs, **given)
        run.fit(model, datamodule=images)
        figures = {"steps": run.global_step}
    else:
        from recipes.trainers.composer import ComposerTrainer

        latest = Path(folder) / "composer" / "latest-rank0.pt"
        composer = ComposerTrainer(folder=folder, max_epochs=epochs, accelerator=accelerator)
        done = composer.fit(model, images, str(latest) if latest.exists() else None)
        figures = {"steps": done.num_steps, "samples": done.num_samples}
    return {"processes": int(os.environ["WORLD_SIZE"]), **figures, **model.history[epochs - 1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", default="synthetic", help="a folder of class folders; default: synthetic flowers")
    parser.add_argument("--out", help="folder, volume or URL for the shards; default: a new temporary folder")
    parser.add_argument("--data", help="shards that exist already; nothing is converted")
    parser.add_argument("--train", default="90", help="photos to train on, or 'all'")
    parser.add_argument("--val", type=int, default=10, help="photos in the validation split")
    parser.add_argument("--trainer", choices=["lightning", "composer"], default="lightning")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--arch", default="mobilenet_v2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", default="runs/spark", help="of Composer's checkpoints, shared by all machines")
    parser.add_argument("--on-driver", action="store_true", help="run the processes on the driver's machine")
    options = parser.parse_args()
    session = local_session(conf={"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"})
    from pyspark.ml.torch.distributor import TorchDistributor

    data = options.data or options.out or tempfile.mkdtemp(prefix="flowers-shards-")
    if options.data is None:
        num_train, photos = None if options.train == "all" else int(options.train), options.photos
        if photos == "synthetic":
            from recipes.data.synthetic import write_flowers

            photos = tempfile.mkdtemp(prefix="flowers-")
            write_flowers(Path(photos), (num_train or 1000) + options.val)
        save(load(session, photos, num_train, options.val), data)
        print(f"Shards: {data}")
    distributor = TorchDistributor(options.processes, local_mode=options.on_driver, use_gpu=torch.cuda.is_available())
    carried: Any = with_env(train)
    arguments = (options.trainer, data, options.epochs, options.arch, str(Path(options.folder).absolute()))
    print(json.dumps(distributor.run(carried, *arguments)))
    session.stop()


if __name__ == "__main__":
    main()
