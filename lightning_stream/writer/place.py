"""The place of a dataset, and the one protocol by which all writers change it; README.md explains it.

Readers see a new dataset when index.json is swapped, which succeeds only if the index is still the one that the writer
began with: of several writers at once one wins. They see a change of a dataset (an append) when it is put in the log of
versions: of several writers at once, all win. A killed writer leaves the dataset as it was.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

import msgspec

from lightning_stream.errors import (
    AlreadyExistsError,
    ConflictError,
    FormatError,
    NotFoundError,
    StoreError,
    UnavailableError,
    redact,
)
from lightning_stream.formats.hashing import digest_parts
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.formats.model import index_text, with_lengths
from lightning_stream.shared_files import sweep_drafts
from lightning_stream.stores import LocalStore, ObjectEntry, Store, is_remote, open_store
from lightning_stream.version_log import (
    CHANGES,
    Edit,
    OtherChangeError,
    Version,
    commit,
    older_entries,
    publish,
    read_newest,
)

from .infer import check_appendable
from .local_file import write_file
from .pair import Pair, seen

Place: TypeAlias = "str | os.PathLike[str]"
Out: TypeAlias = "Place | tuple[Place, Place]"
Mode: TypeAlias = Literal["new", "append", "edit", "overwrite", "merge"]

_KEPT = r"index\.[0-9a-f]{16}\.json"
_SHARD = r"shard\.[0-9]{5,}(\.[0-9a-f]{16})?\.(mds|json|csv|tsv|xsv)(\.meta)?(\.seekable)?(\.[a-z0-9]+)?"
LENGTHS = r"lengths\.[A-Za-z0-9_=-]+(\.[0-9a-f]{16})?\.[0-9]{5,}\.bin"
_LOG = logging.getLogger(__name__)
_DELETED = r"deleted\.[0-9a-f]{16}\.bin"
OURS = re.compile(f"{_KEPT}|{_SHARD}|{LENGTHS}|{_DELETED}|{CHANGES}")
MANIFEST = "manifest.json"  # a conversion puts it beside the index
CONTROL = "_conversion"  # the folder of a conversion that has begun, for its note and receipts
PART = rf"part-[0-9]{{5,}}/(shard\.[0-9]+\.[0-9a-f]{{16}}\.mds(\.seekable)?(\.[a-z0-9]+)?|{LENGTHS})|{CONTROL}/.*"
_REPLACED = re.compile(f"{OURS.pattern}|{re.escape(MANIFEST)}")
_REPLACED_WITH_PARTS = re.compile(f"{_REPLACED.pattern}|{PART}")
_NUMBERED = re.compile(r"shard\.([0-9]+)\.")


class Transaction:
    """One change of a dataset as a whole, in a local folder, a remote store, or both.

    `begin` reads what is there, `part` puts a file that readers do not see, `commit` shows all of them at once, and
    `abort` deletes them, which a lost `commit` does itself. It can be pickled before `begin`. Threads may put files at
    the same time. The arguments are those of `MDSWriter`; the local folder of a pair is only written with
    ``keep_local``. Files are put into the remote store of a pair first, which keeps the dataset.

    Attributes:
        local, remote: The local folder and the URL of `out`; None where it has none.
        mode: That of `begin`.
        key: Of an append, a name that no other one has, or "".
        done: The names of the files that were put, without those that were there already.
    """

    def __init__(self, out: Any, keep_local: bool = False, store_options: Mapping[str, Any] | None = None) -> None:
        places = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        named = all(isinstance(place, (str, os.PathLike)) and str(place) for place in places)
        if not named or len(places) not in (1, 2):
            raise ValueError(f"out must be a path, a URL, or (local path, URL); got {redact(repr(out))}.")
        urls = [os.path.expanduser(place) for place in places]  # noqa: PTH111 - may be URLs
        if len(urls) == 2 and (is_remote(urls[0]) or urls[0] == urls[1]):
            raise ValueError(f"out as a pair must be (local path, URL), two places; got {redact(repr(out))}.")
        self.local = next((url for url in urls if not is_remote(url)), None)
        self.remote = next((url for url in urls[::-1] if len(urls) == 2 or is_remote(url)), None)
        self.keep_local = keep_local
        self._urls = urls[::-1] if keep_local else urls[-1:]
        self._options = store_options
        self.mode: Mode = "new"
        self.key = ""
        self._writer = secrets.token_hex(8)  # no other writer has these digits
        self.done = set[str]()
        self._version: Version | None = None
        self._seen: dict[str, tuple[bytes | None, str | None]] = {}
        self._former: dict[str, set[str]] = {}  # by the URL of a store
        self._files: dict[str, int] = {}

    @property
    def is_local(self) -> bool:
        """Whether all files go to local folders."""
        return not any(map(is_remote, self._urls))

    @cached_property
    def stores(self) -> list[Store]:
        """The stores that files are put into. The first one keeps the dataset: the remote one of a pair."""
        return [self._open(url) for url in self._urls]

    def _open(self, url: str) -> Store:
        return open_store(url, self._options if is_remote(url) else None)

    @cached_property
    def store(self) -> Store:
        """The store of the dataset; a `Pair` if it is kept at two places."""
        return Pair(*self.stores) if len(self.stores) == 2 else self.stores[0]

    @property
    def base(self) -> Index | None:
        """The index of the dataset that is appended to or edited; None in the other modes."""
        return None if self._version is None else self._version.index

    def begin(self, mode: Mode, also: Iterable[str] = ()) -> None:
        """Read the index that is there, and the objects `also`, which will be swapped too, before anything is written.

        ``"new"``: FileExistsError if there are files. ``"append"``: shards are added; ValueError if there is no
        dataset, or the places of a pair hold different ones. ``"edit"``: the same, for a change of the version that is
        there. ``"overwrite"``: `commit` replaces the dataset. ``"merge"``: only the index is put.
        """
        self.mode = mode
        for folder in self.folders:
            for below in (folder, *folder.glob("versions/*")):
                sweep_drafts(below)
        first = next(self._entries(), None) if mode == "new" else None
        if first is not None:
            raise FileExistsError(
                f"{self.store.url} is not empty: it holds {first.name!r}. Write to a new place, or pass overwrite=True "
                "to replace the dataset there, or append=True to add shards to it."
            )
        if mode not in ("append", "edit"):
            names = (INDEX_NAME, *also)
            self._seen = {name: (None, None) if mode == "new" else seen(self.store, name) for name in names}
            if mode == "overwrite":
                self._former = {store.url: _files_of_versions(store) for store in self.stores}
            return
        try:
            self._version = read_newest(self.store)
        except NotFoundError:
            raise ValueError(f"append=True needs a dataset; {self.store.url} has no {INDEX_NAME}.") from None
        if any(newest_text(store) != self._version.index.data for store in self.stores[1:]):
            raise ValueError(
                "both places of a pair must hold the dataset that is appended to. Pass keep_local=False, or copy "
                f"it from {self.stores[0].url} to {self.stores[1].url}."
            )

    @property
    def folders(self) -> list[Path]:
        """The local folders that files are put into."""
        return [store.folder for store in self.stores if isinstance(store, LocalStore)]

    @property
    def former(self) -> set[str]:
        """When a dataset is replaced, the files of all its versions."""
        return set().union(*self._former.values())

    def look(self) -> dict[str, int]:
        """List the bytes of all files by name; if the store refuses to list, the index and the files that it lists."""
        self._files = {entry.name: entry.num_bytes for entry in self._entries()}
        return self._files

    def _entries(self) -> Iterator[ObjectEntry]:
        try:
            yield from self.store.list("")
        except (UnavailableError, NotFoundError):
            raise
        except StoreError:  # no right to list, or a web server
            index = seen(self.store, INDEX_NAME)[0]
            if index is not None:
                yield from (ObjectEntry(name, 0) for name in (INDEX_NAME, *listed_files(index)))

    def partition(self, folder: str) -> Store:
        """Return the store of a folder below."""
        url = self._urls[0].rstrip("/")
        is_quoted = url.lower().startswith(("file://", "http://", "https://"))
        return self._open(f"{url}/{quote(folder) if is_quoted else folder}")

    @cached_property
    def next_shard(self) -> int:
        """The number of the first new shard."""
        base = self.base
        names = () if base is None else (entry.raw.basename for entry in base)
        return 1 + max((int(match[1]) for name in names if (match := _NUMBERED.match(name))), default=-1)

    def name_of(self, name: str, parts: Sequence[Any]) -> str:
        """Return the name of a file of samples: ``shard.00007.mds``, or ``shard.00007.<16 hex digits>.mds``.

        The digits come from the file's bytes and, if the dataset is replaced, from the index that the writer began
        with: at most one of the writers that could have put a file of this name will win, so the others may delete it.
        Several writers that append may win. So their digits come from the append's key, which the log has only once,
        or from random ones.
        """
        if self.mode == "new":
            return name
        stem, index, rest = name.split(".", 2)
        return f"{stem}.{index}.{digest_of(self._name_salt, *parts)}.{rest}"

    @cached_property
    def _name_salt(self) -> bytes:
        if self.mode == "append":
            return self.key.encode() or secrets.token_bytes(16)
        if self._version is not None:
            return f"{self._version.root} {self._version.number}".encode()
        return digest_of(self._seen[INDEX_NAME][0] or b"").encode()

    def part(self, name: str, parts: Sequence[Any]) -> None:
        """Put one file of a shard, or of lengths, under a name by `name_of`; one that is there already stays.

        AlreadyExistsError if it is there and the dataset is new: then it is another writer's.
        """
        for store in self.stores:
            try:
                if isinstance(store, LocalStore):
                    store.translated(name, write_file, store.folder / name, parts)
                else:
                    store.put(name, b"".join(parts), if_absent=True)
            except AlreadyExistsError:
                if self.mode == "new":
                    raise AlreadyExistsError(_another(f"{store.url} holds {name!r} already")) from None
            else:
                self.done.add(name)

    def commit(self, edit: Edit | Callable[[Version], Edit]) -> bool:
        """Make a change of the dataset: an append to the index of none, or in the log of the version at `begin`.

        In append mode it is a change of the newest version, for which a function makes the edit. In a pair, both places
        must have the same shards: one writer wins. It returns False, and the shards are deleted, if the log has this
        change already, by its key.

        Raises:
            FileExistsError, ConflictError: Another writer has replaced the dataset since this one began, or made a
                change that does not go with this one. That dataset stays, and the shards of this writer are deleted.
        """
        base = self._version
        if base is None:
            assert isinstance(edit, Edit)
            self.commit_index(with_lengths(index_text(edit.shards), edit.lengths))
            return True
        if isinstance(edit, Edit) and edit.operation == "append" and not (edit.shards or edit.key):
            return True
        is_new = True
        with self._or_abort():
            try:
                retries = self.mode == "append" and len(self.stores) == 1
                version = commit(
                    self.store, base, lambda version: self._fitting(edit, version), self._writer, retries=retries
                )
            except AlreadyExistsError:  # a change of this key is there
                is_new = False
                self.abort()
                version = read_newest(self.store)  # its writer may have been killed before it was published
        try:
            publish(self.store, version, always=False)
        except StoreError as error:  # an error would make a program write it again
            commands = " and ".join(f"`lightning-stream log {store.url} --publish`" for store in self.stores)
            _LOG.warning(
                "%s: the change was made; index.json, which other MDS readers read, could not be put (%s). Run %s.",
                self,
                error,
                commands,
            )
        return is_new

    def _fitting(self, edit: Edit | Callable[[Version], Edit], version: Version) -> Edit:
        """The edit of a version; ConflictError if it appends samples of other columns or lengths."""
        made = edit(version) if callable(edit) else edit
        if made.operation != "append":
            return made
        if not made.shards:
            return made._replace(lengths={})
        added = Index.from_bytes(index_text(made.shards), INDEX_NAME)
        now = version.index
        try:
            check_appendable(now, added.schemas[0].format, added.columns, made.lengths)
        except ValueError as error:
            raise ConflictError(f"{self.store.url} has other columns or lengths since this writer began") from error
        if not made.key and _ends_with(now, added):
            _LOG.warning(
                "%s: its last shards have the bytes of those that this append adds. If that is one append, made twice, "
                "pass version=%d to readers, and a key= to appends: with that, each is made once.",
                self, version.number,
            )  # fmt: skip
        return made

    def commit_index(self, index: bytes) -> None:
        """Swap the index. In overwrite mode, then delete the former dataset, and what killed writers left.

        That of a conversion too, whose note that it has begun says whose its parts are.
        """
        if self.mode != "overwrite":
            self.swap(INDEX_NAME, index)
            return
        if MANIFEST in self.look() and not _is_manifest(seen(self.store, MANIFEST)[0], self._files):
            del self._files[MANIFEST]  # another program's file: it stays
        self.swap(INDEX_NAME, index)
        has_begun = any(name.startswith(f"{CONTROL}/") for name in self._files)
        self.sweep(_REPLACED_WITH_PARTS if has_begun else _REPLACED, listed_files(index))

    def check_unchanged(self, name: str) -> None:
        """Refuse early what `swap` would refuse: another writer that was first may have deleted files of this one."""
        former = self._seen[name][0]
        with self._or_abort():
            # The main place of a pair alone: the condition for its copy stays the one of `begin`.
            if seen(self.stores[0], name)[0] != former:
                error = AlreadyExistsError if former is None else ConflictError
                raise error(f"{self.store.url} has another {name} than when this writer began")

    def swap(self, name: str, data: bytes) -> None:
        """Put an object if the one there is still what `begin` found; else FileExistsError or ConflictError."""
        former, version = self._seen[name]
        with self._or_abort():
            try:
                self.store.put(name, data, if_absent=former is None, if_version=version)
            except (AlreadyExistsError, ConflictError):
                if self.mode != "merge" or seen(self.store, name)[0] != data:  # else another rank merged the same
                    raise

    def swap_back(self, name: str, data: bytes) -> None:
        """Undo a `swap` of an object that was there, unless another writer has changed it since."""
        former = self._seen[name][0]
        there, version = seen(self.store, name)
        if former is not None and there == data:
            with contextlib.suppress(ConflictError):
                self.store.put(name, former, if_version=version)

    @contextlib.contextmanager
    def _or_abort(self) -> Iterator[None]:
        """Delete the files of this writer if another one was first, and say so."""
        try:
            yield
        except (AlreadyExistsError, ConflictError) as error:
            self.abort()
            if isinstance(error, OtherChangeError):
                raise
            raise type(error)(_another(str(error))) from error

    def abort(self) -> None:
        """Delete the files that were put, except those that the dataset now lists."""
        for store in self.stores:
            for name in self.done - listed_files(newest_text(store)):
                store.delete(name)

    def sweep(self, ours: re.Pattern[str], keep: Collection[str]) -> None:
        """Delete the files of `look` that match `ours` or are of former versions at their place, except those to keep.

        Folders with an index of their own are other datasets, and stay. A file that cannot be deleted is logged.
        """
        names = self._files
        indexes = [name for name in names if name.endswith(f"/{INDEX_NAME}") and not ours.fullmatch(name)]
        others = tuple(name.removesuffix(INDEX_NAME) for name in indexes)
        former = self.former
        gone = [name for name in names if name not in keep and (name in former or ours.fullmatch(name))]
        gone = [name for name in gone if not name.startswith(others)]
        # No index outlives its shards. The note that a conversion has begun goes last: it tells that there may be more.
        gone.sort(key=lambda name: (not name.endswith(".json"), name.endswith("/begun")))
        try:
            for name, store in product(gone, self.stores):
                if ours.fullmatch(name) or name in self._former.get(store.url, ()):
                    store.delete(name)
        except StoreError as error:
            _LOG.warning("%s is written; up to %d old files could not be deleted: %s", self, len(gone), error)
        for folder in self.folders:
            _sweep_folders(folder, gone)

    def __str__(self) -> str:
        return " and ".join(map(redact, self._urls))  # no store is opened: that may be what failed


def begun(out: Place, mode: Mode, store_options: Mapping[str, Any] | None) -> tuple[Transaction, Index]:
    """Begin a change of a dataset that exists; return it with the dataset's index. NotFoundError if there is none."""
    place = Transaction(os.fspath(out), store_options=store_options)
    if not place.store.exists(INDEX_NAME):
        raise NotFoundError(f"there is no dataset: {place.store.url} has no {INDEX_NAME}. Check the path.")
    place.begin(mode)
    assert place.base is not None
    return place, place.base


def newest_text(store: Store) -> bytes | None:
    """The text of the index of the newest version; None if there is no dataset."""
    with contextlib.suppress(NotFoundError, FormatError):
        return read_newest(store).index.data
    return None


def _files_of_versions(store: Store) -> set[str]:
    """The files that any version of the dataset lists; none if there is no dataset."""
    with contextlib.suppress(NotFoundError, FormatError):
        older = index_text(older_entries(store))
        return listed_files(read_newest(store).index.data) | listed_files(older)
    return listed_files(seen(store, INDEX_NAME)[0])


def _ends_with(index: Index, added: Index) -> bool:
    """Whether the last shards of an index have the hashes of these."""
    first = len(index) - len(added)
    if first < 0:
        return False
    hashes = [(index.entry(first + at).raw.hashes, entry.raw.hashes) for at, entry in enumerate(added)]
    return all(former and former == new for former, new in hashes)


class _Manifest(msgspec.Struct):
    fingerprint: str
    index: str
    partitions: dict[str, Any]


def _is_manifest(data: bytes | None, names: Collection[str]) -> bool:
    """Whether this is the manifest of a conversion, and describes no dataset in a folder of its own."""
    try:
        manifest = msgspec.json.decode(data or b"", type=_Manifest)
    except ValueError:
        return False
    return not any(f"{part}/{INDEX_NAME}" in names for part in manifest.partitions)


def _sweep_folders(folder: Path, gone: Iterable[str]) -> None:
    """Remove dead drafts in the folder and in those directly below, and folders that are empty without `gone`."""
    drafts = {path for path in (folder, *folder.glob("*/")) if sweep_drafts(path)}
    emptied = {path for name in gone for path in (folder / name).parents} | drafts
    for path in sorted((path for path in emptied if folder in path.parents), reverse=True):
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()


def listed_files(index: bytes | None) -> set[str]:
    """Return the files that an index lists; none if it is not an index, since then there is no dataset."""
    try:
        parsed = Index.from_bytes(index or b"", INDEX_NAME)
    except FormatError:
        return set()
    entries = chain.from_iterable(map(parsed.entries, range(len(parsed))))
    names = {file.basename for entry in entries for pair in entry.files for file in pair if file is not None}
    if parsed.deleted is not None:
        names.add(parsed.deleted.basename)
    with contextlib.suppress(FormatError):  # wrong lengths do not make shards of another dataset
        names |= {file.basename for files in parsed.lengths.values() for file in files}
    return names


def digest_of(*parts: Any) -> str:
    """Return 16 hex digits that identify these bytes."""
    return digest_parts(["xxh3_128"], parts)["xxh3_128"][:16]


def _another(reason: str) -> str:
    return (
        f"another writer is or was at work at this place: {reason.rstrip('.')}. Its dataset stays, without the shards "
        "of this writer. Let one process write at a time, then write again: with append=True to add shards, with "
        "overwrite=True to replace the dataset."
    )
