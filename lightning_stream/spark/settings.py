"""`mds_kwargs` of `dataframe_to_mds`, checked before Spark does anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_stream.formats.codecs import check_compression
from lightning_stream.formats.hashing import check_hashes
from lightning_stream.formats.sizes import parse_bytes

_WRITER_KEYS = ("compression", "hashes", "size_limit", "max_workers")
_OWN_KEYS = ("out", "columns", "keep_local", "overwrite", "exist_ok", "progress_bar", "retry", "store_options")


@dataclass(frozen=True)
class Settings:
    """`mds_kwargs`, checked."""

    out: Any
    columns: Mapping[str, str] | None
    writer: Mapping[str, Any]
    keep_local: bool
    overwrite: bool
    progress_bar: bool
    store_options: Mapping[str, Any] | None

    @classmethod
    def read(cls, given: Mapping[str, Any] | None, *, with_udf: bool) -> Settings:
        """Check `mds_kwargs`.

        Raises:
            ValueError: Settings that are wrong; all are named.
            TypeError: It is not a mapping.
        """
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"mds_kwargs must be a dict such as {{'out': ...}}; found {given!r:.60}.")
        held = dict(given or {})
        if held.get("hashes") is not None and not isinstance(held["hashes"], str):
            held["hashes"] = list(held["hashes"])
        problems = []
        if held.get("out") is None:
            problems.append("mds_kwargs needs out: a folder that all machines share, a URL, or (local folder, URL).")
        if not isinstance(held.get("columns") or {}, Mapping):
            problems.append(
                f"columns must be a dict of encodings by name, {{'id': 'int64'}}; found {held['columns']!r:.60}."
            )
        elif with_udf and not held.get("columns"):
            problems.append("with udf_iterable, mds_kwargs needs columns: the encoding of each value of its samples.")
        unknown = sorted(held.keys() - {*_WRITER_KEYS, *_OWN_KEYS})
        if unknown:
            problems.append(f"mds_kwargs has no {', '.join(unknown)}; it takes {', '.join(_OWN_KEYS + _WRITER_KEYS)}.")
        problems += _writer_problems(held)
        if problems:
            raise ValueError(" ".join(problems))
        writer = {"compression": "zstd", **{key: held[key] for key in _WRITER_KEYS if key in held}}
        retry = {} if held.get("retry") is None else {"retries": held["retry"]}
        options = {**retry, **(held.get("store_options") or {})} or None
        out = held["out"]
        pair = isinstance(out, (tuple, list))
        return cls(
            tuple(map(_absolute, out)) if pair else _absolute(out),
            held.get("columns"),
            writer,
            bool(held.get("keep_local", False)),
            bool(held.get("overwrite") or held.get("exist_ok")),
            bool(held.get("progress_bar", False)),
            options,
        )

    def result(self) -> tuple[str, str]:
        """The return value of `dataframe_to_mds`."""
        if isinstance(self.out, tuple):
            return (self.out[0], self.out[-1])
        remote = "://" in self.out or self.out.startswith("dbfs:")
        return ("", self.out) if remote else (self.out, "")


def _absolute(out: str | os.PathLike[str]) -> str:
    """A path or URL that is the same in every process: an executor's working folder is not the driver's."""
    uri = os.fspath(out)
    return uri if not uri or "://" in uri or uri.startswith("dbfs:") else str(Path(uri).absolute())


def _writer_problems(held: Mapping[str, Any]) -> Iterator[str]:
    """What the writer in an executor would refuse, found here, without a task's long error around it."""
    hashes = held.get("hashes")
    if isinstance(hashes, str):
        yield f"hashes must be a list of names, such as [{hashes!r}]; found {hashes!r}."
    else:
        yield from _refusal(check_hashes, hashes)
    yield from _refusal(check_compression, held.get("compression") or None)
    if held.get("size_limit") is not None:
        yield from _refusal(partial(parse_bytes, name="size_limit"), held["size_limit"])


def _refusal(check: Callable[[Any], Any], value: Any) -> Iterator[str]:
    try:
        check(value)
    except (ValueError, TypeError) as error:
        yield str(error)
