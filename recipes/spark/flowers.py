"""Flowers from Spark to one process and to several: the notebook's flow, on this machine or on a cluster.

    python recipes/flowers_spark.py                                     # drawn flowers, 90 to train on and 10 held out
    python recipes/flowers_spark.py --photos /data/flower_photos --train all --out dbfs:/Volumes/main/ml/flowers

1. Spark reads pictures by its binary file source.  2. `dataframe_to_mds` saves them to a folder, volume or URL.
3. `StreamingDataset` and `StreamingDataLoader` feed them.  4. One process trains.  5. TorchDistributor trains the same
function on several.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lightning_stream import StreamingDataLoader, StreamingDataset
from lightning_stream.spark import carrying_env, dataframe_to_mds, local_session

CLASSES = ("daisy", "dandelion", "roses", "sunflowers", "tulips")
COLUMNS = {"image": "jpeg", "label": "int32", "path": "str"}


# 1. Load data using Spark


def photo_folder(photos: str, needed: int) -> str:
    """A folder of class folders: the one given, or drawn flowers in a new one."""
    if photos != "drawn":
        return photos
    from lightning_stream.recipes.photos import DrawnFlowers

    folder = Path(tempfile.mkdtemp(prefix="drawn-flowers-"))
    with DrawnFlowers(count=needed).open() as drawn:
        for (label, name), read in drawn.items():
            (folder / label).mkdir(exist_ok=True)
            (folder / label / name).write_bytes(read())
    return str(folder)


def list_pictures(session: Any, folder: str) -> Any:
    """One row per picture: where it is, and its class as a number. Reads no picture."""
    from pyspark.sql import functions as f

    files = session.read.format("binaryFile").option("pathGlobFilter", "*.jpg").option("recursiveFileLookup", "true")
    numbers = f.create_map(*(f.lit(one) for pair in enumerate(CLASSES) for one in reversed(pair)))
    return files.load(folder).select("path", numbers[class_of("path")].alias("label")).where("label >= 0")


def class_of(path: str) -> Any:
    """The folder that a file lies in."""
    from pyspark.sql import functions as f

    return f.element_at(f.split(path, "/"), -2)


def load(session: Any, folder: str, num_train: int | None, num_val: int) -> dict[str, Any]:
    """Pictures to train on and to hold out, chosen by a hash of class and name: the same on every run.

    One row per picture: its bytes as they are, its class as a number, and where it came from.
    """
    from pyspark.sql import functions as f

    listed = list_pictures(session, folder)
    name = f.array_join(f.slice(f.split("path", "/"), -2, 2), "/")
    mixed = listed.orderBy(f.xxhash64(name), "path").select("path", "label")
    chosen = mixed.collect() if num_train is None else mixed.limit(num_val + num_train).collect()
    if len(chosen) <= num_val:
        raise SystemExit(
            f"{folder} holds {len(chosen)} pictures of {', '.join(CLASSES)}; --val {num_val} takes them all."
        )
    return {"train": _contents(session, chosen[num_val:]), "val": _contents(session, chosen[:num_val])}


def _contents(session: Any, chosen: list[Any]) -> Any:
    """The chosen pictures with their bytes: Spark reads these files and no others."""
    from pyspark.sql import functions as f

    paths = [re.sub(r"([\\{}\[\]*?])", r"\\\1", row["path"]) for row in chosen]
    files = session.read.format("binaryFile").load(paths)
    labels = f.broadcast(session.createDataFrame(chosen, "path string, label int"))
    return files.select("path", f.col("content").alias("image")).join(labels, "path").select("image", "label", "path")


# 2. Save data to a volume


def save(parts: dict[str, Any], out: str) -> None:
    """Each part as an MDS dataset, compressed and hashed."""
    for name, rows in parts.items():
        kwargs = {"out": f"{out}/{name}", "columns": COLUMNS, "compression": "zstd", "hashes": ["xxh3_64"]}
        dataframe_to_mds(rows.repartition(2, "path").sortWithinPartitions("path"), mds_kwargs=kwargs)


# 3. Data loading: two lines that matter


def loader(out: str, name: str, batch_size: int) -> StreamingDataLoader:
    """Batches of uint8 images and labels."""
    from lightning_stream.recipes.images import AugmentedImage, PlainImage

    transform = AugmentedImage(64) if name == "train" else PlainImage(64)
    dataset = StreamingDataset(remote=f"{out}/{name}", shuffle=name == "train", transform=transform)
    return StreamingDataLoader(dataset, batch_size=batch_size, evaluation=name == "val")


# 4. and 5. Training, in one process or in each of several


def train(out: str, epochs: int, network: str, batch_size: int = 16) -> dict[str, Any]:
    """Train, and count the held-out pictures that are told rightly. The same code for any number of processes."""
    from lightning_stream.recipes.weights import build_network

    torch.manual_seed(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    plain = build_network(network, len(CLASSES), {}).to(device)
    model = torch.nn.parallel.DistributedDataParallel(plain) if world > 1 else plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    batches = loader(out, "train", max(1, batch_size // world))
    seen = 0
    for _ in range(epochs):
        model.train()
        for batch in batches:
            logits = model(batch["image"].to(device).float() / 128 - 1)
            loss = torch.nn.functional.cross_entropy(logits, batch["label"].to(device).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(logits)
    counts = evaluate(plain, loader(out, "val", batch_size), device)
    if world > 1:
        counts = counts.to(device)
        torch.distributed.all_reduce(counts)
    right, total = counts.tolist()
    return {"processes": world, "seen_by_first": seen, "right": right, "of": total, "loss": loss.item()}


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: Any, device: Any) -> torch.Tensor:
    """Right and all, of this process's share."""
    model.eval()
    counts = torch.zeros(2)
    for batch in batches:
        said = model(batch["image"].to(device).float() / 128 - 1).argmax(1).cpu()
        counts += torch.tensor([(said == batch["label"]).sum(), len(said)])
    return counts


def main() -> None:
    """All five steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", default="drawn", help="a folder of class folders; by default flowers are drawn")
    parser.add_argument("--out", default=None, help="folder, volume or URL for the shards")
    parser.add_argument("--train", default="90", help="pictures to train on, or 'all'")
    parser.add_argument("--val", type=int, default=10, help="pictures held out")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--network", default="mobilenet_v2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--master", default="local[2]")
    options = parser.parse_args()
    session = local_session(options.master, conf={"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"})
    from pyspark.ml.torch.distributor import TorchDistributor

    out = options.out or tempfile.mkdtemp(prefix="flowers-shards-")
    num_train = None if options.train == "all" else int(options.train)
    began = time.perf_counter()
    folder = photo_folder(options.photos, (num_train or 1000) + options.val)
    save(load(session, folder, num_train, options.val), out)
    print(f"saved to {out} in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    results = {"one process": train(out, options.epochs, options.network)}
    distributor = TorchDistributor(num_processes=options.processes, local_mode=False, use_gpu=torch.cuda.is_available())
    results["several"] = distributor.run(carrying_env(train), out, options.epochs, options.network)
    print(json.dumps(results))
    session.stop()


if __name__ == "__main__":
    main()
