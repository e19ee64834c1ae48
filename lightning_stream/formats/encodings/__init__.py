"""The register of encodings: the 28 names of MDS, ``tensors``, ``video``, ``audio``, and those that users register."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, TypeAlias

from lightning_stream.formats.encodings import arrays, images, media, scalars, text

from .base import AdaptedEncoding, BinaryColumn, Encoding, NumericLayout

__all__ = ["Encoding", "NumericLayout", "encoding_names", "get_encoding", "plain_values", "register_encoding"]

ENTRY_POINT_GROUP = "lightning_stream.encodings"
Maker: TypeAlias = Callable[[str], Encoding]  # makes the encoding of a name
_REGISTER: dict[str, Maker] = {
    **scalars.ENCODINGS, **text.ENCODINGS, **arrays.ENCODINGS, **images.ENCODINGS, **media.ENCODINGS
}  # fmt: skip


ROW_ENCODINGS: dict[str, Encoding] = {
    "fault": text.RowFault("fault"),
    "str": text.RowText("str"),
    "int": scalars.PlainNumber("int", "int64"),
    "float": scalars.PlainNumber("float", "float64"),
}


def register_encoding(
    name: str,
    encoding: Encoding | None = None,
    *,
    encode: Callable[[Any], bytes] | None = None,
    decode: Callable[[bytes], Any] | None = None,
    size: int | None = None,
    safe: bool = True,
    replace: bool = False,
) -> None:
    """Register an encoding for writing and reading: an `Encoding` object, or a pair of functions.

    Call it before datasets are opened, in every process that reads; a worker process that is not forked must import
    your module. An entry point of the group ``lightning_stream.encodings`` registers an encoding without any call.

    Example::

        register_encoding("hex", encode=bytes.fromhex, decode=bytes.hex)
        with MDSWriter(out="data", columns={"key": "hex"}) as writer:
            writer.write({"key": "00ff"})

    `Encoding` shows how to make whole batches of an encoding fast.

    Args:
        name: The name in ``columns`` and in the index, without ``:``.
        encoding: An object with ``encode``, ``decode``, ``size`` and ``safe``.
        encode, decode: In place of ``encoding``: functions from value to bytes, and from bytes to value.
        size: Bytes of every encoded value, if that is one number. Such columns are read faster.
        safe: False if decoding could run code that is in hostile data, as pickle does.
        replace: Allow a name that exists.

    Raises:
        ValueError: The name is taken, or holds ``:``.
        TypeError: It is neither an encoding nor both functions.
    """
    if encoding is None and (encode is None or decode is None):
        raise TypeError(f"encoding {name!r}: give an Encoding object, or both encode= and decode=.")
    functions = SimpleNamespace(encode=encode, decode=decode, size=size, safe=safe)
    made = _adapted(name, functions if encoding is None else encoding)
    if ":" in name or not name:
        raise ValueError(f"encoding names must be non-empty and hold no ':'; got {name!r}.")
    if not replace and name in encoding_names():
        raise ValueError(f"encoding {name!r} exists. Choose another name, or pass replace=True.")
    _REGISTER[name] = lambda _: made
    get_encoding.cache_clear()


@lru_cache(maxsize=1024)
def get_encoding(name: str) -> Encoding:
    """Return the encoding of that name; ValueError with a list of all names if there is none."""
    if not isinstance(name, str):
        raise ValueError(f"an encoding is a name, e.g. 'int' or 'ndarray:float32:3'; got {name!r}.")
    base, colon, _ = name.partition(":")
    make = _REGISTER.get(base) or _from_entry_point(base)
    if make is None or (colon and make is not arrays.make_ndarray):
        raise ValueError(f"no encoding {name!r}; use register_encoding() or one of {', '.join(encoding_names())}.")
    return make(name)


def plain_values(values: Any) -> Any:
    """Return the values of a column as a single sample would have them; bytes of a `BinaryColumn` are decoded."""
    if not isinstance(values, BinaryColumn):
        return values
    encoding = get_encoding(values.encoding)
    if not encoding.safe:
        raise ValueError(f"decoding {values.encoding} can run code that the data names. Omit the column, or keep it.")
    return list(map(encoding.decode_view, values))


def encoding_names() -> list[str]:
    """Return all names that `get_encoding` knows, sorted; ``ndarray`` stands for ``ndarray:<dtype>:<shape>``."""
    return sorted({*_REGISTER, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def _adapted(name: str, made: object) -> Encoding:
    """Return an encoding, or an object with its parts as one."""
    missing = [part for part in ("encode", "decode", "size", "safe") if not hasattr(made, part)]
    if missing:
        raise TypeError(f"encoding {name!r}: it must have {', '.join(missing)}. Subclass Encoding to get them.")
    return made if isinstance(made, Encoding) else AdaptedEncoding(made)


def _from_entry_point(name: str) -> Maker | None:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            try:
                loaded = point.load()
            except (ImportError, AttributeError) as error:
                raise ValueError(
                    f"encoding {name!r} is offered by the entry point {point.value!r}, which cannot be loaded "
                    f"({type(error).__name__}: {error}). Install the package that offers it, or repair it."
                ) from error
            made = _adapted(name, loaded() if isinstance(loaded, type) else loaded)
            return _REGISTER.setdefault(name, lambda _, made=made: made)  # type: ignore[misc]
    return None
