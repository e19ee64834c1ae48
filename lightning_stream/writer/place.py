"""The place of a dataset, and the one protocol by which all writers change it; README.md explains it.

Readers see a new dataset when index.json is swapped, which succeeds only if the index is still the one that the writer
began with: of several writers at once one wins. They see a change of a dataset (an append) when it is put in the log of
versions: of several writers at once, all win. A killed writer leaves the dataset as it was.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

from lightning_stream import errors
from lightning_stream.formats.hashing import digest_parts
from lightning_stream.formats.index import INDEX_NAME, FileEntry, Index
from lightning_stream.formats.model import index_text, with_lengths
from lightning_stream.stores import LocalStore, ObjectEntry, Store, open_store
from lightning_stream.stores.local import sweep_drafts
from lightning_stream.version_log import CHANGES, Edit, Version, commit, older_entries, publish, read_newest
from lightning_stream.writer.local_file import write_file

Place: TypeAlias = "str | os.PathLike[str]"
Out: TypeAlias = "Place | tuple[Place, Place]"
Mode: TypeAlias = Literal["new", "append", "edit", "overwrite", "merge"]

_KEPT = r"index\.[0-9a-f]{16}\.json"
_SHARD = r"shard\.[0-9]{5,}(\.[0-9a-f]{16})?\.(mds|json|csv|tsv|xsv)(\.meta)?(\.[a-z0-9]+)?"
LENGTHS = r"lengths\.[A-Za-z0-9_=-]+(\.[0-9a-f]{16})?\.[0-9]{5,}\.bin"
_LOG = logging.getLogger(__name__)
_DELETED = r"deleted\.[0-9a-f]{16}\.bin"
OURS = re.compile(f"{_KEPT}|{_SHARD}|{LENGTHS}|{_DELETED}|{CHANGES}")
MANIFEST = "manifest.json"  # a conversion puts it beside the index
_OURS_AND_MANIFEST = re.compile(f"{OURS.pattern}|{re.escape(MANIFEST)}")
_NUMBERED = re.compile(r"shard\.([0-9]+)\.")


@dataclass(frozen=True)
class Seen:
    """An object as a writer found it when it began; both fields are None if there was no object."""

    data: bytes | None = None
    version: str | None = None

    @classmethod
    def of(cls, store: Store, name: str) -> Seen:
        """Read an object with its version."""
        with contextlib.suppress(errors.NotFoundError), store.open(name) as body:
            return cls(b"".join(body), body.version)
        return cls()


class DatasetPlace:
    """A local folder, a remote store, or both: `begin`, `put_shard` and `commit` change the dataset there as a whole.

    It can be pickled before `begin`. Threads may put shards at the same time. The arguments are those of `MDSWriter`;
    the local folder of a pair is only written with ``keep_local``.

    Attributes:
        local, remote: The local folder and the URL of `out`; None where it has none.
        mode, base: The mode given to `begin`; the index of the dataset that is appended to, None in the other modes.
        put_names: The names of the shard files that were put.
    """

    def __init__(self, out: Any, keep_local: bool = False, store_options: Mapping[str, Any] | None = None) -> None:
        places = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        named = all(isinstance(place, (str, os.PathLike)) and str(place) for place in places)
        if not named or len(places) not in (1, 2):
            raise ValueError(f"out must be a path, a URL, or (local path, URL); got {errors.redact(repr(out))}.")
        urls = [os.path.expanduser(place) for place in places]  # noqa: PTH111 - may be URLs
        if len(urls) == 2 and (is_remote(urls[0]) or urls[0] == urls[1]):
            raise ValueError(f"out as a pair must be (local path, URL), two places; got {errors.redact(repr(out))}.")
        self.local = next((url for url in urls if not is_remote(url)), None)
        self.remote = next((url for url in urls[::-1] if len(urls) == 2 or is_remote(url)), None)
        self.keep_local = keep_local
        self._urls = urls[::-1] if keep_local else urls[-1:]
        self._options = store_options
        self.mode: Mode = "new"
        self.base: Index | None = None
        self.put_names: list[str] = []
        self._version: Version | None = None
        self._message = self._key = ""
        self._begun_with: dict[str, list[Seen]] = {}
        self._former: list[set[str]] = []

    @property
    def is_local(self) -> bool:
        """Whether all files go to local folders."""
        return not any(map(is_remote, self._urls))

    @cached_property
    def stores(self) -> list[Store]:
        """The stores that files are put into. The first one keeps the dataset: the remote one of a pair."""
        return [open_store(url, self._options if is_remote(url) else None) for url in self._urls]

    @property
    def store(self) -> Store:
        """The first store."""
        return self.stores[0]

    def begin(self, mode: Mode, also: Iterable[str] = ()) -> None:
        """Read the index that is there, and the objects `also`, which will be swapped too, before anything is written.

        ``"new"``: FileExistsError if there are files. ``"append"``: shards are added; ValueError if there is no
        dataset, or the places of a pair hold different ones. ``"edit"``: the same, for `commit_edit`.
        ``"overwrite"``: `commit` replaces the dataset. ``"merge"``: only the index is put.
        """
        self.mode = mode
        for store in self.stores:
            if isinstance(store, LocalStore):
                for folder in (store.folder, *store.folder.glob("versions/*")):
                    sweep_drafts(folder)
            first = next(_listed(store), None) if mode == "new" else None
            if first is not None:
                raise FileExistsError(
                    f"{store.url} is not empty: it holds {first.name!r}. Write to a new place, or pass overwrite=True "
                    "to replace the dataset there, or append=True to add shards to it."
                )
        for name in (INDEX_NAME, *also):
            self._begun_with[name] = [Seen() if mode == "new" else Seen.of(store, name) for store in self.stores]
        self._former = [_former_files(store) for store in self.stores] if mode == "overwrite" else []
        if mode not in ("append", "edit"):
            return
        base, *others = (seen.data for seen in self._begun_with[INDEX_NAME])
        if base is None:
            raise ValueError(f"append=True needs a dataset; {self.store.url} has no {INDEX_NAME}.")
        self._version = read_newest(self.store)
        self.base = self._version.index
        if any(text is None for text in others) or any(
            read_newest(store).index.data != self.base.data for store in self.stores[1:]
        ):
            raise ValueError(
                "both places of a pair must hold the dataset that is appended to. Pass keep_local=False, or copy it "
                f"from {self.store.url} to {self.stores[1].url}."
            )

    @property
    def files_begun_with(self) -> set[str]:
        """The files of the dataset that was there when the writer began."""
        with contextlib.suppress(errors.NotFoundError, errors.FormatError):
            return listed_files(read_newest(self.store).index.data)
        return set()

    def partition(self, folder: str) -> Store:
        """Return the store of a folder below."""
        return open_store(f"{self._urls[0].rstrip('/')}/{folder}", self._options if is_remote(self._urls[0]) else None)

    def note(self, message: str, key: str | None) -> None:
        """Set what `commit` writes into the log with an append: a message, and the append's key."""
        self._message, self._key = message, key or ""

    @cached_property
    def next_shard(self) -> int:
        """The number of the first new shard."""
        base = self.base
        names = () if base is None else (base.entry(shard).raw.basename for shard in range(len(base)))
        return 1 + max((int(found[1]) for name in names if (found := _NUMBERED.match(name))), default=-1)

    def name_of(self, name: str, parts: Sequence[Any]) -> str:
        """Return the name of a file of samples: ``shard.00007.mds``, or ``shard.00007.<16 hex digits>.mds``.

        The digits come from the file's bytes and, if the dataset is replaced, from the index that the writer began
        with: at most one of the writers that could have put a file of this name will win, so the others may delete it.
        Several writers that append may win. So their digits come from the append's key, which the log has only once,
        or from random ones.
        """
        if self.mode == "new":
            return name
        stem, number, rest = name.split(".", 2)
        return f"{stem}.{number}.{digest_of(self._name_salt, *parts)}.{rest}"

    @cached_property
    def _name_salt(self) -> bytes:
        if self.mode == "append":
            return self._key.encode() or secrets.token_bytes(16)
        if self._version is not None:
            return f"{self._version.root} {self._version.number}".encode()
        return digest_of(self._begun_with[INDEX_NAME][0].data or b"").encode()

    def put_shard(self, name: str, parts: Sequence[Any]) -> None:
        """Put one file of a shard, or of lengths, under a name by `name_of`.

        FileExistsError if another writer has put that name.
        """
        for store in self.stores:
            try:
                if isinstance(store, LocalStore):
                    with store.translate_errors(name):
                        write_file(store.folder / name, parts)
                else:
                    store.put(name, b"".join(parts), if_absent=True)
            except errors.AlreadyExistsError:  # noqa: PERF203 (a pair has two stores)
                if self.mode == "new":
                    raise errors.AlreadyExistsError(_another(f"{store.url} holds {name!r} already")) from None
        self.put_names.append(name)

    def commit(self, entries: Sequence[bytes], lengths: Mapping[str, Sequence[FileEntry]]) -> bool:
        """Put the index of these shards, given as JSON texts; in append mode it lists them after those that are there.

        `lengths` has the files of the lengths of all samples, by name. It returns False, and the shards are deleted, if
        the log has an append of the same key already.

        Raises:
            FileExistsError, ConflictError: Another writer has replaced the dataset since this one began, or appended
                samples of other columns. That dataset stays, and the shards of this writer are deleted.
        """
        base = self.base
        if base is None:
            index = index_text(entries)
            self.commit_index(with_lengths(index, lengths))
            return True
        if not entries and not self._key:
            return True
        added = {name: files[len(base.lengths.get(name, ())) :] for name, files in lengths.items()}
        change = Edit("append", entries, added, self._message, self._key)

        def edit(version: Version) -> Edit:
            now = version.index
            if base.num_samples and not (now.columns == base.columns and now.lengths.keys() == base.lengths.keys()):
                raise errors.ConflictError(f"{self.store.url} has other columns or lengths since this writer began")
            return change

        return self._commit(edit)

    def commit_edit(self, edit: Edit | Callable[[Version], Edit]) -> None:
        """Put a change of the version at `begin`, else ConflictError; in append mode, a function's of the newest."""
        self._commit(edit if callable(edit) else lambda _: edit)

    def _commit(self, edit: Callable[[Version], Edit]) -> bool:
        """Put a change in the log of each store. In a pair, both places must have the same shards: one writer wins."""
        assert self._version is not None
        is_new = True
        retries = self.mode == "append" and len(self.stores) == 1
        for number, store in enumerate(self.stores):
            try:
                new = commit(store, self._version, edit, retries=retries)
            except errors.AlreadyExistsError:  # an append of this key is there
                is_new = False
                self._withdraw(store)
                new = read_newest(store)  # its writer may have been killed before it was published
            except errors.ConflictError as error:
                self._refused(number, str(error), error)
            publish(store, new, always=False)
        return is_new

    def commit_index(self, index: bytes) -> None:
        """Swap the index. In overwrite mode, then delete the former dataset, and what killed writers left."""
        if self.mode != "overwrite":
            self.swap(INDEX_NAME, index)
            return
        before = self.listing()
        for store, names in zip(self.stores, before, strict=True):
            if MANIFEST in names and not _is_manifest(Seen.of(store, MANIFEST).data, names):
                del names[MANIFEST]  # another program's file: it stays
        self.swap(INDEX_NAME, index)
        self.sweep(before, _OURS_AND_MANIFEST, listed_files(index))

    def listing(self) -> list[dict[str, int]]:
        """Bytes by name of all files, one dict per store; of a store that refuses to list, those of its dataset."""
        return [{entry.name: entry.num_bytes for entry in _listed(store)} for store in self.stores]

    def swap(self, name: str, data: bytes) -> None:
        """Put an object if the one there is still what `begin` found; else FileExistsError or ConflictError."""
        for number, (store, seen) in enumerate(zip(self.stores, self._begun_with[name], strict=True)):
            try:
                if seen.data is None:
                    store.put(name, data, if_absent=True)
                else:
                    store.put(name, data, if_version=seen.version)
            except (errors.AlreadyExistsError, errors.ConflictError) as error:  # noqa: PERF203 (a pair has two stores)
                if self.mode == "merge" and Seen.of(store, name).data == data:  # another rank merged the same
                    continue
                self._refused(number, f"{store.url}/{name} changed since this writer began", error)

    def _refused(self, number: int, found: str, error: errors.StoreError) -> NoReturn:
        """Delete the files of this writer in the stores that refused it, those from a number on, and raise."""
        for loser in self.stores[number:]:
            self._withdraw(loser)
        text = _another(found)
        if number:
            text += f" {self.store.url} was changed before, and holds the dataset of this writer. Decide which "
            text += f"of the two datasets to keep, and copy it to the other place: {self}."
        raise type(error)(text) from error

    def _withdraw(self, store: Store) -> None:
        """Delete the files of this writer, whose commit failed, except those that the dataset now lists."""
        listed: set[str] = set()
        with contextlib.suppress(errors.NotFoundError, errors.FormatError):
            listed = listed_files(read_newest(store).index.data)
        for name in self.put_names:
            if name not in listed:
                store.delete(name)

    def sweep(
        self, before: Sequence[Collection[str]], ours: re.Pattern[str], keep: Collection[str], *, former: bool = True
    ) -> None:
        """Delete files after a swap: those that match `ours`, and those of all versions that were there at `begin`.

        `before` has the names before the swap, one collection per store. The names in `keep` stay, and the versions
        that were there at `begin` if `former` is False. Folders with an index of their own are other datasets, and
        stay. A file that cannot be deleted is logged.
        """
        for store, names, listed in zip(self.stores, before, self._former, strict=True):
            kept = keep if former else listed.union(keep)
            indexes = [name for name in names if name.endswith(f"/{INDEX_NAME}") and not ours.fullmatch(name)]
            others = tuple(name.removesuffix(INDEX_NAME) for name in indexes)
            gone = [name for name in names if name not in kept and (name in listed or ours.fullmatch(name))]
            gone = [name for name in gone if not name.startswith(others)]
            gone.sort(key=lambda name: not name.endswith(".json"))  # no index outlives its shards
            try:
                for name in gone:
                    store.delete(name)
            except errors.StoreError as error:
                _LOG.warning("%s is written; up to %d old files could not be deleted: %s", self, len(gone), error)
            if isinstance(store, LocalStore):
                _sweep_folders(store, gone)

    def __str__(self) -> str:
        return " and ".join(store.url for store in self.stores)


def _listed(store: Store) -> Iterator[ObjectEntry]:
    """List all files; if the store refuses to list, the index and the files that it lists."""
    try:
        yield from store.list("")
    except (errors.UnavailableError, errors.NotFoundError):
        raise
    except errors.StoreError:  # no right to list, or a web server
        index = Seen.of(store, INDEX_NAME).data
        if index is not None:
            yield from (ObjectEntry(name, 0) for name in (INDEX_NAME, *listed_files(index)))


def _former_files(store: Store) -> set[str]:
    """The files that any version of the dataset lists; none if there is no dataset."""
    with contextlib.suppress(errors.NotFoundError, errors.FormatError):
        older = index_text(older_entries(store))
        return listed_files(read_newest(store).index.data) | listed_files(older)
    return listed_files(Seen.of(store, INDEX_NAME).data)


def _is_manifest(data: bytes | None, names: Collection[str]) -> bool:
    """Whether this is the manifest of a conversion, and describes no dataset in a folder of its own."""
    try:
        found = json.loads(data or b"null")
    except ValueError:
        return False
    if not isinstance(found, dict) or not {"fingerprint", "index", "partitions"} <= set(found):
        return False
    return not any(f"{part}/{INDEX_NAME}" in names for part in found["partitions"])


def _sweep_folders(store: LocalStore, gone: Iterable[str]) -> None:
    """Remove dead drafts in the folder and in those directly below, and folders that are empty without `gone`."""
    below = [Path(entry.path) for entry in os.scandir(store.folder) if entry.is_dir()]
    drafts = {folder for folder in (store.folder, *below) if sweep_drafts(folder)}
    emptied = {folder for name in gone for folder in (store.folder / name).parents} | drafts
    for folder in sorted((one for one in emptied if store.folder in one.parents), reverse=True):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def listed_files(index: bytes | None) -> set[str]:
    """Return the files that an index lists; none if it is not an index, since then there is no dataset."""
    try:
        found = Index.from_bytes(index or b"", INDEX_NAME)
    except errors.FormatError:
        return set()
    entries = chain.from_iterable(map(found.entries, range(len(found))))
    names = {file.basename for entry in entries for pair in entry.files for file in pair if file is not None}
    with contextlib.suppress(errors.FormatError):  # wrong lengths do not make shards of another dataset
        names |= {file.basename for files in found.lengths.values() for file in files}
    return names


def digest_of(*parts: Any) -> str:
    """Return 16 hex digits that identify these bytes."""
    return digest_parts(["xxh3_128"], parts)["xxh3_128"][:16]


def is_remote(url: str) -> bool:
    """Whether this is the URL of a store, and not a folder."""
    return url.startswith("dbfs:") or ("://" in url and not url.startswith("file://"))


def _another(found: str) -> str:
    return (
        f"{found}: another writer is or was at work at this place. Its dataset stays, without the shards of this "
        "writer. Let one process write at a time, then write again: with append=True to add shards, with "
        "overwrite=True to replace the dataset."
    )
