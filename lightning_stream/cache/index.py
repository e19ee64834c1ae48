"""The index in a cache folder, fetched from its store. It says whose data the folder holds."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from lightning_stream.cache.folder import CacheFolder
from lightning_stream.errors import CacheError, FormatError, NoBucketError, NotFoundError, StoreError, UnavailableError
from lightning_stream.formats.hashing import digest
from lightning_stream.formats.index import INDEX_NAME, Index, ShardEntry, version_name
from lightning_stream.shared_files import publish_bytes
from lightning_stream.stores import Store
from lightning_stream.version_log import Known, is_of_one_log, read_index, read_newest

_LARGE_INDEX_BYTES = 1 << 20


class OtherFormat(Protocol):
    """Makes the index and the shards of a dataset in another format."""

    @property
    def identity(self) -> str:
        """What distinguishes its shards from those of other settings."""

    @property
    def names(self) -> str:
        """What names its files, so that no index.json beside them is read; empty for a whole folder."""

    def recognises(self, index: bytes) -> bool:
        """Return whether the bytes of an index.json are those of another format."""

    def index(self, store: Store, before: bytes | None) -> bytes:
        """Return the text of the index of what a store holds; NotFoundError if it is of no known format.

        ``before`` was made of the same store; it is returned if it still holds.
        """

    def write(self, store: Store, entry: ShardEntry, to: Path) -> None:
        """Make a shard in the file `to`."""

    def has_samples(self, store: Store, entry: ShardEntry) -> bool:
        """Return whether `samples` costs less than the shard."""

    def samples(self, store: Store, entry: ShardEntry, numbers: Sequence[int]) -> list[bytes]:
        """Return the bytes of some samples of a shard that is not made."""


@dataclass
class IndexFile:
    """Fetches the index into its folder, which holds one dataset: the shards of another one have the same names.

    If a new index has other bytes for shards that the cache has fetched, `drop` deletes these; those without hashes
    also where it is that of a dataset that was written again.
    """

    _store: Store
    _folder: CacheFolder
    _drop: Callable[[Sequence[ShardEntry], bool], object]
    _other: OtherFormat | None = None

    def here(self, name: str) -> Index | None:
        """Return the index in the folder; None if there is none, or another dataset's."""
        path = self._folder.path / name
        if not path.is_file() or self._folder.source() not in (None, self._label):
            return None
        with contextlib.suppress(FileNotFoundError):  # it was deleted meanwhile
            return Index.from_file(path)
        return None

    def read(self, name: str, draft: Path | None = None, known: Known | None = None) -> Index:
        """Read an index from the store. A user's own download gets it as it was published last, into a draft."""
        store: Any = self._store  # or a user's own, which has `get` alone
        has_names = self._other is not None and self._other.names
        try:
            if name == INDEX_NAME and has_names:
                raise NotFoundError(f"{store.url}/{has_names} names files.")
            if draft is None or isinstance(store, Store):
                return read_newest(store, known).index if name == INDEX_NAME else read_index(store, name)
            store.get(name, draft)
            return Index.from_bytes(draft.read_bytes(), f"{store.url}/{name}")
        except NotFoundError as error:
            if name != INDEX_NAME or has_names or isinstance(error, NoBucketError):
                raise
            raise NotFoundError(f"{error} A dataset is a folder with {name}, which its writer puts last.") from error

    def is_made(self, name: str, error: Exception) -> bool:
        """Return whether an index that cannot be read is to be made, since the dataset is in another format."""
        if self._other is None or name != INDEX_NAME or isinstance(error, NoBucketError):
            return False
        return isinstance(error, NotFoundError) or self._other.recognises(self._store.read(name))

    def fetch(self, name: str, draft: Path) -> Index:
        """Fetch the index into a draft and publish it; under its lock. CacheError if there is another dataset."""
        path = self._folder.path / name
        is_made = False
        old = path.read_bytes() if path.is_file() else None
        ours = old if self._folder.source() == self._label else None
        published = _Published(self._folder, ours if name == INDEX_NAME else None)
        try:
            index = self.read(name, draft, published)
        except (NotFoundError, FormatError) as error:
            if not (is_made := self.is_made(name, error)):
                raise
            index = self._made(ours, error)
        former = index if old == index.data else self._former(path, old)
        self._refuse_another(former, index)
        self._refuse_twins(index)
        if former is not None and (former.digest, former.schemas) != (index.digest, index.schemas):
            if is_made:  # no store keeps it: a resume compares the files
                draft.write_bytes(former.data)
                self._folder.publish(draft, version_name(former.digest))
            # Of a dataset that was written again, equal names and sizes say nothing.
            is_same = is_made or is_of_one_log(former, index)
            raws = (entry.raw for entry in _entries(index))
            now = {raw.basename: raw for raw in raws if is_same or raw.hashes}
            gone = [entry for entry in _entries(former) if now.get(entry.raw.basename) != entry.raw]
            self._drop([entry for entry in gone if entry.raw.hashes], False)
            self._drop([entry for entry in gone if not entry.raw.hashes], not is_same)
        # It was parsed before: a file that is not an index would make every later run fail.
        # In this order: if it is killed in between, the folder is known to hold no other dataset.
        if ours != index.data:
            publish_bytes(self._label.encode(), self._folder.control / "source", self._folder.modes)
            draft.write_bytes(index.data)
            self._folder.publish(draft, name)
        published.keep(index)
        return index

    def _made(self, before: bytes | None, error: Exception) -> Index:
        """Make the index of a dataset in another format; ``error`` is why it has none."""
        assert self._other is not None
        try:
            text = self._other.index(self._store, before)
        except UnavailableError:
            raise
        except NotFoundError as reason:
            raise NotFoundError(f"{error} {reason}") from error
        except StoreError as reason:  # it cannot be listed
            raise error from reason
        return Index.from_bytes(text, f"{self._store.url}/{INDEX_NAME}")

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
        is_same = before is not None and before.digest == index.digest
        if source == self._label or (source is None and (before is None or is_same)):
            return
        if before is not None and (source is None or is_same) and _all_hashed(index) and _all_hashed(before):
            return
        holder = "an index.json of another" if source is None else f"that of {source.partition(' ')[2]}"
        why = " (their shards have no hashes to compare)" if is_same or source is None else ""
        raise CacheError(
            f"a cache folder holds one dataset: {self._folder.path} holds {holder}, and "
            f"{self._store.url} is another{why}. Pass another local=, or delete the folder."
        )

    def _refuse_twins(self, index: Index) -> None:
        """Raise CacheError if two shards would be one file, in a folder whose file system ignores the case of letters.

        Without hashes, each would be taken for the other.
        """
        if not (self._folder.control / "LOCKS").exists():  # which we name "locks"
            return
        names: dict[str, str] = {}
        for entry in _entries(index):
            name = entry.raw.basename
            twin = names.setdefault(name.casefold(), name)
            if twin != name:
                raise CacheError(
                    f"shards need files of their own; {twin} and {name} are one file in {self._folder.path}, whose "
                    "file system takes capital and small letters as equal. Put `local` on another one."
                )


class _Published:
    """Which version of the store's index.json the index in a folder was made of: a large one is not read twice."""

    def __init__(self, folder: CacheFolder, index: bytes | None) -> None:
        self._folder = folder
        self._path = folder.control / "published"
        self._index = index
        self._version: str | None = None

    def __call__(self, version: str | None) -> Index | None:
        """Return the folder's index if it was made of this version. To read a small one keeps the connection."""
        self._version = version
        if self._index is None or version is None or len(self._index) < _LARGE_INDEX_BYTES:
            return None
        with contextlib.suppress(FileNotFoundError):
            label, _, snapshot = self._path.read_bytes().partition(b"\n")
            if label == self._label(self._index):
                return Index.from_bytes(self._index, str(self._folder.path / INDEX_NAME), snapshot)
        return None

    def keep(self, index: Index) -> None:
        """Note that the folder's index, which is this one, was made of the version that was asked for."""
        if self._version is None or len(index.data) < _LARGE_INDEX_BYTES:
            return
        content = self._label(index.data) + b"\n" + index.to_keep()
        if not self._path.is_file() or self._path.read_bytes() != content:
            publish_bytes(content, self._path, self._folder.modes, durable=False)

    def _label(self, index: bytes) -> bytes:
        return f"{digest('xxh3_128', index)} {self._version}".encode()


def _entries(index: Index) -> Iterator[ShardEntry]:
    return chain.from_iterable(map(index.entries, range(len(index))))


def _all_hashed(index: Index) -> bool:
    return all(raw.hashes for entry in _entries(index) for raw, _ in entry.files)
