"""What a conversion wrote, and the manifest that describes it beside the dataset's index."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_stream.errors import NotFoundError
from lightning_stream.stores import Store, open_store
from lightning_stream.writer.place import MANIFEST

_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class ConversionResult:
    """What was written.

    Attributes:
        uri: Folder or URL of the dataset, or of its splits.
        num_samples: By split; ``""`` is a dataset without splits.
        num_shards: By split.
        num_bytes: Bytes stored.
        columns: Encoding by column name.
        classes: Class names by column: label k is the k-th name.
        seconds: How long it took.
        is_new: False if the dataset existed already, from the same source and settings.
    """

    uri: str
    num_samples: dict[str, int]
    num_shards: dict[str, int]
    num_bytes: int
    columns: dict[str, str]
    classes: dict[str, list[str]]
    seconds: float = 0.0
    is_new: bool = False

    @classmethod
    def of(cls, uri: str, manifests: Mapping[str, Mapping[str, Any]]) -> ConversionResult:
        """Return the result that these manifests describe, by split."""
        first = next(iter(manifests.values()))
        return cls(
            uri,
            {split: manifest["num_samples"] for split, manifest in manifests.items()},
            {split: manifest["num_shards"] for split, manifest in manifests.items()},
            sum(manifest["num_bytes"] for manifest in manifests.values()),
            dict(first["columns"]),
            dict(first.get("classes", {})),
        )

    @property
    def total(self) -> int:
        """Samples of all splits."""
        return sum(self.num_samples.values())

    def __str__(self) -> str:
        splits = ", ".join(f"{count:,} {split or 'samples'}" for split, count in self.num_samples.items())
        size = f"{splits} in {sum(self.num_shards.values()):,} shards, {self.num_bytes / 1e6:,.1f} MB"
        if not self.is_new:
            why = "same source and settings; force=True writes it again"
            return f"Reusing the existing dataset at {self.uri} ({why}): {size}"
        speed = self.total / max(self.seconds, 1e-9)
        return f"{size}, at {self.uri}, in {self.seconds:,.1f} s ({speed:,.0f} samples/s)"


def read_manifest(uri: str | os.PathLike[str], **store_options: Any) -> ConversionResult:
    """Return what `convert` wrote at a place: columns, class names and counts.

    Example::

        classes = read_manifest("s3://bucket/photos").classes["label"]  # ["daisy", "rose"]

    Args:
        uri: Folder or URL of the dataset, or of the folder that holds its ``train`` and ``val``.
        **store_options: For its store.

    Raises:
        NotFoundError: There is no such dataset.
    """
    root = os.fspath(uri).rstrip("/")
    store = open_store(root, store_options or None)
    whole = manifest_of(store)
    splits = {"": whole} if whole else {split: manifest_of(store, f"{split}/{MANIFEST}") for split in _SPLITS}
    found = {split: manifest for split, manifest in splits.items() if manifest is not None}
    if not found:
        raise NotFoundError(f"convert writes {MANIFEST} beside a dataset; {store.url} has none. Check the path.")
    return ConversionResult.of(root, found)


def manifest_of(store: Store, name: str = MANIFEST) -> dict[str, Any] | None:
    """Return the manifest in a store; None if there is none."""
    try:
        found = json.loads(store.read(name))
    except (NotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def differences(held: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how settings and source differ from those that a manifest holds."""
    before, source, others = held["settings"], held["source"], now["source"]
    changed = [name for name, value in now["settings"].items() if before.get(name) != value]
    found = [f"{name} was {_shown(before.get(name))}, now {_shown(now['settings'][name])}" for name in changed]
    if source["stamps"] != others["stamps"]:
        files = [{file["name"]: file for file in each.get("files", ())} for each in (source, others)]
        changed = [name for name in {**files[0], **files[1]} if files[0].get(name) != files[1].get(name)]
        names = f"; changed: {', '.join(changed[:3])}{' ...' if len(changed) > 3 else ''}" if changed else ""
        found.append(
            f"the source had {source['num_files']:,} files of {source['num_bytes']:,} bytes, now "
            f"{others['num_files']:,} of {others['num_bytes']:,}{names}"
        )
    if source["reader"] != others["reader"]:
        found.append("the source is read with other options or another function")
    return "; ".join(found) or "it was written by another version of convert"


def _shown(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (str, list, dict)) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
