"""The errors this package raises for trouble in the world.

A wrong argument is a ``ValueError`` (wrong value) or ``TypeError`` (wrong type). Every message says the rule, what was
found, and what to do.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

_MODULES = {"pillow": "PIL"}  # of packages whose module has another name than their first word
_OF_LITDATA = {  # its names of arguments
    "input_dir": "remote",
    "cache_dir": "local",
    "seed": "shuffle_seed",
    "max_cache_size": "cache_limit",
}
_Rule = tuple[str, Callable[[Any], bool]]  # what a value must be, in words and as a test
_PLAIN: dict[str, _Rule] = {  # by type, as annotations write it
    "bool": ("True or False", lambda value: value in (True, False)),  # also numpy's
    "int": ("an integer", lambda value: hasattr(value, "__index__") or getattr(value, "is_integer", bool)()),
    "float": ("a number", lambda value: hasattr(value, "__float__") or hasattr(value, "__index__")),
    "str": ("a string", lambda value: isinstance(value, (str, os.PathLike))),
    "os.PathLike[str]": ("a path", lambda value: isinstance(value, os.PathLike)),
}
_MADE: dict[str, Callable[[Any], Any]] = {  # by the words of a rule: what becomes of a value
    "True or False": bool,
    "an integer": lambda value: value if isinstance(value, bool) else int(value),
    "a string": os.fspath,
}
F = TypeVar("F", bound=Callable[..., Any])


class LightningStreamError(Exception):
    """Base of all errors of this package that are not plain wrong arguments."""


class FormatError(LightningStreamError):
    """Bytes are not what their format says: index, shard or compressed file."""


class DigestError(FormatError):
    """A file's size or hash differs from what its index promises."""


class StoreError(LightningStreamError):
    """A store could not do what was asked."""


class NotFoundError(StoreError, FileNotFoundError):
    """No such object, bucket or folder in the store."""


class NoBucketError(NotFoundError):
    """No such bucket or container."""


class AlreadyExistsError(StoreError, FileExistsError):
    """`put(if_absent=True)` found an object of that name."""


class ConflictError(StoreError):
    """`put(if_version=...)` found another version of the object, or none."""


class AccessError(StoreError):
    """Credentials are missing, wrong, or lack the right that was needed."""


class UnavailableError(StoreError):
    """The store still failed after all retries: throttled, reset, stalled or timed out."""

    is_throttled = False  # whether the store asked for fewer requests
    wait_s = 0  # what it asked to wait (Retry-After)


class CacheError(LightningStreamError):
    """The local cache could not take or give a shard."""


class CacheFullError(CacheError):
    """The disk or `cache_limit` is too small for what must be held at once."""


class LockTimeoutError(CacheError):
    """Another process held a shard's lock beyond the deadline."""


class StateError(LightningStreamError):
    """A saved position cannot be continued by this run."""


class VersionMismatch(StateError):
    """The state was written by a version that this one does not know."""


class SnapshotMismatch(StateError):
    """The dataset is not the one the state was written over."""


class SettingsMismatch(StateError):
    """An order setting differs from the one the state was written under."""


class LedgerError(LightningStreamError):
    """The samples trained on are not the samples planned."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed."""


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """Make the error for an absent distribution, e.g. ``missing_extra("boto3", "s3", "reading s3:// URLs")``."""
    return MissingExtraError(
        f"{purpose} needs the package {package!r}, which is not installed. "
        f"Install it with:  pip install 'lightning-stream[{extra}]'"
    )


@contextmanager
def needs(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Raise :func:`missing_extra` where an import in this block fails since the package is absent."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = _MODULES.get(package, package.partition("-")[0])
        if error.name is not None and error.name.partition(".")[0] != module:
            raise  # another one is absent, or part of our own is
        raise missing_extra(package, extra, purpose) from error


def checking(function: F) -> F:
    """Let a function, or a constructor, refuse arguments that it does not have, and values of another type than theirs.

    Else any text would be a yes, also "false". What an argument may be is read off its annotation, where this has plain
    types; None may be anywhere. The function gets values of these types, so that a state is the same of 1 as of True,
    and of numpy's numbers. The error for an unknown argument names the one that was probably meant.
    """
    if isinstance(function, type):  # a dataclass
        function.__init__ = checking(function.__init__)  # type: ignore[misc]
        return function
    parameters = signature(function).parameters
    names = list(parameters)
    in_order = [name for name, parameter in parameters.items() if parameter.kind is not Parameter.KEYWORD_ONLY]
    takes_more = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    rules = {name: allowed for name, text in function.__annotations__.items() if (allowed := _rules(str(text)))}

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        called: Any = type(args[0]) if function.__name__ == "__init__" else function
        if not takes_more and not kwargs.keys() <= {*names}:
            refuse_unknown(called.__name__, kwargs, [*names, *signature(called).parameters])
        values = [_checked(name, value, rules.get(name)) for name, value in zip(in_order, args, strict=False)]
        options = {name: _checked(name, value, rules.get(name)) for name, value in kwargs.items()}
        return function(*values, *args[len(values) :], **options)

    return cast(F, checked)


def _checked(name: str, value: Any, rules: Sequence[_Rule] | None) -> Any:
    """The value of an argument as one of Python's own types, by its rules. ValueError where it keeps none of them."""
    hydra = sys.modules.get("omegaconf")
    if hydra is not None and hydra.OmegaConf.is_config(value):
        value = hydra.OmegaConf.to_container(value, resolve=True)
    if value is None or rules is None:
        return value
    value = plain(value)
    for words, test in rules:
        if test(value):
            return _MADE[words](value) if words in _MADE else value
    words = " or ".join(words for words, _ in rules)
    raise ValueError(f"{name} must be {words}; found {redact(repr(value)):.60}. Correct it")


def plain(value: Any) -> Any:
    """A number of numpy or torch, or a string of another class, as one of Python; any other value as it is."""
    if isinstance(value, str):
        return str.__str__(value)
    return value.item() if getattr(value, "shape", None) == () else value


def _rules(annotation: str) -> list[_Rule]:
    """The rules of an annotation, of which a value keeps one; none where it has other types than plain ones."""
    types = [name for name in annotation.split(" | ") if name != "None"]
    if not all(name in _PLAIN or name.startswith("Literal['") for name in types):
        return []
    return [_PLAIN[name] if name in _PLAIN else _word(literal_eval(f"({name[8:-1]},)")) for name in types]


def _word(words: Sequence[str]) -> _Rule:
    """The rule of a ``Literal`` of words."""
    text = " or ".join(map(repr, words)) if len(words) < 3 else f"one of {', '.join(words)}"
    return text, lambda value: isinstance(value, str) and value in words


def refuse_unknown(called: str, arguments: Iterable[str], names: Sequence[str]) -> None:
    """Raise TypeError for an argument that a function does not have; it names the one that was probably meant.

    `names` may hold ``self`` and ``options``, which are no arguments.
    """
    names = [name for name in dict.fromkeys(names) if name not in ("self", "options")]
    for name in arguments:
        if name not in names:
            close = get_close_matches(_OF_LITDATA.get(name, name), names, 1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"Its arguments are {', '.join(names)}"
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}. {remedy}")


def refuse_overrides(
    kind: type, base: type, remedies: Mapping[str, str], rule: str = "samples are read by get_item or __getitem__"
) -> None:
    """Raise TypeError where a subclass of `base` overrides a method that would never be called, with its remedy."""
    for name, remedy in remedies.items():
        method = getattr(kind, name, None)
        is_ours = getattr(method, "__module__", "").startswith("lightning_stream.")
        if method is not getattr(base, name, None) and not is_ours:
            raise TypeError(f"{rule}; found {kind.__name__}.{name}, which would never be called. Instead, {remedy}")


def by_name(what: str, value: Any, example: str, *, calls: bool = False) -> dict[str, Any]:
    """A mapping by name as a dict, an empty one of None. TypeError for anything else; with `calls`, for no functions.

    ``what`` says what it must be. The error has no values, since those of some mappings are secret.
    """
    with suppress(TypeError, ValueError):
        named = {} if value is None else {plain(name): plain(content) for name, content in dict(value).items()}
        are_names = all(isinstance(name, str) for name in named)
        if are_names and (not calls or all(map(callable, named.values()))):
            return named
    types = {name: type(content).__name__ for name, content in value.items()} if isinstance(value, Mapping) else ""
    raise TypeError(f"{what} by name, e.g. {example}; got {type(value).__name__} {types}")


def note_names(error: Exception, sample: Any) -> None:
    """Add the names that a sample has to the error for one that it does not have."""
    if isinstance(error, KeyError) and isinstance(sample, dict):
        error.add_note(f"The sample has {', '.join(map(str, sample))}.")


# Up to the last @: passwords may hold others. Some hold a slash, or follow a mistyped scheme; a port is no password.
_USERINFO = re.compile(
    r"(?<=://)[^/?#\s]*@|(?<=://)[^/?#\s:@]+:(?!:|\d+/)[^\s'\"@]*@|(?<=[/:])[^\s/:@'\"]+:[^\s/:@'\"]+@"
)
_QUERY = re.compile(r"(?<=\S)\?[^\s'\")>]*=[^\s'\")>]*")
_SECRET = re.compile(
    r"(?i)\b(authorization|bearer|\w*token|\w*password|passwd|\w*secret\w*|sig|signature|accountkey|api_?key"
    r"|access_?key|sharedaccesssignature)\b"
    r"(\"?'?\s*[:= ]\s*\"?'?)(?:bearer\s+|basic\s+)?[^\s,;&'\"]{4,}"
)


_SECRET_NAME = re.compile(
    r"(?i)secret|passw|passphrase|credential|connection_?string|authorization|signature"
    r"|(access|account|api|private|shared|client)_?key|(^|_)(sas|sas_token|(access|auth|session|security)_token)$"
)
_SECRET_OF_STORE = re.compile(r"(?i)token(?!i)|key|headers|(^|_)sas")
_VARIABLE = re.compile(r"[A-Z0-9_]+_(TOKEN|KEY|PAT|SAS)")
_NAME_OF_FILE = re.compile(r"(?i)(file|filename|path|dir)$")
_SECRET_VALUE = re.compile(
    r"(?i)\b(accountkey|sharedaccess\w+|sig|[\w-]*(?:signature|secret|password|token))=[^\s;&]{4,}|://[^/@\s:]*:[^/@\s]+@"
)


def is_secret(name: str, value: object, *, of_store: bool = False) -> bool:
    """Whether a setting holds a secret, by its name or its text: one that comes from the environment, and is not kept.

    The name of a file with secrets is none. Among the options of a store, each key and token is one.
    """
    if isinstance(value, str) and _SECRET_VALUE.search(value):
        return True
    if value is None or isinstance(value, bool) or _NAME_OF_FILE.search(name):
        return False
    named = _SECRET_NAME.search(name) or _VARIABLE.fullmatch(name) or (of_store and _SECRET_OF_STORE.search(name))
    return bool(named)


def redact(text: str) -> str:
    """The text without what may be secret in it: user and password of URLs, their query strings, `token=...`."""
    text = _QUERY.sub("?...", _USERINFO.sub("", text))
    return _SECRET.sub(r"\1\2***", text)


def without_secrets(record: logging.LogRecord) -> bool:
    """Hide what authorises requests in what a library logs: queries that sign, tokens, what a program of keys said."""
    record.msg = redact(record.getMessage())
    record.args = ()
    if record.exc_info:
        record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        record.exc_info = None
    return True


def summarize(error: BaseException) -> str:
    """A client library's error in one scrubbed line."""
    text = " ".join(redact(str(error)).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def has_terminal() -> bool:
    """Whether stderr is a terminal; a program may have been started without any stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


def write_stderr(text: str) -> None:
    """Write to stderr at once, where there is one."""
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()
