"""Adding shards to a dataset that exists, under a new version of its index.

Shards are never changed. Before index.json is replaced, the version that was there is kept beside it as
``index.<first 16 digits of its digest>.json``, so that a run that began with it finds it again by the digest in its
saved position; the new index names it under ``previous``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_stream.errors import FormatError
from lightning_stream.formats.index import INDEX_NAME, Index, version_name
from lightning_stream.formats.index.schema import Schema

_NUMBERED = re.compile(r"shard\.([0-9]+)\.")


class _Place(Protocol):
    def put(self, name: str, parts: Sequence[Any], *, anew: bool = False) -> None: ...
    def read(self, name: str) -> bytes: ...


@dataclass(frozen=True)
class Appended:
    """What the new shards are added to.

    Attributes:
        text: The index as it was, or None for a new dataset.
        index: The same, parsed.
        next_shard: Number of the first new shard.
    """

    text: bytes | None
    index: Index | None
    next_shard: int

    @classmethod
    def nothing(cls) -> Appended:
        """A new dataset."""
        return cls(None, None, 0)

    @classmethod
    def to(cls, text: bytes, where: str) -> Appended:
        """The dataset with this index.

        Raises:
            FormatError: Not an index.
        """
        index = Index.from_bytes(text, where)
        names = (index.entry(shard).raw.basename for shard in range(len(index)))
        numbers = [int(found[1]) for name in names if (found := _NUMBERED.match(name))]
        return cls(text, index, max(numbers, default=-1) + 1)

    @property
    def columns(self) -> dict[str, str] | None:
        """The columns of the dataset, or None for a new one."""
        return None if self.index is None else self.index.columns

    def check(self, schema: Schema) -> None:
        """Raise ValueError unless shards of ``schema`` fit the dataset."""
        if self.index is None or not self.index.schemas:
            return
        old = self.index.schemas[0]
        if old.format != schema.format or old.columns != schema.columns:
            raise ValueError(
                f"appended shards must have the dataset's format and columns; {self.index.where} has {old.format} "
                f"{old.columns}, got {schema.format} {schema.columns}. Write another dataset, and mix or merge them."
            )

    def put_index(self, place: _Place, entries: Sequence[dict[str, Any]]) -> None:
        """Put the index over the old shards and the new ones; the old index first, under the name of its version.

        Raises:
            FormatError: Another writer replaced the index meanwhile. Nothing is put then.
        """
        texts = [json.dumps(entry, sort_keys=True).encode() for entry in entries]
        if self.index is None or self.text is None:
            place.put(INDEX_NAME, [b'{"shards": [', b", ".join(texts), b'], "version": 2}'])
            return
        if place.read(INDEX_NAME) != self.text:
            raise FormatError(
                f"{self.index.where} was replaced while shards were appended: another writer was at work. The "
                "new shards are not part of the dataset. Append them again, one writer at a time."
            )
        previous = version_name(self.index.digest)
        place.put(previous, [self.text])
        old = [self.index.text(shard) for shard in range(len(self.index))]
        head = b'{"previous": ' + json.dumps(previous).encode() + b', "shards": ['
        place.put(INDEX_NAME, [head, b", ".join(old + texts), b'], "version": 2}'])
