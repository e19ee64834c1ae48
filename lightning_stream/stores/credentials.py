"""Keys that end: what returns them, when they are renewed, and how the processes of a machine share them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import pickle
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lightning_stream.errors import AccessError, LightningStreamError, UnavailableError, summarize
from lightning_stream.fingerprint import function_text
from lightning_stream.shared_files import PRIVATE, FileLock, publish_bytes
from lightning_stream.threads import Lock

from .transfer import NETWORK_ERRORS, PerProcess, is_named

T = TypeVar("T")
AskKeys = Callable[[], Mapping[str, Any]]  # by the names of the store's options, and when they end
ENTRY_POINTS = "lightning_stream.credentials"  # other packages name their functions in this group
VARIABLE = "LIGHTNING_STREAM_CREDENTIALS"  # URL=NAME: for all stores below that URL
_MARGIN = 0.1  # of their lifetime: keys are renewed that long before they end
_MARGIN_S = 300.0  # and no longer
_USELESS_S = 60.0  # new keys that are refused are not replaced any earlier
_WAIT_S = 120.0  # for another process that asks for keys
_FAR_S = 10 * 366 * 86400.0
_log = logging.getLogger("lightning_stream.stores")


@dataclass(frozen=True)
class Keys:
    """What signs requests until it ends.

    Attributes:
        values: By the names of the store's options.
        ends, renew_at: Seconds since 1970.
    """

    values: Mapping[str, Any] = field(repr=False)
    ends: float = math.inf
    renew_at: float = math.inf


class SharedFolder(Protocol):
    """The folder of a cache, whose control folder the processes of a machine share."""

    control: Path

    def run_once(self, name: str, done: Callable[[], T | None], work: Callable[[FileLock], T], wait_s: float) -> T:
        """Have one process do the work under the lock of a name, in a folder that is there."""

    def translated_errors(self) -> AbstractContextManager[None]:
        """Name the folder in errors about it."""


def lasting(values: Mapping[str, Any], ends: float) -> Keys:
    """Keys that are renewed a little before they end."""
    lifetime_s = ends - time.time()
    return Keys(values, ends, ends if ends == math.inf else ends - min(_MARGIN_S, _MARGIN * lifetime_s))


class Renewed:
    """Keys of one process, asked for again before they end. It is thread-safe."""

    def __init__(self, ask: Callable[[], Keys]) -> None:
        self._ask = ask
        self._renewing = Lock()
        self._keys: Keys | None = None

    def get(self) -> Keys:
        """Return keys that have not ended."""
        with self._renewing:
            if self._keys is None or time.time() >= self._keys.renew_at:
                self._keys = self._ask()
            return self._keys


class Credentials:
    """Keys that a function of the user returns, renewed before they end, or when the server refuses them.

    It is thread-safe. Pickled, it has none of the keys. :class:`AccessError` where no usable keys are returned.

    Args:
        ask: Returns the keys, by the names of the store's options, and ``expires_at``: seconds since 1970, a `datetime`
            with a time zone, or text in ISO 8601. Without it, they are renewed only when they are refused.
        where: The URL of the store, for messages.
        names: What the store can sign with; empty: the store takes all names.
    """

    def __init__(self, ask: AskKeys, where: str, names: frozenset[str] = frozenset()) -> None:
        self._ask = ask
        self._where = where
        self._names = names
        self._label = ""
        self.folder: SharedFolder | None = None
        self._keys: Keys | None = None
        self._useless: Keys | None = None  # new ones that were refused, too, with the time until which others would be
        self._renewing = PerProcess(Lock)

    def __getstate__(self) -> dict[str, Any]:
        try:
            pickle.dumps(self._ask)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{self._where}: credentials= is used in worker processes, too, so it must be a function of a module, "
                f"an object that can be pickled, or a name; this one cannot be pickled ({summarize(error)})"
            ) from None
        return {**vars(self), "_label": self._labelled(), "_keys": None, "_useless": None}

    def get(self) -> Keys:
        """Return keys that have not ended."""
        with self._renewing():
            now = time.time()
            keys = self._keys
            if keys is not None and now < keys.renew_at:
                return keys
            try:
                self._keys = self._renewed(lambda other: now < other.renew_at)
            except LightningStreamError as error:
                if keys is None or time.time() >= keys.ends:
                    raise
                _log.warning("the keys still hold for %.0f s, but no new ones came: %s", keys.ends - now, error)
                self._keys = replace(keys, renew_at=now + (keys.ends - now) / 4)
            return self._keys

    def attempt(self, call: Callable[[], T]) -> T:
        """Call; where the server refuses the keys (AccessError), once more with new ones."""
        used = self.get()
        try:
            return call()
        except AccessError:
            if (newer := self._replaced(used)) is None:
                raise
        try:
            return call()
        except AccessError:
            # The user may have no such right: to ask for keys with each request would not help.
            self._useless = replace(newer, ends=time.time() + _USELESS_S)
            raise

    def _replaced(self, refused: Keys) -> Keys | None:
        """Return other keys than those that were refused, of this or another process; None: there is no hope."""
        with self._renewing():
            useless = self._useless
            if useless is not None and useless.values == refused.values and time.time() < useless.ends:
                return None
            if self._keys is None or self._keys.values == refused.values:
                self._keys = self._renewed(lambda other: other.values != refused.values and time.time() < other.ends)
            return None if self._keys.values == refused.values else self._keys

    def _renewed(self, is_usable: Callable[[Keys], bool]) -> Keys:
        """Return the keys that another process of this machine has left, or new ones."""
        if self.folder is None:
            return self._new()
        with self.folder.translated_errors():
            path = self.folder.control / f"keys-{self._labelled()}.json"

            def left() -> Keys | None:
                keys = _read(path)
                return keys if keys is not None and is_usable(keys) else None

            def ask() -> Keys:
                keys = self._new()
                publish_bytes(json.dumps(asdict(keys)).encode(), path, PRIVATE, durable=False)
                return keys

            return self.folder.run_once(path.name, left, lambda _: ask(), _WAIT_S)

    def _new(self) -> Keys:
        try:
            return self._checked(self._ask())
        except LightningStreamError:
            raise
        except Exception as error:  # noqa: BLE001 - of a user's function
            kind = UnavailableError if is_named(error, NETWORK_ERRORS) else AccessError
            message = (
                f"{self._where}: credentials= returned no keys ({summarize(error)}). Call it by itself to see why."
            )
        raise kind(message)  # without a link to the error, whose frames and text may hold keys

    def _checked(self, returned: object) -> Keys:
        fields = returned if isinstance(returned, Mapping) else {}
        values = {name: value for name, value in fields.items() if value is not None}
        now = time.time()
        ends = _seconds(values.pop("expires_at", None))
        if not values or (self._names and not self._names >= values.keys()):
            names = ", ".join(sorted(self._names)) or "options of the store"
            actual = ", ".join(sorted(map(str, values))) or f"no keys, but a {type(returned).__name__}"
            raise AccessError(
                f"{self._where}: credentials= returns {names}, and expires_at, as a dict; it returned {actual}. "
                "Correct the function."
            )
        if ends <= now or now + _FAR_S < ends < math.inf:
            raise AccessError(
                f"{self._where}: credentials= returns keys that end later than now, and expires_at in seconds since "
                f"1970; these end in {ends - now:,.0f} s. Check the function, and this machine's clock."
            )
        return lasting(values, ends)

    def _labelled(self) -> str:
        """What stands for these credentials, and this user, in the name of a file."""
        if not self._label:
            text = f"{os.getuid()} {self._where} {function_text(self._ask)}"
            self._label = hashlib.sha256(text.encode()).hexdigest()[:24]
        return self._label


@dataclass(frozen=True)
class Named:
    """A function by its name: an entry point of the group, or ``package.module:function``."""

    name: str

    def __call__(self) -> Mapping[str, Any]:
        """Return its keys."""
        keys: Mapping[str, Any] = self.function()()
        return keys

    def function(self) -> AskKeys:
        """The function; ValueError for a name that has none."""
        points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        module, is_path, name = self.name.partition(":")
        try:
            if not is_path and module not in points:
                raise LookupError("no such entry point")
            function = getattr(import_module(module), name) if is_path else points[module].load()
            if not callable(function):
                raise TypeError(f"it is a {type(function).__name__}")
            return function  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001 - whatever a module of the user raises when it is imported
            known = ", ".join(sorted(points)) or "none is installed"
            raise ValueError(
                f"credentials= names a function, package.module:function, or an entry point of the group "
                f"{ENTRY_POINTS} ({known}); got {self.name!r} ({summarize(error)}). Correct the name; its module must "
                "be found on every node: install it there, or add its folder to PYTHONPATH."
            ) from None


def asked(credentials: Any, url: str) -> AskKeys | None:
    """What returns the keys of a URL: what the user gave, or what the variable names for it; None for neither."""
    if credentials is None and (value := os.environ.get(VARIABLE)):
        root, _, name = value.rpartition("=")
        if ":/" not in root:
            raise ValueError(f"{VARIABLE} is URL=NAME, e.g. s3://bucket=my_keys:train_bucket; got {value!r}")
        if f"{url}/".startswith(f"{root.rstrip('/')}/"):
            credentials = name
    if credentials is None:
        return None
    if isinstance(credentials, str):
        credentials = Named(credentials)
        credentials.function()
    if not callable(credentials):
        raise TypeError(
            f"credentials= is a function without arguments, or its name; got a {type(credentials).__name__}"
        )
    return credentials  # type: ignore[no-any-return]


def _seconds(when: Any) -> float:
    """A time as seconds since 1970."""
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise ValueError("expires_at needs a time zone")
        when = when.timestamp()
    return math.inf if when is None else float(when)


def _read(path: Path) -> Keys | None:
    """The keys in a file, if it is this user's own, whole, and nobody else can read it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            return None
        try:
            return Keys(**json.load(file))
        except (ValueError, TypeError):  # the machine ended while it was written, or another release wrote it
            return None
