"""`ConvertedData`: a source is converted to shards once, then its two datasets are streamed."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_stream.convert import convert
from lightning_stream.errors import NotFoundError, has_terminal
from lightning_stream.stores import open_store
from lightning_stream.trainers.lightning.data_module import StreamingDataModule

SYNTHETIC = "synthetic"
INPUTS_AT_A_TIME = 500  # where each input is one sample, `convert` writes so many together
Transform = Callable[[dict[str, Any]], Any]


class ConvertedData(StreamingDataModule):
    """A `StreamingDataModule` of the datasets ``train`` and ``val`` below `uri`; the latter is the test data, too.

    A subclass defines `convert_source`; see `recipes.data.table` for a short one. ``configs/converted_data.yaml``
    describes the arguments.

    Args:
        name: Of the data, in what is printed.
        source: What is converted: a path, a URL, or a word that the subclass knows. None: `remote` is itself a
            converted dataset with ``train/`` and ``val/``.
        remote, local: Folder or URL of the shards, and their cache. Each source, with the settings that its shards
            depend on, has a folder of its own below them.
        settings: What else the shards depend on.
        transforms: Of the training and of the evaluation samples.
        dataset, train, val: More arguments of both datasets, and of one of them, which come before those of both.
        loading: Arguments of `StreamingDataModule`.
    """

    def __init__(
        self, *, remote: str, local: str, name: str = "data", source: str | None = None,
        compression: str | None = "auto", hashes: list[str] | None = None, size_limit: int | str | None = "16mb",
        val_fraction: float = 0.1, conversion_workers: int | None = None, overwrite: bool = False,
        settings: Mapping[str, Any] | None = None, transforms: Sequence[Transform | None] = (None, None),
        dataset: Mapping[str, Any] | None = None, cache_limit: int | str | None = None,
        num_canonical_nodes: int | None = None, shuffle: bool = True, seed: int = 1,
        forget: Sequence[int] | None = None, train: Mapping[str, Any] | None = None,
        val: Mapping[str, Any] | None = None, **loading: Any,
    ) -> None:  # fmt: skip
        self.name = name
        self.source = absolute(source) if source and Path(source).expanduser().exists() else source
        self.writer: dict[str, Any] = {"compression": compression, "hashes": hashes, "size_limit": size_limit}
        self.val_fraction = val_fraction
        self.running = {"num_workers": conversion_workers, "overwrite": overwrite}
        folder = ""
        if self.source is not None:
            depends_on = {"source": self.source, "val_fraction": val_fraction, **self.writer, **(settings or {})}
            digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:8]
            folder = re.sub(r"[^\w.-]+", "-", Path(self.source).name)
            folder = f"/{folder}-{digest}"
        self.uri = absolute(remote).rstrip("/") + folder
        self.cache = absolute(local) + folder
        common = {"cache_limit": cache_limit, "num_canonical_nodes": num_canonical_nodes, "shuffle_seed": seed}
        common |= dataset or {}
        order = {"shuffle": shuffle, "forget": forget}
        train = {**self.place("train"), **order, "transform": transforms[0], **common, **(train or {})}
        val = {**self.place("val"), "transform": transforms[1], **common, **(val or {})}
        super().__init__(**{"train": train, "val": val, "test": val, "seed_steps": seed, **loading})
        self.prepare_data_per_node = False

    def place(self, split: str) -> dict[str, Any]:
        """Where a split's shards and their cache are."""
        return {"remote": f"{self.uri}/{split}", "local": f"{self.cache}/{split}"}

    def prepare_data(self) -> None:
        """Convert the source, unless that was done before. One process of a run calls this."""
        if self.source is not None:
            self.convert_source()
        try:
            sizes = {name: dataset.size for name, dataset in self.datasets.items() if dataset}
        except NotFoundError as error:
            if self.source is not None:
                raise
            raise NotFoundError(f"Without data.source=, which is converted, data.remote has shards. {error}") from None
        print(f"{self.name}: {sizes['train']:,} train / {sizes['val']:,} val samples in {self.uri}", flush=True)

    def convert_source(self) -> None:
        """Write ``train`` and ``val`` below `uri`, by calls of `convert`."""
        raise NotImplementedError

    def convert(self, source: Any, split: str | None = None, **settings: Any) -> None:
        """Convert a source, as this split or divided by `val_fraction`."""
        out = f"{self.uri}/{split}" if split else self.uri
        options: dict[str, Any] = {**self.writer, **self.running, "progress_bar": has_terminal()}
        options["val_fraction"] = None if split else self.val_fraction
        convert(source, out, **{**options, **settings})


def absolute(uri: str) -> str:
    """A path made absolute, with ``~`` expanded; a URL stays unchanged."""
    return uri if "://" in uri or uri.startswith("dbfs:") else str(Path(uri).expanduser().absolute())


def fetch(url: str, folder: Path) -> Path:
    """A file of any store as a local one in this folder, downloaded unless it is there."""
    place, _, name = url.rpartition("/")
    path = folder / hashlib.sha256(place.encode()).hexdigest()[:8] / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        open_store(place).get(name, path)
    return path
