"""What a process gives for a part that it wrote. Only what receipts list can enter an index."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import zstandard

CONTROL = "_conversion"
_SUFFIX = ".json.zst"


@dataclass(frozen=True)
class Receipt:
    """What was written of one part.

    Attributes:
        partition: Its number.
        begins: Digest of the rows it began with: tells whether a later run has the same part.
        num_samples: Rows written.
        shards: Index entries, their files named relative to the dataset's root.
        nulls: Null values by column, where there are any: then nothing it wrote counts.
        refused: Why a value could not be written: then nothing it wrote counts.
    """

    partition: int
    begins: str
    num_samples: int = 0
    shards: tuple[dict[str, Any], ...] = ()
    nulls: Mapping[str, int] = field(default_factory=dict)
    refused: str = ""

    @property
    def is_good(self) -> bool:
        """Whether what it lists may enter an index."""
        return not self.nulls and not self.refused

    def to_bytes(self) -> bytes:
        """As compressed json."""
        return zstandard.ZstdCompressor().compress(json.dumps(asdict(self), sort_keys=True).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Receipt:
        """Read it back."""
        held = json.loads(zstandard.ZstdDecompressor().decompress(data))
        return cls(**{**held, "shards": tuple(held["shards"])})

    def files(self) -> dict[str, int]:
        """Bytes by name of every file that is stored."""
        stored = [entry["zip_data"] or entry["raw_data"] for entry in self.shards]
        return {file["basename"]: file["bytes"] for file in stored}


def receipt_name(fingerprint: str, partition: int) -> str:
    """Where a receipt lies while the conversion is under way."""
    return f"{CONTROL}/{fingerprint}/{partition:05}{_SUFFIX}"


def is_receipt(name: str, fingerprint: str) -> bool:
    """Whether a receipt of this conversion lies there."""
    return name.startswith(f"{CONTROL}/{fingerprint}/") and name.endswith(_SUFFIX)


def check(receipts: Sequence[Receipt], source: str, remedy: str) -> None:
    """Raise ValueError if any partition could not be written, with the counts over all partitions.

    Args:
        receipts: Of all partitions.
        source: What the rows come from, e.g. ``"the DataFrame"``.
        remedy: What to do about nulls, as a sentence.
    """
    nulls = sum((Counter(receipt.nulls) for receipt in receipts), Counter[str]())
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
    if not any(receipt.num_samples for receipt in receipts):
        raise ValueError(f"{source} is empty: there is nothing to write.")


def index_bytes(receipts: Iterable[Receipt], folder: str = "") -> bytes:
    """The index over all shards of these partitions, in their order; with file names relative to ``folder``."""
    entries = [json.dumps(entry, sort_keys=True) for receipt in receipts for entry in receipt.shards]
    text = f'{{"version": 2, "shards": [{", ".join(entries)}]}}'
    return text.replace(f'"basename": "{folder}/', '"basename": "').encode() if folder else text.encode()
