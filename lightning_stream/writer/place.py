"""The place of a dataset, and the one protocol by which all writers change it (README.md explains it).

Readers see a change by one step alone: the swap of index.json, which succeeds only if the index is still what it was
when the writer began. So a killed writer leaves the dataset as it was, and of several writers at once one wins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import xxhash

from lightning_stream.errors import (
    AlreadyExistsError,
    ConflictError,
    FormatError,
    NotFoundError,
    StoreError,
    UnavailableError,
    redact,
)
from lightning_stream.formats.index import INDEX_NAME, Index, version_name
from lightning_stream.stores import LocalStore, Store, open_store
from lightning_stream.stores.drafts import sweep_drafts
from lightning_stream.writer.local_file import write_file

Place: TypeAlias = "str | os.PathLike[str]"
Out: TypeAlias = "Place | tuple[Place, Place]"
Mode: TypeAlias = Literal["new", "append", "overwrite", "merge"]

_KEPT = r"index\.[0-9a-f]{16}\.json"
_SHARD = r"shard\.[0-9]{5,}(\.[0-9a-f]{16})?\.(mds|json|csv|tsv|xsv)(\.meta)?(\.[a-z0-9]+)?"
_LOG = logging.getLogger(__name__)
OURS = re.compile(f"{_KEPT}|{_SHARD}")
_NUMBERED = re.compile(r"shard\.([0-9]+)\.")


@dataclass(frozen=True)
class Seen:
    """An object as a writer found it when it began; both None where there was none."""

    data: bytes | None = None
    version: str | None = None

    @classmethod
    def of(cls, store: Store, name: str) -> Seen:
        """Read an object with its version."""
        try:
            with store.open(name) as body:
                return cls(b"".join(body), body.version)
        except NotFoundError:
            return cls()

    def replace(self, store: Store, name: str, data: bytes) -> AlreadyExistsError | ConflictError | None:
        """Put an object if the one there is still this one; else return the error."""
        try:
            if self.data is None:
                store.put(name, data, if_absent=True)
            else:
                store.put(name, data, if_version=self.version)
        except (AlreadyExistsError, ConflictError) as error:
            return error
        return None


class DatasetPlace:
    """A local folder, a remote store, or both: `begin`, `put_shard` and `commit` change the dataset there as a whole.

    Picklable before `begin`. Threads may put shards at the same time.

    Args:
        out: A path or URL, or (local path, URL). Of a pair, the local folder is only written with ``keep_local``:
            shards go from memory to the remote store.
        keep_local: Keep the local copies of a pair.
        store_options: For the remote store, e.g. ``endpoint_url``.

    Attributes:
        local, remote: The local folder and the URL of `out`; None where it has none.
        mode, base: What `begin` was given; the index of the dataset that is appended to, None in the other modes.
        put_names: Names of the shard files that were put.

    Raises:
        ValueError: Not a path, a URL, or a pair of a path and another place.
    """

    def __init__(self, out: Any, keep_local: bool = False, store_options: Mapping[str, Any] | None = None) -> None:
        places = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if not 1 <= len(places) <= 2 or not all(
            isinstance(place, (str, os.PathLike)) and str(place) for place in places
        ):
            raise ValueError(
                f"out must be a path, a URL, or (local path, URL), none of them empty; got {redact(repr(out))}. Pass "
                "one of these."
            )
        urls = [os.path.expanduser(place) for place in places]  # noqa: PTH111 - may be URLs
        if len(urls) == 2 and (is_remote(urls[0]) or urls[0] == urls[1]):
            raise ValueError(
                f"out as a pair is a local folder and another place: (local path, URL); got {redact(repr(out))}. Put "
                "the local folder first, or pass one place."
            )
        self.local = next((url for url in urls if not is_remote(url)), None)
        self.remote = next((url for url in urls[::-1] if len(urls) == 2 or is_remote(url)), None)
        self.keep_local = keep_local
        self._urls = urls[::-1] if keep_local else urls[-1:]
        self._options = store_options
        self.mode: Mode = "new"
        self.base: Index | None = None
        self.put_names: list[str] = []
        self._begun_with: dict[str, list[Seen]] = {}

    @property
    def is_local(self) -> bool:
        """Whether all files go to local folders."""
        return not any(map(is_remote, self._urls))

    @cached_property
    def stores(self) -> list[Store]:
        """Where files are put. The first is the one that is kept for good: the remote of a pair."""
        return [open_store(url, self._options if is_remote(url) else None) for url in self._urls]

    @property
    def store(self) -> Store:
        """The first store."""
        return self.stores[0]

    def begin(self, mode: Mode, also: Iterable[str] = ()) -> None:
        """Note what is there, before anything is written.

        Args:
            mode: ``"new"``: the place must be empty. ``"append"``: shards are added. ``"overwrite"``: what is there is
                replaced at `commit`. ``"merge"``: only the index is put.
            also: Further objects that will be swapped.

        Raises:
            FileExistsError: A new dataset's place holds files already.
            ValueError: There is no dataset to append to, or the places of a pair hold different ones.
        """
        self.mode = mode
        for store in self.stores:
            if isinstance(store, LocalStore):
                sweep_drafts(store.folder)
            first = _first_file(store) if mode == "new" else None
            if first is not None:
                raise FileExistsError(
                    f"{store.url} is not empty: it holds {first!r}. Write to a new place, or pass overwrite=True "
                    "to replace the dataset there, or append=True to add shards to it."
                )
        for name in (INDEX_NAME, *also):
            self._begun_with[name] = [Seen() if mode == "new" else Seen.of(store, name) for store in self.stores]
        if mode == "append":
            self.base = self._read_base()

    @property
    def files_begun_with(self) -> set[str]:
        """The files that the index lists which was there when the writer began."""
        return listed_files(self._begun_with[INDEX_NAME][0].data)

    def _read_base(self) -> Index:
        texts = [seen.data for seen in self._begun_with[INDEX_NAME]]
        if texts[0] is None:
            raise ValueError(f"append=True needs a dataset; {self.store.url} has no {INDEX_NAME}.")
        base = Index.from_bytes(texts[0], f"{self.store.url}/{INDEX_NAME}")
        for store, text in zip(self.stores, texts, strict=True):
            if text != texts[0]:
                raise ValueError(
                    f"both places of a pair must hold the dataset that is appended to; {store.url} has another "
                    f"{INDEX_NAME} than {self.store.url}, or none. Pass keep_local=False, or copy the dataset there."
                )
        return base

    @cached_property
    def next_shard(self) -> int:
        """Number of the first new shard."""
        base = self.base
        names = () if base is None else (base.entry(shard).raw.basename for shard in range(len(base)))
        return 1 + max((int(found[1]) for name in names if (found := _NUMBERED.match(name))), default=-1)

    def name_of(self, name: str, parts: Sequence[Any]) -> str:
        """The name under which a shard's file is put: ``shard.00007.mds``, or ``shard.00007.<16 hex digits>.mds``.

        The digits come from the file's bytes and from the index that the writer began with. So of the writers that
        could have put a file of this name at most one will win: the others may delete it.
        """
        if self.mode == "new":
            return name
        stem, number, rest = name.split(".", 2)
        return f"{stem}.{number}.{digest_of(self._base_digest, *parts)}.{rest}"

    @cached_property
    def _base_digest(self) -> bytes:
        return digest_of(self._begun_with[INDEX_NAME][0].data or b"").encode()

    def put_shard(self, name: str, parts: Sequence[Any]) -> None:
        """Put one file of a shard, given in parts, under a name by `name_of`.

        Raises:
            FileExistsError: In a new dataset: another writer has put a file of this name.
        """
        for store in self.stores:
            if not _put_new(store, name, parts) and self.mode == "new":
                raise AlreadyExistsError(_another(f"{store.url} holds {name!r} already"))
        self.put_names.append(name)

    def commit(self, entries: Sequence[bytes]) -> None:
        """Put the index over these shards (the JSON texts of their entries), in append mode behind those there already.
        Then delete what it replaced.

        Raises:
            FileExistsError, ConflictError: The index is not the one that the writer began with: another writer was at
                work. The dataset is as that one left it, and the shards of this writer are deleted.
        """
        if self.base is None:
            self.commit_index(b'{"shards": [' + b", ".join(entries) + b'], "version": 2}')
            return
        kept = version_name(self.base.digest)
        for store, seen in zip(self.stores, self._begun_with[INDEX_NAME], strict=True):
            store.put(kept, seen.data or b"")
        old = [self.base.text(shard) for shard in range(len(self.base))]
        head = b'{"previous": "' + kept.encode() + b'", "shards": ['
        self.commit_index(head + b", ".join([*old, *entries]) + b'], "version": 2}')

    def commit_index(self, index: bytes) -> None:
        """Swap the index; in overwrite mode, then delete what the former dataset and killed writers left."""
        before = self.listing() if self.mode == "overwrite" else []
        self.swap(INDEX_NAME, index)
        if self.mode == "overwrite":
            self.sweep(before, OURS, listed_files(index))

    def listing(self) -> list[dict[str, int]]:
        """Bytes by name of all that is there, by store; where it refuses to list, the dataset found at `begin`."""
        return [_listing(store, seen) for store, seen in zip(self.stores, self._begun_with[INDEX_NAME], strict=True)]

    def swap(self, name: str, data: bytes) -> None:
        """Put an object if what is there is still what `begin` found.

        Raises:
            FileExistsError, ConflictError: It is not.
        """
        for number, (store, seen) in enumerate(zip(self.stores, self._begun_with[name], strict=True)):
            if (error := seen.replace(store, name, data)) is None:
                continue
            if self.mode == "merge" and Seen.of(store, name).data == data:  # another rank merged the same
                continue
            for loser in self.stores[number:]:
                self._withdraw(loser)
            raise type(error)(_another(f"{store.url}/{name} changed since this writer began")) from error

    def _withdraw(self, store: Store) -> None:
        """Delete the files of this writer, whose commit failed, but for those that the index now lists."""
        listed = listed_files(Seen.of(store, INDEX_NAME).data)
        for name in self.put_names:
            if name not in listed:
                store.delete(name)
        if self.base is not None and not listed >= listed_files(self.base.data):  # the version kept is of no use now
            store.delete(version_name(self.base.digest))

    def sweep(
        self, before: Sequence[Collection[str]], ours: re.Pattern[str], keep: Collection[str], *, former: bool = True
    ) -> None:
        """Delete all files that match `ours`, and those of the `former` dataset, that was there at `begin`.

        Folders with an index of their own are other datasets, and stay. What cannot be deleted is logged.

        Args:
            before, ours, keep: Names that were there before the swap, by store; that only writers put; and that stay.
        """
        for store, names, seen in zip(self.stores, before, self._begun_with[INDEX_NAME], strict=True):
            listed = listed_files(seen.data)
            kept = keep if former else listed.union(keep)
            indexes = [name for name in names if name.endswith(f"/{INDEX_NAME}") and not ours.fullmatch(name)]
            others = tuple(name.removesuffix(INDEX_NAME) for name in indexes)
            gone = [name for name in names if name not in kept and (name in listed or ours.fullmatch(name))]
            gone = [name for name in gone if not name.startswith(others)]
            gone.sort(key=lambda name: not name.endswith(".json"))  # no index outlives its shards
            try:
                for name in gone:
                    store.delete(name)
            except StoreError as error:
                _LOG.warning("%s is written; of what it replaced, up to %d files are left: %s", self, len(gone), error)
            if isinstance(store, LocalStore):
                _sweep_folders(store, gone)

    def __str__(self) -> str:
        return " and ".join(store.url for store in self.stores)


def _put_new(store: Store, name: str, parts: Sequence[Any]) -> bool:
    """Put an object, given in parts; False where there is one of that name."""
    try:
        if isinstance(store, LocalStore):
            write_file(store.folder / name, parts, if_absent=True)
        else:
            store.put(name, b"".join(parts), if_absent=True)
    except AlreadyExistsError:
        return False
    return True


def _first_file(store: Store) -> str | None:
    try:
        return next((entry.name for entry in store.list("")), None)
    except (UnavailableError, NotFoundError):
        raise
    except StoreError:  # no right to list, or a web server; what was put before is found as shards are put
        return INDEX_NAME if store.exists(INDEX_NAME) else None


def _listing(store: Store, index: Seen) -> dict[str, int]:
    try:
        return {entry.name: entry.num_bytes for entry in store.list("")}
    except UnavailableError:
        raise
    except StoreError:  # no right to list, or a web server
        return dict.fromkeys(listed_files(index.data), 0)


def _sweep_folders(store: LocalStore, gone: Iterable[str]) -> None:
    """Remove dead drafts in the folder and those directly below, and folders that are empty now without `gone`."""
    below = [Path(entry.path) for entry in os.scandir(store.folder) if entry.is_dir()]
    drafts = {folder for folder in (store.folder, *below) if sweep_drafts(folder)}
    emptied = {folder for name in gone for folder in (store.folder / name).parents} | drafts
    for folder in sorted((one for one in emptied if store.folder in one.parents), reverse=True):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def listed_files(index: bytes | None) -> set[str]:
    """The files that an index lists; none where it is no index, since then there was no dataset."""
    try:
        found = Index.from_bytes(index or b"", INDEX_NAME)
    except FormatError:
        return set()
    entries = map(found.entry, range(len(found)))
    return {file.basename for entry in entries for pair in entry.files for file in pair if file is not None}


def digest_of(*parts: Any) -> str:
    """16 hex digits that tell these bytes from others."""
    total = xxhash.xxh3_128()
    for part in parts:
        total.update(part)
    return str(total.hexdigest()[:16])


def is_remote(url: str) -> bool:
    """Whether it is a URL of a store, not a folder."""
    return url.startswith("dbfs:") or ("://" in url and not url.startswith("file://"))


def _another(found: str) -> str:
    return (
        f"{found}: another writer is or was at work at this place. Its dataset stays as it is, and what this writer "
        "wrote is not part of it. Have one process write at a time, then write again: with append=True to add shards, "
        "with overwrite=True to replace the dataset."
    )
