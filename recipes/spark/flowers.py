"""Photos of a Spark DataFrame to shards, and training from them on Spark's workers.

    python -m recipes.spark.flowers                                          # 100 drawn flowers, some for validation
    python -m recipes.spark.flowers --photos /data/flower_photos --out dbfs:/Volumes/main/ml/flowers
    python -m recipes.spark.flowers --data runs/shards --trainer composer    # these shards exist already

`TorchDistributor` trains in several processes, by Lightning, or by Composer, which resumes from its checkpoints in
--folder. The notebook `flowers.ipynb` shows the same step by step, with a model and a plain loop of its own.
"""

import argparse
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch

from lightning_stream.spark import lightning_trainer_kwargs, local_session, register, with_env
from recipes.data.synthetic import FLOWERS, write_flowers

CLASSES = tuple(FLOWERS)
COLUMNS = {"image": "jpeg", "label": "int32", "path": "str"}


def load(session: Any, folder: str) -> dict[str, Any]:
    """The DataFrames ``train`` and ``val`` of images, labels and paths; a hash of their names puts a tenth into val."""
    from pyspark.sql import functions as f

    register(session)
    files = session.read.format("binaryFile").option("pathGlobFilter", "*.jpg").option("recursiveFileLookup", "true")
    kind = f.element_at(f.split("path", "/"), -2)
    label = (f.array_position(f.array(*map(f.lit, CLASSES)), kind) - 1).cast("int")
    photos = files.load(folder).select(f.col("content").alias("image"), label.alias("label"), "path")
    name = f.array_join(f.slice(f.split("path", "/"), -2, 2), "/")
    is_val = f.pmod(f.xxhash64(name), f.lit(10)) == 0
    photos = photos.where("label >= 0")
    return {"train": photos.where(~is_val), "val": photos.where(is_val)}


def save(parts: dict[str, Any], out: str) -> None:
    """Write each DataFrame as an MDS dataset; the images' bytes stay as they are."""
    for split, rows in parts.items():
        rows = rows.repartition(2, "path").sortWithinPartitions("path")
        options = {"columns": json.dumps(COLUMNS), "if_exists": "error"}
        rows.write.format("mds").mode("append").options(**options).save(f"{out}/{split}")


def train(by: str, data: str, epochs: int, arch: str, folder: str) -> dict[str, Any]:
    """Train the classifier of the recipes in one of the processes that Spark started; each streams its share."""
    from lightning.pytorch import Trainer

    from recipes.data.images import ImageData
    from recipes.models.image_classifier import ImageClassifier

    model = ImageClassifier(arch=arch, num_classes=len(CLASSES))
    cache = f"{tempfile.gettempdir()}/flowers-{zlib.crc32(data.encode())}"
    images = ImageData(remote=data, local=cache, global_batch_size=16)
    accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    trainer: Any
    last = Path(folder) / "checkpoints" / "last.ckpt"
    if by == "composer":
        from recipes.composer_trainer import ComposerTrainer

        trainer = ComposerTrainer(default_root_dir=folder, max_epochs=epochs, accelerator=accelerator)
    else:
        quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        processes: Any = lightning_trainer_kwargs()
        trainer = Trainer(max_epochs=epochs, accelerator=accelerator, strategy="ddp", **quiet, **processes)
    trainer.fit(model, datamodule=images, ckpt_path=str(last) if by == "composer" and last.exists() else None)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    return {"processes": trainer.world_size, **metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", help="a folder of class folders; default: flowers that are drawn")
    parser.add_argument("--out", help="folder, volume or URL for the shards; default: a new temporary folder")
    parser.add_argument("--data", help="shards that exist already; nothing is converted")
    parser.add_argument("--count", type=int, default=100, help="flowers that are drawn")
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
        photos = options.photos or tempfile.mkdtemp(prefix="flowers-")
        if options.photos is None:
            write_flowers(Path(photos), options.count)
        save(load(session, photos), data)
        print(f"Shards: {data}")
    distributor = TorchDistributor(options.processes, local_mode=options.on_driver, use_gpu=torch.cuda.is_available())
    folder = str(Path(options.folder).absolute())
    carried: Any = with_env(train)
    print(json.dumps(distributor.run(carried, options.trainer, data, options.epochs, options.arch, folder)))
    session.stop()


if __name__ == "__main__":
    main()
