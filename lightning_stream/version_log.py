"""The log of a dataset's versions, which readers and writers share; docs/storage.md explains it.

A version is index.json with all changes after it. A change is a small file ``versions/<root>/<number>.json`` that is
put once, and only if there is none of that number: that put is the commit, so of several writers each gets a number of
its own. `root` has 16 digits of the digest of the index that the log begins with: the changes of a dataset that was
overwritten belong to no other one. index.json is published again from time to time, for other MDS readers; its key
``"versions"`` then has the number of the last change that it contains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain, takewhile
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct, structs

from .errors import (
    AccessError,
    AlreadyExistsError,
    ConflictError,
    FormatError,
    NotFoundError,
    StoreError,
    UnavailableError,
)
from .formats.index import INDEX_NAME, FileEntry, Index, version_name
from .formats.model import Text, array_text, index_text, object_text, to_text, with_keys
from .stores import Store
from .threads import DaemonPool

Operation: TypeAlias = Literal["append", "lengths", "delete", "column", "compact"]
Lengths: TypeAlias = "Mapping[str, Sequence[FileEntry]]"
Known: TypeAlias = Callable[["str | None"], "Index | None"]  # from the version of index.json to the index made of it
CHANGES = r"versions/[0-9a-f]{16}/[0-9]{8,}\.json"
_DIGITS = 16
_LEAST_DIGITS = 6  # of a digest, by which a user names a version
_NOTHING = Raw(b"null")
_AT_ONCE = 16  # changes that are read at the same time
_PUBLISHED_BYTES = 1 << 20  # an index up to this size is published by each commit: 3,000 shards
_PUBLISHED_EVERY = 128  # larger ones by each 128th: a reader reads at most so many changes


class Change(Struct, frozen=True, gc=False):
    """One commit as it is in the log.

    Attributes:
        number, parent, digest: Its number, the digest of the version before it, and of the version that it makes.
        operation: ``"append"`` adds shards and files of lengths; ``"lengths"`` replaces all files of lengths;
            ``"delete"`` replaces the file of deleted samples; ``"column"`` joins shards with a further column to the
            first shards; ``"compact"`` replaces shards and lengths, and has neither deleted samples nor joined shards.
        samples, num_shards: Those of the version that it makes.
        time, message, key: When it was made, in UTC; what its writer noted; a name that no other change has, or "".
        writer: Random digits of the writer, by which it knows its own change.
        shards, lengths, deleted: What it adds, as in index.json; of a ``"column"``, `shards` are those that it joins.
    """

    number: int
    parent: str
    digest: Text
    operation: Operation
    samples: int
    num_shards: int
    time: str
    writer: str
    message: str = ""
    key: str = ""
    shards: list[Raw] = []
    lengths: Raw = Raw(b"{}")
    deleted: Raw = _NOTHING
    format: Literal[1] = 1


class OtherChangeError(ConflictError):
    """The log has another change of this key."""


class Edit(NamedTuple):
    """What a writer wants to change; see `Change`."""

    operation: Operation
    shards: Sequence[bytes]
    lengths: Lengths
    message: str = ""
    key: str = ""
    deleted: FileEntry | None = None


@dataclass(frozen=True)
class Version:
    """A whole version of a dataset.

    Attributes:
        root, number, index: The log that it is in, its number there, and its index.
        keys: The keys of all changes up to it.
        published: The `ObjectStream.version` of the index.json that it was read from.
        is_announced: Whether index.json says that there are changes.
    """

    root: str
    number: int
    index: Index
    keys: tuple[str, ...] = ()
    published: str | None = None
    is_announced: bool = False


class _Place(Struct, omit_defaults=True):
    """The place of an index.json in a log: its key ``"versions"``."""

    root: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    number: Annotated[int, Meta(ge=0)]
    keys: tuple[str, ...] = ()
    is_announced: bool = False  # there are changes, though the number is 0


def read_newest(store: Store, known: Known | None = None) -> Version:
    """Read the newest version. ``known`` may return an index made of the published one that is there, to save reading.

    Raises:
        NotFoundError: There is no index.json.
        FormatError: It is no index, or the log is damaged.
        AccessError: A change must not be read, or the store does not tell whether there is a newer one.
    """
    version = _published(store, known)
    return _with(version, read_changes(store, version.root, version.number + 1, version), store.url)


def read_index(store: Store, name: str = INDEX_NAME) -> Index:
    """Read the index of the newest version or, by the name of `version_name`, that of another version.

    NotFoundError if the dataset has no such version.
    """
    if name == INDEX_NAME:
        return read_newest(store).index
    return read_version(store, name.removeprefix("index.").removesuffix(".json")).index


def version_of(text: str) -> int | str:
    """A version as a user writes it: its number, or the first digits of its digest, which are six or more."""
    return int(text) if text.isdecimal() and len(text) < _LEAST_DIGITS else text


def read_version(store: Store, wanted: str | int) -> Version:
    """Read a version by its number, or by the first digits of its digest; NotFoundError if there is none.

    It needs the right to read the changes up to that version only.
    """
    base = _published(store)
    changes, error = _readable_changes(store, base.root, 1, base)
    digests = [base.root, *(change.digest for change in changes)]
    if isinstance(wanted, int):
        matches = [wanted] if 0 <= wanted < len(digests) else []
    else:
        matches = [at for at, digest in enumerate(digests) if digest.startswith(wanted[: len(digest)])]
    if not matches and error is not None:
        raise error
    if not matches:
        known = ", ".join(dict.fromkeys(digest[:_DIGITS] for digest in digests[::-1]))
        raise NotFoundError(
            f"version must be one that the dataset has: {store.url} has no {wanted!r}, but {known}, from the newest to "
            f"the oldest, numbers {len(changes)} to 0. A dataset that was overwritten keeps no version."
        )
    version_number = matches[-1]
    if version_number < base.number:
        base = _first(store, base)
    return _with(base, changes[base.number : version_number], store.url)


def read_log(store: Store) -> tuple[Version, list[Change]]:
    """Read the version of index.json as it is published, and all changes, from the first one on."""
    base = _published(store)
    return base, read_changes(store, base.root, base=base)


def read_changes(store: Store, root: str, first: int = 1, base: Version | None = None) -> list[Change]:
    """Read the changes from a number on, several at once. `base` is the version of index.json, if it is known.

    Raises:
        AccessError: A change must not be read, or the store does not tell whether there is a further one.
        FormatError: A change is damaged, or is absent though there are later ones.
    """
    changes, error = _readable_changes(store, root, first, base)
    if error is not None:
        raise error
    return changes


def older_entries(store: Store) -> list[bytes]:
    """Return the index entries of the shards in all changes, and in the first index; errors as `read_log`."""
    base, changes = read_log(store)
    index = _first(store, base).index
    return [*map(bytes, chain.from_iterable(change.shards for change in changes)), *map(index.text, range(len(index)))]


def commit(store: Store, base: Version, edit: Callable[[Version], Edit], writer: str, *, retries: bool) -> Version:
    """Put a change after the newest version, and return the version that it makes. It is published by `publish`.

    Args:
        store: The dataset.
        base: The version that the writer began with.
        edit: What to change in a version: it gets `base`, and again each newer one that other writers put first. It
            may raise ConflictError.
        writer: Digits that no other writer has: a commit that is called again makes its change once.
        retries: Whether to continue after another writer's change; else ConflictError.

    Raises:
        ConflictError: The dataset was overwritten meanwhile, or `edit` does not fit a newer version.
        OtherChangeError: The log has another change of this key.
        AlreadyExistsError: The log has this change, by its key.
    """
    version = base
    while True:
        wanted = edit(version)
        if wanted.key and wanted.key in version.keys:
            _check_repeated(store, wanted)
            raise AlreadyExistsError(f"{store.url} has a change of the key {wanted.key!r} already.")
        change = Change(
            version.number + 1,
            version.index.digest,
            digest="",
            operation=wanted.operation,
            samples=0,
            num_shards=0,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            writer=writer,
            message=wanted.message,
            key=wanted.key,
            shards=[Raw(text) for text in wanted.shards],
            lengths=Raw(to_text(wanted.lengths)),
            deleted=Raw(to_text(wanted.deleted)),
        )
        new = _with(version, [change], store.url)
        index = new.index
        change = structs.replace(
            change, digest=index.digest, samples=index.num_samples - index.num_deleted, num_shards=index.num_shards
        )
        name = _name(version.root, change.number)
        data = msgspec.json.encode(change)
        try:
            store.put(name, data, if_absent=True)
        except StoreError as error:
            with _telling(f"Whether this change was made is not known: look at the log of {store.url} first."):
                changes = read_changes(store, version.root, change.number, version)
            # One of them is ours where the answer to an attempt was lost.
            own_ends = [end for end, later in enumerate(changes, 1) if later.writer == writer]
            if not own_ends and not isinstance(error, AlreadyExistsError):
                raise type(error)(f"{str(error).rstrip('.')}. This change was not made.") from error
            if not own_ends and not (retries and changes):
                raise ConflictError(f"{store.url} has a newer version than this writer began with") from None
            new = version = _with(version, changes[: own_ends[0]] if own_ends else changes, store.url)
            if not own_ends:
                continue
        with _telling(f"This change was made: it is version {new.number}. Do not write it again."):
            is_current = _is_current(store, base)
        if not is_current:
            store.delete(name)
            raise ConflictError(f"{store.url} was overwritten since this writer began")
        return new


def change_of(store: Store, key: str) -> tuple[Operation, Index]:
    """The operation of the change that has a key, and the shards that it added."""
    published, changes = read_log(store)
    for change in changes:
        if change.key == key:
            return change.operation, Index.from_bytes(index_text(change.shards), store.url)
    return "append", _first(store, published).index  # it made the dataset


def _check_repeated(store: Store, wanted: Edit) -> None:
    """Raise OtherChangeError unless the change of this key has the same operation and as many samples.

    Their bytes may differ: a job that is repeated may divide its samples otherwise.
    """
    operation, there = change_of(store, wanted.key)
    added = Index.from_bytes(index_text(wanted.shards), store.url)
    if (operation, there.num_samples) != (wanted.operation, added.num_samples):
        raise OtherChangeError(
            f"a change that is made again under its key must be the same one; that of {wanted.key!r} in {store.url} is "
            f'of operation "{operation}" with {there.num_samples} new samples, and this one "{wanted.operation}" with '
            f"{added.num_samples}. Nothing was changed. Pass another key; a stream of Spark whose checkpoint is older "
            "than the dataset needs a new checkpointLocation"
        )


@contextlib.contextmanager
def _telling(outcome: str) -> Iterator[None]:
    """Add to an error of the store what became of a change: a program that runs again could make it twice."""
    try:
        yield
    except StoreError as error:
        raise type(error)(f"{str(error).rstrip('.')}. {outcome}") from error


def publish(store: Store, version: Version, *, always: bool = True) -> None:
    """Put index.json as this version has it, for other MDS readers, unless it is as new already.

    Without `always`, only where that costs little: for a small index, and for each 128th version of a large one. In
    between, index.json says that there are changes, so that a reader that is refused one knows it.
    """
    is_cheap = len(version.index.data) <= _PUBLISHED_BYTES or version.number % _PUBLISHED_EVERY == 0
    puts_all = always or is_cheap
    if not puts_all and version.is_announced:
        return
    while True:
        there = _published(store)
        is_as_new = there.number >= version.number or (there.is_announced and not puts_all)
        if there.root != version.root or is_as_new:
            return
        if there.number == 0:
            with contextlib.suppress(AlreadyExistsError):
                store.put(version_name(there.root), there.index.data, if_absent=True)
        announced = _Place(there.root, 0, there.keys, is_announced=True)
        text = version.index.data if puts_all else _placed(there.index.data, announced)
        with contextlib.suppress(ConflictError):
            store.put(INDEX_NAME, text, if_version=there.published)
            return


def with_first_key(index: bytes, key: str) -> bytes:
    """Return the text of a new dataset's index with the key of the change that made the dataset."""
    root = Index.from_bytes(index, INDEX_NAME).digest[:_DIGITS]
    return _placed(index, _Place(root, 0, (key,)))


def without_versions(index: bytes) -> bytes:
    """Return the text of an index without its lengths and its place in a log: that of its first writer."""
    return with_keys(index, {"lengths": None, "versions": None})


def _published(store: Store, known: Known | None = None) -> Version:
    """The version that index.json has, or a later one of the same log that is known."""
    with store.open(INDEX_NAME) as body:
        where = f"{store.url}/{INDEX_NAME}"
        index = (known and known(body.version)) or Index.from_bytes(b"".join(body), where)
    place = _place_of(index)
    is_announced = place.is_announced or place.number > 0
    return Version(place.root, place.number, index, place.keys, body.version, is_announced)


def is_of_one_log(index: Index, other: Index) -> bool:
    """Whether two indexes are versions of one dataset: then a shard that both list is the same."""
    return _place_of(index).root == _place_of(other).root


def _place_of(index: Index) -> _Place:
    place: _Place | None = _parsed(index.versions, _Place | None, index.where)
    return place or _Place(index.digest[:_DIGITS], 0)


def _first(store: Store, published: Version) -> Version:
    """Version 0 of a log."""
    if published.number == 0:
        return published
    name = version_name(published.root)
    return Version(published.root, 0, Index.from_bytes(store.read(name), f"{store.url}/{name}"))


def _is_current(store: Store, version: Version) -> bool:
    """Whether index.json still belongs to the log of a version, which one without samples may share with others."""
    with contextlib.suppress(NotFoundError):
        if version.published is not None:
            with store.open(INDEX_NAME, 0, 1) as body:
                if body.version == version.published:
                    return True
        if _published(store).root != version.root:
            return False
        change = _change_at(store, version.root, version.number) if version.number else None
        if change is None:
            return version.number == 0
        return isinstance(change, AccessError) or change.digest == version.index.digest
    return False


def _readable_changes(
    store: Store, root: str, first: int, base: Version | None
) -> tuple[list[Change], AccessError | FormatError | None]:
    """The changes from a number on, and the error if there is, or may be, a further one; see `read_changes`."""
    changes = list[Any]()
    answers = [_change_at(store, root, first)]
    if isinstance(answers[0], Change):  # else no thread is started, as usual
        with DaemonPool(_AT_ONCE, "versions") as pool:
            while isinstance(answers[0], Change):
                changes += takewhile(lambda answer: isinstance(answer, Change), answers)
                begin = first + len(changes)
                answers = pool.map(partial(_change_at, store, root), range(begin, begin + _AT_ONCE))
                if answers[0] is None and any(answers):  # committed meanwhile, or lost
                    answers[0] = _change_at(store, root, begin)
    answer = answers[0]
    end = first + len(changes)
    name = _name(root, end)
    is_changed = bool(changes) or base is None or base.number > 0 or base.is_announced
    must_exist = any(isinstance(later, Change) for later in answers) or (base is not None and end <= base.number)
    # Older releases did not say in a large index that there are changes.
    if answer is not None and not must_exist and (is_changed or (base and len(base.index.data) > _PUBLISHED_BYTES)):
        must_exist = is_listed(store, name, unknown=is_changed)
    if not must_exist:
        return changes, None
    if answer is None:
        return changes, FormatError(
            f"{store.url}/{name}: a dataset must have all its changes; this one is absent, but there are later ones. "
            "Restore the file, or copy the dataset with its folder versions/."
        )
    return changes, AccessError(
        f"{answer} A changed dataset is read with all its changes, so this one must be readable, or it must be plain "
        "that there is none. Grant the right to read and to list versions/ (on S3 s3:GetObject and s3:ListBucket; a "
        "web server must answer 404 for what is absent), or pass the version= to read."
    )


def is_listed(store: Store, name: str, *, unknown: bool) -> bool:
    """Whether there is an object of that name; ``unknown`` where the store cannot be listed."""
    try:
        return any(entry.name == name for entry in store.list(name))
    except UnavailableError:
        raise
    except StoreError:  # no right to list, or a web server
        return unknown


def _change_at(store: Store, root: str, version_number: int) -> Change | AccessError | None:
    """The change of a number; None if there is none, and the error where the answer does not tell.

    A bucket that may not be listed refuses access to what is absent, and a web server may send a page.
    """
    name = _name(root, version_number)
    try:
        data = store.read(name)
    except NotFoundError:
        return None
    except AccessError as error:
        return error
    if data.lstrip()[:1] == b"<":
        return AccessError(f"{store.url}/{name}: the server sent a page, which is no change of the dataset.")
    change: Change = _parsed(data, Change, f"{store.url}/{name}")
    return change


def _parsed(data: bytes | Raw, kind: Any, where: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{where}: versions of a dataset must be described in JSON as this release writes it; {error}. Install a "
            "newer release, or restore the file."
        ) from error


def _with(version: Version, changes: Sequence[Change], where: str) -> Version:
    """The version that these changes make of another one; FormatError unless they continue it.

    A change that is being made has no digest so far.
    """
    if not changes:
        return version
    digest = version.index.digest
    contents = _parsed(version.index.data, _Contents, where)
    for at, change in enumerate(changes, version.number + 1):
        if change.number != at or change.parent != digest:
            raise FormatError(
                f"{where}: change {at} must follow version {digest[:_DIGITS]}; found number {change.number} after "
                f"{change.parent[:_DIGITS]}. Files below versions/ were changed: restore them."
            )
        digest = change.digest
        contents = contents.with_change(change, f"{where}/{_name(version.root, at)}")
    keys = (*version.keys, *(change.key for change in changes if change.key))
    place = _Place(version.root, changes[-1].number, keys)
    index = Index.from_bytes(with_keys(version.index.data, contents.texts(place)), version.index.where)
    if digest not in ("", index.digest):
        raise FormatError(
            f"{where}: version {place.number} must have the digest {digest[:_DIGITS]}; its shards have "
            f"{index.digest[:_DIGITS]}. Files below versions/ were changed: restore them."
        )
    return Version(place.root, place.number, index, keys, version.published, version.is_announced)


class _Contents(Struct):
    """What an index lists, as texts."""

    shards: list[Raw]
    joined: list[Raw] = []
    deleted: Raw = _NOTHING
    lengths: dict[str, list[Raw]] = {}

    def with_change(self, change: Change, where: str) -> _Contents:
        """Return these contents after a change, or others; FormatError if its lengths are no lists."""
        lengths = _parsed(change.lengths, dict[str, list[Raw]], where)
        if change.operation == "append":
            self.shards += change.shards
            for name, files in lengths.items():
                self.lengths.setdefault(name, []).extend(files)
        elif change.operation == "column":
            self.joined.append(Raw(array_text(change.shards)))
        elif change.operation == "delete":
            self.deleted = change.deleted
        elif change.operation == "lengths":
            self.lengths = lengths
        else:
            return _Contents(list(change.shards), lengths=lengths)
        return self

    def texts(self, place: _Place) -> dict[str, bytes | None]:
        """Return the keys of the index, as `with_keys` takes them."""
        lengths = {name: array_text(files) for name, files in self.lengths.items()}
        return {
            "shards": array_text(self.shards),
            "joined": array_text(self.joined) if self.joined else None,
            "deleted": None if self.deleted == _NOTHING else bytes(self.deleted),
            "lengths": object_text(lengths) if lengths else None,
            "versions": msgspec.json.encode(place),
        }


def _placed(index: bytes, place: _Place) -> bytes:
    """The text of an index with its place in a log."""
    return with_keys(index, {"versions": msgspec.json.encode(place)})


def _name(root: str, version_number: int) -> str:
    return f"versions/{root}/{version_number:08}.json"
