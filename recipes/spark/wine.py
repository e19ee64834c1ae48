"""A table read by Spark, straight into PyTorch, without shards: a small regression by a plain loop and by Lightning.

    python -m recipes.spark.wine winequality.csv --label quality

Spark reads the table and infers its types; `StreamToTorchDataset` makes a torch dataset of it, without ``.collect()``.
"""

import argparse
import json
from typing import Any

import torch
from torch import Tensor, nn
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


def stats(rows: Any, names: list[str]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of columns, computed by Spark."""
    from pyspark.sql import functions as f

    columns = [f.col(f"`{name}`") for name in names]
    found = rows.select(*map(f.avg, columns), *map(f.stddev_pop, columns)).first()
    return torch.tensor(found[: len(names)]), torch.tensor(found[len(names) :]).clamp(min=1e-8)


class Regression(nn.Module):
    """A small network over standardized features, added to the labels' mean."""

    def __init__(self, mean: Tensor, std: Tensor, label_mean: float) -> None:
        super().__init__()
        self.stats = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in (mean, std))
        self.layers = nn.Sequential(nn.Linear(len(mean), 64), nn.ReLU(), nn.Linear(64, 1))
        self.label_mean = label_mean

    def forward(self, features: Tensor) -> Tensor:
        mean, std = self.stats
        return self.layers((features - mean) / std)[:, 0] + self.label_mean


def by_loop(model: nn.Module, batches: Any, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for features, labels in (batch for _ in range(epochs) for batch in batches):
        optimizer.zero_grad()
        mse_loss(model(features), labels).backward()
        optimizer.step()


def by_lightning(model: nn.Module, batches: Any, epochs: int) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            return mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(max_epochs=epochs, accelerator="cpu", devices=1, **quiet).fit(Task(), batches)


TRAINERS = {"loop": by_loop, "lightning": by_lightning}


@torch.no_grad()
def mean_error(predict: Any, batches: Any) -> float:
    """Mean absolute error."""
    return float(torch.cat([(predict(features) - labels).abs() for features, labels in batches]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="a table of numbers with a header; any path or URL that Spark reads")
    parser.add_argument("--label", default="quality", help="the column to predict")
    parser.add_argument("--workers", type=int, default=0, help="processes that read; 0 reads between steps")
    options = parser.parse_args()
    session = local_session(conf={"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"})
    train_rows, val_rows = load(session, options.csv, options.label, 0.1)
    features = [name for name in train_rows.columns if name != options.label]
    train, val = (StreamToTorchDataset(rows, features, options.label) for rows in (train_rows, val_rows))
    label_mean = float(stats(train_rows, [options.label])[0])
    results: dict[str, float] = {"rows": len(train), "val rows": len(val)}
    results["error of the mean"] = mean_error(lambda _: label_mean, val.batches(256))
    # Workers are spawned, not forked: the driver talks to Spark in threads.
    context = "spawn" if options.workers else None
    batches = DataLoader(train, 64, shuffle=True, num_workers=options.workers, multiprocessing_context=context)
    for name, learn in TRAINERS.items():
        torch.manual_seed(1)
        model = Regression(*stats(train_rows, features), label_mean)
        learn(model, batches, 5)
        results[f"error after {name}"] = mean_error(model, val.batches(256))
    print(json.dumps({name: round(value, 4) for name, value in results.items()}))
    session.stop()


if __name__ == "__main__":
    main()
