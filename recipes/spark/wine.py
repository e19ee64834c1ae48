"""A table of wines, read by Spark, straight into PyTorch: a small regression, by a plain loop and by Lightning.

    python recipes/wine_spark.py winequality.csv                       # both trainers, on this machine's processor
    python recipes/wine_spark.py winequality.csv --trainer loop --device cuda --workers 2

1. Spark reads the table with its header and infers the types.  2. `StreamToTorchDataset` makes a dataset of it, with no
``.collect()``.  3. A plain loop, and Lightning, learn the label from all other columns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_stream.spark import StreamToTorchDataset, local_session

# 1. Load the table using Spark


def load(session: Any, path: str, label: str, held_out: float) -> tuple[Any, Any]:
    """Rows to learn from and rows held out, chosen by a hash of their values: the same on every run."""
    from pyspark.sql import functions as f

    table = session.read.csv(path, header=True, inferSchema=True)
    if label not in table.columns:
        raise SystemExit(f"{path} has no column {label!r}; it has {', '.join(table.columns)}. Choose one with --label.")
    table = table.dropna()
    share = f.pmod(f.xxhash64(*(f.col(f"`{name}`") for name in table.columns)), f.lit(1000))
    return table.where(share >= 1000 * held_out), table.where(share < 1000 * held_out)


# 2. A dataset of one's own


class Table(StreamToTorchDataset):
    """Rows as (features, label), made one by one: what a subclass may do that wants more than columns as they are."""

    def __init__(self, spark_df: Any, feature_cols: list[str], label_col: str) -> None:
        self.spark_df = spark_df
        self.feature_cols = feature_cols
        self.label_col = label_col

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.spark_df[index]
        features = torch.tensor([row[name] for name in self.feature_cols], dtype=torch.float32)
        return features, torch.tensor(row[self.label_col], dtype=torch.float32)


def moments(rows: Any, names: list[str]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each feature, computed by Spark."""
    from pyspark.sql import functions as f

    columns = [f.col(f"`{name}`") for name in names]
    found = rows.select(*map(f.avg, columns), *map(f.stddev_pop, columns)).first()
    assert found is not None
    return torch.tensor(found[: len(names)]), torch.tensor(found[len(names) :]).clamp(min=1e-8)


# 3. A model, a plain loop, and Lightning


class Regression(nn.Module):
    """A small network over standardised features."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor, centre: float) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
        self.layers = nn.Sequential(nn.Linear(len(mean), 64), nn.ReLU(), nn.Linear(64, 1))
        nn.init.constant_(self.layers[-1].bias, centre)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers((features - self.mean) / self.deviation)[:, 0]


def by_loop(model: nn.Module, train: Any, options: argparse.Namespace) -> None:
    """A plain loop over a DataLoader; a one-time pass over `train.batches` would begin before Spark is done."""
    model.to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(options.epochs):
        for features, labels in loader(train, options):
            loss = nn.functional.mse_loss(model(features.to(options.device)), labels.to(options.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def by_lightning(model: nn.Module, train: Any, options: argparse.Namespace) -> None:
    """The same by Lightning, which places batches itself."""
    from lightning.pytorch import LightningModule, Trainer

    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            features, labels = batch
            return nn.functional.mse_loss(self.model(features), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    trainer = Trainer(
        max_epochs=options.epochs,
        accelerator="gpu" if options.device.startswith("cuda") else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Task(), loader(train, options))


def loader(rows: Any, options: argparse.Namespace) -> DataLoader:
    """Mixed batches. Workers are started anew rather than forked: the driver talks to Spark in threads."""
    context = "spawn" if options.workers else None
    return DataLoader(rows, batch_size=64, shuffle=True, num_workers=options.workers, multiprocessing_context=context)


@torch.no_grad()
def mean_error(model: nn.Module, batches: Iterator[Any]) -> float:
    """Mean absolute error; batches are on the model's device."""
    errors = torch.cat([(model(features) - labels).abs() for features, labels in batches])
    return float(errors.mean())


def main() -> None:
    """All three steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="a table of numbers with a header; any path or URL that Spark reads")
    parser.add_argument("--label", default="quality", help="the column to learn")
    parser.add_argument("--trainer", choices=("loop", "lightning", "both"), default="both")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of rows that is never learnt from")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="processes that read; 0 reads between steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--own-class", action="store_true", help="read rows by the class written above, one by one")
    options = parser.parse_args()
    session = local_session(conf={"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"})
    train_rows, held_rows = load(session, options.csv, options.label, options.held_out)
    features = [name for name in train_rows.columns if name != options.label]
    train = (Table if options.own_class else StreamToTorchDataset)(train_rows, features, options.label)
    held = StreamToTorchDataset(held_rows, features, options.label, device=options.device)
    mean, deviation = moments(train_rows, features)
    centre = float(moments(train_rows, [options.label])[0])
    results: dict[str, float] = {"rows": len(train), "held out": len(held)}
    trainers = {"loop": by_loop, "lightning": by_lightning}
    for name in trainers if options.trainer == "both" else [options.trainer]:
        torch.manual_seed(1)
        model = Regression(mean, deviation, centre)
        results["error of the mean"] = mean_error(Constant(centre), held.batches(256))
        began = time.perf_counter()
        trainers[name](model, train, options)
        print(f"{name}: {options.epochs} epochs in {time.perf_counter() - began:.1f} s", file=sys.stderr)
        results[f"error after {name}"] = mean_error(model.to(options.device), held.batches(256))
    print(json.dumps({name: round(value, 4) for name, value in results.items()}))
    session.stop()


class Constant(nn.Module):
    """Says the same of every row."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, features: Tensor) -> Tensor:
        return torch.full((len(features),), self.value, device=features.device)


if __name__ == "__main__":
    main()
