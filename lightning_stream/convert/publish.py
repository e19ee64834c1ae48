"""How a conversion begins and is published, by the protocol of all writers; and what its manifest holds."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_stream.convert.partition import RECEIPT, OutputSpec, Receipt, index_bytes
from lightning_stream.errors import FormatError, NotFoundError, StoreError
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.formats.model import to_text, with_keys, with_lengths
from lightning_stream.shared_files import FileLock, sweep_drafts
from lightning_stream.sources.in_place import changes_of
from lightning_stream.stores import LocalStore, Store, is_remote, open_store
from lightning_stream.version_log import read_index, without_versions
from lightning_stream.writer.place import CONTROL, OURS, PART, Transaction, digest_of
from lightning_stream.writer.place import MANIFEST as MANIFEST

_PARTS = re.compile(rf"{PART}|part-[0-9]{{5,}}/index\.json")
_ALL = re.compile(f"{OURS.pattern}|{_PARTS.pattern}")
_LOG = logging.getLogger(__name__)
SPLITS = ("train", "val", "test")
_WAIT_S = 24 * 3600.0


@dataclass(frozen=True)
class Publication:
    """A conversion that has begun, in the process that will publish it.

    Attributes:
        spec: What the processes that write partitions get.
        place: The folders or stores of the dataset, as they were at the beginning.
        done: The partitions whose receipts an earlier run left there.
    """

    spec: OutputSpec
    place: Transaction
    done: frozenset[int]

    @classmethod
    def begin(cls, spec: OutputSpec, overwrite: bool) -> Publication:
        """Look at what exists before anything is written, and note that this conversion has begun.

        Without `overwrite`, raise FileExistsError if there are files that are not the remains of this very conversion.
        """
        place = Transaction(spec.out, spec.keep_local, spec.store_options)
        place.begin("overwrite", (MANIFEST,))
        store = place.stores[0]
        names = place.look()
        controls = {name.split("/")[1] for name in names if name.startswith(f"{CONTROL}/")}
        strange = [name for name in names if not _PARTS.fullmatch(name)]
        manifest = manifest_of(store) if strange == [MANIFEST] else None
        if manifest is not None and manifest.get("fingerprint") == spec.fingerprint and controls:
            strange = []  # this very conversion was cut short before its index was put
        if not overwrite and (strange or (names and controls != {spec.fingerprint})):
            holds = strange[0] if strange else "shards of a conversion that differs from this one and did not finish"
            raise FileExistsError(
                f"{store.url} is not empty: it holds {holds}. Write to a new place, or pass overwrite=True (to "
                "dataframe_to_mds in mds_kwargs) to replace it."
            )
        # The note says whose shards there are without a receipt, if this run is cut short before any.
        store.put(note_of(spec.fingerprint), b"")
        prefix = f"{CONTROL}/{spec.fingerprint}/"
        receipt_names = sorted(name for name in names if name.startswith(prefix) and name.endswith(RECEIPT))
        receipts = [Receipt.from_bytes(store.read(name)) for name in receipt_names]
        complete = (
            receipt for receipt in receipts if all(names.get(file) == size for file, size in receipt.files().items())
        )
        done = frozenset(receipt.partition for receipt in complete)
        if done:
            _LOG.info("continuing an earlier run: %d partitions are written already", len(done))
        return cls(spec, place, done)

    def publish(
        self, receipts: Sequence[Receipt], merge_index: bool, notes: Mapping[str, Any], source_digest: str = ""
    ) -> None:
        """Check that all files are there, put the index, and remove what belongs to no committed attempt.

        The receipts are those of all partitions, in their order. `merge_index`: one index over all; else one in each
        partition's folder. The manifest holds `about` too. `source_digest`: see `Index`, "" for none.

        Raises:
            StoreError: A file that a receipt lists is not at the place as this process sees it.
            FileExistsError, ConflictError: Another writer changed the dataset meanwhile; it stays as that one left it.
        """
        place = self.place
        index = index_bytes(receipts)
        if source_digest:
            digest = Index.from_bytes(index, place.store.url).digest
            index = with_keys(index, {"converted_from": to_text({"digest": digest, "source": source_digest})})
        wanted = {name: size for receipt in receipts for name, size in receipt.files().items()}
        place.check_unchanged(INDEX_NAME)
        check_seen(place.store, place.look(), wanted)
        content = {
            "version": 1,
            "fingerprint": self.spec.fingerprint,
            "columns": dict(self.spec.columns),
            "num_samples": sum(receipt.num_samples for receipt in receipts),
            "num_bytes": sum(wanted.values()),
            "num_shards": sum(len(receipt.shards) for receipt in receipts),
            "index": digest_of(with_lengths(index, {})),
            "keeps_order": bool(source_digest),
            "partitions": {self.spec.folder_of(receipt.partition): receipt.num_samples for receipt in receipts},
            **notes,
        }
        manifest = json.dumps(content, indent=1, sort_keys=True).encode()
        place.swap(MANIFEST, manifest)  # of several conversions, one succeeds
        if merge_index:
            place.swap(INDEX_NAME, index)
        else:
            parts = [(self.spec.folder_of(receipt.partition), receipt) for receipt in receipts if receipt.shards]
            indexes = {f"{folder}/{INDEX_NAME}": index_bytes([receipt], folder) for folder, receipt in parts}
            for name, data in indexes.items():
                place.store.put(name, data)
            place.store.delete(INDEX_NAME)
            wanted |= dict.fromkeys(indexes, 0)
        for folder in place.folders:  # a killed worker may have left the draft of a receipt
            sweep_drafts(folder / CONTROL / self.spec.fingerprint)
        place.sweep(_ALL, wanted)


def cancel(place: Transaction, *, if_unwritten: bool = False) -> None:
    """Remove what was written and will not be published; or only the note of the beginning, if there is no more.

    A dataset that is there stays whole. Any other conversion may follow then.
    """
    stays = re.compile(".*(?<!/begun)" if if_unwritten else f"part-.*{INDEX_NAME}")
    names = filter(_PARTS.fullmatch, place.look())
    if not any(map(stays.fullmatch, names)):
        place.begin("overwrite")  # after the look: another conversion may have been published meanwhile
        place.sweep(_PARTS, place.former)


def finished(place: Transaction, fingerprint: str) -> dict[str, Any] | None:
    """Return the manifest of this conversion if its dataset is there, whole; else None."""
    manifest = manifest_of(place.stores[0]) or {}
    is_ours = manifest.get("fingerprint") == fingerprint
    return manifest if is_ours and all(_is_whole(store, manifest) for store in place.stores) else None


def _is_whole(store: Store, manifest: Mapping[str, Any]) -> bool:
    """Whether the store has the index that this manifest was written with."""
    try:
        index = without_versions(read_index(store).data)  # lengths may have been added since
    except (NotFoundError, FormatError):
        return False
    return digest_of(index) == manifest.get("index")


def sweep_rest(place: Transaction, fingerprint: str) -> bool:
    """Remove what this conversion left if it was cut short after its index had been put. Return whether it was."""
    was_cut = place.stores[0].exists(note_of(fingerprint))
    if was_cut:
        cancel(place)
    return was_cut


def note_of(fingerprint: str) -> str:
    """The name of the note that a conversion has begun."""
    return f"{CONTROL}/{fingerprint}/begun"


def check_seen(store: Store, seen: Mapping[str, int], wanted: Mapping[str, int]) -> None:
    """Raise StoreError unless all files that were written are there, as this process sees it: bytes by name."""
    missing = sorted(name for name, size in wanted.items() if seen.get(name) != size)
    if missing:
        raise StoreError(
            f"{store.url} must hold the {len(wanted)} files that were written there; from here, {len(missing)} of them "
            f"are not seen, the first {missing[0]}. Write to a place that all machines share: a URL, or a mounted "
            "folder such as a volume."
        )


def alone(uri: str) -> AbstractContextManager[Any]:
    """Lock a local folder of a dataset: another process of this machine waits, and then finds the dataset."""
    return nullcontext() if is_remote(uri) else folder_lock(LocalStore.from_url(uri, {}).folder)


def folder_lock(folder: Path) -> FileLock:
    """The lock beside a folder, which is for as long as a conversion may take."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.with_name(f".{folder.name}.lock"), _WAIT_S)


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
        keeps_order: Whether it has the order of the source where that is read in place, so that a training run that
            read the source continues on it.
        num_left_out: Files of the source that were not read, since their names begin with ``_`` or ``.``.
    """

    uri: str
    num_samples: dict[str, int]
    num_shards: dict[str, int]
    num_bytes: int
    columns: dict[str, str]
    classes: dict[str, list[str]]
    seconds: float = 0.0
    is_new: bool = False
    keeps_order: bool = False
    num_left_out: int = 0

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
            keeps_order=all(manifest.get("keeps_order") for manifest in manifests.values()),
        )

    @property
    def total(self) -> int:
        """Samples of all splits."""
        return sum(self.num_samples.values())

    def __str__(self) -> str:
        splits = ", ".join(f"{count:,} {split or 'samples'}" for split, count in self.num_samples.items())
        num_shards = sum(self.num_shards.values())
        size = f"{splits} in {num_shards:,} shard{'s' * (num_shards != 1)}, {_bytes_text(self.num_bytes)}"
        if self.num_left_out:
            size += f" ({self.num_left_out:,} files whose names begin with '_' or '.' were left out)"
        if not self.is_new:
            why = "same source and settings; force=True writes it again"
            return f"Reusing the existing dataset at {self.uri} ({why}): {size}"
        speed = self.total / max(self.seconds, 1e-9)
        return f"{size}, at {self.uri}, in {self.seconds:,.1f} s ({speed:,.0f} samples/s)"


def _bytes_text(num_bytes: int) -> str:
    """A size that does not look like nothing where there is something."""
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:,.1f} kB"


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
    unsplit = manifest_of(store)
    splits = {"": unsplit} if unsplit else {split: manifest_of(store, f"{split}/{MANIFEST}") for split in SPLITS}
    manifests = {split: manifest for split, manifest in splits.items() if manifest is not None}
    if not manifests:
        raise NotFoundError(f"convert writes {MANIFEST} beside a dataset; {store.url} has none. Check the path.")
    return ConversionResult.of(root, manifests)


def manifest_of(store: Store, name: str = MANIFEST) -> dict[str, Any] | None:
    """Return the manifest in a store; None if there is none."""
    try:
        content = json.loads(store.read(name))
    except (NotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def differences(former: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how settings and source differ from those that a manifest holds."""
    before = former["settings"]
    source = former["source"]
    others = now["source"]
    settings = now["settings"]
    changed = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
    sentences = [f"{name} was {_shown(before.get(name))}, now {_shown(settings.get(name))}" for name in changed]
    if source["stamps"] != others["stamps"]:
        before_after = ({file["name"]: file for file in record.get("files", ())} for record in (source, others))
        counts = f"the source had {source['num_files']:,} files, now {others['num_files']:,}"
        sentences += changes_of(*before_after) or [counts]
    if source["reader"] != others["reader"]:
        sentences.append("the source is read with other options or another function")
    return "; ".join(sentences) or "it was written by another version of convert"


def _shown(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (str, list, dict)) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
