"""The log of a dataset's versions, which readers and writers share; docs/storage.md explains it.

A version is index.json with all changes after it. A change is a small file ``versions/<root>/<number>.json`` that is
put once, and only if there is none of that number: that put is the commit, so of several writers each gets a number of
its own. `root` has 16 digits of the digest of the index that the log begins with: the changes of a dataset that was
overwritten belong to no other one. index.json is published again from time to time, for other MDS readers; its key
``"versions"`` then has the number of the last change that it contains.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from lightning_stream.formats.index import INDEX_NAME, FileEntry, Index, version_name
from lightning_stream.formats.model import to_text, with_keys
from lightning_stream.stores import Store
from lightning_stream.threads import DaemonPool

from .errors import (
    AccessError,
    AlreadyExistsError,
    ConflictError,
    FormatError,
    NotFoundError,
    StoreError,
    UnavailableError,
)

Operation: TypeAlias = Literal["append", "lengths", "delete", "column", "compact"]
Lengths: TypeAlias = "Mapping[str, Sequence[FileEntry]]"
Known: TypeAlias = Callable[["str | None"], "Index | None"]  # from the version of index.json to the index made of it
CHANGES = r"versions/[0-9a-f]{16}/[0-9]{8,}\.json"
_DIGITS = 16
_AT_ONCE = 16  # changes that are read at the same time
_PUBLISHED_BYTES = 1 << 20  # an index up to this size is published by each commit: 3,000 shards
_PUBLISHED_EVERY = 128  # larger ones by each 128th: a reader reads at most so many changes


class Change(msgspec.Struct, frozen=True, gc=False):
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
    digest: str
    operation: Operation
    samples: int
    num_shards: int
    time: str
    writer: str
    message: str = ""
    key: str = ""
    shards: list[msgspec.Raw] = []
    lengths: msgspec.Raw = msgspec.Raw(b"{}")
    deleted: msgspec.Raw = msgspec.Raw(b"null")
    format: Literal[1] = 1


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


class _Origin(msgspec.Struct, omit_defaults=True):
    root: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    number: Annotated[int, msgspec.Meta(ge=0)]
    keys: tuple[str, ...] = ()
    is_announced: bool = False  # there are changes, though the number is 0


class _Top(msgspec.Struct):
    versions: _Origin | None = None


class _Contents(msgspec.Struct):
    shards: list[msgspec.Raw]
    joined: list[msgspec.Raw] = []
    lengths: dict[str, list[msgspec.Raw]] = {}


def read_newest(store: Store, known: Known | None = None) -> Version:
    """Read the newest version. ``known`` may return an index made of the published one that is there, to save reading.

    Raises:
        NotFoundError: There is no index.json.
        FormatError: It is no index, or the log is damaged.
        AccessError: A change must not be read, or the store does not tell whether there is a newer one.
    """
    return _later(store, _published(store, known))


def read_index(store: Store, name: str = INDEX_NAME) -> Index:
    """Read the index of the newest version or, by the name of `version_name`, that of another version.

    NotFoundError if the dataset has no such version.
    """
    if name == INDEX_NAME:
        return read_newest(store).index
    digits = name.removeprefix("index.").removesuffix(".json")
    with contextlib.suppress(StoreError, FormatError):  # only the first version has such a file; see `_change_at`
        index = Index.from_bytes(store.read(name), f"{store.url}/{name}")
        if index.digest.startswith(digits):
            return index
    return read_version(store, digits).index


def read_version(store: Store, wanted: str | int) -> Version:
    """Read a version by its number, or by the first digits of its digest; NotFoundError if there is none.

    It needs the right to read the changes up to that version only.
    """
    base = _published(store)
    changes, error = _readable_changes(store, base.root, 1, base)
    digests = [base.root, *(change.digest for change in changes)]
    if isinstance(wanted, int):
        found = [wanted] if 0 <= wanted < len(digests) else []
    else:
        found = [number for number, digest in enumerate(digests) if digest.startswith(wanted[: len(digest)])]
    if not found and isinstance(error, AccessError):
        raise error
    if not found:
        known = ", ".join(dict.fromkeys(digest[:_DIGITS] for digest in digests[::-1]))
        raise NotFoundError(
            f"version must be one that the dataset has: {store.url} has no {wanted!r}, but {known}, from the newest to "
            f"the oldest, numbers {len(changes)} to 0. A dataset that was overwritten keeps no version."
        )
    number = found[-1]
    if number < base.number:
        name = version_name(base.root)
        base = Version(base.root, 0, Index.from_bytes(store.read(name), f"{store.url}/{name}"))
    return _with(base, changes[base.number : number], store.url)


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
    found = [bytes(text) for change in changes for text in change.shards]
    if base.number:
        name = version_name(base.root)
        first = Index.from_bytes(store.read(name), f"{store.url}/{name}")
        found += map(first.text, range(len(first)))
    return found


def commit(store: Store, base: Version, edit: Callable[[Version], Edit], *, retries: bool = True) -> Version:
    """Put a change after the newest version, and return the version that it makes. It is published by `publish`.

    Args:
        store: The dataset.
        base: The version that the writer began with.
        edit: What to change in a version: it gets `base`, and again each newer one that other writers put first. It
            may raise ConflictError.
        retries: Whether to continue after another writer's change; else ConflictError.

    Raises:
        ConflictError: The dataset was overwritten meanwhile, or `edit` does not fit a newer version.
        AlreadyExistsError: The log has a change of this key.
    """
    version, writer = base, secrets.token_hex(8)
    while True:
        wanted = edit(version)
        if wanted.key and wanted.key in version.keys:
            raise AlreadyExistsError(f"{store.url} has a change of the key {wanted.key!r} already.")
        change = _change(version, wanted, writer)
        new = _with(version, [change], store.url, is_new=True)
        change = msgspec.structs.replace(
            change,
            digest=new.index.digest,
            samples=new.index.num_samples - new.index.num_deleted,
            num_shards=new.index.num_shards,
        )
        name, data = _name(version.root, change.number), msgspec.json.encode(change)
        try:
            store.put(name, data, if_absent=True)
        except AlreadyExistsError:
            if store.read(name) != data:  # else it is ours: the answer to the first attempt was lost
                later = _later(store, version)
                if not retries or later.number == version.number:
                    raise ConflictError(f"{store.url} has a newer version than this writer began with") from None
                version = later
                continue
        if not _is_current(store, base):
            store.delete(name)
            raise ConflictError(f"{store.url} was overwritten since this writer began")
        return new


def publish(store: Store, version: Version, *, always: bool = True) -> None:
    """Put index.json as this version has it, for other MDS readers, unless it is as new already.

    Without `always`, only where that costs little: for a small index, and for each 128th version of a large one. In
    between, index.json says that there are changes, so that a reader that is refused one knows it.
    """
    is_costly = len(version.index.data) > _PUBLISHED_BYTES and version.number % _PUBLISHED_EVERY
    if is_costly and not always and version.is_announced:
        return
    while True:
        there = _published(store)
        if there.root != version.root or there.number >= version.number:
            return
        if there.number == 0:
            with contextlib.suppress(AlreadyExistsError):
                store.put(version_name(there.root), there.index.data, if_absent=True)
        text = version.index.data
        if is_costly and not always:
            if there.is_announced:
                return
            origin = _Origin(there.root, 0, there.keys, is_announced=True)
            text = with_keys(there.index.data, {"versions": msgspec.json.encode(origin)})
        try:
            store.put(INDEX_NAME, text, if_version=there.published)
        except ConflictError:
            continue
        return


def with_first_key(index: bytes, key: str) -> bytes:
    """Return the text of a new dataset's index with the key of the change that made the dataset."""
    root = Index.from_bytes(index, INDEX_NAME).digest[:_DIGITS]
    return with_keys(index, {"versions": msgspec.json.encode(_Origin(root, 0, (key,)))})


def without_versions(index: bytes) -> bytes:
    """Return the text of an index without its lengths and its place in a log: that of its first writer."""
    return with_keys(index, {"lengths": None, "versions": None})


def _published(store: Store, known: Known | None = None) -> Version:
    """The version that index.json has, or a later one of the same log that is known."""
    with store.open(INDEX_NAME) as body:
        where = f"{store.url}/{INDEX_NAME}"
        index = (known and known(body.version)) or Index.from_bytes(b"".join(body), where)
    origin = _parsed(index.data, _Top, where).versions or _Origin(index.digest[:_DIGITS], 0)
    is_announced = origin.is_announced or origin.number > 0
    return Version(origin.root, origin.number, index, origin.keys, body.version, is_announced)


def _is_current(store: Store, version: Version) -> bool:
    """Whether index.json still belongs to the log of a version."""
    with contextlib.suppress(NotFoundError):
        if version.published is not None:
            with store.open(INDEX_NAME, 0, 1) as body:
                if body.version == version.published:
                    return True
        return _published(store).root == version.root
    return False


def _later(store: Store, version: Version) -> Version:
    """The newest version, from an older one."""
    return _with(version, read_changes(store, version.root, version.number + 1, version), store.url)


def _readable_changes(
    store: Store, root: str, first: int, base: Version | None
) -> tuple[list[Change], AccessError | FormatError | None]:
    """The changes from a number on, and the error if there is, or may be, a further one; see `read_changes`."""
    changes: list[Change] = []
    answers = [_change_at(store, root, first)]
    if isinstance(answers[0], Change):  # else no thread is started, as usual
        with DaemonPool(_AT_ONCE, "versions") as pool:
            while isinstance(answers[0], Change):
                changes += _leading(answers)
                begin = first + len(changes)
                reads = [pool.submit(_change_at, store, root, number) for number in range(begin, begin + _AT_ONCE)]
                answers = [read.result() for read in reads]
                if answers[0] is None and any(answers):  # committed meanwhile, or lost
                    answers[0] = _change_at(store, root, begin)
    answer, number = answers[0], first + len(changes)
    name, is_changed = _name(root, number), bool(changes) or base is None or base.number > 0 or base.is_announced
    must_exist = any(isinstance(later, Change) for later in answers) or (base is not None and number <= base.number)
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


def _leading(answers: Iterable[Change | AccessError | None]) -> Iterator[Change]:
    """The changes before the first answer that is none."""
    for answer in answers:
        if not isinstance(answer, Change):
            return
        yield answer


def is_listed(store: Store, name: str, *, unknown: bool) -> bool:
    """Whether there is an object of that name; ``unknown`` where the store cannot be listed."""
    try:
        return any(entry.name == name for entry in store.list(name))
    except UnavailableError:
        raise
    except StoreError:  # no right to list, or a web server
        return unknown


def _change_at(store: Store, root: str, number: int) -> Change | AccessError | None:
    """The change of a number; None if there is none, and the error where the answer does not tell.

    A bucket that may not be listed refuses access to what is absent, and a web server may send a page.
    """
    name = _name(root, number)
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


def _parsed(data: bytes | msgspec.Raw, kind: Any, where: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{where}: versions of a dataset must be described in JSON as this release writes it; {error}. Install a "
            "newer release, or restore the file."
        ) from error


def _change(version: Version, edit: Edit, writer: str) -> Change:
    return Change(
        version.number + 1,
        version.index.digest,
        digest="",
        operation=edit.operation,
        samples=0,
        num_shards=0,
        time=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        writer=writer,
        message=edit.message,
        key=edit.key,
        shards=[msgspec.Raw(text) for text in edit.shards],
        lengths=msgspec.Raw(to_text(edit.lengths)),
        deleted=msgspec.Raw(b"null" if edit.deleted is None else to_text(edit.deleted)),
    )


def _with(version: Version, changes: Sequence[Change], where: str, *, is_new: bool = False) -> Version:
    """The version that these changes make of another one; FormatError unless they continue it."""
    if not changes:
        return version
    index = version.index
    contents: _Contents = _parsed(index.data, _Contents, index.where)
    digest, lengths = index.digest, contents.lengths
    keys: dict[str, bytes | None] = {}
    for number, change in enumerate(changes, version.number + 1):
        if change.number != number or change.parent != digest:
            raise FormatError(
                f"{where}: change {number} must follow version {digest[:_DIGITS]}; found number {change.number} after "
                f"{change.parent[:_DIGITS]}. Files below versions/ were changed: restore them."
            )
        digest = change.digest
        added = _parsed(change.lengths, dict[str, list[msgspec.Raw]], f"{where}/{_name(version.root, number)}")
        if change.operation == "append":
            contents.shards += change.shards
            lengths = {name: [*lengths.get(name, ()), *added.get(name, ())] for name in {**lengths, **added}}
        elif change.operation == "lengths":
            lengths = added
        elif change.operation == "column":
            contents.joined = [*contents.joined, msgspec.Raw(_array(change.shards))]
            keys["joined"] = _array(contents.joined)
        elif change.operation == "compact":
            contents.shards, contents.joined, lengths = list(change.shards), [], added
            keys |= {"deleted": None, "joined": None}
        else:
            keys["deleted"] = bytes(change.deleted)
    if any(change.operation in ("append", "compact") for change in changes):
        keys["shards"] = _array(contents.shards)
    listed = {name: _array(files) for name, files in lengths.items()}
    known = (*version.keys, *(change.key for change in changes if change.key))
    origin = _Origin(version.root, changes[-1].number, known)
    keys |= {"lengths": _object(listed) if listed else None, "versions": msgspec.json.encode(origin)}
    made = Index.from_bytes(with_keys(index.data, keys), index.where)
    if not is_new and made.digest != digest:
        raise FormatError(
            f"{where}: version {changes[-1].number} must have the digest {digest[:_DIGITS]}; its shards have "
            f"{made.digest[:_DIGITS]}. Files below versions/ were changed: restore them."
        )
    return Version(origin.root, origin.number, made, known, version.published, version.is_announced)


def _array(texts: Iterable[msgspec.Raw]) -> bytes:
    return b"[" + b", ".join(map(bytes, texts)) + b"]"


def _object(texts: Mapping[str, bytes]) -> bytes:
    return b"{" + b", ".join(msgspec.json.encode(name) + b": " + text for name, text in texts.items()) + b"}"


def _name(root: str, number: int) -> str:
    return f"versions/{root}/{number:08}.json"
