"""A table as streamed training data: a column to foretell, and the columns of numbers to foretell it from."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.convert import ConversionResult, Inputs, convert
from lightning_stream.dataset import StreamingDataset
from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.recipes.converted_set import TRAIN, VAL, split_datasets
from lightning_stream.recipes.task import TaskData

GENERATED = "generated"
_PIECE_ROWS = 500


def generated_rows(piece: tuple[int, int]) -> Iterator[dict[str, float]]:
    """Some rows of a made-up table: `y` follows from `a` to `d` up to some noise; `e` tells nothing.

    Args:
        piece: Seed, and number of the piece.
    """
    rng = np.random.default_rng(piece)
    for a, b, c, d, e, noise in rng.normal(size=(_PIECE_ROWS, 6)):
        y = 2 * np.sin(a) + b * c - 0.5 * d**2 + 0.1 * noise
        yield {"a": float(a), "b": float(b), "c": float(c), "d": float(d), "e": float(e), "y": float(y)}


@dataclass(frozen=True)
class Table:
    """A table on its way into shards.

    Attributes:
        source: What `convert` reads: a CSV, Parquet or JSON lines file, a folder or pattern of such; or
            ``"generated"``.
        place: Folder or URL of its shards.
        settings: More arguments of `convert`.
        generated: Seed and number of rows of a generated table.
    """

    source: str
    place: str
    settings: Mapping[str, Any]
    generated: tuple[int, int] = (1, 2000)

    @classmethod
    def plan(cls, source: str, remote: str, settings: Mapping[str, Any], generated: tuple[int, int]) -> Table:
        """The table in a place of its own under `remote`, which changes with the file and the settings."""
        path = Path(source).expanduser()
        seen: list[Any] = [source, settings]
        if source == GENERATED:
            seen.append(generated)
        elif path.exists():
            source = str(path.absolute())
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            seen += [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
        digest = hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]
        return cls(source, f"{remote.rstrip('/')}/{digest}", settings, generated)

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"{self.generated[1]} rows made up by this package" if self.source == GENERATED else self.source

    def run(self) -> ConversionResult:
        """Convert, unless it was done."""
        source: Any = self.source
        if source == GENERATED:
            seed, rows = self.generated
            source = Inputs([(seed, piece) for piece in range(-(-rows // _PIECE_ROWS))], generated_rows)
        return convert(source, self.place, overwrite=True, **self.settings)


class TableData(TaskData):
    """Rows of a table, as batches of ``{column: number[n]}``.

    Args:
        table: Makes the shards that `train` and `val` read.
        label: The column to foretell.
        features: The columns to foretell it from; None for all others that hold numbers.
        datasets: Arguments of the ``train`` and ``val`` datasets.
        **settings: As in `TaskData`.
    """

    def __init__(
        self,
        table: Table,
        label: str,
        features: Sequence[str] | None,
        datasets: Mapping[str, Mapping[str, Any]],
        **settings: Any,
    ) -> None:
        super().__init__(datasets, self._convert, **settings)
        self.table = table
        self.label = label
        self._features = features

    @cached_property
    def converted(self) -> ConversionResult:
        """What was converted; asked once, since the table's file may change while a run goes on."""
        return self.table.run()

    @property
    def place(self) -> str:
        """Folder or URL of the shards."""
        return self.table.place

    @property
    def features(self) -> tuple[str, ...]:
        """The columns to foretell the label from; converts the table first where that was not done.

        Raises:
            ValueError: The table has no such columns, or they hold no numbers.
        """
        row = self._split(TRAIN)[0]
        numbers = [name for name, value in row.items() if isinstance(value, (int, float, np.number))]
        chosen = [name for name in numbers if name != self.label] if self._features is None else [*self._features]
        if missing := [name for name in (self.label, *chosen) if name not in numbers]:
            raise ValueError(
                f"label and features are columns of numbers; {', '.join(missing)} is none in {self.table.source}. Its "
                f"columns of numbers are {', '.join(numbers)}. Set data.label and data.features to some of these."
            )
        return tuple(chosen)

    def moments(self, most: int = 1 << 16) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation of each feature, then of the label: float64[features + 1] each, over rows spread evenly.

        Args:
            most: Rows that are looked at.
        """
        dataset = self._split(TRAIN)
        ids = np.unique(np.linspace(0, dataset.size - 1, min(most, dataset.size)).astype(np.int64))
        columns = dataset.read_batch(ids)
        values = np.stack([np.asarray(columns[name], np.float64) for name in (*self.features, self.label)])
        return values.mean(1), np.maximum(values.std(1), 1e-8)

    def _split(self, split: str) -> StreamingDataset:
        _ = self.converted  # reads a split only once it is there
        dataset = self.datasets[split]
        assert dataset is not None
        return dataset

    def notes(self, history: Mapping[int, Mapping[str, float]]) -> tuple[str, ...]:
        """How many rows it was, and how well the held-out ones are foretold."""
        done = self.converted
        rows = f"{done.num_samples[TRAIN]} rows, held out {done.num_samples[VAL]}"
        told = [f"Learnt {self.label!r} from {len(self.features)} columns of {rows}. It is {self.table.title}."]
        measured = [values for _, values in sorted(history.items()) if "val/explained" in values]
        if measured:
            told.append(f"Of what varies in the held-out rows, {measured[-1]['val/explained']:.1%} is explained.")
        return tuple(told)

    def _convert(self) -> None:
        print(f"{self.converted}.", file=sys.stderr)


def table_data(
    *,
    source: str = GENERATED,
    label: str = "y",
    features: Sequence[str] | None = None,
    generated_seed: int = 1,
    generated_count: int = 2000,
    held_out: float = 0.1,
    conversion_workers: int | None = None,
    remote: str = "runs/shards/table",
    local: str | None = "runs/cache/table",
    compression: str | None = "zstd",
    hashes: Sequence[str] | None = None,
    size_limit: int | str = "64kb",
    cache_limit: int | str | None = None,
    num_canonical_nodes: int | None = None,
    seed: int = 1,
    global_batch_size: int = 32,
    eval_batch_size: int = 256,
    num_workers: int = 0,
    persistent_workers: bool = True,
) -> TableData:
    """Streamed rows: converted into shards under `remote`, read back through the cache in `local`.

    Args:
        source: A CSV, Parquet or JSON lines file, a folder or pattern of such, or ``"generated"``.
        label: The column to foretell.
        features: The columns to foretell it from; None for all others that hold numbers.
        generated_seed, generated_count: Which made-up rows, and how many.
        held_out: Share of the rows that is never trained on.
        conversion_workers: Processes that convert; None for one per processor.
        remote: Folder or URL for the shards.
        local: Folder for the cache; None for the default one.
        compression, hashes, size_limit: Of the shards.
        cache_limit: Bytes that the cache may hold, e.g. ``"10gb"``.
        num_canonical_nodes: See `StreamingDataset`; None derives it from the global batch.
        seed: Of the order.
        global_batch_size: Rows of an optimizer step over all devices.
        eval_batch_size: Rows per device in validation.
        num_workers: Processes per device that read; 0 reads between steps, which columns of numbers hardly notice.
        persistent_workers: Whether they live on from epoch to epoch.
    """
    settings = {
        "val_fraction": held_out,
        "compression": compression,
        "hashes": list(hashes_to_write(hashes)),
        "size_limit": size_limit,
        "num_workers": conversion_workers,
        "shuffle": True,  # tables often lie sorted
    }
    table = Table.plan(source, remote, settings, (generated_seed, generated_count))
    datasets = split_datasets(
        table.place,
        local,
        seed=seed,
        cache_limit=cache_limit,
        num_canonical_nodes=num_canonical_nodes,
    )
    return TableData(
        table,
        label,
        features,
        datasets,
        global_batch_size=global_batch_size,
        eval_batch_size=eval_batch_size,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        seed=seed,
    )
