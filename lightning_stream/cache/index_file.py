"""The index in a cache folder, which identifies the dataset of the folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from lightning_stream.cache.folder import CacheFolder
from lightning_stream.errors import CacheError, FormatError
from lightning_stream.formats.index import Index, ShardEntry
from lightning_stream.shared_files import publish_bytes
from lightning_stream.stores import Store


class IndexFile:
    """Fetches the index into its folder, which holds one dataset: the shards of another one have the same names.

    If a new index has other bytes for a shard that the cache has fetched, `drop` deletes that shard.
    """

    def __init__(self, store: Store, folder: CacheFolder, drop: Callable[[ShardEntry], object]) -> None:
        self._store = store
        self._folder = folder
        self._drop = drop

    def here(self, name: str) -> Index | None:
        """Return the index in the folder; None if there is none, or another dataset's."""
        path = self._folder.path / name
        if not path.is_file() or self._folder.source() not in (None, self._label):
            return None
        return Index.from_bytes(path.read_bytes(), str(path))

    def fetch(self, name: str, draft: Path) -> Index:
        """Fetch the index into a draft and publish it; under its lock. CacheError if there is another dataset."""
        self._store.get(name, draft)
        path, new = self._folder.path / name, draft.read_bytes()
        old = path.read_bytes() if path.is_file() else None
        # It is parsed before it is published: a file that is not an index would make every later run fail.
        index = Index.from_bytes(new, f"{self._store.url}/{name}")
        before = index if old == new else self._former(path, old)
        self._refuse_another(before, index)
        if before is not None and before.digest != index.digest:
            now = {raw.basename: raw for raw in (index.entry(number).raw for number in range(index.num_shards))}
            for entry in map(before.entry, range(before.num_shards)):
                if now.get(entry.raw.basename) != entry.raw:
                    self._drop(entry)
        # In this order: if it is killed in between, the folder is known to hold no other dataset.
        publish_bytes(self._label.encode(), self._folder.control / "source", self._folder.modes)
        self._folder.publish(draft, name)
        return index

    @property
    def _label(self) -> str:
        """Identifies the store, and shows its URL without secrets."""
        return f"{hashlib.sha256(self._store.identity.encode()).hexdigest()[:32]} {self._store.url}"

    def _former(self, path: Path, text: bytes | None) -> Index | None:
        """Parse the index in the folder; None if there is none, or one of ours that is damaged."""
        try:
            return None if text is None else Index.from_bytes(text, str(path))
        except FormatError as error:
            if self._folder.source() == self._label:
                return None
            raise CacheError(
                f"a cache folder's index.json is the dataset's; the one in {self._folder.path} cannot be read "
                f"({error}), and this cache did not put it there. Delete it, or choose another `local`."
            ) from error

    def _refuse_another(self, before: Index | None, index: Index) -> None:
        """Raise CacheError if the folder's shards may be another dataset's.

        Only hashes can show that two stores hold the same shards, or that an index fits the shards beside it, if
        somebody else put them here: names, sizes and counts are often equal, e.g. for tokens.
        """
        source = self._folder.source()
        same = before is not None and before.digest == index.digest
        if source == self._label or (source is None and (before is None or same)):
            return
        if before is not None and (source is None or same) and _all_hashed(index) and _all_hashed(before):
            return
        holder = "an index.json of another" if source is None else f"that of {source.partition(' ')[2]}"
        why = " (their shards have no hashes to compare)" if same or source is None else ""
        raise CacheError(
            f"a cache folder holds one dataset: {self._folder.path} holds {holder}, and "
            f"{self._store.url} is another{why}. Pass another local=, or delete the folder."
        )


def _all_hashed(index: Index) -> bool:
    return all(raw.hashes for shard in range(len(index)) for raw, _ in index.entry(shard).files)
