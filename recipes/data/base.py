"""What all data of the recipes share: a source is converted once, then its two datasets are streamed."""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from lightning_stream.convert import ConversionResult, convert, read_manifest
from lightning_stream.dataset import StreamingDataset
from lightning_stream.errors import NotFoundError
from lightning_stream.trainers.lightning.data_module import StreamingDataModule

SYNTHETIC = "synthetic"
PARTITION = 500  # inputs that `convert` writes together, where each is one sample
Transform = Callable[[dict[str, Any]], Any]


class RecipeData(StreamingDataModule):
    """Streams the datasets ``train`` and ``val``; `prepare_data` converts them from a source on one process per run.

    A subclass defines `convert_source`, and passes its own `settings` that the shards depend on, the `transforms` of
    the training and the validation samples, and other arguments of the `dataset`; see `recipes.data.table` for a short
    one. configs/shared/data.yaml describes the arguments. `remote` has a folder for each `source` and its settings;
    without a source it is itself a converted dataset with train/ and val/. `source` is a path, a URL, or a word that
    the subclass knows.
    """

    token_column = "input_ids"  # its elements are tokens, for trainers that count tokens

    def __init__(
        self, *, remote: str, local: str, source: str | None = None, name: str = "data",
        compression: str | None = "auto", hashes: list[str] | None = None, size_limit: int | str | None = "64mb",
        val_fraction: float | None = 0.1, conversion_workers: int | None = None, overwrite: bool = False,
        cache_limit: int | str | None = None, num_canonical_nodes: int | None = None, shuffle: bool = True,
        seed: int = 1, forget: Sequence[int] | None = None,
        num_workers: int | Literal["auto"] = 0, persistent_workers: bool = True,
        settings: Mapping[str, Any] | None = None, transforms: Sequence[Transform | None] = (None, None),
        dataset: Mapping[str, Any] | None = None, **loading: Any,
    ) -> None:  # fmt: skip
        is_word = source is None or (source.isidentifier() and not Path(source).exists())
        self.name, self.source = name, source if is_word else absolute(str(source))
        self.val_fraction, self.conversion_workers, self.overwrite = val_fraction, conversion_workers, overwrite
        self.writer: dict[str, Any] = {"compression": compression, "hashes": hashes, "size_limit": size_limit}
        depends_on = {"source": self.source, "val_fraction": val_fraction, **self.writer, **(settings or {})}
        digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:8]
        last = PurePosixPath((source or "").rstrip("/").partition("?")[0]).name
        folder = "" if source is None else "/" + re.sub(r"[^\w.-]+", "-", f"{last}-{digest}")
        self.uri, cache = absolute(remote).rstrip("/") + folder, absolute(local) + folder
        common = {"cache_limit": cache_limit, "num_canonical_nodes": num_canonical_nodes, "shuffle_seed": seed}
        common |= dataset or {}
        train, val = (
            {"remote": f"{self.uri}/{split}", "local": f"{cache}/{split}", "transform": transform, **common}
            for split, transform in zip(("train", "val"), transforms, strict=True)
        )
        workers = {"num_workers": num_workers, "persistent_workers": persistent_workers and num_workers != 0}
        sizes = {"global_batch_size": 64, "eval_batch_size": 64}
        order: dict[str, Any] = {"shuffle": shuffle, "forget": forget}
        super().__init__({**train, **order}, val, seed_steps=seed, **{**sizes, **workers, **loading})
        self.prepare_data_per_node = False
        self.is_new = False  # whether `prepare_data` wrote the dataset

    @property
    def train_dataset(self) -> StreamingDataset:
        return self.split("train")

    @property
    def val_dataset(self) -> StreamingDataset:
        return self.split("val")

    def split(self, name: str) -> StreamingDataset:
        found = self.datasets[name]
        assert found is not None
        return found

    def prepare_data(self) -> None:
        """Convert the source, unless the same was converted before. One process of a run calls this."""
        self.is_new = False
        if self.source is not None:
            self.convert_source()
        try:
            found = self.describe().rstrip(".")
        except NotFoundError as error:
            raise NotFoundError(f"{error} Or set data.source to the files that are to be converted.") from error
        print(f"{found}, {'written to' if self.is_new else 'reusing'} {self.uri}", flush=True)

    def convert_source(self) -> None:
        """Write ``train`` and ``val`` below `uri`, by calls of `convert`."""
        raise NotImplementedError

    def convert(self, source: Any, split: str | None = None, **settings: Any) -> None:
        """Convert a source, as this split or divided by `val_fraction`."""
        given: dict[str, Any] = {**self.writer, "num_workers": self.conversion_workers, "overwrite": self.overwrite}
        given |= {"val_fraction": None if split else self.val_fraction, "progress_bar": sys.stderr.isatty()}
        self.is_new |= convert(source, f"{self.uri}/{split}" if split else self.uri, **{**given, **settings}).is_new

    @cached_property
    def manifest(self) -> ConversionResult:
        """What the conversion wrote beside the shards: their columns, counts and classes."""
        return read_manifest(self.uri)

    def describe(self) -> str:
        """The first line of a run's summary."""
        return f"Dataset: {self.train_dataset.size:,} train / {self.val_dataset.size:,} val samples ({self.title})."

    @property
    def title(self) -> str:
        """What the samples are, in a few words."""
        return str(self.name) if self.source is None else f"{self.name} from {self.source}"


def absolute(uri: str) -> str:
    """A path made absolute, with ``~`` expanded; a URL stays unchanged."""
    return uri if "://" in uri or uri.startswith("dbfs:") else str(Path(uri).expanduser().absolute())
