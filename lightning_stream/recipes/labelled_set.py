"""Labelled samples from any source, converted once in parallel: a train and a val set, and what is said of them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lightning_stream.convert import ConversionResult, Inputs, convert
from lightning_stream.errors import FormatError
from lightning_stream.recipes.converted_set import TRAIN, VAL, Made, describe
from lightning_stream.stores import open_store

_VERSION = 1
FileKey = tuple[str, str]
"""Class and file name. A file name alone is no key: two classes may hold the same."""


def is_held_out(key: FileKey, share: float) -> bool:
    """Whether a file belongs to the val set: by a hash of class and name alone, never by listing order."""
    return _place(key, "held out") < share


def writing_order(keys: Mapping[FileKey, object]) -> list[FileKey]:
    """The files in an order that mixes the classes and is the same wherever they come from."""
    return sorted(keys, key=lambda key: (_place(key, "order"), key))


def _place(key: FileKey, purpose: str) -> float:
    label, name = key
    digest = hashlib.sha256(f"{purpose}\0{label}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class LabelledSource(Protocol):
    """Labelled samples in a ``train`` and a ``val`` split, in pieces that are read in parallel. Picklable."""

    @property
    def title(self) -> str:
        """What it is, for people."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; a label is an index into them."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Encodings of a sample's columns: ``label``, what it labels, perhaps ``name``."""

    def fingerprint(self) -> str:
        """Of all that the samples depend on."""

    def pieces(self, split: str) -> Sequence[Any]:
        """What a split is made of, in its order."""

    def read(self, piece: Any) -> Iterable[dict[str, Any]]:
        """The samples of a piece."""


@dataclass(frozen=True)
class LabelledDescription:
    """What a converted set holds, as kept beside it."""

    title: str
    classes: tuple[str, ...]
    num_train: int
    num_val: int

    @classmethod
    def from_bytes(cls, data: bytes) -> LabelledDescription:
        """Read it back."""
        held = json.loads(data)
        return cls(**{**held, "classes": tuple(held["classes"])})

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), indent=1).encode()


@dataclass(frozen=True)
class LabelledSet:
    """A source under a config: where its shards belong, and how they come to be there.

    Attributes:
        source: The samples; None where the shards are there already.
        place: Folder or URL of this very set.
        shards: Arguments of `convert`: compression, hashes, size_limit, num_workers.
        told_in: The file that says what the set holds.
    """

    source: LabelledSource | None
    place: str
    shards: Mapping[str, Any]
    told_in: str

    @classmethod
    def plan(cls, source: LabelledSource | None, remote: str, shards: Mapping[str, Any], told_in: str) -> LabelledSet:
        """The set in a place of its own under `remote`; without a source, `remote` is the place."""
        if source is None:
            return cls(None, remote.rstrip("/"), shards, told_in)
        # Any number of workers writes the same.
        settings = {name: value for name, value in shards.items() if name != "num_workers"}
        told = json.dumps([_VERSION, source.fingerprint(), dict(source.columns), settings], sort_keys=True)
        return cls(source, f"{remote.rstrip('/')}/{hashlib.sha256(told.encode()).hexdigest()[:16]}", shards, told_in)

    def describe(self) -> LabelledDescription | None:
        """What the converted set holds; None where there is none yet."""
        return describe(self.place, self.told_in, LabelledDescription.from_bytes)

    def run(self) -> Made[LabelledDescription]:
        """Convert, unless it was done; what was cut short is gone on with.

        Raises:
            FormatError: The source is not what it should be; or there is none, and no shards either.
        """
        if (found := self.describe()) is not None:
            return Made(found, is_new=False)
        if self.source is None:
            raise FormatError(
                f"without data.source, data.remote holds a converted set; there is none at {self.place}. Set "
                "data.source, or data.remote to the folder that an earlier run named."
            )
        done = {split: self._convert(self.source, split) for split in (TRAIN, VAL)}
        counts = {split: one.total for split, one in done.items()}
        held = LabelledDescription(self.source.title, self.source.classes, counts[TRAIN], counts[VAL])
        open_store(self.place).put(self.told_in, held.to_bytes())
        return Made(held, is_new=any(one.is_new for one in done.values()))

    def _convert(self, source: LabelledSource, split: str) -> ConversionResult:
        return convert(
            Inputs(source.pieces(split), source.read, stamp=self.place.rpartition("/")[2]),
            f"{self.place}/{split}",
            columns=source.columns,
            progress_bar=sys.stderr.isatty(),
            **self.shards,
        )
