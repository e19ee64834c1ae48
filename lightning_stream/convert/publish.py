"""How a conversion begins and is published: by the protocol of all writers, with receipts and a manifest."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_stream.convert.partition import CONTROL, OutputSpec, Receipt, index_bytes, is_receipt
from lightning_stream.errors import StoreError
from lightning_stream.formats.index import INDEX_NAME
from lightning_stream.stores import LocalStore
from lightning_stream.stores.drafts import sweep_drafts
from lightning_stream.writer.place import MANIFEST as MANIFEST
from lightning_stream.writer.place import OURS, DatasetPlace, digest_of

_PARTS = re.compile(rf"part-[0-9]{{5,}}/(shard\.[0-9]+\.[0-9a-f]{{16}}\.mds(\.[a-z0-9]+)?|index\.json)|{CONTROL}/.*")
_ALL = re.compile(f"{OURS.pattern}|{_PARTS.pattern}")


@dataclass(frozen=True)
class Publication:
    """A conversion that has begun, in the process that will publish it.

    Attributes:
        spec: What the processes that write partitions get.
        place: The folders or stores of the dataset, as they were at the beginning.
        done: The partitions whose receipts an earlier run left there.
    """

    spec: OutputSpec
    place: DatasetPlace
    done: frozenset[int]

    @classmethod
    def begin(cls, spec: OutputSpec, overwrite: bool, remedy: str) -> Publication:
        """Look at what exists before anything is written, and note that this conversion has begun.

        Args:
            spec: The conversion.
            overwrite: Whether an existing dataset may be replaced.
            remedy: How a user asks for that, e.g. ``"pass overwrite=True"``.

        Raises:
            FileExistsError: There are files that are not the remains of this very conversion, and not `overwrite`.
        """
        place = DatasetPlace(spec.out, spec.keep_local, spec.store_options)
        place.begin("overwrite", (MANIFEST,))
        store, names = place.store, place.listing()[0]
        controls = {name.split("/")[1] for name in names if name.startswith(f"{CONTROL}/")}
        strange = [name for name in names if not _PARTS.fullmatch(name)]
        if not overwrite and (strange or (names and controls != {spec.fingerprint})):
            holds = strange[0] if strange else "shards of a conversion that differs from this one and did not finish"
            raise FileExistsError(
                f"{store.url} is not empty: it holds {holds}. Write to a new place, or {remedy} to replace it."
            )
        # The note says whose shards there are without a receipt, if this run is cut short before any.
        store.put(f"{CONTROL}/{spec.fingerprint}/begun", b"")
        found = [Receipt.from_bytes(store.read(name)) for name in sorted(names) if is_receipt(name, spec.fingerprint)]
        whole = (one for one in found if all(names.get(file) == size for file, size in one.files().items()))
        return cls(spec, place, frozenset(one.partition for one in whole))

    def cancel(self) -> None:
        """Remove what was written and will not be published. A dataset that is there stays whole."""
        before = self.place.listing()
        if not any(name.startswith("part-") and name.endswith(INDEX_NAME) for name in before[0]):
            self.place.sweep(before, _PARTS, (), former=False)

    def publish(self, receipts: Sequence[Receipt], merge_index: bool, about: Mapping[str, Any]) -> None:
        """Check that all files are there, put the index, and remove what belongs to no committed attempt.

        Args:
            receipts: Of all committed partitions, in their order.
            merge_index: One index over all partitions; else one in each partition's folder.
            about: What else the manifest says.

        Raises:
            StoreError: A file that a receipt lists is not at the place as this process sees it.
            FileExistsError, ConflictError: Another writer changed the dataset meanwhile; it stays as that one left it.
        """
        place, index = self.place, index_bytes(receipts)
        wanted = {name: size for receipt in receipts for name, size in receipt.files().items()}
        before = place.listing()
        for store, seen in zip(place.stores, before, strict=True):
            missing = sorted(name for name, size in wanted.items() if seen.get(name) != size)
            if missing:
                raise StoreError(
                    f"{store.url} must hold the {len(wanted)} files that were written there; from here, "
                    f"{len(missing)} of them are not seen, the first {missing[0]}. Write to a place that all machines "
                    "share: a URL, or a mounted folder such as a volume."
                )
        about = {
            "version": 1,
            "fingerprint": self.spec.fingerprint,
            "columns": dict(self.spec.columns),
            "num_samples": sum(receipt.num_samples for receipt in receipts),
            "num_bytes": sum(wanted.values()),
            "num_shards": len(wanted),
            "index": digest_of(index),
            "partitions": {_folder(receipt): receipt.num_samples for receipt in receipts},
            **about,
        }
        manifest = json.dumps(about, indent=1, sort_keys=True).encode()
        place.swap(MANIFEST, manifest)  # of several conversions, one succeeds
        if merge_index:
            place.swap(INDEX_NAME, index)
        else:
            parts = [receipt for receipt in receipts if receipt.shards]
            indexes = {f"{_folder(one)}/{INDEX_NAME}": index_bytes([one], _folder(one)) for one in parts}
            for store in place.stores:
                for name, data in indexes.items():
                    store.put(name, data)
                store.delete(INDEX_NAME)
            wanted |= dict.fromkeys(indexes, 0)
        for store in place.stores:
            if isinstance(store, LocalStore):  # a killed worker may have left the draft of a receipt
                sweep_drafts(store.folder / CONTROL / self.spec.fingerprint)
        place.sweep(before, _ALL, wanted)


def _folder(receipt: Receipt) -> str:
    return f"part-{receipt.partition:05}"
