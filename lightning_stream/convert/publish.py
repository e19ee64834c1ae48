"""From the receipts of committed parts to a dataset, and nothing else left at its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_stream.convert.job import Job
from lightning_stream.convert.part import merged_statistics
from lightning_stream.convert.receipt import BEGUN, CONTROL, Receipt, digest_of, is_receipt
from lightning_stream.errors import NotFoundError, StoreError
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.stores import LocalStore, Store

MANIFEST = "manifest.json"
_OURS = re.compile(rf"part-[0-9]{{5,}}/(shard\.[0-9]+\.[0-9a-f]{{16}}\.mds(\.[a-z0-9]+)?|index\.json)|{CONTROL}/.*")


def begin(job: Job, exist_ok: bool, remedy: str) -> frozenset[int]:
    """Look at the place before anything is written, and note that this conversion is begun.

    Args:
        job: The conversion.
        exist_ok: Whether what is there may be replaced.
        remedy: How a user asks for that, e.g. ``"pass exist_ok=True"``.

    Returns:
        The partitions whose receipts an earlier run left there.

    Raises:
        FileExistsError: There are files that are not the remains of this very conversion, and not ``exist_ok``.
    """
    store = job.stores[-1]
    names = {entry.name: entry.num_bytes for entry in store.list("")}
    own = f"{CONTROL}/{job.fingerprint}/"
    controls = {name.split("/")[1] for name in names if name.startswith(f"{CONTROL}/")}
    strange = [name for name in names if not _OURS.fullmatch(name)]
    if not exist_ok and (strange or (names and controls != {job.fingerprint})):
        found = strange[0] if strange else "shards of a conversion that differs from this one and did not finish"
        raise FileExistsError(
            f"{store.url} is not empty: it holds {found}. Write to a new place, or {remedy} to replace what is there."
        )
    # The note tells whose shards those are that stand there without a receipt, if this run is cut short before any.
    store.put(f"{own}{BEGUN}", b"")
    receipts = (Receipt.from_bytes(store.read(name)) for name in sorted(names) if is_receipt(name, job.fingerprint))
    return frozenset(
        receipt.partition
        for receipt in receipts
        if all(names.get(file) == size for file, size in receipt.files().items())
    )


def abandon(job: Job) -> None:
    """Remove what was written and will not be published. A dataset that is there stays whole."""
    for store in job.stores:
        seen = [entry.name for entry in store.list("")]
        if not any(name.startswith("part-") and name.endswith(INDEX_NAME) for name in seen):
            _sweep(store, seen, _listed(store), controls=True)


def check(receipts: Sequence[Receipt], source: str, remedy: str) -> None:
    """Raise ValueError if any partition could not be written, with the counts over all partitions.

    Args:
        receipts: Of all partitions.
        source: What the rows come from, e.g. ``"the DataFrame"``.
        remedy: What to do about nulls, as a sentence.
    """
    nulls: dict[str, int] = {}
    for receipt in receipts:
        for name, count in receipt.nulls.items():
            nulls[name] = nulls.get(name, 0) + count
    if nulls:
        counts = ", ".join(f"{name}: {count:,}" for name, count in sorted(nulls.items()))
        raise ValueError(
            f"MDS has no null but in json columns; null values found, by column: {counts}. Nothing was published. "
            f"{remedy}"
        )
    refused = [receipt for receipt in receipts if receipt.refused]
    if refused:
        raise ValueError(
            f"{len(refused)} of {len(receipts)} partitions hold a value that cannot be written; in partition "
            f"{refused[0].partition}, {refused[0].refused} Nothing was published."
        )
    if not sum(receipt.num_samples for receipt in receipts):
        raise ValueError(f"{source} is empty: there is nothing to write.")


def publish(job: Job, receipts: Sequence[Receipt], merge_index: bool, about: Mapping[str, Any]) -> None:
    """Check that all files are there, remove what belongs to no committed attempt, and put the index last.

    Args:
        job: The conversion.
        receipts: Of all committed partitions, in their order.
        merge_index: One index over all partitions; else one in each partition's folder.
        about: What else the manifest says.

    Raises:
        StoreError: A file that a receipt lists is not at the place as this process sees it.
    """
    for store in job.stores:
        wanted = {name: size for receipt in receipts for name, size in receipt.files().items()}
        seen = {entry.name: entry.num_bytes for entry in store.list("")}
        _check_seen(store, wanted, seen)
        _sweep(store, seen, wanted.keys() | _listed(store))
        index = index_bytes(receipts)
        store.put(MANIFEST, _manifest(job, receipts, about, index))
        if merge_index:
            store.put(INDEX_NAME, index)
        else:
            for receipt in filter(lambda receipt: receipt.shards, receipts):
                folder = f"part-{receipt.partition:05}"
                wanted[f"{folder}/{INDEX_NAME}"] = 0
                store.put(f"{folder}/{INDEX_NAME}", _index(_inside(entry, folder) for entry in receipt.shards))
        _sweep(store, seen, wanted.keys(), controls=True)


def _check_seen(store: Store, wanted: Mapping[str, int], seen: Mapping[str, int]) -> None:
    missing = sorted(name for name, size in wanted.items() if seen.get(name) != size)
    if missing:
        raise StoreError(
            f"{store.url} must hold the {len(wanted)} files that were written there; from here, "
            f"{len(missing)} of them are not seen, the first {missing[0]}. Write to a place that all machines share: "
            "a URL, or a mounted folder such as a volume."
        )


def _listed(store: Store) -> set[str]:
    """The files of the dataset that is there already: it stays whole until the new index replaces its own."""
    try:
        index = Index.from_bytes(store.read(INDEX_NAME), store.url)
    except NotFoundError:
        return set()
    found = set()
    for shard in range(len(index)):
        for raw, packed in index.entry(shard).files:
            found |= {raw.basename} | (set() if packed is None else {packed.basename})
    return found


def _sweep(store: Store, seen: Iterable[str], keep: Iterable[str], controls: bool = False) -> None:
    """Delete files of ours that are not to be kept. What others put there is left alone."""
    kept = set(keep)
    for name in seen:
        if _OURS.fullmatch(name) and name not in kept and (controls or not name.startswith(f"{CONTROL}/")):
            store.delete(name)
    if isinstance(store, LocalStore):
        _sweep_folders(store, controls)


def _sweep_folders(store: LocalStore, controls: bool) -> None:
    """Delete the drafts of attempts that were killed, and folders that are empty now."""
    for folder in [*store.folder.glob("part-*"), *store.folder.glob(f"{CONTROL}/*"), store.folder / CONTROL]:
        if not folder.is_dir() or (folder.parent.name == CONTROL and not controls):
            continue
        for draft in folder.glob(".draft-*"):
            draft.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def index_bytes(receipts: Iterable[Receipt]) -> bytes:
    """The index over all shards of these partitions, in their order."""
    return _index(entry for receipt in receipts for entry in receipt.shards)


def _index(entries: Iterable[Mapping[str, Any]]) -> bytes:
    texts = [json.dumps(entry, sort_keys=True).encode() for entry in entries]
    return b'{"version": 2, "shards": [' + b", ".join(texts) + b"]}"


def _inside(entry: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """An entry as the index in its partition's own folder says it."""
    renamed = dict(entry)
    for key in ("raw_data", "zip_data"):
        if renamed[key] is not None:
            renamed[key] = {**renamed[key], "basename": renamed[key]["basename"].removeprefix(f"{folder}/")}
    return renamed


def _manifest(job: Job, receipts: Sequence[Receipt], about: Mapping[str, Any], index: bytes) -> bytes:
    """What the dataset came from: beside the index, where other readers pass it by."""
    held = {
        "version": 1,
        "fingerprint": job.fingerprint,
        "columns": dict(job.columns),
        "num_samples": sum(receipt.num_samples for receipt in receipts),
        "num_bytes": sum(sum(receipt.files().values()) for receipt in receipts),
        "num_shards": sum(len(receipt.shards) for receipt in receipts),
        "index": digest_of(index),
        "partitions": {f"part-{receipt.partition:05}": receipt.num_samples for receipt in receipts},
        "statistics": merged_statistics(receipts),
        **about,
    }
    return json.dumps(held, indent=1, sort_keys=True).encode()
