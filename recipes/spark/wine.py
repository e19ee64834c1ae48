"""A table read by Spark, straight into PyTorch, without shards: a small regression by a plain loop.

    python -m recipes.spark.wine winequality.csv --label quality

Spark reads the table and infers its types; `StreamToTorchDataset` makes a torch dataset of it, without ``.collect()``.
"""

import argparse
import json
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from lightning_stream.spark import StreamToTorchDataset, local_session


def load(session: Any, path: str, label: str, val_fraction: float) -> tuple[Any, Any]:
    """The rows to train on, and those to validate on, chosen by a hash of their values."""
    from pyspark.sql import functions as f

    table = session.read.csv(path, header=True, inferSchema=True)
    if label not in table.columns:
        raise SystemExit(f"{path} has no column {label!r}; it has {', '.join(table.columns)}. Choose one with --label.")
    table = table.dropna()
    share = f.pmod(f.xxhash64(*(f.col(f"`{name}`") for name in table.columns)), f.lit(1000))
    return table.where(share >= 1000 * val_fraction), table.where(share < 1000 * val_fraction)


def regression(num_features: int) -> nn.Module:
    """A small network over features that it standardizes itself."""
    hidden = nn.Linear(num_features, 64)
    return nn.Sequential(nn.BatchNorm1d(num_features), hidden, nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))


def learn(model: nn.Module, batches: Any, epochs: int) -> None:
    """A plain training loop."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for features, labels in batches:
            optimizer.zero_grad()
            mse_loss(model(features), labels).backward()
            optimizer.step()


@torch.no_grad()
def mean_error(model: nn.Module, batches: Any) -> float:
    """Mean absolute error."""
    model.eval()
    return round(float(torch.cat([(model(features) - labels).abs() for features, labels in batches]).mean()), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="a table of numbers with a header; any path or URL that Spark reads")
    parser.add_argument("--label", default="quality", help="the column to predict")
    options = parser.parse_args()
    session = local_session(conf={"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"})
    train_rows, val_rows = load(session, options.csv, options.label, 0.1)
    features = [name for name in train_rows.columns if name != options.label]
    train, val = (StreamToTorchDataset(rows, features, options.label) for rows in (train_rows, val_rows))
    torch.manual_seed(1)
    model = regression(len(features))
    learn(model, DataLoader(train, 64, shuffle=True, drop_last=True), epochs=5)
    error = mean_error(model, val.batches(256))
    print(json.dumps({"rows": len(train), "val rows": len(val), "mean error": error}))
    session.stop()


if __name__ == "__main__":
    main()
