"""The files that a conversion reads: found in folders, by patterns and in stores, with what shows a change."""

from __future__ import annotations

import io
import logging
import math
import mmap
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import AccessError, FormatError, LightningStreamError, NotFoundError, redact, summarize
from lightning_stream.sources.unpackers import UNPACKERS
from lightning_stream.stores import LocalStore, ObjectEntry, Store, is_remote, open_store
from lightning_stream.stores.local import change_mark, is_other_mark
from lightning_stream.stores.transfer import Options, refuse_query
from lightning_stream.threads import DaemonPool

_log = logging.getLogger(__name__)
Uris: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
DELTA_LOG = "_delta_log/"
_BUFFER_BYTES = 1 << 22
_COPIED_BYTES = 1 << 16
WILD = re.compile(r"[*?]|\{[0-9]+\.\.[0-9]+\}")  # what makes a name a pattern
_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")
_PARTS = re.compile(rf"(\*\*/|\*|\?|{_RANGE.pattern})")
_CLOSE_BYTES = 1 << 18  # what is so near comes in one range, with the bytes between
_CONNECTIONS = 8
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # mapping all pages at once costs less than one by one
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_HIDDEN = re.compile(r"(^|/)[._]")
# What writers of tables and desktops leave beside data, which nobody misses.
_MARKER = re.compile(
    r"(^|/)(_delta_log/|_change_data/|_temporary/|_symlink_format_manifest/|_conversion/|\.lightning_stream/|\._"
    r"|(_SUCCESS|_committed_[^/]*|_started_[^/]*|_(common_)?metadata|\.[^/]*\.crc|\.DS_Store)$)"
)
_ASTRAY = re.compile(r"(^|/)\.{0,2}(/|$)|\0")  # an absolute path, an empty part, ``.``, ``..``, or a NUL
_FILE = re.compile(r"(?i)\.(parquet|pq|arrow|feather|ipc|jsonl|ndjson|json|tar|npy|npz|csv)(\.gz|\.zst)?$")
_NO_TEXT = re.compile("[\ud800-\udfff]")  # how Python shows bytes of names that are no UTF-8
# What to do where a file cannot be read, by a word of the error.
_REMEDIES = {
    "encrypt": "Write it without encryption.",
    "pickle": "Only unpickling could read it, which would run code: write it again without objects.",
    "straddl": "A row of CSV must be smaller than 4 MiB: write larger ones as JSON lines or Parquet.",
    "columns, got": "Correct the row; source_options={'on_bad': 'skip'} of convert leaves out such rows.",
    "out of bounds timestamp": "Write its times as microseconds, or omit the column by columns=.",
    "byte ranges not supported": "Columns of views need pyarrow 24 or later.",
    "nsupported": "Write it in another type, or omit it by columns=.",
    "": "It may be damaged or cut off: fetch it again.",
}


@contextmanager
def readable(where: str, *, has_arguments: bool = True) -> Iterator[None]:
    """Raise whatever a reader meets in damaged files as FormatError.

    What is no word about the data stays: our own errors, those of the system, and those of programs; with
    ``has_arguments``, plain ValueErrors too, which may be about arguments of the user's.
    """
    try:
        yield
    except (LightningStreamError, ImportError, NameError, AssertionError):
        raise
    except Exception as error:
        is_of_system = isinstance(error, OSError) and error.errno is not None
        if is_of_system or (has_arguments and type(error) is ValueError):
            raise
        remedy = next(remedy for word, remedy in _REMEDIES.items() if word in str(error))
        raise FormatError(f"{where} cannot be read: {summarize(error).rstrip('.')}. {remedy}") from error


@dataclass(frozen=True)
class SourceFile:
    """One file, local or in a store, or one input of the user's. Picklable."""

    root: str  # the folder or URL that it was found in; empty for an input
    name: str  # its path below the root
    num_bytes: int
    stamp: str  # differs between contents of the same size: the time of change, or the store's version; or empty
    value: Any = None  # the input
    mark: str = field(default="", repr=False, compare=False)  # of a local file: see `change_mark`
    store: Store | None = field(default=None, repr=False, compare=False)  # of the root, or of a folder above it

    def __post_init__(self) -> None:
        if self.root and (not isinstance(self.name, str) or _ASTRAY.search(self.name)):
            raise _leaving(self.name, self.root)

    @property
    def path(self) -> Path | None:
        """Its path, if it is on this machine."""
        return Path(self.root) / self.name if self.root and not is_remote(self.root) else None

    @property
    def uri(self) -> str:
        """Its full path or URL, or the input, for messages."""
        return redact(f"input {self.name} ({self.value!r:.80})" if not self.root else f"{self.root}/{self.name}")

    @property
    def content(self) -> tuple[str, str, int, str]:
        """What distinguishes its content from that of other files, and from its own after a change."""
        return self.root, self.name, self.num_bytes, self.stamp + self.mark

    @property
    def ending(self) -> str:
        """The lower-case suffix of its kind, without that of its compression."""
        suffix = _suffix(self.name)
        return _suffix(self.name[: -len(suffix)]) if self.is_packed and suffix != ".tgz" else suffix

    @property
    def is_packed(self) -> bool:
        """Whether it is compressed as a whole, so that it can only be read from its beginning."""
        return _suffix(self.name) in UNPACKERS

    @property
    def partition(self) -> dict[str, str | None]:
        """The columns in the names of its folders, as Spark and Hive write them: ``year=2024/part.parquet``."""
        pairs = (folder.partition("=") for folder in self.name.split("/")[:-1])
        return {unquote(key): None if text == _HIVE_NULL else unquote(text) for key, is_pair, text in pairs if is_pair}

    def check(self) -> None:
        """Raise NotFoundError or FormatError unless a file of this machine is as it was when it was listed."""
        if self.path is not None:
            self.open(0).close()

    def open(self, window: int = _BUFFER_BYTES) -> BinaryIO:
        """Its bytes, seekable, as stored. A file of this machine must be as it was when it was listed.

        Of an object in a store, ``window`` bytes or more are asked for at once.
        """
        if self.path is None:
            return io.BufferedReader(RangedFile(self, window), min(window, _COPIED_BYTES))
        try:
            file = self.path.open("rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._gone() from error
        except PermissionError as error:
            raise AccessError(f"user {os.getuid()} has no right to read {self.uri}. Check its mode.") from error
        known = os.fstat(file.fileno())
        is_other = (known.st_size, str(known.st_mtime_ns)) != (self.num_bytes, self.stamp)
        if self.stamp and (is_other or is_other_mark(self.mark, change_mark(known))):
            file.close()
            raise self.changed()
        return file

    @contextmanager
    def unpacked(self) -> Iterator[BinaryIO]:
        """Its bytes, decompressed by what its name ends with. FormatError where reading them fails."""
        make = UNPACKERS.get(_suffix(self.name), nullcontext)
        with readable(self.uri), self.open() as file, make(file) as plain:
            yield plain

    def read(self, begin: int = 0, end: int | None = None) -> bytes:
        """All of it, or its bytes [begin, end), as stored."""
        return bytes(self.view(begin, end))

    def view(self, begin: int = 0, end: int | None = None, *, is_read: bool = True) -> memoryview:
        """The same without a copy: the file is mapped where it is local, else it is one range.

        Without ``is_read``, only some of the mapped bytes are needed.

        Raises:
            FormatError: The file was changed since it was listed; in a store, as far as that has versions.
            NotFoundError: It is gone.
        """
        stop = self.num_bytes if end is None else end
        data = self._mapped(begin, stop, is_read) if self.path is not None else self._fetched(begin, stop)
        if len(data) != max(0, stop - begin):
            raise self.changed()
        return data

    def views(self, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Several parts; of an object in a store, neighbours come in one range, and several ranges at once."""
        if self.path is not None:
            data = self.view(is_read=False)
            return [data[begin:end] for begin, end in spans]
        ranges: list[tuple[int, int]] = []
        for begin, end in sorted(spans):
            if ranges and begin - ranges[-1][1] <= _CLOSE_BYTES:
                ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
            else:
                ranges.append((begin, end))
        with DaemonPool(_CONNECTIONS, "ranges") as pool:
            fetched = pool.map(lambda span: self.view(*span), ranges)
        views = []
        for begin, end in spans:
            k = bisect_right(ranges, (begin, self.num_bytes)) - 1
            first = ranges[k][0]
            views.append(fetched[k][begin - first : end - first])
        return views

    def _mapped(self, begin: int, end: int, is_read: bool) -> memoryview:
        with self.open() as opened:
            if os.fstat(opened.fileno()).st_size != self.num_bytes:
                raise self.changed()
            first = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            stop = min(end, self.num_bytes)
            if begin >= stop:
                return memoryview(b"")
            flags = mmap.MAP_SHARED | (_POPULATE if is_read else 0)
            mapped: Any = mmap.mmap(opened.fileno(), stop - first, flags, mmap.PROT_READ, offset=first)
        return memoryview(mapped)[begin - first :]

    def _fetched(self, begin: int, end: int) -> memoryview:
        if begin >= end:
            return memoryview(b"")
        store, name = self._place(self.name)
        try:
            with store.open(name, begin, end) as stream:
                # Only where the server has versions are those of a listing and of an answer the same.
                version = stream.version if store.traits.conditional_put and self.stamp else None
                if version is not None and version.strip('"') != self.stamp.strip('"'):
                    raise self.changed()
                view: memoryview = np.empty(end - begin, np.uint8).data  # joined parts would need twice the memory
                at = 0
                for chunk in stream:
                    part = chunk[: len(view) - at]
                    view[at : at + len(part)] = part
                    at += len(part)
        except NotFoundError as error:
            raise self._gone() from error
        return view[:at]

    def beside(self, name: str) -> bytes:
        """Another file below the same root, as a whole."""
        store, path = self._place(name)
        return store.read(path)

    def _place(self, name: str) -> tuple[Store, str]:
        """Where a file below the same root is."""
        assert self.store is not None
        return self.store, f"{self.root}/{name}".removeprefix(self.store.url).lstrip("/")

    def _gone(self) -> NotFoundError:
        return NotFoundError(
            f"{self.uri}: a file must stay as it was when the dataset was opened; this one is gone. Restore it, or "
            "start a new training run over the files that are there. Of a Delta table, vacuum no version that is read."
        )

    def changed(self) -> FormatError:
        """The error for a file that is another one than when it was listed."""
        return FormatError(
            f"{self.uri}: a file must stay as it was when the dataset was opened; this one was changed. Restore it, or "
            "start a new training run."
        )


Files: TypeAlias = "Sequence[SourceFile]"


def named_in_data(name: Any, root: str) -> str:
    """Return a name that was found in data, of a file below `root`; FormatError for one that could leave it anywhere.

    Neither absolute paths, ``..``, URLs, drives, backslashes nor NULs are names.
    """
    if not isinstance(name, str) or _ASTRAY.search(name) or "\\" in name or name[1:2] == ":":
        raise _leaving(name, root)
    return name


def read_below(store: Store, path: Any) -> bytes:
    """Return a file that data names by a path below a folder or URL of the user's choice; FormatError otherwise.

    A link may not lead out of a folder either.
    """
    name = path.removeprefix(f"{store.url.rstrip('/')}/").removeprefix("./") if isinstance(path, str) else path
    named_in_data(name, store.url)
    if isinstance(store, LocalStore):
        folder = os.path.realpath(store.folder)
        if os.path.commonpath([folder, os.path.realpath(store.folder / name)]) != folder:
            raise _leaving(name, store.url)
    return store.read(name)


def media_store(root: str | os.PathLike[str], beside: str, options: Options | None) -> Store:
    """Open a folder or URL of files that data names; with the options of the data's own store if it is of that kind."""
    uri = os.fspath(root)
    is_alike = uri.partition("://")[0] == beside.partition("://")[0]
    return open_store(uri, options if is_remote(uri) and is_alike else None)


def _leaving(name: Any, root: str) -> FormatError:
    return FormatError(
        f"names of files in data must be relative and stay below {redact(root)}; found {name!r:.100}. Do not use data "
        "that you do not trust."
    )


class RangedFile(io.RawIOBase):
    """An object of a store as a file, of which a window is held. A request costs more than some bytes, so the windows
    of a reader that hops from header to header, small at first, grow where headers lie close."""

    def __init__(self, file: SourceFile, window: int = _BUFFER_BYTES) -> None:
        self._file = file
        self._at = 0
        self._view = memoryview(b"")
        self._begin = 0
        self._least = window
        self._window = window

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.num_bytes)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        past = self._at - self._begin - len(self._view)
        if past >= 0 or self._at < self._begin:
            is_close = self._view and 0 <= past < _CLOSE_BYTES
            self._window = min(4 * self._window, _BUFFER_BYTES) if is_close else self._least
            end = min(self._at + max(self._window, len(buffer)), self._file.num_bytes)
            self._begin = self._at
            self._view = self._file.view(self._at, end)
        first = self._at - self._begin
        data = self._view[first : first + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def rows_at(data: Any, begins: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Return ``width`` bytes from each of these positions: uint8[n, width]; a view where their distances are equal."""
    if not width or not len(begins):
        return np.empty((len(begins), width), np.uint8)
    flat = np.frombuffer(data, np.uint8)
    steps = np.diff(begins)
    step = int(steps[0]) if len(steps) else width
    if step > 0 and (steps == step).all():
        return np.lib.stride_tricks.as_strided(flat[int(begins[0]) :], (len(begins), width), (step, 1), writeable=False)
    cells: Any = np.ndarray((len(flat) - width + 1,), f"V{width}", flat, 0, (1,))  # overlapping, one at every position
    rows: NDArray[np.uint8] = cells[begins].view(np.uint8).reshape(len(begins), width)
    return rows


class Listing(NamedTuple):
    """The files of a source, sorted by name, and what lies beside them.

    Attributes:
        name: The folder or URL, for messages.
        files: Those that are read.
        log: Those of the log of a Delta table, in its own folder.
        is_table: Whether the files are some of a Delta table.
        left_out: The names of files that look like data, but are hidden.
    """

    name: str
    files: Files
    log: Files = ()
    is_table: bool = False
    left_out: Sequence[str] = ()


def find_files(
    source: Uris, options: Options | None = None, *, hidden: bool = False, out: Sequence[str] = ()
) -> Listing:
    """Return the files of a source: those of a folder or pattern, of one name, or of a list of these in its order.

    What is written into a folder below it, one of `out`, is no part of it.
    """
    place: Any = source
    is_list = isinstance(place, Iterable) and not isinstance(place, (str, Mapping))
    uris = list(place) if is_list else [place]
    if not uris or not all(isinstance(uri, (str, os.PathLike)) for uri in uris):
        raise ValueError(f"a source must be a path, a URL, a pattern, or a list of these; got {source!r:.80}.")
    listings = [_listed(os.fspath(uri), options, hidden, [f"{folder}/" for folder in out]) for uri in uris]
    files = [file for listing in listings for file in listing.files]
    twice = [uri for uri, count in Counter(file.uri for file in files).items() if count > 1]
    if twice:
        raise ValueError(f"a source must name each file once; it names {twice[0]} twice. Remove one of them.")
    log = listings[0].log if len(listings) == 1 else ()
    name = redact(f"{', '.join(os.fspath(uri) for uri in uris):.200}")
    left_out = [name for listing in listings for name in listing.left_out]
    return Listing(name, files, log, any(listing.is_table for listing in listings), left_out)


def _listed(uri: str, options: Options | None, hidden: bool, out: Sequence[str]) -> Listing:
    place = uri.rstrip("/") if is_remote(uri) else str(LocalStore.from_url(uri, {}).folder)
    options = options if is_remote(uri) else None
    parts = place.split("/")
    wild = (k for k, part in enumerate(parts) if WILD.search(part))
    literal = len(parts) if _is_folder(place) else next(wild, len(parts))
    for end in (literal, len(parts) - 1):  # a folder or a pattern; else one file
        listing = files_of(open_store("/".join(parts[:end]) or "/", options), "/".join(parts[end:]), hidden=hidden)
        if literal < len(parts) or listing.files or listing.log:
            break
    below = tuple(place for place in out if not f"{listing.name}/".startswith(place))
    files = [file for file in listing.files if not f"{file.root}/{file.name}".startswith(below)]
    listing = listing._replace(files=files)
    if not files:
        raise NotFoundError(f"a source must name files; {redact(uri)} names none. Check the path.")
    return listing


def _is_folder(uri: str) -> bool:
    return not is_remote(uri) and Path(uri).is_dir()


def files_of(store: Store, names: str = "", *, hidden: bool = False) -> Listing:
    """Return all files of a store.

    With `names`, only those of this name, in a folder of this name, or whose names match this pattern: ``*`` and ``?``
    stand for any characters of one name, and ``**/`` for folders at any depth. Names that begin with ``_`` or ``.`` are
    left out, unless ``hidden``, or a pattern that has such a name; they are logged if they look like data.
    """
    literal = WILD.split(names)[0]
    is_match = _pattern(names if names != literal else f"{names}/**/*").fullmatch
    entries = []
    for entry in store.list(literal):
        if f"/{DELTA_LOG}" in entry.name:
            folder = f"{store.url}/{entry.name.partition(f'/{DELTA_LOG}')[0]}/"
            raise ValueError(f"a Delta table must be opened by its own folder; {redact(folder)} is one. Pass that.")
        if not names or entry.name == names or is_match(entry.name):
            entries.append(entry)
    if entries and _RANGE.search(names) and not WILD.search(_RANGE.sub("", names)):
        known = {entry.name for entry in entries}
        if absent := next((name for name in _names_of(names) if name not in known), None):
            count = math.prod(int(last) - int(first) + 1 for first, last in _RANGE.findall(names))
            raise NotFoundError(
                f"all files of a range must be there; {store.url} lacks {count - len(known):,} of {names}, the first "
                f"is {absent}. Correct the range, or write the files."
            )
    log = [entry for entry in entries if entry.name.startswith(DELTA_LOG) and entry.num_bytes]
    rule = _MARKER if hidden or _HIDDEN.search(names) else _HIDDEN
    shown = [entry for entry in entries if not _ASTRAY.search(entry.name) and not rule.search(entry.name)]
    if isinstance(store, LocalStore):
        _check_names(store, shown)
    left_out = _left_out(entries, shown)
    if left_out:
        _log.warning(
            "%s: %d files are left out, since names begin with '_' or '.', e.g. %s. To read them, pass "
            "Stream(hidden=True), to convert source_options={'hidden': True}, or a pattern that has such a name.",
            store.url, len(left_out), left_out[0],
        )  # fmt: skip
    has_log = bool(log) or (bool(names and shown) and is_table(store))
    return Listing(store.url, _files(store, shown), _files(store, log), has_log, left_out)


def _check_names(store: LocalStore, entries: Sequence[ObjectEntry]) -> None:
    """Raise ValueError for a name that is no text, and NotFoundError for a link to nothing: no file may be lost."""
    for entry in entries:
        if _NO_TEXT.search(entry.name):
            raise ValueError(f"names of files must be UTF-8; rename {entry.name!r} in {store.url}.")
        if not entry.version:
            raise NotFoundError(f"{store.url}/{entry.name} is a link to a file that is gone. Restore or remove it.")


def _left_out(entries: Sequence[ObjectEntry], shown: Sequence[ObjectEntry]) -> list[str]:
    """The names of the files that are not shown, but look like data, as those that are shown."""
    known = {entry.name for entry in shown}
    endings = {_suffix(entry.name) for entry in shown}
    others = [entry.name for entry in entries if entry.name not in known and not _MARKER.search(entry.name)]
    return [name for name in others if not shown or _suffix(name) in endings]


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - a path object for each costs more


def _files(store: Store, entries: Sequence[ObjectEntry]) -> list[SourceFile]:
    return [
        SourceFile(store.url, entry.name, entry.num_bytes, entry.version, mark=entry.mark, store=store)
        for entry in entries
    ]


def split_place(uri: str) -> tuple[str, str]:
    """Cut a path or URL into the folder and what names its files: a pattern, or a last part that ends like a file.

    A folder may end like a file, too, as Spark names tables: see `files_of`. One of this machine may have any name.
    """
    scheme, colon, path = uri.rpartition("://")
    if scheme.startswith("http") or (WILD.search(uri) and _is_folder(uri)):
        return uri, ""
    parts = path.split("/")
    first = 3 if scheme == "hf" else 1 if colon else 0  # after the bucket, or the repository
    wild = next((k for k, part in enumerate(parts) if k >= first and WILD.search(part)), None)
    if wild is None and len(parts) > first and _FILE.search(parts[-1]):
        wild = len(parts) - 1
    if wild is None:
        return uri, ""
    if colon:
        refuse_query(uri)  # a pattern may have a question mark, but no signature
    folder = "/".join(parts[:wild]) or ("/" if wild else ".")
    return f"{scheme}{colon}{folder}", "/".join(parts[wild:])


def is_table(store: Store) -> bool:
    """Return whether a store holds a Delta table."""
    return any(True for _ in store.list(DELTA_LOG))


def _names_of(pattern: str) -> Iterator[str]:
    """What the ranges of a pattern stand for, as WebDataset names its shards: ``{08..11}.tar`` is four names."""
    begin, *parts = _RANGE.split(pattern, maxsplit=1)
    if not parts:
        yield pattern
        return
    first, last, rest = parts
    for value in range(int(first), int(last) + 1):
        yield from (f"{begin}{value:0{len(first)}}{end}" for end in _names_of(rest))


def _pattern(text: str) -> re.Pattern[str]:
    """A pattern as a regular expression, short for a range of any size; all names if it is empty."""
    wild = {"**/": "(.*/)?", "*": "[^/]*", "?": "[^/]"}
    begin, *rest = _PARTS.split(text)
    expression = re.escape(begin)
    for part, first, last, after in zip(*(rest[k::4] for k in range(4)), strict=True):
        expression += (wild.get(part) or _numbers(first, last)) + re.escape(after)
    return re.compile(expression or ".*", re.DOTALL)  # a name may hold a line end


def _numbers(first: str, last: str) -> str:
    """An expression for the numbers of a range, in blocks whose last digits may be any."""
    blocks = []
    value = int(first)
    while value <= int(last):
        text = f"{value:0{len(first)}}"
        size = 0
        while size < len(text) and value % 10 ** (size + 1) == 0 and value + 10 ** (size + 1) <= int(last) + 1:
            size += 1
        blocks.append(f"{text[: len(text) - size]}[0-9]{{{size}}}")
        value += 10**size
    return f"(?:{'|'.join(blocks) or '(?!)'})"


def check_unchanged(files: Files) -> None:
    """Raise FormatError if a file of this machine changed since it was listed."""
    for file in files:
        try:
            file.check()
        except (FormatError, NotFoundError) as error:
            raise FormatError(
                f"{file.uri} was modified or removed during the conversion. Nothing was published. Convert again once "
                "the file stays as it is."
            ) from error
